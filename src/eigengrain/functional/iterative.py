r"""Square roots by matrix products alone: Newton–Schulz, its converged quintic relative, Taylor and Padé approximants.

All are one iteration with different coefficients. With :math:`h(t) = a + b\,t + c\,t^2`, the coupled iteration
:math:`Y \leftarrow Y\,h(ZY),\ Z \leftarrow h(ZY)\,Z` takes (A, I) to :math:`(A^{1/2}, A^{-1/2})` because
:math:`x\,h(x^2)` drives every x in (0, 1] to 1. The same polynomial applied to the block matrix
:math:`\begin{pmatrix} Q & G \\ 0 & -Q \end{pmatrix}` solves the Lyapunov equation of the gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.functional._first_order import first_order_only
from eigengrain.functional._inputs import (
    check_compute_dtype,
    check_square,
    full_precision,
    output_dtype,
    to_compute,
)

Coefficients = tuple[tuple[float, float, float], ...]

NEWTON_SCHULZ = (1.5, -0.5, 0.0)

#: Each row minimises max |1 − x h(x²)| over the interval that the row before leaves, starting from x in [1e-6, 1], so
#: that eigenvalues down to 1e-12 of the trace converge; the last two are the limit, (15 − 10 x² + 3 x⁴)/8, which has the
#: third order at 1. tests/functional/test_iterative.py derives them again.
QUINTIC: Coefficients = (
    (8.5142580824550638, -25.281575954766767, 18.76730935805362),
    (4.2570751967274421, -3.1601662884723843, 0.58647676586889606),
    (4.2568278712874484, -3.1599952222165478, 0.58645725278399406),
    (4.2557753676593653, -3.1592672143845102, 0.58637421090787063),
    (4.2513019058274943, -3.1561724466233635, 0.58602120083998208),
    (4.2323874701067828, -3.1430781183612703, 0.58452760483189848),
    (4.1541563805752196, -3.0887579580661375, 0.57833223561558733),
    (3.8583591588450083, -2.8808253054211705, 0.55463163412612446),
    (3.0495983995227444, -2.2849888038567878, 0.48706082742570233),
    (2.1120559374183665, -1.4938364726662914, 0.40010250263757197),
    (1.8783836569506792, -1.253754501517105, 0.37537564814225241),
    (1.875, -1.25, 0.375),
    (1.875, -1.25, 0.375),
)

#: the published backward pass of MPA and MTP: eight cubic steps
LYAPUNOV_STEPS = 8


def _plus_identity(matrix: Tensor, multiple: float) -> Tensor:
    return matrix + multiple * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _trace(p: Tensor) -> Tensor:
    return p.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def _unit_scale(size: Tensor) -> Tensor:
    """A divisor that leaves zero matrices zero."""
    return torch.where(size > 0, size, 1.0)


def _coupled_root(a: Tensor, coefficients: Coefficients) -> Tensor:
    """A^½ for a spectrum in [0, 1]. The first step has Z = I, and the last needs no Z."""
    y, z = a, None
    for step, (c0, c1, c2) in enumerate(coefficients, 1):
        zy = a if z is None else z @ y
        h = _plus_identity(c1 * zy + c2 * (zy @ zy) if c2 else c1 * zy, c0)
        y = y @ h
        if step < len(coefficients):
            z = h if z is None else h @ z
    return y


def _lyapunov(q: Tensor, g: Tensor, coefficients: Coefficients) -> Tensor:
    """X of QX + XQ = G for symmetric Q with a spectrum in [0, 1] and symmetric G, as the published iteration leaves it."""
    return _sign_of_block(q, g, coefficients)[1] / 2


def _lyapunov_any_rank(q: Tensor, g: Tensor) -> Tensor:
    """The same, converged, and right where Q is singular too.

    The iteration takes Q to the projector B onto its range. Between two directions of the range X is C/2; between one of
    the range and a null one, whose sign stayed 0 instead of becoming 1, it is C; between two null ones it is set to 0.
    """
    b, c = _sign_of_block(q, g, QUINTIC)
    bc = b @ c
    return bc + bc.mT - 1.5 * (bc @ b)


def _sign_of_block(q: Tensor, g: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Upper blocks B, C of the sign function of (Q G; 0 −Q)."""
    b, c = q, g
    for c0, c1, c2 in coefficients:
        s, bc = b @ b, b @ c
        commutator = bc - bc.mT  # BC − CB, antisymmetric
        h, e = _plus_identity(c1 * s, c0), c1 * commutator
        if c2:
            sd = s @ commutator
            h, e = h + c2 * (s @ s), e + c2 * (sd - sd.mT)
        # rounding breaks the symmetry of B and C a little more in each step, and then grows: restore it
        b, c = _symmetric(b @ h), _symmetric(b @ e + c @ h)
    return b, c


class _RootWithLyapunov(torch.autograd.Function):
    """A finished root Q with the gradient X of QX + XQ = sym(G), found by the same kind of iteration."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, q: Tensor, scale: Tensor, steps: int) -> Tensor:
        return q.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.steps = inputs[3]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, q, scale = ctx.saved_tensors
        with torch.no_grad(), full_precision(q):
            q, g = q / scale, _symmetric(grad)
            x = _lyapunov(q, g, (NEWTON_SCHULZ,) * ctx.steps) if ctx.steps else _lyapunov_any_rank(q, g)
            dp = x / scale
        return first_order_only(dp, "the Lyapunov gradient of a square root", grad, p), None, None, None


def root_with_lyapunov(p: Tensor, q: Tensor, scale: Tensor, steps: int = 0) -> Tensor:
    """Attach the Lyapunov gradient to a root ``q`` of ``p`` whose eigenvalues are at most ``scale`` (*, 1, 1).

    It is found by ``steps`` cubic iterations, as published for MPA and MTP, or to convergence where ``steps`` is 0.
    """
    out: Tensor = _RootWithLyapunov.apply(p, q.detach(), scale.detach(), steps)
    return out


def _check_steps(value: int, what: str, who: str) -> None:
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
    _check_steps(steps, "a number of steps", "newton_schulz")
    if P.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        dtype = torch.float64  # the backward products would be TF32: a switch that no context here can hold for them
    p = _symmetric(to_compute(P, torch.promote_types(dtype, output_dtype(P))))
    trace = _trace(p)
    with full_precision(p):
        y = _coupled_root(p / _unit_scale(trace), (NEWTON_SCHULZ,) * steps)
    root = torch.where(trace > 0, _unit_scale(trace).sqrt(), 0.0)
    return (y * root).to(P.device, output_dtype(P))


def quintic_sqrt(P: Tensor) -> Tensor:
    r"""The converged square root by matrix products alone, in float64: 13 coupled quintic steps, Lyapunov gradient.

    It needs no eigensolver, so it exports, compiles into one graph and runs at the speed of matrix products. Against
    the eigendecomposition at condition number 1e12 it errs by 1e-11 forward and 1e-7 in the gradient. Eigenvalues below
    1e-12 of the trace do not converge: their roots are too small by up to 1e-6 of the largest, and in directions where
    P is null the gradient between two of them is large instead of the 0 of :func:`matrix_sqrt`; multiplied back to
    features, as in ``sqrt_covariance(solver="products")``, that block vanishes.

    Args:
        P: positive semi-definite (*, d, d).

    Returns:
        (*, d, d), float64 if P is float64 and float32 otherwise.

    Example:
        >>> quintic_sqrt(torch.diag(torch.tensor([4.0, 9.0]))).diagonal()
        tensor([2., 3.])
    """
    check_square(P, "quintic_sqrt")
    p = _symmetric(to_compute(P))
    with torch.no_grad():
        scale = _unit_scale(_trace(p))
        q = _coupled_root(p / scale, QUINTIC) * scale.sqrt()
    return root_with_lyapunov(p, _symmetric(q), scale.sqrt()).to(P.device, output_dtype(P))


def _frobenius(p: Tensor) -> Tensor:
    return _unit_scale(torch.linalg.matrix_norm(p, keepdim=True))


def _published_approximant(P: Tensor, who: str, root: Any) -> Tensor:
    check_square(P, who)
    p = _symmetric(to_compute(P))
    with torch.no_grad():
        scale = _frobenius(p)
        # I − P/‖P‖_F: the approximants expand √(1 − z) about z = 0
        q = root(_plus_identity(-p / scale, 1.0)) * scale.sqrt()
        q = torch.where(torch.linalg.matrix_norm(p, keepdim=True) > 0, q, 0.0)
    out = root_with_lyapunov(p, q, scale.sqrt(), LYAPUNOV_STEPS)
    return out.to(P.device, output_dtype(P))


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


def _polynomial(z: Tensor, coefficients: list[float]) -> Tensor:
    """Σ c_k Z^k by Horner's rule."""
    out = _plus_identity(torch.zeros_like(z), coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = _plus_identity(out @ z, c)
    return out


def _inverse(matrix: Tensor, smallest: float) -> Tensor:
    """Inverse of symmetric matrices with eigenvalues in [smallest, 1] by Newton's iteration X ← X(2I − AX)."""
    residual = (1 - smallest) / (1 + smallest)  # of the best multiple of the identity; each step squares it
    x = _plus_identity(torch.zeros_like(matrix), 2 / (1 + smallest))
    for _ in range(math.ceil(math.log2(math.log(1e-17) / math.log(residual)))):
        x = x @ _plus_identity(-(matrix @ x), 2.0)
    return x


def mtp_sqrt(P: Tensor, degree: int = 10) -> Tensor:
    r"""Matrix Taylor polynomial (MTP): :math:`\sqrt{\|P\|_F}` times the series of :math:`(I - Z)^{1/2}`, Z = I − P/‖P‖_F.

    The gradient is the published one, eight cubic Lyapunov steps with the approximate root.

    Example:
        >>> mtp_sqrt(torch.eye(1) * 4)
        tensor([[2.]])

    References:
        Song et al., Fast Differentiable Matrix Square Root, ICLR 2022.
    """
    _check_steps(degree, "a degree", "mtp_sqrt")
    return _published_approximant(P, "mtp_sqrt", lambda z: _polynomial(z, taylor_coefficients(degree)))


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
    _check_steps(degree, "a degree", "mpa_sqrt")
    numerator, denominator = pade_coefficients(degree)
    return _published_approximant(
        P,
        "mpa_sqrt",
        lambda z: _symmetric(
            _inverse(_polynomial(z, denominator), (2 * degree + 1) / 4**degree) @ _polynomial(z, numerator)
        ),
    )


#: squarings of e^{−2P}: enough for a trace of 2³⁰
_SQUARINGS = 32
#: Taylor terms of e^{−x} − 1 for a spectrum in [0, 1/2]
_EXP_TERMS = 13


def exp_products(P: Tensor, factor: float = -2.0) -> Tensor:
    r""":math:`e^{cP}` for c < 0 and positive semi-definite P by scaling and squaring, without gradient.

    The squarings work on :math:`E = e^{cP} - I`, :math:`E \leftarrow 2E + E^2`, which keeps the digits of small
    eigenvalues. Their number is fixed (each sample takes part in as many as its trace needs), so the graph is too.
    """
    with torch.no_grad():
        p = -factor * _symmetric(to_compute(P))
        halvings = _trace(p).clamp_min(2.0**-1).log2().ceil().clamp_max(_SQUARINGS - 1.0) + 1
        e = -p * torch.exp2(-halvings)
        series = [1 / math.factorial(k) for k in range(1, _EXP_TERMS + 1)]
        e = e @ _polynomial(e, series)
        for step in range(_SQUARINGS):
            e = torch.where(step < halvings, 2 * e + e @ e, e)
        return _plus_identity(e, 1.0)


#: square roots of the logarithm: they bring a condition number of 1e6 to 1.25
_LOG_ROOTS = 6
#: terms of log(1 + x) = Σ (−1)^{k+1} x^k/k for |x| ≤ 0.13
_LOG_TERMS = 18


def log_products(P: Tensor) -> Tensor:
    """log P by repeated roots and a series, without gradient, for condition numbers up to 1e6.

    It is for export, where no eigensolver is; training takes :func:`eigengrain.functional.matrix_log`.
    """
    check_square(P, "log_products")
    if torch.is_grad_enabled() and P.requires_grad:
        raise ValueError("the logarithm by matrix products has no gradient: train with solver='auto'")
    p = _symmetric(to_compute(P))
    scale = _unit_scale(_trace(p))
    root = p / scale
    for _ in range(_LOG_ROOTS):
        root = _symmetric(_coupled_root(root, QUINTIC))
    # the spectrum is now within [1.25^−1, 1]; about its middle the series needs few terms
    middle = 0.9
    x = _plus_identity(root / middle, -1.0)
    series = [math.log(middle), *((-1) ** (k + 1) / k for k in range(1, _LOG_TERMS + 1))]
    out = 2**_LOG_ROOTS * _polynomial(x, series)
    return (out + torch.diag_embed(scale.log()[..., 0].expand(p.shape[:-1]))).to(P.device, output_dtype(P))
