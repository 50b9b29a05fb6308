"""Caltech-UCSD Birds-200-2011."""

import re
from pathlib import Path

from eigengrain import data
from eigengrain.data.datasets.layout import build_image_set, check_values, find_root, read_boxes, read_rows
from eigengrain.data.datasets.registry import Entry, register_dataset
from eigengrain.errors import AnnotationError

_FILES = ("images", "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")


def open_cub(root: str | Path, split: str) -> "data.ImageSet":
    """Birds from their published lists; boxes are (left, top, right, bottom).

    References:
        C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, Technical Report CNS-TR-2011-001, 2011.
    """
    root = find_root(ENTRY, root, *_FILES)
    image_file, label_file, split_file, class_file = (root / name for name in _FILES[1:])
    files, labels, splits, classes = map(_read_table, (image_file, label_file, split_file, class_file))
    for file, table in ((label_file, labels), (split_file, splits)):
        unmatched = sorted(files.keys() ^ table.keys(), key=int)
        if unmatched:
            problem = f"{len(unmatched)} images are not both in it and in images.txt, first: number {unmatched[0]}"
            raise AnnotationError("cub", file, f"{problem}; take all lists from one release", unmatched[0])
    numbers = sorted(classes, key=int)
    label_of = {number: k for k, number in enumerate(numbers)}
    problem = "image {sample} has the class {value}, which is not in classes.txt"
    check_values(ENTRY, label_file, labels.items(), label_of, problem)
    problem = "image {sample} must have 1 (training) or 0 (test), not {value!r}"
    check_values(ENTRY, split_file, splits.items(), ("0", "1"), problem)
    marker = "1" if split == "train" else "0"
    images = [image for image in files if splits[image] == marker]
    if not images:
        raise AnnotationError("cub", split_file, f"no image has {marker}, so that the split {split} is empty", marker)
    paths = [root / "images" / files[image] for image in images]
    targets = [label_of[labels[image]] for image in images]
    # '001.Black_footed_Albatross' becomes 'Black footed Albatross'
    titles = [re.sub(r"^\d+\.(?=.)", "", classes[number]).replace("_", " ") for number in numbers]
    boxes = read_boxes(ENTRY, root / "bounding_boxes.txt", images, "left, top, width, height")
    corners = boxes and [[left, top, left + width, top + height] for left, top, width, height in boxes]
    return build_image_set(ENTRY, split, titles, targets, paths, image_file, corners)


def _read_table(file: Path) -> dict[str, str]:
    """The second entry of each line by the first, which is a unique integer."""
    table: dict[str, str] = {}
    for number, value in read_rows(ENTRY, file, 2):
        if not number.isdecimal():
            raise AnnotationError("cub", file, f"{number!r} must be an integer", number)
        if number in table:
            raise AnnotationError("cub", file, f"number {number} appears twice; take all lists from one release", number)
        table[number] = value
    return table


ENTRY = register_dataset(
    Entry(
        "cub",
        "Birds: Caltech-UCSD Birds-200-2011",
        (
            ("images/CLASS/*.jpg", "photographs (.webp and other formats, if images.txt names them)"),
            ("images.txt", "number and file of each image"),
            ("image_class_labels.txt", "number and class of each image"),
            ("train_test_split.txt", "number and 1 for training, 0 for test"),
            ("classes.txt", "number and name of each class"),
            ("bounding_boxes.txt", "number, left, top, width, height; optional"),
        ),
        open_cub,
        folders=("CUB_200_2011",),
        required=(_FILES,),
        published=(200, 5994, 5794),
        page="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    )
)
