"""Gradients that are exact to the first order, and refuse to be differentiated again rather than be wrong."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.errors import SecondOrderError


class _FirstOrderOnly(torch.autograd.Function):
    """A gradient that depends in the graph on what it was computed from, with a derivative that raises.

    ``once_differentiable`` would not do: under ``torch.func`` it returns zeros in silence.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, upstream: Tensor, at: Tensor, who: str) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.who = inputs[3]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise SecondOrderError(
            f"{ctx.who} has no second derivative with respect to its input: newton_schulz is differentiable to any order"
        )


def first_order_only(value: Tensor, who: str, upstream: Tensor, at: Tensor) -> Tensor:
    """``value``, a gradient computed from the ``upstream`` one and the point ``at`` without recording how."""
    out: Tensor = _FirstOrderOnly.apply(value, upstream, at, who)
    return out


def graph_token(x: Tensor) -> Tensor:
    """An empty sum over x: a scalar that depends on x in the graph and keeps none of it in memory."""
    return x.narrow(-1, 0, 0).sum()
