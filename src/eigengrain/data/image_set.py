"""Images with labels: what every data set is once it is opened."""

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from eigengrain.data.decode import ImageError, decode
from eigengrain.data.randomness import seeded

Box = tuple[float, float, float, float]


class ImageSet(Dataset[tuple[Any, int]]):
    """Images of one split with their labels, each augmented by choices that depend on (seed, epoch, index) alone.

    A data set without files (drawn images) passes ``paths=None`` and overrides :meth:`image` and :meth:`subset`.

    Args:
        name: of the data set.
        split: ``train``, ``test`` or what it is a part of.
        classes: their names; label k means ``classes[k]``.
        labels: one a sample.
        paths: files of the samples, None for images that are drawn.
        transform: from an image to a tensor; its random choices come from torch, ``random`` or NumPy. None gives images.
        seed: of the augmentation.
        boxes: (left, top, right, bottom) in pixels around the object, one a sample, or None.

    Raises:
        ValueError: if labels, paths and boxes differ in number, or a label has no class.

    Example:
        >>> birds = ImageSet("birds", "train", ["wren", "lark"], [0, 1, 1], [Path("a.jpg"), Path("b.jpg"), Path("c.jpg")])
        >>> len(birds), birds.subset([2]).labels, birds.subset([2]).paths
        (3, [1], [...Path('c.jpg')])
    """

    def __init__(
        self,
        name: str,
        split: str,
        classes: Sequence[str],
        labels: Sequence[int],
        paths: Sequence[str | Path] | None = None,
        transform: Callable[[Image.Image], Tensor] | None = None,
        seed: int = 0,
        boxes: Sequence[Sequence[float]] | None = None,
    ):
        for what, given in (("paths", paths), ("boxes", boxes)):
            if given is not None and len(given) != len(labels):
                raise ValueError(f"{name}: {len(given)} {what} for {len(labels)} labels: there must be one for each")
        wrong = next((i for i, label in enumerate(labels) if not 0 <= label < len(classes)), None)
        if wrong is not None:
            where = f" ({paths[wrong]})" if paths is not None else ""
            raise ValueError(
                f"{name}: sample {wrong}{where} has the label {labels[wrong]}, and there are {len(classes)} classes: "
                f"labels go from 0 to {len(classes) - 1}"
            )
        self.name, self.split, self.classes, self.labels = name, split, list(classes), list(labels)
        self.transform, self.seed, self.epoch = transform, seed, 0
        # one block of bytes instead of a million objects: worker processes share it instead of copying it bit by bit
        self._files: NDArray[np.bytes_] | None = None if paths is None else np.array([os.fsencode(p) for p in paths], "S")
        self._boxes: NDArray[np.float64] | None = None if boxes is None else np.asarray(boxes, np.float64).reshape(-1, 4)

    @property
    def paths(self) -> list[Path] | None:
        """Files of the samples; None for drawn images. The list is made anew each time: :meth:`path` gives one."""
        return None if self._files is None else [Path(os.fsdecode(file)) for file in self._files]

    def path(self, index: int) -> Path | None:
        """File of one sample."""
        return None if self._files is None else Path(os.fsdecode(self._files[index]))

    def set_epoch(self, epoch: int) -> None:
        """Another epoch, other augmentation."""
        self.epoch = epoch

    def image(self, index: int) -> Image.Image:
        """The image of a sample: RGB, upright as its EXIF says.

        Raises:
            ImageError: with the path and the reason, if it cannot be read.
        """
        if self._files is None:
            raise NotImplementedError(f"{type(self).__name__} has no files: it must override image()")
        return decode(os.fsdecode(self._files[index]))

    def boxes(self, index: int) -> Box | None:
        """(left, top, right, bottom) in pixels around the object; None where the data set has no boxes."""
        if self._boxes is None:
            return None
        left, top, right, bottom = self._boxes[index].tolist()
        return left, top, right, bottom

    def masks(self, index: int) -> Tensor | None:
        """Which pixels are the object; None where the data set does not say."""
        return None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} ({self.split}) has {len(self)} samples, got index {index}")
        index %= len(self)
        image = self.image(index)
        if self.transform is None:
            return image, self.labels[index]
        with seeded(self.seed, self.epoch, index):
            return self.transform(image), self.labels[index]

    def subset(self, indices: Sequence[int]) -> "ImageSet":
        """The samples with these numbers, in this order, as a data set of their own with the same classes.

        Raises:
            ValueError: for a number that is out of range.
        """
        wrong = [i for i in indices if not 0 <= i < len(self)]
        if wrong:
            raise ValueError(f"{self.name} ({self.split}) has {len(self)} samples, so there is no number {wrong[0]}")
        chosen = np.asarray(indices, np.int64)
        part = copy.copy(self)
        part.classes, part.labels = list(self.classes), [self.labels[i] for i in indices]
        part._files = None if self._files is None else self._files[chosen]
        part._boxes = None if self._boxes is None else self._boxes[chosen]
        return part

    def class_counts(self) -> list[int]:
        """How many samples each class has."""
        counts = Counter(self.labels)
        return [counts[k] for k in range(len(self.classes))]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.split!r}, samples={len(self)}, classes={len(self.classes)})"


def split_validation(dataset: ImageSet, fraction: float, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    r"""Part of a training set for validation: the same fraction of each class, chosen by the seed.

    Of class c with n_c samples, :math:`\lfloor f n_c \rfloor` or one more are taken, so that their sum is
    :math:`\mathrm{round}(f \sum_c n_c)` where that is possible; each class keeps a sample for training.

    Args:
        dataset: to split; it is not changed.
        fraction: f, above 0 and below 1.
        seed: of the choice.

    Returns:
        the samples for training and those for validation, both in their old order.

    Raises:
        ValueError: for a fraction out of range, or one that leaves no sample for validation.

    Example:
        >>> birds = ImageSet("birds", "train", ["wren", "lark"], [0, 1] * 10, ["x.jpg"] * 20)
        >>> train, validation = split_validation(birds, 0.1)
        >>> train.class_counts(), validation.class_counts()
        ([9, 9], [1, 1])
    """
    if not 0 < fraction < 1:
        raise ValueError(f"the fraction for validation must be above 0 and below 1, got {fraction}")
    if seed < 0:
        raise ValueError(f"the seed must not be negative, got {seed}")
    counts = dataset.class_counts()
    exact = [fraction * n for n in counts]
    quota = [min(int(e), max(n - 1, 0)) for e, n in zip(exact, counts, strict=True)]
    missing = round(fraction * len(dataset)) - sum(quota)
    for k in sorted(range(len(counts)), key=lambda k: quota[k] - exact[k]):
        if missing > 0 and quota[k] < counts[k] - 1:
            quota[k] += 1
            missing -= 1
    if sum(quota) == 0:
        raise ValueError(
            f"{fraction} of {len(dataset)} samples in {len(counts)} classes leaves none for validation: take a larger one"
        )
    labels = np.asarray(dataset.labels)
    generator = np.random.default_rng(seed)
    held = np.zeros(len(dataset), bool)
    for k, take in enumerate(quota):
        held[generator.permutation(np.flatnonzero(labels == k))[:take]] = True
    train, validation = (dataset.subset(np.flatnonzero(which).tolist()) for which in (~held, held))
    validation.split = "validation"
    return train, validation


def stack(samples: Sequence[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
    """Samples to a batch: (B, C, H, W) images and (B,) labels.

    Raises:
        ImageError: if they are no tensors, or differ in size.
    """
    images = [image for image, _ in samples]
    if not all(isinstance(image, Tensor) for image in images):
        raise ImageError(f"a batch needs tensors, got {type(images[0]).__name__}: set the data set's transform")
    sizes = sorted({tuple(image.shape) for image in images})
    if len(sizes) > 1:
        raise ImageError(f"the images of a batch differ in size, {sizes[0]} and {sizes[-1]}: use a transform that crops")
    return default_collate(images), torch.tensor([label for _, label in samples])
