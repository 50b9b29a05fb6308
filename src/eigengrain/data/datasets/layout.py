"""Helpers of the readers, without torch: LayoutError for a wrong folder, AnnotationError for a wrong list."""

import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eigengrain import data, files
from eigengrain.data.datasets.registry import Entry
from eigengrain.errors import AnnotationError, FileError, LayoutError, MissingPackageError
from eigengrain.text import few

#: names of a folder's content and of missing files that a message shows
SHOWN = 8
#: largest size of a JSON file of annotations in bytes; that of iNaturalist has more than 100 million
MAX_JSON = 1 << 29
#: suffixes of image files, and of those that need pillow-heif
HEIC = (".heic", ".heif", ".hif")
HEIC_REMEDY = "pip install 'eigengrain[heic]'"
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k"),
)


#: files and folders that systems leave beside images
_LITTER = ("__macosx", "thumbs.db", "desktop.ini", "$recycle.bin", "@eadir")


@cache
def has_heic() -> bool:
    """Whether HEIC images can be read."""
    return find_spec("pillow_heif") is not None


def is_image_name(name: str) -> bool:
    """Whether a file name has the suffix of an image that can be read and the file is not hidden."""
    return name.lower().endswith(SUFFIXES + HEIC if has_heic() else SUFFIXES) and not name.startswith(".")


def count_suffixes(names: Iterable[str]) -> dict[str, int]:
    """Number of names by suffix, the most frequent first."""
    return dict(Counter(sorted(os.path.splitext(name)[1].lower() or "nothing" for name in names)).most_common())


def describe_skipped(counts: Mapping[str, int]) -> list[str]:
    """Lines about files that are not read as images, from their :func:`count_suffixes`.

    Example:
        >>> describe_skipped({".txt": 2, ".heic": 12})
        ["12 .heic files were skipped: pip install 'eigengrain[heic]'", 'ignored files that are not images: 2 .txt']
    """
    lines = [f"{counts[s]:,} {s} files were skipped: {HEIC_REMEDY}" for s in HEIC if counts.get(s)]
    others = [f"{number:,} {suffix}" for suffix, number in counts.items() if suffix not in HEIC]
    return [*lines, *([f"ignored files that are not images: {few(others, 5)}"] if others else [])]


def images_below(folder: str) -> list[str]:
    """Image files in a folder and its subfolders; none if the folder does not exist."""
    return [os.path.join(parent, name) for parent, names in walk(folder) for name in names if is_image_name(name)]


def walk(folder: str, errors: list[OSError] | None = None) -> Iterator[tuple[str, list[str]]]:
    """A folder and its subfolders, each with the names of its files, without hidden ones; links are entered once.

    Files that systems leave beside images (``__MACOSX``, ``Thumbs.db``) count as hidden.

    Folders that cannot be read are skipped; their errors are appended to ``errors``.
    """
    entered: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=None if errors is None else errors.append, followlinks=True):
        real = os.path.realpath(parent)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = _visible(folders)
        yield parent, _visible(names)


def _visible(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith(".") and name.lower() not in _LITTER)


def layout_error(entry: Entry, root: Path, problem: str, missing: Sequence[str] = ()) -> LayoutError:
    """The error for a folder that does not contain the data set: its expected and its actual content.

    Example:
        >>> from eigengrain.data.datasets.registry import find_entry
        >>> print(layout_error(find_entry("dogs"), Path("no/such"), "the folder does not exist"))
        no/such cannot be read as Dogs: Stanford Dogs ('dogs'): the folder does not exist
        expected:
          Images/CLASS/*.jpg             photographs
          train_list.mat, test_list.mat  file and class of each image, here or in lists/
        found: nothing
    """
    width = max((len(path) for path, _ in entry.layout), default=0)
    expected = "\n".join(f"  {path:{width}}  {content}" for path, content in entry.layout)
    text = f"{root} cannot be read as {entry.title} ({entry.name!r}): {problem}"
    return LayoutError(f"{text}\nexpected:\n{expected}\nfound: {_list_content(root)}", entry.name, root, missing)


def missing_error(entry: Entry, root: Path, missing: Sequence[str], note: str = "") -> LayoutError:
    """The error for a folder in which files or folders are missing."""
    verb = "are" if len(missing) > 1 else "is"
    return layout_error(entry, root, f"{' and '.join(missing)} {verb} missing{note}", missing)


def _list_content(root: Path) -> str:
    if root.is_file():
        return f"a file; pass the folder{' that it unpacks to' if root.suffix in ('.zip', '.tgz', '.tar', '.gz') else ''}"
    try:
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in os.scandir(root))
    except OSError:
        return "nothing"
    return few(names, SHOWN) if names else "an empty folder"


def locate(entry: Entry, root: Path, required: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder that has most of the required names, and those that it lacks: ``root`` or the data set's own folder in it.

    The names are as in ``Entry.required``. Of complete folders the root is preferred, of incomplete ones the other.
    """
    folders = [root, *(root / name for name in entry.folders if (root / name).is_dir())]
    candidates = [(folder, missing_names(folder, required)) for folder in folders]
    return min(candidates, key=lambda pair: (len(pair[1]), (pair[0] == root) == bool(pair[1])))


def missing_names(folder: Path, required: Sequence[str]) -> list[str]:
    """Names that a folder lacks; ``a|b`` is a choice, and ``*`` matches any name."""
    return [names.split("|")[0] for names in required if not any(any(folder.glob(name)) for name in names.split("|"))]


def find_root(entry: Entry, root: str | Path, *required: str) -> Path:
    """The folder with the required files: ``root`` itself or the data set's own folder in it."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise layout_error(entry, root, "it is a file" if root.is_file() else "the folder does not exist")
    folder, missing = locate(entry, root, required)
    if missing:
        raise missing_error(entry, folder, missing)
    return folder


def find_file(entry: Entry, root: Path, *candidates: str, note: str = "") -> Path:
    """The first of several possible files that exists."""
    file = next((root / name for name in candidates if (root / name).is_file()), None)
    if file is None:
        raise missing_error(entry, root, candidates[:1], note)
    return file


def read_rows(entry: Entry, file: Path, columns: int) -> Iterator[list[str]]:
    """The lines of a list, split at blanks into ``columns`` parts (the last may contain blanks), without empty lines."""
    try:
        lines = files.read_text(file).splitlines()
    except FileError as error:
        raise AnnotationError(entry.name, file, error.problem) from None
    for number, line in enumerate(lines, 1):
        parts = line.split(maxsplit=columns - 1)
        if len(parts) == columns:
            yield [part.strip() for part in parts]
        elif parts:
            problem = f"line {number} must have {columns} entries, got {line.strip()!r}"
            raise AnnotationError(entry.name, file, problem, line.strip())


def check_values(
    entry: Entry, file: Path, samples: Iterable[tuple[object, object]], allowed: Container[object], problem: str
) -> None:
    """Raise an AnnotationError for the first (sample, value) whose value is not allowed; ``problem`` may contain both."""
    for sample, value in samples:
        if value not in allowed:
            raise AnnotationError(entry.name, file, problem.format(sample=sample, value=value), value)


def read_boxes(entry: Entry, file: Path, images: Sequence[str], names: str) -> list[list[float]] | None:
    """The four numbers of each image in a list of boxes; None if the file does not exist."""
    if not file.is_file():
        return None
    boxes = {}
    for image, *numbers in read_rows(entry, file, 5):
        try:
            boxes[image] = [float(number) for number in numbers]
        except ValueError:
            problem = f"the box of image {image} must be {names}, got {' '.join(numbers)!r}"
            raise AnnotationError(entry.name, file, problem, image) from None
    missing = sum(image not in boxes for image in images)
    check_values(entry, file, enumerate(images), boxes, f"{missing} images have no box, first: {{value}}")
    return [boxes[image] for image in images]


def read_json(entry: Entry, file: Path) -> Any:
    """Read a JSON file."""
    try:
        return files.read_json(file, MAX_JSON)
    except FileError as error:
        raise AnnotationError(entry.name, file, error.problem) from None


class MatFile:
    """The variables of a MATLAB file."""

    def __init__(self, entry: Entry, file: Path):
        try:
            from scipy.io import loadmat
        except ImportError:
            problem = f"{entry.name}: SciPy is needed to read {file.name}: pip install 'eigengrain[data]'"
            raise MissingPackageError(problem) from None
        self.entry, self.file = entry, file
        try:
            self.variables = loadmat(str(file), squeeze_me=True)
        except Exception as error:  # SciPy raises many kinds of errors for other files
            raise AnnotationError(entry.name, file, f"it is not a MATLAB file ({error})") from None

    def array(self, name: str) -> Any:
        """A variable as an array with at least one dimension."""
        import numpy as np

        if name not in self.variables:
            names = ", ".join(each for each in self.variables if not each.startswith("__"))
            problem = f"it has no variable {name!r}, only {names or 'none'}"
            raise AnnotationError(self.entry.name, self.file, problem, name)
        return np.atleast_1d(self.variables[name])

    def field(self, records: Any, name: str) -> list[Any]:
        """A field of an array of records."""
        if name not in (records.dtype.names or ()):
            problem = f"its records have no field {name!r}; use the file that has the classes"
            raise AnnotationError(self.entry.name, self.file, problem, name)
        return list(records[name])


def build_image_set(
    entry: Entry,
    split: str,
    classes: Sequence[str],
    labels: Sequence[int],
    paths: Sequence[Path],
    source: Path,
    boxes: Sequence[Sequence[float]] | None = None,
) -> "data.ImageSet":
    """Build the data set of a split, and check that its images exist and that each class has a training image.

    ``source`` is the list of the images, for the error.
    """
    if not paths:
        raise AnnotationError(entry.name, source, f"it contains no image of the split {split}")
    check_paths(entry, paths, source)
    used = set(labels)
    empty = [name for k, name in enumerate(classes) if k not in used]
    if split == "train" and empty:
        problem = f"{len(empty)} of {len(classes)} classes have no training image: {few(empty, 3)}"
        raise AnnotationError(entry.name, source, f"{problem}; add images, or remove the classes", empty[0])
    return data.ImageSet(entry.name, split, classes, labels, paths, boxes=boxes)


def check_paths(entry: Entry, paths: Sequence[Path], source: Path) -> None:
    """Raise an AnnotationError if an image of a list does not exist."""
    # each folder is read once, however many images it has
    folders = {path.parent for path in paths}
    contents = {folder: {*os.listdir(folder)} if os.path.isdir(folder) else set() for folder in folders}
    missing = [path for path in paths if path.name not in contents[path.parent]]
    if missing:
        problem = f"{len(missing)} of the {len(paths)} images of this split do not exist: {few([*map(str, missing)], 3)}"
        raise AnnotationError(entry.name, source, f"{problem}; unpack the images again or correct the list", missing[0])
