"""Numbers, lists and paths in sentences."""

import unicodedata
from collections.abc import Sequence

#: characters that change the direction of writing, with which a name can look like another
_DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def counted(number: int, unit: str) -> str:
    """A number with its unit in singular or plural: '1 epoch', '5,994 images'."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def few(names: Sequence[str], shown: int) -> str:
    """The first names and the number of the others: 'a, b and 1 more'."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def printable(path: str) -> str:
    """A path on one line: control characters and bytes that are not text are escaped."""
    return "".join(c.encode("unicode_escape").decode() if _is_disturbing(c) else c for c in path)


def _is_disturbing(char: str) -> bool:
    """Whether a character ends a line, controls the terminal, changes the direction of writing or stands for a stray byte.

    Blanks and joiners of all kinds are kept: names of screenshots, and names in many scripts, contain them.
    """
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in _DIRECTIONS
