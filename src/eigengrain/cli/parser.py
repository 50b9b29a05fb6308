"""Parse the words after a command into its config dataclass."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from os.path import exists, expanduser
from typing import TYPE_CHECKING, Any, NamedTuple

from eigengrain.errors import ArgumentError, did_you_mean
from eigengrain.options import Option, build, describe_type, options_of, similar_options
from eigengrain.recipes import recipe_path
from eigengrain.yaml_files import read_mapping

if TYPE_CHECKING:
    from eigengrain.cli.commands import Command

#: options of every command: name on the command line, short name, metavar, help
COMMON = (
    ("quiet", "q", "", "no progress and no decoration: the result in bare lines, and errors"),
    ("json", "", "", "the result as one JSON document on stdout"),
    ("config", "", "FILE", "a YAML file with these options; options after it on the command line override it"),
    ("print_config", "", "", "print the options as YAML, for --config, and stop"),
    ("help", "h", "", "print this help and stop"),
)


class Request(NamedTuple):
    """A parsed command line."""

    command: "Command"
    config: Any
    quiet: bool
    json: bool
    note: str = ""  # which recipe was chosen, and why


class UsageError(ValueError):
    """A ``word`` of the command line is not understood; ``suggestions`` are options that are close to it."""

    def __init__(self, message: str, word: str, suggestions: Sequence[str] = ()):
        self.word, self.suggestions = word, tuple(suggestions)
        super().__init__(message)


class _Record(argparse.Action):
    """Append (option name, value) to ``namespace.given``: the order matters, as later options override earlier ones."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.given.append((self.dest, values))


def add_options(command: "Command", parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Add the options of a command to an argparse parser, and return them by name."""
    actions = {}
    for option in options_of(command.config):
        nargs = "*" if option.facts.get("several") else None
        actions[option.name] = parser.add_argument(f"--{option.name}", dest=option.name, action=_Record, nargs=nargs)
    for name, short, metavar, text in COMMON:
        if name != "help" and (name != "json" or command.has_result):
            flags = [f"-{short}", f"--{name}"] if short else [f"--{name}"]
            words = None if metavar else 0
            actions[name] = parser.add_argument(*flags, dest=name, action=_Record, nargs=words, help=text)
    return actions


def parse_command(command: "Command", words: Sequence[str]) -> Request:
    """Parse the words that follow the name of a command.

    Raises:
        UsageError: for an unknown option or an unexpected word.
        ArgumentError: for a value that does not fit its option.
        SystemExit: after ``--print_config``, with 0.
    """
    words = command.rewrite_words(words)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    actions = add_options(command, parser)
    options = {option.name: option for option in options_of(command.config)}
    try:
        namespace, rest = parser.parse_known_args(_with_switches(words[:end], options), argparse.Namespace(given=[]))
    except argparse.ArgumentError as error:
        raise _value_error(str(error.argument_name), options) from None
    for word in rest:
        if re.match(r"-[^\d.]", word):  # neither a dash nor a number
            raise unknown_option(word, [flag for action in actions.values() for flag in action.option_strings])
    given = _with_recipe(namespace.given) if "recipe" in options else namespace.given
    values: dict[str, Any] = {}
    typed: set[str] = set()  # options whose list is continued if they are repeated
    for name, text in given:
        if name == "config":
            if not text:
                raise _value_error("--config", options)
            _merge(values, read_mapping(expanduser(text)), options)
            typed.clear()
        elif name in options:
            value = _parse_value(options[name], text)
            if name in typed:
                value = [*_as_list(_get(values, name)), *_as_list(value)]
            _place(values, name, value)
            typed |= {name} if options[name].is_list else set()
    switches = {name for name, _ in given}
    _place_positional(command, [*rest, *words[end + 1 :]], switches, values, options)
    for option in options.values():
        _expand_home(values, option)
    if command.choose_recipe and [*rest, *words[end + 1 :]] and not {"recipe", "config"} & switches:
        from eigengrain.cli.commands import load

        recipe, note = load(command.choose_recipe)(values)
        chosen = parse_command(replace(command, choose_recipe=""), ["--recipe", recipe, *words])
        return chosen._replace(command=command, note=note)
    config = build(command.config, values)
    if "print_config" in switches:
        import yaml  # type: ignore[import-untyped]

        print(
            yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False, allow_unicode=True), end="", flush=True
        )
        raise SystemExit(0)
    return Request(command, config, "quiet" in switches, "json" in switches)


def _with_switches(words: Sequence[str], options: Mapping[str, Option]) -> list[str]:
    """The words with a ``true`` after each switch, unless ``true`` or ``false`` follows it."""
    out: list[str] = []
    for place, word in enumerate(words):
        option = options.get(word[2:]) if word.startswith("--") else None
        valued = "".join(words[place + 1 : place + 2]) in ("true", "false")
        out += [word, "true"] if option is not None and option.switch and not valued else [word]
    return out


def _with_recipe(given: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Put the file of the recipe in front, so that all options override it; a file of ``--config`` can name it too."""
    files = [read_mapping(expanduser(text)) for name, text in given if name == "config" and text]
    names = [text for name, text in given if name == "recipe"]
    names = list(dict.fromkeys(names + [file["recipe"] for file in files if isinstance(file.get("recipe"), str)]))
    if len(names) > 1:
        raise ArgumentError("recipe", "must be one, here and in all files of {config}", names)
    return [*(("config", recipe_path(name)) for name in names), *given]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _parse_value(option: Option, text: Any) -> Any:
    if option.is_path and "" in _as_list(text):  # an unset variable of the shell; it would mean the current folder
        raise _value_error(f"--{option.name}", {option.name: option})
    if not option.facts.get("several"):
        return option.parse(text)
    if not text:
        raise _value_error(f"--{option.name}", {option.name: option})
    [first, *more] = text  # one word may be a list, or the name of a file
    is_list = not more and ("," in first or first.startswith("[")) and not exists(first)
    return option.parse(first) if is_list else list(text)


def _value_error(flag: str, options: Mapping[str, Option]) -> ArgumentError:
    """The error of an option without a value, or of ``--quiet`` and the like with one."""
    name = flag.split("/")[-1].removeprefix("--")
    option = options.get(name)
    if name == "config":
        return ArgumentError(name, "needs a value: a YAML file")
    if option is None:
        return ArgumentError(name, "takes no value")
    names = option.offers if str in option.kinds else ()
    expected = f"choose from {', '.join(names)}" if names else "a path" if option.is_path else describe_type(option.hint)
    return ArgumentError(name, "needs a value", remedy=expected)


def unknown_option(word: str, options: Sequence[str]) -> UsageError:
    """The error for a word that is not among the options."""
    word = word.split("=")[0]
    names = {option.lstrip("-"): option for option in options}
    near = [names[name] for name in similar_options(word.lstrip("-"), [*names])]
    return UsageError(f"unknown option '{word}': {did_you_mean(near) or 'no option has a similar name'}", word, near)


def _place_positional(
    command: "Command", words: list[str], given: set[str], values: dict[str, Any], options: Mapping[str, Option]
) -> None:
    """Set the options that are given without their name; words are taken as they are, with any letters."""
    for name, many in command.positional.items():
        if not words:
            return
        own, words = (words, []) if many == "*" else (words[:1], words[1:])
        if options[name].is_path and "" in own:
            raise _value_error(f"--{name}", options)
        if name in given:
            raise UsageError(f"{own[0]!r} and --{name} both set {options[name].argument}: remove one of them", own[0])
        _place(values, name, own if many == "*" else own[0])
        for other, value in command.implied.items():
            if other not in given:
                _place(values, other, value)
    if words:
        names = ", ".join(options[name].argument for name in command.positional)
        expected = f"expected options and {names}" if names else "expected only options"
        raise UsageError(f"unexpected argument {words[0]!r}: {expected}", words[0])


def _merge(values: dict[str, Any], more: Mapping[str, Any], options: Mapping[str, Option], prefix: str = "") -> None:
    """Add a mapping to the values so far: sections are merged; options are replaced, also those that are mappings."""
    for key, value in more.items():
        section = isinstance(value, Mapping) and f"{prefix}{key}" not in options
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


def _get(values: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name in nested mappings, or None."""
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None  # type: ignore[assignment]
    return values


def _expand_home(values: dict[str, Any], option: Option) -> None:
    """Expand ~ in paths: shells do not expand it inside --out=~/runs, nor in files."""
    value = _get(values, option.name)
    if option.is_path and isinstance(value, str):
        _place(values, option.name, expanduser(value))
    elif option.is_path and isinstance(value, list):
        _place(values, option.name, [expanduser(item) if isinstance(item, str) else item for item in value])
