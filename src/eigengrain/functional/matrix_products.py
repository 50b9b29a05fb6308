r"""Square root, Lyapunov equation, exponential, logarithm and inverse by matrix products alone.

With :math:`h(t) = c_0 + c_1 t + c_2 t^2`, the coupled iteration :math:`Y \leftarrow Y\,h(ZY),\ Z \leftarrow h(ZY)\,Z` takes
(A, I) to :math:`(A^{1/2}, A^{-1/2})` because :math:`x\,h(x^2)` drives every x in (0, 1] to 1. The same polynomial applied
to the block matrix :math:`\begin{pmatrix} B & C \\ 0 & -B \end{pmatrix}` takes it to its sign, whose corner solves the
Lyapunov equation. Every function works on (batch, d, d), has a fixed number of steps (on CUDA the kernels leave out those
that a matrix does not need) and records no gradient. They compute in float64, and the exponential also in float32.
``polar.py`` uses the same coefficients in float32.
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

#: Each row minimises max |1 − x h(x²)| over the interval that the previous row leaves, starting from x in [3.25e-4, 1], so
#: that eigenvalues down to 1e-7 of the trace converge. tests/core/functional/test_matrix_products.py derives them again.
_FIRST: Coefficients = (
    (8.49996310937758, -25.225114145608515, 18.722388549086318),
    (4.2326438606663883, -3.1432557157251892, 0.58454786200876019),
    (4.1551983143761539, -3.0894831698026395, 0.57841494059563159),
    (3.862025030647918, -2.8834288519951388, 0.55492819198574961),
    (3.0572992780466213, -2.290913011565896, 0.48772809525615601),
    (2.1163700701224104, -1.4979905877981856, 0.40054077315733477),
    (1.8785546481970568, -1.2539439627568107, 0.3753946147256027),
    _LIMIT,
    _LIMIT,
)
#: the same from x in [0.0235, 1], to which the first steps bring 1e-6
_REST: Coefficients = (
    (7.5853654347319814, -21.619477827056066, 15.856136765847259),
    (3.0996972083626519, -2.3234222583475233, 0.49139207054508255),
    (2.141152432845927, -1.5217013700759374, 0.40304800290377885),
    (1.8796388367371168, -1.2551446603966181, 0.37551483745526665),
    _LIMIT,
    _LIMIT,
)
#: all steps: eigenvalues down to 1e-12 of the trace converge
QUINTIC = _FIRST + _REST

#: result of the iteration for 1/√0: null directions come out as if σ were one over this
_NULL_INVERSE = math.prod(c0 for c0, _, _ in QUINTIC)


class _NewtonStep(NamedTuple):
    """The step ½(μx + 1/(μx))/largest, which brings [smallest, 1] to [1/largest, 1/margin]."""

    scale: float
    largest: float

    @classmethod
    def of(cls, smallest: float, margin: float) -> "_NewtonStep":
        scale = 1 / math.sqrt(smallest)
        return cls(scale, margin * (scale + 1 / scale) / 2)

    @property
    def weights(self) -> tuple[float, float]:
        """Factors of x and 1/x."""
        return self.scale / (2 * self.largest), 1 / (2 * self.largest * self.scale)


#: for any matrix. The margin is needed because the polynomials diverge beyond 1: eigenvalues that are negative by rounding
#: come out larger than those of 0, by up to 8 % for features with few active positions
_FAR = _NewtonStep.of(1 / _NULL_INVERSE, margin=2.0)
#: for matrices that converge in the first steps, whose σ are at least 2e-4 of the root of the trace
_NEAR = _NewtonStep.of(1.45e-4, margin=1.02)
#: steps of the rest that suffice after it
_NEAR_STEPS = 5


def symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """AB (B, d, d) for symmetric B, made symmetric, which it is up to rounding."""
    kernels = kernels_on(a)
    return symmetric(torch.bmm(a, b)) if kernels is None else kernels.symmetric_product(a, b)


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


def frobenius(p: Tensor) -> Tensor:
    """Frobenius norm (*, 1, 1) of matrices of moderate size, without linalg, for export."""
    if kernels_on(p):  # by rows first: a GPU sums a whole matrix in one block
        return torch.linalg.vector_norm(torch.linalg.vector_norm(p, dim=-1, keepdim=True), dim=-2, keepdim=True)
    return p.square().sum((-2, -1), keepdim=True).sqrt()


def plus_identity(matrix: Tensor, multiple: float) -> Tensor:
    return matrix + multiple * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def quadratic(m: Tensor, coefficients: tuple[float, float, float], times: float = 1.0) -> Tensor:
    """``times`` (c_0 I + c_1 M + c_2 M²) in one product."""
    c0, c1, c2 = (times * c for c in coefficients)
    out = torch.baddbmm(m, m, m, beta=c1, alpha=c2) if c2 else c1 * m
    out.diagonal(dim1=-2, dim2=-1).add_(c0)
    return out


class Roots(NamedTuple):
    """Y ≈ A^½ and Z ≈ A^−½ of A = P/scale, where scale (B, 1, 1) is the trace.

    ``far`` (B,) is 0 where the first steps were enough, and 1 where the others were needed or made in any case.
    """

    y: Tensor
    z: Tensor
    scale: Tensor
    far: Tensor


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
    a = p / scale
    if kernels := kernels_on(a):
        y, z, far = kernels.coupled_iteration(a.contiguous(), QUINTIC, len(_FIRST))
        return Roots(y, z, scale, far)
    y, z = coupled_iteration(a, QUINTIC)
    return Roots(symmetric(y), symmetric(z), scale, torch.ones_like(a[:, 0, 0], dtype=torch.int32))


def block_step(b: Tensor, c: Tensor, row: tuple[float, float, float], mirror: int = 1) -> tuple[Tensor, Tensor]:
    """Upper blocks of x h(x²) for x = (B C; 0 −B), with symmetric B and C that is symmetric, or antisymmetric for −1."""
    c0, c1, c2 = row
    s, bc = torch.bmm(b, b), torch.bmm(b, c)
    commutator = bc - mirror * bc.mT  # BC − CB, antisymmetric if C is symmetric
    # rounding breaks the symmetry of B and C a little more in each step: restore it. The factor ½ of each mean is
    # applied to the small factors, where it costs nothing.
    h, e = quadratic(s, (c0, c1, c2), times=0.5), (0.5 * c1) * commutator
    if c2:
        sd = torch.bmm(s, commutator)
        e = torch.add(e, sd - mirror * sd.mT, alpha=0.5 * c2)
    b, c = torch.bmm(b, h), torch.baddbmm(torch.bmm(c, h), b, e)
    return b + b.mT, c + mirror * c.mT


def sign_of_block(b: Tensor, c: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Upper blocks of the sign of (B C; 0 −B), for symmetric B with a spectrum in [0, 1] and symmetric C."""
    for row in coefficients:
        b, c = block_step(b, c, row)
    return b, c


def lyapunov(root: Roots, grad: Tensor, times: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    r"""X of :math:`P^{1/2} X + X P^{1/2} = G` for G = sym(grad) (B, d, d), at any rank, times a factor; and <G, Y> (B,).

    The inverse root is available, so the sign iteration can start with a Newton step
    :math:`\tfrac12(\mu B + (\mu B)^{-1})`, which saves six of fifteen polynomial steps. Null directions count as
    σ = 1.2e-7 of the root of the trace: between two of them X is large, and vanishes when it is multiplied with features.
    """
    y, z, scale, far = root
    if kernels := kernels_on(y):
        newton = (_FAR.weights, _NEAR.weights)
        corner, product = kernels.lyapunov(grad.contiguous(), y, z, far, newton, QUINTIC, len(_FIRST), _NEAR_STEPS)
    else:
        g, (of_y, of_z) = symmetric(grad.to(y.dtype)), _FAR.weights
        c = torch.baddbmm(g, torch.bmm(z, g), z, beta=of_y, alpha=of_z)
        corner = sign_of_block(of_y * y + of_z * z, symmetric(c), _FIRST)[1]
        product = (g * y).sum((-2, -1))
    return corner * (times / (2 * scale.sqrt())), product


def polynomial(z: Tensor, coefficients: list[float]) -> Tensor:
    """Σ c_k Z^k by Horner's rule."""
    out = plus_identity(torch.zeros_like(z), coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = plus_identity(torch.bmm(out, z), c)
    return out


@functools.cache
def _kernels(device: torch.device) -> Any:
    """The module of kernels, or None if a device cannot run them; tried once, with a warning if Triton is installed."""
    try:
        from eigengrain.functional._cuda import products
    except ImportError:
        return None
    try:
        products.try_kernels(device)
    except Exception as error:  # the compiler raises exceptions of many types
        warnings.warn(f"Triton cannot compile for {device}: using slower products ({error})", stacklevel=2)
        return None
    return products


def kernels_on(x: Tensor) -> Any:
    """The kernels on the device of a tensor, or None: also while compiling and under the transforms of torch.func."""
    return _kernels(x.device) if x.is_cuda and not torch.compiler.is_compiling() and not in_transform(x) else None


#: the largest trace of the exponential in float64: beyond it the rounding of P is larger than every eigenvalue that the
#: exponential does not make 0
_LARGEST_TRACE = 2.0**48


def largest_trace(dtype: torch.dtype) -> float:
    """``_LARGEST_TRACE`` in float64; smaller in float32, in proportion to its precision."""
    return _LARGEST_TRACE * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps


#: Taylor terms of (e^{−x} − 1)/(−x) for a spectrum in [0, 1/32], to which the largest trace is divided
_EXP_TERMS, _EXP_START = 7, 1 / 32

#: if each matrix has its own number of squarings, they start from a spectrum from 0 to this, where four terms suffice
_LARGEST_START = {torch.float64: 2.0**-10, torch.float32: 2.0**-5}


def exp_minus_twice(p: Tensor) -> Tensor:
    r""":math:`e^{-2P}` for positive semi-definite P (B, d, d) by scaling and squaring, without waiting for the device.

    The squarings work on :math:`E = e^{-2P} - I`, :math:`E \leftarrow 2E + E^2`, so that squarings that a small P does not
    need lose no digits. A matrix with a trace above :func:`largest_trace` is first scaled to that trace.
    """
    p = p * (largest_trace(p.dtype) / nonzero(trace(p))).clamp_max(1.0)
    if kernels := kernels_on(p):
        e = _exp_counted(p, kernels)
    else:
        squarings = round(math.log2(2 * largest_trace(p.dtype) / _EXP_START))  # 54, and 25 in float32
        y = p * (-2.0 * 0.5**squarings)
        e = torch.bmm(y, polynomial(y, [1 / math.factorial(k) for k in range(1, _EXP_TERMS + 1)]))
        for _ in range(squarings):
            e = torch.baddbmm(e, e, e, beta=2.0)
    return plus_identity(e, 1.0)


def _exp_counted(p: Tensor, kernels: Any) -> Tensor:
    """E = e^{−2P} − I with the number of squarings that ‖P²‖_F^½, an upper bound of λ₁, requires."""
    p2 = symmetric_product(p, p)
    norm = frobenius(p2).sqrt().clamp(2.0**-40, largest_trace(p.dtype))
    times = torch.ceil(torch.log2(2 * norm / _LARGEST_START[p.dtype])).clamp_min(0)
    factor = -2.0 * torch.exp2(-times)
    y, y2 = p * factor, p2 * factor**2
    # Y + Y²/2 + Y³/6 + Y⁴/24
    e = kernels.with_product(y + 0.5 * y2, y2, y2 + 4.0 * y, 1 / 24)
    most = round(math.log2(2 * largest_trace(p.dtype) / _LARGEST_START[p.dtype]))  # 59, and 25 in float32
    return kernels.square_repeatedly(e, times[:, 0, 0].int(), most)


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
#: ones by 4.23 and keeps the others in (0, 2)
_QUINTIC_FROM_FURTHER = (QUINTIC[0], *(QUINTIC[1],) * 6, *QUINTIC[1:])


def floored(matrix: Tensor, floor: float) -> Tensor:
    r"""Symmetric matrices (B, d, d) with their eigenvalues below a floor raised to it.

    The sign s of :math:`M = A - \delta I` gives :math:`\delta I + (M + sM)/2`. Eigenvalues that are closer to the floor
    than 2e-10 of the Frobenius norm of M may come out up to half of that distance from where they belong.
    """
    m = plus_identity(matrix, -floor)
    s = m / nonzero(frobenius(m))
    for c0, c1, c2 in _QUINTIC_FROM_FURTHER:
        s2 = torch.bmm(s, s)
        s = torch.baddbmm(s, s2, torch.baddbmm(s, s2, s, beta=c1, alpha=c2), beta=c0)  # c0 s + c1 s³ + c2 s⁵
    return plus_identity(symmetric(m + torch.bmm(m, s)) / 2, floor)
