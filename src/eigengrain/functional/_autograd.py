"""Gradients that are exact to the first order and raise when they are differentiated again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.errors import SecondOrderError


class _FirstOrderOnly(torch.autograd.Function):
    """A gradient that depends on its inputs in the graph, with a derivative that raises.

    ``once_differentiable`` does not suffice: under ``torch.func`` it returns zeros without an error.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, upstream: Tensor, at: Tensor, function: str) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[3]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        message = f"{ctx.function} has no second derivative; newton_schulz has derivatives of any order"
        raise SecondOrderError(message, ctx.function)


def first_order_only(value: Tensor, function: str, upstream: Tensor, at: Tensor) -> Tensor:
    """``value``, a gradient computed without recording from the ``upstream`` gradient and the point ``at``."""
    out: Tensor = _FirstOrderOnly.apply(value, upstream, at, function)
    return out


def graph_token(x: Tensor) -> Tensor:
    """An empty sum over x: a scalar that depends on x in the graph and keeps none of it in memory."""
    return x.narrow(-1, 0, 0).sum()


class _WithGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(at: Tensor, value: Tensor, slope: Tensor, function: str) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        at, _, slope, function = inputs
        ctx.save_for_backward(at, slope)
        ctx.function = function  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        at, slope = ctx.saved_tensors
        with torch.no_grad():
            value = grad.reshape(grad.shape + (1,) * (slope.ndim - grad.ndim)) * slope
        return first_order_only(value, ctx.function, grad, at), None, None, None


def with_gradient(at: Tensor, value: Tensor, slope: Tensor, function: str) -> Tensor:
    """A scalar ``value`` (*) as a function of ``at`` (*, …) whose derivative is ``slope`` (*, …)."""
    out: Tensor = _WithGradient.apply(at, value.detach(), slope.detach(), function)
    return out


class _Finished(torch.autograd.Function):
    """See :func:`finished_root`. The tensors are listed one by one because compilers misread a variable number of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        token: Tensor,
        value: Tensor,
        gradient: Callable[..., Tensor],
        a: Tensor | None,
        b: Tensor | None,
        c: Tensor | None,
        d: Tensor | None,
        e: Tensor | None,
        f: Tensor | None,
        g: Tensor | None,
    ) -> Tensor:
        return value.clone()  # the caller could not write to a view

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, token, _, gradient, *saved = inputs
        ctx.save_for_backward(token, *saved)
        ctx.like = (gradient, x.shape, x.dtype, x.device)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradient, shape, dtype, device = ctx.like
        token, *saved = ctx.saved_tensors
        with torch.no_grad():
            dx = gradient(grad, dtype, *(t for t in saved if t is not None))
        dx = dx.reshape(dx.shape[:-1] + shape[2:]).to(device, dtype)
        return first_order_only(dx, "sqrt_covariance", grad, token), *([None] * 10)


def finished_root(x: Tensor, value: Tensor, gradient: Callable[..., Tensor], *saved: Tensor) -> Tensor:
    """A finished ``value`` (B, d, d) of features (B, C, …), with a gradient.

    ``gradient`` returns ∂l/∂x (B, C, N) from ∂l/∂value, the dtype of x, and the ``saved`` tensors, at most seven.
    """
    out: Tensor = _Finished.apply(x, graph_token(x), value, gradient, *saved, *([None] * (7 - len(saved))))
    return out
