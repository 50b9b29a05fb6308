"""The options of a command as its dataclass has them: what the help shows, the shell completes and the parser is given.

Here too are the checks of values that several commands make.
"""

import re
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from eigengrain.errors import unknown_name

#: what stands for the value of an option in the help, where its name does not say it
_METAVARS = {
    **dict.fromkeys(("data", "root", "records"), "FOLDER"),
    **dict.fromkeys(("checkpoint", "out", "images", "weights"), "PATH"),
    **dict.fromkeys(("per_class", "class_names"), "FILE"),
    **dict.fromkeys(("recipe", "name", "opt", "backbone", "head", "label", "auto_augment", "reference"), "NAME"),
}


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: in dots, such as data.transforms.kind.
        help: what it means.
        hint: its type.
        default: its value where it is not given.
        switch: whether it takes no value.
    """

    name: str
    help: str
    hint: Any
    default: Any
    switch: bool = False

    @property
    def last(self) -> str:
        """The name without what it belongs to."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def group(self) -> str:
        """What it belongs to, in dots; empty for an option of the command itself."""
        return self.name.rpartition(".")[0]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have, None left out."""
        union = get_origin(self.hint) in (Union, types.UnionType)
        return tuple(kind for kind in (get_args(self.hint) if union else (self.hint,)) if kind is not type(None))

    @property
    def optional(self) -> bool:
        """Whether it may be null."""
        return type(None) in get_args(self.hint)

    @property
    def is_path(self) -> bool:
        """Whether a value is the place of a file or a folder, or of several."""
        return _METAVARS.get(self.last) in ("FOLDER", "PATH", "FILE") and self.kinds in ((str,), (list[str],))

    @property
    def is_list(self) -> bool:
        """Whether a value may be a list of any length."""
        return any(get_origin(kind) is list for kind in self.kinds)

    @property
    def literals(self) -> tuple[str, ...]:
        """The words that its type names."""
        found = [word for kind in self.kinds for word in _words(kind)]
        return tuple(dict.fromkeys(found))

    def metavar(self, choices: tuple[str, ...] = ()) -> str:
        """What stands for its value.

        Example:
            >>> Option("reduce", "", int | Literal["auto"] | None, "auto").metavar()
            'N|auto'
            >>> Option("batch", "", list[int] | int, 1).metavar(), Option("out", "", str | None, None).metavar()
            ('N,…', 'PATH')
        """
        if choices and not self.is_list:
            return "{" + ",".join(choices) + "}"
        found = {self._metavar(kind) for kind in self.kinds}
        return "|".join(sorted(text for text in found if f"{text},…" not in found))  # one is a short list

    def _metavar(self, kind: Any) -> str:
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
        if get_origin(kind) is list:
            [item] = get_args(kind)
            return f"{_METAVARS.get(self.last, 'NAME') if item is str else self._metavar(item)},…"
        if get_origin(kind) is tuple:
            return "[" + ",".join(map(self._metavar, get_args(kind))) + "]"
        if get_origin(kind) is dict:
            return "'{key: value}'"
        named = {int: "N", float: "X", bool: "{true,false}"}
        return named.get(kind) or _METAVARS.get(self.last) or self.last.upper()

    @property
    def expected(self) -> str:
        """What its value should be, in words.

        Example:
            >>> Option("batch", "", list[int] | int, 1).expected
            'a whole number or a list of whole numbers such as 1,2'
            >>> Option("reduce", "", int | Literal["auto"] | None, "auto").expected
            'a whole number or auto or null'
        """
        said = sorted({_in_words(kind) for kind in self.kinds}, key=lambda text: ("list" in text, text))
        return " or ".join([*said, *(["null"] if self.optional else [])])

    @property
    def default_text(self) -> str:
        """Its default as one would type it; empty where there is none to speak of.

        Example:
            >>> Option("seeds", "", list[int], [0, 1]).default_text, Option("flip", "", bool, True).default_text
            ('[0,1]', 'true')
        """
        if self.switch or self.default is None or self.default in ("", [], {}):
            return ""
        return _typed(self.default)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is list:
        many = {int: "whole numbers such as 1,2", float: "numbers such as 0.1,0.2"}
        return f"a list of {many.get(get_args(kind)[0], 'names such as a,b')}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers such as [0.5,1]"
    if get_origin(kind) is dict:
        return "a mapping such as '{key: value}'"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")


def _words(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is list:
        return _words(get_args(kind)[0])
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_of(config: type[Any], prefix: str = "") -> tuple[Option, ...]:
    """All options of a dataclass, those of dataclasses in it included, in their order.

    Example:
        >>> from eigengrain.training.config import Train
        >>> [option.name for option in options_of(Train)][:3]
        ['recipe', 'data.name', 'data.root']
    """
    hints, said = get_type_hints(config), arguments(config.__doc__ or "")
    found: list[Option] = []
    for each in fields(config):
        name, hint = prefix + each.name, hints[each.name]
        if is_dataclass(hint):
            found += options_of(hint, f"{name}.")  # type: ignore[arg-type]
            continue
        made = each.default_factory() if each.default_factory is not MISSING else None
        default = made if each.default is MISSING else each.default
        switch = hint is bool and default is False and not prefix
        found.append(Option(name, said.get(each.name, ""), hint, default, switch))
    return tuple(found)


def arguments(docstring: str) -> dict[str, str]:
    """What the section Args of a docstring says of each name, on one line each.

    Example:
        >>> arguments('''Sizes.
        ...
        ...     Args:
        ...         width: of the thing,
        ...             in pixels.
        ...         depth: of it.
        ... ''')
        {'width': 'of the thing, in pixels.', 'depth': 'of it.'}
    """
    _, _, rest = docstring.partition("Args:\n")
    section = rest.split("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        match = re.match(r" {8}(\w+): (.*)", line)
        if match:
            name = match[1]
            found[name] = match[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return {name: text.strip() for name, text in found.items()}


def check_choices(config: Any, **choices: Sequence[str]) -> None:
    """See that options have one of their choices.

    Raises:
        ValueError: for another value.

    Example:
        >>> check_choices(types.SimpleNamespace(split="tset"), split=("train", "test"))
        Traceback (most recent call last):
            ...
        ValueError: unknown --split 'tset': did you mean 'test'? Choose from: train, test
    """
    for option, known in choices.items():
        value = getattr(config, option)
        if value not in known:
            raise unknown_name(f"--{option}", value, known)


def check_least(config: Any, **least: int) -> None:
    """See that options are no smaller than they may be; a word in place of a number, or None, is not looked at.

    Raises:
        ValueError: for a smaller number.

    Example:
        >>> check_least(types.SimpleNamespace(workers=-1, count="all"), count=1, workers=0)
        Traceback (most recent call last):
            ...
        ValueError: --workers must be at least 0, got -1
    """
    for option, smallest in least.items():
        value = getattr(config, option)
        if isinstance(value, int | float) and value < smallest:
            raise ValueError(f"--{option} must be at least {smallest}, got {value}")
