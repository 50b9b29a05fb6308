"""Ctrl-C and SIGTERM as wishes: the loop finishes its step, saves, and then stops."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """Training was asked to stop, and the checkpoint is written.

    Attributes:
        exit_code: 130 for Ctrl-C, 143 for SIGTERM, as shells have it.
    """

    def __init__(self, number: int, where: str):
        super().__init__(f"stopped by {signal.Signals(number).name} {where}; go on with --resume")
        self.exit_code = 128 + number


class Wish:
    """Which signal came, 0 for none."""

    def __init__(self) -> None:
        self.signal = 0


@contextmanager
def polite_signals() -> Iterator[Wish]:
    """Take note of SIGINT and SIGTERM; a SIGINT after the first signal acts at once, for those who cannot wait.

    A SIGTERM never does: where a cluster ends all processes of a job, torchrun passes its own one on to those that had
    theirs, and the second must not cost the checkpoint that the first has asked for. SIGKILL is for the impatient there.

    Example:
        >>> with polite_signals() as wish:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     wish.signal == signal.SIGTERM
        True
    """
    wish = Wish()
    if current_thread() is not main_thread():  # handlers belong to the main thread alone
        yield wish
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def take_note(number: int, frame: FrameType | None) -> None:
        wish.signal = number
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, take_note)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
