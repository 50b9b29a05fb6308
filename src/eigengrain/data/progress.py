"""Long work on the terminal."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


def tracked(items: Iterable[T], total: int, description: str, step: int = 1, show: bool = True) -> Iterator[T]:
    """The items, with a bar on stderr that vanishes when they are done; nothing is shown where stderr is no terminal.

    Example:
        >>> list(tracked("ab", 2, "letters"))
        ['a', 'b']
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task, step)
