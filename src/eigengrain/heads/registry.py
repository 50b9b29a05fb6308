"""Heads by name."""

import inspect
import re
from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, TypeVar

from eigengrain.errors import UnknownName, did_you_mean
from eigengrain.heads.base import Head

Factory = Callable[..., Head]
F = TypeVar("F", bound=Factory)

_FACTORIES: dict[str, Factory] = {}


def register_head(name: str) -> Callable[[F], F]:
    """Register a head class, or a function that makes one, under a name of its own.

    Example:
        >>> @register_head("first-position")
        ... class FirstPosition(Head):
        ...     def __init__(self, in_channels, reduce=None):
        ...         super().__init__(in_channels, reduce)
        ...         self.out_features = self.channels
        ...     def pool(self, x):
        ...         return x[:, :, 0, 0]
        >>> create_head("first-position", in_channels=8).out_features
        8
        >>> _ = _FACTORIES.pop("first-position")
    """

    def register(factory: F) -> F:
        if name in _FACTORIES:
            raise ValueError(f"a head named {name!r} is registered already: choose another name")
        _FACTORIES[name] = factory
        return factory

    return register


def list_heads(pattern: str = "*") -> list[str]:
    """Names of the registered heads that match a shell pattern, sorted.

    Example:
        >>> "gap" in list_heads()
        True
    """
    return sorted(name for name in _FACTORIES if fnmatch(name, pattern))


def create_head(name: str, in_channels: int, reduce: int | None = None, **options: Any) -> Head:
    """A head by name, for a feature map with ``in_channels`` channels.

    Args:
        name: one of :func:`list_heads`.
        in_channels: channels of the feature map.
        reduce: channels left by a 1 × 1 convolution in front; None for no reduction.
        options: of the head, see its class.

    Raises:
        ValueError: for an unknown name or an option that the head does not have, with near matches.

    Example:
        >>> import torch
        >>> head = create_head("mpncov+seb", in_channels=512, reduce=64)
        >>> head(torch.randn(2, 512, 14, 14)).shape, head.out_features
        (torch.Size([2, 2080]), 2080)
    """
    if name not in _FACTORIES:
        raise UnknownName("head", name, list_heads())
    try:
        return _FACTORIES[name](in_channels, reduce=reduce, **options)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        near = get_close_matches(unknown[1], inspect.signature(_FACTORIES[name]).parameters, n=2)
        raise ValueError(": ".join(filter(None, (f"head {name!r}: got an {unknown[0]}", did_you_mean(near))))) from error
