"""Square roots without an eigensolver: Newton–Schulz as published, the converged quintic iteration, Taylor and Padé.

The algebra without gradients is in ``matrix_products.py``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.errors import ArgumentError
from eigengrain.functional._autograd import finished_root, first_order_only
from eigengrain.functional._cuda.graphs import replayed, side_by_side
from eigengrain.functional.covariance import centre, covariance_in_range
from eigengrain.functional.inputs import (
    check_compute_dtype,
    check_features,
    check_integer,
    check_square,
    choose_dtype,
    full_precision,
    named_dtype,
    output_dtype,
    reduces_float32,
    to_compute,
)
from eigengrain.functional.matrix_products import (
    NEWTON_SCHULZ,
    Roots,
    inverse,
    kernels_on,
    logarithm,
    lyapunov,
    nonzero,
    norm,
    plus_identity,
    polynomial,
    quadratic,
    roots,
    sign_of_block,
    symmetric,
    trace,
)
from eigengrain.functional.scaling_eigen_branch import qs_by_products

#: with 50 steps, and 25 in float32, rounding makes the iteration diverge for singular P, where Z grows as 1.5^k
MOST_STEPS = 40


def _batched(P: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The symmetric part as (B, d, d) in the working precision."""
    return symmetric(to_compute(P, dtype)).reshape(-1, *P.shape[-2:])


def newton_schulz(P: Tensor, steps: int = 5, *, dtype: torch.dtype = torch.float64) -> Tensor:
    r"""The iterative square root of iSQRT-COV as published: k coupled Newton–Schulz steps on P divided by its trace.

    .. math:: Y_k = \tfrac12 Y_{k-1}(3I - Z_{k-1}Y_{k-1}),\quad Z_k = \tfrac12(3I - Z_{k-1}Y_{k-1})Z_{k-1},\quad
       Q \approx \sqrt{\mathrm{tr} P}\; Y_k

    With 5 steps it is not a square root: an eigenvalue of 1e-4 of the trace comes out at 8 % of its root. The gradient is
    that of the iteration, by automatic differentiation, to any order.

    Args:
        P: positive semi-definite (*, d, d).
        steps: k, from 1 to 40 (20 if computed in float32); with more, rounding makes the iteration diverge for singular P.
        dtype: precision of the products, float64 or float32. The result is float64 if P is float64 and float32 otherwise.

    Example:
        >>> newton_schulz(torch.eye(2) * 4, steps=10)
        tensor([[2., 0.],
                [0., 2.]])

    References:
        Li et al., Towards Faster Training of Global Covariance Pooling Networks by Iterative Matrix Square Root
        Normalization, CVPR 2018.
    """
    check_square(P)
    check_compute_dtype(dtype)
    if reduces_float32(P.device.type):
        dtype = torch.float64  # the backward products would be in TF32 or bfloat16, and no context here can prevent that
    dtype = torch.promote_types(dtype, output_dtype(P))
    check_integer(steps, "steps", MOST_STEPS if dtype == torch.float64 else MOST_STEPS // 2)
    p = _batched(P, dtype)
    size = trace(p)
    scale = nonzero(size)
    with full_precision(p):
        y = _iterate(p / scale, steps)
    return torch.where(size <= 0, 0.0, y * scale.sqrt()).reshape(P.shape).to(P.device, output_dtype(P))


def _iterate(a: Tensor, steps: int) -> Tensor:
    """A^½ by k coupled cubic steps, differentiable by autograd to any order; the last step needs no Z."""
    three_halves = 1.5 * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    h = three_halves - 0.5 * a
    y, z = torch.bmm(a, h), h
    for step in range(2, steps + 1):
        h = torch.baddbmm(three_halves, z, y, alpha=-0.5)
        y = torch.bmm(y, h)
        if step < steps:
            z = torch.bmm(h, z)
    return y


def _step_factor(y: Tensor, z: Tensor) -> Tensor:
    """½ (3 I − ZY)."""
    h = torch.bmm(z, y).mul_(-0.5)
    h.diagonal(dim1=-2, dim2=-1).add_(1.5)
    return h


@replayed
def _isqrt_forward(p: Tensor, *, steps: int) -> tuple[Tensor, ...]:
    """Q, then what the backward pass needs: A = P/tr P, the trace, and (Y, Z) before each step after the first."""
    scale = nonzero(trace(p))
    a = p / scale
    h = quadratic(a, NEWTON_SCHULZ)
    y, z = torch.bmm(a, h), h
    iterates = []
    for step in range(2, steps + 1):
        iterates += [y, z]
        h = _step_factor(y, z)
        y, z = torch.bmm(y, h), torch.bmm(h, z) if step < steps else z
    return y * scale.sqrt(), a, scale, *iterates


@replayed
def _isqrt_backward(grad: Tensor, q: Tensor, a: Tensor, scale: Tensor, *iterates: Tensor) -> Tensor:
    """∂l/∂P from ∂l/∂Q, step by step backwards; the factors are recomputed from the iterates."""
    g = symmetric(grad)
    gy, gz = g * scale.sqrt(), None
    for y, z in zip(iterates[-2::-2], iterates[::-2], strict=True):
        h = _step_factor(y, z)
        # Y′ = Y H and Z′ = H Z with H = ½(3I − ZY); all of them are symmetric
        gh = torch.bmm(y, gy) if gz is None else torch.baddbmm(torch.bmm(y, gy), gz, z)
        half = gh.mul(-0.5)
        gy, gz = (
            torch.baddbmm(torch.bmm(gy, h), z, half),
            torch.bmm(half, y) if gz is None else torch.baddbmm(torch.bmm(h, gz), half, y),
        )
    # the first step: Y = A H and Z = H with H = ½(3I − A)
    h = quadratic(a, NEWTON_SCHULZ)
    gh = torch.bmm(a, gy) if gz is None else torch.baddbmm(gz, a, gy)
    da = symmetric(torch.bmm(gy, h).sub_(gh, alpha=0.5))
    # Q = √t Y(P/t) depends on the trace t too
    dt = (g * q).sum((-2, -1)) / 2 - (da * a).sum((-2, -1))
    dp = da / scale
    dp.diagonal(dim1=-2, dim2=-1).add_(dt.unsqueeze(-1) / scale[..., 0])
    return dp


class _IsqrtRoot(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, q: Tensor, *saved: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, *saved = ctx.saved_tensors
        with torch.no_grad():
            dp = _isqrt_backward(grad, *saved)
        return first_order_only(dp, "isqrt_covariance", grad, p), *([None] * len(saved))


def isqrt(p: Tensor, steps: int) -> Tensor:
    """:func:`newton_schulz` of covariances (B, d, d) in their dtype; in float64 on CUDA as in :func:`isqrt_covariance`."""
    check_integer(steps, "steps", MOST_STEPS)
    if not p.is_cuda or p.dtype == torch.float32 or torch.compiler.is_compiling():
        return newton_schulz(p, steps, dtype=p.dtype)
    with torch.no_grad():
        q, *saved = _isqrt_forward(p.detach(), steps=steps)
    out: Tensor = _IsqrtRoot.apply(p, q, *saved)
    return out


#: up to this number of steps the error is below 2e-5 in float32, as is that of the gradient, at every condition number
_FLOAT32_STEPS = 10


def isqrt_dtype(dtype: torch.dtype | str, x: Tensor, steps: int) -> torch.dtype:
    """The working precision of :func:`isqrt_covariance`."""
    check_integer(steps, "steps", MOST_STEPS)
    if dtype == "auto":
        return choose_dtype(x.device, x.dtype) if steps <= _FLOAT32_STEPS else torch.float64
    return named_dtype(dtype)


def isqrt_covariance(x: Tensor, steps: int = 5, *, dtype: torch.dtype | str = "auto") -> Tensor:
    r"""The covariance of features through k Newton–Schulz steps: iSQRT-COV as one layer.

    The value and the gradient are those of ``newton_schulz(covariance(x))``. In float64 on CUDA the products are replayed
    as a graph with a backward pass of their own; a second derivative then raises.

    Args:
        x: features, (B, C, H, W) or (B, C, N).
        steps: k, as in :func:`newton_schulz`.
        dtype: working precision, ``torch.float64`` or ``torch.float32``, also as ``"float64"`` or ``"float32"``. ``"auto"``
            is the rule of :func:`choose_dtype`, and float64 for more than 10 steps, which enlarge rounding errors.

    Example:
        >>> x = torch.tensor([[[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 2.0, -2.0]]])
        >>> isqrt_covariance(x, steps=12).diagonal(dim1=1, dim2=2)
        tensor([[0.7071, 1.4142]])
    """
    check_features(x)
    p, scale = covariance_in_range(x, isqrt_dtype(dtype, x, steps))
    q = isqrt(p, steps)
    return (q if scale is None else q * scale).to(output_dtype(x))


class _QuinticRoot(torch.autograd.Function):
    """The converged root with its converged Lyapunov gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, y: Tensor, z: Tensor, scale: Tensor, far: Tensor) -> Tensor:
        return y * scale.sqrt()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, *root = ctx.saved_tensors
        with torch.no_grad():
            dp, _ = lyapunov(Roots(*root), grad)
        return first_order_only(dp, "quintic_sqrt", grad, p), None, None, None, None


def quintic_sqrt(P: Tensor) -> Tensor:
    r"""The converged square root of positive semi-definite P (*, d, d) by matrix products alone, in float64.

    There are up to 15 coupled quintic steps, and the gradient solves the Lyapunov equation.

    It needs no eigensolver, so it exports, compiles into one graph and runs at the speed of matrix products. Compared with
    the eigendecomposition at condition number 1e10 its error is 1e-11 forward and 1e-8 in the gradient to the features, at
    1e12 it is 1e-10 and 1e-6. Eigenvalues below 1e-12 of the trace do not converge: their roots come out too small by up to
    1e-6 of the largest, and in the gradient they count as σ = 1.2e-7 of the root of the trace, so that between two null
    directions it is large instead of the 0 of :func:`matrix_sqrt`. Multiplied with features that block vanishes.

    Example:
        >>> quintic_sqrt(torch.diag(torch.tensor([4.0, 9.0]))).diagonal()
        tensor([2., 3.])
    """
    check_square(P)
    p = _batched(P)
    with torch.no_grad():
        root = roots(p)
    q: Tensor = _QuinticRoot.apply(p, *root)
    return q.reshape(P.shape).to(P.device, output_dtype(P))


#: s² relative to tr P from which its gradient is used. Below it the rounding of the slope could exceed ‖∂s/∂X_c‖ ≤ 1
_SMALLEST_SQUARE = 1e-12


@replayed
def _forward(p: Tensor, *, seb: bool) -> tuple[Tensor, ...]:
    """Q or A, and what the backward pass needs: the normalised roots with their scale, then s and its slope."""
    if not seb:
        root = roots(p)
        return root.y * root.scale.sqrt(), *root
    root, (s, slope) = side_by_side(lambda: roots(p), lambda: qs_by_products(p), device_of=p)
    slope = torch.where(s[:, None, None].square() > _SMALLEST_SQUARE * root.scale, slope, 0.0)
    return root.y * ((1 + s)[:, None, None] * root.scale.sqrt()), *root, s, slope


@replayed
def _backward(grad: Tensor, y: Tensor, z: Tensor, scale: Tensor, far: Tensor, *branch: Tensor, positions: int) -> Tensor:
    """2/√N ∂l/∂P from ∂l/∂Q, or from ∂l/∂A if s and its slope are given."""
    times, root = 2 / math.sqrt(positions), Roots(y, z, scale, far)
    if not branch:
        return lyapunov(root, grad, times)[0]
    s, slope = branch
    dp, product = lyapunov(root, grad, times * (1 + s)[:, None, None])
    return torch.addcmul(dp, slope, times * product[:, None, None] * scale.sqrt())  # <G, Q> ∂s/∂P


def _gradient(grad: Tensor, dtype: torch.dtype, xc: Tensor, *saved: Tensor) -> Tensor:
    dx = torch.bmm(_backward(grad, *saved, positions=xc.shape[-1]), xc)
    if kernels := kernels_on(dx):
        return kernels.centre(dx, dtype, scale=False)
    return dx.sub_(dx.mean(-1, keepdim=True))


def root_by_products(x: Tensor, seb: bool) -> Tensor:
    """Q or A (B, d, d) in float64 from features (B, C, …), with gradient, by the quintic iteration."""
    with torch.no_grad():
        kernels = kernels_on(x)
        xc = centre(x) if kernels is None else kernels.centre(x.detach(), torch.float64, scale=True)
        a, *saved = _forward(torch.bmm(xc, xc.mT), seb=seb)
    return finished_root(x, a, _gradient, xc, *saved)


#: features above it have no eigenvalue for which e^{−2λ} is not 0, and squares below it stay in the range of float32
LARGEST_SCALE = 2.0**40


#: the published backward pass of MPA and MTP: eight cubic steps
LYAPUNOV_STEPS = 8


class _RootWithLyapunov(torch.autograd.Function):
    """A finished root Q with the gradient X of QX + XQ = sym(G), by the published number of cubic steps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, q, scale = ctx.saved_tensors
        with torch.no_grad():
            steps = (NEWTON_SCHULZ,) * LYAPUNOV_STEPS
            dp = sign_of_block(q / scale, symmetric(grad), steps)[1] / (2 * scale)
        return first_order_only(dp, "the Lyapunov gradient of a square root", grad, p), None, None


def root_with_lyapunov(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """Attach the published Lyapunov gradient to a root ``q`` of ``p`` with eigenvalues of at most ``scale`` (B, 1, 1)."""
    out: Tensor = _RootWithLyapunov.apply(p, q.detach(), scale.detach())
    return out


def _published_approximant(P: Tensor, root: Callable[[Tensor], Tensor]) -> Tensor:
    check_square(P)
    p = _batched(P)
    with torch.no_grad():
        size = norm(p)
        scale = nonzero(size)
        # I − P/‖P‖_F: the approximants expand √(1 − z) about z = 0
        q = torch.where(size == 0, 0.0, root(plus_identity(-p / scale, 1.0)) * scale.sqrt())
    return root_with_lyapunov(p, q, scale.sqrt()).reshape(P.shape).to(P.device, output_dtype(P))


def taylor_coefficients(degree: int) -> list[float]:
    """Coefficients of √(1 − z) in ascending order: 1, −1/2, −1/8, …"""
    coefficients = [1.0]
    for k in range(1, degree + 1):
        coefficients.append(coefficients[-1] * (k - 1.5) / k)
    return coefficients


def pade_coefficients(degree: int) -> tuple[list[float], list[float]]:
    r"""Numerator and denominator of the diagonal Padé approximant of √(1 − z), in ascending order.

    From its partial fractions, :math:`1 - \sum_j a_j z/(1 - b_j z)` with :math:`a_j = \frac{2}{2m+1}\sin^2\theta_j`,
    :math:`b_j = \cos^2\theta_j`, :math:`\theta_j = j\pi/(2m+1)`.
    """

    def times_linear(polynomial: list[float], b: float) -> list[float]:  # (1 − b z) · polynomial
        return [x - b * y for x, y in zip([*polynomial, 0.0], [0.0, *polynomial], strict=True)]

    angles = [j * math.pi / (2 * degree + 1) for j in range(1, degree + 1)]
    poles = [math.cos(t) ** 2 for t in angles]
    denominator = [1.0]
    for b in poles:
        denominator = times_linear(denominator, b)
    numerator = denominator.copy()
    for j, angle in enumerate(angles):
        term = [2 / (2 * degree + 1) * math.sin(angle) ** 2]
        for i, b in enumerate(poles):
            if i != j:
                term = times_linear(term, b)
        for k, value in enumerate(term):
            numerator[k + 1] -= value
    return numerator, denominator


#: the largest degrees: more terms of the series change nothing, and above 12 rounding in the Padé denominator, whose
#: condition number is 4^m, exceeds 1e-5
MTP_DEGREES, MPA_DEGREES = 1000, 12


def mtp_sqrt(P: Tensor, degree: int = 10) -> Tensor:
    r"""Matrix Taylor polynomial (MTP): :math:`\sqrt{\|P\|_F}` times the series of :math:`(I - Z)^{1/2}`, Z = I − P/‖P‖_F.

    The gradient is the published one, eight cubic Lyapunov steps with the approximate root. The degree is at most 1000.

    Example:
        >>> mtp_sqrt(torch.eye(1) * 4)
        tensor([[2.]])

    References:
        Song et al., Fast Differentiable Matrix Square Root, ICLR 2022.
    """
    check_integer(degree, "degree", MTP_DEGREES)
    return _published_approximant(P, lambda z: polynomial(z, taylor_coefficients(degree)))


def mpa_sqrt(P: Tensor, degree: int = 5) -> Tensor:
    r"""Matrix Padé approximant (MPA): the diagonal [m/m] approximant of :math:`(I - Z)^{1/2}`.

    From the same paper and with the same gradient as :func:`mtp_sqrt`. The published linear solve with the denominator is
    replaced by an inversion by products: its eigenvalues are between :math:`(2m+1)/4^m` and 1, so the number of Newton
    steps is fixed. The degree is at most 12: rounding grows as :math:`4^m`.

    Example:
        >>> mpa_sqrt(torch.eye(1) * 4)
        tensor([[2.]])
    """
    check_integer(degree, "degree", MPA_DEGREES)
    numerator, denominator = pade_coefficients(degree)

    def root(z: Tensor) -> Tensor:
        inverted = inverse(polynomial(z, denominator), (2 * degree + 1) / 4**degree)
        return symmetric(torch.bmm(inverted, polynomial(z, numerator)))

    return _published_approximant(P, root)


def log_products(P: Tensor) -> Tensor:
    """log P by matrix products, without gradient; the relative error is 1e-8 at condition number 1e10.

    It is for export, where no eigensolver is available; use :func:`eigengrain.functional.matrix_log` for training.
    """
    check_square(P)
    if torch.is_grad_enabled() and P.requires_grad:
        problem = "must not require a gradient, which the logarithm by products lacks"
        raise ArgumentError("P", problem, remedy="train with solver='auto'")
    return logarithm(_batched(P)).reshape(P.shape).to(P.device, output_dtype(P))
