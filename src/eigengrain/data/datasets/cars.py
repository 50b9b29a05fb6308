"""Stanford Cars, from a local folder: its published links are dead."""

from pathlib import Path

from eigengrain import data
from eigengrain.data.datasets.layout import MatFile, build_image_set, check_values, find_file, find_root, locate
from eigengrain.data.datasets.registry import Entry, register_dataset

_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
#: the layout with one annotation file
_SINGLE = ("car_ims", "cars_annos.mat")
_TEST_FILE = "cars_test_annos_withlabels.mat"


def open_cars(root: str | Path, split: str) -> "data.ImageSet":
    """Cars from the annotations of the devkit, or from the single file ``cars_annos.mat``; needs SciPy.

    References:
        J. Krause et al., 3D Object Representations for Fine-Grained Categorization, 3DRR 2013.
    """
    root = Path(root).expanduser()
    folder, missing = locate(ENTRY, root, _SINGLE)
    if not missing:
        root = folder
        annotations = names = MatFile(ENTRY, root / "cars_annos.mat")
        records = annotations.array("annotations")
        flags = annotations.field(records, "test")
        records = records[[k for k, flag in enumerate(flags) if bool(flag) == (split == "test")]]
        paths = [root / str(path) for path in annotations.field(records, "relative_im_path")]
    else:
        root = find_root(ENTRY, root, f"cars_{split}", "devkit/cars_meta.mat")
        if split == "train":
            file = find_file(ENTRY, root, "devkit/cars_train_annos.mat")
        else:
            note = " (cars_test_annos.mat has no classes)"
            file = find_file(ENTRY, root, _TEST_FILE, f"devkit/{_TEST_FILE}", note=note)
        annotations, names = MatFile(ENTRY, file), MatFile(ENTRY, root / "devkit/cars_meta.mat")
        records = annotations.array("annotations")
        paths = [root / f"cars_{split}" / str(name) for name in annotations.field(records, "fname")]
    classes = [str(name) for name in names.array("class_names")]
    numbers = [int(number) for number in annotations.field(records, "class")]
    problem = f"class {{value}} is not one of the {len(classes)} of {names.file.name}; take both from one release"
    check_values(ENTRY, annotations.file, enumerate(numbers), range(1, len(classes) + 1), problem)
    labels = [number - 1 for number in numbers]
    sides = [[float(value) for value in annotations.field(records, side)] for side in _BOX]
    return build_image_set(ENTRY, split, classes, labels, paths, annotations.file, list(zip(*sides, strict=True)))


ENTRY = register_dataset(
    Entry(
        "cars",
        "Cars: Stanford Cars",
        (
            ("cars_train/*.jpg, cars_test/*.jpg", "photographs"),
            ("devkit/cars_meta.mat", "class names"),
            ("devkit/cars_train_annos.mat", "file, class and box of the training images"),
            (_TEST_FILE, "the same for test, here or in devkit/"),
            ("or: car_ims/*.jpg, cars_annos.mat", "all photographs, and one file with classes, boxes and split"),
        ),
        open_cars,
        folders=("stanford_cars", "cars"),
        required=(
            (
                *("cars_train", "cars_test", "devkit/cars_meta.mat", "devkit/cars_train_annos.mat"),
                f"{_TEST_FILE}|devkit/{_TEST_FILE}",
            ),
            _SINGLE,
        ),
        published=(196, 8144, 8041),
        extra="data",
        page="J. Krause et al. 2013: the authors' page is gone, copies are on Kaggle and Hugging Face",
    )
)
