"""Image files to RGB: the only place where a user's image is opened."""

import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

#: decoders that an image may reach; others of Pillow's run programs (EPS) or read from other files
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
#: a narrower image would become huge when its short side is resized to what a network takes
MAX_ASPECT = 100
_EXIF_ORIENTATION = 0x0112


class ImageError(ValueError):
    """An image that cannot be used, or images that do not fit together; the message says all that a user needs."""


def decode(path: str | Path) -> Image.Image:
    """An image file as RGB, upright as its EXIF says; what a transparent pixel hides is shown.

    Raises:
        ImageError: with the path and the reason, if there is no such file, it is no image, it is damaged, or it is too
            large when unpacked.
    """
    try:
        return open_image(path)
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None


def open_image(path: str | Path) -> Image.Image:
    """What :func:`decode` gives; the reason of its error stands without the path, for tables that have it."""
    if not os.path.isfile(path):
        raise ImageError("not a plain file" if os.path.exists(path) else "there is no such file")
    try:
        with warnings.catch_warnings():
            # large photographs, odd metadata and palettes are worth no line: the pixels are read or the file is refused
            warnings.simplefilter("ignore")
            with Image.open(path, formats=_formats()) as image:
                _check_proportions(*image.size)
                image.load()
                return _rgb(_upright(image), sixteen_bits=image.mode == "I" and image.format in ("PNG", "PPM"))
    except UnidentifiedImageError:
        if os.path.getsize(path) == 0:
            raise ImageError("the file is empty") from None
        raise ImageError(f"not an image, or of a kind that is not read ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"refused: {str(error).rstrip('.')}; scale it down") from None
    except ImageError:
        raise
    except Exception as error:  # decoders fail in many ways on damaged files, and none of them should stop a run
        if isinstance(error, OSError) and error.strerror:
            raise ImageError(f"cannot be opened ({error.strerror})") from None
        raise ImageError(f"damaged ({error or type(error).__name__})") from None


def _formats() -> list[str]:
    Image.init()
    return [kind for kind in FORMATS if kind in Image.OPEN]  # Pillow may be built without some of them


def _check_proportions(width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"refused: {width} × {height} pixels, one side is more than {MAX_ASPECT} times the other")


def _upright(image: Image.Image) -> Image.Image:
    try:
        # turning copies the image, so it is asked first whether there is anything to do
        turned = image.getexif().get(_EXIF_ORIENTATION, 1) != 1
        return ImageOps.exif_transpose(image) if turned else image
    except Exception:  # damaged metadata of an image that is otherwise whole
        return image


def _rgb(image: Image.Image, sixteen_bits: bool) -> Image.Image:
    """RGB of whatever mode; ``sixteen_bits`` for images whose mode alone does not say that they have as many."""
    if image.mode == "RGB":
        return image
    if sixteen_bits or image.mode.startswith("I;16"):
        # Pillow's own conversion would clip what is above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(f"pixels of mode {image.mode} have no fixed range: save the image with 8 or 16 bits")
    return image.convert("RGB")
