"""Caltech-UCSD Birds-200-2011."""

from pathlib import Path

from eigengrain.data.catalogue import find_entry
from eigengrain.data.imageset import ImageSet
from eigengrain.data.layout import check_classes, check_files, find_root, rows, whole_number


def open_cub(root: str | Path, split: str) -> ImageSet:
    """Birds from their published lists; boxes are (left, top, right, bottom).

    Raises:
        ValueError: for a wrong folder, lists that do not fit together, or missing images.

    References:
        C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, Technical Report CNS-TR-2011-001, 2011.
    """
    entry = find_entry("cub")
    names = ("images", "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
    root = find_root(entry, root, *names)
    files, labels, splits, classes = (dict(rows(entry, root / name, 2)) for name in names[1:])
    for name, listed in (("image_class_labels.txt", labels), ("train_test_split.txt", splits)):
        lost = [number for number in files if number not in listed]
        if lost:
            raise ValueError(
                f"cub: {len(lost)} images of {root / 'images.txt'} are not in {name}, the first is number {lost[0]}: "
                "take all lists from one release"
            )
    numbers = sorted(classes, key=lambda number: whole_number(entry, root / "classes.txt", number))
    place = {number: k for k, number in enumerate(numbers)}
    unnamed = [f"{labels[image]} of image {image}" for image in files if labels[image] not in place]
    if unnamed:
        raise ValueError(f"cub: classes.txt has {len(place)} classes, and class {unnamed[0]} is not one of them")

    wanted = "1" if split == "train" else "0"
    chosen = [image for image in files if splits[image] == wanted]
    paths = [root / "images" / files[image] for image in chosen]
    check_files(entry, root / "images.txt", paths)
    targets = [place[labels[image]] for image in chosen]
    titles = [_title(classes[number]) for number in numbers]
    check_classes(entry, split, titles, targets, root / "train_test_split.txt")
    return ImageSet("cub", split, titles, targets, paths, boxes=_boxes(root / "bounding_boxes.txt", chosen))


def _title(folder: str) -> str:
    """'001.Black_footed_Albatross' for reading: 'Black footed Albatross'."""
    number, _, name = folder.partition(".")
    return (name if number.isdigit() and name else folder).replace("_", " ")


def _boxes(file: Path, chosen: list[str]) -> list[tuple[float, float, float, float]] | None:
    if not file.is_file():
        return None
    given = {}
    for number, *numbers in rows(find_entry("cub"), file, 5):
        left, top, width, height = map(float, numbers)
        given[number] = (left, top, left + width, top + height)
    lost = [number for number in chosen if number not in given]
    if lost:
        raise ValueError(f"cub: {len(lost)} images have no box in {file}, the first is number {lost[0]}")
    return [given[number] for number in chosen]
