"""Checks of option values that several commands share."""

from collections.abc import Sequence
from typing import Any

from eigengrain.errors import UnknownName


def check_choices(config: Any, **choices: Sequence[str]) -> None:
    """See that options have one of their choices.

    Raises:
        ValueError: for another value.

    Example:
        >>> check_choices(types.SimpleNamespace(split="tset"), split=("train", "test"))
        Traceback (most recent call last):
            ...
        ValueError: unknown --split 'tset': did you mean 'test'? Choose from: train, test
    """
    for option, known in choices.items():
        value = getattr(config, option)
        if value not in known:
            raise UnknownName(f"--{option}", value, known)


def check_least(config: Any, **least: int) -> None:
    """See that options are no smaller than they may be; a word in place of a number, or None, is not looked at.

    Raises:
        ValueError: for a smaller number.

    Example:
        >>> check_least(types.SimpleNamespace(workers=-1, count="all"), count=1, workers=0)
        Traceback (most recent call last):
            ...
        ValueError: --workers must be at least 0, got -1
    """
    for option, smallest in least.items():
        value = getattr(config, option)
        if isinstance(value, int | float) and value < smallest:
            raise ValueError(f"--{option} must be at least {smallest}, got {value}")
