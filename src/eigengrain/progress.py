"""Progress bars on the terminal, and the progress of a training."""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from eigengrain import output
from eigengrain.text import duration

T = TypeVar("T")

#: seconds between two lines about a training without a terminal
LINE_EVERY = 60.0
#: width of a bar beside a longer text
_SHORT = 20


class _Bar(Progress):
    """A bar that prints nothing if it is disabled; rich before 14.3 prints an empty line at the end."""

    def stop(self) -> None:
        if not self.disable:
            super().stop()


def progress_bar(show: bool = True, last: ProgressColumn | None = None) -> Progress:
    """A bar on stderr with a description, a count and a last column, by default the elapsed time; it disappears at the end.

    It is hidden if stderr is not a terminal, and with ``--quiet``.
    """
    console = output.stderr_console()
    hidden = not show or console.quiet or not console.is_terminal
    bar = BarColumn(40 if last is None else _SHORT)  # a longer last column needs the space
    columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), last or TimeElapsedColumn())
    return _Bar(*columns, console=console, transient=True, disable=hidden)


def track(items: Iterable[T], total: int, description: str, step: int = 1, show: bool = True) -> Iterator[T]:
    """Iterate over items with a bar that shows the remaining time."""
    with progress_bar(show, TimeRemainingColumn()) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task, step)


class TrainingProgress(AbstractContextManager["TrainingProgress"]):
    """Progress of a training with the time left for all epochs: a bar on a terminal, else one line per minute.

    The time is estimated from the batches after the first one, and from what happens between epochs, so far.

    Args:
        epochs, batches, images: number of epochs, of batches per epoch, and of images per batch.
        show: whether anything is shown.
    """

    def __init__(self, epochs: int, batches: int, images: int, show: bool = True):
        self.epochs, self.batches, self.images, self.show = epochs, batches, images, show
        self.epoch = self.batch = 0
        self._bar = progress_bar(show, TextColumn("{task.fields[state]}"))
        self._task = self._bar.add_task("", total=batches, state="")
        self._starting = True  # before the first batch, which also starts workers and compiles
        self._seconds, self._timed = 0.0, 0  # of batches
        self._pauses, self._paused = 0.0, 0  # seconds after the last batch of an epoch, and number of such epochs
        self._clock = self._printed = time.monotonic()

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start_epoch(self, epoch: int, batch: int) -> None:
        """Start or continue an epoch; both numbers count from 0."""
        self.epoch, self.batch, self._clock = epoch, batch, time.monotonic()
        self._bar.reset(self._task, completed=batch, description=f"epoch {epoch + 1}/{self.epochs}", state="")

    def advance(self, *facts: str) -> None:
        """Count a batch, and show facts such as "loss 1.2345"."""
        now = time.monotonic()
        if not self._starting:
            self._seconds, self._timed = self._seconds + now - self._clock, self._timed + 1
        self.batch, self._clock, self._starting = self.batch + 1, now, False
        speed, left = self._speed(), self.left()
        self._bar.update(self._task, advance=1, state=self._fitting([*left, *facts, *speed]))
        if self.show and self._bar.disable and now - self._printed >= LINE_EVERY:
            place = f"epoch {self.epoch + 1}/{self.epochs}", f"batch {self.batch}/{self.batches}"
            self.print("   ".join([*place, *facts, *speed, *left]))

    def end_epoch(self) -> None:
        """Count the time since the last batch: evaluation and checkpoints."""
        self._pauses, self._paused = self._pauses + time.monotonic() - self._clock, self._paused + 1
        self.epoch, self.batch = self.epoch + 1, 0

    def left(self) -> list[str]:
        """The time that the rest of the training needs, in words; empty at the start and at the end."""
        batches = (self.epochs - self.epoch) * self.batches - self.batch
        if not self._timed or batches <= 0:
            return []
        pauses = (self.epochs - self.epoch) * self._pauses / max(self._paused, 1)
        return [f"{duration(batches * self._seconds / self._timed + pauses)} left"]

    def _fitting(self, parts: list[str]) -> str:
        """The first parts, as many as a line of the terminal has room for beside the bar."""
        others = len(f"epoch {self.epoch + 1}/{self.epochs}") + _SHORT + 2 * len(f"/{self.batches}") + 3
        while len("   ".join(parts)) > max(self._bar.console.width - others, 0):
            parts = parts[:-1]
        return "   ".join(parts)

    def _speed(self) -> list[str]:
        return [f"{self.images * self._timed / self._seconds:.1f} images/s"] if self._seconds else []

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._printed = time.monotonic()
        self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)
