"""Stanford Dogs."""

from pathlib import Path

from eigengrain import data
from eigengrain.data.datasets.layout import MatFile, build_image_set, find_file, find_root
from eigengrain.data.datasets.registry import Entry, register_dataset
from eigengrain.errors import AnnotationError


def open_dogs(root: str | Path, split: str) -> "data.ImageSet":
    """Dogs from the lists ``train_list.mat`` and ``test_list.mat``; needs SciPy.

    References:
        A. Khosla et al., Novel Dataset for Fine-Grained Image Categorization, FGVC 2011.
    """
    root = find_root(ENTRY, root, "Images")
    files = {part: find_file(ENTRY, root, f"{part}_list.mat", f"lists/{part}_list.mat") for part in ("train", "test")}
    lists = {part: _read_list(file) for part, file in files.items()}
    # the lists have no class names: these are the names of the folders, which both lists must number in the same way
    folders: dict[int, str] = {}
    for part, (names, labels) in lists.items():
        for name, label in zip(names, labels, strict=True):
            folder = name.split("/")[0]
            if folders.setdefault(label, folder) != folder:
                problem = f"class {label + 1} is both {folders[label]} and {folder}; take both lists from one release"
                raise AnnotationError("dogs", files[part], problem, folder)
    if sorted(folders) != list(range(len(folders))):
        problem = f"{len(folders)} classes have numbers up to {max(folders) + 1}: some are missing"
        raise AnnotationError("dogs", files["train"], problem, max(folders) + 1)
    names, labels = lists[split]
    paths = [root / "Images" / name for name in names]
    classes = [folders[k].split("-", 1)[-1].replace("_", " ") for k in range(len(folders))]
    return build_image_set(ENTRY, split, classes, labels, paths, files[split])


def _read_list(file: Path) -> tuple[list[str], list[int]]:
    """Files, and labels from 0."""
    content = MatFile(ENTRY, file)
    names = [str(name) for name in content.array("file_list")]
    labels = [int(label) - 1 for label in content.array("labels")]
    if len(names) != len(labels):
        raise AnnotationError("dogs", file, f"it has {len(names)} files and {len(labels)} labels", len(labels))
    return names, labels


ENTRY = register_dataset(
    Entry(
        "dogs",
        "Dogs: Stanford Dogs",
        (
            ("Images/CLASS/*.jpg", "photographs"),
            ("train_list.mat, test_list.mat", "file and class of each image, here or in lists/"),
        ),
        open_dogs,
        folders=("stanford_dogs", "dogs"),
        required=(("Images", "train_list.mat|lists/train_list.mat", "test_list.mat|lists/test_list.mat"),),
        published=(120, 12000, 8580),
        extra="data",
        page="http://vision.stanford.edu/aditya86/ImageNetDogs/",
    )
)
