"""The command line: which command is asked for, what its options say, and how it ends.

The commands themselves are in :mod:`eigengrain.cli.catalogue`.
"""

import errno
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from difflib import get_close_matches
from io import TextIOWrapper
from os.path import expanduser
from types import FrameType
from typing import Any, NamedTuple

from eigengrain import __version__, errors, output
from eigengrain.cli.catalogue import ABOUT, COMMANDS, GROUPS, PROGRAM, SECTIONS, Command, imported
from eigengrain.cli.help import command_help, overview
from eigengrain.cli.words import JSON, PRINT, QUIET, named
from eigengrain.errors import UnknownName, did_you_mean
from eigengrain.options import Option, build, options_of
from eigengrain.yaml_files import read_mapping

#: exit codes: the work failed or found problems; a mistake in the command line, a file or a folder; the reader went away
FAILED, USAGE, BROKEN_PIPE = 1, 2, 128 + 13

#: what counts as a user's mistake and gets one line; anything else is a bug of ours and keeps its traceback
USER_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    *(e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)),
)
#: of these, what no other option, file or folder mends
FAILURES = (errors.FailedError, errors.NonFiniteError, errors.EigenSolverError, errors.SecondOrderError)


#: a full disk, or a full quota
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Request(NamedTuple):
    """What a command line asks for."""

    command: Command
    config: Any
    quiet: bool
    json: bool


def _choices(path: str) -> list[str]:
    """Commands that may follow the words so far."""
    if path:
        return [c.last_word for c in COMMANDS if c.group == path]
    return list(dict.fromkeys(c.group or c.name for c in COMMANDS))


def _find(argv: Sequence[str]) -> tuple[Command | str, list[str]]:
    """The command that is asked for, or the first of two words, and what follows it.

    Raises:
        ValueError: for a word that is no command, with near ones.
    """
    commands, path = {c.name: c for c in COMMANDS}, ""
    for place, token in enumerate(argv):
        if token.startswith("-"):
            return path, list(argv[place:])
        name = f"{path} {token}".strip()
        if name in commands:
            return commands[name], list(argv[place + 1 :])
        if name not in GROUPS:
            raise UnknownName(f"{path} command".strip(), token, _choices(path))
        path = name
    return path, []


def help_of(command: Command | str) -> str:
    """The help of a command, of the first of two words, or of everything for the empty word."""
    if isinstance(command, Command):
        return command_help(command, PROGRAM)
    if command:
        rows = [(c.last_word, c.help) for c in COMMANDS if c.group == command]
        about = f"{GROUPS[command][:1].upper()}{GROUPS[command][1:]}."
        return overview(f"{PROGRAM} {command}", about, {"commands": rows})
    helps = {c.name: c.help for c in COMMANDS} | GROUPS
    sections = {title: [(name, helps[name]) for name in names] for title, names in SECTIONS.items()}
    examples = (f"{PROGRAM} demo", f"{PROGRAM} train --help", f"{PROGRAM} doctor", f"{PROGRAM} --version")
    return overview(PROGRAM, ABOUT, sections, examples)


def parse(argv: Sequence[str]) -> Request:
    """What a command line asks for.

    Raises:
        ValueError: for what cannot be read.
        SystemExit: after ``--help``, ``--version`` and ``--print_config``, with 0.
    """
    words = list(argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    end = words.index("--") if "--" in words else len(words)
    common = [word for word in words[:end] if word in (*QUIET, *JSON)]  # these may stand anywhere
    command, rest = _find([word for word in words[:end] if word not in common] + words[end:])
    if "--help" in rest or "-h" in rest:
        print(help_of(command), end="")
        raise SystemExit(0)
    if isinstance(command, str):
        who = f"{PROGRAM} {command}".strip()
        if not command and rest[:1] in (["--version"], ["-V"]):
            print(f"{PROGRAM} {__version__}")
            raise SystemExit(0)
        if rest:
            raise ValueError(f"{_misspelt(rest, ['--help', '--version', *QUIET])} (see '{who} --help')")
        raise ValueError(f"a command is needed after '{who}'. Choose from: {', '.join(_choices(command))}")
    return _read(command, [*common, *rest])


def _read(command: Command, words: list[str]) -> Request:
    see = f"(see '{PROGRAM} {command.name} --help')"
    expanded = imported(command.expand)(words) if command.expand else words
    options = options_of(command.config)
    known = [*(f"--{option.name}" for option in options), "--config", *QUIET, *JSON, *PRINT]
    try:
        read = named(expanded, options, command.positional)
    except ValueError as error:
        raise ValueError(f"{_misspelt(words, known) or error} {see}") from None
    if read.json and not command.speaks:
        raise ValueError(f"there is nothing to say with --json: leave it out {see}")
    misspelt = _misspelt(words, known)
    if misspelt:
        raise ValueError(f"{misspelt} {see}")
    values: dict[str, Any] = {}
    try:
        for word in read.options:
            _apply(word, options, values)
        for name, text in read.texts.items():
            _place(values, name, text)
        for option in options:
            _expand_home(values, option)
        config = build(command.config, values)
    except (errors.ArgumentError, errors.UnknownName) as error:
        raise ValueError(f"{_describe(error)} {see}") from None
    if read.print_config:
        _print_options(config)
        raise SystemExit(0)
    return Request(command, config, read.quiet, read.json)


def _apply(word: str, options: Sequence[Option], values: dict[str, Any]) -> None:
    """Add one option of the command line, or a file of ``--config``, to the values so far.

    Raises:
        ValueError: if it cannot be read.
    """
    name, given, text = word.removeprefix("--").partition("=")
    if name == "config":
        if not given:
            raise errors.ArgumentError("config", "must be a file")
        _merge(values, read_mapping(expanduser(text)), options)
        return
    option = next(o for o in options if o.name == name.removesuffix("+"))
    if option.switch:
        if given:
            raise errors.ArgumentError(name, "takes no value", text)
        _place(values, option.name, True)
        return
    if not given:
        raise errors.ArgumentError(name, f"needs a value: {option.expected}")
    value = option.parse(text)
    if name.endswith("+"):
        before = _find_value(values, option.name)
        value = [*(before if isinstance(before, list) else []), *(value if isinstance(value, list) else [value])]
    _place(values, option.name, value)


def _merge(values: dict[str, Any], more: Mapping[str, Any], options: Sequence[Option], prefix: str = "") -> None:
    """Add a mapping to the values so far: sections are merged, options are replaced, also those that are mappings."""
    names = {option.name for option in options}
    for key, value in more.items():
        section = isinstance(value, Mapping) and f"{prefix}{key}" not in names
        if section and isinstance(values.setdefault(key, {}), dict):
            _merge(values[key], value, options, f"{prefix}{key}.")
        else:
            values[key] = value


def _place(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name in nested mappings."""
    *parents, last = name.split(".")
    for parent in parents:
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    values[last] = value


def _find_value(values: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name in nested mappings, or None."""
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None  # type: ignore[assignment]
    return values


def _print_options(config: Any) -> None:
    """Print the options as YAML for ``--config``, including those that were given without their name."""
    import yaml  # type: ignore[import-untyped]

    print(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False, allow_unicode=True), end="")


def _expand_home(values: dict[str, Any], option: Option) -> None:
    """Expand ~ in paths: shells do not expand it inside --out=~/runs, nor in files."""
    value = _find_value(values, option.name)
    if option.is_path and value:
        if isinstance(value, str):
            _place(values, option.name, expanduser(value))
        elif isinstance(value, list):
            _place(values, option.name, [expanduser(item) if isinstance(item, str) else item for item in value])


def _misspelt(words: Sequence[str], known: Sequence[str]) -> str | None:
    """The message about the first option that the command does not have; None if it has all."""
    end = words.index("--") if "--" in words else len(words)
    typed = [word.split("=")[0].removesuffix("+") for word in words[:end] if re.match(r"-[^\d.]|--.", word)]
    for option in typed:
        if option not in (*known, "--recipe", "-h", "--help"):
            near = get_close_matches(option, known, n=3, cutoff=0.65)
            return f"unknown option '{option}': {did_you_mean(near) or 'there is none like it'}"
    return None


def _describe(error: Exception) -> str:
    """The message of an error, with options in place of Python arguments."""
    return error.describe(lambda name: f"--{name}") if isinstance(error, errors.ArgumentError) else str(error)


def _one_line(message: str) -> str:
    """A message on one line."""
    return " ".join(message.split())


class _Terminated(BaseException):
    """SIGTERM, as Ctrl-C is KeyboardInterrupt: what is open is closed on the way out."""


@contextmanager
def _terminating() -> Iterator[None]:
    """Let SIGTERM unwind the command as Ctrl-C does, so that no half-written file and no worker is left behind."""
    if threading.current_thread() is not threading.main_thread():  # handlers belong to the main thread alone
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
    """Let everything be written: what goes to a closed stream (``>&-``) is lost, and a letter that stdout cannot encode is
    written by its number, as on stderr."""
    with ExitStack() as stack:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if stream is None:
                stack.enter_context(redirect(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        if isinstance(sys.stdout, TextIOWrapper):
            stack.callback(sys.stdout.reconfigure, errors=sys.stdout.errors)
            sys.stdout.reconfigure(errors="backslashreplace")
        yield


def _abandon_stdout() -> None:
    """Let what is still to be written go nowhere, so that Python does not fail on it as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@_streams()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what the user can mend gets one line on stderr.

    0 for done, 1 if the work failed or found problems, 2 for a mistake in the command line, a file or a folder, 130 after
    Ctrl-C and 143 after SIGTERM.
    """
    try:
        with _terminating():
            command, config, quiet, as_json = parse(sys.argv[1:] if argv is None else argv)
            with output.mode(quiet, as_json):
                code = command.function()(config) or 0
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except _Terminated:
        print(f"{PROGRAM}: stopped by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # the reader has seen enough, as in 'eigengrain models | head'
        _abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # it is stdout that goes to the full disk
            _abandon_stdout()
        where = f" for {error.filename}" if error.filename else ""
        print(f"{PROGRAM}: error: no space is left on the disk{where}: free some, then run it again", file=sys.stderr)
        return FAILED
    except USER_ERRORS as error:
        message = str(error) if isinstance(error, errors.LayoutError) else _one_line(_describe(error))
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return FAILED if isinstance(error, FAILURES) else USAGE


if __name__ == "__main__":
    sys.exit(main())
