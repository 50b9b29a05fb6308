"""How commands speak: for reading, in bare lines (``--quiet``), or as one JSON document (``--json``).

A command asks for :func:`reading` to print tables and sentences, for :func:`progress` to say how far it is, and ends with
:func:`result`. Which of them reach the user is decided here, by the :func:`mode` that the command line enters. Importing
this imports nothing heavy.
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


@dataclass(frozen=True)
class Mode:
    """How the running command speaks.

    Args:
        quiet: no progress, no decoration, no notes; the result in bare lines.
        json: the result as one JSON document, and nothing else on stdout.
        stdout: where the document goes, while stdout itself leads to stderr.
    """

    quiet: bool = False
    json: bool = False
    stdout: TextIO | None = None


_modes = [Mode()]


def current() -> Mode:
    """The mode of the running command; outside a command, the one for reading."""
    return _modes[-1]


@contextlib.contextmanager
def mode(quiet: bool = False, json: bool = False) -> Iterator[None]:
    """Let everything inside speak in this way.

    With ``json``, whatever is printed to stdout by whomever goes to stderr, so that the document stands alone.

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
        chosen = Mode(quiet, json, sys.stdout if json else None)
        if json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        if quiet:
            warnings.simplefilter("ignore")
        else:
            warnings.showwarning = _one_line(warnings.showwarning)
        _modes.append(chosen)
        stack.callback(_modes.pop)
        yield


def _one_line(usual: Callable[..., None]) -> Callable[..., None]:
    """Warnings of this package as a line for its user; those of others as they are, for whoever reads code."""
    own = str(Path(__file__).parent)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning and filename.startswith(own) and file is None:
            print(f"eigengrain: note: {message}", file=sys.stderr, flush=True)
        else:
            usual(message, category, filename, lineno, file, line)

    return show


def reading() -> "Console":
    """A console on stdout for tables and sentences, which is silent where they are not wanted."""
    from rich.console import Console

    class Reading(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program with a code of its own

    return Reading(quiet=current().quiet or current().json)


def progress() -> "Console":
    """A console on stderr for how far the work is and for notes, which is silent with ``--quiet``."""
    from rich.console import Console

    return Console(stderr=True, quiet=current().quiet)


def result(document: Any, bare: Iterable[object] = ()) -> None:
    """What a command came to, said once at its end.

    Args:
        document: for ``--json``: of mappings, lists, dataclasses, paths, texts and numbers; NaN and infinity become null.
        bare: for ``--quiet``: one line each.
    """
    stdout = current().stdout
    if stdout is not None:
        text = json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)
        try:
            text.encode(stdout.encoding or "utf-8")
        except UnicodeEncodeError:  # by their numbers, which JSON has for letters that stdout has not
            text = json.dumps(json.loads(text), indent=2)
        print(text, file=stdout, flush=True)
    elif current().quiet:
        for line in bare:
            print(line, flush=True)


def plain(value: Any) -> Any:
    """A value as JSON has it.

    Raises:
        TypeError: for a value that has no such form.

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
    raise TypeError(f"no JSON for a value of type {type(value).__name__}")
