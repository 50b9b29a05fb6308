"""How long work shows itself on the terminal."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eigengrain import output

T = TypeVar("T")


class _Bar(Progress):
    """One that prints nothing at all where it is hidden: rich before 14.3 ends a hidden one with an empty line."""

    def stop(self) -> None:
        if not self.disable:
            super().stop()


def progress_bar(show: bool = True, remaining: bool = False) -> Progress:
    """A bar on stderr with a description, a count and the time; it vanishes when the work is done.

    Nothing is shown where stderr is no terminal, nor with ``--quiet``.

    Args:
        show: whether there is one at all.
        remaining: whether the time is the one that is left, instead of the one that has passed.
    """
    console = output.progress()
    hidden = not show or console.quiet or not console.is_terminal
    time = TimeRemainingColumn() if remaining else TimeElapsedColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), time)
    return _Bar(*columns, console=console, transient=True, disable=hidden)


def tracked(items: Iterable[T], total: int, description: str, step: int = 1, show: bool = True) -> Iterator[T]:
    """The items, with such a bar and the time that is left.

    Example:
        >>> list(tracked("ab", 2, "letters"))
        ['a', 'b']
    """
    with progress_bar(show, remaining=True) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task, step)
