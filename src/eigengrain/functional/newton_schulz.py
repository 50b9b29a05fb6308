"""Square roots by iteration and by approximation: Newton–Schulz, the converged quintic, Taylor and Padé.

They need no eigensolver; the products themselves are in ``products.py``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.functional import matrix_products as products
from eigengrain.functional._autograd import first_order_only
from eigengrain.functional.inputs import (
    check_compute_dtype,
    check_square,
    full_precision,
    output_dtype,
    to_compute,
)

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
            steps = (products.NEWTON_SCHULZ,) * LYAPUNOV_STEPS
            dp = products.sign_of_block(q / scale, products.symmetric(grad), steps)[1] / (2 * scale)
        return first_order_only(dp, "the Lyapunov gradient of a square root", grad, p), None, None


def root_with_lyapunov(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """Attach the published Lyapunov gradient to a root ``q`` of ``p`` with eigenvalues of at most ``scale`` (B, 1, 1)."""
    out: Tensor = _RootWithLyapunov.apply(p, q.detach(), scale.detach())
    return out


class _QuinticRoot(torch.autograd.Function):
    """The converged root with its converged Lyapunov gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, y: Tensor, z: Tensor, scale: Tensor) -> Tensor:
        return y * scale.sqrt()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, *roots = ctx.saved_tensors
        with torch.no_grad():
            dp = products.lyapunov(products.Roots(*roots), products.symmetric(grad))
        return first_order_only(dp, "quintic_sqrt", grad, p), None, None, None


def _batched(P: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The symmetric part as (B, d, d) in the working precision."""
    return products.symmetric(to_compute(P, dtype)).reshape(-1, *P.shape[-2:])


def check_steps(value: int, what: str, who: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{who} needs {what} of at least 1, got {value!r}")


def newton_schulz(P: Tensor, steps: int = 5, *, dtype: torch.dtype = torch.float64) -> Tensor:
    r"""The iterative square root of iSQRT-COV as published: k coupled Newton–Schulz steps on P divided by its trace.

    .. math:: Y_k = \tfrac12 Y_{k-1}(3I - Z_{k-1}Y_{k-1}),\quad Z_k = \tfrac12(3I - Z_{k-1}Y_{k-1})Z_{k-1},\quad
       Q \approx \sqrt{\mathrm{tr} P}\; Y_k

    With 5 steps it is no square root: an eigenvalue of 1e-4 of the trace comes out at 8 % of its root. The gradient is
    that of the iteration, by automatic differentiation, to any order.

    Args:
        P: positive semi-definite (*, d, d).
        steps: k.
        dtype: the products are in float64 unless float32 is asked for.

    Returns:
        (*, d, d), float64 if P is float64 and float32 otherwise.

    Example:
        >>> newton_schulz(torch.eye(2) * 4, steps=10)
        tensor([[2., 0.],
                [0., 2.]])

    References:
        Li et al., Towards Faster Training of Global Covariance Pooling Networks by Iterative Matrix Square Root
        Normalization, CVPR 2018.
    """
    check_square(P, "newton_schulz")
    check_compute_dtype(dtype, "newton_schulz")
    check_steps(steps, "a number of steps", "newton_schulz")
    if P.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        dtype = torch.float64  # the backward products would be TF32: a switch that no context here can hold for them
    p = _batched(P, torch.promote_types(dtype, output_dtype(P)))
    trace = products.trace(p)
    scale = products.nonzero(trace)
    with full_precision(p):
        y = products.newton_schulz(p / scale, steps)
    return torch.where(trace <= 0, 0.0, y * scale.sqrt()).reshape(P.shape).to(P.device, output_dtype(P))


def quintic_sqrt(P: Tensor) -> Tensor:
    r"""The converged square root by matrix products alone, in float64: 13 coupled quintic steps, Lyapunov gradient.

    It needs no eigensolver, so it exports, compiles into one graph and runs at the speed of matrix products. Against
    the eigendecomposition at condition number 1e10 it errs by 1e-11 forward and 1e-8 in the gradient to the features, at
    1e12 by 1e-10 and 1e-6. Eigenvalues below 1e-12 of the trace do not converge: their roots come out too small by up to
    1e-6 of the largest, and in the gradient they count as σ = 1.2e-7 of the root of the trace, so that between two null
    directions it is large instead of the 0 of :func:`matrix_sqrt`. Multiplied back to features that block vanishes.

    Args:
        P: positive semi-definite (*, d, d).

    Returns:
        (*, d, d), float64 if P is float64 and float32 otherwise.

    Example:
        >>> quintic_sqrt(torch.diag(torch.tensor([4.0, 9.0]))).diagonal()
        tensor([2., 3.])
    """
    check_square(P, "quintic_sqrt")
    p = _batched(P)
    with torch.no_grad():
        roots = products.roots(p)
    q: Tensor = _QuinticRoot.apply(p, *roots)
    return q.reshape(P.shape).to(P.device, output_dtype(P))


def _published_approximant(P: Tensor, who: str, root: Callable[[Tensor], Tensor]) -> Tensor:
    check_square(P, who)
    p = _batched(P)
    with torch.no_grad():
        norm = products.norm(p)
        scale = products.nonzero(norm)
        # I − P/‖P‖_F: the approximants expand √(1 − z) about z = 0
        q = torch.where(norm == 0, 0.0, root(products.plus_identity(-p / scale, 1.0)) * scale.sqrt())
    return root_with_lyapunov(p, q, scale.sqrt()).reshape(P.shape).to(P.device, output_dtype(P))


def taylor_coefficients(degree: int) -> list[float]:
    """Of √(1 − z) in ascending order: 1, −1/2, −1/8, …"""
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


def mtp_sqrt(P: Tensor, degree: int = 10) -> Tensor:
    r"""Matrix Taylor polynomial (MTP): :math:`\sqrt{\|P\|_F}` times the series of :math:`(I - Z)^{1/2}`, Z = I − P/‖P‖_F.

    The gradient is the published one, eight cubic Lyapunov steps with the approximate root.

    Example:
        >>> mtp_sqrt(torch.eye(1) * 4)
        tensor([[2.]])

    References:
        Song et al., Fast Differentiable Matrix Square Root, ICLR 2022.
    """
    check_steps(degree, "a degree", "mtp_sqrt")
    return _published_approximant(P, "mtp_sqrt", lambda z: products.polynomial(z, taylor_coefficients(degree)))


def mpa_sqrt(P: Tensor, degree: int = 5) -> Tensor:
    r"""Matrix Padé approximant (MPA): the diagonal [m/m] approximant of :math:`(I - Z)^{1/2}`.

    The published linear solve with the denominator is an inversion by products here: its eigenvalues lie between
    :math:`(2m+1)/4^m` and 1, so that the number of Newton steps is known. The gradient is the published one, eight cubic
    Lyapunov steps with the approximate root.

    Example:
        >>> mpa_sqrt(torch.eye(1) * 4)
        tensor([[2.]])

    References:
        Song et al., Fast Differentiable Matrix Square Root, ICLR 2022.
    """
    check_steps(degree, "a degree", "mpa_sqrt")
    numerator, denominator = pade_coefficients(degree)
    return _published_approximant(
        P,
        "mpa_sqrt",
        lambda z: products.symmetric(
            torch.bmm(
                products.inverse(products.polynomial(z, denominator), (2 * degree + 1) / 4**degree),
                products.polynomial(z, numerator),
            )
        ),
    )


def log_products(P: Tensor) -> Tensor:
    """log P by matrix products, without gradient, for condition numbers up to 1e6.

    It is for export, where no eigensolver is; training takes :func:`eigengrain.functional.matrix_log`.
    """
    check_square(P, "log_products")
    if torch.is_grad_enabled() and P.requires_grad:
        raise ValueError("the logarithm by matrix products has no gradient: train with solver='auto'")
    return products.logarithm(_batched(P)).reshape(P.shape).to(P.device, output_dtype(P))
