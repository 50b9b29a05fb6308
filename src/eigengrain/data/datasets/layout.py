"""Folders as data sets are published: finding them, reading their lists, and saying what is wrong with them."""

import json
import os
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eigengrain.data.datasets.catalogue import Entry
from eigengrain.errors import LayoutError
from eigengrain.text import few

#: entries of a folder and names of missing files that a message shows
SHOWN = 8


def layout_error(entry: Entry, root: Path | None, problem: str) -> LayoutError:
    """The error for a folder that does not hold the data set, or for none: the expected layout beside what was found.

    Example:
        >>> from eigengrain.data.datasets.catalogue import find_entry
        >>> print(layout_error(find_entry("dogs"), Path("no/such"), "there is no such folder"))
        no/such cannot be read as Stanford Dogs ('dogs'): there is no such folder
        expected:
          Images/CLASS/*.jpg             photographs
          train_list.mat, test_list.mat  file and class of each image, here or in lists/
        found: nothing
    """
    width = max((len(what) for what, _ in entry.layout), default=0)
    expected = "\n".join(f"  {what:{width}}  {meaning}" for what, meaning in entry.layout)
    title = entry.title.split(": ")[-1]
    if root is None:
        return LayoutError(f"no folder was named for {title} ({entry.name!r}): {problem}\nexpected:\n{expected}")
    return LayoutError(
        f"{root} cannot be read as {title} ({entry.name!r}): {problem}\nexpected:\n{expected}\nfound: {_found(root)}"
    )


def _found(root: Path) -> str:
    if root.is_file():
        return f"a file; name the folder{' that it unpacks to' if root.suffix in ('.zip', '.tgz', '.tar', '.gz') else ''}"
    try:
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in os.scandir(root))
    except OSError:
        return "nothing"
    return few(names, SHOWN) if names else "an empty folder"


def find_root(entry: Entry, root: str | Path, *needed: str) -> Path:
    """The folder with the ``needed`` files: ``root`` itself or the data set's own folder in it.

    Raises:
        ValueError: with the expected layout and what was found, if neither has them all.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise layout_error(entry, root, "it is a file" if root.is_file() else "there is no such folder")
    candidates = [root, *(root / name for name in entry.folders if (root / name).is_dir())]
    lacking = {folder: [name for name in needed if not (folder / name).exists()] for folder in candidates}
    for folder, missing in lacking.items():
        if not missing:
            return folder
    # the data set's own folder says more about what is missing than the one above it
    nearest = min(lacking, key=lambda folder: (len(lacking[folder]), folder == root))
    raise layout_error(entry, nearest, missing_text(lacking[nearest]))


def missing_text(names: Sequence[str]) -> str:
    """Says that files or folders are missing.

    Example:
        >>> missing_text(["train/"]), missing_text(["train/", "test/"])
        ('train/ is missing', 'train/ and test/ are missing')
    """
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing"


def rows(entry: Entry, file: Path, columns: int) -> Iterator[list[str]]:
    """The lines of a list, cut at blanks into ``columns`` parts (the last one may have blanks); empty lines are left out.

    Raises:
        ValueError: for a line with fewer parts, or a file that is no text.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{entry.name}: cannot read {file} ({error})") from None
    for number, line in enumerate(lines, 1):
        parts = line.split(maxsplit=columns - 1)
        if len(parts) == columns:
            yield [part.strip() for part in parts]
        elif parts:
            raise ValueError(f"{entry.name}: line {number} of {file} needs {columns} entries, it is {line.strip()!r}")


def whole_number(entry: Entry, file: Path, text: str) -> int:
    """A number of a list.

    Raises:
        ValueError: naming the file, if it is none.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{entry.name}: {file} has {text!r} where a whole number is expected") from None


def read_json(entry: Entry, file: Path) -> Any:
    """A JSON file.

    Raises:
        ValueError: naming the file, if it is none.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{entry.name}: cannot read {file} as JSON ({error})") from None


def read_mat(entry: Entry, file: Path) -> dict[str, Any]:
    """A MATLAB file.

    Raises:
        ValueError: if it cannot be read, or SciPy is not installed.
    """
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ValueError(
            f"{entry.name}: {file.name} is a MATLAB file, which SciPy reads: pip install 'eigengrain[data]'"
        ) from None
    try:
        return dict(loadmat(str(file), squeeze_me=True))
    except Exception as error:  # SciPy fails in many ways on what is no MATLAB file
        raise ValueError(f"{entry.name}: cannot read {file} as a MATLAB file ({error})") from None


def mat_value(entry: Entry, file: Path, values: dict[str, Any], key: str) -> Any:
    """A variable of a MATLAB file.

    Raises:
        ValueError: naming the variables that there are, if this one is not.
    """
    if key not in values:
        there = ", ".join(name for name in values if not name.startswith("__"))
        raise ValueError(f"{entry.name}: {file} has no variable {key!r}; it has {there or 'none'}")
    return values[key]


def check_files(entry: Entry, source: Path, paths: Sequence[Path]) -> None:
    """See that the files which a list names are there; a folder is read once, however many files it has.

    Raises:
        ValueError: with how many are missing and the first of them, or if the list names no file at all.
    """
    if not paths:
        raise ValueError(f"{entry.name}: {source} names no image for this split")
    there: dict[Path, Collection[str]] = {}
    missing = []
    for path in paths:
        if path.parent not in there:
            there[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else ()
        if path.name not in there[path.parent]:
            missing.append(path)
    if missing:
        first = ", ".join(map(str, islice(missing, 3)))
        raise ValueError(
            f"{entry.name}: {source} names {len(paths)} images for this split and {len(missing)} of them are missing: "
            f"{first}{', …' if len(missing) > 3 else ''}; unpack the images again or correct the list"
        )


def check_classes(entry: Entry, split: str, classes: Sequence[str], labels: Sequence[int], source: Path) -> None:
    """See that a training split has an image of each class.

    Raises:
        ValueError: naming classes without one.
    """
    seen = set(labels)
    empty = [name for k, name in enumerate(classes) if k not in seen]
    if split == "train" and empty:
        first = ", ".join(empty[:3]) + (", …" if len(empty) > 3 else "")
        raise ValueError(
            f"{entry.name}: {len(empty)} of {len(classes)} classes have no training image ({first}), as {source} says: add "
            "images, or take the classes out"
        )
