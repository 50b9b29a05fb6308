"""A scalar whose value and first derivative are known, as one node of the graph."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.functional._autograd import first_order_only


class _WithGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(at: Tensor, value: Tensor, slope: Tensor, name: str) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        at, _, slope, name = inputs
        ctx.save_for_backward(at, slope)
        ctx.function = name  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        at, slope = ctx.saved_tensors
        with torch.no_grad():
            value = grad.reshape(grad.shape + (1,) * (slope.ndim - grad.ndim)) * slope
        return first_order_only(value, ctx.function, grad, at), None, None, None


def with_gradient(at: Tensor, value: Tensor, slope: Tensor, name: str) -> Tensor:
    """``value`` (*) as a function of ``at`` with the derivative ``slope``, which has the shape of ``at`` (*, …)."""
    out: Tensor = _WithGradient.apply(at, value.detach(), slope.detach(), name)
    return out
