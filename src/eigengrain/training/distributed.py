"""Several processes as one: started by torchrun, one a device, or none of it."""

import atexit
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eigengrain.environment import pick_device


@dataclass(frozen=True)
class Process:
    """This process among its peers.

    Args:
        device: that it computes on.
        rank: its number.
        world_size: how many there are.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    @property
    def many(self) -> bool:
        return self.world_size > 1

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.many:
            dist.all_reduce(values)
        return values

    def max(self, *values: int) -> list[int]:
        """The largest of each number over all processes."""
        if not self.many:
            return list(values)
        table = torch.tensor(values, device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return [int(v) for v in table.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Plain values or tensors of all processes, in the order of their ranks."""
        if not self.many:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the batch statistics of the first, so that they evaluate one and the same model."""
        if self.many:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.many:
            dist.barrier()


#: Groups that were left, kept until the interpreter exits. A group ends when nobody holds it any more, and its end waits
#: for gloo's threads, which need Python's lock to let go of a tensor. Python's own handle on the group hands the lock over
#: while it waits. A DistributedDataParallel does not, so it must never be the last to hold a group, or both wait for ever.
_left: list[Any] = []
#: seconds that gloo's threads are given for that
_SETTLE = 0.2
atexit.register(_left.clear)
#: Counts the groups. The store of torchrun outlives them, and torch gives all of them one name: a process that comes first
#: would find the addresses of the group before, and wait for ever.
_joined = count()


@contextmanager
def join(device: str) -> Iterator[Process]:
    """This process; where torchrun started several, they find each other (gloo on the CPU, NCCL on CUDA).

    Example:
        >>> with join("cpu") as process:
        ...     process.is_main, process.world_size
        (True, 1)
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Process(pick_device(device))
        return
    chosen = pick_device(device)
    if chosen.type == "cuda":
        chosen = pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(chosen)
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"eigengrain/{next(_joined)}", store)  # type: ignore[attr-defined]
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)
    try:
        yield Process(chosen, rank, world_size)
    finally:
        if chosen.type != "cuda":
            # gloo's threads drop the tensors of the last exchange with Python's lock; one that asks for the lock when the
            # interpreter is gone ends the process with SIGABRT
            time.sleep(_SETTLE)
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the process that speaks; of those that torchrun starts it is one, also after they have parted."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def seed_everything(seed: int) -> None:
    """All generators that a training step may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Where the generators stand, as tensors and plain values."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    version, numbers, rest = states["python"]
    random.setstate((version, tuple(numbers), rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def generators_put_back(device: torch.device) -> Iterator[None]:
    """Whatever is seeded and drawn inside, the generators of the caller go on from where they were.

    Example:
        >>> before = torch.get_rng_state()
        >>> with generators_put_back(torch.device("cpu")):
        ...     seed_everything(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    states = generator_states(device)
    try:
        yield
    finally:
        restore_generators(states, device)
