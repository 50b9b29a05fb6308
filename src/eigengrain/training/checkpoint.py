"""Checkpoints: written atomically, read without running code."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from eigengrain.errors import CheckpointError, FileError
from eigengrain.models.weights import read_torch

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"
#: names of temporary files of :func:`write_atomically`, which contain the process number
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def remove_temporary_files(folder: Path) -> None:
    """Delete what processes left in a folder that were killed during :func:`write_atomically`."""
    for file in folder.glob(".*.tmp"):
        if file.is_file() and _TEMPORARY.fullmatch(file.name):  # other programs may have such files too
            file.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that ``path`` has either its old or its new content, even after a power cut.

    Raises:
        CheckpointError: if the file cannot be written; an existing file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # matches _TEMPORARY
    try:
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        if os.name == "posix":  # make the rename permanent, which requires the folder to be written too
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
        kept = "the previous file is unchanged" if path.exists() else "there was no file before"
        raise CheckpointError(path, f"{_reason(error)} ({kept}; free some space or use another folder)", "write") from error


def _reason(error: BaseException) -> str:
    """The message of the operating system, which torch's writer wraps in an error about its position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error).splitlines()[0]


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values to one file, as :func:`write_atomically`."""
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a file of :func:`write_checkpoint`; all tensors are on the CPU.

    Raises:
        CheckpointError: if the file is missing, damaged, or not a checkpoint of this version.
    """
    if not path.is_file():
        raise CheckpointError(path, "there is no such checkpoint")
    try:
        state = read_torch(path)
    except FileError as error:
        best = path.with_name(BEST)
        remedy = f"copy {best} over it to continue from there, or " if path.name == LAST and best.exists() else ""
        problem = f"the checkpoint is damaged or incomplete ({error.problem}): {remedy}delete it to start again"
        raise CheckpointError(path, problem) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(path, f"it is not a checkpoint of this version of eigengrain (format {FORMAT})")
    return state


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Raise a CheckpointError if entries of a checkpoint, which are used inside, are missing or not as written."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(path, f"it is not the checkpoint of this training ({reason})") from error


def copy_atomically(source: Path, target: Path) -> None:
    """Copy a file as :func:`write_atomically`; not a link, so that damage to one file does not damage the other."""
    with source.open("rb") as content:
        write_atomically(target, lambda file: shutil.copyfileobj(content, file, 1 << 20))
