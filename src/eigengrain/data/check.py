"""Images that would spoil a training: unreadable, cut short, or there more than once."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import ImageFile
from torch.utils.data import Dataset

from eigengrain.data.image_set import ImageSet
from eigengrain.data.workers import Workers
from eigengrain.progress import tracked

#: images that a worker looks at before it reports
_TOGETHER = 8


@dataclass(frozen=True)
class Problem:
    """What is wrong with one image, or with a folder of images.

    Args:
        split: that it belongs to.
        index: its number in the split; None for a folder.
        path: its file.
        kind: unreadable, truncated (which is unreadable too), duplicate, or empty for a folder without images.
        reason: in a few words.
    """

    split: str
    index: int | None
    path: str
    kind: Literal["unreadable", "truncated", "duplicate", "empty"]
    reason: str


def find_unreadable(dataset: ImageSet, workers: int = 0, progress: bool = True) -> list[Problem]:
    """Images of a data set that cannot be decoded to the last pixel, with the reason; to be asked before a training.

    Args:
        dataset: whose images are opened, each once; its transform is not used.
        workers: processes that decode.
        progress: whether to show a bar on a terminal.

    Example:
        >>> birds = ImageSet("birds", "train", ["wren"], [0], ["no/such.jpg"])
        >>> find_unreadable(birds)
        [Problem(split='train', index=0, path='no/such.jpg', kind='unreadable', reason='there is no such file')]
    """
    return find_problems([dataset], workers, progress, duplicates=False)


def find_problems(
    datasets: Sequence[ImageSet], workers: int = 0, progress: bool = True, duplicates: bool = True
) -> list[Problem]:
    """Unreadable images, and images with the same pixels as one before, within a split or across the splits.

    Args:
        datasets: the splits of a data set.
        workers: processes that decode.
        progress: whether to show a bar on a terminal.
        duplicates: whether to look for equal images.
    """
    problems: list[Problem] = []
    first_with: dict[bytes, tuple[ImageSet, int]] = {}
    for dataset in datasets:
        looked_at = Workers(
            _Looked(dataset, duplicates), list, workers=workers, batch_size=_TOGETHER, generator=torch.Generator()
        )
        title = f"checking {dataset.name} ({dataset.split})"
        for batch in tracked(looked_at, len(dataset), title, step=_TOGETHER, show=progress):
            for index, reason, digest in batch:
                path = str(dataset.path(index) or f"image {index}")
                if reason:
                    cut = "truncated" in reason.lower()
                    problems.append(Problem(dataset.split, index, path, "truncated" if cut else "unreadable", reason))
                elif duplicates:
                    before, number = first_with.setdefault(digest, (dataset, index))
                    if (before, number) != (dataset, index):
                        said = _same(dataset, index, before, number)
                        problems.append(Problem(dataset.split, index, path, "duplicate", said))
    return problems


def _same(dataset: ImageSet, index: int, before: ImageSet, number: int) -> str:
    said = f"the same pixels as {before.path(number) or f'image {number}'}"
    if before.split != dataset.split:
        said += f" of the split {before.split}"
    ours, theirs = dataset.classes[dataset.labels[index]], before.classes[before.labels[number]]
    return said if ours == theirs else f"{said}, but of another class: {ours} here, {theirs} there"


class _Looked(Dataset[tuple[int, str, bytes]]):
    """(number, what is wrong, digest of the pixels) of each image."""

    def __init__(self, dataset: ImageSet, digests: bool):
        self.dataset, self.digests = dataset, digests

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, str, bytes]:
        # where some library has switched it on, a file that is cut short would be filled with grey and pass
        tolerant, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        try:
            image = self.dataset.image(index)
        except ValueError as error:
            return index, str(error).removeprefix(f"{self.dataset.path(index)}: "), b""
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = tolerant
        if not self.digests:
            return index, "", b""
        # the size belongs to the image: a row of pixels may be a column elsewhere
        return index, "", hashlib.blake2b(f"{image.size}".encode() + image.tobytes(), digest_size=16).digest()
