"""Work in other processes that speaks as if it were done in this one."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader, Dataset

from eigengrain.data.decode import ImageError


def at_most_one_per_core(asked: int) -> int:
    """The number of processes to start: what was asked for, but no more than this process may use cores.

    More would not read faster, and torch warns of them in a page of text. The batches are the same for any number.

    Example:
        >>> at_most_one_per_core(0), at_most_one_per_core(1), at_most_one_per_core(10_000) < 10_000
        (0, 1, True)
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(asked, allowed or 1)


class Workers:
    """A DataLoader in which an :class:`~eigengrain.data.decode.ImageError` reaches the caller as it was raised.

    torch's own loader puts the traceback of the worker process into the message, and a user who has one bad file is shown
    a page of code. Other errors are left as they are: they are mistakes in code, and the page is what one needs.

    Args:
        dataset: of samples.
        collate: samples to a batch.
        workers: processes, at most one for each core.
        options: of the DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], *, workers: int, **options: Any):
        options |= {"num_workers": at_most_one_per_core(workers), "collate_fn": _Collate(collate)}
        options |= {"worker_init_fn": _begin}
        self._loader: DataLoader[Any] = DataLoader(_Answers(dataset), **options)

    def __iter__(self) -> Iterator[Any]:
        with _signals_wait(), _garbage_stays():
            batches = iter(self._loader)  # the workers start now, not at the first batch
        return self._raised(batches)

    @staticmethod
    def _raised(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, ImageError):
                raise batch
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


#: signals that reach all processes of a group or of a job, where the system says who sends one (not on macOS)
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM) if hasattr(signal, "sigwaitinfo") else ()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold back the signals that workers do not heed; those that start meanwhile hold them back from their first moment."""
    if not _OF_GROUPS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _garbage_stays() -> Iterator[None]:
    """Keep what is garbage in this process out of the hands of workers that start meanwhile.

    A forked one has a copy of everything. CUDA cannot be used in it, so the collector, if it met a tensor or a graph of a
    network that this process has done with, would end the worker.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _begin(worker: int) -> None:
    gc.enable()  # for what is its own
    _heed_the_parent_alone()


def _heed_the_parent_alone() -> None:
    """Let a worker end when its parent says so, or is gone, and not at signals that are meant for the parent.

    Ctrl-C, ``timeout``, torchrun and clusters send theirs to all processes of a group or of a job. A worker that died of it
    would be an error in the middle of the parent's work, which wants to finish its step and write a checkpoint first.
    """
    if not _OF_GROUPS:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)  # of this thread and of those that it starts
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one

    def listen() -> None:
        while signal.sigwaitinfo(_OF_GROUPS).si_pid != parent.pid:
            pass
        os._exit(0)

    Thread(target=listen, daemon=True).start()


class _Answers(Dataset[Any]):
    """Samples, or the errors in their place."""

    def __init__(self, dataset: Dataset[Any]):
        self.dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.dataset[key]
        except ImageError as error:
            return error

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class _Collate:
    """Batches, or the first error in their place."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        for sample in samples:
            if isinstance(sample, ImageError):
                return sample
        try:
            return self.collate(samples)
        except ImageError as error:
            return error
