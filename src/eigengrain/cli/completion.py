"""``eigengrain completion``: scripts with which shells complete commands, options and names.

A script holds everything that it offers, made from the table of commands, so that a press of the tabulator key starts no
Python.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eigengrain.cli.values import SHELLS, values_of
from eigengrain.errors import UnknownName
from eigengrain.options import Option, options_of

if TYPE_CHECKING:
    from eigengrain.cli.catalogue import Command

#: options of every command: their names, whether a value follows, and what they mean
_COMMON = (
    (("--help", "-h"), False, "print the help"),
    (("--quiet", "-q"), False, "the result in bare lines"),
    (("--json",), False, "the result as JSON"),
    (("--config",), True, "a YAML file with options"),
    (("--print_config",), False, "print the options as YAML"),
)


@dataclass(frozen=True)
class Completion:
    """For which shell.

    Args:
        shell: bash, zsh or fish.
    """

    shell: str = ""

    def __post_init__(self) -> None:
        if not self.shell:
            raise ValueError(f"name the shell: eigengrain completion {' or '.join(SHELLS)}")
        if self.shell not in SHELLS:
            raise UnknownName("shell", self.shell, SHELLS)


def run(config: Completion) -> None:
    """Print the script."""
    from eigengrain.cli.catalogue import COMMANDS, GROUPS, PROGRAM

    write = fish if config.shell == "fish" else bash
    script = write(COMMANDS, GROUPS, PROGRAM)
    if config.shell == "zsh":
        script = f"autoload -U +X compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n{script}"
    print(script, end="")


def _options(command: "Command") -> Iterator[tuple[str, Option]]:
    """Every option of a command with the word that is typed for it."""
    return ((f"--{option.name}", option) for option in options_of(command.config))


def _arguments(command: "Command") -> tuple[str, ...]:
    """What may be given to a command without the name of an option, as far as it is known."""
    options = {option.name: option for option in options_of(command.config)}
    return tuple(value for name in command.positional for value in values_of(command.name, options[name]))


def _first_words(commands: "tuple[Command, ...]", group: str | None) -> dict[str, str]:
    """Commands by the word that is typed for them, with what they do."""
    return {command.last_word: command.help for command in commands if command.group == group}


def bash(commands: "tuple[Command, ...]", groups: dict[str, str], program: str) -> str:
    """A script for bash, which zsh can read as well; where it offers nothing, the shell offers files."""
    top = " ".join([*_first_words(commands, None), *groups, "--help", "--version"])
    values: dict[str, list[str]] = {}
    files: list[str] = []
    for command in commands:
        for word, option in _options(command):
            if option.switch:
                continue
            found = values_of(command.name, option)
            place = f'"{command.name} {word}"'
            values.setdefault(" ".join(found), []).append(place) if found else files.append(place)
        files += [f'"{command.name} {name}"' for names, takes_value, _ in _COMMON if takes_value for name in names]
    of_values = "\n".join(f'        {"|".join(places)}) offered="{found}";;' for found, places in values.items())
    common = " ".join(name for names, *_ in _COMMON for name in names if name.startswith("--"))
    of_options = "\n".join(
        f'                "{command.name}") offered="{" ".join(word for word, _ in _options(command))} {common}";;'
        for command in commands
    )
    of_arguments = "\n".join(
        f'                "{command.name}") offered="{" ".join(_arguments(command))}";;'
        for command in commands
        if _arguments(command)
    )
    of_groups = "\n".join(
        f'        "{group}") offered="{" ".join(_first_words(commands, group))} --help";;' for group in groups
    )
    return f"""\
# completion of {program}; made by '{program} completion'
_{program}() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="" word="" offered="" place=1
    # bash takes --option=value for three words
    if [ "$current" = "=" ]; then
        current=""
    elif [ "$before" = "=" ]; then
        before="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    while [ "$place" -lt "$COMP_CWORD" ]; do
        word="${{COMP_WORDS[place]}}"
        place=$((place + 1))
        case "$word" in -*) continue;; esac
        command="${{command:+$command }}$word"
        case "$command" in {"|".join(groups)}) ;; *) break;; esac
    done
    case "$command $before" in
{of_values}
        {"|".join(files)}) return;;
        *) case "$current" in
            -*) case "$command" in
{of_options}
            esac;;
            *) case "$command" in
{of_arguments}
            esac;;
        esac;;
    esac
    case "$command" in
        "") offered="{top}";;
{of_groups}
    esac
    COMPREPLY=( $(compgen -W "$offered" -- "$current") )
}}
complete -o default -F _{program} {program}
"""


def fish(commands: "tuple[Command, ...]", groups: dict[str, str], program: str) -> str:
    """A script for fish; it offers files where nothing else is said."""
    lines = [
        f"# completion of {program}; made by '{program} completion'",
        f"function __{program}_is --description 'whether these are the words of the command so far'",
        "    set -l words (commandline -opc)",
        "    set -l found",
        "    for word in $words[2..-1]",
        "        string match -q -- '-*' $word; and continue",
        "        set -a found $word",
        f'        contains -- "$found" {" ".join(groups)}; or break',
        "    end",
        '    test "$found" = "$argv"',
        "end",
    ]

    def offer(command: str, rest: str, said: str = "") -> None:
        when = f"__{program}_is {command}".strip()
        lines.append(f"complete -c {program} -n '{when}' {rest}" + (f" -d {_quoted(said)}" if said else ""))

    for word, said in {**_first_words(commands, None), **groups}.items():
        offer("", f"-f -a {word}", said)
    offer("", "-f -l version", "print the version")
    for group in groups:
        for word, said in _first_words(commands, group).items():
            offer(group, f"-f -a {word}", said)
    for command in commands:
        if arguments := _arguments(command):
            offer(command.name, f"-a {_quoted(' '.join(arguments))}")
        for word, option in _options(command):
            found = values_of(command.name, option)
            takes = "" if option.switch else f" -x -a {_quoted(' '.join(found))}" if found else " -r -F"
            offer(command.name, f"-l {word[2:]}{takes}", option.help.split(";")[0].removesuffix("."))
        for names, takes_value, said in _COMMON:
            flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in names)
            offer(command.name, f"{flags}{' -r -F' if takes_value else ''}", said)
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    r"""A text in quotes as fish reads them.

    Example:
        >>> print(_quoted("the user's"))
        'the user\'s'
    """
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
