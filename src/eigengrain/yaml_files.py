"""Reading YAML that may come from a stranger: plain values only, of bounded size and depth. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from eigengrain.errors import FileError
from eigengrain.files import read_text

#: limits of a file of options: bytes, levels of nesting, and values after aliases are expanded
MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 20, 50, 10_000


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        FileError: if the file is missing, too large, not UTF-8, not YAML, not a mapping, or not made of plain values.
    """
    text = read_text(path, MAX_BYTES)
    try:
        values = load(text)
    except ValueError as error:
        raise FileError(path, str(error)) from None
    if not isinstance(values, Mapping):
        content_type = "nothing" if values is None else f"a {type(values).__name__}"
        raise FileError(path, f"it holds {content_type}, expected a mapping with one 'name: value' per line")
    return dict(values)


def load(text: str) -> Any:
    """Parse YAML text into None, bool, int, float, str, list and dict.

    Raises:
        ValueError: for other text, tags, recursive aliases, more than ``MAX_VALUES`` values after aliases are expanded, and
            nesting deeper than ``MAX_DEPTH``.

    Example:
        >>> load("lr: 0.1\\ndrops: [50, 100]")
        {'lr': 0.1, 'drops': [50, 100]}
        >>> load("!!python/object/apply:os.system [ls]")
        Traceback (most recent call last):
            ...
        ValueError: line 1: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed, only plain values
    """
    try:
        _check_events(text)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_size(node, {})
            return check_plain(loader.construct_document(node))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None


def check_plain(value: Any, depth: int = 0) -> Any:
    """Return the value if it is None, bool, int, float, str, or a list or string-keyed mapping of such values.

    Raises:
        ValueError: for any other type, or nesting deeper than ``MAX_DEPTH``.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the keys of a mapping must be strings, got {key!r}")
            check_plain(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_plain(item, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"only plain values are allowed, got a {type(value).__name__}")
    return value


def _check_events(text: str) -> None:
    """Check tags and depth on the parser's events, before anything recursive or large is built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ValueError(f"line {event.start_mark.line + 1}: the tag {tag!r} is not allowed, only plain values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"line {event.start_mark.line + 1}: values are nested deeper than {MAX_DEPTH} levels")


def _check_size(node: Any, sizes: dict[int, int], ancestors: tuple[int, ...] = ()) -> int:
    """Check how many values a node expands to; aliases make a graph instead of a tree."""
    if id(node) in ancestors:
        raise ValueError(f"line {node.start_mark.line + 1}: an alias refers to a value that contains it")
    if id(node) not in sizes:
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        if len(ancestors) > MAX_DEPTH:
            raise ValueError(f"values are nested deeper than {MAX_DEPTH} levels")
        sizes[id(node)] = 1 + sum(_check_size(child, sizes, (*ancestors, id(node))) for child in children)
    if sizes[id(node)] > MAX_VALUES:
        raise ValueError(f"aliases expand to more than {MAX_VALUES} values")
    return sizes[id(node)]
