"""Images of visitors' own, which every model of the page can be shown."""

import secrets
from typing import NamedTuple

from PIL import Image

from eigengrain.explorer.limits import KEPT_BYTES, MAX_TEXT
from eigengrain.explorer.memory import Memory

#: before the secret name of an upload
UPLOAD = "upload-"


class Upload(NamedTuple):
    image: Image.Image
    title: str


class Uploads:
    """Kept in memory alone, while there is room; the key of each is a secret.

    Example:
        >>> uploads = Uploads()
        >>> key = uploads.add(Image.new("RGB", (4, 3)), "mine.png")
        >>> uploads.get(key).title, uploads.get("upload-guessed")
        ('mine.png', None)
    """

    def __init__(self) -> None:
        self._kept = Memory[Upload](KEPT_BYTES // 2, lambda upload: 3 * upload.image.width * upload.image.height)

    def add(self, image: Image.Image, title: str) -> str:
        """The key of an image from now on."""
        key = UPLOAD + secrets.token_urlsafe(12)
        self._kept.put(key, Upload(image, title[:MAX_TEXT]))
        return key

    def get(self, key: str) -> Upload | None:
        return self._kept.get(key)
