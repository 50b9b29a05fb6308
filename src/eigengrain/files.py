"""Result files: one row a measurement, written as CSV."""

import csv
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def writable(path: str | Path, option: str = "--out") -> Path:
    """The path with its folder made: asked before the work, so that no result is lost for a folder that cannot be.

    Args:
        path: of the file.
        option: by which the user has named it.

    Raises:
        ValueError: if the file cannot be written there.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the folder {path.parent} ({error.strerror}): choose another with {option}"
        ) from error
    try:
        possible = os.access(path, os.W_OK) and not path.is_dir() if path.exists() else _takes_files(path.parent)
    except OSError:
        possible = False
    if not possible:
        raise ValueError(f"cannot write the file {path}: choose another place with {option}")
    return path


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made in a folder; only making one says it, as an administrator may write anywhere in name."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows with the same keys; the keys of the first are the header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
