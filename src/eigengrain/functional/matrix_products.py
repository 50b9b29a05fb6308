r"""Square root, Lyapunov equation, exponential, logarithm and inverse by matrix products alone.

With :math:`h(t) = c_0 + c_1 t + c_2 t^2`, the coupled iteration :math:`Y \leftarrow Y\,h(ZY),\ Z \leftarrow h(ZY)\,Z` takes
(A, I) to :math:`(A^{1/2}, A^{-1/2})` because :math:`x\,h(x^2)` drives every x in (0, 1] to 1. The same polynomial applied
to the block matrix :math:`\begin{pmatrix} B & C \\ 0 & -B \end{pmatrix}` takes it to its sign, whose corner solves the
Lyapunov equation. Every function works on (batch, d, d), has a fixed number of steps and records no gradient. They compute
in float64; :func:`polar_factor` and :func:`exp_minus_twice` also in float32.
"""

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eigengrain.functional.inputs import in_transform

Coefficients = tuple[tuple[float, float, float], ...]

#: (3 − x²)/2, the cubic step of Newton and Schulz
NEWTON_SCHULZ = (1.5, -0.5, 0.0)
_LIMIT = (1.875, -1.25, 0.375)  # (15 − 10 x² + 3 x⁴)/8: the third order at 1

#: Each row minimises max |1 − x h(x²)| over the interval that the previous row leaves, starting from x in [1e-6, 1], so
#: that eigenvalues down to 1e-12 of the trace converge. tests/core/functional/test_matrix_products.py derives them again.
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
    _LIMIT,
    _LIMIT,
)

#: the same from x in [3.52e-4, 1], which is what one Newton step leaves of the range above, see :func:`lyapunov`
QUINTIC_AFTER_NEWTON: Coefficients = (
    (8.498774023785936, -25.220417663867785, 18.718652090459887),
    (4.230623564034789, -3.1418562159324854, 0.5843882320097578),
    (4.1470017004604465, -3.083776833560582, 0.5777641816326998),
    (3.8333740592126366, -2.863061542709957, 0.5526084184157797),
    (2.9983605161731357, -2.2454145012768927, 0.4826069422712509),
    (2.084749179651984, -1.46735144284732, 0.39731547991053057),
    (1.8774181008247524, -1.2526841619833744, 0.3752685174635209),
    _LIMIT,
    _LIMIT,
)

#: steps for float32, from x in [1e-5, 1]. A minimax step from a long range takes some of the large values to the lower end
#: of what it leaves, where they have lost their digits. The one that is repeated here takes none below 0.18
POLAR: Coefficients = (QUINTIC[7],) * 6 + QUINTIC[7:]

#: result of the iteration for 1/√0: null directions come out as if σ were one over this
_NULL_INVERSE = math.prod(c0 for c0, _, _ in QUINTIC)
#: scaling of the Newton step that brings [1/_NULL_INVERSE, 1] to the shortest range
_NEWTON_SCALE = math.sqrt(_NULL_INVERSE)
#: margin above the largest value after that step, since the polynomials diverge beyond 1: eigenvalues that are negative by
#: rounding come out larger than those of 0, by up to 8 % for features with few active positions
_NEWTON_MARGIN = 2.0
_NEWTON_LARGEST = _NEWTON_MARGIN * (_NEWTON_SCALE + 1 / _NEWTON_SCALE) / 2


def symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def trace(p: Tensor) -> Tensor:
    """(*, 1, 1)."""
    return p.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def nonzero(size: Tensor) -> Tensor:
    """The size, or 1 where it is 0: a divisor that leaves zero matrices zero."""
    return torch.where(size > 0, size, 1.0)


def norm(p: Tensor) -> Tensor:
    """Frobenius norm (*, 1, 1), also where the squares of the entries would overflow or underflow."""
    largest = nonzero(p.abs().amax((-2, -1), keepdim=True))
    return torch.linalg.matrix_norm(p / largest, keepdim=True) * largest


def plus_identity(matrix: Tensor, multiple: float) -> Tensor:
    return matrix + multiple * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def quadratic(m: Tensor, coefficients: tuple[float, float, float], times: float = 1.0) -> Tensor:
    """``times`` (c_0 I + c_1 M + c_2 M²) in one product."""
    c0, c1, c2 = (times * c for c in coefficients)
    out = torch.baddbmm(m, m, m, beta=c1, alpha=c2) if c2 else c1 * m
    out.diagonal(dim1=-2, dim2=-1).add_(c0)
    return out


class Roots(NamedTuple):
    """Y ≈ A^½ and Z ≈ A^−½ of A = P/scale, where scale (B, 1, 1) is the trace."""

    y: Tensor
    z: Tensor
    scale: Tensor


def coupled_iteration(a: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """(A^½, A^−½) for a spectrum in [0, 1]; the first step has Z = I."""
    y, z = a, None
    for row in coefficients:
        h = quadratic(a if z is None else torch.bmm(z, y), row)
        y, z = torch.bmm(y, h), h if z is None else torch.bmm(h, z)
    assert z is not None
    return y, z


def roots(p: Tensor) -> Roots:
    """Converged roots of positive semi-definite P (B, d, d)."""
    scale = nonzero(trace(p))
    y, z = coupled_iteration(p / scale, QUINTIC)
    return Roots(symmetric(y), symmetric(z), scale)


def polar_factor(x: Tensor) -> Tensor:
    r"""W of the polar decomposition :math:`X = Q W` of X (B, d, n), with orthonormal rows or columns, also in float32.

    .. math:: W \leftarrow h(W W^T)\,W

    takes :math:`X/\|X\|_F` to W. In float32 :math:`X X^T` has lost the small singular values, and the coupled iteration
    diverges; X itself has them. Those below 1e-5 of ‖X‖_F do not converge, so that Q has an error of their size.
    """
    w = x / nonzero(x.square().sum((-2, -1), keepdim=True).sqrt())
    tall = x.shape[-2] > x.shape[-1]
    w = w.mT if tall else w
    for row in POLAR:
        w = torch.bmm(quadratic(torch.bmm(w, w.mT), row), w)
    return w.mT if tall else w


def sign_of_block(b: Tensor, c: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Upper blocks of the sign of (B C; 0 −B), for symmetric B with a spectrum in [0, 1] and symmetric C."""
    for c0, c1, c2 in coefficients:
        s, bc = torch.bmm(b, b), torch.bmm(b, c)
        commutator = bc - bc.mT  # BC − CB, antisymmetric
        # rounding breaks the symmetry of B and C a little more in each step: restore it. The factor ½ of each mean is
        # applied to the small factors, where it costs nothing.
        h, e = quadratic(s, (c0, c1, c2), times=0.5), (0.5 * c1) * commutator
        if c2:
            sd = torch.bmm(s, commutator)
            e = torch.add(e, sd - sd.mT, alpha=0.5 * c2)
        b, c = torch.bmm(b, h), torch.baddbmm(torch.bmm(c, h), b, e)
        b, c = b + b.mT, c + c.mT
    return b, c


def lyapunov(root: Roots, g: Tensor) -> Tensor:
    r"""X of :math:`P^{1/2} X + X P^{1/2} = G` for symmetric G (B, d, d), at any rank.

    The inverse root is available, so the sign iteration can start with a Newton step
    :math:`\tfrac12(\mu B + (\mu B)^{-1})`, which saves four of thirteen polynomial steps. Null directions count as
    σ = 1.2e-7 of the root of the trace: between two of them X is large, and vanishes when it is multiplied with features.
    """
    y, z, scale = root
    down = 1 / (2 * _NEWTON_LARGEST)
    b = down * _NEWTON_SCALE * y + down / _NEWTON_SCALE * z
    c = torch.baddbmm(g, torch.bmm(z, g), z, beta=down * _NEWTON_SCALE, alpha=down / _NEWTON_SCALE)
    return sign_of_block(b, symmetric(c), QUINTIC_AFTER_NEWTON)[1] / (2 * scale.sqrt())


def polynomial(z: Tensor, coefficients: list[float]) -> Tensor:
    """Σ c_k Z^k by Horner's rule."""
    out = plus_identity(torch.zeros_like(z), coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = plus_identity(torch.bmm(out, z), c)
    return out


#: side of a tile of the result, and length of a step along the sum
_TILE, _DEPTH = 64, 32


@functools.cache
def _square_kernel() -> Any:
    """The Triton kernel; raises ImportError without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["turn"])
    def square(source, target, times, turn, n: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
        item = tl.program_id(1)
        across = tl.cdiv(n, TILE)
        row, column = tl.program_id(0) // across, tl.program_id(0) % across
        # the lower triangle is written together with the upper one
        if (turn < tl.load(times + item)) & (row <= column):
            first = item.to(tl.int64) * n * n
            i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
            inside = (i < n)[:, None] & (j < n)[None, :]
            total = tl.zeros((TILE, TILE), dtype=tl.float64)
            for k0 in range(0, n, DEPTH):
                k = k0 + tl.arange(0, DEPTH)
                left = tl.load(source + first + i[:, None] * n + k[None, :], (i < n)[:, None] & (k < n)[None, :], 0.0)
                right = tl.load(source + first + k[:, None] * n + j[None, :], (k < n)[:, None] & (j < n)[None, :], 0.0)
                total = tl.dot(left, right, total, input_precision="ieee", out_dtype=tl.float64)
            total += 2 * tl.load(source + first + i[:, None] * n + j[None, :], inside, 0.0)
            tl.store(target + first + i[:, None] * n + j[None, :], total, inside)
            if row < column:
                tl.store(target + first + j[:, None] * n + i[None, :], tl.trans(total), tl.trans(inside))

    return square


@functools.cache
def _kernel_available(device: torch.device) -> bool:
    """Whether the kernel runs on a device; it is tried once, with a warning if Triton is installed and fails."""
    try:
        square_repeatedly(
            torch.zeros(1, 16, 16, dtype=torch.float64, device=device), torch.ones(1, dtype=torch.int32, device=device), 1
        )
    except ImportError:
        return False
    except Exception as error:  # the compiler raises exceptions of many types
        warnings.warn(f"Triton cannot compile for {device}: using slower products ({error})", stacklevel=2)
        return False
    return True


def square_repeatedly(e: Tensor, times: Tensor, most: int) -> Tensor:
    """E ← 2E + E² on CUDA, repeated ``times`` for each matrix.

    The number of repetitions depends on the norm of a matrix, which is on the device. A loop on the host would have to
    wait for it, or square as often as the largest norm could need. Here all launches are made, and a matrix that is done
    returns from them immediately.

    Args:
        e: symmetric (B, d, d), float64, contiguous.
        times: (B,), int32, from 0 to ``most``.
        most: number of launches.
    """
    n = e.shape[-1]
    across = -(-n // _TILE)
    source, target = e, torch.empty_like(e)
    with torch.cuda.device(e.device):  # Triton launches on the current device
        for turn in range(most):
            _square_kernel()[(across * across, len(e))](source, target, times, turn, n=n, TILE=_TILE, DEPTH=_DEPTH)
            source, target = target, source
    # matrices that were done after an odd number of turns are in the other buffer
    even, odd = (source, target) if most % 2 == 0 else (target, source)
    return torch.where((times % 2 == 0)[:, None, None], even, odd)


#: squarings of the exponential, and the largest trace they suffice for in float64: beyond it the rounding of P is larger
#: than every eigenvalue that the exponential does not make 0
_SQUARINGS = 54
_LARGEST_TRACE = 2.0**48


def largest_trace(dtype: torch.dtype) -> float:
    """``_LARGEST_TRACE`` in float64; smaller in float32, in proportion to its precision."""
    return _LARGEST_TRACE * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps


#: Taylor terms of (e^{−x} − 1)/(−x) for a spectrum in [0, 2·2⁴⁸/2⁵⁴] = [0, 1/32]
_EXP_TERMS = 7

#: if each matrix has its own number of squarings, they start from a spectrum in [0, 2⁻¹⁰], where four terms suffice
_LARGEST_START = 2.0**-10
_MOST_SQUARINGS = 59


def exp_minus_twice(p: Tensor) -> Tensor:
    r""":math:`e^{-2P}` for positive semi-definite P (B, d, d) by scaling and squaring, without waiting for the device.

    The squarings work on :math:`E = e^{-2P} - I`, :math:`E \leftarrow 2E + E^2`, so that squarings that a small P does not
    need lose no digits. A matrix with a trace above :func:`largest_trace` is first scaled to that trace.
    """
    p = p * (largest_trace(p.dtype) / nonzero(trace(p))).clamp_max(1.0)
    kernel = p.is_cuda and p.dtype == torch.float64 and not torch.compiler.is_compiling() and not in_transform(p)
    if kernel and _kernel_available(p.device):
        e = _exp_counted(p)
    else:
        y = p * (-2.0 * 0.5**_SQUARINGS)
        e = torch.bmm(y, polynomial(y, [1 / math.factorial(k) for k in range(1, _EXP_TERMS + 1)]))
        for _ in range(_SQUARINGS):
            e = torch.baddbmm(e, e, e, beta=2.0)
    return plus_identity(e, 1.0)


def _exp_counted(p: Tensor) -> Tensor:
    """E = e^{−2P} − I with the number of squarings that the Frobenius norm, an upper bound of λ₁, requires."""
    norm = torch.linalg.matrix_norm(p).clamp(2.0**-40, _LARGEST_TRACE)
    times = torch.ceil(torch.log2(2 * norm / _LARGEST_START)).clamp(0, _MOST_SQUARINGS)
    y = p * (-2.0 * torch.exp2(-times))[:, None, None]
    y2 = torch.bmm(y, y)
    # Y + Y²/2 + Y³/6 + Y⁴/24
    e = torch.baddbmm(y + 0.5 * y2, y2, y2 + 4.0 * y, alpha=1 / 24)
    return square_repeatedly(symmetric(e), times.int(), _MOST_SQUARINGS)


#: square roots of the logarithm: they bring a condition number of 1e10 at d = 256 to 1.57
_LOG_ROOTS = 6
#: terms of log(1 + x) = Σ (−1)^{k+1} x^k/k for |x| ≤ 0.29
_LOG_TERMS = 20


def logarithm(p: Tensor) -> Tensor:
    """log P for positive definite P (B, d, d) by repeated roots and a series, to 1e-8 at condition number 1e10."""
    scale = nonzero(trace(p))
    root = p / scale
    for _ in range(_LOG_ROOTS):
        root = symmetric(coupled_iteration(root, QUINTIC)[0])
    middle = 0.9  # of the remaining spectrum, [0.64, 1]
    x = plus_identity(root / middle, -1.0)
    series = [math.log(middle), *((-1) ** (k + 1) / k for k in range(1, _LOG_TERMS + 1))]
    return 2**_LOG_ROOTS * polynomial(x, series) + scale.log() * torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)


def inverse(matrix: Tensor, smallest: float) -> Tensor:
    """Inverse of symmetric matrices with eigenvalues in [smallest, 1] by Newton's iteration X ← X(2I − AX)."""
    residual = (1 - smallest) / (1 + smallest)  # of the best multiple of the identity; each step squares it
    x = plus_identity(torch.zeros_like(matrix), 2 / (1 + smallest))
    for _ in range(math.ceil(math.log2(math.log(1e-17) / math.log(residual)))):
        x = torch.bmm(x, plus_identity(-torch.bmm(matrix, x), 2.0))
    return x


#: a longer start of QUINTIC, with which values down to 2e-10 of the largest converge: at first each step multiplies small
#: ones by 4.26 and keeps the others in (0, 2)
_QUINTIC_FROM_FURTHER = (QUINTIC[0], *(QUINTIC[1],) * 6, *QUINTIC[1:])


def floored(matrix: Tensor, floor: float) -> Tensor:
    r"""Symmetric matrices (B, d, d) with their eigenvalues below a floor raised to it.

    The sign s of :math:`M = A - \delta I` gives :math:`\delta I + (M + sM)/2`. Eigenvalues that are closer to the floor
    than 2e-10 of the Frobenius norm of M may come out up to half of that distance from where they belong.
    """
    m = plus_identity(matrix, -floor)
    s = m / nonzero(m.square().sum((-2, -1), keepdim=True).sqrt())  # without linalg, for export
    for c0, c1, c2 in _QUINTIC_FROM_FURTHER:
        s2 = torch.bmm(s, s)
        s = torch.baddbmm(s, s2, torch.baddbmm(s, s2, s, beta=c1, alpha=c2), beta=c0)  # c0 s + c1 s³ + c2 s⁵
    return plus_identity(symmetric(m + torch.bmm(m, s)) / 2, floor)
