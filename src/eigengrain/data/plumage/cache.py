"""Drawn sets kept on disk: one .npz file a set, without pickle, named by everything that its pixels depend on."""

import hashlib
import inspect
import logging
import os
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eigengrain.data.plumage import render, scene, shapes, species

_log = logging.getLogger(__name__)

Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images (n, H, W, 3) and regions (n, H, W)


def cache_folder() -> Path:
    """``EIGENGRAIN_CACHE``, or ``eigengrain`` in the user's cache folder (``XDG_CACHE_HOME``, or ~/.cache)."""
    chosen = os.environ.get("EIGENGRAIN_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eigengrain"


def cache_file(*settings: object) -> Path:
    """Where a set with these settings is kept.

    The name holds a digest of the settings, of the code that draws and of NumPy's version, whose random numbers may change,
    so a file of another version is never taken for this one.
    """
    code = "".join(inspect.getsource(module) for module in (shapes, species, scene, render))
    key = "\n".join([code, np.__version__, *(repr(value) for value in settings)])
    return cache_folder() / "plumage" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"


def load(file: Path, count: int, size: int) -> Arrays | None:
    """The arrays of a file; None if there is none or it is damaged."""
    try:
        with np.load(file, allow_pickle=False) as saved:
            images, regions = saved["images"], saved["regions"]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None
    fits = images.shape == (count, size, size, 3) and regions.shape == (count, size, size)
    return (images, regions) if fits and images.dtype == regions.dtype == np.uint8 else None


def save(file: Path, arrays: Arrays) -> None:
    """Writes a file in one step, so that nobody reads half of it; a folder that cannot be written to is only logged."""
    images, regions = arrays
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(suffix=".part", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                np.savez(stream, images=images, regions=regions)
            os.replace(part, file)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        _log.warning("drawn images cannot be kept in %s (%s): they will be drawn again next time", file.parent, error)
