"""Find images that would spoil a training: unreadable, truncated, or duplicated."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ImageFile
from torch.utils.data import Dataset

from eigengrain.data.duplicates import fingerprint, group_alike
from eigengrain.data.image_set import ImageSet
from eigengrain.data.workers import Workers
from eigengrain.errors import ImageError
from eigengrain.progress import track
from eigengrain.text import printable

#: images that a worker checks before it reports
_CHUNK = 8
#: images of which each pair is compared
MOST_COMPARED = 100_000

Kind = Literal["unreadable", "truncated", "duplicate", "empty"]


@dataclass(frozen=True)
class Problem:
    """A problem of one image, or of a folder without images, which has no index.

    ``original_split`` is the split of the earlier image that a duplicate repeats.
    """

    split: str
    index: int | None
    path: str
    kind: Kind
    reason: str
    original_split: str = field(default="", repr=False)


def find_unreadable(dataset: ImageSet, workers: int = 0, progress: bool = True) -> list[Problem]:
    """Find the images of a data set that cannot be decoded completely; its transform is not used.

    Example:
        >>> birds = ImageSet("birds", "train", ["wren"], [0], ["no/such.jpg"])
        >>> find_unreadable(birds)
        [Problem(split='train', index=0, path='no/such.jpg', kind='unreadable', reason='the file does not exist')]
    """
    return find_problems([dataset], workers, progress, duplicates=False)


def leave_out(dataset: ImageSet, problems: Sequence[Problem]) -> ImageSet:
    """The samples of a data set whose files are not among the problems."""
    paths = {problem.path for problem in problems}
    return dataset.subset([index for index in range(len(dataset)) if str(dataset.path(index)) not in paths])


def describe_imbalance(dataset: ImageSet, ratio: float = 5) -> str:
    """A line about the largest and the smallest class if one is more than ``ratio`` times the other, else empty.

    Example:
        >>> birds = ImageSet("birds", "train", ["wren", "lark"], [0] * 6 + [1], ["x.jpg"] * 7)
        >>> describe_imbalance(birds)
        "wren has 6 images and lark 1: consider data.balance 'sampler' or 'weights'"
    """
    counts = dataset.class_counts()
    most, least = max(counts, default=0), min((count for count in counts if count), default=0)
    if most <= ratio * least:
        return ""
    large, small = (printable(dataset.classes[counts.index(count)]) for count in (most, least))
    return f"{large} has {most:,} images and {small} {least:,}: consider data.balance 'sampler' or 'weights'"


def find_problems(
    datasets: Sequence[ImageSet], workers: int = 0, progress: bool = True, duplicates: bool = True
) -> list[Problem]:
    """Find unreadable images, and images that look the same as an earlier one, within a split or across splits.

    Of more than ``MOST_COMPARED`` images, only those with the same pixels are found.
    """
    problems: list[Problem] = []
    readable: list[tuple[ImageSet, int, bytes, NDArray[np.float32]]] = []
    for dataset in datasets:
        checks = _Checks(dataset, duplicates)
        results = Workers(checks, list, workers=workers, batch_size=_CHUNK, generator=torch.Generator())
        title = f"checking {dataset.name} ({dataset.split})"
        for batch in track(results, len(dataset), title, step=_CHUNK, show=progress):
            for index, problem, digest, look in batch:
                if problem is not None:
                    problems.append(problem)
                elif duplicates:
                    readable.append((dataset, index, digest, look))
    compared = duplicates and 0 < len(readable) <= MOST_COMPARED
    alike = group_alike(np.stack([look for *_, look in readable])) if compared else range(len(readable))
    first_with: dict[bytes, int] = {}
    for place, (dataset, index, digest, _) in enumerate(readable):
        same = first_with.setdefault(digest, place)
        original = same if same != place else int(alike[place])
        if original != place:
            reason = "same pixels as" if same != place else "looks the same as"
            problem = _make_problem(dataset, index, "duplicate", _compare(reason, dataset, index, *readable[original][:2]))
            problems.append(replace(problem, original_split=readable[original][0].split))
    return problems


def _make_problem(dataset: ImageSet, index: int, kind: Kind, reason: str) -> Problem:
    return Problem(dataset.split, index, str(dataset.path(index) or f"image {index}"), kind, reason)


def _compare(reason: str, dataset: ImageSet, index: int, earlier: ImageSet, original: int) -> str:
    """Describe a duplicate by the earlier image, and by the classes if they differ."""
    reason = f"{reason} {earlier.path(original) or f'image {original}'}"
    if earlier.split != dataset.split:
        reason += f" in the split {earlier.split}"
    ours, theirs = dataset.classes[dataset.labels[index]], earlier.classes[earlier.labels[original]]
    return reason if ours == theirs else f"{reason}, but of another class: {ours} here, {theirs} there"


class _Checks(Dataset[tuple[int, Problem | None, bytes, Any]]):
    """Index, problem, digest of the pixels and fingerprint of each image."""

    def __init__(self, dataset: ImageSet, digests: bool):
        self.dataset, self.digests = dataset, digests

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Problem | None, bytes, Any]:
        # if some library has switched it on, Pillow would fill a truncated file with grey
        tolerant, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        try:
            image = self.dataset.image(index)
        except ImageError as error:
            kind: Kind = "truncated" if error.truncated else "unreadable"
            return index, _make_problem(self.dataset, index, kind, error.problem), b"", None
        except ValueError as error:  # of a subclass that reads its images differently
            return index, _make_problem(self.dataset, index, "unreadable", str(error)), b"", None
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = tolerant
        if not self.digests:
            return index, None, b"", None
        # the size is part of the key: the same bytes may be rows of one image and columns of another
        key = f"{image.size}".encode() + image.tobytes()
        return index, None, hashlib.blake2b(key, digest_size=16).digest(), fingerprint(image)
