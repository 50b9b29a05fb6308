"""How long work shows itself on the terminal."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eigengrain.runtime import output


def progress_bar() -> Progress:
    """A bar on stderr with a description, a count and the time; it vanishes when the work is done.

    Nothing is shown where stderr is no terminal, nor with ``--quiet``.
    """
    console = output.progress()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=console.quiet or not console.is_terminal)
