"""Perturb an image in a thread, so that the page can show its progress and stop it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from threading import Event, Thread

from torch import Tensor

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain.perturbation import EigenPerturbation
from eigengrain.explain.plots import rgb_pixels
from eigengrain.explorer import limits
from eigengrain.explorer.session import Analysis, Session
from eigengrain.names import DIRECTIONS

#: seconds between two updates of the page
INTERVAL = 0.3


class State(Enum):
    """State of a perturbation; the value is for readers."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    OUT_OF_TIME = "stopped at the time limit"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class Progress:
    """Progress of a perturbation."""

    step: int  # number of updates made
    steps: int  # number of updates requested
    losses: list[float]  # before each update
    pixels: Tensor  # current image, uint8 (3, H, W)
    state: State = State.RUNNING
    error: str = ""  # its message if it failed


class _SharedPerturbation(EigenPerturbation):
    """Stores the current image, and reserves the model for one step at a time."""

    def __init__(self, session: Session, lr: float):
        super().__init__(session.model, lr=lr)
        self.session = session
        self.latest: Tensor | None = None

    def covariance(self, images: Tensor) -> Tensor:
        self.latest = images.detach().clone()
        with self.session.exclusive():
            return super().covariance(images)


class PerturbationRun:
    """A perturbation that runs until its steps are done, its time is up, or it is stopped.

    The learning rate is in normalised pixels; ``finished`` is set at the end.

    Raises:
        ValueError: for an argument that is out of range.
    """

    def __init__(self, session: Session, analysis: Analysis, toward: str, split: int, steps: int, lr: float):
        if toward not in DIRECTIONS:
            raise UnknownName("direction", toward, DIRECTIONS)
        if not 1 <= steps <= limits.MAX_STEPS:
            raise ArgumentError("steps", f"must be from 1 to {limits.MAX_STEPS}", steps)
        if not 0 < lr <= 1:
            raise ArgumentError("lr", "must be above 0 and at most 1", lr)
        session.subsets(split)  # checks the split
        self.analysis, self.toward, self.split, self.steps = analysis, toward, split, steps
        self._method = _SharedPerturbation(session, lr)
        self._losses: list[float] = []
        self._stop, self.finished = Event(), Event()
        self._final: Tensor | None = None
        self._state, self._error = State.FAILED, ""  # until it ends in another way
        self._thread = Thread(target=self._work, name="perturbation", daemon=True)

    def stop(self) -> None:
        """Stop after the current step."""
        self._stop.set()

    def updates(self, interval: float = INTERVAL) -> Iterator[Progress]:
        """Start, and yield the progress at intervals and at the end. Closing the iterator stops the perturbation."""
        self._thread.start()
        try:
            while not self.finished.wait(interval):
                yield self.progress()
            yield self.progress()
        finally:
            self.stop()

    def progress(self) -> Progress:
        """The current progress."""
        state = self._state if self.finished.is_set() else State.RUNNING
        image = self._final if self._final is not None else self._method.latest
        losses = list(self._losses)
        pixels = self.analysis.pixels if image is None else rgb_pixels(image[0], self._method.mean, self._method.std)
        return Progress(len(losses), self.steps, losses, pixels, state, self._error)

    def _work(self) -> None:
        deadline = time.monotonic() + limits.MAX_SECONDS
        in_time = True

        def on_step(step: int, losses: Tensor) -> bool:
            nonlocal in_time
            self._losses.append(float(losses[0]))
            in_time = time.monotonic() < deadline
            return in_time and not self._stop.is_set()

        try:
            result = self._method.perturb(
                self.analysis.inputs, self.toward, self.split, self.steps, progress=False, on_step=on_step
            )
            self._final = result.images
            ended = State.STOPPED if in_time else State.OUT_OF_TIME
            self._state = ended if result.stopped else State.DONE
        except ValueError as error:
            self._error = str(error)
        finally:
            self.finished.set()
