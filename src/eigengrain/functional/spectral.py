r"""Functions of symmetric matrices with their exact gradient.

There is one primitive: :math:`F = U f(\Lambda) U^T` with
:math:`\partial l/\partial P = U\,[(U^T \mathrm{sym}(G)\,U) \circ K]\,U^T`, K the divided differences of f. It contains no
:math:`1/(\lambda_i - \lambda_j)`, so equal eigenvalues are not a special case. Square root, powers, logarithm, exponential
and the published approximate gradients are arguments to it.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional._autograd import first_order_only
from eigengrain.functional.eigen import decompose, rounding_floor
from eigengrain.functional.gradient_rules import GradientRule
from eigengrain.functional.inputs import check_number, check_square, output_dtype, to_compute
from eigengrain.functional.matrix_products import symmetric
from eigengrain.functional.scalar_functions import ExpInverse, Generic, Logarithm, Power, ScalarFunction, SquareRoot
from eigengrain.functional.subsets import EigenSubset
from eigengrain.names import CUTS

Cut = Literal["exact", "projector"]


def check_cut(cut: str) -> None:
    if cut not in CUTS:
        raise UnknownName("cut", cut, CUTS)


class _SpectralFunction(torch.autograd.Function):
    """U f Uᵀ of a finished decomposition, with the gradient given by the divided differences K."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, f: Tensor, vectors: Tensor, k: Tensor, name: str) -> Tensor:
        return (vectors * f.unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        p, _, vectors, k, name = inputs
        ctx.save_for_backward(p, vectors, k)
        ctx.function = name  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, vectors, k = ctx.saved_tensors
        with torch.no_grad():
            dp = vectors @ ((vectors.mT @ symmetric(grad) @ vectors) * k) @ vectors.mT
        return first_order_only(dp, ctx.function, grad, p), None, None, None, None


@torch.library.custom_op("eigengrain::require_above", mutates_args=())
def _require_above(values: Tensor, floor: float, message: str) -> Tensor:
    """Return the values unchanged, or raise: a check that works in compiled and vmapped code."""
    smallest = float(values.min()) if values.numel() else float("inf")
    if not smallest > floor:
        raise ArgumentError("P", message.format(smallest=smallest, floor=floor))
    return values.clone()


@_require_above.register_fake
def _(values: Tensor, floor: float, message: str) -> Tensor:
    return torch.empty_like(values)


@torch.library.register_vmap("eigengrain::require_above")
def _(info: Any, in_dims: tuple[int | None, None, None], values: Tensor, floor: float, message: str) -> Any:
    return _require_above(values, floor, message), in_dims[0]


#: an eigenvalue this far below zero, relative to the largest, is not a rounding error: the matrix is not semi-definite
_INDEFINITE = 1e-5


def _checked_values(values: Tensor, f: ScalarFunction, floor: float) -> Tensor:
    """Eigenvalues of a semi-definite matrix: those at rounding level become zero, and clearly negative ones raise."""
    if not f.semidefinite:
        return values
    largest = values.abs().amax(-1, keepdim=True)
    if f.definite:
        problem = f"must have eigenvalues above {{floor:g}} for {f.name}, the smallest is {{smallest:.3g}}: "
        return _require_above(values, floor, problem + "add a multiple of the identity to the matrix first")
    relative = torch.where(largest > 0, values / torch.where(largest > 0, largest, 1.0), 0.0)
    problem = f"must be positive semi-definite for {f.name}, the smallest eigenvalue is {{smallest:.3g}} of the largest"
    relative = _require_above(relative, -_INDEFINITE, problem)
    return torch.where(relative <= rounding_floor(relative), 0.0, values)


def keep_null_space(keep: Tensor, values: Tensor) -> Tensor:
    """A mask (d,) as (*, d) for eigenvalues with exact zeros, which are kept if the first of them is, and else dropped."""
    rank = torch.arange(len(keep), device=keep.device)
    return keep[torch.minimum(rank, (values > 0).sum(-1, keepdim=True).clamp_max(len(keep) - 1))]


def _cut_differences(k: Tensor, values: Tensor, f: Tensor, keep: Tensor, cut: str) -> Tensor:
    """Divided differences of the masked function; across the cut (f_i − 0)/(λ_i − λ_j), because the subspace turns."""
    kept = keep.to(f.dtype)
    both = kept.unsqueeze(-1) * kept.unsqueeze(-2)
    inside = torch.where(both > 0, k, 0.0)
    if cut == "projector":
        return inside
    f = f * kept
    rise = f.unsqueeze(-1) - f.unsqueeze(-2)
    run = values.unsqueeze(-1) - values.unsqueeze(-2)
    # between equal eigenvalues there is no derivative, and the subspace is held fixed
    across = (kept.unsqueeze(-1) != kept.unsqueeze(-2)) & (rise != 0) & (run != 0)
    return torch.where(across, rise / torch.where(across, run, 1.0), inside)


def _evaluate(
    P: Tensor,
    f: ScalarFunction,
    subset: EigenSubset | str | None,
    cut: str,
    backend: str,
    floor: float = 0.0,
    differences: Callable[[Tensor], Tensor] | None = None,
    differences_include_cut: bool = False,
) -> Tensor:
    check_square(P)
    check_cut(cut)
    chosen, d = EigenSubset.parse(subset), P.shape[-1]
    p = symmetric(to_compute(P))
    keep = chosen.mask(d, p.device)
    raw, vectors = decompose(p, backend)
    values = _checked_values(raw, f, floor)
    fx = f(values)
    k = differences(values) if differences else f.divided_difference(values.unsqueeze(-1), values.unsqueeze(-2))
    if not chosen.covers(d):
        if f.semidefinite and not f.definite:
            keep = keep_null_space(keep, values)
        if not differences_include_cut:
            k = _cut_differences(k, values, fx, keep, cut)
        fx = fx * keep.to(fx.dtype)
    out: Tensor = _SpectralFunction.apply(p, fx, vectors, k, f.name)
    return out.to(P.device, output_dtype(P))


def spectral_function(
    P: Tensor,
    f: Callable[[Tensor], Tensor],
    *,
    derivative: Callable[[Tensor], Tensor] | None = None,
    subset: EigenSubset | str | None = None,
    cut: Cut = "exact",
    backend: str = "auto",
) -> Tensor:
    r"""Apply a smooth function to the eigenvalues of symmetric matrices, with the exact gradient.

    .. math:: F = U f(\Lambda) U^T, \qquad
       \frac{\partial l}{\partial P} = U\,[(U^T \mathrm{sym}(G)\,U) \circ K]\,U^T, \qquad
       K_{ij} = \frac{f(\lambda_i) - f(\lambda_j)}{\lambda_i - \lambda_j}

    Args:
        P: symmetric (*, d, d); only the symmetric part is used. F is float64 if P is float64 and float32 otherwise.
        f: elementwise function of a float64 tensor, or a :class:`ScalarFunction` with its own divided differences.
        derivative: derivative of f; None uses automatic differentiation.
        subset: eigenvalues that are kept, such as ``"top:206"``; the others are dropped from F.
        cut: how a cut spectrum is differentiated. ``exact`` lets the kept subspace turn with P, which is unbounded
            where the cut separates close eigenvalues (see :meth:`EigenSubset.relative_gap`); ``projector`` holds it fixed.
            A cut between equal eigenvalues is undefined: the result depends on the solver's eigenvectors, and both
            gradients hold them fixed. Of functions with f(0) = 0 of semi-definite matrices, eigenvalues that are zero up to
            rounding are kept or dropped together, as the first of them is, so that a cut inside the null space is defined.
        backend: eigensolver, see :func:`eigh`.

    Raises:
        ValueError: if P is not square, or subset, cut or backend cannot be read.
        SecondOrderError: in a second backward pass with respect to P.

    Example:
        >>> spectral_function(torch.diag(torch.tensor([0.0, 1.0])), torch.cos)
        tensor([[1.0000, 0.0000],
                [0.0000, 0.5403]])

    References:
        Bhatia, Matrix Analysis, theorem V.3.3 (Daleckii–Krein).
    """
    function = f if isinstance(f, ScalarFunction) else Generic(f, derivative)
    return _evaluate(P, function, subset, cut, backend)


def matrix_sqrt(
    P: Tensor,
    *,
    subset: EigenSubset | str | None = None,
    cut: Cut = "exact",
    gradient: str | GradientRule = "exact",
    backend: str = "auto",
) -> Tensor:
    r"""Square root of positive semi-definite matrices, :math:`Q = P^{1/2} = U \Lambda^{1/2} U^T` (Eq. 4).

    The exact gradient has :math:`K_{ij} = 1/(\sigma_i + \sigma_j)`, :math:`\sigma = \sqrt\lambda`. Eigenvalues below
    :math:`d\,\varepsilon\,\lambda_1` count as zero; between two of them the root has no derivative and 0 is returned. For
    the covariance of features, :func:`sqrt_covariance` is more accurate and its gradient is bounded.

    Args:
        P: positive semi-definite (*, d, d).
        subset, cut, backend: as in :func:`spectral_function`.
        gradient: ``exact``, or a published approximation for comparison: ``original``, ``trunc``, ``topn``, ``taylor``,
            ``pade``, ``newton``, ``power-iteration``, ``lyapunov``; a :class:`GradientRule` also sets their parameters.
            The value is exact for every rule.

    Raises:
        ValueError: if P has an eigenvalue well below zero, or as in :func:`spectral_function`.

    Example:
        >>> matrix_sqrt(torch.diag(torch.tensor([4.0, 9.0]))).diagonal()
        tensor([2., 3.])
    """
    rule = GradientRule.of(gradient)
    if rule.name == "exact":
        return _evaluate(P, SquareRoot(), subset, cut, backend)
    if rule.from_spectrum:
        topn = rule.name == "topn"
        rule = rule.of_subset(EigenSubset.parse(subset), P.shape[-1]) if topn else rule
        return _evaluate(P, SquareRoot(), subset, cut, backend, 0.0, rule.differences, differences_include_cut=topn)
    if not EigenSubset.parse(subset).covers(P.shape[-1]):
        raise ArgumentError("subset", f"must be 'all' for gradient={rule.name!r}", str(subset), "use gradient='exact'")
    return rule.attach(P, _evaluate(P.detach(), SquareRoot(), None, cut, backend))


def matrix_power(
    P: Tensor, p: float, *, subset: EigenSubset | str | None = None, cut: Cut = "exact", backend: str = "auto"
) -> Tensor:
    r"""Power of positive semi-definite matrices, :math:`P^p = U \Lambda^p U^T`.

    The exponent is from −100 to 100. Zero eigenvalues stay zero for p > 0 (between two of them the derivative is set to 0
    if p < 1); for p ≤ 0 they raise.

    Example:
        >>> matrix_power(torch.diag(torch.tensor([4.0, 9.0])), -1).diagonal()
        tensor([0.2500, 0.1111])
    """
    return _evaluate(P, Power(p), subset, cut, backend)


def matrix_log(
    P: Tensor, *, eps: float = 0.0, subset: EigenSubset | str | None = None, cut: Cut = "exact", backend: str = "auto"
) -> Tensor:
    r"""Logarithm of positive definite matrices, :math:`\log P = U \log(\Lambda) U^T`.

    Args:
        eps: every eigenvalue must be larger than this. Covariances of features are seldom definite: add
            :math:`\varepsilon I` to them first, as the log-covariance head does.

    Raises:
        ValueError: if an eigenvalue is at or below ``eps``.

    Example:
        >>> matrix_log(torch.eye(2) * 2).diagonal()
        tensor([0.6931, 0.6931])
    """
    check_number(eps, "eps", 0)
    return _evaluate(P, Logarithm(), subset, cut, backend, floor=eps)


def exp_inverse(P: Tensor, *, subset: EigenSubset | str | None = None, cut: Cut = "exact", backend: str = "auto") -> Tensor:
    r"""Exponential inverse, :math:`S = e^{-P} = U e^{-\Lambda} U^T` (Section 4.2), of any symmetric matrices.

    Example:
        >>> exp_inverse(torch.zeros(2, 2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    return _evaluate(P, ExpInverse(), subset, cut, backend)
