"""Results that are kept while there is room, so that what was asked before is answered at once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memory(Generic[Value]):
    """The values that were used last, up to a number of bytes; for several threads at once.

    Args:
        limit: bytes that are kept at most; the newest value is kept whatever its size.
        size: bytes of a value.

    Example:
        >>> memory = Memory[bytes](limit=4, size=len)
        >>> for key in "ab":
        ...     memory.put(key, bytes(3))
        >>> memory.get("a"), memory.get("b")
        (None, b'\\x00\\x00\\x00')
    """

    def __init__(self, limit: int, size: Callable[[Value], int]):
        self._limit, self._size = limit, size
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: Value) -> None:
        size = self._size(value)
        with self._lock:
            if key in self._kept:
                self._bytes -= self._kept.pop(key)[1]
            self._kept[key] = value, size
            self._bytes += size
            while self._bytes > self._limit and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1][1]
