"""FGVC-Aircraft."""

from pathlib import Path

from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.data.datasets.layout import check_classes, check_files, find_root, rows
from eigengrain.data.image_set import ImageSet
from eigengrain.errors import UnknownName

_NAMES = {"variant": "variants.txt", "family": "families.txt", "manufacturer": "manufacturers.txt"}


def open_aircraft(root: str | Path, split: str, level: str = "variant", with_validation: bool = True) -> ImageSet:
    """Aircrafts from their published lists; boxes are (left, top, right, bottom).

    Args:
        root: the folder ``fgvc-aircraft-2013b`` or the one above it.
        split: ``train`` or ``test``.
        level: what a class is: ``variant`` (100 classes), ``family`` (70) or ``manufacturer`` (30).
        with_validation: train on the list ``trainval``, as papers do, and not on ``train`` alone.

    Raises:
        ValueError: for a wrong folder, lists that do not fit together, or missing images.

    References:
        S. Maji et al., Fine-Grained Visual Classification of Aircraft, arXiv:1306.5151, 2013.
    """
    entry = find_entry("aircraft")
    if level not in _NAMES:
        raise UnknownName("level of the aircraft classes", level, _NAMES)
    part = "test" if split == "test" else "trainval" if with_validation else "train"
    listed = f"data/images_{level}_{part}.txt"
    root = find_root(entry, root, "data/images", f"data/{_NAMES[level]}", listed)
    classes = [line[0] for line in rows(entry, root / "data" / _NAMES[level], 1)]
    place = {name: k for k, name in enumerate(classes)}
    samples = list(rows(entry, root / listed, 2))
    unnamed = [name for _, name in samples if name not in place]
    if unnamed:
        raise ValueError(f"aircraft: {root / listed} has the class {unnamed[0]!r}, which {_NAMES[level]} does not have")
    paths = [root / "data" / "images" / f"{image}.jpg" for image, _ in samples]
    check_files(entry, root / listed, paths)
    labels = [place[name] for _, name in samples]
    check_classes(entry, split, classes, labels, root / listed)
    return ImageSet("aircraft", split, classes, labels, paths, boxes=_boxes(root / "data/images_box.txt", samples))


def _boxes(file: Path, samples: list[list[str]]) -> list[list[float]] | None:
    if not file.is_file():
        return None
    given = {}
    for image, *box in rows(find_entry("aircraft"), file, 5):
        try:
            left, top, right, bottom = map(float, box)
            given[image] = [left - 1, top - 1, right, bottom]  # the first pixel is (1, 1), the last one inside
        except ValueError:
            raise ValueError(
                f"aircraft: {file} has {' '.join(box)!r} for image {image}, where left, top, right and bottom are expected"
            ) from None
    lost = [image for image, _ in samples if image not in given]
    if lost:
        raise ValueError(f"aircraft: {len(lost)} images have no box in {file}, the first is {lost[0]}")
    return [given[image] for image, _ in samples]
