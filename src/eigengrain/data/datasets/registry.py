"""Data sets by name. It imports no torch, so that the command line lists them immediately.

A data set is one file in this folder with its reader and one call of :func:`register_dataset`; it is found automatically.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING, Any, get_type_hints

from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.names import SPLITS
from eigengrain.options import convert

if TYPE_CHECKING:
    from eigengrain.data.image_set import ImageSet


@dataclass(frozen=True)
class Entry:
    """A data set and its reader.

    Args:
        name, title: names for ``open_dataset`` and for people.
        layout: (file or folder, content) below the root; shown in listings and if the folder is wrong.
        reader: function ``(root, split, **options)`` that returns an ImageSet, or its name ``"module:function"``.
        folders: usual names of the data set's own folder; the folder above it is accepted as root, too.
        required: files and folders below the root by which ``eigengrain doctor`` recognises the data set, for each of its
            published layouts; ``a|b`` is a choice, and ``*`` matches any name.
        published: number of classes, training images and test images as published.
        options: options of the reader with their meaning.
        extra: extra of this package that the reader needs.
        page: where to get the data set.
        drawn: whether the images are drawn; the reader has no ``root`` then.
        custom: whether the images are a user's own: the reader also opens the split ``val``, which may be empty, and has
            the options ``split_file``, ``test_fraction`` and ``split_seed``.
    """

    name: str
    title: str
    layout: tuple[tuple[str, str], ...]
    reader: "str | Callable[..., ImageSet]"
    folders: tuple[str, ...] = ()
    required: tuple[tuple[str, ...], ...] = ()
    published: tuple[int, int, int] | None = None
    options: dict[str, str] = field(default_factory=dict)
    extra: str | None = None
    page: str = ""
    drawn: bool = False
    custom: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields for JSON; the reader as ``module:function``."""
        reader = self.reader if isinstance(self.reader, str) else f"{self.reader.__module__}:{self.reader.__qualname__}"
        return {**asdict(self), "reader": reader}


_ENTRIES: dict[str, Entry] = {}
_loaded = False


def register_dataset(entry: Entry) -> Entry:
    """Register a data set, so that ``open_dataset``, the recipes and the command line accept its name.

    Raises:
        ArgumentError: if the name is taken.
    """
    _load_built_in()
    if entry.name in _ENTRIES:
        raise ArgumentError("name", "is the name of a registered data set", entry.name, "choose another one")
    _ENTRIES[entry.name] = entry
    return entry


def _load_built_in() -> None:
    """Import the modules beside this one, which register their data sets."""
    global _loaded
    if not _loaded:
        _loaded = True  # before the imports, which call this function again
        package = __name__.rpartition(".")[0]
        for module in iter_modules(import_module(package).__path__, f"{package}."):
            import_module(module.name)


def list_entries() -> list[Entry]:
    """All registered data sets, sorted by name."""
    _load_built_in()
    return sorted(_ENTRIES.values(), key=lambda entry: entry.name)


def list_datasets() -> list[str]:
    """Names for ``open_dataset``, sorted."""
    return [entry.name for entry in list_entries()]


def find_entry(name: str) -> Entry:
    """The entry of a data set; raises UnknownName if no data set has the name."""
    _load_built_in()
    if name not in _ENTRIES:
        raise UnknownName("data set", name, list_datasets())
    return _ENTRIES[name]


def open_dataset(name: str, root: str | Path | None = None, split: str = "train", **options: Any) -> "ImageSet":
    """Open a data set from a local folder; nothing is downloaded and no image is opened.

    Args:
        name: one of ``list_datasets()``.
        root: its folder, as ``eigengrain datasets`` describes it, or the folder above; None for drawn images.
        split: ``train`` or ``test``, and for a user's own images also ``val``, which may be empty; data sets without public
            test labels use their validation images as ``test``.
        options: options of the reader.

    Raises:
        UnknownName: for an unknown name, split or option.
        ArgumentError: for an option of the wrong type, or a missing or unexpected root.
        LayoutError: if the folder does not have the expected layout.
        FileError: if a file of the data set is wrong or cannot be read.
    """
    entry = find_entry(name)
    if split not in ("train", "test") and not (entry.custom and split == "val"):
        if split not in ("val", "valid", "validation"):
            raise UnknownName("split", split, ("train", "test"))
        raise ArgumentError("split", "must be train or test", split, "split_validation() makes validation images")
    if entry.drawn and root is not None:
        raise ArgumentError("root", f"is not used by {name}, whose images are drawn", str(root), "leave it out")
    if not entry.drawn and root is None:
        remedy = f"it contains {', '.join(path for path, _ in entry.layout)}; your own images are data set 'folder'"
        raise ArgumentError("root", f"must be the folder of {entry.title}", root, remedy)
    reader = entry.reader
    if isinstance(reader, str):
        reader = resolve_name(reader)
    options = _check_options(name, reader, options)
    try:
        return reader(split, **options) if entry.drawn else reader(root, split, **options)
    except PermissionError as error:
        raise FileError(error.filename or str(root), str(error.strerror)) from None


def open_splits(
    name: str,
    root: str | Path | None = None,
    splits: Iterable[str] = SPLITS,
    *,
    val_fraction: float = 0.0,
    seed: int = 0,
    split_file: str | Path | None = None,
    **options: Any,
) -> "dict[str, ImageSet]":
    """Open several splits of a data set; ``val`` is missing if there are no validation images.

    Args:
        name, root, options: as in :func:`open_dataset`.
        splits: names of the splits: train, val, test.
        val_fraction: fraction of the training images that is held out for validation, if the data set has no validation
            images of its own; see :func:`~eigengrain.data.split_validation`.
        seed: seed of that choice.
        split_file: table with the split of an earlier call, in place of a split that is drawn.
    """
    from eigengrain.data.image_set import split_validation

    if split_file is not None:
        options = {key: value for key, value in options.items() if key not in ("test_fraction", "split_seed")}
        options["split_file"] = str(split_file)
    opened = {split: open_dataset(name, root, split, **options) for split in ("train", "test") if split in splits}
    if not {"train", "val"} & {*splits}:
        return opened
    validation = open_dataset(name, root, "val", **options) if find_entry(name).custom else None
    if validation:
        opened["val"] = validation
    elif val_fraction:
        train = opened.get("train") or open_dataset(name, root, "train", **options)
        try:
            opened["train"], opened["val"] = split_validation(train, val_fraction, seed=seed)
        except ArgumentError as error:
            if error.argument != "fraction":
                raise
            remedy = "use a larger one, or 0 for no validation images"
            raise ArgumentError("val_fraction", error.problem, val_fraction, remedy) from None
    return {split: opened[split] for split in splits if split in opened}


def check_names(options: Iterable[str]) -> None:
    """Raise an ArgumentError if the options of a reader contain an argument of ``open_dataset``."""
    for option in options:
        if option in ("name", "root", "split"):
            raise ArgumentError("options", f"must not contain {option!r}, which is not an option of the data set's reader")


def _check_options(name: str, reader: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Check the options against the signature of the reader; plain values may come from a file or a command line."""
    parameters = inspect.signature(reader).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return options  # the reader checks them
    names = [p.name for p in parameters if p.name not in ("root", "split")]
    unknown = next((option for option in options if option not in names), None)
    if unknown is not None and not names:
        raise ArgumentError("options", f"must be empty, because {name} has no options", unknown)
    if unknown is not None:
        raise UnknownName(f"option of {name}", unknown, names)
    hints = get_type_hints(reader) if options else {}
    for option, value in options.items():
        # values of other types, which are not from a file, are passed on: paths, NumPy integers
        if option in hints and isinstance(value, bool | int | float | str | list | dict | None):
            options[option] = convert(value, hints[option], f"options.{option}")
    return options
