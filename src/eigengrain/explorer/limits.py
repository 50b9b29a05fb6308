"""Limits on what visitors can send and how long the server works for them; the uploads and caches that obey them."""

import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from PIL import Image

from eigengrain.data.decode import open_image
from eigengrain.errors import ArgumentError

#: size of an uploaded file, in bytes
MAX_BYTES = 50 * 2**20
#: length of a text that a browser sends
MAX_TEXT = 200

#: seconds that a request waits for the model
MAX_WAIT = 20.0
#: steps and seconds of a perturbation, and how many can run at once
MAX_STEPS, MAX_SECONDS, MAX_RUNS = 1000, 120.0, 2
#: requests in the queue, over all visitors
MAX_QUEUE = 256
#: requests handled at once: those answered from memory, and those for maps (one uses the model while the other is drawn)
CONCURRENCY, CONCURRENT_MAPS = 4, 2

#: bytes of decoded images and maps kept in memory
CACHE_BYTES = 512 * 2**20

#: prefix of the secret key of an upload
UPLOAD = "upload-"
#: held while an upload is decoded: only one large image at a time takes its full memory
_decoding = Lock()

Value = TypeVar("Value")


class BusyError(ValueError):
    """The model is in use by other visitors."""


class BoundedCache(Generic[Value]):
    """The most recently used values, up to a number of bytes. Thread-safe.

    The newest value is kept whatever its ``size``.

    Example:
        >>> cache = BoundedCache[bytes](max_bytes=4, size=len)
        >>> for key in "ab":
        ...     cache.put(key, bytes(3))
        >>> cache.get("a"), cache.get("b")
        (None, b'\\x00\\x00\\x00')
    """

    def __init__(self, max_bytes: int, size: Callable[[Value], int]):
        self._max_bytes, self._size = max_bytes, size
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()  # with their sizes
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Value) -> None:
        with self._lock:
            self._values[key] = value, self._size(value)
            self._values.move_to_end(key)
            while len(self._values) > 1 and sum(size for _, size in self._values.values()) > self._max_bytes:
                self._values.popitem(last=False)


def image_bytes(image: Image.Image) -> int:
    """Size of an RGB image in memory."""
    return 3 * image.width * image.height


class Upload(NamedTuple):
    image: Image.Image
    title: str


class Uploads(BoundedCache[Upload]):
    """Images that visitors uploaded, shared by all models of the page. They are in memory only, and their keys are secret.

    Example:
        >>> uploads = Uploads()
        >>> key = uploads.add(Image.new("RGB", (4, 3)), "mine.png")
        >>> uploads.get(key).title, uploads.get("upload-guessed")
        ('mine.png', None)
    """

    def __init__(self) -> None:
        super().__init__(CACHE_BYTES // 2, lambda upload: image_bytes(upload.image))

    def add(self, image: Image.Image, title: str) -> str:
        """Store an image and return its key."""
        key = UPLOAD + secrets.token_urlsafe(12)
        self.put(key, Upload(image, title[:MAX_TEXT]))
        return key


def open_upload(path: str | Path, folder: str | Path) -> Image.Image:
    """Open a file in the folder of the server's uploads as an RGB image.

    Raises:
        ArgumentError: if the file was not uploaded, or is too large; the path is not in the message.
        ImageError: if the file is not an image, is damaged, or has too many pixels.
    """
    real = os.path.realpath(path)
    if not real.startswith(os.path.realpath(folder) + os.sep) or not os.path.isfile(real):
        raise ArgumentError("path", "is not that of an uploaded file")
    if os.path.getsize(real) > MAX_BYTES:
        raise ArgumentError("file", f"must be at most {MAX_BYTES // 2**20} MB", remedy="scale the image down")
    with _decoding:
        return open_image(real)
