r"""The root of the covariance of features and its gradient by float32 matrix products alone.

A covariance in float32 has lost the singular values below 3e-4 of the largest; the features still have them. So the
iteration works on the polar decomposition :math:`X_c = Q W` of the centred features (d, N), where Q is the root of
:math:`X_c X_c^T` and W has orthonormal rows. With :math:`h(t) = c_0 + c_1 t + c_2 t^2`, the step

.. math:: W \leftarrow h(W W^T)\,W

moves the singular values of W to 1. Steps are made in short runs of d × d products: with :math:`M = W W^T`,

.. math:: T \leftarrow h(M)\,T, \qquad M \leftarrow h(M)\,M\,h(M),

and then :math:`W \leftarrow T W`. M loses small singular values, W does not, so each run starts from a new :math:`W W^T`.
The last step is :math:`x \mapsto (5x^3 - 3x^5)/2`, which converges at 1 and takes the rounding of null directions to 0. The
product of all T is the pseudo-inverse of Q.

For :math:`C = \tfrac12(G + G^T)` the gradient is

.. math:: \frac{\partial l}{\partial X} = \frac1{\sqrt N}(C + \Omega)\,W, \qquad Q\Omega + \Omega Q = CQ - QC, \qquad
   \Omega_{ij} = \frac{\sigma_j - \sigma_i}{\sigma_j + \sigma_i}\,C_{ij}

in the eigenbasis of Q, and 2C instead of C + Ω in the rows outside of the range of Q. Hence
:math:`\|\Omega\| \le \|C\|` and :math:`\|\partial l/\partial X\| \le \sqrt{2/N}\,\|G\|`. The same Ω solves an equation
whose condition number is the root of that of Q: with :math:`\sigma = m e^x` the factor is
:math:`\tanh\frac{x_j - x_i}2`, so

.. math:: H\Omega + \Omega H = CV - VC, \qquad H = Q/m + m\,Q^{-1}, \qquad V = Q/m - m\,Q^{-1}.

Ω is half of the upper right corner of the sign of :math:`\begin{pmatrix} H & CV - VC \\ 0 & -H \end{pmatrix}`. Rounding
cannot break the bound: a gradient that exceeds it is scaled down.

The steps are functions of tensors (B, d, d) with flags or counts per sample, so that kernels can replace them. Nothing
waits for the device; on a CPU, steps that no sample needs are left out.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from eigengrain.functional._autograd import finished_root
from eigengrain.functional._cuda.graphs import replayed
from eigengrain.functional.covariance import centre_in_range, outer_product, power_of_two
from eigengrain.functional.inputs import full_precision, in_transform
from eigengrain.functional.matrix_products import (
    QUINTIC,
    Coefficients,
    block_step,
    exp_minus_twice,
    frobenius,
    kernels_on,
    largest_trace,
    nonzero,
    plus_identity,
    quadratic,
    symmetric,
    symmetric_product,
    trace,
)
from eigengrain.functional.newton_schulz import LARGEST_SCALE

#: The rows of ``QUINTIC`` are minimax steps, each for the interval that the one before it leaves. This one is for
#: [0.049, 1.951]: it multiplies smaller values by up to 3.86 and keeps [0.18, 1.82] inside of itself, so that no value that
#: is large becomes small on the way, where it would lose its digits
_SAFE = QUINTIC[3]
#: from [0.18, 1.82] to 1 ± 2e-4
_LAST = QUINTIC[10:13]
#: (15 − 10 x² + 3 x⁴)/8, of the third order at 1, for samples that go on
_ONWARD = QUINTIC[-1]
#: (5 x² − 3 x⁴)/2, of the second order at 1 and at most 1, and of the third order at 0, for samples that are finished
_FINISH = (0.0, 2.5, -1.5)
#: largest singular value to start from
_TOP = 1.8
#: the steps of the value alone, each a run of its own: singular values from 1.4e-5 of the largest converge
STEPS: Coefficients = (_SAFE,) * 7 + _LAST + (_ONWARD,) * 2
#: the first runs, made by every sample without a check: singular values from 5e-4 of the largest converge
_RUNS: tuple[Coefficients, ...] = ((_SAFE,) * 2, (_SAFE,) * 2)
#: the runs that end with a check: the first of every sample, the others of those that have not converged. Each of the
#: others reaches singular values that are 90 times smaller
_CHECKED_RUNS: tuple[Coefficients, ...] = (_LAST, (_SAFE, *_LAST), (_SAFE, *_LAST))
#: largest tr M(I − M)² of a converged sample after each checked run: above the rounding of null directions, which further
#: steps enlarge; after the last run every sample is finished
_CONVERGED = (1e-3, 0.05, math.inf)


def _decides(flags: Tensor) -> bool:
    """Whether Python may read these flags: without waiting for a device, and not while a program is recorded."""
    return flags.device.type == "cpu" and not torch.compiler.is_compiling() and not in_transform(flags)


def _product(a: Tensor, b: Tensor, todo: Tensor | None = None) -> Tensor:
    """AB; the kernels leave out samples that are not in ``todo`` (B,), int32."""
    kernels = kernels_on(a)
    return torch.bmm(a, b) if kernels is None else kernels.product(a, b, todo=todo)


def _times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """ABᵀ, which the kernels make faster than AB."""
    kernels = kernels_on(a)
    return torch.bmm(a, b.mT) if kernels is None else kernels.product(a, b, transposed=True)


def _product_where(todo: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """AB for samples in ``todo`` (B,), int32, and B for the others."""
    if kernels := kernels_on(a):
        return kernels.product(a, b, todo=todo, keep=b)
    return torch.where((todo > 0)[:, None, None], torch.bmm(a, b), b)


def run_of_steps(
    m: Tensor, rows: Coefficients, todo: Tensor | None = None, leave: bool = True
) -> tuple[Tensor, Tensor | None]:
    """One run: the product T of its steps h(M), and the M that it leaves if that is needed, both (B, d, d).

    Args:
        m: :math:`W W^T` (B, d, d), symmetric.
        rows: coefficients of h.
        todo: (B,), int32; the results of other samples are not used, and None stands for all. The kernels leave them out.
        leave: whether the M that the run leaves is needed.
    """
    if kernels := kernels_on(m):
        return kernels.run_of_steps(m, rows, todo, leave)
    t = h = quadratic(m, rows[0])
    for row in rows[1:]:
        m = _congruence(h, m)
        h = quadratic(m, row)
        t = torch.bmm(h, t)
    return t, _congruence(h, m) if leave else None


def _congruence(h: Tensor, m: Tensor) -> Tensor:
    return symmetric(torch.bmm(h, torch.bmm(m, h)))


def polar_factor(x: Tensor) -> Tensor:
    """W (B, d, n) of scaled features without T, by the same steps for every matrix, which exports.

    Each run has a single step: errors are three to ten times smaller than those of :func:`polar_decomposition`.
    """
    tall = x.shape[-2] > x.shape[-1]
    w = x.mT if tall else x
    for row in STEPS:
        w = torch.bmm(quadratic(torch.bmm(w, w.mT), row), w)
    return w.mT if tall else w


class Polar(NamedTuple):
    """X = Q W (B, d, n), and the pseudo-inverse of Q; the last step takes it and W to 0 outside of the range of Q."""

    w: Tensor
    q: Tensor
    inverse: Tensor


def polar_decomposition(x: Tensor, m: Tensor) -> Polar:
    """The polar decomposition of scaled features (B, d, n), of which M is X Xᵀ, by as many runs as each of them needs."""
    w, total = x, None
    for rows in _RUNS:
        t, _ = run_of_steps(m if total is None else _gram(w), rows, leave=False)
        w, total = _product(t, w), t if total is None else _product(t, total)
    assert total is not None
    todo = torch.ones_like(x[:, 0, 0], dtype=torch.int32)
    for number, rows in enumerate(_CHECKED_RUNS):
        if number and _decides(todo) and not todo.any():
            break
        t, further = _checked_run(w, rows, todo, _CONVERGED[number])
        w, total, todo = _product_where(todo, t, w), _product_where(todo, t, total), further
    return Polar(w, _gram(x, w), total)


def _gram(x: Tensor, w: Tensor | None = None, todo: Tensor | None = None) -> Tensor:
    """The symmetric matrix X Wᵀ, or X Xᵀ; the kernels leave out samples that are not in ``todo`` (B,), int32."""
    if kernels := kernels_on(x):
        return kernels.product(x, x if w is None else w, transposed=True, mirror=1, todo=todo)
    return symmetric(outer_product(x) if w is None else torch.bmm(x, w.mT))


def scaled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features X (B, d, n) divided by their size (B, 1, 1), with singular values of at most 1.8, the size, and X Xᵀ."""
    m = _gram(x)
    total = nonzero(trace(m))
    relative = m / total
    fourth = frobenius(_times_transposed(relative, relative))
    size = (nonzero(fourth).sqrt() * total).sqrt() / _TOP  # (tr M⁴)^¼ bounds the eigenvalues of M
    return x / size, size, m / size.square()


def _checked_run(w: Tensor, rows: Coefficients, todo: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """T of a run with its last step, undefined for samples that are not in ``todo`` (B,), and which samples go on."""
    t, m = run_of_steps(_gram(w, todo=todo), rows, todo)
    assert m is not None
    last, further = last_step(m, todo, limit)
    return _product(last, t, todo), further


def last_step(m: Tensor, todo: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    r"""The last step h(M) of a run (B, d, d), and the samples in ``todo`` (B,), int32, that go on.

    If :math:`\operatorname{tr} M(I - M)^2` is above the limit, a sample goes on after the step ``_ONWARD``, else it
    ends with ``_FINISH``.
    """
    if kernels := kernels_on(m):
        return kernels.last_step(m, todo, (_ONWARD, _FINISH), limit)
    m2 = torch.bmm(m, m)
    rest = m - m2
    further = (trace(rest) - (rest * m).sum((-2, -1), keepdim=True) > limit) & (todo > 0)[:, None, None]
    finished, onward = (plus_identity(c1 * m + c2 * m2, c0) for c0, c1, c2 in (_FINISH, _ONWARD))
    return torch.where(further, onward, finished), further[:, 0, 0].int()


#: steps of the sign iteration, from a spectrum in [3.25e-4, 1] to 1 ± 1.2e-4; a narrower spectrum enters it later
_SIGN: Coefficients = QUINTIC[:7]
#: the last row at which a spectrum may enter
_LAST_ENTRY = 4


def _intervals(low: float, rows: Coefficients) -> Iterator[tuple[float, float]]:
    """The interval before each row, for minimax rows: values of x h(x²) are as far below 1 as above it."""
    high = 1.0
    for c0, c1, c2 in rows:
        yield low, high
        low = low * (c0 + c1 * low**2 + c2 * low**4)
        high = 2 - low


_ENTRIES = tuple(_intervals(3.25e-4, _SIGN))[: _LAST_ENTRY + 1]


def corner_of_sign(b: Tensor, s: Tensor, entry: Tensor) -> Tensor:
    """Upper right corner of the sign of (B S; 0 −B) for symmetric B and antisymmetric S (B, d, d).

    Args:
        b: its spectrum is in the interval of its entry.
        s: any antisymmetric matrix.
        entry: (B,), int: the first row of ``_SIGN`` that each sample uses.
    """
    if kernels := kernels_on(b):
        return kernels.corner_of_sign(b, s, entry, _SIGN, _LAST_ENTRY)
    first = min(entry.tolist(), default=0) if _decides(entry) else 0
    for number in range(first, len(_SIGN)):
        used = (entry <= number)[:, None, None]
        next_b, next_s = block_step(b, s, _SIGN[number], mirror=-1)
        b, s = torch.where(used, next_b, b), torch.where(used, next_s, s)
    return s


def _omega(c: Tensor, polar: Polar, projector: Tensor) -> Tensor:
    """Ω (B, d, d) for symmetric C."""
    q, inverse = polar.q, symmetric(polar.inverse)
    q_size, inverse_size = frobenius(q), frobenius(inverse)
    # 1/m, for which both terms have the same norm
    ratio = nonzero(torch.where(q_size > 0, inverse_size / nonzero(q_size), 1.0).sqrt())
    q, inverse = q * ratio, inverse / ratio
    cv = _times_transposed(c, q - inverse)
    h = plus_identity(q + inverse - 2 * projector, 2.0)  # its eigenvalues are at least 2, which it is outside of the range
    h2 = _times_transposed(h, h)
    size = nonzero(frobenius(h2).sqrt())
    h2 = h2 / size.square()
    size = size * nonzero(frobenius(_times_transposed(h2, h2))).pow(0.25)  # (tr H⁸)^⅛ bounds the eigenvalues
    lowest = 1.98 / size  # 2 less rounding, relative to the largest eigenvalue
    entry, high = torch.zeros_like(size, dtype=torch.int32), torch.ones_like(size)
    for low, top in _ENTRIES[1:]:
        later = lowest >= low / top
        entry, high = entry + later, torch.where(later, top, high)
    scale = high / (1.001 * size)
    return corner_of_sign(h * scale, (cv - cv.mT) * scale, entry[:, 0, 0]) / 2


def _cap(norm: Tensor, limit: Tensor) -> Tensor:
    """The factor of at most 1 that brings a norm below its limit."""
    return torch.where(norm > limit, limit / nonzero(norm), 1.0)


#: bounds are kept with this margin, so that the rounding of sums does not exceed them
_MARGIN = 1 - 2e-6


def _gradient_factor(c: Tensor, polar: Polar) -> Tensor:
    """K (B, d, d) with √N ∂l/∂X = K W, of norm at most √2 ‖C‖."""
    p = _gram(polar.w)  # the projector on the range of Q
    k = 2 * c - _times_transposed(p, c + _omega(c, polar, p))  # 2C − P(C − Ω)
    length = (_times_transposed(k, p) * k).sum(-1, keepdim=True).sum(-2, keepdim=True).clamp_min(0).sqrt()  # ‖K W‖
    return k * _cap(length, (math.sqrt(2) * _MARGIN) * frobenius(c))


#: s below this multiple of √d ε ‖X_c‖ is rounding, and set to 0; so is s of a covariance with a trace above 2²¹, of which
#: the rounding is as large as the eigenvalues that count
_ROUNDING = 4.0


def _branch(x: Tensor, m: Tensor, q: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    r"""s (B, 1, 1) of the Scaling Eigen Branch, and F (B, d, d), ‖F‖ ≤ 1, with :math:`\partial s/\partial X_c = F W`.

    .. math:: s = \|e^{-P} X_c\|_F, \qquad F = (I - 2P)\,e^{-2P}\,Q/s, \qquad X_c = \text{size} \cdot X,
        \qquad M = X X^T
    """
    p = m * size.clamp_max(LARGEST_SCALE).square()  # in the range of float32
    half = exp_minus_twice(p / 4)
    decay = symmetric_product(half, half)
    # from X, whose small singular values P has lost
    relative, total = frobenius(_product(decay, x)), frobenius(x)
    floor = _ROUNDING * math.sqrt(p.shape[-1]) * torch.finfo(p.dtype).eps * total
    relative = torch.where((relative <= floor) | (trace(p) > 4 * largest_trace(p.dtype)), 0.0, relative)
    slope = _times_transposed(_times_transposed(decay - 2 * _times_transposed(decay, p), decay), q)
    slope = torch.where(relative == 0, 0.0, slope / nonzero(relative))
    return relative * size, slope * _cap(frobenius(slope), torch.full_like(relative, _MARGIN))


@replayed
def _forward(xc: Tensor, scale: Tensor, *, seb: bool) -> tuple[Tensor, ...]:
    """Q or A of centred features divided by ``scale`` (B, 1), and what the backward pass needs."""
    x, size, m = scaled(xc)
    polar, size = polar_decomposition(x, m), size * scale.unsqueeze(-1)
    if not seb:
        return polar.q * size, *polar, size
    s, slope = _branch(x, m, polar.q, size)
    return polar.q * size * (1 + s), *polar, size, s, slope


@replayed
def _value(xc: Tensor, scale: Tensor, *, seb: bool) -> Tensor:
    """Q or A alone."""
    x, size, m = scaled(xc)
    q, size = symmetric(torch.bmm(x, polar_factor(x).mT)), size * scale.unsqueeze(-1)
    return q * size * (1 + _branch(x, m, q, size)[0]) if seb else q * size


@replayed
def _backward(grad: Tensor, w: Tensor, q: Tensor, inverse: Tensor, size: Tensor, *branch: Tensor) -> Tensor:
    """∂l/∂X (B, d, n) from ∂l/∂Q, or from ∂l/∂A if s and its slope are given."""
    unit = power_of_two(grad).unsqueeze(-1)
    c = symmetric(grad / unit)
    k = _gradient_factor(c, Polar(w, q, inverse))
    if branch:
        s, slope = branch
        along = (c * q).sum(-1, keepdim=True).sum(-2, keepdim=True) * size  # <G, Q>
        k = (1 + s) * k + torch.where(s == 0, 0.0, along) * slope
    dx = _product(k, w)
    if kernels := kernels_on(dx):
        return kernels.centre(dx, dx.dtype, scale=True, factor=unit)
    return dx.sub_(dx.mean(-1, keepdim=True)).mul_(unit / math.sqrt(w.shape[-1]))


def _gradient(grad: Tensor, dtype: torch.dtype, w: Tensor, *saved: Tensor) -> Tensor:
    with full_precision(w):
        return _backward(grad.contiguous(), w, *saved)


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``covariance.centre_in_range``."""
    if kernels := kernels_on(x):
        scale = power_of_two(x.flatten(2), spread=True)
        return kernels.centre(x, torch.float32, scale=True, factor=1 / scale).contiguous(), scale
    xc, unit = centre_in_range(x, torch.float32)
    assert unit is not None
    return xc, unit


def _needs_gradient(x: Tensor) -> bool:
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return compiling or in_transform(x) or (torch.is_grad_enabled() and x.requires_grad)


def root_by_polar(x: Tensor, seb: bool) -> Tensor:
    """Q or A (B, d, d) in float32 from features (B, C, …), with gradient, by the polar decomposition."""
    recorded = _needs_gradient(x)
    with torch.no_grad():
        xc, scale = _centred(x.detach())
        with full_precision(xc):
            if not recorded and kernels_on(xc) is None:
                return _value(xc, scale, seb=seb)
            a, *saved = _forward(xc, scale, seb=seb)
    if not recorded:
        return a
    return finished_root(x, a, _gradient, *saved)
