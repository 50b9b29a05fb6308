"""The class that is explained, in the forms that captum takes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError

Classes = int | Tensor | Sequence[int] | Sequence[tuple[int, ...]]


def read_classes(target: Classes, images: Tensor, num_classes: int | None = None, argument: str = "target") -> Tensor:
    """Classes (B,) from one class, or one per image: an integer, or a list or tensor of shape (), (1,), (B,) or (B, 1).

    They must be below ``num_classes`` if that is given.

    Example:
        >>> images = torch.zeros(2, 3, 8, 8)
        >>> read_classes(2, images), read_classes([(2,), (0,)], images)
        (tensor([2, 2]), tensor([2, 0]))
    """
    count = len(images)
    try:
        classes = torch.as_tensor(target, device=images.device)
    except (TypeError, ValueError, RuntimeError) as error:  # nothing that makes a tensor, or rows of different lengths
        raise ArgumentError(argument, f"must be one class, or one for each of {count} images", target) from error
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
        raise ArgumentError(argument, f"must be an integer, not {classes.dtype}")
    if classes.shape not in ((), (1,), (1, 1), (count,), (count, 1)):
        raise ArgumentError(argument, f"must be one class, or one for each of {count} images", tuple(classes.shape))
    if num_classes is not None and not bool(((classes >= 0) & (classes < num_classes)).all()):
        raise ArgumentError(argument, f"must be from 0 to {num_classes - 1}", target)
    return classes.long().flatten().expand(count)
