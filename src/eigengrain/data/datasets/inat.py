"""iNaturalist 2017."""

from pathlib import Path
from typing import Any

from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.data.datasets.layout import check_classes, check_files, find_root, layout_error, read_json
from eigengrain.data.image_set import ImageSet


def open_inat2017(root: str | Path, split: str) -> ImageSet:
    """iNaturalist from its JSON annotations; ``test`` is the published validation set.

    Raises:
        ValueError: for a wrong folder, annotations that do not fit together, or missing images.

    References:
        G. Van Horn et al., The iNaturalist Species Classification and Detection Dataset, CVPR 2018.
    """
    entry = find_entry("inat2017")
    root = find_root(entry, root, "train_val_images")
    name = f"{'train' if split == 'train' else 'val'}2017.json"
    file = next((f for f in (root / name, root / "annotations" / name) if f.is_file()), None)
    if file is None:
        raise layout_error(entry, root, f"{name} is missing")
    content = read_json(entry, file)
    images, annotations, categories = (_records(file, content, key) for key in ("images", "annotations", "categories"))
    try:
        categories = sorted(categories, key=lambda category: category["id"])
        place = {category["id"]: k for k, category in enumerate(categories)}
        label_of = {annotation["image_id"]: annotation["category_id"] for annotation in annotations}
        classes = [str(category["name"]) for category in categories]
        paths = [root / image["file_name"] for image in images]
        numbers = [image["id"] for image in images]
    except (KeyError, TypeError) as error:
        raise ValueError(f"inat2017: {file} has a record that is not as published: {error}") from None
    lost = [number for number in numbers if number not in label_of]
    if lost:
        raise ValueError(f"inat2017: {len(lost)} images of {file} have no annotation, the first has the id {lost[0]}")
    unnamed = [label_of[number] for number in numbers if label_of[number] not in place]
    if unnamed:
        raise ValueError(f"inat2017: {file} has the category id {unnamed[0]}, which its categories do not have")
    check_files(entry, file, paths)
    labels = [place[label_of[number]] for number in numbers]
    check_classes(entry, split, classes, labels, file)
    return ImageSet("inat2017", split, classes, labels, paths)


def _records(file: Path, content: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise ValueError(f"inat2017: {file} has no list {key!r}: it is not the annotation file of iNaturalist 2017")
    return content[key]  # type: ignore[no-any-return]
