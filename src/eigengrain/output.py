"""The output of commands: tables and sentences for people, bare lines (``--quiet``) or one JSON document (``--json``).

A command prints tables and sentences to :func:`console`, progress and notes to :func:`stderr_console`, and ends with
:func:`result`. The :func:`mode` that the command line enters decides which of them are shown. No torch here.
"""

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Mode:
    """Output mode of the running command."""

    quiet: bool = False  # no progress, decoration or notes; the result in bare lines
    json: bool = False  # the result as one JSON document, and nothing else on stdout
    stdout: TextIO | None = None  # stream for the document, while stdout is redirected to stderr


_modes = [Mode()]


def current() -> Mode:
    """The mode of the running command."""
    return _modes[-1]


@contextlib.contextmanager
def mode(quiet: bool = False, json: bool = False) -> Iterator[None]:
    """Set the output mode inside a ``with`` block.

    With ``json``, stdout is redirected to stderr so that only the JSON document reaches stdout.

    Example:
        >>> with mode(json=True):
        ...     result({"answer": float("nan")}, ["42"])
        {
          "answer": null
        }
        >>> with mode(quiet=True):
        ...     result({"answer": 42}, ["42"])
        42
    """
    with contextlib.ExitStack() as stack:
        _modes.append(Mode(quiet, json, sys.stdout if json else None))
        stack.callback(_modes.pop)
        if json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        if quiet:
            warnings.simplefilter("ignore")
        else:
            warnings.showwarning = _one_line(warnings.showwarning)
        yield


def _one_line(original: Callable[..., None]) -> Callable[..., None]:
    """Show warnings of this package as one line; those of other packages are for developers and stay as they are."""
    own = str(Path(__file__).parent)

    def show(message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, UserWarning) and filename.startswith(own) and file is None:
            print(f"eigengrain: note: {message}", file=sys.stderr, flush=True)
        else:
            original(message, category, filename, lineno, file, line)

    return show


def console() -> "Console":
    """A rich console on stdout for tables and sentences; silent with ``--quiet`` and ``--json``."""
    return _console(quiet=current().quiet or current().json)


def stderr_console() -> "Console":
    """A rich console on stderr for progress and notes; silent with ``--quiet``."""
    return _console(stderr=True, quiet=current().quiet)


def _console(**options: bool) -> "Console":
    from rich.console import Console

    class Strict(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with its own code

    return Strict(**options)  # type: ignore[arg-type]


def say(*lines: object) -> None:
    """Print lines to :func:`console` as they are, without wrapping, markup or colours."""
    for line in lines:
        console().print(str(line), soft_wrap=True, markup=False, highlight=False)


def note(line: str) -> None:
    """Print a line to :func:`stderr_console` as it is."""
    stderr_console().print(line, soft_wrap=True, markup=False, highlight=False)


def table(title: str, headings: Iterable[str], rows: Iterable[Iterable[object]], left: int = 1) -> "Table":
    """A table for :func:`console`; the first ``left`` columns are aligned left and not wrapped, the others right."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    view = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        view.add_column(escape(heading), justify="left" if place < left else "right", no_wrap=place == 0, overflow="fold")
    for row in rows:
        view.add_row(*(escape(str(cell)) for cell in row))
    return view


def result(document: Any, bare: Iterable[object] = ()) -> None:
    """Print the result of a command, once at its end: a document for ``--json``, see :func:`plain`, or bare lines."""
    stdout = current().stdout
    if stdout is not None:
        text = json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)
        try:
            text.encode(stdout.encoding or "utf-8")
        except UnicodeEncodeError:  # stdout lacks a character: JSON can escape it
            text = json.dumps(json.loads(text), indent=2)
        print(text, file=stdout, flush=True)
    elif current().quiet:
        for line in bare:
            print(line, flush=True)


def plain(value: Any) -> Any:
    """Convert mappings, iterables, dataclasses and paths to what JSON can represent; NaN and infinity become None.

    Example:
        >>> from pathlib import Path
        >>> plain({"size": (1, 2), "path": Path("a"), 3: float("inf")})
        {'size': [1, 2], 'path': 'a', '3': None}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [plain(each) for each in value]
    raise TypeError(f"cannot convert a value of type {type(value).__name__} to JSON")
