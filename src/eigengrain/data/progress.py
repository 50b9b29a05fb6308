"""Long work on the terminal."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eigengrain.runtime import output

T = TypeVar("T")


def tracked(items: Iterable[T], total: int, description: str, step: int = 1, show: bool = True) -> Iterator[T]:
    """The items, with a bar on stderr that vanishes when they are done.

    Nothing is shown where stderr is no terminal, nor with ``--quiet``.

    Example:
        >>> list(tracked("ab", 2, "letters"))
        ['a', 'b']
    """
    console = output.progress()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not show or console.quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task, step)
