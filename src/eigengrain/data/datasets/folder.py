"""Images in a folder for each class: ImageNet, and a user's own."""

import csv
import os
from collections import Counter
from pathlib import Path

from eigengrain.data.datasets.catalogue import Entry, find_entry
from eigengrain.data.datasets.layout import SHOWN, check_classes, check_files, find_root, layout_error, missing_text
from eigengrain.data.files import images_below, printable
from eigengrain.data.image_set import ImageSet
from eigengrain.text import few

#: what the folder of the test images may be called
TEST_FOLDERS = ("test", "val", "valid", "validation")
#: what a split file may call the splits
_SPLITS = {"train": "train", "training": "train"} | dict.fromkeys((*TEST_FOLDERS, "testing"), "test")


def open_imagenet(root: str | Path, split: str) -> ImageSet:
    """ImageNet from its class folders, with the classes' names; ``test`` is the published validation set.

    Raises:
        ValueError: for a wrong folder, a class without images, or classes that differ between the splits.

    References:
        O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015.
    """
    entry = find_entry("imagenet")
    found = _open_pair(entry, find_root(entry, root, "train", "val"), split, "val")
    found.classes = _imagenet_names(found.classes)
    return found


def open_folder(root: str | Path, split: str, split_file: str | Path | None = None) -> ImageSet:
    """Images in a folder for each class, with folders ``train`` and ``test`` above, or a table that splits them.

    Args:
        root: the folder.
        split: ``train`` or ``test``.
        split_file: a CSV file with the columns ``path`` (from the root) and ``split``; ``split.csv`` in the root where
            there is one. The class of an image is the folder it lies in.

    Raises:
        ValueError: for a wrong folder, a class without images, classes that differ between the splits, or a split file that
            names missing images.
    """
    entry = find_entry("folder")
    root = find_root(entry, root)
    table = Path(split_file).expanduser() if split_file is not None else root / "split.csv"
    if split_file is not None or table.is_file():
        return _open_table(entry, root, split, table)
    test = next((name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    lacking = [name for name, there in (("train/", (root / "train").is_dir()), ("test/", test is not None)) if not there]
    if test is None or lacking:
        raise layout_error(entry, root, f"{missing_text(lacking)}, and there is no split.csv")
    return _open_pair(entry, root, split, test)


def _open_pair(entry: Entry, root: Path, split: str, test: str) -> ImageSet:
    """From ``root/train`` and ``root/<test>``, which must have the same classes: labels are numbered by their names."""
    folders = {"train": root / "train", "test": root / test}
    names = {part: _class_folders(folder) for part, folder in folders.items()}
    for part, folder in folders.items():
        if not names[part]:
            raise layout_error(entry, folder, "it has no class folders")
    only = {part: sorted(set(names[part]) - set(names[other])) for part, other in (("train", "test"), ("test", "train"))}
    if only["train"] or only["test"]:
        said = [f"only {folders[part]} has {few(extra, SHOWN)}" for part, extra in only.items() if extra]
        raise ValueError(
            f"{entry.name}: the classes differ: {len(names['train'])} for training, {len(names['test'])} for test; "
            f"{'; '.join(said)}: give each class a folder in both"
        )
    classes = names[split]
    files = [images_below(str(folders[split] / name)) for name in classes]
    empty = [name for name, found in zip(classes, files, strict=True) if not found]
    for name in empty:
        os.listdir(folders[split] / name)  # one that may not be read is not empty
    if empty:
        raise ValueError(
            f"{entry.name}: {len(empty)} of {len(classes)} class folders in {folders[split]} have no images: "
            f"{few(empty, SHOWN)}; add images (.jpg, .png, .webp, …) or remove the folders"
        )
    labels = [k for k, found in enumerate(files) for _ in found]
    return ImageSet(entry.name, split, _titles(classes), labels, [path for found in files for path in found])


def _open_table(entry: Entry, root: Path, split: str, table: Path) -> ImageSet:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, lines = reader.fieldnames or [], list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{entry.name}: cannot read the split file {table} ({error})") from None
    if not {"path", "split"} <= set(columns):
        raise ValueError(f"{entry.name}: {table} needs the columns path and split, it has {', '.join(columns) or 'none'}")
    if any(None in (line["path"], line["split"]) for line in lines):
        raise ValueError(f"{entry.name}: {table} has a line that ends before its path and its split")
    wrong = [line["split"] for line in lines if line["split"].strip().lower() not in _SPLITS]
    if wrong:
        raise ValueError(f"{entry.name}: {table} has the split {wrong[0]!r}; it must be train or test (or val)")
    split_of = [(Path(line["path"]), _SPLITS[line["split"].strip().lower()]) for line in lines]
    flat = [str(path) for path, _ in split_of if len(path.parts) < 2]
    if flat:
        raise ValueError(
            f"{entry.name}: {table} has the path {flat[0]!r}, which lies in no class folder; write CLASS/IMAGE, with /"
        )
    # as paths: what is written in two ways, such as ./a.jpg and a.jpg, is one image
    twice = [str(path) for path, times in Counter(path for path, _ in split_of).items() if times > 1]
    if twice:
        raise ValueError(f"{entry.name}: {table} has the path {twice[0]!r} more than once: an image belongs to one split")
    classes = sorted({path.parent.name for path, _ in split_of})
    chosen = [path for path, part in split_of if part == split]
    paths = [root / path for path in chosen]
    check_files(entry, table, paths)
    place = {name: k for k, name in enumerate(classes)}
    labels = [place[path.parent.name] for path in chosen]
    check_classes(entry, split, classes, labels, table)
    return ImageSet(entry.name, split, _titles(classes), labels, paths)


def _class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _titles(folders: list[str]) -> list[str]:
    """Names of class folders as files and terminals can have them."""
    return [printable(name) for name in folders]


def _imagenet_names(synsets: list[str]) -> list[str]:
    """Names of the classes for reading, where timm knows them: 'n01440764' is 'tench, Tinca tinca'."""
    from eigengrain import _torchvision  # noqa: F401  isort: skip
    from timm.data import ImageNetInfo

    known = ImageNetInfo()
    there = set(known.label_names())
    return [known.label_name_to_description(name) if name in there else name for name in synsets]
