"""Drawn birds for demonstrations and tests: a fine-grained data set without files, with masks of the distinctive parts."""

import hashlib
import inspect
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from eigengrain.data.image_set import Box, ImageSet
from eigengrain.data.plumage import render, scene
from eigengrain.data.plumage.scene import SPECIES, Marks, Nuisance
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.progress import track

__all__ = ["SPECIES", "Marks", "Nuisance", "Plumage", "cache_folder", "open_plumage"]

_PER_CLASS = {"train": 200, "test": 100}
_STREAMS = {"train": 0, "test": 1}
# regions of the image; the background is 0
_BIRD, _PART = 1, 2
_Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images (n, H, W, 3) and regions (n, H, W)

_log = logging.getLogger(__name__)


def draw(seed: int, split: str, index: int, species: int, size: int, nuisance: Nuisance) -> render.Drawing:
    """Draw one image: the scene depends on (seed, split, index) alone, the marks on the species alone."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, _STREAMS[split], index)))
    return render.render(scene.draw_scene(np.random.Generator(bits), nuisance), SPECIES[species], size)


class Plumage(ImageSet):
    """Drawn birds whose species differ only in small parts; made by :func:`open_plumage`."""

    def __init__(
        self,
        split: str,
        classes: int,
        images: NDArray[np.uint8],
        regions: NDArray[np.uint8],
        transform: Callable[[Image.Image], Tensor] | None,
        seed: int,
    ):
        labels = [index % classes for index in range(len(images))]
        names = [marks.name for marks in SPECIES[:classes]]
        super().__init__("plumage", split, names, labels, transform=transform, seed=seed)
        self._images, self._regions = images, regions
        # a subset shares the pixels and has its own rows
        self._rows = np.arange(len(images))

    def image(self, index: int) -> Image.Image:
        """The image of a sample, RGB."""
        return Image.fromarray(self._images[self._rows[index]])

    def mask(self, index: int) -> render.Mask:
        """Mask (H, W) of the pixels that the bird touches."""
        return self._regions[self._rows[index]] >= _BIRD

    def parts(self, index: int) -> render.Mask:
        """Mask (H, W) of the pixels that distinguish the species: no other pixel depends on the species."""
        return self._regions[self._rows[index]] == _PART

    def masks(self, index: int) -> Tensor:
        """:meth:`mask` as a tensor."""
        return torch.from_numpy(self.mask(index))

    def boxes(self, index: int) -> Box:
        """(left, top, right, bottom) in pixels around the bird."""
        rows, columns = np.nonzero(self.mask(index))
        return float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)

    def subset(self, indices: Sequence[int]) -> Self:
        """The samples with these indices, in this order, without a copy of their pixels."""
        part = super().subset(indices)
        part._rows = self._rows[np.asarray(indices, np.int64)]
        return part


def open_plumage(
    split: str = "train",
    classes: int = 10,
    per_class: int | None = None,
    size: int = 96,
    seed: int = 0,
    cache: bool = True,
    nuisance: Nuisance | None = None,
    transform: Callable[[Image.Image], Tensor] | None = None,
) -> Plumage:
    """A fine-grained data set without files: drawn birds that differ in small parts.

    The species share silhouette and palette. They differ in the bars on the wing, a ring around the eye, a stripe on the
    crown, the colour of the bill and the pattern of the breast, and any two species differ in at least two of these. Pose,
    build, plumage, light and background are random for each image. Sample k has species k modulo ``classes``, and its scene
    depends on (seed, split, k) alone, so a larger set begins with the smaller one.

    Bars, ring and crown are easy to see and divide the 10 default species into 6 groups; the rest is in the faint marks,
    breast and bill. Their contrast was chosen by the accuracy of average pooling (the head ``gap``) alone.

    Args:
        split: ``train`` or ``test``; their scenes have nothing in common.
        classes: number of species, 2 to 24.
        per_class: images of each species; default 200 for training and 100 for test.
        size: side of the images in pixels, at least 32.
        seed: seed of the drawings, and of the augmentation in ``transform``.
        cache: whether to store the drawings on disk, see :func:`cache_folder`.
        nuisance: how much the scenes vary; results are reported for the default.
        transform: see :class:`eigengrain.data.ImageSet`.

    Raises:
        UnknownName: for an unknown split.
        ArgumentError: for a number out of range.

    Example:
        >>> birds = open_plumage("test", classes=4, per_class=2, size=64, cache=False)
        >>> len(birds), birds.labels[:5], birds.classes[0]
        (8, [0, 1, 2, 3, 0], 'one-barred ringed dark-billed plain-breasted')
        >>> birds.image(3).size, bool((birds.parts(3) <= birds.mask(3)).all())
        ((64, 64), True)
    """
    if split not in _STREAMS:
        raise UnknownName("split", split, _STREAMS)
    if not 2 <= classes <= len(SPECIES):
        raise ArgumentError("classes", f"must be between 2 and {len(SPECIES)}", classes)
    per_class = _PER_CLASS[split] if per_class is None else per_class
    # in smaller images the parts vanish
    for name, value, least in (("per_class", per_class, 1), ("size", size, 32), ("seed", seed, 0)):
        if value < least:
            raise ArgumentError(name, f"must be at least {least}", value)
    nuisance, count = nuisance or Nuisance(), classes * per_class
    file = _cache_file(seed, split, classes, count, size, nuisance) if cache else None
    arrays = _load(file, count, size) if file is not None else None
    if arrays is None:
        arrays = _draw_all(seed, split, classes, count, size, nuisance)
        if file is not None:
            _save(file, arrays)
    return Plumage(split, classes, *arrays, transform=transform, seed=seed)


def _draw_all(seed: int, split: str, classes: int, count: int, size: int, nuisance: Nuisance) -> _Arrays:
    images = np.empty((count, size, size, 3), np.uint8)
    regions = np.empty((count, size, size), np.uint8)
    for index in track(range(count), count, f"drawing birds ({split})"):
        drawing = draw(seed, split, index, index % classes, size, nuisance)
        images[index] = drawing.image
        regions[index] = np.where(drawing.parts, _PART, np.where(drawing.bird, _BIRD, 0))
    return images, regions


def cache_folder() -> Path:
    """``EIGENGRAIN_CACHE``, or ``eigengrain`` in the user's cache folder (``XDG_CACHE_HOME`` or ~/.cache)."""
    folder = os.environ.get("EIGENGRAIN_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eigengrain"


def _cache_file(*settings: object) -> Path:
    """The file of a set, named by a hash of all that its pixels depend on: settings, drawing code and NumPy's version."""
    code = "".join(inspect.getsource(module) for module in (scene, render))
    key = "\n".join([code, np.__version__, *(repr(value) for value in settings)])
    return cache_folder() / "plumage" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"


def _load(file: Path, count: int, size: int) -> _Arrays | None:
    """The arrays of a file; None if it does not exist or is damaged."""
    try:
        with np.load(file, allow_pickle=False) as saved:
            images, regions = saved["images"], saved["regions"]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None
    fits = images.shape == (count, size, size, 3) and regions.shape == (count, size, size)
    return (images, regions) if fits and images.dtype == regions.dtype == np.uint8 else None


def _save(file: Path, arrays: _Arrays) -> None:
    """Write a file atomically; a folder that cannot be written to only logs a warning."""
    images, regions = arrays
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder) / file.name
            np.savez(part, images=images, regions=regions)
            os.replace(part, file)
    except OSError as error:
        _log.warning("cannot store drawn images in %s (%s): they will be drawn again next time", file.parent, error)
