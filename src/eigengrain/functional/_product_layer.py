"""Layers from features to the root of their covariance by matrix products alone, forward and backward."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.functional import matrix_products as products
from eigengrain.functional._autograd import first_order_only, graph_token
from eigengrain.functional._cuda.graphs import replayed, side_by_side
from eigengrain.functional.covariance import centre, covariance
from eigengrain.functional.inputs import check_features, output_dtype
from eigengrain.functional.newton_schulz import check_steps, newton_schulz
from eigengrain.functional.scaling_eigen_branch import qs_by_products


@replayed
def _forward(xc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, and what the backward pass needs: the normalised roots and their scale."""
    of = products.roots(xc @ xc.mT)
    return of.y * of.scale.sqrt(), *of


@replayed
def _forward_seb(xc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    p = xc @ xc.mT
    of, (s, slope) = side_by_side(lambda: products.roots(p), lambda: qs_by_products(p), where=p)
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
    """A finished root with its gradient. The arguments are spelt out: compilers misread a variable number of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        token: Tensor,
        a: Tensor,
        xc: Tensor,
        y: Tensor,
        z: Tensor,
        scale: Tensor,
        s: Tensor | None,
        slope: Tensor | None,
    ) -> Tensor:
        return a.clone()  # a view could not be written to by the caller

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, token, _, *saved = inputs
        ctx.save_for_backward(token, *saved)
        ctx.like = (x.shape, x.dtype, x.device)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dtype, device = ctx.like
        token, xc, y, z, scale, s, slope = ctx.saved_tensors
        with torch.no_grad():
            g = grad.to(xc.dtype)
            dx = _backward(g, xc, y, z, scale) if s is None else _backward_seb(g, xc, y, z, scale, s, slope)
        dx = dx.reshape(dx.shape[:-1] + shape[2:]).to(device, dtype)
        return first_order_only(dx, "sqrt_covariance", grad, token), None, None, None, None, None, None, None, None


def root_by_products(x: Tensor, seb: bool) -> Tensor:
    """Q or A (B, d, d) in float64 from features (B, C, …), with gradient."""
    with torch.no_grad():
        xc = centre(x)
        a, *saved = _forward_seb(xc) if seb else (*_forward(xc), None, None)
    out: Tensor = _ProductRoot.apply(x, graph_token(x), a, xc, *saved)
    return out


# --- Newton–Schulz -----------------------------------------------------------------------------------------------


def _normalised(xc: Tensor) -> tuple[Tensor, Tensor]:
    """The covariance over its trace, and the trace (B, 1, 1), 1 for a zero covariance."""
    p = torch.bmm(xc, xc.mT)
    scale = products.nonzero(products.trace(p))
    return p / scale, scale


@replayed
def _iterate_forward(xc: Tensor, *, steps: int) -> tuple[Tensor, ...]:
    """Q, then what the backward pass needs: A, its scale, and the iterates."""
    a, scale = _normalised(xc)
    iterates = products.newton_schulz_iterates(a, steps)
    flat = [matrix for pair in iterates[:-1] for matrix in pair]
    return iterates[-1][0] * scale.sqrt(), a, scale, *flat


@replayed
def _iterate_backward(grad: Tensor, xc: Tensor, q: Tensor, a: Tensor, scale: Tensor, *flat: Tensor) -> Tensor:
    g = products.symmetric(grad)
    iterates = [*zip(flat[::2], flat[1::2], strict=True), (q, q)]
    da = products.newton_schulz_adjoint(a, iterates, g * scale.sqrt())
    # Q = √t Y(P/t): the trace t has a share of its own
    dt = (g * q).sum((-2, -1)) / 2 - (da * a).sum((-2, -1))
    dp = da / scale
    dp.diagonal(dim1=-2, dim2=-1).add_(dt.unsqueeze(-1) / scale[..., 0])
    return _to_features(dp, xc)


class _NewtonSchulzRoot(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, token: Tensor, q: Tensor, *saved: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, token, q, xc, *rest = inputs
        ctx.save_for_backward(token, xc, q, *rest)
        ctx.like = (x.shape, x.dtype, x.device)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dtype, device = ctx.like
        token, *saved = ctx.saved_tensors
        with torch.no_grad():
            dx = _iterate_backward(grad.to(saved[0].dtype), *saved)
        dx = dx.reshape(dx.shape[:-1] + shape[2:]).to(device, dtype)
        return first_order_only(dx, "isqrt_covariance", grad, token), *([None] * (len(saved) + 1))


def isqrt_covariance(x: Tensor, steps: int = 5) -> Tensor:
    r"""The covariance of features through k Newton–Schulz steps: iSQRT-COV as one layer.

    The value and the gradient are those of ``newton_schulz(covariance(x))``, computed in float64. On CUDA the products are
    replayed as a graph with a backward pass of their own; then a second derivative raises.

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
    if not x.is_cuda or torch.compiler.is_compiling():
        return newton_schulz(covariance(x, dtype=torch.float64), steps).to(output_dtype(x))
    with torch.no_grad():
        xc = centre(x)
        q, *saved = _iterate_forward(xc, steps=steps)
    out: Tensor = _NewtonSchulzRoot.apply(x, graph_token(x), q, xc, *saved)
    return out.to(output_dtype(x))
