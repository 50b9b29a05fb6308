"""A scalar whose value and first derivative are known, as one node of the graph."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.functional.eigen import second_order_error


class _WithGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(at: Tensor, value: Tensor, slope: Tensor, name: str) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        at, _, slope, name = inputs
        ctx.save_for_backward(at, slope)
        ctx.name = name  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        at, slope = ctx.saved_tensors
        return _Slope.apply(grad, at, slope, ctx.name), None, None, None


class _Slope(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, at: Tensor, slope: Tensor, name: str) -> Tensor:
        return grad.reshape(grad.shape + (1,) * (slope.ndim - grad.ndim)) * slope

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.event_dims = inputs[2].ndim - inputs[0].ndim  # type: ignore[attr-defined]
        ctx.name = inputs[3]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.needs_input_grad[1]:
            raise second_order_error(ctx.name)
        (slope,) = ctx.saved_tensors
        return (grad * slope).flatten(-ctx.event_dims).sum(-1), None, None, None


def with_gradient(at: Tensor, value: Tensor, slope: Tensor, name: str) -> Tensor:
    """``value`` (*) as a function of ``at`` with the derivative ``slope``, which has the shape of ``at`` (*, …)."""
    out: Tensor = _WithGradient.apply(at, value.detach(), slope.detach(), name)
    return out
