"""What the page takes from a browser, and for how long it works on it."""

import os
import warnings
from pathlib import Path

from PIL import Image

from eigengrain.data.decode import FORMATS, ImageError, open_image

#: of an uploaded file
MAX_BYTES = 10 * 2**20
#: of an uploaded image when it is unpacked, known from its header before any of it is
MAX_PIXELS = 40_000_000

#: seconds that a request waits for the model before it is told to come again
MAX_WAIT = 20.0
#: of a perturbation: steps, seconds, and how many run at once
MAX_STEPS, MAX_SECONDS, MAX_RUNS = 1000, 120.0, 2
#: requests that wait, over all visitors
MAX_QUEUE = 256
#: requests that are worked on at once: of those that are answered from memory, and of those for maps, of which one has the
#: model while the other is drawn
CONCURRENCY, CONCURRENT_MAPS = 4, 2

#: bytes of decoded images and maps that are kept in memory
KEPT_BYTES = 512 * 2**20
#: letters of a text that a browser may send
MAX_TEXT = 200


class BusyError(ValueError):
    """The model is at work for others."""


def open_upload(path: str | Path, folder: str | Path) -> Image.Image:
    """An uploaded file as RGB, if it is an image of reasonable size.

    Args:
        path: of the file.
        folder: in which the server keeps uploads; what lies elsewhere was not uploaded and is not opened.

    Raises:
        ImageError: with a reason for the visitor, without the path.
    """
    real = os.path.realpath(path)
    if not real.startswith(os.path.realpath(folder) + os.sep) or not os.path.isfile(real):
        raise ImageError("this is not an uploaded file")
    if os.path.getsize(real) > MAX_BYTES:
        raise ImageError(f"the file is larger than {MAX_BYTES // 2**20} MB: scale the image down")
    check_pixels(real)
    return open_image(real)


def check_pixels(path: str) -> None:
    """Look at an image's header alone.

    Raises:
        ImageError: if the image has too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Image.init()
            known = [kind for kind in FORMATS if kind in Image.OPEN]  # Pillow may be built without some of them
            with Image.open(path, formats=known) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        raise ImageError(f"the image has far more than {MAX_PIXELS // 10**6} million pixels: scale it down") from None
    except Exception:  # no image, or a damaged one: open_image says which
        return
    if width * height > MAX_PIXELS:
        raise ImageError(f"the image has {width} × {height} pixels, more than {MAX_PIXELS // 10**6} million: scale it down")
