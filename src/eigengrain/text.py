"""Numbers, lists and paths in sentences."""

import math
import unicodedata
from collections.abc import Sequence

#: characters that change the direction of writing, with which a name can look like another
_DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def counted(number: int, unit: str) -> str:
    """A number with its unit in singular or plural: '1 epoch', '5,994 images'."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time in two units.

    Example:
        >>> duration(4.21), duration(125), duration(7300)
        ('4.2 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def wilson_interval(right: int, samples: int, z: float = 1.959964) -> tuple[float, float]:
    """Interval that contains the true share with a probability of 95 % (Wilson, 1927).

    Example:
        >>> [round(bound, 3) for bound in wilson_interval(9, 10)]
        [0.596, 0.982]
    """
    share, weight = right / samples, z * z / samples
    centre, spread = share + weight / 2, z * math.sqrt(share * (1 - share) / samples + weight / samples / 4)
    return max((centre - spread) / (1 + weight), 0.0), min((centre + spread) / (1 + weight), 1.0)


def describe_accuracy(right: int, samples: int) -> str:
    """An accuracy with its interval in one sentence."""
    low, high = wilson_interval(right, samples)
    share = f"{100 * right / samples:.1f} % of {counted(samples, 'image')}"
    return f"{share} are classified correctly (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"


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
