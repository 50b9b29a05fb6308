"""Random choices that depend on what they are for, not on when or in which process they are made."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(*key: int) -> int:
    """A 63-bit seed from whole numbers: equal keys give equal seeds, and near keys unrelated ones.

    Example:
        >>> derive(0, 1, 2) == derive(0, 1, 2), derive(0, 1, 2) == derive(0, 2, 1)
        (True, False)
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed every generator that transforms draw from by the key, and put the generators back afterwards.

    torchvision draws from torch, timm from Python's random and from NumPy, so all three are held. CUDA's generators are
    left alone (``torch.manual_seed`` would reseed them, and dropout with them, at every image).

    Example:
        >>> with seeded(0, 1):
        ...     first = torch.rand(1)
        >>> with seeded(0, 1):
        ...     print(torch.equal(first, torch.rand(1)))
        True
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
