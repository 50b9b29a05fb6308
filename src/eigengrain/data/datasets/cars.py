"""Stanford Cars, from a local folder: its published links are dead."""

from pathlib import Path
from typing import Any

import numpy as np

from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.data.datasets.layout import check_classes, check_files, find_root, layout_error, mat_value, read_mat
from eigengrain.data.image_set import ImageSet

_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def open_cars(root: str | Path, split: str) -> ImageSet:
    """Cars from the annotations of the devkit, or from the single file ``cars_annos.mat``; needs SciPy.

    Raises:
        ValueError: for a wrong folder, classes without a name, missing images, or a missing SciPy.

    References:
        J. Krause et al., 3D Object Representations for Fine-Grained Categorization, 3DRR 2013.
    """
    entry = find_entry("cars")
    root = Path(root).expanduser()
    single = [folder for folder in (root, *(root / name for name in entry.folders)) if _is_single(folder)]
    if single:
        root, file, names = single[0], single[0] / "cars_annos.mat", single[0] / "cars_annos.mat"
        annotations = _annotations(file)
        is_test = np.array([int(flag) for flag in _field(file, annotations, "test")], bool)
        annotations = annotations[is_test if split == "test" else ~is_test]
        paths = [root / str(path) for path in _field(file, annotations, "relative_im_path")]
    else:
        folder = f"cars_{split}"
        root = find_root(entry, root, folder, "devkit/cars_meta.mat")
        names = root / "devkit" / "cars_meta.mat"
        file = _annotation_file(root, split)
        annotations = _annotations(file)
        paths = [root / folder / str(name) for name in _field(file, annotations, "fname")]
    classes = [str(name) for name in np.atleast_1d(mat_value(entry, names, read_mat(entry, names), "class_names"))]
    check_files(entry, file, paths)
    labels = [int(number) - 1 for number in _field(file, annotations, "class")]
    if not 0 <= min(labels) <= max(labels) < len(classes):
        raise ValueError(
            f"cars: {file.name} has classes from {min(labels) + 1} to {max(labels) + 1}, and {names.name} names "
            f"{len(classes)}: take both files from one release"
        )
    check_classes(entry, split, classes, labels, file)
    boxes = np.stack([np.asarray(_field(file, annotations, side), np.float64) for side in _BOX], axis=1)
    return ImageSet("cars", split, classes, labels, paths, boxes=boxes.tolist())


def _is_single(folder: Path) -> bool:
    return (folder / "cars_annos.mat").is_file() and (folder / "car_ims").is_dir()


def _annotation_file(root: Path, split: str) -> Path:
    if split == "train":
        wanted = [root / "devkit" / "cars_train_annos.mat"]
    else:
        wanted = [folder / "cars_test_annos_withlabels.mat" for folder in (root, root / "devkit")]
    for file in wanted:
        if file.is_file():
            return file
    why = " (cars_test_annos.mat has no classes)" if split == "test" else ""
    raise layout_error(find_entry("cars"), root, f"{wanted[0].relative_to(root)} is missing{why}")


def _annotations(file: Path) -> Any:
    """The records of a devkit file as an array with named fields."""
    entry = find_entry("cars")
    return np.atleast_1d(mat_value(entry, file, read_mat(entry, file), "annotations"))


def _field(file: Path, annotations: Any, name: str) -> Any:
    if name not in (annotations.dtype.names or ()):
        raise ValueError(f"cars: the annotations of {file} have no field {name!r}: take the file that has the classes")
    return annotations[name]
