"""Image files to RGB."""

import os
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

#: decoders that an image may reach; others of Pillow's run programs (EPS) or read from other files
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_EXIF_ORIENTATION = 0x0112


def _formats() -> list[str]:
    Image.init()
    return [kind for kind in FORMATS if kind in Image.OPEN]  # Pillow may be built without some of them


def decode(path: str | Path) -> Image.Image:
    """An image file as RGB, upright as its EXIF says.

    Raises:
        ValueError: with the path and the reason, if there is no such file, it is no image, or it is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata and palettes; the pixels are read or the file is refused
            with Image.open(path, formats=_FORMATS_HERE) as image:
                image.load()
                # turning and converting copy the image, so it is asked first whether there is anything to do
                upright = image if _orientation(image) in (None, 1) else ImageOps.exif_transpose(image)
                return upright if upright.mode == "RGB" else upright.convert("RGB")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not an image, or of a kind that is not read ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders fail in many ways on damaged files
        if isinstance(error, OSError) and error.strerror:
            raise ValueError(f"{path}: cannot be opened ({error.strerror})") from None
        raise ValueError(f"{path}: damaged ({error or type(error).__name__})") from None


def _orientation(image: Image.Image) -> int | None:
    try:
        return image.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # damaged metadata of an image that is otherwise whole
        return None


def is_image_name(name: str) -> bool:
    """Whether a file's name ends as an image's.

    Example:
        >>> is_image_name("a.JPEG"), is_image_name("notes.txt")
        (True, False)
    """
    return os.path.splitext(name)[1].lower() in SUFFIXES


_FORMATS_HERE = _formats()
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
