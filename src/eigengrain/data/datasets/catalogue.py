"""What data sets there are and how their folders look. No torch here: the command line lists them at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from eigengrain.errors import UnknownName


@dataclass(frozen=True)
class Entry:
    """A data set: where its reader is and what it reads.

    Args:
        name: for ``open_dataset``.
        title: as it is published.
        layout: (file or folder, what it holds) below the root.
        reader: ``module:function`` that opens it.
        folders: names that the data set's own folder has; the folder above it may be given as well.
        published: classes, training images and test images as published; empty where anything fits.
        options: of the reader, with what they mean.
        extra: of this package, that the reader needs.
        drawn: whether the images are made, not read.
    """

    name: str
    title: str
    layout: tuple[tuple[str, str], ...]
    reader: str
    folders: tuple[str, ...] = ()
    published: tuple[int, int, int] | None = None
    options: dict[str, str] = field(default_factory=dict)
    extra: str | None = None
    drawn: bool = False


_WITH_VALIDATION = "whether the published validation images are trained on as well (True)"

ENTRIES = (
    Entry(
        "cub",
        "Birds: Caltech-UCSD Birds-200-2011",
        (
            ("images/CLASS/*.jpg", "photographs (.webp and others too, as images.txt names them)"),
            ("images.txt", "number and file of each image"),
            ("image_class_labels.txt", "number and class of each image"),
            ("train_test_split.txt", "number and 1 for training, 0 for test"),
            ("classes.txt", "number and name of each class"),
            ("bounding_boxes.txt", "number, left, top, width, height; optional"),
        ),
        "eigengrain.data.datasets.cub:open_cub",
        folders=("CUB_200_2011",),
        published=(200, 5994, 5794),
    ),
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
        "eigengrain.data.datasets.aircraft:open_aircraft",
        folders=("fgvc-aircraft-2013b",),
        published=(100, 6667, 3333),
        options={"level": "variant, family or manufacturer (variant)", "with_validation": _WITH_VALIDATION},
    ),
    Entry(
        "cars",
        "Cars: Stanford Cars",
        (
            ("cars_train/*.jpg, cars_test/*.jpg", "photographs"),
            ("devkit/cars_meta.mat", "class names"),
            ("devkit/cars_train_annos.mat", "file, class and box of the training images"),
            ("cars_test_annos_withlabels.mat", "the same for test, here or in devkit/"),
            ("or: car_ims/*.jpg, cars_annos.mat", "all photographs, and one file with classes, boxes and split"),
        ),
        "eigengrain.data.datasets.cars:open_cars",
        folders=("stanford_cars", "cars"),
        published=(196, 8144, 8041),
        extra="data",
    ),
    Entry(
        "dogs",
        "Dogs: Stanford Dogs",
        (
            ("Images/CLASS/*.jpg", "photographs"),
            ("train_list.mat, test_list.mat", "file and class of each image, here or in lists/"),
        ),
        "eigengrain.data.datasets.dogs:open_dogs",
        folders=("stanford_dogs", "dogs"),
        published=(120, 12000, 8580),
        extra="data",
    ),
    Entry(
        "inat2017",
        "iNats: iNaturalist 2017",
        (
            ("train_val_images/GROUP/SPECIES/*.jpg", "photographs"),
            ("train2017.json", "images, annotations and categories, here or in annotations/"),
            ("val2017.json", "the same; these are the test images, as labels of the test set are not public"),
        ),
        "eigengrain.data.datasets.inat:open_inat2017",
        folders=("inat2017", "inaturalist2017", "2017"),
        published=(5089, 579184, 95986),
    ),
    Entry(
        "flowers",
        "Flowers: Oxford Flowers-102",
        (
            ("jpg/image_00001.jpg …", "photographs"),
            ("imagelabels.mat", "class of each image"),
            ("setid.mat", "numbers of the images for training (trnid), validation (valid) and test (tstid)"),
        ),
        "eigengrain.data.datasets.flowers:open_flowers",
        folders=("flowers-102", "102flowers"),
        published=(102, 2040, 6149),
        options={"with_validation": _WITH_VALIDATION},
        extra="data",
    ),
    Entry(
        "imagenet",
        "ImageNet (ILSVRC 2012)",
        (
            ("train/n01440764/*.JPEG", "a folder for each of the classes"),
            ("val/n01440764/*.JPEG", "the same; these are the test images"),
        ),
        "eigengrain.data.datasets.folder:open_imagenet",
        folders=("ILSVRC/Data/CLS-LOC", "imagenet"),
        published=(1000, 1281167, 50000),
    ),
    Entry(
        "folder",
        "Your own images, a folder for each class",
        (
            ("train/CLASS/*.jpg", "images for training"),
            ("test/CLASS/*.jpg", "images for test; the folder may be called val, valid or validation"),
            ("or: CLASS/*.jpg, split.csv", "all images, and a table with the columns path and split (train or test)"),
        ),
        "eigengrain.data.datasets.folder:open_folder",
        options={"split_file": "path of the table, if it is not split.csv in the folder"},
    ),
    Entry(
        "plumage",
        "Plumage: drawn birds, no files needed",
        (),
        "eigengrain.data.plumage:open_plumage",
        drawn=True,
    ),
)


def list_datasets() -> list[str]:
    """Names for ``open_dataset``.

    Example:
        >>> list_datasets()
        ['cub', 'aircraft', 'cars', 'dogs', 'inat2017', 'flowers', 'imagenet', 'folder', 'plumage']
    """
    return [entry.name for entry in ENTRIES]


def find_entry(name: str) -> Entry:
    """The data set of that name.

    Raises:
        ValueError: for an unknown name, with near ones.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    raise UnknownName("data set", name, list_datasets())


def check_names(options: Iterable[str]) -> None:
    """See that the options of a reader are none of what ``open_dataset`` is given besides them.

    Raises:
        ValueError: for one that is.

    Example:
        >>> check_names({"level": "family", "split": "test"})
        Traceback (most recent call last):
            ...
        ValueError: split is no option of a data set's reader, but of the command: take it out of the mapping
    """
    for option in options:
        if option in ("name", "root", "split"):
            raise ValueError(
                f"{option} is no option of a data set's reader, but of the command: take it out of the mapping"
            )
