"""Files for results."""

import csv
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from eigengrain.errors import FileError


def writable(path: str | Path) -> Path:
    """Create the folder of a file, and raise a FileError if the file cannot be written; call it before long work."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise FileError(path, "it is a folder", "write")
        if path.exists() and not os.access(path, os.W_OK):
            raise FileError(path, "permission denied", "write")
        if not path.exists():  # os.access is not enough: it allows everything to an administrator
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise FileError(path, error.strerror or "its folder cannot be written", "write") from error
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, object]], header: Sequence[str] = ()) -> None:
    """Write rows with the same keys as CSV; the keys of the first row are the header, unless one is given."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=header or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
