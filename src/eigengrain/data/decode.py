"""Decode image files to RGB: the only place where a user's image is opened."""

import os
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from eigengrain.data.datasets.layout import HEIC_REMEDY
from eigengrain.errors import ImageError as ImageError

#: formats that are read; other decoders of Pillow run programs (EPS) or open other files
FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
#: a narrower image would become huge when its short side is resized to the input size of a network
MAX_ASPECT = 100
#: largest image that is read; Pillow refuses larger ones
MAX_PIXELS = 178_000_000
#: larger images are read at 1/2, 1/4 or 1/8 of their width, with at least this number of pixels
KEPT_PIXELS = 8_000_000
_TOO_LARGE = f"refused: more than {MAX_PIXELS // 10**6} million pixels; scale it down"
_EXIF_ORIENTATION = 0x0112
#: how to turn an image upright, by its EXIF orientation
_TURNS = dict(
    enumerate(
        (
            *(Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM),
            *(Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90),
        ),
        start=2,
    )
)


def decode(path: str | Path) -> Image.Image:
    """Decode an image file to RGB, turned upright by its EXIF orientation, without alpha; raises ImageError if it fails.

    An image of 32 million pixels or more is read at 1/2, 1/4 or 1/8 of its width, so that at least 8 million remain.
    """
    try:
        return open_image(path)
    except ImageError as error:
        raise ImageError(error.problem, path, error.truncated) from None


def open_image(path: str | Path, kept_pixels: int = KEPT_PIXELS) -> Image.Image:
    """The same as :func:`decode`, but the message of its error does not contain the path."""
    if not os.path.isfile(path):
        raise ImageError("not a regular file" if os.path.exists(path) else "the file does not exist")
    try:
        with warnings.catch_warnings():
            # warnings about large photographs, unusual metadata and palettes: the pixels are read or the file is refused
            warnings.simplefilter("ignore")
            with Image.open(path, formats=supported_formats()) as image:
                return _read(image, kept_pixels)
    except UnidentifiedImageError:
        if os.path.getsize(path) == 0:
            raise ImageError("the file is empty") from None
        if "HEIF" not in supported_formats() and _is_heic(path):
            raise ImageError(f"HEIC images need pillow-heif: {HEIC_REMEDY}") from None
        raise ImageError(f"not an image, or not in a supported format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise ImageError(_TOO_LARGE) from None
    except ImageError:
        raise
    except Exception as error:  # decoders raise many kinds of errors for damaged files, and none of them should stop a run
        if isinstance(error, OSError) and error.strerror:
            raise ImageError(f"cannot be opened ({error.strerror})") from None
        # Pillow's text is the only sign that a file was cut short
        raise ImageError(f"damaged ({error or type(error).__name__})", truncated="truncated" in str(error)) from None


def supported_formats() -> list[str]:
    """Those of ``FORMATS`` that the installed Pillow and pillow-heif can read."""
    _load_decoders()
    return [name for name in FORMATS if name in Image.OPEN]


@cache
def _load_decoders() -> None:
    Image.init()
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()


def _is_heic(path: str | Path) -> bool:
    with open(path, "rb") as file:
        header = file.read(12)
    return header[4:8] == b"ftyp" and header[8:11] in (b"hei", b"hev", b"mif", b"msf")


def _read(image: Image.Image, kept_pixels: int) -> Image.Image:
    """Decode an opened image; a large one at a fraction of its size, which is fast and small in memory for JPEG."""
    width, height = image.size
    if max(width, height) > MAX_ASPECT * min(width, height):
        problem = f"{width} × {height} pixels, one side is more than {MAX_ASPECT} times the other"
        raise ImageError(f"refused: {problem}")
    if width * height > MAX_PIXELS:
        raise ImageError(_TOO_LARGE)
    factor = next((f for f in (8, 4, 2) if width * height >= kept_pixels * f * f), 1)
    if factor > 1 and image.format in ("JPEG", "MPO") and image.draft(None, (width // factor, height // factor)):
        factor = 1
    image.load()
    turn = _turn(image)
    sixteen_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if factor > 1 and image.mode in ("RGB", "CMYK"):  # before it is copied; other modes cannot be averaged as they are
        image, factor = image.reduce(factor), 1
    image = _rgb(image, sixteen_bits)
    image = image.reduce(factor) if factor > 1 else image
    if turn is not None:
        image = image.transpose(turn)
        image.info.pop("exif", None)  # it is upright now
    return image


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged metadata of an otherwise intact image
        return None


def _rgb(image: Image.Image, sixteen_bits: bool) -> Image.Image:
    """Convert any mode to RGB; ``sixteen_bits`` is for 16-bit images whose mode does not show it."""
    if image.mode == "RGB":
        return image
    if sixteen_bits or image.mode.startswith("I;16"):
        # Pillow's own conversion would clip values above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(f"pixels of mode {image.mode} have no fixed range: save the image with 8 or 16 bits")
    return image.convert("RGB")
