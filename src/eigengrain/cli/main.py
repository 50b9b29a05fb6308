"""The command line: find the command, parse its options, run it, and turn errors into messages and exit codes."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from types import FrameType
from typing import TextIO

from eigengrain import __version__, errors, output
from eigengrain.cli.commands import ABOUT, COMMANDS, MOVED, PROGRAM, SECTIONS, Command, Program
from eigengrain.cli.help import command_help, overview
from eigengrain.cli.parser import COMMON, Request, UsageError, parse_command, unknown_option
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.options import options_of

__all__ = ["Command", "Request", "help_of", "main", "option_name", "parse", "run_commands"]

#: exit codes: the work failed or found problems; a mistake in the command line, a file or a folder; stdout was closed
FAILED, USAGE, BROKEN_PIPE = 1, 2, 128 + 13

#: errors that get one line; any other is a bug and keeps its traceback
USER_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    *(e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)),
)
#: errors that no other option, file or folder would avoid
FAILURES = (errors.FailedError, errors.NonFiniteError, errors.EigenSolverError, errors.SecondOrderError)
#: a full disk or quota
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def _eigengrain() -> Program:
    return Program(PROGRAM, COMMANDS, ABOUT, SECTIONS, MOVED, __version__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eigengrain`` and return its exit code, see :func:`run_commands`."""
    return _run(_eigengrain(), sys.argv[1:] if argv is None else argv)


def run_commands(program: str, commands: Sequence[Command], argv: Sequence[str] | None = None, about: str = "") -> int:
    """Run one command of a table and return its exit code.

    ``program`` is what the user types in front of the command, and ``about`` a sentence for the help. Every command gets
    ``--help``, ``--quiet``, ``--json``, ``--config FILE`` and ``--print_config``. Errors that the user can correct are
    printed as one line on stderr. A single command with the empty name makes a program without command names.

    Returns:
        0 on success, 1 if the work failed or found problems, 2 for a mistake in the command line, a file or a folder, 130
        after Ctrl-C, 141 if stdout was closed, 143 after SIGTERM.

    Raises:
        SystemExit: with 0, after ``--help`` and ``--print_config``.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Greet:
        ...     '''Who is greeted.
        ...
        ...     Args:
        ...         name: name of a person.
        ...     '''
        ...
        ...     name: str = "world"
        >>> def greet(config: Greet) -> None:
        ...     print("hello", config.name)
        >>> table = [Command("greet", "print a greeting", Greet, greet, positional={"name": "?"})]
        >>> run_commands("python -m greetings", table, ["greet", "birds"])
        hello birds
        0
    """
    return _run(Program(program, commands, about), sys.argv[1:] if argv is None else argv)


def _run(program: Program, argv: Sequence[str]) -> int:
    prefix, command, hint = program.name.split()[-1], None, ""
    with _streams():
        try:
            with _terminating():
                command, words = _find(program, list(argv))
                typed = f"{program.name} {command.name if command else ''}".strip()
                hint = f" (see '{typed} --help')"
                request = _parse(program, command, words)
                hint = ""
                with output.mode(request.quiet, request.json):
                    if request.note:
                        output.note(request.note)
                    code = request.command.function()(request.config) or 0
                sys.stdout.flush()
                return code
        except errors.Interrupted as stop:
            _complain(f"{prefix}: {stop}")
            return stop.exit_code
        except KeyboardInterrupt:
            _complain(f"{prefix}: interrupted")
            return 128 + signal.SIGINT
        except _Terminated:
            _complain(f"{prefix}: stopped by SIGTERM")
            return 128 + signal.SIGTERM
        except BrokenPipeError:  # the reader has closed it, as in 'eigengrain models | head'
            _abandon(sys.stdout)
            _abandon(sys.stderr)
            return BROKEN_PIPE
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            _abandon(sys.stdout)  # if it goes to the full disk itself
            where = f" for {error.filename}" if error.filename else ""
            _complain(f"{prefix}: error: no space left on the disk{where}: free some and run it again")
            return FAILED
        except USER_ERRORS as error:
            hint = "" if isinstance(error, errors.FileError) else hint
            _complain(f"{prefix}: error: {describe(error, command)}{hint}")
            return FAILED if isinstance(error, FAILURES) else USAGE
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            _complain(f"{prefix}: error: out of memory: use smaller images or batches")
            return FAILED


def parse(argv: Sequence[str]) -> Request:
    """Parse a command line of ``eigengrain`` without running it; exit with 0 after ``--help`` and ``--print_config``."""
    program = _eigengrain()
    return _parse(program, *_find(program, list(argv)))


def _find(program: Program, words: list[str]) -> tuple[Command | None, list[str]]:
    """The command and the words before and after its name; None if no command is named."""
    table = {command.name: command for command in program.commands}
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if "" in table:
        return table[""], words
    place = next((place for place, word in enumerate(words) if not word.startswith("-")), None)
    if place is None:
        return None, words
    name = words[place]
    if name in program.moved:
        instead = f"in a checkout of the repository, run '{program.moved[name]} …'"
        raise UsageError(f"'{program.name} {name}' is not part of the installed package: {instead}", name)
    if name not in table:
        raise UnknownName("command", name, table)
    return table[name], [*words[:place], *words[place + 1 :]]


def _parse(program: Program, command: Command | None, words: list[str]) -> Request:
    options = words[: words.index("--")] if "--" in words else words
    if command is not None and not {"--help", "-h"} & set(options):
        return parse_command(command, words)
    if command is None:
        flags = ["--help", "-h", *(["--version", "-V"] if program.version else []), "-q", "--quiet", "--json"]
        for word in words:
            if word not in flags:
                raise unknown_option(word, flags)
        if {"--version", "-V"} & set(words):
            print(f"{program.name} {program.version}", flush=True)
            raise SystemExit(0)
    print(help_of(command, program), end="", flush=True)
    raise SystemExit(0)


def help_of(command: Command | None, program: Program | None = None) -> str:
    """The help of a command, or of the program itself; of ``eigengrain`` by default."""
    program = program or _eigengrain()
    return overview(program) if command is None else command_help(command, program.name)


def option_name(argument: str, command: Command | None) -> str:
    """The option of a command that sets a Python argument: --model.reduce for reduce.

    It is the argument itself if there is not exactly one such option.
    """
    options = options_of(command.config) if command is not None else ()
    argument = command.aliases.get(argument, argument) if command is not None else argument
    if argument in (*(name for name, *_ in COMMON), *(option.name for option in options)):
        return f"--{argument}"
    names = [option.name for option in options if option.last == argument]
    return f"--{names[0]}" if len(names) == 1 else argument


def describe(error: Exception, command: Command | None) -> str:
    """The message of an error on one line, with options in place of Python arguments; a layout keeps its lines."""
    text = str(error)
    if isinstance(error, ArgumentError):
        text = error.describe(lambda name: option_name(name, command))
    elif isinstance(error, UnknownName):
        kind = option_name(error.kind, command)
        text = str(UnknownName(kind, error.name, error.choices, error.listing, error.suggestions))
    return text if isinstance(error, errors.LayoutError) else " ".join(text.split())


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error is about the memory of this machine or, from torch, of a GPU."""
    torch = sys.modules.get("torch")
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


class _Terminated(BaseException):
    """SIGTERM, raised as KeyboardInterrupt is for Ctrl-C, so that open files are closed on the way out."""


@contextmanager
def _terminating() -> Iterator[None]:
    """Unwind the command on SIGTERM as on Ctrl-C, so that no half-written file and no worker is left behind."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a worker process that was forked from this one
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _streams() -> Iterator[None]:
    """Discard what is written to a closed stream (``>&-``), and escape characters that stdout cannot encode."""
    with ExitStack() as stack:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if stream is None:
                stack.enter_context(redirect(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        if isinstance(sys.stdout, TextIOWrapper):
            stack.callback(sys.stdout.reconfigure, errors=sys.stdout.errors)
            sys.stdout.reconfigure(errors="backslashreplace")
        yield


def _complain(line: str) -> None:
    """Print a line on stderr; that nobody reads it does not change the exit code."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def _abandon(stream: TextIO) -> None:
    """Send the rest of a stream nowhere if it cannot be written, so that Python does not fail on it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
