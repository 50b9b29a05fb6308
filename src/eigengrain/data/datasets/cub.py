"""Caltech-UCSD Birds-200-2011."""

from pathlib import Path

from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.data.datasets.layout import check_classes, check_files, find_root, rows, whole_number
from eigengrain.data.image_set import ImageSet


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
    files, labels, splits, classes = (_table(root / name) for name in names[1:])
    for name, listed in (("image_class_labels.txt", labels), ("train_test_split.txt", splits)):
        unknown = [number for number in listed if number not in files]
        if unknown:
            raise ValueError(
                f"cub: {root / name} has {len(unknown)} images that are not in images.txt, the first is number "
                f"{unknown[0]}: take all lists from one release"
            )
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

    wrong = [f"{splits[image]!r} for image {image}" for image in files if splits[image] not in ("0", "1")]
    if wrong:
        raise ValueError(f"cub: {root / 'train_test_split.txt'} has {wrong[0]}, where 1 (training) or 0 (test) is expected")
    wanted = "1" if split == "train" else "0"
    chosen = [image for image in files if splits[image] == wanted]
    if not chosen:
        raise ValueError(
            f"cub: {root / 'train_test_split.txt'} marks no image with {wanted}, so the {split} split is empty"
        )
    paths = [root / "images" / files[image] for image in chosen]
    check_files(entry, root / "images.txt", paths)
    targets = [place[labels[image]] for image in chosen]
    titles = [_title(classes[number]) for number in numbers]
    check_classes(entry, split, titles, targets, root / "train_test_split.txt")
    return ImageSet("cub", split, titles, targets, paths, boxes=_boxes(root / "bounding_boxes.txt", chosen))


def _table(file: Path) -> dict[str, str]:
    """The second entry of each line by the first, which is a number and there once."""
    entry, table = find_entry("cub"), dict[str, str]()
    for number, value in rows(entry, file, 2):
        if number in table:
            raise ValueError(f"cub: {file} has the number {number} twice: take all lists from one release")
        whole_number(entry, file, number)
        table[number] = value
    return table


def _title(folder: str) -> str:
    """'001.Black_footed_Albatross' for reading: 'Black footed Albatross'."""
    number, _, name = folder.partition(".")
    return (name if number.isdigit() and name else folder).replace("_", " ")


def _boxes(file: Path, chosen: list[str]) -> list[tuple[float, float, float, float]] | None:
    if not file.is_file():
        return None
    given = {}
    for number, *numbers in rows(find_entry("cub"), file, 5):
        try:
            left, top, width, height = map(float, numbers)
        except ValueError:
            raise ValueError(
                f"cub: {file} has {' '.join(numbers)!r} for image {number}, where left, top, width and height are expected"
            ) from None
        given[number] = (left, top, left + width, top + height)
    lost = [number for number in chosen if number not in given]
    if lost:
        raise ValueError(f"cub: {len(lost)} images have no box in {file}, the first is number {lost[0]}")
    return [given[number] for number in chosen]
