"""Images in one folder per class: ImageNet, a user's own images, and any folder for a check of its images."""

import csv
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from eigengrain import data
from eigengrain.data.datasets.layout import (
    SHOWN,
    build_image_set,
    find_root,
    images_below,
    is_image_name,
    layout_error,
    missing_error,
    walk,
)
from eigengrain.data.datasets.registry import Entry, register_dataset
from eigengrain.errors import AnnotationError, FileError
from eigengrain.text import few, printable

#: possible names of the folder of the test images
TEST_FOLDERS = ("test", "val", "valid", "validation")
#: possible names of the splits in a split file
_SPLITS = {"train": "train", "training": "train"} | dict.fromkeys((*TEST_FOLDERS, "testing"), "test")


def open_imagenet(root: str | Path, split: str) -> "data.ImageSet":
    """ImageNet from its class folders, with the names of the classes; ``test`` is the published validation set.

    References:
        O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015.
    """
    opened = _open_pair(IMAGENET, find_root(IMAGENET, root, "train", "val"), split, "val")
    opened.classes = _imagenet_names(opened.classes)
    return opened


def open_folder(root: str | Path, split: str, split_file: str | Path | None = None) -> "data.ImageSet":
    """Images in one folder per class, below the folders ``train`` and ``test`` or split by a table.

    The table has the columns ``path``, relative to the root, and ``split``; default is ``split.csv`` if it exists.
    """
    root = find_root(FOLDER, root)
    table = Path(split_file).expanduser() if split_file is not None else root / "split.csv"
    if split_file is not None or table.is_file():
        return _open_table(root, split, table)
    train, test = (root / "train").is_dir(), _test_folder(root)
    if not train or test is None:
        missing = [name for name, exists in (("train/", train), ("test/", test)) if not exists]
        raise missing_error(FOLDER, root, missing, ", and there is no split.csv")
    return _open_pair(FOLDER, root, split, test)


def _open_pair(entry: Entry, root: Path, split: str, test: str) -> "data.ImageSet":
    """Open ``root/train`` or ``root/<test>``, which must have the same classes; labels are in the order of their names."""
    folders = {"train": root / "train", "test": root / test}
    names = {
        part: sorted(each.name for each in os.scandir(folder) if each.is_dir() and not each.name.startswith("."))
        for part, folder in folders.items()
    }
    for part, folder in folders.items():
        if not names[part]:
            raise layout_error(entry, folder, "it has no class folders")
    for part, other in (("train", "test"), ("test", "train")):
        extra = sorted(set(names[part]) - set(names[other]))
        if extra:
            problem = f"{len(extra)} classes are only in {folders[part].name}, not in {folders[other].name}"
            remedy = "add a folder of each class to both"
            raise AnnotationError(entry.name, folders[part], f"{problem}: {few(extra, SHOWN)}; {remedy}", extra[0])
    classes = names[split]
    files = [images_below(str(folders[split] / name)) for name in classes]
    empty = [name for name, images in zip(classes, files, strict=True) if not images]
    for name in empty:
        os.listdir(folders[split] / name)  # raises PermissionError for a folder that cannot be read
    if empty:
        problem = f"{len(empty)} of {len(classes)} class folders have no images: {few(empty, SHOWN)}"
        remedy = "add images (.jpg, .png, .webp, …) or remove the folders"
        raise AnnotationError(entry.name, folders[split], f"{problem}; {remedy}", empty[0])
    labels = [k for k, images in enumerate(files) for _ in images]
    titles = [printable(name) for name in classes]
    return data.ImageSet(entry.name, split, titles, labels, [path for images in files for path in images])


def _open_table(root: Path, split: str, table: Path) -> "data.ImageSet":
    def error(problem: str, value: object = None) -> AnnotationError:
        return AnnotationError("folder", table, problem, value)

    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, lines = reader.fieldnames or [], list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as reason:
        raise error(str(reason)) from None
    if not {"path", "split"} <= set(columns):
        raise error(f"it must have the columns path and split, not {', '.join(columns) or 'none'}", tuple(columns))
    members: dict[Path, str] = {}
    for line in lines:
        name, part = line["path"], line["split"]
        if name is None or part is None:
            raise error("a line ends before its path and its split", name or part)
        if part.strip().lower() not in _SPLITS:
            raise error(f"the split must be train or test (or val), not {part!r}", part)
        path = Path(name)
        if len(path.parts) < 2:
            raise error(f"{name!r} is not in a class folder; write CLASS/IMAGE, with /", name)
        if path in members:  # as paths, because ./a.jpg and a.jpg are one image
            raise error(f"{str(path)!r} appears more than once, but an image belongs to one split", str(path))
        members[path] = _SPLITS[part.strip().lower()]
    classes = sorted({path.parent.name for path in members})
    label_of = {name: k for k, name in enumerate(classes)}
    chosen = [path for path, part in members.items() if part == split]
    paths = [root / path for path in chosen]
    labels = [label_of[path.parent.name] for path in chosen]
    return build_image_set(FOLDER, split, [printable(name) for name in classes], labels, paths, table)


def _test_folder(root: Path) -> str | None:
    return next((name for name in TEST_FOLDERS if (root / name).is_dir()), None)


def _imagenet_names(synsets: list[str]) -> list[str]:
    """Names of the classes if timm has them: 'n01440764' becomes 'tench, Tinca tinca'."""
    from eigengrain import _torchvision  # noqa: F401  isort: skip
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    names = set(info.label_names())
    return [info.label_name_to_description(name) if name in names else name for name in synsets]


class Tree(NamedTuple):
    """The images below a folder of any layout; the class of an image is its folder."""

    splits: "list[data.ImageSet]"  #: train and test if there are such folders, with the images outside as other; else all
    empty: list[tuple[str, str]]  #: (folder, reason) if it cannot be read, or has no images where some are expected
    others: dict[str, int]  #: number of files that are not images, by suffix


def open_tree(root: str | Path) -> Tree:
    """Collect the images below a folder by their names; raises FileError if it does not exist or contains no images."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileError(root, "it is a file, not a folder" if root.is_file() else "the folder does not exist")
    errors: list[OSError] = []
    folders = {Path(folder): names for folder, names in walk(str(root), errors)}
    unreadable = [(str(error.filename), f"the folder cannot be read ({error.strerror})") for error in errors]
    images = [folder / name for folder, names in folders.items() for name in names if is_image_name(name)]
    others = _count_suffixes(name for names in folders.values() for name in names if not is_image_name(name))
    if not images:
        content = f"only files that end in {', '.join(others)}" if others else "it is empty"
        reason = f"{unreadable[0][0]}: {unreadable[0][1]}" if unreadable else content
        raise FileError(root, f"it contains no images: {reason}")
    return Tree(_split_tree(root, images), [*unreadable, *_empty_folders(folders)], others)


def _count_suffixes(names: Iterable[str]) -> dict[str, int]:
    """Number of names by suffix, the most frequent first."""
    return dict(Counter(sorted(os.path.splitext(name)[1].lower() or "nothing" for name in names)).most_common())


def _split_tree(root: Path, images: Sequence[Path]) -> "list[data.ImageSet]":
    test = _test_folder(root)
    # split by the name of the outermost folder
    split_of = {"train": "train", test: "test"} if test and (root / "train").is_dir() else {}
    members: dict[str, list[tuple[Path, str]]] = {}
    for image in images:
        outer, *inner = image.parent.relative_to(root).parts or ("",)
        split = split_of.get(outer)
        folder = "/".join(inner if split else [outer, *inner]) or "."
        members.setdefault(split or ("other" if split_of else "all"), []).append((image, folder))
    splits = []
    for split, pairs in sorted(members.items(), key=lambda item: item[0] != "train"):
        classes = sorted({folder for _, folder in pairs})
        label_of = {folder: k for k, folder in enumerate(classes)}
        labels = [label_of[folder] for _, folder in pairs]
        splits.append(data.ImageSet(root.name, split, classes, labels, [image for image, _ in pairs]))
    return splits


def _empty_folders(folders: dict[Path, list[str]]) -> list[tuple[str, str]]:
    """Folders without any file, and folders of other files beside folders of images; of nested ones the outermost."""
    with_images = {folder for folder, names in folders.items() if any(map(is_image_name, names))}
    above_images = {outer for folder in with_images for outer in (folder, *folder.parents)}
    empty = []
    for folder in folders:
        if folder in above_images or folder.parent not in above_images:
            continue
        inside = (name for inner, names in folders.items() if folder in (inner, *inner.parents) for name in names)
        others = _count_suffixes(inside)
        if not others:
            empty.append((str(folder), "the folder is empty"))
        elif any(beside.parent == folder.parent for beside in with_images):
            empty.append((str(folder), f"no images in this folder, only files that end in {', '.join(others)}"))
    return empty


IMAGENET = register_dataset(
    Entry(
        "imagenet",
        "ImageNet (ILSVRC 2012)",
        (
            ("train/n01440764/*.JPEG", "one folder per class"),
            ("val/n01440764/*.JPEG", "the same; these are the test images"),
        ),
        open_imagenet,
        folders=("ILSVRC/Data/CLS-LOC", "imagenet"),
        required=(("train/n[01]*", "val/n[01]*"),),
        published=(1000, 1281167, 50000),
        page="https://image-net.org/download.php (with an account)",
    )
)

FOLDER = register_dataset(
    Entry(
        "folder",
        "Your own images, one folder per class",
        (
            ("train/CLASS/*.jpg", "images for training"),
            ("test/CLASS/*.jpg", "images for test; the folder may be called val, valid or validation"),
            ("or: CLASS/*.jpg, split.csv", "all images, and a table with the columns path and split (train or test)"),
        ),
        open_folder,
        required=(("train", "|".join(TEST_FOLDERS)), ("split.csv",)),
        options={"split_file": "path of the table, if it is not split.csv in the folder"},
    )
)
