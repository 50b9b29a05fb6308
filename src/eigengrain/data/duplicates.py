"""Find images that look the same: copies of one photograph, also in another format, quality or size."""

import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from eigengrain.data.decode import ImageError, open_image
from eigengrain.data.workers import Workers
from eigengrain.progress import track

#: an image is compared by the mean colours of a grid of this many cells per side
CELLS = 8
#: levels (of 255) by which the colours of a cell and the mean of an image may differ, and the ratio of the aspects. Other
#: photographs of CUB differ by 11 or more, copies in JPEG quality 30 or half the size by at most 5
CELL_LEVELS, MEAN_LEVELS, ASPECT = 8, 2.0, 1.02
#: pixels from which the grid is computed at least, and images that a worker reads before it reports
_PIXELS, _CHUNK = 64 * 64, 16


def fingerprint(image: Image.Image) -> NDArray[np.float32]:
    """Mean colours of a grid of cells, and 255 · log₂ of the aspect; similar for copies of one photograph."""
    cells = np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX), np.float32)
    return np.append(cells.reshape(-1), np.float32(255 * np.log2(image.width / image.height)))


def group_alike(fingerprints: NDArray[np.float32]) -> NDArray[np.int64]:
    """A group number for each fingerprint, the index of the first one that looks the same; NaN is a group of its own.

    Example:
        >>> red, blue = (fingerprint(Image.new("RGB", (20, 20), name)) for name in ("red", "blue"))
        >>> group_alike(np.stack([red, blue, red + 1])).tolist()
        [0, 1, 0]
    """
    unique, member = np.unique(fingerprints, axis=0, return_inverse=True)
    means = unique[:, :-1].mean(1)
    order = np.argsort(means)
    limits = np.full(unique.shape[1], CELL_LEVELS, np.float32)
    limits[-1] = 255 * np.log2(ASPECT)
    parent = np.arange(len(unique))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = item = parent[parent[item]]
        return item

    # in the order of their means, images that look the same are close
    for shift in range(1, len(order)):
        first, second = order[:-shift], order[shift:]
        near = means[second] - means[first] <= MEAN_LEVELS
        if not near.any():
            break
        first, second = first[near], second[near]
        for columns in (slice(None, None, 16), slice(None)):  # a few cells distinguish most images
            alike = (np.abs(unique[first, columns] - unique[second, columns]) <= limits[columns]).all(1)
            first, second = first[alike], second[alike]
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            parent[find(one)] = find(other)
    groups = np.array([find(item) for item in member.reshape(-1).tolist()])
    _, index, place = np.unique(groups, return_index=True, return_inverse=True)
    return index[place]


def find_groups(paths: Sequence[str], workers: int = 4) -> NDArray[np.int64]:
    """A group number for each image file, the same for images that look the same; unreadable ones are alone."""
    files = [os.stat(path) if os.path.exists(path) else None for path in paths]
    state = tuple((path, file and (file.st_size, file.st_mtime_ns)) for path, file in zip(paths, files, strict=True))
    return _find_groups(state, workers)


@lru_cache(maxsize=2)  # the splits of a folder are opened one after the other
def _find_groups(state: tuple[tuple[str, tuple[int, int] | None], ...], workers: int) -> NDArray[np.int64]:
    looks = _Looks([path for path, _ in state])
    workers = workers if len(state) > 8 * _CHUNK else 0
    batches = Workers(looks, np.stack, workers=workers, batch_size=_CHUNK, generator=torch.Generator())
    return group_alike(np.concatenate([*track(batches, len(state), "comparing images", step=_CHUNK)]))


class _Looks(Dataset[NDArray[np.float32]]):
    def __init__(self, paths: Sequence[str]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        try:
            return fingerprint(open_image(self.paths[index], _PIXELS))
        except ImageError:
            return np.full(3 * CELLS**2 + 1, np.nan, np.float32)
