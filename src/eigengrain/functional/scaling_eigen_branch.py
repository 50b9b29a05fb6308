r"""Factors of the Scaling Eigen Branch: one scalar per sample, from the spectrum of the covariance.

The branch multiplies the square root by 1 + s, with :math:`s = \|QS^T\|_F = \sqrt{\sum_i \lambda_i e^{-2\lambda_i}}`
(Eq. 24), S = e^{−P}. Sums of exponentials are computed by log-sum-exp: :math:`e^{-2\lambda}` is 0 in float64 for λ > 373.
"""

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional._autograd import with_gradient
from eigengrain.functional.eigen import decompose, zero_rounding
from eigengrain.functional.inputs import (
    check_compute_dtype,
    check_number,
    check_square,
    full_precision,
    output_dtype,
    to_compute,
)
from eigengrain.functional.matrix_products import exp_minus_twice, nonzero, symmetric, symmetric_product, trace

KINDS = ("qs", "q", "s", "constant")
SOLVERS = ("auto", "eigh", "products")


#: larger eigenvalues, for which e^{−2λ} is 0, may be infinite in float32
_LARGEST = 1e30


def _log_qs(values: Tensor) -> Tensor:
    """log s (*) from eigenvalues (*, d)."""
    return 0.5 * torch.logsumexp(values.clamp_min(0).log() - 2 * values, -1)


def qs_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    r"""s (*) from eigenvalues (*, d), and :math:`\partial s/\partial\sigma = (1 - 2\lambda)\,\sigma e^{-2\lambda}/s`.

    Here σ = √λ. The slope is at most 1 in norm. Both are 0 where s is below the normal numbers.
    """
    values = values.clamp_max(_LARGEST)
    log_s = _log_qs(values).unsqueeze(-1)
    s = log_s.exp()
    slope = (1 - 2 * values) * torch.exp(0.5 * values.clamp_min(0).log() - 2 * values - log_s)
    normal = s >= torch.finfo(s.dtype).tiny
    return torch.where(normal, s, 0.0).squeeze(-1), torch.where(normal, slope, 0.0)


def _value_and_slope(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The factor from the eigenvalues, and its derivative, which is set to 0 where the factor is 0."""
    if kind == "qs":
        log_s = _log_qs(values)
        s = log_s.exp()
        normal = s >= torch.finfo(s.dtype).tiny
        slope = (0.5 - values) * torch.exp(-2 * values - log_s.unsqueeze(-1))
        return torch.where(normal, s, 0.0), torch.where(normal.unsqueeze(-1), slope, 0.0)
    log_s = 0.5 * torch.logsumexp(-2 * values, -1)
    return log_s.exp(), -torch.exp(-2 * values - log_s.unsqueeze(-1))


def scaling_factor(
    P: Tensor,
    kind: str = "qs",
    *,
    constant: float = 100.0,
    solver: str = "auto",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    r"""The factor of the Scaling Eigen Branch, one per matrix, shape (*), with closed-form gradient.

    - ``qs``: :math:`\|QS^T\|_F = \sqrt{\mathrm{tr}(P e^{-2P})}`, gradient :math:`(I - 2P)e^{-2P}/(2s)` (Eq. 24);
    - ``q``: :math:`\|Q\|_F = \sqrt{\mathrm{tr}P}`;
    - ``s``: :math:`\|S\|_F = \sqrt{\mathrm{tr}\,e^{-2P}}`;
    - ``constant``: a number, without gradient (Table 7). The learned factors of that table are part of the covariance head.

    Where a factor is 0, as at P = 0, its gradient is set to 0.

    Args:
        P: positive semi-definite (*, d, d); the covariance itself, not divided by its trace.
        kind: see above.
        constant: value for ``constant``.
        solver: ``auto``, ``eigh``, or ``products`` for matrix products alone (``qs`` and ``q``), which ``auto`` takes for
            ``qs`` on CUDA. By products :math:`s^2` has an error of about d ε tr P, and is 0 below that.
        dtype: working precision, float64 or float32.

    Example:
        >>> scaling_factor(torch.diag(torch.tensor([1.0, 0.0])))
        tensor(0.3679)
    """
    check_square(P)
    check_compute_dtype(dtype)
    if kind not in KINDS:
        raise UnknownName("scaling factor", kind, KINDS)
    if solver not in SOLVERS:
        raise UnknownName("solver", solver, SOLVERS)
    if kind == "constant":
        check_number(constant, "constant")
        return torch.full(P.shape[:-2], constant, dtype=output_dtype(P), device=P.device)
    p = symmetric(to_compute(P, dtype))
    if kind == "q":  # no decomposition is needed
        total = p.diagonal(dim1=-2, dim2=-1).sum(-1)
        root = torch.where(total <= 0, 1.0, total).sqrt()  # the root has no slope at 0
        return torch.where(total <= 0, 0.0, root).to(P.device, output_dtype(P))
    if solver == "auto":  # products are faster than an eigendecomposition on CUDA, and slower on a CPU
        solver = "products" if kind == "qs" and P.is_cuda else "eigh"
    if solver == "products":
        if kind != "qs":
            raise ArgumentError("solver", f"must be 'eigh' for kind={kind!r}", solver)
        batch = p.reshape(-1, *p.shape[-2:])
        with torch.no_grad(), full_precision(batch):
            value, slope = qs_by_products(batch)
        out = with_gradient(batch, value, slope, "scaling_factor").reshape(P.shape[:-2])
    else:
        values, vectors = decompose(p)
        value, slope = _value_and_slope(zero_rounding(values), kind)
        with full_precision(p):
            slope = (vectors * slope.unsqueeze(-2)) @ vectors.mT
        out = with_gradient(p, value, slope, "scaling_factor")
    return out.to(P.device, output_dtype(P))


#: margin of the rounding error of tr(P e^{−2P}) over d ε tr(P)
_ROUNDING = 4.0


def qs_by_products(p: Tensor) -> tuple[Tensor, Tensor]:
    """s (B,) and ∂s/∂P (B, d, d) for positive semi-definite P (B, d, d), by matrix products alone."""
    # P e^{−2P} with two factors e^{−P/2} on either side, which remove the rounding of P, ε tr P, next to large eigenvalues
    half = exp_minus_twice(p / 4)
    decay = symmetric_product(half, half)
    decay = symmetric_product(decay, decay)
    product = symmetric_product(torch.bmm(half, p), half)
    product = symmetric_product(torch.bmm(half, product), half)
    square = trace(product)
    # a smaller sum is rounding of the products, and so is s: its slope would be a rounding error divided by another
    rounding = square <= _ROUNDING * p.shape[-1] * torch.finfo(p.dtype).eps * trace(p)
    s = torch.where(rounding, 0.0, square).sqrt()
    slope = torch.where(rounding, 0.0, torch.sub(decay, product, alpha=2.0) / (2 * nonzero(s)))
    return s[..., 0, 0], slope
