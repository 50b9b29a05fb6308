"""Numbers and lists in sentences."""

from collections.abc import Sequence


def counted(number: int, unit: str) -> str:
    """A number with its unit, in the plural where there is not one.

    Example:
        >>> counted(1, "epoch"), counted(15, "epoch"), counted(5994, "image")
        ('1 epoch', '15 epochs', '5,994 images')
    """
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def few(names: Sequence[str], shown: int) -> str:
    """The first names, and how many more there are.

    Example:
        >>> few(["a", "b"], 2), few(["a", "b", "c"], 2)
        ('a, b', 'a, b and 1 more')
    """
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
