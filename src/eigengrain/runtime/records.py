"""Result files: one row a measurement, written as CSV."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def writable(path: str | Path) -> Path:
    """The path with its folder made: asked before the work, so that no result is lost for a folder that cannot be.

    Raises:
        ValueError: if the file cannot be written there.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {path.parent} ({error.strerror}): choose another with --out") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write the file {path}: choose another place with --out")
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows with the same keys; the keys of the first are the header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
