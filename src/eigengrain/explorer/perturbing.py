"""One image that is changed in a thread of its own, so that the page can show it on its way and stop it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event, Thread

from torch import Tensor

from eigengrain.explain.animation import rgb_pixels
from eigengrain.explain.perturbation import TOWARD, EigenPerturbation
from eigengrain.explorer.limits import MAX_SECONDS, MAX_STEPS
from eigengrain.explorer.session import Lens, Look

#: seconds between two looks
INTERVAL = 0.3


@dataclass(frozen=True, eq=False)
class Progress:
    """How far a perturbation has come.

    Args:
        step: updates made.
        steps: updates that were asked for.
        losses: before each update.
        pixels: the image as it is now, uint8 (3, H, W).
        ended: why it ended, or nothing while it goes on.
    """

    step: int
    steps: int
    losses: list[float]
    pixels: Tensor
    ended: str = ""


class _Watched(EigenPerturbation):
    """Keeps what goes into the network, so that it can be looked at, and takes the network for one step at a time."""

    def __init__(self, lens: Lens, **options: float):
        super().__init__(lens.model, **options)  # type: ignore[arg-type]
        self.lens = lens
        self.latest: Tensor | None = None

    def covariance(self, images: Tensor) -> Tensor:
        self.latest = images.detach().clone()
        with self.lens.alone():
            return super().covariance(images)


class Perturbation:
    """A perturbation that runs until its steps are made, its time is over, or someone stops it.

    Args:
        lens: model.
        look: image.
        toward: ``large`` or ``small``.
        split: eigenvalues that count as large.
        steps: 1 to 1000.
        lr: rate, in normalised pixels.
        seconds: after which it ends by itself.

    Raises:
        ValueError: for a number that is out of range.
    """

    def __init__(
        self, lens: Lens, look: Look, toward: str, split: int, steps: int, lr: float, seconds: float = MAX_SECONDS
    ):
        if toward not in TOWARD:
            raise ValueError(f"an image is changed toward {' or '.join(TOWARD)} eigenvalues")
        if not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"steps must be from 1 to {MAX_STEPS}, got {steps}")
        if not 0 < lr <= 1:
            raise ValueError(f"the rate must be above 0 and at most 1, got {lr:g}")
        lens.subsets(split)
        self.look, self.toward, self.split, self.steps = look, toward, split, steps
        self._method = _Watched(lens, lr=lr)
        self._seconds = seconds
        self._losses: list[float] = []
        self._asked, self._finished = Event(), Event()
        self._final: Tensor | None = None
        self._ended = "failed"  # unless it is said otherwise
        self._thread = Thread(target=self._work, name="perturbation", daemon=True)

    def stop(self) -> None:
        """End it after the present step."""
        self._asked.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""
        return self._finished.wait(seconds)

    def updates(self, interval: float = INTERVAL) -> Iterator[Progress]:
        """Start it, and look at it from time to time; the last look is at its end. It is stopped when nobody looks on."""
        self._thread.start()
        try:
            while not self._finished.wait(interval):
                yield self._now()
            yield self._now()
        finally:
            self.stop()

    def _now(self) -> Progress:
        image = self._final if self._final is not None else self._method.latest
        losses = list(self._losses)
        shown = self.look.pixels if image is None else rgb_pixels(image[0], self._method.mean, self._method.std)
        return Progress(len(losses), self.steps, losses, shown, self._ended if self._finished.is_set() else "")

    def _work(self) -> None:
        until = time.monotonic() + self._seconds
        in_time = True

        def on_step(step: int, losses: Tensor) -> bool:
            nonlocal in_time
            self._losses.append(float(losses[0]))
            in_time = time.monotonic() < until
            return in_time and not self._asked.is_set()

        try:
            result = self._method.perturb(
                self.look.inputs, self.toward, self.split, self.steps, progress=False, on_step=on_step
            )
            self._final = result.images
            late = f"after {self._seconds:g} seconds, which is the limit"
            self._ended = "done" if not result.stopped else "stopped" if in_time else late
        except ValueError as error:
            self._ended = str(error)
        finally:
            self._finished.set()
