"""Which files are images, by their names; none is opened. No torch and no Pillow here."""

import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

#: how the names of image files end
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k"),
)

#: letters that turn the direction of writing, with which a name can look like another
_DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def is_image_name(name: str) -> bool:
    """Whether a file's name ends as an image's; hidden files are none.

    Example:
        >>> is_image_name("a.JPEG"), is_image_name("notes.txt"), is_image_name("._a.jpg")
        (True, False, False)
    """
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def images_below(folder: str) -> list[str]:
    """Image files in a folder and the folders in it.

    Example:
        >>> images_below("no/such/folder")
        []
    """
    return [os.path.join(parent, name) for parent, names in walk(folder) for name in names if is_image_name(name)]


def walk(folder: str, refused: list[OSError] | None = None) -> Iterator[tuple[str, list[str]]]:
    """A folder and those in it, each with the names of its files; what is hidden is left out, links are entered once.

    Folders that cannot be read are passed over; what was said of them is added to ``refused``.
    """
    entered: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=None if refused is None else refused.append, followlinks=True):
        here = os.path.realpath(parent)
        if here in entered:
            folders.clear()
            continue
        entered.add(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield parent, sorted(name for name in names if not name.startswith("."))


@contextmanager
def permitted() -> Iterator[None]:
    """Says which file or folder may not be read.

    Raises:
        ValueError: in place of a PermissionError.
    """
    try:
        yield
    except PermissionError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror})") from None


def printable(path: str) -> str:
    r"""A path for reading: on one line, without control characters or bytes that are no letters.

    Example:
        >>> print(printable("two\nlines.png"))
        two\nlines.png
    """
    return "".join(c.encode("unicode_escape").decode() if _disturbs(c) else c for c in path)


def _disturbs(letter: str) -> bool:
    """Whether a letter ends a line, steers the terminal, turns the direction of writing or stands for a byte that is none.

    Blanks and joiners of all kinds may stay: names of screenshots, and in many scripts, have them.
    """
    return unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(letter) in _DIRECTIONS
