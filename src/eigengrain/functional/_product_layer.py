"""The layer from features to the root of their covariance by matrix products alone, forward and backward."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.functional import products
from eigengrain.functional._first_order import first_order_only, graph_token
from eigengrain.functional._graphs import replayed
from eigengrain.functional.covariance import centre
from eigengrain.functional.scaling import qs_by_products


@replayed
def _forward(xc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, and what the backward pass needs: the normalised roots and their scale."""
    of = products.roots(xc @ xc.mT)
    return of.y * of.scale.sqrt(), *of


@replayed
def _forward_seb(xc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    p = xc @ xc.mT
    of = products.roots(p)
    s, slope = qs_by_products(p)
    return of.y * ((1 + s)[:, None, None] * of.scale.sqrt()), *of, s, slope


@replayed
def _backward(grad: Tensor, xc: Tensor, y: Tensor, z: Tensor, scale: Tensor) -> Tensor:
    return _to_features(products.lyapunov(products.Roots(y, z, scale), products.symmetric(grad)), xc)


@replayed
def _backward_seb(grad: Tensor, xc: Tensor, y: Tensor, z: Tensor, scale: Tensor, s: Tensor, slope: Tensor) -> Tensor:
    g = products.symmetric(grad)
    along = (g * y).sum((-2, -1), keepdim=True) * scale.sqrt()  # <G, Q>
    dp = products.lyapunov(products.Roots(y, z, scale), g * (1 + s)[:, None, None]) + along * slope
    return _to_features(dp, xc)


def _to_features(dp: Tensor, xc: Tensor) -> Tensor:
    dx = torch.bmm(dp, xc)
    return (dx - dx.mean(-1, keepdim=True)) * (2 / math.sqrt(xc.shape[-1]))


class _ProductRoot(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, token: Tensor, a: Tensor, *saved: Tensor) -> Tensor:
        return a.view_as(a)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, token, _, *saved = inputs
        ctx.save_for_backward(token, *saved)
        ctx.like = (x.shape, x.dtype, x.device)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dtype, device = ctx.like
        token, *saved = ctx.saved_tensors
        with torch.no_grad():
            step = _backward if len(saved) == 4 else _backward_seb
            dx = step(grad.to(saved[0].dtype), *saved)
        dx = dx.reshape(dx.shape[:-1] + shape[2:]).to(device, dtype)
        return first_order_only(dx, "sqrt_covariance", grad, token), *([None] * (len(saved) + 2))


def root_by_products(x: Tensor, seb: bool) -> Tensor:
    """Q or A (B, d, d) in float64 from features (B, C, …), with gradient."""
    with torch.no_grad():
        xc = centre(x)
        a, *saved = _forward_seb(xc) if seb else _forward(xc)
    out: Tensor = _ProductRoot.apply(x, graph_token(x), a, xc, *saved)
    return out
