"""Numbers in sentences."""


def counted(number: int, unit: str) -> str:
    """A number with its unit, in the plural where there is not one.

    Example:
        >>> counted(1, "epoch"), counted(15, "epoch"), counted(5994, "image")
        ('1 epoch', '15 epochs', '5,994 images')
    """
    return f"{number:,} {unit}{'' if number == 1 else 's'}"
