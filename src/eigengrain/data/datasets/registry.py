"""Data sets by name."""

import inspect
from importlib import import_module
from numbers import Integral
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.data.datasets.layout import layout_error
from eigengrain.data.files import permitted
from eigengrain.data.image_set import ImageSet
from eigengrain.errors import UnknownName


def open_dataset(name: str, root: str | Path | None = None, split: str = "train", **options: Any) -> ImageSet:
    """A data set by name, from a local folder; nothing is downloaded and no image is opened.

    Args:
        name: one of ``list_datasets()``.
        root: its folder, as ``eigengrain datasets`` shows it, or the one above; None for drawn images.
        split: ``train`` or ``test``; data sets without public test labels use their validation images as ``test``.
        options: of the reader.

    Raises:
        ValueError: for an unknown name, split or option, or a folder that is not as expected or may not be read.
    """
    entry = find_entry(name)
    if split not in ("train", "test"):
        hint = (
            ": its validation images are the split 'test'; split_validation() takes a part of the training images"
            if split in ("val", "valid", "validation")
            else ""
        )
        raise ValueError(f"unknown split {split!r}: choose train or test{hint}")
    if entry.drawn:
        if root is not None:
            raise ValueError(f"{name} is drawn, not read: leave the folder {str(root)!r} out")
    elif root is None:
        raise layout_error(entry, None, "give the folder that holds it (--root, in a training --data.root)")
    module, function = entry.reader.split(":")
    reader = getattr(import_module(module), function)
    _check_options(name, reader, options)
    with permitted():
        opened: ImageSet = reader(split, **options) if entry.drawn else reader(root, split, **options)
    return opened


def _check_options(name: str, reader: Any, options: dict[str, Any]) -> None:
    parameters = inspect.signature(reader).parameters.values()
    known = [p.name for p in parameters if p.name not in ("root", "split") and p.kind is not p.VAR_KEYWORD]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return  # the reader looks at them itself
    for option in options:
        if option not in known:
            if not known:
                raise ValueError(f"{name} has no options, got {option!r}")
            raise UnknownName(f"option of {name}", option, known)
    hints = get_type_hints(reader)
    for option, value in options.items():  # a file or a command line may say anything
        if not _fits(value, hints[option]):
            raise ValueError(f"option {option} of {name}: expected {_in_words(hints[option])}, got {value!r}")


#: what the types of options are called; those of Python alone are not spoken of
_WORDS = {bool: "true or false", int: "a whole number", str: "a text", NoneType: "null"}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; NumPy's whole numbers are some, and true and false are none.

    Example:
        >>> _fits(3, int | None), _fits(True, int | None), _fits(None, int | None), _fits("3", int | None)
        (True, False, True, False)
    """
    classes = [get_origin(kind) or kind for kind in _kinds(hint)]
    if isinstance(value, bool):
        return bool in classes
    return isinstance(value, tuple(Integral if kind is int else kind for kind in classes))


def _in_words(hint: Any) -> str:
    return " or ".join(_WORDS[kind] for kind in _kinds(hint) if kind in _WORDS)
