"""Batches of a data set: the same for any number of workers and processes, and resumable in the middle of an epoch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from eigengrain.data.image_set import ImageSet, stack
from eigengrain.data.sampler import BatchSampler
from eigengrain.data.workers import Workers
from eigengrain.errors import ArgumentError


class Batches(ABC):
    """A source of (images, labels) batches: the base of :class:`Loader` and :class:`~eigengrain.data.DeviceCache`."""

    dataset: ImageSet
    sampler: BatchSampler

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self.sampler.batch_size

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the next epoch, and the number of its batches to skip; skipped images are not opened."""
        self.sampler.set_epoch(epoch, start_batch)
        self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the epoch, from the start batch on."""


class Loader(Batches):
    """Batches that are read from files or drawn, see :func:`make_loader`.

    The order of an epoch depends on (seed, epoch) alone and the augmentation of a sample on (seed, epoch, index) alone, so
    the batches are the same for any number of workers. N processes see the same global batches as one: each rank takes its
    part of every batch. In evaluation each sample is seen exactly once over all ranks; none is repeated to fill a batch.
    """

    def __init__(self, dataset: ImageSet, sampler: BatchSampler, *, workers: int = 0, pin_memory: bool = False):
        if workers < 0:
            raise ArgumentError("workers", "must be at least 0", workers)
        self.dataset, self.sampler = dataset, sampler
        self._batches = Workers(
            _EpochSamples(dataset),
            stack,
            batch_sampler=_EpochKeys(sampler),
            workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            # its own generator, so that starting an epoch draws nothing from the one that the model uses
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


class _EpochKeys:
    """Batches of (epoch, index): persistent worker processes learn the epoch from the key."""

    def __init__(self, sampler: BatchSampler):
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.sampler.epoch
        return ([(epoch, index) for index in batch] for batch in self.sampler)


class _EpochSamples(Dataset[tuple[Any, int]]):
    def __init__(self, dataset: ImageSet):
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, int]:
        epoch, index = key
        self.dataset.set_epoch(epoch)
        return self.dataset.sample(index)


def make_loader(
    dataset: ImageSet,
    batch_size: int,
    *,
    train: bool,
    workers: int = 0,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool | None = None,
    balanced: bool = False,
    pin_memory: bool = False,
) -> Loader:
    """Make a :class:`Loader`, and set the seed of the data set.

    Args:
        dataset: data set whose transform returns tensors of one size.
        batch_size: samples of a batch, over all ranks together.
        train: whether to shuffle.
        workers: processes that read images, limited to one per core; 0 reads them in this process.
        seed: seed of the order and of the augmentation.
        rank, world_size: rank of this process, and number of processes.
        drop_last: whether an incomplete last batch is left out; the default is the value of ``train``.
        balanced: whether all classes are drawn equally often in training: in an epoch, samples of small classes are
            repeated with another augmentation, and some of large classes are left out.
        pin_memory: whether batches are put into page-locked memory, from which they are copied to a GPU faster.

    Raises:
        ArgumentError: for a number out of range, and if the ranks of a training cannot share every batch equally.
    """
    ranks = {"rank": rank, "world_size": world_size}
    labels = dataset.labels if balanced else None
    sampler = BatchSampler(len(dataset), batch_size, train=train, seed=seed, **ranks, drop_last=drop_last, labels=labels)
    dataset.seed = seed
    return Loader(dataset, sampler, workers=workers, pin_memory=pin_memory)
