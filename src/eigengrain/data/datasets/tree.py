"""All images below a folder, whatever its layout: to be looked at, not to be trained on."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eigengrain.data.datasets.folder import TEST_FOLDERS
from eigengrain.data.files import is_image_name, walk
from eigengrain.data.image_set import ImageSet


@dataclass(frozen=True)
class Tree:
    """What is below a folder.

    Args:
        splits: ``train`` and ``test`` where the folder has folders of such names, and what lies beside them as ``other``;
            else one that is called ``all``. The class of an image is the folder that it lies in.
        empty: folders that cannot be read, or have no images where one would expect some, with the reason.
        others: how many files are not named as images, by the end of their names.
    """

    splits: list[ImageSet]
    empty: list[tuple[str, str]]
    others: dict[str, int]


def open_tree(root: str | Path) -> Tree:
    """The images below a folder by their names; none is opened.

    Raises:
        ValueError: if there is no such folder, or no image in it that could be found.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise ValueError(f"{root} is a file: name a folder" if root.is_file() else f"there is no folder {str(root)!r}")
    refused: list[OSError] = []
    folders = {Path(folder): names for folder, names in walk(str(root), refused)}
    unread = [(str(error.filename), f"the folder cannot be read ({error.strerror})") for error in refused]
    images = [folder / name for folder, names in folders.items() for name in names if is_image_name(name)]
    others = _endings(name for names in folders.values() for name in names if not is_image_name(name))
    if not images:
        there = f"only files that end in {', '.join(others)}" if others else "it is empty"
        said = f"{unread[0][0]}: {unread[0][1]}" if unread else there
        raise ValueError(f"there are no images below {root}: {said}")
    return Tree(_splits(root, images), [*unread, *_empty(root, folders)], others)


def _endings(names: Iterable[str]) -> dict[str, int]:
    """How many names have which end, the most frequent first."""
    counts = Counter(os.path.splitext(name)[1].lower() or "nothing" for name in names)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _splits(root: Path, images: Sequence[Path]) -> list[ImageSet]:
    test = next((name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    # by the name of the outermost folder
    split_of = {"train": "train", test: "test"} if test and (root / "train").is_dir() else {}
    members: dict[str, list[tuple[Path, str]]] = {}
    for image in images:
        outer, *inner = image.parent.relative_to(root).parts or ("",)
        split = split_of.get(outer)
        inside = "/".join(inner if split else [outer, *inner]) or "."
        members.setdefault(split or ("other" if split_of else "all"), []).append((image, inside))
    found = []
    for split, pairs in sorted(members.items(), key=lambda item: item[0] != "train"):
        classes = sorted({inside for _, inside in pairs})
        place = {inside: k for k, inside in enumerate(classes)}
        labels = [place[inside] for _, inside in pairs]
        found.append(ImageSet(root.name, split, classes, labels, [image for image, _ in pairs]))
    return found


def _empty(root: Path, folders: dict[Path, list[str]]) -> list[tuple[str, str]]:
    """Folders with no file at all, and those with other files beside folders of images; of nested ones the outermost."""
    direct = {folder for folder, names in folders.items() if any(map(is_image_name, names))}
    below = {outer for folder in direct for outer in (folder, *folder.parents)}
    found = []
    for folder in folders:
        if folder in below or folder.parent not in below:
            continue
        others = _endings(name for inner, names in folders.items() if folder in (inner, *inner.parents) for name in names)
        if not others:
            found.append((str(folder), "the folder is empty"))
        elif any(beside.parent == folder.parent for beside in direct):
            found.append((str(folder), f"no images in this folder, only files that end in {', '.join(others)}"))
    return found
