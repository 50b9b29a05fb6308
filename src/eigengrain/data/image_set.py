"""Images with labels: the type of every opened data set."""

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from eigengrain.data.decode import decode
from eigengrain.data.sampler import seeded
from eigengrain.errors import ArgumentError, BatchError
from eigengrain.text import few

Box = tuple[float, float, float, float]


class ImageSet(Dataset[tuple[Any, int]]):
    """Images of one split with their labels; the augmentation of a sample depends on (seed, epoch, index) alone.

    Drawn images have no ``paths``: such a class overrides :meth:`image` and :meth:`subset`.

    Args:
        name, split: names of the data set and of the split, such as ``train`` or ``test``.
        classes: names of the classes; label k means ``classes[k]``.
        labels: one label per sample.
        paths: one file per sample; None for drawn images.
        transform: function from an image to a tensor, which may draw from torch, ``random`` and NumPy. None returns images.
        seed: seed of the augmentation.
        boxes: one box (left, top, right, bottom) per sample, in pixels around the object, or None.

    Raises:
        ArgumentError: if labels, paths and boxes differ in number, or a label has no class.

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
        for argument, values in (("paths", paths), ("boxes", boxes)):
            if values is not None and len(values) != len(labels):
                raise ArgumentError(argument, f"must have one entry per sample of {name}, {len(labels)}", len(values))
        wrong = next((i for i, label in enumerate(labels) if not 0 <= label < len(classes)), None)
        if wrong is not None:
            sample = f"sample {wrong}" if paths is None else f"sample {wrong} ({paths[wrong]})"
            problem = f"must be between 0 and {len(classes) - 1}, as {name} has {len(classes)} classes; {sample}"
            raise ArgumentError("labels", problem, labels[wrong])
        self.name, self.split, self.classes, self.labels = name, split, list(classes), list(labels)
        self.transform, self.seed, self.epoch = transform, seed, 0
        #: lines for the user about how the images were found, and numbers of groups of images that look the same, which
        #: :func:`split_validation` does not divide; None if the split was not drawn
        self.notes: list[str] = []
        self.groups: NDArray[np.int64] | None = None
        # one block of bytes instead of a million objects: workers share it, and would copy objects bit by bit
        self._files: NDArray[np.bytes_] | None = None if paths is None else np.array([os.fsencode(p) for p in paths], "S")
        self._boxes: NDArray[np.float64] | None = None if boxes is None else np.asarray(boxes, np.float64).reshape(-1, 4)

    @property
    def paths(self) -> list[Path] | None:
        """Files of the samples, None for drawn images. Each access makes a new list; :meth:`path` returns one file."""
        return None if self._files is None else [Path(os.fsdecode(file)) for file in self._files]

    def path(self, index: int) -> Path | None:
        """File of one sample; None for a drawn image."""
        return None if self._files is None else Path(os.fsdecode(self._files[index]))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the augmentation depends."""
        self.epoch = epoch

    def image(self, index: int) -> Image.Image:
        """The image of a sample: RGB, turned upright by its EXIF orientation; raises ImageError if it cannot be read."""
        if self._files is None:
            raise NotImplementedError(f"{type(self).__name__} has no files and must override image()")
        return decode(os.fsdecode(self._files[index]))

    def boxes(self, index: int) -> Box | None:
        """(left, top, right, bottom) in pixels around the object; None if the data set has no boxes."""
        if self._boxes is None:
            return None
        left, top, right, bottom = self._boxes[index].tolist()
        return left, top, right, bottom

    def masks(self, index: int) -> Tensor | None:
        """Boolean mask (H, W) of the object; None if the data set has no masks."""
        return None

    def parts(self, index: int) -> NDArray[np.bool_] | None:
        """Boolean mask (H, W) of the parts that distinguish the classes; None if the data set has no such masks."""
        return None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} ({self.split}) has {len(self)} samples, got index {index}")
        return self.sample(index % len(self))

    def sample(self, number: int) -> tuple[Any, int]:
        """The sample ``number`` modulo the length; each further round has another augmentation."""
        index = number % len(self)
        image = self.image(index)
        if self.transform is None:
            return image, self.labels[index]
        with seeded(self.seed, self.epoch, number):
            return self.transform(image), self.labels[index]

    def subset(self, indices: Sequence[int]) -> Self:
        """The samples with these indices, in this order, as a new data set with the same classes."""
        wrong = next((i for i in indices if not 0 <= i < len(self)), None)
        if wrong is not None:
            raise ArgumentError("indices", f"must be between 0 and {len(self) - 1} for {self.name} ({self.split})", wrong)
        chosen = np.asarray(indices, np.int64)
        part = copy.copy(self)
        part.classes, part.labels = list(self.classes), [self.labels[i] for i in indices]
        part._files = None if self._files is None else self._files[chosen]
        part._boxes = None if self._boxes is None else self._boxes[chosen]
        part.groups = None if self.groups is None else self.groups[chosen]
        return part

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same samples with the labels of another list of classes, found by name.

        Raises:
            ArgumentError: if a sample has a class that is not in the list.

        Example:
            >>> larks = ImageSet("birds", "test", ["lark"], [0, 0], ["a.jpg", "b.jpg"])
            >>> larks.with_classes(["wren", "lark"]).labels
            [1, 1]
        """
        place = {name: k for k, name in reversed([*enumerate(classes)])}
        unknown = sorted({self.classes[label] for label in self.labels} - place.keys())
        if unknown:
            problem = f"must be a data set with classes of the model; unknown: {few(unknown, 3)}"
            raise ArgumentError("name", problem, self.name)
        other = copy.copy(self)
        other.classes, other.labels = list(classes), [place[self.classes[label]] for label in self.labels]
        return other

    def class_counts(self) -> list[int]:
        """Number of samples of each class."""
        return np.bincount(self.labels, minlength=len(self.classes)).tolist()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.split!r}, samples={len(self)}, classes={len(self.classes)})"


def split_validation(dataset: ImageSet, fraction: float, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    r"""Split a training set into training and validation samples: the same fraction of each class, chosen by the seed.

    Of class c with n_c samples, :math:`\lfloor f n_c \rfloor` or one more are taken, so that their sum is
    :math:`\mathrm{round}(f \sum_c n_c)` if possible; each class keeps at least one sample for training.

    Args:
        fraction: f, between 0 and 1, exclusive.

    Returns:
        the training samples and the validation samples, each in their original order.

    Raises:
        ArgumentError: for a fraction out of range, or one that leaves no sample for validation.

    Example:
        >>> birds = ImageSet("birds", "train", ["wren", "lark"], [0, 1] * 10, ["x.jpg"] * 20)
        >>> train, validation = split_validation(birds, 0.1)
        >>> train.class_counts(), validation.class_counts()
        ([9, 9], [1, 1])
    """
    if not 0 < fraction < 1:
        raise ArgumentError("fraction", "must be greater than 0 and less than 1", fraction)
    if seed < 0:
        raise ArgumentError("seed", "must be at least 0", seed)
    counts = np.array(dataset.class_counts())
    exact = fraction * counts
    quota = np.minimum(exact.astype(int), np.maximum(counts - 1, 0))
    missing = round(fraction * len(dataset)) - quota.sum()
    order = np.argsort(quota - exact, kind="stable")
    quota[order[quota[order] < counts[order] - 1][: max(missing, 0)]] += 1
    if quota.sum() == 0:
        problem = f"leaves none of {len(dataset)} samples in {len(counts)} classes for validation"
        raise ArgumentError("fraction", problem, fraction, "use a larger one")
    held = hold_out(dataset.labels, quota.tolist(), seed, dataset.groups)
    train, validation = (dataset.subset(np.flatnonzero(which).tolist()) for which in (~held, held))
    validation.split = "validation"
    return train, validation


def hold_out(
    labels: Sequence[int], quotas: Sequence[int], seed: int, groups: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Choose samples of each class by a seed, ``quotas[k]`` of class k; the samples of a group are chosen together.

    A group that exceeds what is left of the quota is passed over, unless the class would get none. A group with several
    classes is not chosen.

    Example:
        >>> hold_out([0, 0, 0, 0, 1, 1], [2, 1], seed=0, groups=np.array([0, 1, 1, 3, 4, 5])).tolist()
        [False, True, True, False, False, True]
    """
    targets, generator = np.asarray(labels), np.random.default_rng(seed)
    groups = np.arange(len(targets)) if groups is None else groups
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(index)
    held = np.zeros(len(targets), bool)
    for k, quota in enumerate(quotas):
        order = dict.fromkeys(groups[generator.permutation(np.flatnonzero(targets == k))].tolist())
        candidates = [members[group] for group in order if (targets[members[group]] == k).all()]
        left = quota
        for each in candidates:
            if len(each) <= left:
                held[each] = True
                left -= len(each)
        if 0 < left == quota and len(order) > 1 and candidates:
            held[min(candidates, key=len)] = True
    return held


def stack(samples: Sequence[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
    """Stack samples to (B, C, H, W) images and (B,) labels; raises BatchError if they are not tensors of one size."""
    images = [image for image, _ in samples]
    if not all(isinstance(image, Tensor) for image in images):
        raise BatchError(f"a batch needs tensors, got {type(images[0]).__name__}: set the transform of the data set")
    check_sizes(images)
    return default_collate(images), torch.tensor([label for _, label in samples])


def check_sizes(images: Sequence[Tensor]) -> None:
    """Raise a BatchError if images differ in size."""
    sizes = sorted({tuple(image.shape) for image in images})
    if len(sizes) > 1:
        problem = f"the images of a batch differ in size, {sizes[0]} and {sizes[-1]}: use a transform that crops"
        raise BatchError(problem, sizes)
