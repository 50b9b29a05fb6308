"""Stanford Dogs."""

from pathlib import Path

import numpy as np

from eigengrain.data.datasets.catalogue import Entry, find_entry
from eigengrain.data.datasets.layout import check_classes, check_files, find_root, layout_error, mat_value, read_mat
from eigengrain.data.image_set import ImageSet


def open_dogs(root: str | Path, split: str) -> ImageSet:
    """Dogs from the lists ``train_list.mat`` and ``test_list.mat``; needs SciPy.

    Raises:
        ValueError: for a wrong folder, lists that do not fit together, missing images, or a missing SciPy.

    References:
        A. Khosla et al., Novel Dataset for Fine-Grained Image Categorization, FGVC 2011.
    """
    entry = find_entry("dogs")
    root = find_root(entry, root, "Images")
    files = {part: _list_file(entry, root, part) for part in ("train", "test")}
    lists = {part: _read_list(entry, file) for part, file in files.items()}
    # the lists have no class names: they are in the names of the folders, which both lists must number alike
    folders: dict[int, str] = {}
    for part, (names, labels) in lists.items():
        for name, label in zip(names, labels, strict=True):
            folder = name.split("/")[0]
            if folders.setdefault(label, folder) != folder:
                raise ValueError(
                    f"dogs: class {label + 1} is {folders[label]} and in {files[part].name} also {folder}: take both lists "
                    "from one release"
                )
    if sorted(folders) != list(range(len(folders))):
        raise ValueError(f"dogs: the lists have {len(folders)} classes numbered up to {max(folders) + 1}: some are missing")
    names, labels = lists[split]
    paths = [root / "Images" / name for name in names]
    check_files(entry, files[split], paths)
    classes = [folders[k].split("-", 1)[-1].replace("_", " ") for k in range(len(folders))]
    check_classes(entry, split, classes, labels, files[split])
    return ImageSet("dogs", split, classes, labels, paths)


def _list_file(entry: Entry, root: Path, part: str) -> Path:
    name = f"{part}_list.mat"
    for file in (root / name, root / "lists" / name):
        if file.is_file():
            return file
    raise layout_error(entry, root, f"{name} is missing")


def _read_list(entry: Entry, file: Path) -> tuple[list[str], list[int]]:
    """Files and labels from 0."""
    values = read_mat(entry, file)
    names = [str(name) for name in np.atleast_1d(mat_value(entry, file, values, "file_list"))]
    labels = [int(label) - 1 for label in np.atleast_1d(mat_value(entry, file, values, "labels"))]
    if len(names) != len(labels):
        raise ValueError(f"dogs: {file} has {len(names)} files and {len(labels)} labels")
    return names, labels
