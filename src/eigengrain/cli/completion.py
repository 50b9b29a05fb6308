"""``eigengrain completion``: scripts with which shells complete commands, options and names, made by shtab."""

import argparse
from dataclasses import dataclass

from eigengrain.errors import ArgumentError
from eigengrain.options import Option, check, options_of, setting

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Completion:
    """Which shell.

    Args:
        shell: bash, zsh or fish.
    """

    shell: str = setting("", choices=SHELLS)

    def __post_init__(self) -> None:
        if not self.shell:
            raise ArgumentError("shell", "is missing", remedy=f"run 'eigengrain completion {'|'.join(SHELLS)}'")
        check(self)


def run(config: Completion) -> None:
    """Print the script. It contains all names, so completing starts no Python process."""
    import shtab

    script = shtab.complete(program_parser(), config.shell)
    if config.shell == "zsh":  # the script may run before the completion system is initialised
        script = f"(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}\n{script}"
    print(script)


def program_parser() -> argparse.ArgumentParser:
    """An argparse parser with all commands, their options, and the names that each option takes."""
    from shtab import FILE

    from eigengrain.cli.commands import COMMANDS, PROGRAM
    from eigengrain.cli.parser import add_options

    program = argparse.ArgumentParser(PROGRAM)
    program.add_argument("--version", "-V", action="store_true", help="print the version")
    commands = program.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        parser = commands.add_parser(command.name, help=command.help, description=command.help)
        actions = add_options(command, parser)
        for option in options_of(command.config):
            _describe(actions[option.name], option)
            if option.name in command.positional:
                _describe(parser.add_argument(option.name, nargs=command.positional[option.name]), option)
        actions["config"].complete = FILE  # type: ignore[attr-defined]
    return program


def _describe(action: argparse.Action, option: Option) -> None:
    """Set what the shell offers for an option: names or files, and a phrase about it."""
    from shtab import FILE

    action.help = option.help.split(";")[0].removesuffix(".").replace("%", "%%")
    if option.offers and not option.switch:
        action.choices = option.offers
    elif option.is_path:
        action.complete = FILE  # type: ignore[attr-defined]
