"""What the eigensolvers had to repair, counted without making the device wait.

On CUDA the verdict on a batch is copied to pinned memory behind the work itself and read when it has arrived, at the next
call or when somebody asks: a step late, and without a synchronisation.
"""

import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

RUNGS = ("jitter", "cpu-float64", "zeroed")

_debug: ContextVar[bool] = ContextVar("eigengrain_debug", default=False)


@contextmanager
def debug() -> Iterator[None]:
    """Check every decomposition at once, on CUDA too: the first bad sample raises and is named.

    Without it, samples on CUDA that contain NaN or do not converge are set to zero with zero gradient, counted in
    :func:`solver_repairs` and reported by a warning one step later, because asking at once would stall the device.

    Example:
        >>> with debug():
        ...     _ = torch.ones(1)
    """
    token = _debug.set(True)
    try:
        yield
    finally:
        _debug.reset(token)


def debugging() -> bool:
    return _debug.get()


class Monitor:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._late: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._lock = threading.Lock()

    def count(self, rung: str, times: int = 1) -> None:
        with self._lock:
            self._counts[rung] += times

    def watch(self, zeroed: Tensor) -> None:
        """Take note of a device-side count of samples that were set to zero, and read those that came before it."""
        self.collect()
        verdict = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
        verdict.copy_(zeroed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._late.append((event, verdict))

    def collect(self, wait: bool = False) -> None:
        arrived = 0
        with self._lock:
            while self._late and (wait or self._late[0][0].query()):
                event, verdict = self._late.popleft()
                if wait:
                    event.synchronize()
                arrived += int(verdict)
            self._counts["zeroed"] += arrived
        if arrived:
            warnings.warn(
                f"{arrived} samples were set to zero, with zero gradient, because their covariance contained NaN or did "
                "not converge; run inside eigengrain.functional.debug() to see which",
                stacklevel=2,
            )

    def read(self, reset: bool) -> dict[str, int]:
        self.collect(wait=True)
        with self._lock:
            counts = {rung: self._counts[rung] for rung in RUNGS}
            if reset:
                self._counts.clear()
        return counts


MONITOR = Monitor()


def solver_repairs(*, reset: bool = False) -> dict[str, int]:
    """How many matrices were repaired so far in this process: ``{"jitter": n, "cpu-float64": m, "zeroed": k}``.

    Args:
        reset: start counting again from zero after reading.
    """
    return MONITOR.read(reset)
