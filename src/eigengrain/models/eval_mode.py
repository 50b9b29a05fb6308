"""Whether a model trains or answers: for a while, and back."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; afterwards every module has the mode it had, so that frozen ones stay frozen.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(3).eval(), nn.Dropout())
        >>> with evaluating(model):
        ...     model.training
        False
        >>> [module.training for module in model]
        [False, True]
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
