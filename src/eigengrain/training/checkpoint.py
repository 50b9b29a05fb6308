"""Checkpoints: written whole or not at all, read without running code."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"
#: names of files that are being written, with the number of the process
_HALF = re.compile(r"\..+\.\d+\.tmp")


class CheckpointError(ValueError):
    """A checkpoint could not be written or read."""


def remove_halves(folder: Path) -> None:
    """Delete what processes left in a folder that were killed while they wrote a file of :func:`write_atomically`."""
    for half in folder.glob(".*.tmp"):
        if half.is_file() and _HALF.fullmatch(half.name):  # others may have such files too
            half.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that ``path`` is the old content or the new one, whatever happens, power cuts included.

    Raises:
        CheckpointError: if it could not be written; what was there before is left as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # as _HALF has it
    try:
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
        kept = "the one before it is unharmed" if path.exists() else "nothing was there before"
        said = f"cannot write {path} ({_reason(error)}): {kept}; free some space or choose another --out"
        raise CheckpointError(said) from error


def _reason(error: BaseException) -> str:
    """The system's own word; torch's writer puts a complaint about its position in front of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error).splitlines()[0]


def _sync_folder(folder: Path) -> None:
    """A rename lasts through a power cut only when its folder is written too."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Tensors and plain values to one file.

    Raises:
        CheckpointError: if it could not be written.
    """
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What :func:`write_checkpoint` wrote, on the CPU.

    Raises:
        CheckpointError: if the file is missing, cut short, or not one of ours.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in as many ways as it has bytes
        other = path.with_name(BEST)
        remedy = f"copy {other} over it to go on from there, or " if path.name == LAST and other.exists() else ""
        raise CheckpointError(
            f"{path} is damaged or only a part of a checkpoint ({type(error).__name__}): {remedy}delete it to start anew"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of eigengrain (format {FORMAT})")
    return state


def keep_copy(source: Path, target: Path) -> None:
    """The same content under another name; not a link, so that damage to one file is not damage to both.

    Raises:
        CheckpointError: if it could not be written.
    """

    def copy(file: BinaryIO) -> None:
        with source.open("rb") as content:
            shutil.copyfileobj(content, file, 1 << 20)

    write_atomically(target, copy)
