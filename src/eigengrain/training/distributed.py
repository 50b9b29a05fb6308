"""Distributed helpers: one process per device, launched with torchrun; without torchrun they do nothing."""

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
    """This process and its group."""

    device: torch.device
    rank: int = 0  # number of this process
    world_size: int = 1  # number of processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.distributed:
            dist.all_reduce(values)
        return values

    def max(self, *values: int) -> list[int]:
        """Maximum of each number over all processes."""
        if not self.distributed:
            return list(values)
        table = torch.tensor(values, device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return [int(v) for v in table.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Plain values or tensors of all processes, ordered by rank."""
        if not self.distributed:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the batch statistics of the first process to all others, so that they evaluate the same model."""
        if self.distributed:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.distributed:
            dist.barrier()


#: Groups that were left, kept until the interpreter exits. The destructor of a group waits for gloo's threads, which need
#: the GIL to release a tensor. Python's own reference to the group releases the GIL while it waits. That of a
#: DistributedDataParallel does not, so it must never be the last reference to a group: both would wait forever.
_left: list[Any] = []
atexit.register(_left.clear)
#: seconds for gloo's threads to release their tensors
_SETTLE = 0.2
#: Number of the next group. The store of torchrun outlives the groups, and torch gives all of them the same name: the first
#: process of a new group would read the addresses of the previous group and wait forever.
_group_number = count()


@contextmanager
def join(device: str) -> Iterator[Process]:
    """Join the processes that torchrun launched (gloo on the CPU, NCCL on CUDA), if there are any.

    Example:
        >>> with join("cpu") as process:
        ...     process.is_main, process.world_size
        (True, 1)
    """
    chosen = pick_device(device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Process(chosen)
        return
    if chosen.type == "cuda":
        chosen = pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(chosen)
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"eigengrain/{next(_group_number)}", store)  # type: ignore[attr-defined]
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)
    try:
        yield Process(chosen, rank, world_size)
    finally:
        if chosen.type != "cuda":
            # gloo's threads need the GIL to release the tensors of the last exchange; a thread that requests it after the
            # interpreter has exited ends the process with SIGABRT
            time.sleep(_SETTLE)
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the process that prints; also valid before and after :func:`join`."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def seed_everything(seed: int) -> None:
    """Seed all generators that a training step may use."""
    torch.manual_seed(seed)
    random.seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """States of the generators, as tensors and plain values."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to states of :func:`generator_states`."""
    torch.set_rng_state(states["torch"])
    version, numbers, rest = states["python"]
    random.setstate((version, tuple(numbers), rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restore the generators of the caller on exit.

    Example:
        >>> before = torch.get_rng_state()
        >>> with preserve_generators(torch.device("cpu")):
        ...     seed_everything(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    states = generator_states(device)
    try:
        yield
    finally:
        restore_generators(states, device)
