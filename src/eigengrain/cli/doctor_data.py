"""Which data sets a folder holds, at a glance: names of files and folders, none of them opened. No torch here."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from eigengrain.data.datasets.catalogue import ENTRIES, Entry

#: what the folder of a data set must have, in one of several forms; of names with | between them, one
_NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    "cub": (("images", "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"),),
    "aircraft": (("data/images", "data/variants.txt", *(f"data/images_variant_{s}.txt" for s in ("trainval", "test"))),),
    "cars": (
        (
            *("cars_train", "cars_test", "devkit/cars_meta.mat", "devkit/cars_train_annos.mat"),
            "cars_test_annos_withlabels.mat|devkit/cars_test_annos_withlabels.mat",
        ),
        ("car_ims", "cars_annos.mat"),
    ),
    "dogs": (("Images", "train_list.mat|lists/train_list.mat", "test_list.mat|lists/test_list.mat"),),
    "inat2017": (
        (
            "train_val_images",
            "train2017.json|annotations/train2017.json",
            "val2017.json|annotations/val2017.json",
        ),
    ),
    "flowers": (("jpg", "imagelabels.mat", "setid.mat"),),
    "imagenet": (("train", "val"),),
    "folder": (("train", "test|val|valid|validation"), ("split.csv",)),
}

#: the page of each data set
_PAGES = {
    "cub": "https://www.vision.caltech.edu/datasets/cub_200_2011/",
    "aircraft": "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
    "cars": "J. Krause et al. 2013: the authors' page is gone, copies are on Kaggle and Hugging Face",
    "dogs": "http://vision.stanford.edu/aditya86/ImageNetDogs/",
    "inat2017": "https://github.com/visipedia/inat_comp/tree/master/2017",
    "flowers": "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
    "imagenet": "https://image-net.org/download.php (with an account)",
}


@dataclass(frozen=True)
class DataFolder:
    """What was seen of a data set.

    Args:
        name: for ``open_dataset``.
        state: found, incomplete, or not found.
        folder: where it is, or the nearest to it.
        missing: what the folder lacks.
        remedy: what to do, empty where nothing is to be done.
    """

    name: str
    state: str
    folder: str | None
    missing: tuple[str, ...] = ()
    remedy: str = ""


def look(root: str | Path) -> list[DataFolder]:
    """Every data set that is read from files, in a folder that holds it or holds its own folder.

    Raises:
        ValueError: if there is no such folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     birds = look(folder)[0]
        >>> birds.name, birds.state
        ('cub', 'not found')
    """
    place = Path(root).expanduser()
    if not place.is_dir():
        raise ValueError(f"there is no folder {str(root)!r}: name the one that holds the data sets with --data")
    return [seen for entry in ENTRIES if not entry.drawn and (seen := _look_for(entry, place)) is not None]


def _look_for(entry: Entry, root: Path) -> DataFolder | None:
    places = [root, *(root / name for name in entry.folders if (root / name).is_dir())]
    if entry.name == "imagenet":
        places = [place for place in places if _has_synsets(place / "train")]
    lacking = [(place, form, _missing(place, form)) for place in places for form in _NEEDED[entry.name]]
    place, form, missing = min(lacking, key=lambda each: len(each[2]) / len(each[1]), default=(root, ("",), ("",)))
    if not missing:
        needs_scipy = entry.extra == "data" and find_spec("scipy") is None
        return DataFolder(entry.name, "found", str(place), remedy="pip install 'eigengrain[data]'" if needs_scipy else "")
    if entry.name == "folder":
        return None  # a user's own images are found or not meant
    own = root / entry.folders[0]
    if len(missing) < len(form) or place != root:
        return DataFolder(entry.name, "incomplete", str(place), missing, f"see 'eigengrain datasets list {entry.name}'")
    return DataFolder(entry.name, "not found", None, (), f"from {_PAGES[entry.name]} to {own}")


def _missing(place: Path, form: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.split("|")[0] for name in form if not any((place / each).exists() for each in name.split("|")))


def _has_synsets(folder: Path) -> bool:
    """Whether a folder has one of a class of ImageNet: train and val alone are in many folders."""
    return folder.is_dir() and any(re.fullmatch(r"n\d{8}", inner.name) for inner in folder.iterdir())
