"""Progress bars on the terminal."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eigengrain import output

T = TypeVar("T")


class _Bar(Progress):
    """A bar that prints nothing if it is disabled; rich before 14.3 prints an empty line at the end."""

    def stop(self) -> None:
        if not self.disable:
            super().stop()


def progress_bar(show: bool = True, remaining: bool = False) -> Progress:
    """A bar on stderr with a description, a count and the elapsed or ``remaining`` time, which disappears at the end.

    It is hidden if stderr is not a terminal, and with ``--quiet``.
    """
    console = output.stderr_console()
    hidden = not show or console.quiet or not console.is_terminal
    time = TimeRemainingColumn() if remaining else TimeElapsedColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), time)
    return _Bar(*columns, console=console, transient=True, disable=hidden)


def track(items: Iterable[T], total: int, description: str, step: int = 1, show: bool = True) -> Iterator[T]:
    """Iterate over items with a bar that shows the remaining time."""
    with progress_bar(show, remaining=True) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task, step)
