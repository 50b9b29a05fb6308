"""What is kept on disk between runs: drawn birds, timings of solvers, weights that other libraries have downloaded."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from eigengrain.data.plumage import cache_folder
from eigengrain.functional import autotune
from eigengrain.text import counted


@dataclass(frozen=True)
class Cache:
    """A file or folder of a cache.

    Args:
        what: it holds.
        path: where it is, or will be.
        files: in it.
        bytes: of them together.
    """

    what: str
    path: str
    files: int
    bytes: int

    def __str__(self) -> str:
        """
        Example:
            >>> print(Cache("solver timings", "solvers.json", 1, 2048), Cache("drawn birds", "plumage", 0, 0), sep="; ")
            1 file, 2.0 KiB; empty
        """
        if not self.files:
            return "empty"
        amount, unit = float(self.bytes), "B"
        for larger in ("KiB", "MiB", "GiB"):
            if amount < 1024:
                break
            amount, unit = amount / 1024, larger
        return f"{counted(self.files, 'file')}, {amount:.1f} {unit}"


def caches() -> list[Cache]:
    """Ours, and those in which pretrained weights are."""
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    places = {
        "drawn birds": cache_folder() / "plumage",
        "solver timings": autotune.cache_file(),
        "weights of timm": Path(hub).expanduser(),
        "weights of torchvision": Path(torch.hub.get_dir()) / "checkpoints",
    }
    return [_measured(what, path) for what, path in places.items()]


# os.path, here and below: for a place that may not be looked into it answers no, where pathlib raises an error


def _measured(what: str, path: Path) -> Cache:
    inside = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    files = [file for file in inside or [str(path)] if os.path.isfile(file) and not os.path.islink(file)]
    return Cache(what, str(path), len(files), sum(map(os.path.getsize, files)))


def is_writable(folder: Path) -> bool:
    """Whether files can be written in a folder, or in the nearest one above it that there is."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
