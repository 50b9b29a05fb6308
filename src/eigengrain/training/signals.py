"""Handle Ctrl-C and SIGTERM: the loop finishes its step, saves a checkpoint, and then stops."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


@dataclass
class StopRequest:
    """Number of the signal that was received, 0 for none."""

    signal: int = 0


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM instead of stopping. A SIGINT after the first signal acts at once.

    A second SIGTERM does not: when a cluster ends all processes of a job, torchrun forwards its own SIGTERM to processes
    that have received theirs, and the second must not prevent the checkpoint that the first requested.

    Example:
        >>> with catch_signals() as request:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     request.signal == signal.SIGTERM
        True
    """
    request = StopRequest()
    if current_thread() is not main_thread():  # only the main thread can set handlers
        yield request
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def record(number: int, frame: FrameType | None) -> None:
        request.signal = number
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, record)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
