"""Oxford Flowers-102."""

from pathlib import Path

import numpy as np

from eigengrain import _torchvision  # noqa: F401
from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.data.datasets.layout import check_classes, check_files, find_root, mat_value, read_mat
from eigengrain.data.image_set import ImageSet


def open_flowers(root: str | Path, split: str, with_validation: bool = True) -> ImageSet:
    """Flowers from ``imagelabels.mat`` and ``setid.mat``; needs SciPy.

    Args:
        root: the folder ``flowers-102`` or the one above it.
        split: ``train`` or ``test``.
        with_validation: train on the validation images as well: 2,040 images and not 1,020.

    Raises:
        ValueError: for a wrong folder, lists that do not fit together, missing images, or a missing SciPy.

    References:
        M.-E. Nilsback and A. Zisserman, Automated Flower Classification over a Large Number of Classes, ICVGIP 2008.
    """
    entry = find_entry("flowers")
    root = find_root(entry, root, "jpg", "imagelabels.mat", "setid.mat")
    label_file, split_file = root / "imagelabels.mat", root / "setid.mat"
    all_labels = np.atleast_1d(mat_value(entry, label_file, read_mat(entry, label_file), "labels")).astype(int)
    ids = read_mat(entry, split_file)
    keys = ["tstid"] if split == "test" else ["trnid", "valid"] if with_validation else ["trnid"]
    numbers = np.concatenate([np.atleast_1d(mat_value(entry, split_file, ids, key)) for key in keys]).astype(int)
    wrong = numbers[(numbers < 1) | (numbers > len(all_labels))]
    if wrong.size:
        raise ValueError(
            f"flowers: setid.mat has image number {wrong[0]}, and imagelabels.mat labels {len(all_labels)} images, "
            "from 1 on: take both files from one release"
        )
    paths = [root / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
    check_files(entry, split_file, paths)
    classes = _class_names(int(all_labels.max()))
    labels = (all_labels[numbers - 1] - 1).tolist()
    check_classes(entry, split, classes, labels, split_file)
    return ImageSet("flowers", split, classes, labels, paths)


def _class_names(count: int) -> list[str]:
    """Names of the flowers, which the files do not have and torchvision has; numbers for another count."""
    from torchvision.datasets import Flowers102

    names = list(getattr(Flowers102, "classes", ()))
    return names if len(names) == count else [f"flower {k + 1}" for k in range(count)]
