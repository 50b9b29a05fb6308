"""Which samples make which batch, and random numbers that depend on a key instead of on the process or the moment."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from eigengrain.errors import ArgumentError


def derive(*key: int) -> int:
    """Derive a 63-bit seed from integers: equal keys give equal seeds, and similar keys give unrelated ones."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed the generators of torch, ``random`` and NumPy by a key, and restore their states afterwards.

    torchvision draws from torch, timm from ``random`` and NumPy. The generators of CUDA are left alone:
    ``torch.manual_seed`` would reseed them, and dropout with them, for every image.
    """
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    seed = derive(*key)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class BatchSampler:
    """Indices of the samples of each batch: an epoch is cut into global batches, and each of them into one part per rank.

    The arguments are those of :func:`~eigengrain.data.make_loader`, for ``count`` samples. With ``labels``, all classes are
    drawn equally often: an epoch has as many samples, of which some are left out and others are repeated. The index of
    the k-th repetition is larger by k · ``count``.

    Example:
        >>> [list(batch) for batch in BatchSampler(5, 2, train=False)]
        [[0, 1], [2, 3], [4]]
        >>> [[list(batch) for batch in BatchSampler(5, 2, train=False, rank=rank, world_size=2)] for rank in (0, 1)]
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
        labels: Sequence[int] | None = None,
    ):
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("count", count, 1)):
            if value < least:
                raise ArgumentError(name, f"must be at least {least}", value)
        if not 0 <= rank < world_size:
            raise ArgumentError("rank", f"must be at least 0 and less than {{world_size}} {world_size}", rank)
        self.count, self.batch_size, self.train, self.seed = count, batch_size, train, seed
        self.rank, self.world_size = rank, world_size
        self.labels = None if labels is None else np.asarray(labels)
        self.drop_last = train if drop_last is None else drop_last
        self.epoch, self.start_batch = 0, 0
        if self.drop_last and count < batch_size:
            remedy = "use a smaller one, or drop_last=False"
            raise ArgumentError("batch_size", f"must be at most the number of samples, {count}", batch_size, remedy)
        if train and batch_size % world_size:
            problem = f"counts the samples of all ranks together and must be a multiple of {{world_size}} {world_size}"
            remedy = f"try {max(batch_size // world_size, 1) * world_size}"
            raise ArgumentError("batch_size", problem, batch_size, remedy)
        rest = 0 if self.drop_last else count % batch_size
        if train and rest % world_size:  # gradients are averaged as if all ranks had equally many samples
            problem = f"leaves a last batch of {rest} samples, which {world_size} ranks cannot share equally"
            raise ArgumentError("batch_size", problem, batch_size, "use drop_last=True or another batch_size")

    @property
    def global_batches(self) -> int:
        """Batches of an epoch over all ranks together."""
        return self.count // self.batch_size if self.drop_last else -(-self.count // self.batch_size)

    def __len__(self) -> int:
        """Batches of a complete epoch for this rank; in evaluation, a rank without a part of the last one has one less."""
        return sum(stop > start for start, stop in map(self._part, range(self.global_batches)))

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set the next epoch, and the number of its global batches to skip."""
        if epoch < 0:
            raise ArgumentError("epoch", "must be at least 0", epoch)
        if not 0 <= start_batch <= self.global_batches:
            raise ArgumentError("start_batch", f"must be between 0 and {self.global_batches}", start_batch)
        self.epoch, self.start_batch = epoch, start_batch

    def indices(self) -> Sequence[int]:
        """The indices of all samples in the order of the epoch."""
        if not self.train:
            return range(self.count)
        # 7 separates the order from other uses of the same seed
        generator = torch.Generator().manual_seed(derive(self.seed, self.epoch, 7))
        order = torch.randperm(self.count, generator=generator)
        return order.tolist() if self.labels is None else self._balance(order.numpy(), generator)

    def _balance(self, order: NDArray[np.int64], generator: torch.Generator) -> list[int]:
        """The same number of samples of each class, up to one, each as often as the others of its class, up to one."""
        assert self.labels is not None
        classes = np.unique(self.labels)
        classes = classes[torch.randperm(len(classes), generator=generator).numpy()]  # the first ones get one more
        drawn = []
        for place, label in enumerate(classes):
            own = order[self.labels[order] == label]
            number = np.arange(self.count // len(classes) + (place < self.count % len(classes)))
            drawn.append(own[number % len(own)] + number // len(own) * self.count)
        mixed = np.concatenate(drawn)
        return mixed[torch.randperm(self.count, generator=generator).numpy()].tolist()

    def _part(self, batch: int) -> tuple[int, int]:
        """Start and stop of this rank's part of a global batch in the order of the epoch."""
        first = batch * self.batch_size
        size = min(self.batch_size, self.count - first)
        return first + size * self.rank // self.world_size, first + size * (self.rank + 1) // self.world_size

    def __iter__(self) -> Iterator[Sequence[int]]:
        order = self.indices()
        for batch in range(self.start_batch, self.global_batches):
            start, stop = self._part(batch)
            if stop > start:
                yield order[start:stop]
