"""Data sets by name."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from eigengrain.data.catalogue import find_entry
from eigengrain.data.files import permitted
from eigengrain.data.imageset import ImageSet
from eigengrain.data.layout import layout_error
from eigengrain.errors import unknown_name


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
        raise layout_error(entry, None, "give the folder that holds it, --data.root of 'eigengrain train'")
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
            raise unknown_name(f"option of {name}", option, known)
