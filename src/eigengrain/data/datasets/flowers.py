"""Oxford Flowers-102."""

from pathlib import Path

from eigengrain import data
from eigengrain.data.datasets.layout import MatFile, build_image_set, check_values, find_root
from eigengrain.data.datasets.registry import Entry, register_dataset

_FILES = ("jpg", "imagelabels.mat", "setid.mat")


def open_flowers(root: str | Path, split: str, with_validation: bool = True) -> "data.ImageSet":
    """Flowers from ``imagelabels.mat`` and ``setid.mat``, by default 2,040 training images with validation; needs SciPy.

    References:
        M.-E. Nilsback and A. Zisserman, Automated Flower Classification over a Large Number of Classes, ICVGIP 2008.
    """
    root = find_root(ENTRY, root, *_FILES)
    splits = MatFile(ENTRY, root / "setid.mat")
    all_labels = [int(label) for label in MatFile(ENTRY, root / "imagelabels.mat").array("labels")]
    names = ["tstid"] if split == "test" else ["trnid", "valid"] if with_validation else ["trnid"]
    numbers = [int(number) for name in names for number in splits.array(name)]
    problem = f"image {{value}} is not one of the {len(all_labels)} of imagelabels.mat; take both from one release"
    check_values(ENTRY, splits.file, enumerate(numbers), range(1, len(all_labels) + 1), problem)
    paths = [root / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
    classes = _class_names(max(all_labels))
    labels = [all_labels[number - 1] - 1 for number in numbers]
    return build_image_set(ENTRY, split, classes, labels, paths, splits.file)


def _class_names(count: int) -> list[str]:
    """Names of the flowers, which are not in the files but in torchvision; numbers for another count."""
    from eigengrain import _torchvision  # noqa: F401  isort: skip
    from torchvision.datasets import Flowers102

    names = list(getattr(Flowers102, "classes", ()))
    return names if len(names) == count else [f"flower {k + 1}" for k in range(count)]


ENTRY = register_dataset(
    Entry(
        "flowers",
        "Flowers: Oxford Flowers-102",
        (
            ("jpg/image_00001.jpg …", "photographs"),
            ("imagelabels.mat", "class of each image"),
            ("setid.mat", "numbers of the images for training (trnid), validation (valid) and test (tstid)"),
        ),
        open_flowers,
        folders=("flowers-102", "102flowers"),
        required=(_FILES,),
        published=(102, 2040, 6149),
        options={"with_validation": "whether to train on the published validation images as well; default true"},
        extra="data",
        page="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
    )
)
