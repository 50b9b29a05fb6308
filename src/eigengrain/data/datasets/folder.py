"""Images in one folder per class: ImageNet, a user's own images, and any folder for a check of its images."""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from eigengrain import data
from eigengrain.data.datasets.layout import (
    HEIC,
    HEIC_REMEDY,
    SHOWN,
    build_image_set,
    check_paths,
    count_suffixes,
    describe_skipped,
    find_root,
    is_image_name,
    layout_error,
    missing_names,
    walk,
)
from eigengrain.data.datasets.registry import Entry, list_entries, register_dataset
from eigengrain.errors import AnnotationError, ArgumentError, FileError
from eigengrain.files import read_text
from eigengrain.text import counted, few, printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: names of the splits, as folders and in tables
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLITS |= dict.fromkeys(("val", "valid", "validation"), "val")
#: names of the columns of a table
_COLUMNS = {
    "path": ("path", "file", "filename", "filepath", "image"),
    "label": ("label", "class", "category"),
    "split": ("split",),
}
#: fraction of test images where there is no split
TEST_FRACTION = 0.2


def open_imagenet(root: str | Path, split: str) -> "data.ImageSet":
    """ImageNet from its class folders, with the names of the classes; ``test`` is the published validation set.

    References:
        O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015.
    """
    root = find_root(IMAGENET, root, "train", "val")
    tree = read_tree(root, {"train": "train", "val": "test"})
    opened = _open(IMAGENET, root, _samples_of(IMAGENET, root, tree), split)
    opened.classes = _imagenet_names(opened.classes)
    return opened


def open_folder(
    root: str | Path,
    split: str,
    split_file: str | Path | None = None,
    test_fraction: float | None = None,
    split_seed: int = 0,
) -> "data.ImageSet":
    """Images in one folder per class, or those of a table; the split ``val`` may be empty.

    Args:
        root: folder with ``train/CLASS``, ``test/CLASS`` and perhaps ``valid/CLASS``, folder with ``CLASS`` and perhaps a
            table ``split.csv``, or a table.
        split: train, val or test.
        split_file: table with the columns ``path``, relative to the root, and ``label``, ``split`` or both. By default, the
            label is the outermost folder of the path, and the split is drawn.
        test_fraction: fraction of the images of each class that become test images if there is no split, 0.2 by default;
            1 for a folder that is only tested.
        split_seed: seed of that choice. Images that look the same stay on one side.
    """
    root = Path(root).expanduser()
    table = root if root.suffix.lower() in (".csv", ".tsv") and root.is_file() else None
    root = find_root(FOLDER, root if table is None else root.parent)
    if split_file is not None:
        table = Path(split_file).expanduser()
    elif table is None and (root / "split.csv").is_file():
        table = root / "split.csv"
    if table is not None:
        return _open(FOLDER, root, _read_table(root, table), split, test_fraction, split_seed, table)
    tree = read_tree(root)
    opened = _open(FOLDER, root, _samples_of(FOLDER, root, tree), split, test_fraction, split_seed)
    published = [e for e in list_entries() if any(not missing_names(root, form) for form in e.required) and not e.custom]
    remedy = [f"the folder looks like {e.title}: data.name {e.name!r} uses its published split" for e in published]
    opened.notes = [*remedy, *tree.notes(), *opened.notes]
    return opened


class Sample(NamedTuple):
    """An image of a folder or a table; ``split`` is None if there is no split."""

    path: str  # relative to the root
    label: str
    split: str | None


class EmptyFolder(NamedTuple):
    """A folder that cannot be read, or one without images where some are expected, with the suffixes of its files."""

    path: str
    reason: str
    suffixes: tuple[str, ...] = ()


class Tree(NamedTuple):
    """The files below a folder. The class of an image is its outermost folder inside that of its split."""

    samples: list[Sample]
    loose: list[str]  # images outside of class folders
    empty: list[EmptyFolder]
    others: dict[str, int]  # number of files that are not images, by suffix
    error: OSError | None  # of a folder that cannot be read

    def notes(self) -> list[str]:
        """What is left out."""
        notes = describe_skipped(self.others)
        if self.loose:
            notes.append(f"{counted(len(self.loose), 'image')} outside of class folders left out: {few(self.loose, 3)}")
        if self.empty:
            folders = few([each.path for each in self.empty], 3)
            notes.append(f"{counted(len(self.empty), 'folder')} without images left out: {folders}")
        return list(map(printable, notes))


def read_tree(root: Path, names: Mapping[str, str] = _SPLITS) -> Tree:
    """List the files below a folder; ``names`` are the folders of the splits. A folder around all others is entered."""
    errors: list[OSError] = []
    folders = {PurePath(os.path.relpath(folder, root)): files for folder, files in walk(str(root), errors)}
    images = {folder: [name for name in files if is_image_name(name)] for folder, files in folders.items()}
    places = [folder.parts for folder, files in images.items() if files]
    outer = 0  # number of folders around the class folders, or around those of the splits
    while places and min(map(len, places)) > outer + 1 and len({parts[outer] for parts in places}) == 1:
        outer += 1
    split_of = {p[outer]: names[p[outer].lower()] for p in places if len(p) > outer and p[outer].lower() in names}
    if "train" not in split_of.values() or len({*split_of.values()}) == 1:
        split_of = {}
    elif "test" not in split_of.values():
        split_of = {name: "test" if split == "val" else split for name, split in split_of.items()}
    samples: list[Sample] = []
    loose: list[str] = []
    for folder, files in images.items():
        split = split_of.get(folder.parts[outer]) if len(folder.parts) > outer else None
        inner = folder.parts[outer + bool(split_of) :]
        if inner and (split or not split_of):
            samples += [Sample(str(folder / file), _class_name(inner[0]), split) for file in files]
        else:
            loose += [str(folder / file) for file in files]
    empty = [EmptyFolder(str(e.filename), f"the folder cannot be read ({e.strerror})") for e in errors]
    empty += [each._replace(path=str(root / each.path)) for each in _empty_folders(folders)]
    others = count_suffixes(name for files in folders.values() for name in files if not is_image_name(name))
    return Tree(samples, loose, empty, others, next(iter(errors), None))


def _class_name(name: str) -> str:
    """The name of a class on one line and without blanks around it, as it is in a table that is written and read again."""
    return printable(name.strip() or name)


def _empty_folders(folders: Mapping[PurePath, list[str]]) -> list[EmptyFolder]:
    """Folders without any file, and folders of other files beside folders of images; of nested ones the outermost."""
    with_images = {folder for folder, names in folders.items() if any(map(is_image_name, names))}
    above_images = {outer for folder in with_images for outer in (folder, *folder.parents)}
    empty = []
    for folder in folders:
        if folder in above_images or folder.parent not in above_images:
            continue
        inside = (name for inner, names in folders.items() if folder in (inner, *inner.parents) for name in names)
        suffixes = tuple(count_suffixes(inside))
        if not suffixes:
            empty.append(EmptyFolder(str(folder), "the folder is empty"))
        elif any(beside.parent == folder.parent for beside in with_images):
            reason = f"no images in this folder, only files that end in {', '.join(suffixes)}"
            empty.append(EmptyFolder(str(folder), reason, suffixes))
    return empty


def _samples_of(entry: Entry, root: Path, tree: Tree) -> list[Sample]:
    """The images of a tree; raises an error if they are not in class folders, or if some cannot be read."""
    if tree.error is not None:
        raise tree.error
    if not tree.samples:
        problem = "it has no class folders, only images" if tree.loose else "it has no images"
        raise layout_error(entry, root, "; ".join([problem, *describe_skipped(tree.others)]), ["CLASS/"])
    unread = [each.path for each in tree.empty if {*each.suffixes} & {*HEIC}]
    if unread:
        problem = f"{counted(len(unread), 'class folder')} with HEIC images only: {few(unread, SHOWN)}"
        raise AnnotationError(entry.name, root, f"{problem}; {HEIC_REMEDY}", unread[0])
    train = [PurePath(each.path) for each in tree.samples if each.split is None and each.label.lower() == "train"]
    if train and all(len(path.parts) > 2 for path in train):
        problem = "train/ contains class folders, but there is no test/ beside it; remove the other folders, or add test/"
        raise layout_error(entry, root, problem, ["test/"])
    return tree.samples


def _read_table(root: Path, table: Path) -> list[Sample]:
    def error(problem: str, value: object = None) -> AnnotationError:
        return AnnotationError("folder", table, problem, value)

    try:
        text = read_text(table)
        rows = csv.DictReader(
            io.StringIO(text, newline=""), delimiter=max(",;\t", key=text.partition("\n")[0].count), restval=""
        )
        columns, lines = list(rows.fieldnames or []), list(rows)
    except FileError as reason:
        raise error(reason.problem) from None
    except csv.Error as reason:
        raise error(str(reason)) from None
    used = {kind: [name for name in columns if name.strip().lower() in names] for kind, names in _COLUMNS.items()}
    if not used["path"] or not (used["label"] or used["split"]) or max(map(len, used.values())) > 1:
        problem = "it must have one column path and one column label or split, or both"
        raise error(f"{problem}, not {', '.join(columns) or 'none'}", tuple(columns))
    samples: dict[str, Sample] = {}
    for line in lines:
        values = {kind: line[name].strip() for kind, names in used.items() for name in names}
        if not any(values.values()):  # spreadsheets write such lines at the end
            continue
        if not all(values.values()):
            raise error("a line has an empty path, label or split", next(filter(None, values.values()), None))
        name, split = values["path"], values.get("split")
        if split is not None and split.lower() not in _SPLITS:
            raise error(f"the split must be train, val or test, not {split!r}", split)
        path = _clean_path(name)
        if table == root / "split.csv" and (os.path.isabs(path) or path.startswith("..")):
            raise error(f"{name!r} is outside of the folder", name)  # the table may be a stranger's
        if path in samples:  # cleaned, because ./a.jpg and a.jpg are one image
            raise error(f"{path!r} appears more than once, but an image belongs to one split", path)
        label = _class_name(values.get("label") or _class_folder(path))
        if not label:
            raise error(f"{name!r} is not in a class folder; write CLASS/IMAGE, or add a column label", name)
        samples[path] = Sample(path, label, split and _SPLITS[split.lower()])
    if not samples:
        raise error("it lists no images")
    if "test" not in {sample.split for sample in samples.values()}:  # as in folders
        return [sample._replace(split="test") if sample.split == "val" else sample for sample in samples.values()]
    return list(samples.values())


def _clean_path(name: str) -> str:
    """A path of a table without ``./``, also if it was written on Windows; bytes that are not text are escaped there."""
    if "/" not in name and os.sep == "/":
        name = re.sub(r"\\(?!udc)", "/", name)
    return os.path.normpath(re.sub(r"\\u(dc[89a-f][0-9a-f])", lambda match: chr(int(match[1], 16)), name))


def _class_folder(path: str) -> str:
    """The outermost folder of a path inside that of its split; empty if there is none."""
    *folders, _ = PurePath(path).parts
    return next(iter(folders[1:] if len(folders) > 1 and folders[0].lower() in _SPLITS else folders), "")


def _open(
    entry: Entry,
    root: Path,
    samples: Sequence[Sample],
    split: str,
    test_fraction: float | None = None,
    seed: int = 0,
    table: Path | None = None,
) -> "data.ImageSet":
    """The images of one split; the classes are those of the training images, in the order of their names."""
    if test_fraction is not None and not 0 < test_fraction <= 1:
        raise ArgumentError("test_fraction", "must be above 0 and at most 1", test_fraction)
    groups, notes = None, list[str]()
    if all(sample.split is None for sample in samples):
        fraction = TEST_FRACTION if test_fraction is None else test_fraction
        if fraction < 1 and len({sample.label for sample in samples}) == 1:
            raise layout_error(entry, root, f"it has only one class, {samples[0].label!r}", ["CLASS/"])
        if table is not None:
            check_paths(entry, [root / sample.path for sample in samples], table)
        samples, groups, notes = _draw_split(root, samples, fraction, seed)
    elif test_fraction not in (None, 1):
        raise ArgumentError("test_fraction", f"is for images without a split, but {root} has one", test_fraction)
    classes = sorted({each.label for each in samples if each.split == "train"} or {each.label for each in samples})
    untrained = sorted({each.label for each in samples} - {*classes})
    if untrained:
        problem = (
            f"{len(untrained)} classes have no training images: {few(untrained, SHOWN)}; add some, or remove the others"
        )
        raise AnnotationError(entry.name, table or root, problem, untrained[0])
    label_of = {name: k for k, name in enumerate(classes)}
    places = [k for k, sample in enumerate(samples) if sample.split == split]
    labels, paths = [label_of[samples[k].label] for k in places], [root / samples[k].path for k in places]
    name = "validation" if split == "val" else split
    if table is not None and (places or split != "val"):
        opened = build_image_set(entry, name, classes, labels, paths, table)
    else:
        opened = data.ImageSet(entry.name, name, classes, labels, paths)
    opened.notes, opened.groups = notes, None if groups is None else groups[places]
    return opened


def _draw_split(
    root: Path, samples: Sequence[Sample], fraction: float, seed: int
) -> "tuple[list[Sample], NDArray[np.int64] | None, list[str]]":
    """Choose test images: samples with their split, groups of images that look the same, and notes."""
    if fraction == 1:
        return [sample._replace(split="test") for sample in samples], None, []
    from eigengrain.data.duplicates import find_groups
    from eigengrain.data.image_set import hold_out

    groups = find_groups([str(root / sample.path) for sample in samples])
    names = sorted({sample.label for sample in samples})
    counts = Counter(sample.label for sample in samples)
    quotas = [min(max(round(fraction * counts[name]), 1), counts[name] - 1) for name in names]
    label_of = {name: k for k, name in enumerate(names)}
    held = hold_out([label_of[sample.label] for sample in samples], quotas, seed, groups)
    if not held.any():
        problem = f"leaves no test images of {len(samples)} in {len(names)} classes"
        raise ArgumentError("test_fraction", problem, fraction, "add images that differ, or a folder test/")
    chosen = [sample._replace(split="test" if test else "train") for sample, test in zip(samples, held, strict=True)]
    notes = [f"no split: {held.sum():,} of {counted(len(samples), 'image')} were drawn for test (split_seed {seed})"]
    untested = sorted({*names} - {sample.label for sample in chosen if sample.split == "test"})
    if untested:
        notes.append(f"{len(untested)} of {len(names)} classes have no test image: {few(untested, SHOWN)}")
    copies = len(samples) - len({*groups.tolist()})
    if copies:
        notes.append(f"{counted(copies, 'image')} with a copy that looks the same: copies are on one side of the split")
    return chosen, groups, notes


def _imagenet_names(synsets: list[str]) -> list[str]:
    """Names of the classes if timm has them: 'n01440764' becomes 'tench, Tinca tinca'."""
    from eigengrain import _torchvision  # noqa: F401  isort: skip
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    names = set(info.label_names())
    return [info.label_name_to_description(name) if name in names else name for name in synsets]


def open_tree(root: str | Path) -> "tuple[list[data.ImageSet], Tree]":
    """Open the images below a folder of any layout, for a check.

    Returns:
        the splits of the folder, or all images if it has none, and images outside of them; and the tree.

    Raises:
        FileError: if the folder does not exist or contains no images.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileError(root, "it is a file, not a folder" if root.is_file() else "the folder does not exist")
    tree = read_tree(root)
    members: dict[str, list[Sample]] = {}
    for sample in (*tree.samples, *(Sample(path, ".", None) for path in tree.loose)):
        has_splits = bool(tree.samples) and tree.samples[0].split is not None
        members.setdefault(sample.split or ("other" if has_splits else "all"), []).append(sample)
    if not members:
        content = f"only files that end in {', '.join(tree.others)}" if tree.others else "it is empty"
        reason = f"{tree.empty[0].path}: {tree.empty[0].reason}" if tree.error else content
        raise FileError(root, f"it contains no images: {reason}")
    classes = sorted({sample.label for group in members.values() for sample in group})
    label_of = {name: k for k, name in enumerate(classes)}
    order = ["train", "val", "test", "all", "other"]
    return [
        data.ImageSet(root.name, split, classes, [label_of[s.label] for s in group], [root / s.path for s in group])
        for split, group in sorted(members.items(), key=lambda item: order.index(item[0]))
    ], tree


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
            ("CLASS/*.jpg", "images of each class; a fifth of them is drawn for test, and copies stay together"),
            ("or: train/CLASS/*.jpg", "images for training, with"),
            ("    test/CLASS/*.jpg", "images for test, and optionally"),
            ("    valid/CLASS/*.jpg", "images for validation (val, validation); the test images if there is no test"),
            ("or: CLASS/*.jpg, split.csv", "images, and a table with the columns path and split (train, val, test)"),
            ("or: FILE.csv", "a table with the columns path, label and optionally split"),
        ),
        open_folder,
        required=(("train", "test|val|valid|validation"), ("split.csv",)),
        options={
            "split_file": "path of the table, if it is not split.csv in the folder",
            "test_fraction": "fraction of test images per class, if there is no split; default 0.2",
            "split_seed": "seed of the choice of the test images; default 0",
        },
        custom=True,
    )
)
