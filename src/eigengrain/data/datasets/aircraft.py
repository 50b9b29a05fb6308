"""FGVC-Aircraft."""

from pathlib import Path

from eigengrain import data
from eigengrain.data.datasets.layout import build_image_set, check_values, find_root, read_boxes, read_rows
from eigengrain.data.datasets.registry import Entry, register_dataset
from eigengrain.errors import UnknownName

_CLASS_FILES = {"variant": "variants.txt", "family": "families.txt", "manufacturer": "manufacturers.txt"}


def open_aircraft(root: str | Path, split: str, level: str = "variant", with_validation: bool = True) -> "data.ImageSet":
    """Aircraft from their published lists, by default with the training list ``trainval``, as papers do.

    References:
        S. Maji et al., Fine-Grained Visual Classification of Aircraft, arXiv:1306.5151, 2013.
    """
    if level not in _CLASS_FILES:
        raise UnknownName("level of the aircraft classes", level, _CLASS_FILES)
    part = "test" if split == "test" else "trainval" if with_validation else "train"
    class_name, list_name = f"data/{_CLASS_FILES[level]}", f"data/images_{level}_{part}.txt"
    root = find_root(ENTRY, root, "data/images", class_name, list_name)
    list_file = root / list_name
    classes = [name for [name] in read_rows(ENTRY, root / class_name, 1)]
    label_of = {name: k for k, name in enumerate(classes)}
    samples = [(image, name) for image, name in read_rows(ENTRY, list_file, 2)]
    check_values(ENTRY, list_file, samples, label_of, f"class {{value!r}} is not in {_CLASS_FILES[level]}")
    images = [image for image, _ in samples]
    paths = [root / "data" / "images" / f"{image}.jpg" for image in images]
    labels = [label_of[name] for _, name in samples]
    boxes = read_boxes(ENTRY, root / "data/images_box.txt", images, "left, top, right, bottom")
    # in the file the first pixel is (1, 1) and the last one is inside
    edges = boxes and [[left - 1, top - 1, right, bottom] for left, top, right, bottom in boxes]
    return build_image_set(ENTRY, split, classes, labels, paths, list_file, edges)


ENTRY = register_dataset(
    Entry(
        "aircraft",
        "Aircrafts: FGVC-Aircraft 2013b",
        (
            ("data/images/*.jpg", "photographs"),
            ("data/variants.txt", "class names; families.txt and manufacturers.txt for the coarser levels"),
            ("data/images_variant_trainval.txt", "image and class; images_variant_train.txt without the validation images"),
            ("data/images_variant_test.txt", "the same for test"),
            ("data/images_box.txt", "image, left, top, right, bottom; optional"),
        ),
        open_aircraft,
        folders=("fgvc-aircraft-2013b",),
        required=(
            ("data/images", "data/variants.txt", "data/images_variant_trainval.txt", "data/images_variant_test.txt"),
        ),
        published=(100, 6667, 3333),
        options={
            "level": "variant (100 classes), family (70) or manufacturer (30); default variant",
            "with_validation": "whether to train on the published validation images as well; default true",
        },
        page="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
    )
)
