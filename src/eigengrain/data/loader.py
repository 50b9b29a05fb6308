"""Batches: which samples they hold, in which process, and how a run in the middle of an epoch goes on."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from eigengrain.data.image_set import ImageSet, stack
from eigengrain.data.randomness import derive
from eigengrain.data.workers import Workers


class Order:
    """Which samples make which batch: one order for an epoch, cut into global batches, each cut into a part a rank.

    Args:
        count: samples.
        batch_size: samples of a global batch, over all ranks together.
        train: whether the order is drawn anew in each epoch, from (seed, epoch) alone.
        seed: of the order.
        rank: of this process.
        world_size: how many processes there are.
        drop_last: whether the last batch is left out if it is not full; by default in training.

    Raises:
        ValueError: for numbers out of range, and where the ranks of a training could not share every batch equally.

    Example:
        >>> [list(batch) for batch in Order(5, 2, train=False)]
        [[0, 1], [2, 3], [4]]
        >>> [[list(batch) for batch in Order(5, 2, train=False, rank=rank, world_size=2)] for rank in (0, 1)]
        [[[0], [2]], [[1], [3], [4]]]
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        train: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool | None = None,
    ):
        if batch_size < 1 or seed < 0 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size must be at least 1, seed at least 0 and rank below world_size; got batch_size {batch_size}, "
                f"seed {seed}, rank {rank}, world_size {world_size}"
            )
        if count < 1:
            raise ValueError("there are no samples to make batches of")
        self.count, self.batch_size, self.train, self.seed = count, batch_size, train, seed
        self.rank, self.world_size = rank, world_size
        self.drop_last = train if drop_last is None else drop_last
        self.epoch, self.start_batch = 0, 0
        if self.drop_last and count < batch_size:
            raise ValueError(
                f"{count} samples do not fill one batch of {batch_size}: use a smaller batch_size or drop_last=False"
            )
        rest = 0 if self.drop_last else count % batch_size
        if train and world_size > 1:
            if batch_size % world_size:
                raise ValueError(
                    f"batch_size {batch_size} counts the samples of all ranks together, and {world_size} ranks cannot "
                    f"share it equally: use a multiple, such as {max(batch_size // world_size, 1) * world_size}"
                )
            if rest % world_size:  # their gradients are averaged as if all had as many
                raise ValueError(
                    f"the last batch has {rest} samples for {world_size} ranks, which cannot share it equally: use "
                    "drop_last=True or another batch_size"
                )

    @property
    def global_batches(self) -> int:
        """Batches of an epoch over all ranks together."""
        return self.count // self.batch_size if self.drop_last else -(-self.count // self.batch_size)

    def __len__(self) -> int:
        """Batches of a whole epoch for this rank; in evaluation, a rank without a share of the last batch has one less."""
        return sum(stop > start for start, stop in map(self._share, range(self.global_batches)))

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Which epoch is next, and how many of its global batches are left out at the start.

        Raises:
            ValueError: for an epoch or a start out of range.
        """
        if epoch < 0 or not 0 <= start_batch <= self.global_batches:
            raise ValueError(
                f"an epoch is at least 0 and has {self.global_batches} batches; got epoch {epoch}, batch {start_batch}"
            )
        self.epoch, self.start_batch = epoch, start_batch

    def samples(self) -> Sequence[int]:
        """The numbers of the samples in this epoch's order."""
        if not self.train:
            return range(self.count)
        # 7 keeps the order apart from other uses of the same seed
        generator = torch.Generator().manual_seed(derive(self.seed, self.epoch, 7))
        order: list[int] = torch.randperm(self.count, generator=generator).tolist()
        return order

    def _share(self, batch: int) -> tuple[int, int]:
        """Where this rank's part of a global batch begins and ends in the epoch's order."""
        first = batch * self.batch_size
        size = min(self.batch_size, self.count - first)
        return first + size * self.rank // self.world_size, first + size * (self.rank + 1) // self.world_size

    def __iter__(self) -> Iterator[Sequence[int]]:
        order = self.samples()
        for batch in range(self.start_batch, self.global_batches):
            start, stop = self._share(batch)
            if stop > start:
                yield order[start:stop]


class _Numbered:
    """Batches of (epoch, number): so a worker process that lives for many epochs knows which one it works for."""

    def __init__(self, order: Order):
        self.order = order

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.order.epoch
        return ([(epoch, number) for number in batch] for batch in self.order)

    def __len__(self) -> int:
        return len(self.order)


class _OfEpoch(Dataset[tuple[Any, int]]):
    def __init__(self, dataset: ImageSet):
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, int]:
        epoch, number = key
        self.dataset.set_epoch(epoch)
        return self.dataset[number]


class Batches:
    """What every source of batches has: a data set, an order of its samples, and a place in it."""

    dataset: ImageSet
    order: Order

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self.order.batch_size

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """The next iteration is of this epoch, without its first ``start_batch`` batches, whose images are not opened."""
        self.order.set_epoch(epoch, start_batch)
        self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.order)


class Loader(Batches):
    """Batches of (images, labels) of a data set, the same ones for any number of workers.

    The order of an epoch depends on (seed, epoch), the augmentation of a sample on (seed, epoch, index), and nothing else.
    N processes see the same global batches as one: ``batch_size`` counts the samples of all ranks together, and each rank
    takes its part of every batch. In evaluation each sample is seen exactly once over all ranks, and none is repeated to
    fill a batch. See :func:`make_loader` for the arguments.
    """

    def __init__(self, dataset: ImageSet, order: Order, *, workers: int = 0, pin_memory: bool = False):
        if workers < 0:
            raise ValueError(f"workers must be at least 0, got {workers}")
        self.dataset, self.order = dataset, order
        self._batches = Workers(
            _OfEpoch(dataset),
            stack,
            batch_sampler=_Numbered(order),
            workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            # its own, so that starting an epoch draws nothing from the generator that the model uses
            generator=torch.Generator().manual_seed(order.seed),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


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
    pin_memory: bool = False,
) -> Loader:
    """A :class:`Loader`; it also gives the data set its seed.

    Args:
        dataset: with a transform that makes tensors of one size.
        batch_size: samples of a batch, over all ranks together.
        train: whether to shuffle.
        workers: processes that read images, at most one for each core; 0 reads them in this one.
        seed: of the order and of the augmentation.
        rank: of this process.
        world_size: how many processes there are.
        drop_last: whether the last batch is left out if it is not full; by default in training.
        pin_memory: whether batches lie in memory that is copied to a GPU faster.

    Raises:
        ValueError: for numbers out of range, and where the ranks of a training could not share every batch equally.

    Example:
        >>> from eigengrain.data import ImageSet
        >>> loader = make_loader(ImageSet("x", "train", ["a"], [0] * 10, ["x.jpg"] * 10), 4, train=True)
        >>> len(loader)
        2
    """
    order = Order(len(dataset), batch_size, train=train, seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
    dataset.seed = seed
    return Loader(dataset, order, workers=workers, pin_memory=pin_memory)
