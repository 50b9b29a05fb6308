"""Decode image files to RGB: the only place where a user's image is opened."""

import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from eigengrain.errors import ImageError as ImageError

#: formats that are read; other decoders of Pillow run programs (EPS) or open other files
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
#: a narrower image would become huge when its short side is resized to the input size of a network
MAX_ASPECT = 100
_EXIF_ORIENTATION = 0x0112


def decode(path: str | Path) -> Image.Image:
    """Decode an image file to RGB, turned upright by its EXIF orientation, without alpha; raises ImageError if it fails."""
    try:
        return open_image(path)
    except ImageError as error:
        raise ImageError(error.problem, path, error.truncated) from None


def open_image(path: str | Path) -> Image.Image:
    """The same as :func:`decode`, but the message of its error does not contain the path."""
    if not os.path.isfile(path):
        raise ImageError("not a regular file" if os.path.exists(path) else "the file does not exist")
    try:
        with warnings.catch_warnings():
            # warnings about large photographs, unusual metadata and palettes: the pixels are read or the file is refused
            warnings.simplefilter("ignore")
            with Image.open(path, formats=supported_formats()) as image:
                if max(image.size) > MAX_ASPECT * min(image.size):
                    size = f"{image.width} × {image.height} pixels"
                    raise ImageError(f"refused: {size}, one side is more than {MAX_ASPECT} times the other")
                image.load()
                return _rgb(_upright(image), sixteen_bits=image.mode == "I" and image.format in ("PNG", "PPM"))
    except UnidentifiedImageError:
        if os.path.getsize(path) == 0:
            raise ImageError("the file is empty") from None
        raise ImageError(f"not an image, or not in a supported format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"refused: {str(error).rstrip('.')}; scale it down") from None
    except ImageError:
        raise
    except Exception as error:  # decoders raise many kinds of errors for damaged files, and none of them should stop a run
        if isinstance(error, OSError) and error.strerror:
            raise ImageError(f"cannot be opened ({error.strerror})") from None
        # Pillow's text is the only sign that a file was cut short
        raise ImageError(f"damaged ({error or type(error).__name__})", truncated="truncated" in str(error)) from None


def supported_formats() -> list[str]:
    """Those of ``FORMATS`` that the installed Pillow was built with."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _upright(image: Image.Image) -> Image.Image:
    try:
        # exif_transpose copies the image, so it is called only if needed
        turned = image.getexif().get(_EXIF_ORIENTATION, 1) != 1
        return ImageOps.exif_transpose(image) if turned else image
    except Exception:  # damaged metadata of an otherwise intact image
        return image


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
