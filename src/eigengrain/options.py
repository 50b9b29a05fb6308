"""The options of commands and trainings, as their dataclasses declare them. No torch here.

A config is built from plain values: a YAML file, a mapping or the command line. Each value is checked against the type of
its field; nothing is imported or called because a value names it.
"""

import inspect
import json
import math
import operator
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from eigengrain import yaml_files
from eigengrain.errors import ArgumentError, UnknownName

C = TypeVar("C")

#: choices that the help has room for
_MOST_CHOICES = 8
#: bounds of a number: the words for them and their tests
_BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
#: names, or a function that lists them
Names = Sequence[str] | Callable[[], Sequence[str]]

#: placeholder for the value of an option in the help, where its type does not give one
_METAVARS = {
    **dict.fromkeys(("data", "root", "records"), "FOLDER"),
    **dict.fromkeys(("checkpoint", "out", "images", "weights"), "PATH"),
    **dict.fromkeys(("per_class", "class_names"), "FILE"),
    **dict.fromkeys(("recipe", "name", "opt", "backbone", "head", "label", "auto_augment", "reference"), "NAME"),
}


def setting(
    default: Any,
    *,
    choices: Names = (),
    offers: Names = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    several: bool = False,
) -> Any:
    """Declare an option: a dataclass field with what its type does not tell. :func:`check` checks its value.

    Args:
        default: default value; a list or dict is copied for every instance.
        choices: the only names that are allowed.
        offers: names that the shell completes, where others are allowed too.
        least: smallest number.
        above: number that a value must exceed.
        most: largest number.
        below: number that a value must not reach.
        several: for a list: whether the command line accepts several words after the option, as in ``--rules a b``.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    facts = {"choices": choices, "offers": offers, "several": several, **bounds}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=facts)
    return field(default=default, metadata=facts)


def check(config: Any, prefix: str = "") -> None:
    """Check the values of a dataclass against its :func:`setting` declarations; None is always allowed.

    Raises:
        UnknownName: if a value is not among the choices.
        ArgumentError: if a number is not finite or out of range.
    """
    for each in fields(config):
        value, facts, name = getattr(config, each.name), each.metadata, prefix + each.name
        choices = _list(facts.get("choices", ()))
        bounds = [(*_BOUNDS[key], limit) for key, limit in facts.items() if key in _BOUNDS and limit is not None]
        for item in value if isinstance(value, list | tuple) else [value]:
            if choices and item is not None and item not in choices:
                raise UnknownName(name, item, choices)
            is_number = isinstance(item, int | float) and not isinstance(item, bool)
            if bounds and is_number and not (math.isfinite(item) and all(fits(item, limit) for _, fits, limit in bounds)):
                expected = " and ".join(f"{words} {limit:g}" for words, _, limit in bounds)
                raise ArgumentError(name, f"must be {expected}", item)


def _list(names: Names) -> tuple[str, ...]:
    return tuple(names() if callable(names) else names)


def build(config: type[C], values: Any, prefix: str = "") -> C:
    """Build a dataclass from a mapping of field names to plain values; nested dataclasses take nested mappings.

    Raises:
        UnknownName: for an unknown key, with close matches.
        ArgumentError: for a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ArgumentError(prefix.rstrip(".") or "options", "must be a mapping of names to values", values)
    hints, names = get_type_hints(config), [f.name for f in fields(config)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            own = [prefix + name for name in names]
            near = similar_options(f"{prefix}{key}", [*own, *(option.name for option in options_of(config, prefix))])
            raise UnknownName("option", f"{prefix}{key}", own, suggestions=dict.fromkeys(near))
    return config(**{key: convert(value, hints[key], prefix + key) for key, value in values.items()})


def convert(value: Any, hint: Any, name: str) -> Any:
    """Check a plain value against a type hint and return it as that type, or raise an ArgumentError.

    An int or text such as '1e-3', which YAML does not read as a number, is accepted as a float, and a list as a tuple.

    Example:
        >>> convert([1, 2], list[int] | int, "sizes"), convert("1e-3", float, "lr")
        ([1, 2], 0.001)
        >>> convert(True, int, "epochs")
        Traceback (most recent call last):
            ...
        eigengrain.errors.ArgumentError: epochs must be an integer, got True
    """
    if is_dataclass(hint):
        return build(hint, value, f"{name}.")  # type: ignore[arg-type]
    try:
        return _convert(value, hint)
    except TypeError:
        raise ArgumentError(name, f"must be {describe_type(hint)}", value) from None


def _convert(value: Any, kind: Any) -> Any:
    """Return the value as a type, or raise a TypeError."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for member in args:
            with suppress(TypeError):
                return _convert(value, member)
    if kind is type(None) and value is None:
        return None
    if origin is Literal and value in args and not isinstance(value, bool):
        return value
    if origin is list and isinstance(value, list | tuple):
        return [_convert(item, args[0]) for item in value]
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(_convert(item, hint) for item, hint in zip(value, args, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return dict(yaml_files.check_plain(value))
    if kind in (bool, str, int) and isinstance(value, kind) and (kind is bool) == isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            return float(value)
    raise TypeError


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
    """One option of a command."""

    name: str  # dotted, such as data.transforms.kind
    help: str  # description, from the docstring of its dataclass
    hint: Any  # type
    default: Any
    switch: bool = False  # whether it takes no value
    facts: Mapping[str, Any] = field(default_factory=dict)  # what :func:`setting` declares

    @property
    def last(self) -> str:
        """The last part of the dotted name."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def argument(self) -> str:
        """Its name in the help if it is given as an argument: CHECKPOINT, or FOLDER for data.root."""
        return self.metavar if "." in self.name else self.name.upper()

    @property
    def group(self) -> str:
        """The part of a dotted name before its last; empty for an option of the command itself."""
        return self.name.rpartition(".")[0].rpartition(".")[2]

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
        return self._word in ("FOLDER", "PATH", "FILE") and self.kinds in ((str,), (list[str],))

    @property
    def _word(self) -> str:
        """Placeholder for one text; ``data`` is a folder, or a name if names are offered."""
        word = _METAVARS.get(self.last, "")
        return "NAME" if word == "FOLDER" and self.offers else word

    @property
    def is_list(self) -> bool:
        """Whether a value may be a list of any length."""
        return any(get_origin(kind) is list for kind in self.kinds)

    @property
    def literals(self) -> tuple[str, ...]:
        """The literal values of its type."""
        return tuple(dict.fromkeys(word for kind in self.kinds for word in _words(kind)))

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that it accepts, if it accepts nothing else."""
        return _list(self.facts.get("choices", ())) or (self.literals if len(self.kinds) == 1 else ())

    @property
    def offers(self) -> tuple[str, ...]:
        """The names that the shell completes."""
        return self.choices or _list(self.facts.get("offers", ())) or self.literals

    def parse(self, text: str) -> Any:
        """Convert the text of a command line to a value; a list is written ``a,b`` or ``[a,b]``.

        Example:
            >>> Option("reduce", "", int | Literal["auto"] | None, "auto").parse("256")
            256
            >>> Option("heads", "", list[str], []).parse("gap,mpncov+seb"), Option("x", "", Literal[1, 2], 1).parse("2")
            (['gap', 'mpncov+seb'], 2)
        """
        if self.kinds == (str,):
            return None if text == "null" and self.optional else text
        words = [word for kind in self.kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if text in map(str, words):
            return next(word for word in words if str(word) == text)
        try:
            return convert(self._load(text), self.hint, self.name)
        except ValueError:
            if str in self.kinds:
                return text
            if self.literals and not self.is_list and len(self.kinds) == 1:
                raise UnknownName(self.name, text, self.literals) from None
            raise ArgumentError(self.name, f"must be {describe_type(self.hint)}", text) from None

    def _load(self, text: str) -> Any:
        """The plain value of a text, or the values of a list without brackets."""
        takes_list = any(get_origin(kind) in (list, tuple) for kind in self.kinds)
        bracketed = text.startswith("[") or (text == "null" and self.optional)
        if not takes_list or bracketed or not text or not (len(self.kinds) == 1 or "," in text):
            return yaml_files.load(text)
        items = text.split(",")
        return items if self.kinds == (list[str],) else [yaml_files.load(item) for item in items]

    @property
    def metavar(self) -> str:
        """Placeholder for its value in the help.

        Example:
            >>> Option("reduce", "", int | Literal["auto"] | None, "auto").metavar
            'N|auto'
            >>> Option("batch", "", list[int] | int, 1).metavar, Option("out", "", str | None, None).metavar
            ('N,…', 'PATH')
        """
        if self.choices and len(self.choices) <= _MOST_CHOICES and not self.is_list:
            return "{" + ",".join(self.choices) + "}"
        names = {self._metavar(kind) for kind in self.kinds}
        return "|".join(sorted(text for text in names if f"{text},…" not in names))  # one value is a short list

    def _metavar(self, kind: Any) -> str:
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
        if get_origin(kind) is list:
            [item] = get_args(kind)
            return f"{self._word or 'NAME' if item is str else self._metavar(item)},…"
        if get_origin(kind) is tuple:
            return "[" + ",".join(map(self._metavar, get_args(kind))) + "]"
        if get_origin(kind) is dict:
            return "'{key: value}'"
        return {int: "N", float: "X", bool: "{true,false}"}.get(kind) or self._word or self.last.upper()

    @property
    def default_text(self) -> str:
        """Its default as it would be typed, such as [0,1] or true; empty if there is nothing worth showing."""
        return "" if self.switch or self.default in (None, "", [], {}) else _as_typed(self.default)


def _words(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is list:
        return _words(get_args(kind)[0])
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _as_typed(value: Any) -> str:
    if value is None or isinstance(value, bool | dict):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_as_typed, value))}]"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def options_of(config: type[Any], prefix: str = "") -> tuple[Option, ...]:
    """All options of a dataclass and of the dataclasses in it, in order."""
    hints, descriptions = get_type_hints(config), arguments(config.__doc__ or "")
    options: list[Option] = []
    for each in fields(config):
        name, hint = prefix + each.name, hints[each.name]
        if is_dataclass(hint):
            options += options_of(hint, f"{name}.")  # type: ignore[arg-type]
            continue
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        switch = hint is bool and default is False and not prefix
        default = None if default is MISSING else default
        options.append(Option(name, descriptions.get(each.name, ""), hint, default, switch, each.metadata))
    return tuple(options)


def similar_options(name: str, options: Sequence[str]) -> list[str]:
    """At most three options whose last part is that of a wrong name, or close to it; else those that are close as a whole.

    Example:
        >>> similar_options("lr", ["log", "optimiser.lr"]), similar_options("models.head", ["model.head", "seed"])
        (['optimiser.lr'], ['model.head'])
        >>> similar_options("classifier_lr", ["log", "optimiser.lr", "optimiser.classifier_lr_scale"])
        ['optimiser.classifier_lr_scale']
    """
    last, lasts = name.rpartition(".")[2], {option: option.rpartition(".")[2] for option in options}
    near = [last] if last in lasts.values() else get_close_matches(last, set(lasts.values()), n=3, cutoff=0.65)
    same = [option for part in near for option in options if lasts[option] == part]
    return same[:3] or get_close_matches(name, options, n=3, cutoff=0.65)


def as_words(config: Any, skip: Sequence[str] = (), base: Any = None) -> list[str]:
    """The words of a command line for the options that differ from the defaults, or from those of another config."""
    words: list[str] = []
    for option in options_of(type(config)):
        read = operator.attrgetter(option.name)
        value = read(config)
        if value != (option.default if base is None else read(base)) and option.name not in skip:
            values = value if option.facts.get("several") else [] if option.switch and value else [value]
            words += [f"--{option.name}", *map(_as_typed, values)]
    return words


def arguments(docstring: str) -> dict[str, str]:
    """The descriptions in the Args section of a docstring, one line each."""
    section = inspect.cleandoc(docstring).partition("Args:\n")[2].split("\n\n")[0]
    items = re.findall(r"^ {4}(\w+): (.*(?:\n {5}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in items}
