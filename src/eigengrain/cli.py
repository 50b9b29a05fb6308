"""The command line: which command is asked for, what its options say, and how it ends.

The commands themselves are in :mod:`eigengrain.commands.catalogue`.
"""

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from difflib import get_close_matches
from io import TextIOWrapper
from itertools import accumulate
from os.path import expanduser
from types import FrameType
from typing import Any, NamedTuple

from eigengrain import __version__, errors
from eigengrain.commands.catalogue import ABOUT, COMMANDS, GROUPS, PROGRAM, SECTIONS, Command, imported
from eigengrain.commands.help import command_help, overview
from eigengrain.commands.options import Option, options_of
from eigengrain.commands.words import JSON, PRINT, QUIET, named
from eigengrain.errors import did_you_mean, unknown_name
from eigengrain.runtime import output

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
            raise unknown_name(f"{path} command".strip(), token, _choices(path))
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
            raise ValueError(f"{_misspelt(rest, '', ['--help', '--version', *QUIET])} (see '{who} --help')")
        raise ValueError(f"a command is needed after '{who}'. Choose from: {', '.join(_choices(command))}")
    return _read(command, [*common, *rest])


def _read(command: Command, words: list[str]) -> Request:
    from jsonargparse import ArgumentError

    see = f"(see '{PROGRAM} {command.name} --help')"
    expanded = imported(command.expand)(words) if command.expand else words
    options = options_of(command.config)
    parser = _parser(command)
    known = [*parser._option_string_actions, *QUIET, *JSON, *PRINT]
    try:
        read = named(expanded, options, command.positional)
    except ValueError as error:
        raise ValueError(f"{_misspelt(words, '', known) or error} {see}") from None
    if read.json and not command.speaks:
        raise ValueError(f"there is nothing to say with --json: leave it out {see}")
    for word in read.options:
        if word.startswith("--config="):
            _check_file(expanduser(word.removeprefix("--config=")))
    try:
        namespace = parser.parse_args(read.options)
    except ArgumentError as error:
        said = _misspelt(words, str(error), known) or _wrong_value(read.options, str(error), options)
        raise ValueError(f"{said or _one_line(str(error))} {see}") from error
    for name, text in read.texts.items():
        namespace[name] = text
    if read.print_config:
        _print_options(namespace)
        raise SystemExit(0)
    for option in options:
        _complete(namespace, option)
    # jsonargparse before 4.49 has another name for it
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    values = instantiate(namespace)
    config = command.config(**{f.name: values[f.name] for f in fields(command.config) if f.name in values})
    return Request(command, config, read.quiet, read.json)


def _parser(command: Command) -> Any:
    """The parser of one command: its options by name, and switches (--dry_run, without a value)."""
    from jsonargparse import ArgumentParser

    # abbreviated options would turn a new option into a breaking change; errors are worded in _read, which prints too
    parser = ArgumentParser(
        prog=f"{PROGRAM} {command.name}", exit_on_error=False, allow_abbrev=False, add_help=False, print_config=None
    )
    parser.add_argument("--config", action="config")
    switches = [option.name for option in options_of(command.config) if option.switch]
    parser.add_class_arguments(command.config, skip=set(switches))
    for switch in switches:
        parser.add_argument(f"--{switch}", action="store_true")
    return parser


def _check_file(path: str) -> None:
    """See that a file of options holds some, before the parser, which does not say in which file a mistake is.

    Raises:
        ValueError: for a file that is no text, no YAML or no mapping; of one that is not there the parser speaks.
    """
    import yaml  # type: ignore[import-untyped]

    if not os.path.isfile(path):
        return
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"option --config: {path} is not text in UTF-8 ({error.reason}): save it as such") from None
    except yaml.YAMLError as error:
        raise ValueError(f"option --config: {path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        there = "nothing" if values is None else f"a {type(values).__name__}"
        raise ValueError(f"option --config: {path} holds {there}, where options are expected: 'name: value', one a line")


def _print_options(values: Any) -> None:
    """Options as the YAML of a file for ``--config``, those that were given without their name included."""
    import yaml

    named_values = {name: value for name, value in values.as_dict().items() if name != "config"}
    print(yaml.safe_dump(named_values, sort_keys=False, allow_unicode=True), end="")


def _complete(values: Any, option: Option) -> None:
    """Put a home folder into the value of an option, and refuse what the parser lets pass where a file says it.

    Raises:
        ValueError: for a section that is no mapping, null where there is no none, and a switch that is not true or false.
    """
    from jsonargparse import Namespace

    *sections, _ = accumulate(option.name.split("."), lambda section, name: f"{section}.{name}")
    for section in sections:
        if not isinstance(values[section], Namespace):
            raise ValueError(f"option --{section}: expected a mapping of its options, got {_in_yaml(values[section])}")
    value = values[option.name]
    if (value is None and not option.optional) or (option.switch and not isinstance(value, bool)):
        raise ValueError(f"option --{option.name}: expected {option.expected}, got {_in_yaml(value)}")
    if option.is_path and value:  # shells do it where a word begins, and leave --out=~/runs and files as they are
        values[option.name] = list(map(expanduser, value)) if isinstance(value, list) else expanduser(value)


def _in_yaml(value: Any) -> str:
    return "null" if value is None else repr(value)


def _misspelt(words: Sequence[str], message: str, known: Sequence[str]) -> str | None:
    """What to say about the first option, typed or in a YAML file, that the parser does not have; None if it has all."""
    names = [name for name in known if not name.endswith("+")]
    typed = [word.split("=")[0].removesuffix("+") for word in words if re.match(r"-[^\d.]|--.", word)]
    found = re.findall(r"(?:Group '([\w.]+)' .*)?(?:[Oo]ption|[Kk]ey) '([\w.]+)'", message)
    in_file = ["--" + ".".join(filter(None, names)) for names in found]
    for option in (*typed, *in_file):
        if option not in (*names, "--recipe", "-h", "--help"):
            near = get_close_matches(option, names, n=3, cutoff=0.65)
            return f"unknown option '{option}': {did_you_mean(near) or 'there is none like it'}"
    return None


def _wrong_value(words: Sequence[str], message: str, options: Sequence[Option]) -> str | None:
    """What to say about an option whose value the parser refuses; None if the value was not typed, or something else is."""
    refused = re.match(r'Parser key "([\w.]+)"', message)
    option = next((o for o in options if refused and o.name == refused[1]), None)
    typed = [word.partition("=")[2] for word in words if option and re.match(rf"--{re.escape(option.name)}\+?=", word)]
    if option is None or not typed:
        return None
    if option.literals and not option.is_list and len(option.kinds) == 1:
        return str(unknown_name(f"--{option.name}", typed[-1], option.literals))
    return f"option --{option.name}: expected {option.expected}, got '{typed[-1]}'"


def _one_line(message: str) -> str:
    """A message of the parser, or of a command, on one line."""
    return re.sub(r'^Parser key "([\w.]+)": ', r"option --\1: ", " ".join(message.split()))


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
        message = str(error) if isinstance(error, errors.LayoutError) else _one_line(str(error))
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return FAILED if isinstance(error, FAILURES) else USAGE


if __name__ == "__main__":
    sys.exit(main())
