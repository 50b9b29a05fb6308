"""From what was typed to options by name: arguments without a name, lists, and the switches of every command."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_origin

from eigengrain.options import Option

QUIET, JSON, PRINT = ("-q", "--quiet"), ("--json",), ("--print_config",)


class Words(NamedTuple):
    """Options for the parser, texts that it need not read, how the command is to speak, and whether to show them only."""

    options: list[str]
    texts: dict[str, str | list[str]]
    quiet: bool
    json: bool
    print_config: bool


def named(words: Sequence[str], options: Sequence[Option], positional: Mapping[str, str]) -> Words:
    """Every word as an option by its name.

    A list may be written with brackets, ``[1,2]``, or with commas alone, ``1,2``. What has no name is a text and taken as
    it is: there may be thousands of files, with any letters in their names.

    Args:
        words: what follows the name of a command.
        options: of the command.
        positional: texts that may be given without their name, and how many of each: ? for one, * for any number.

    Raises:
        ValueError: for a word that nothing stands for, or something that is given both ways.

    Example:
        >>> options = [Option("name", "", str, ""), Option("sizes", "", list[int], [])]
        >>> named(["birds", "--sizes", "1,2", "-q"], options, {"name": "?"})
        Words(options=['--sizes=[1,2]'], texts={'name': 'birds'}, quiet=True, json=False, print_config=False)
    """
    known = {option.name: option for option in options}
    # --data FILE holds the options --data.name, --data.root and so on
    holders = {option.name[:place] for option in options for place, letter in enumerate(option.name) if letter == "."}
    found: list[str] = []
    loose: list[str] = []
    typed: set[str] = set()
    texts: dict[str, str | list[str]] = {}
    quiet = as_json = show = False
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word == "--":
            loose += rest
            break
        name, given, value = word.removeprefix("--").partition("=")
        option = known.get(name.removesuffix("+"))
        takes_value = (option is not None and not option.switch) or name in holders or name == "config"
        if word in QUIET:
            quiet = True
        elif word in JSON:
            as_json = True
        elif word in PRINT:
            show = True
        elif not word.startswith("-") or word == "-":
            loose.append(word)
        elif not takes_value or not word.startswith("--"):
            found.append(word)  # a switch, or something that the parser refuses
        elif not given and (not rest or rest[0].startswith("--")):
            found.append(word)  # its value is missing
        else:
            typed.add(name)
            value = value if given else rest.popleft()
            found.append(f"--{name}={_listed(value, option) if option else value}")
    for name, many in positional.items():
        if not loose:
            break
        mine, loose = (loose, []) if many == "*" else (loose[:1], loose[1:])
        if typed & {name, f"{name}+"}:
            raise ValueError(f"{mine[0]!r} and --{name} say the same thing twice: give one of them")
        texts[name] = mine if many == "*" else mine[0]
    if loose:
        takes = ", ".join(name.upper() for name in positional)
        expected = f"besides options there is {takes} only" if takes else "only options are expected here"
        raise ValueError(f"unexpected argument {loose[0]!r}: {expected}")
    return Words(found, texts, quiet, as_json, show)


def _listed(value: str, option: Option) -> str:
    """A list in brackets, where commas say that it is one or the option takes nothing else."""
    only = len(option.kinds) == 1
    takes_one = option.is_list or any(get_origin(kind) is tuple for kind in option.kinds)
    if not takes_one or not value or value.startswith("[") or value == "null" or not (only or "," in value):
        return value
    # words are quoted, so that no letter of them is read as YAML
    return json.dumps(value.split(","), ensure_ascii=False) if option.kinds == (list[str],) else f"[{value}]"
