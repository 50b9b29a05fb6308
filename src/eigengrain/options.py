"""The options of commands and trainings, as their dataclasses declare them. No torch here.

A config is built from plain values: a YAML file, a mapping or the command line. Each value is checked against the type of
its field; nothing is imported or called because a value names it.
"""

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from eigengrain import yaml_files
from eigengrain.errors import ArgumentError, UnknownName

C = TypeVar("C")

#: placeholder for the value of an option in the help, where its type does not give one
_METAVARS = {
    **dict.fromkeys(("data", "root", "records"), "FOLDER"),
    **dict.fromkeys(("checkpoint", "out", "images", "weights"), "PATH"),
    **dict.fromkeys(("per_class", "class_names"), "FILE"),
    **dict.fromkeys(("recipe", "name", "opt", "backbone", "head", "label", "auto_augment", "reference"), "NAME"),
}


def build(config: type[C], values: Mapping[str, Any]) -> C:
    """Build a dataclass from plain values; nested dataclasses take nested mappings.

    Args:
        config: a dataclass whose fields are plain types, lists, tuples, ``dict[str, Any]`` or dataclasses.
        values: field name to value; missing fields keep their defaults.

    Raises:
        UnknownName: for an unknown key, with close matches.
        ArgumentError: for a value of the wrong type.
    """
    return _build(config, values, "")


def _build(config: type[C], values: Any, prefix: str) -> C:
    if not isinstance(values, Mapping):
        raise ArgumentError(prefix.rstrip(".") or "options", "must be a mapping of names to values", values)
    hints, names = get_type_hints(config), [f.name for f in fields(config)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise UnknownName("option", f"{prefix}{key}", [prefix + name for name in names])
    return config(**{key: convert(value, hints[key], prefix + key) for key, value in values.items()})


def convert(value: Any, hint: Any, name: str) -> Any:
    """Check a plain value against a type hint and return it as that type.

    An int is accepted as a float, a list as a tuple, and text such as '1e-3', which YAML does not read as a number, as a
    float.

    Raises:
        ArgumentError: if the value does not fit.

    Example:
        >>> convert([1, 2], list[int] | int, "sizes"), convert("1e-3", float, "lr")
        ([1, 2], 0.001)
        >>> convert(True, int, "epochs")
        Traceback (most recent call last):
            ...
        eigengrain.errors.ArgumentError: epochs must be an integer, got True
    """
    if is_dataclass(hint):
        return _build(hint, value, f"{name}.")  # type: ignore[arg-type]
    for kind in types_of(hint):
        try:
            return _convert(value, kind)
        except _Mismatch:
            continue
    raise ArgumentError(name, f"must be {describe_type(hint)}", value)


class _Mismatch(Exception):
    """A value is not of the type that is tried."""


def _convert(value: Any, kind: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is type(None) and value is None:
        return None
    if origin is Literal and value in args and not isinstance(value, bool):
        return value
    if origin is list and isinstance(value, list | tuple):
        return [_any_of(item, args[0]) for item in value]
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(_any_of(item, hint) for item, hint in zip(value, args, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return dict(yaml_files.check_plain(value))
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            raise _Mismatch from None
    raise _Mismatch


def _any_of(value: Any, hint: Any) -> Any:
    for kind in types_of(hint):
        try:
            return _convert(value, kind)
        except _Mismatch:
            continue
    raise _Mismatch


def types_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe_type(hint: Any) -> str:
    """What a value of a type is called in a message.

    Example:
        >>> describe_type(list[int] | int), describe_type(int | Literal["auto"] | None)
        ('an integer or a list of integers such as 1,2', 'an integer or auto or null')
    """
    kinds = [kind for kind in types_of(hint) if kind is not type(None)]
    names = sorted({_describe(kind) for kind in kinds}, key=lambda text: ("list" in text, text))
    return " or ".join([*names, *(["null"] if type(None) in types_of(hint) else [])])


def _describe(kind: Any) -> str:
    if get_origin(kind) is list:
        items = {int: "integers such as 1,2", float: "numbers such as 0.1,0.2"}
        return f"a list of {items.get(get_args(kind)[0], 'names such as a,b')}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers such as [0.5,1]"
    if get_origin(kind) is dict:
        return "a mapping such as '{key: value}'"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "text")


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Args:
        name: dotted name, such as data.transforms.kind.
        help: description, from the docstring of its dataclass.
        hint: type.
        default: value if the option is not given.
        switch: whether it takes no value.
    """

    name: str
    help: str
    hint: Any
    default: Any
    switch: bool = False

    @property
    def last(self) -> str:
        """The last part of the dotted name."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def group(self) -> str:
        """The dotted name without its last part; empty for an option of the command itself."""
        return self.name.rpartition(".")[0]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have, without None."""
        return tuple(kind for kind in types_of(self.hint) if kind is not type(None))

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return type(None) in get_args(self.hint)

    @property
    def is_path(self) -> bool:
        """Whether a value is a path or a list of paths."""
        return _METAVARS.get(self.last) in ("FOLDER", "PATH", "FILE") and self.kinds in ((str,), (list[str],))

    @property
    def is_list(self) -> bool:
        """Whether a value may be a list of any length."""
        return any(get_origin(kind) is list for kind in self.kinds)

    @property
    def literals(self) -> tuple[str, ...]:
        """The literal values of its type."""
        return tuple(dict.fromkeys(word for kind in self.kinds for word in _words(kind)))

    def parse(self, text: str) -> Any:
        """Convert the text of a command line to a value.

        Raises:
            ValueError: if the text does not fit the type.

        Example:
            >>> Option("reduce", "", int | Literal["auto"] | None, "auto").parse("256")
            256
        """
        if self.kinds == (str,):
            return None if text == "null" and self.optional else text
        if self.literals and text in self.literals and not self.is_list and bool not in self.kinds:
            return text
        try:
            return convert(yaml_files.load(text), self.hint, self.name)
        except ValueError:
            if str in self.kinds:
                return text
            if self.literals and not self.is_list and len(self.kinds) == 1:
                raise UnknownName(self.name, text, self.literals) from None
            raise ArgumentError(self.name, f"must be {self.expected}", text) from None

    def metavar(self, choices: tuple[str, ...] = ()) -> str:
        """Placeholder for its value in the help.

        Example:
            >>> Option("reduce", "", int | Literal["auto"] | None, "auto").metavar()
            'N|auto'
            >>> Option("batch", "", list[int] | int, 1).metavar(), Option("out", "", str | None, None).metavar()
            ('N,…', 'PATH')
        """
        if choices and not self.is_list:
            return "{" + ",".join(choices) + "}"
        names = {self._metavar(kind) for kind in self.kinds}
        return "|".join(sorted(text for text in names if f"{text},…" not in names))  # one value is a short list

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
        by_type = {int: "N", float: "X", bool: "{true,false}"}
        return by_type.get(kind) or _METAVARS.get(self.last) or self.last.upper()

    @property
    def expected(self) -> str:
        """Description of its type for messages."""
        return describe_type(self.hint)

    @property
    def default_text(self) -> str:
        """Its default as it would be typed; empty if there is nothing worth showing.

        Example:
            >>> Option("seeds", "", list[int], [0, 1]).default_text, Option("flip", "", bool, True).default_text
            ('[0,1]', 'true')
        """
        if self.switch or self.default is None or self.default in ("", [], {}):
            return ""
        return _as_typed(self.default)


def _words(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is list:
        return _words(get_args(kind)[0])
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _as_typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_as_typed, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_of(config: type[Any], prefix: str = "") -> tuple[Option, ...]:
    """All options of a dataclass and of the dataclasses in it, in order.

    Example:
        >>> from eigengrain.training.config import Train
        >>> [option.name for option in options_of(Train)][:3]
        ['recipe', 'data.name', 'data.root']
    """
    hints, descriptions = get_type_hints(config), arguments(config.__doc__ or "")
    options: list[Option] = []
    for each in fields(config):
        name, hint = prefix + each.name, hints[each.name]
        if is_dataclass(hint):
            options += options_of(hint, f"{name}.")  # type: ignore[arg-type]
            continue
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        switch = hint is bool and default is False and not prefix
        options.append(Option(name, descriptions.get(each.name, ""), hint, None if default is MISSING else default, switch))
    return tuple(options)


def arguments(docstring: str) -> dict[str, str]:
    """The descriptions in the Args section of a docstring, one line each.

    Example:
        >>> arguments('''Sizes.
        ...
        ...     Args:
        ...         width: width of the image,
        ...             in pixels.
        ...         depth: number of layers.
        ... ''')
        {'width': 'width of the image, in pixels.', 'depth': 'number of layers.'}
    """
    _, _, rest = docstring.partition("Args:\n")
    section = rest.split("\n\n")[0]
    descriptions: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        match = re.match(r" {8}(\w+): (.*)", line)
        if match:
            name = match[1]
            descriptions[name] = match[2]
        elif name and line.strip():
            descriptions[name] += " " + line.strip()
    return {name: text.strip() for name, text in descriptions.items()}
