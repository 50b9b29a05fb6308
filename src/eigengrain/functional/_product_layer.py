"""Layers from features to the root of their covariance by matrix products alone, forward and backward."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.functional import products
from eigengrain.functional._first_order import first_order_only, graph_token
from eigengrain.functional._graphs import replayed
from eigengrain.functional._inputs import check_features, output_dtype
from eigengrain.functional.covariance import centre, covariance
from eigengrain.functional.iterative import check_steps, newton_schulz
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
    dx = torch.bmm(dp * (2 / math.sqrt(xc.shape[-1])), xc)
    return dx.sub_(dx.mean(-1, keepdim=True))


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


# --- Newton–Schulz -----------------------------------------------------------------------------------------------


def _iterate(xc: Tensor, steps: int) -> Tensor:
    p = torch.bmm(xc, xc.mT)
    trace = products.trace(p)
    scale = products.nonzero(trace)
    return torch.where(trace > 0, products.newton_schulz(p / scale, steps) * scale.sqrt(), 0.0)


@replayed
def _iterate_forward(xc: Tensor, *, steps: int) -> Tensor:
    return _iterate(xc, steps)


@replayed
def _iterate_backward(grad: Tensor, xc: Tensor, *, steps: int) -> Tensor:
    # the iterates are made again rather than kept: twelve products of d × d against six matrices a sample in memory
    with torch.enable_grad():
        xc = xc.detach().requires_grad_()
        (dx,) = torch.autograd.grad(_iterate(xc, steps), xc, grad)
    return (dx - dx.mean(-1, keepdim=True)) / math.sqrt(xc.shape[-1])


class _NewtonSchulzRoot(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, token: Tensor, q: Tensor, xc: Tensor, steps: int) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, token, _, xc, steps = inputs
        ctx.save_for_backward(token, xc)
        ctx.like = (x.shape, x.dtype, x.device, steps)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dtype, device, steps = ctx.like
        token, xc = ctx.saved_tensors
        with torch.no_grad():
            dx = _iterate_backward(grad.to(xc.dtype), xc, steps=steps)
        dx = dx.reshape(dx.shape[:-1] + shape[2:]).to(device, dtype)
        return first_order_only(dx, "isqrt_covariance", grad, token), None, None, None, None


def isqrt_covariance(x: Tensor, steps: int = 5) -> Tensor:
    r"""The covariance of features through k Newton–Schulz steps: iSQRT-COV as one layer.

    The value and the gradient are those of ``newton_schulz(covariance(x))``, computed in float64. On CUDA the products are
    replayed as a graph and the iterates made again in the backward pass; then a second derivative raises.

    Args:
        x: features, (B, C, H, W) or (B, C, N).
        steps: k, as in :func:`newton_schulz`.

    Returns:
        (B, C, C), float64 if x is float64 and float32 otherwise.

    Example:
        >>> x = torch.tensor([[[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 2.0, -2.0]]])
        >>> isqrt_covariance(x, steps=12).diagonal(dim1=1, dim2=2)
        tensor([[0.7071, 1.4142]])
    """
    check_features(x, "isqrt_covariance")
    check_steps(steps, "a number of steps", "isqrt_covariance")
    if not x.is_cuda:
        return newton_schulz(covariance(x, dtype=torch.float64), steps).to(output_dtype(x))
    with torch.no_grad():
        xc = centre(x)
        q = _iterate_forward(xc, steps=steps)
    out: Tensor = _NewtonSchulzRoot.apply(x, graph_token(x), q, xc, steps)
    return out.to(output_dtype(x))
