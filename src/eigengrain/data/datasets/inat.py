"""iNaturalist 2017."""

from pathlib import Path

from eigengrain import data
from eigengrain.data.datasets.layout import build_image_set, check_values, find_file, find_root, read_json
from eigengrain.data.datasets.registry import Entry, register_dataset
from eigengrain.errors import AnnotationError


def open_inat2017(root: str | Path, split: str) -> "data.ImageSet":
    """iNaturalist from its JSON annotations; ``test`` is the published validation set.

    References:
        G. Van Horn et al., The iNaturalist Species Classification and Detection Dataset, CVPR 2018.
    """
    root = find_root(ENTRY, root, "train_val_images")
    name = f"{'train' if split == 'train' else 'val'}2017.json"
    file = find_file(ENTRY, root, name, f"annotations/{name}")
    content = read_json(ENTRY, file)
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            problem = f"it has no list {key!r}: it is not an annotation file of iNaturalist 2017"
            raise AnnotationError("inat2017", file, problem, key)
    try:
        categories = sorted(content["categories"], key=lambda category: category["id"])
        label_of = {category["id"]: k for k, category in enumerate(categories)}
        category_of = {annotation["image_id"]: annotation["category_id"] for annotation in content["annotations"]}
        classes = [str(category["name"]) for category in categories]
        paths = [root / image["file_name"] for image in content["images"]]
        ids = [image["id"] for image in content["images"]]
    except (KeyError, TypeError) as error:
        raise AnnotationError("inat2017", file, f"a record is not as published ({error!r})") from None
    check_values(ENTRY, file, enumerate(ids), category_of, "the image with the id {value} has no annotation")
    numbers = [category_of[image] for image in ids]
    check_values(ENTRY, file, enumerate(numbers), label_of, "the category id {value} is not in its categories")
    labels = [label_of[number] for number in numbers]
    return build_image_set(ENTRY, split, classes, labels, paths, file)


ENTRY = register_dataset(
    Entry(
        "inat2017",
        "iNats: iNaturalist 2017",
        (
            ("train_val_images/GROUP/SPECIES/*.jpg", "photographs"),
            ("train2017.json", "images, annotations and categories, here or in annotations/"),
            ("val2017.json", "the same; these are the test images, because the labels of the test set are not public"),
        ),
        open_inat2017,
        folders=("inat2017", "inaturalist2017", "2017"),
        required=(
            ("train_val_images", "train2017.json|annotations/train2017.json", "val2017.json|annotations/val2017.json"),
        ),
        published=(5089, 579184, 95986),
        page="https://github.com/visipedia/inat_comp/tree/master/2017",
    )
)
