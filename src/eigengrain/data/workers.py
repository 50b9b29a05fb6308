"""A DataLoader that re-raises errors about images without the traceback of the worker process."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader, Dataset

from eigengrain.errors import BatchError, ImageError

#: errors that are about a user's images, not about code
_ERRORS = (ImageError, BatchError)
#: signals that reach all processes of a group or of a job; only where the system reports the sender (not on macOS)
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM) if hasattr(signal, "sigwaitinfo") else ()


class Workers:
    """A DataLoader that raises ImageError and BatchError in the caller as they were raised in a worker process.

    torch puts the traceback of the worker into the message, so that one unreadable file prints a page of code. Other errors
    keep that traceback: they are mistakes in code. The workers are limited to one per core; ``options`` are further
    arguments of the DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], *, workers: int, **options: Any):
        # more processes than cores would not read faster, and torch would warn about them
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options |= {"num_workers": min(workers, cores), "worker_init_fn": _start_worker}
        self._loader: DataLoader[Any] = DataLoader(_Batches(dataset, collate), collate_fn=_identity, **options)

    def __iter__(self) -> Iterator[Any]:
        with _protect_workers():
            batches = iter(self._loader)  # the workers start here, not at the first batch
        return self._raise_errors(batches)

    @staticmethod
    def _raise_errors(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, _ERRORS):
                raise batch
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


@contextmanager
def _protect_workers() -> Iterator[None]:
    """Keep workers that start meanwhile from receiving the group signals and from collecting the garbage of this process.

    A forked worker has a copy of everything but cannot use CUDA: collecting a tensor or graph of the device would end it.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS) if _GROUP_SIGNALS else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        gc.unfreeze()
        if enabled:
            gc.enable()


def _start_worker(worker: int) -> None:
    """Let only a signal of the parent end this worker, and let it collect its own garbage.

    Ctrl-C, ``timeout``, torchrun and clusters signal all processes of a group or job. A worker that ended by such a signal
    would be an error in the parent, which may want to finish its step and write a checkpoint first.
    """
    gc.enable()
    if not _GROUP_SIGNALS:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)  # for this thread and those that it starts
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_parent() -> None:
        while signal.sigwaitinfo(_GROUP_SIGNALS).si_pid != parent.pid:
            pass
        os._exit(0)

    Thread(target=wait_for_parent, daemon=True).start()


class _Batches(Dataset[Any]):
    """Batches by the keys of their samples; an error about an image is returned in place of the batch."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]):
        self.dataset, self.collate = dataset, collate

    def __getitems__(self, keys: list[Any]) -> Any:
        try:
            return self.collate([self.dataset[key] for key in keys])
        except _ERRORS as error:
            return error

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def _identity(batch: Any) -> Any:
    return batch
