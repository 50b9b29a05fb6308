"""Small text files that a user gives, and files for results."""

import csv
import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eigengrain.errors import FileError

#: default limit of a text file in bytes: a list of a million images, and no more than memory can hold when it is parsed
MAX_TEXT = 1 << 26


def check_file(path: str | Path) -> Path:
    """Return the path if it is a regular file. A device or pipe is not opened, because reading it might never end.

    Raises:
        FileError: if it does not exist, is a folder, or is not a regular file.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        missing = isinstance(error, FileNotFoundError)
        raise FileError(path, "it does not exist" if missing else getattr(error, "strerror", None) or str(error)) from error
    if not stat.S_ISREG(mode):
        raise FileError(path, "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file")
    return path


def read_text(path: str | Path, limit: int = MAX_TEXT) -> str:
    """Read a UTF-8 file, with or without a byte order mark.

    Args:
        path: a regular file, see :func:`check_file`.
        limit: largest size in bytes.

    Raises:
        FileError: if it cannot be read, is larger, or is not UTF-8 text.
    """
    try:
        with check_file(path).open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise FileError(path, error.strerror or str(error)) from error
    if len(content) > limit:
        raise FileError(path, f"it is larger than {limit:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(path, f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: str | Path, limit: int = MAX_TEXT) -> Any:
    """Read a JSON file, as :func:`read_text`.

    Raises:
        FileError: if it cannot be read, is larger than the limit, or is not JSON.
    """
    try:
        return json.loads(read_text(path, limit))
    except RecursionError as error:
        raise FileError(path, "its values are nested too deeply") from error
    except FileError:
        raise
    except ValueError as error:
        raise FileError(path, f"it is not valid JSON ({error})") from error


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
    except (FileExistsError, NotADirectoryError) as error:
        file = next(each for each in path.parents if os.path.lexists(each))
        raise FileError(path, f"{file} is not a folder", "write") from error
    except OSError as error:
        raise FileError(path, error.strerror or "its folder cannot be written", "write") from error
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, object]], header: Sequence[str] = ()) -> None:
    """Write rows with the same keys as CSV; the keys of the first row are the header, unless one is given."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=header or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
