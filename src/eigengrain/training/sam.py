"""Sharpness-aware minimisation (Foret et al., ICLR 2021)."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import get_total_norm


@torch.no_grad()
def sharpen(model: nn.Module, rho: float, backward: Callable[[], object]) -> None:
    r"""Replace the gradients g at the weights w by those at weights nearby where the loss is larger.

    .. math:: g \leftarrow \nabla L\Big(w + \rho\, \frac{g}{\|g\|}\Big)

    The norm is that of all gradients together. Weights and buffers, such as batch statistics, stay as they are.

    Args:
        model: with its gradients.
        rho: ρ, the distance.
        backward: computes the loss of the same batch again, and its gradients, which are added to ``.grad``.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(2.0)
        >>> backward = lambda: model.weight.square().sum().backward()  # the gradient is 2 w
        >>> backward()
        >>> sharpen(model, 0.5, backward)
        >>> model.weight.item(), model.weight.grad.item()
        (2.0, 5.0)
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    scale = rho / get_total_norm(gradients).clamp_min(1e-12)
    kept = [(tensor, tensor.clone()) for tensor in (*parameters, *model.buffers())]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(gradient * scale)
        parameter.grad = None
    try:
        with torch.enable_grad():
            backward()
    finally:
        for tensor, value in kept:
            tensor.copy_(value)
