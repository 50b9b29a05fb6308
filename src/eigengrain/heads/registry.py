"""Heads by name."""

import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any, TypeVar

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.heads.base import Head, TransformerHead

Factory = Callable[..., Head]
F = TypeVar("F", bound=Factory)

_FACTORIES: dict[str, Factory] = {}
_STAGES: dict[str, int] = {}


def register_head(name: str, stages: int = 1) -> Callable[[F], F]:
    """Register a head class, or a function that returns a head, under a new name.

    ``stages`` is the number of last stages of a backbone whose maps the head pools together by default.

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
        >>> _ = _FACTORIES.pop("first-position"), _STAGES.pop("first-position")
    """

    def register(factory: F) -> F:
        if name in _FACTORIES:
            raise ArgumentError("name", "is already the name of a head", name, "choose another name")
        _FACTORIES[name], _STAGES[name] = factory, stages
        return factory

    return register


def list_heads(pattern: str = "*", any_backbone: bool = False) -> list[str]:
    """Names of the registered heads that match a shell pattern, sorted.

    With ``any_backbone``, heads that need a vision transformer (:class:`TransformerHead`) are left out.

    Example:
        >>> list_heads("gm*")
        ['gmp']
    """
    names = sorted(name for name in _FACTORIES if fnmatch(name, pattern))
    return [name for name in names if not (any_backbone and isinstance(create_head(name, 4), TransformerHead))]


def default_stages(name: str) -> int:
    """Number of stages whose maps a head pools together, unless a model is created with another ``stages``."""
    return _STAGES.get(name, 1)  # a model without pooling has no head


def create_head(name: str, in_channels: int | Sequence[int], reduce: int | None = None, **options: Any) -> Head:
    """Create a head by name, for a feature map with ``in_channels`` channels.

    Args:
        name: one of :func:`list_heads`.
        in_channels: channels of the feature map; for the stacked maps of several stages the channels of each.
        reduce: number of channels after a 1 × 1 convolution; None for no reduction.
        options: further arguments of the head, see its class.

    Raises:
        UnknownName: for an unknown head, or an option that the head does not have.
        ArgumentError: for an option with a bad value.

    Example:
        >>> import torch
        >>> head = create_head("mpncov+seb", in_channels=512, reduce=64)
        >>> head(torch.randn(2, 512, 14, 14)).shape, head.out_features
        (torch.Size([2, 2080]), 2080)
    """
    if name not in _FACTORIES:
        raise UnknownName("head", name, list_heads())
    parameters = inspect.signature(_FACTORIES[name]).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        choices = [parameter for parameter in parameters if parameter not in ("in_channels", "reduce")]
        for option in options:
            if option not in choices:
                raise UnknownName(f"option of head {name!r}", option, choices)
    return _FACTORIES[name](in_channels, reduce=reduce, **options)
