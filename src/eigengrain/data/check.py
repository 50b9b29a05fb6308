"""Find images that would spoil a training: unreadable, truncated, or duplicated."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import ImageFile
from torch.utils.data import Dataset

from eigengrain.data.image_set import ImageSet
from eigengrain.data.workers import Workers
from eigengrain.errors import ImageError
from eigengrain.progress import track

#: images that a worker checks before it reports
_CHUNK = 8

Kind = Literal["unreadable", "truncated", "duplicate", "empty"]


@dataclass(frozen=True)
class Problem:
    """A problem of one image, or of a folder without images, which has no index."""

    split: str
    index: int | None
    path: str
    kind: Kind
    reason: str


def find_unreadable(dataset: ImageSet, workers: int = 0, progress: bool = True) -> list[Problem]:
    """Find the images of a data set that cannot be decoded completely; its transform is not used.

    Example:
        >>> birds = ImageSet("birds", "train", ["wren"], [0], ["no/such.jpg"])
        >>> find_unreadable(birds)
        [Problem(split='train', index=0, path='no/such.jpg', kind='unreadable', reason='the file does not exist')]
    """
    return find_problems([dataset], workers, progress, duplicates=False)


def find_problems(
    datasets: Sequence[ImageSet], workers: int = 0, progress: bool = True, duplicates: bool = True
) -> list[Problem]:
    """Find unreadable images, and images with the same pixels as an earlier one, within a split or across splits."""
    problems: list[Problem] = []
    first_with: dict[bytes, tuple[ImageSet, int]] = {}
    for dataset in datasets:
        checks = _Checks(dataset, duplicates)
        results = Workers(checks, list, workers=workers, batch_size=_CHUNK, generator=torch.Generator())
        title = f"checking {dataset.name} ({dataset.split})"
        for batch in track(results, len(dataset), title, step=_CHUNK, show=progress):
            for index, problem, digest in batch:
                if problem is None and duplicates:
                    earlier, original = first_with.setdefault(digest, (dataset, index))
                    if (earlier, original) != (dataset, index):
                        problem = _make_problem(dataset, index, "duplicate", _compare(dataset, index, earlier, original))
                if problem is not None:
                    problems.append(problem)
    return problems


def _make_problem(dataset: ImageSet, index: int, kind: Kind, reason: str) -> Problem:
    return Problem(dataset.split, index, str(dataset.path(index) or f"image {index}"), kind, reason)


def _compare(dataset: ImageSet, index: int, earlier: ImageSet, original: int) -> str:
    """Describe a duplicate by the earlier image, and by the classes if they differ."""
    reason = f"same pixels as {earlier.path(original) or f'image {original}'}"
    if earlier.split != dataset.split:
        reason += f" in the split {earlier.split}"
    ours, theirs = dataset.classes[dataset.labels[index]], earlier.classes[earlier.labels[original]]
    return reason if ours == theirs else f"{reason}, but of another class: {ours} here, {theirs} there"


class _Checks(Dataset[tuple[int, Problem | None, bytes]]):
    """Index, problem, and digest of the pixels of each image."""

    def __init__(self, dataset: ImageSet, digests: bool):
        self.dataset, self.digests = dataset, digests

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Problem | None, bytes]:
        # if some library has switched it on, Pillow would fill a truncated file with grey
        tolerant, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        try:
            image = self.dataset.image(index)
        except ImageError as error:
            kind: Kind = "truncated" if error.truncated else "unreadable"
            return index, _make_problem(self.dataset, index, kind, error.problem), b""
        except ValueError as error:  # of a subclass that reads its images differently
            return index, _make_problem(self.dataset, index, "unreadable", str(error)), b""
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = tolerant
        # the size is part of the key: the same bytes may be rows of one image and columns of another
        key = f"{image.size}".encode() + image.tobytes() if self.digests else b""
        return index, None, hashlib.blake2b(key, digest_size=16).digest()
