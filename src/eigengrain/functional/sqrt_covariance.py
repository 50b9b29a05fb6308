r"""From features to the square root of their covariance in one step, with a gradient that is bounded.

Let :math:`X_c = (X - \bar X)/\sqrt N = U \Sigma V^T`. The root :math:`Q = (X_c X_c^T)^{1/2} = U \Sigma U^T` is the left
polar factor of :math:`X_c`, and :math:`X_c \mapsto Q` has Lipschitz constant :math:`\sqrt2` at every rank and condition
number, so :math:`\|\partial l/\partial X\|_F \le \sqrt{2/N}\,\|\partial l/\partial Q\|_F`. In floating point this holds
only if :math:`1/(\sigma_i + \sigma_j)` is never formed:

.. math:: \frac{\partial l}{\partial X_c} = 2U\,[(U^T \mathrm{sym}(G) U) \circ R]\,V^T, \qquad
   R_{ij} = \frac{\sigma_j}{\sigma_i + \sigma_j} \in [0, 1],

with the rows of :math:`V^T` of unit length, zero where σ is null.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.errors import ArgumentError, EigenSolverError, UnknownName
from eigengrain.functional._autograd import first_order_only, graph_token
from eigengrain.functional.covariance import centre_in_range, covariance, outer_product
from eigengrain.functional.eigen import check_finite, decompose, rounding_floor, zero_rounding
from eigengrain.functional.graded_factors import length_floor, resolve
from eigengrain.functional.gradient_rules import GradientRule
from eigengrain.functional.inputs import (
    LinAlgError,
    check_features,
    check_number,
    choose_dtype,
    full_precision,
    in_transform,
    named_dtype,
    output_dtype,
    reduces_float32,
)
from eigengrain.functional.matrix_products import symmetric
from eigengrain.functional.newton_schulz import root_by_products
from eigengrain.functional.polar import root_by_polar
from eigengrain.functional.scaling_eigen_branch import qs_and_slope, scaling_factor
from eigengrain.functional.spectral import Cut, check_cut, keep_null_space, matrix_sqrt
from eigengrain.functional.subsets import EigenSubset
from eigengrain.names import SOLVERS


class _Factors(NamedTuple):
    """Thin factors of X_c: U (B, d, r), σ (B, r) descending and exactly 0 where null, Vᵀ (B, r, N) with null rows 0.

    Vᵀ is needed for gradients alone, and left empty without one.
    """

    u: Tensor
    sigma: Tensor
    vt: Tensor


def _split_lengths(rows: Tensor, keep: Tensor, unit: bool = True) -> tuple[Tensor, Tensor]:
    """Lengths of the rows, and the rows divided by them in place if ``unit``, otherwise none; both 0 where not kept."""
    length = torch.linalg.vector_norm(rows, dim=-1)
    keep = keep & (length > 0)
    sigma = torch.where(keep, length, 0.0)
    if not unit:
        return sigma, rows[..., :0]
    if rows.is_cuda:  # a bad sample may contain NaN, which a factor of 0 does not remove; on the CPU it has raised
        rows = torch.where(keep.unsqueeze(-1), rows, 0.0)
    inverse = torch.where(keep, 1 / torch.where(keep, length, 1.0), 0.0)
    return sigma, rows.mul_(inverse.unsqueeze(-1))


def _orthogonal_rows(x: Tensor, rank: int, r: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uᵀ (B, r, m) and Y = UᵀX (B, r, n) for X (B, m, n) from X Xᵀ, longest rows first, and a mask of those not null."""
    values, u = decompose(outer_product(x))
    within = torch.arange(r, device=x.device) < rank
    if x.dtype == torch.float64:
        rows, values = u.mT[..., :r, :], values[..., :r]
        return rows, rows @ x, within & (values > rounding_floor(values, d))
    rows, y = (t[..., :r, :] for t in resolve(u.mT, u.mT @ x))
    lengths = torch.linalg.vector_norm(y, dim=-1)
    return rows, y, within & (lengths > length_floor(lengths, x.shape[-2]))


def _factor_eigh(xc: Tensor, with_vt: bool) -> _Factors:
    """Factors from the d × d covariance; σ_j = ‖u_jᵀX_c‖, because √λ_j has lost the digits of small eigenvalues."""
    d, n = xc.shape[-2:]
    rows, y, keep = _orthogonal_rows(xc, min(d, n - 1), d, d)
    return _Factors(rows.mT, *_split_lengths(y, keep, with_vt))


def _factor_gram(xc: Tensor, with_vt: bool) -> _Factors:
    """Factors from the N × N Gram matrix, for fewer positions than channels."""
    d, n = xc.shape[-2:]
    rows, y, keep = _orthogonal_rows(xc.mT, min(d, n - 1), min(d, n), d)
    sigma, ut = _split_lengths(y, keep)
    vt = torch.where(sigma.unsqueeze(-1) > 0, rows, 0.0) if with_vt else rows[..., :0]
    return _Factors(ut.mT, sigma, vt)


@torch.library.custom_op("eigengrain::svd", mutates_args=())
def _svd_op(xc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = xc.reshape(-1, *xc.shape[-2:])
    check_finite(batch, "svd")
    # cuSOLVER's default is a Jacobi method that stops early: its error at κ(P) = 1e6 in float32 was 1.3e-5
    driver = "gesvd" if xc.is_cuda else None
    try:
        u, sigma, vt = torch.linalg.svd(batch, full_matrices=False, driver=driver)
    except LinAlgError:
        try:
            u, sigma, vt = (t.to(xc.device, xc.dtype) for t in torch.linalg.svd(batch.cpu().double(), full_matrices=False))
        except LinAlgError as error:
            raise EigenSolverError(f"svd failed, also in float64 on the CPU: {error}") from error
    u, sigma, vt = (factor.unflatten(0, xc.shape[:-2]).contiguous() for factor in (u, sigma, vt))
    return u, sigma, vt


@_svd_op.register_fake
def _(xc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *lead, d, n = xc.shape
    r = min(d, n)
    return xc.new_empty(*lead, d, r), xc.new_empty(*lead, r), xc.new_empty(*lead, r, n)


@torch.library.register_vmap("eigengrain::svd")
def _(info: Any, in_dims: tuple[int | None], xc: Tensor) -> Any:
    assert in_dims[0] is not None
    return _svd_op(xc.movedim(in_dims[0], 0)), (0, 0, 0)


def _factor_svd(xc: Tensor, with_vt: bool) -> _Factors:
    """Factors from the features themselves: the condition number is not squared."""
    u, sigma, vt = _svd_op(xc)
    d, n = xc.shape[-2:]
    # singular values have their own rounding level, because their condition number is not squared: LAPACK returns up to
    # 2 √max(d, N) ε σ_1 for exact zeros
    floor = 4 * math.sqrt(max(d, n)) * torch.finfo(xc.dtype).eps * sigma[..., :1]
    keep = (torch.arange(sigma.shape[-1], device=xc.device) < min(d, n - 1)) & (sigma > floor)
    return _Factors(u, torch.where(keep, sigma, 0.0), torch.where(keep.unsqueeze(-1), vt, 0.0) if with_vt else vt[..., :0])


_FACTORS = {"eigh": _factor_eigh, "gram": _factor_gram, "svd": _factor_svd}


def _ratios(sigma: Tensor, keep: Tensor, cut: str) -> Tensor:
    r"""R − 1 keepᵀ (*, r, r), where :math:`R_{ij} = K_{ij}\sigma_j` with K the divided differences of the kept roots.

    For the full spectrum this is −σ_i/(σ_i + σ_j). The 1 is subtracted so that :func:`_gradient` can treat the directions
    outside U, of which there are many at short rank, together with those inside.
    """
    si, sj = sigma.unsqueeze(-1), sigma.unsqueeze(-2)
    total = si + sj
    inside = -si / total.clamp_min(torch.finfo(sigma.dtype).tiny)  # 0/tiny = 0 between null directions
    if keep.dtype != torch.bool:  # every eigenvalue is kept
        return inside
    ki, kj = keep.unsqueeze(-1), keep.unsqueeze(-2)
    if cut == "projector":
        return torch.where(kj, torch.where(ki, inside, -1.0), 0.0)
    # λ_j/(λ_j − λ_i) − 1 = λ_i/(λ_j − λ_i) for i dropped, j kept; σ_i σ_j/(λ_i − λ_j) for i kept, j dropped. Between equal
    # eigenvalues there is no derivative, and the subspace is held fixed.
    gap = torch.where(si == sj, 1.0, si - sj)
    across = torch.where(si == sj, torch.where(kj, -1.0, 0.0), inside * torch.where(kj, si, -sj) / gap)
    return torch.where(ki & kj, inside, torch.where(ki | kj, across, 0.0))


def _kept(subset: EigenSubset, sigma: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Mask (*, r) of the kept directions (ones, not booleans, for all), and whether (*, 1, 1) those outside U are kept."""
    if subset.covers(d):
        return torch.ones_like(sigma), sigma.new_ones(1, dtype=torch.bool)
    keep = keep_null_space(subset.mask(d, sigma.device), torch.nn.functional.pad(sigma, (0, d - sigma.shape[-1])))
    return keep[..., : sigma.shape[-1]], keep[..., -1:, None]


class _Root(torch.autograd.Function):
    """Q, or (1 + s) Q, of finished factors, with the bounded gradient to the features."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, token: Tensor, u: Tensor, sigma: Tensor, vt: Tensor, keep: Tensor, outside: Tensor, cut: str, seb: bool
    ) -> Tensor:
        with full_precision(u):
            scaled = sigma * keep.to(sigma.dtype)
            if seb:
                scaled = scaled * (1 + qs_and_slope(sigma.square())[0]).unsqueeze(-1)
            return (u * scaled.unsqueeze(-2)) @ u.mT

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, token, u, sigma, vt, keep, outside, cut, seb = inputs
        ctx.save_for_backward(token, u, sigma, vt, keep, outside)
        ctx.options = (cut, seb, x.shape, x.dtype, x.device)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cut, seb, shape, dtype, device = ctx.options
        token, *factors, keep, outside = ctx.saved_tensors
        with torch.no_grad(), full_precision(factors[0]):
            dx = _gradient(grad, _Factors(*factors), keep, outside, cut, seb)
        dx = dx.reshape(dx.shape[:-1] + shape[2:]).to(device, dtype)
        return first_order_only(dx, "sqrt_covariance", grad, token), None, None, None, None, None, None, None, None


def _gradient(grad: Tensor, factors: _Factors, keep: Tensor, outside: Tensor, cut: str, seb: bool) -> Tensor:
    """∂l/∂X (B, d, N) from ∂l/∂Q, or from ∂l/∂A with ``seb``; ``keep`` and ``outside`` as in :func:`_kept`."""
    u, sigma, vt = factors
    gu = symmetric(grad).to(u.dtype) @ u  # (B, d, r)
    c = u.mT @ gu  # (B, r, r)
    # A full U would give 2 U (C ∘ R) Vᵀ. At short rank U is thin, and for directions i outside it R_ij = 1 where j is kept:
    # with (I − UUᵀ) G U for those, both cases are 2 [G U keep + U (C ∘ (R − 1 keepᵀ))] Vᵀ.
    inner = c * _ratios(sigma, keep, cut)
    scale = torch.full_like(sigma[..., :1], 2.0)
    if keep.dtype == torch.bool:
        if cut == "projector":
            gu = torch.where(outside, gu, u @ c)
        gu = gu * keep.unsqueeze(-2)
    if seb:
        s, slope = qs_and_slope(sigma.square())
        scale = scale * (1 + s).unsqueeze(-1)
        # <G, Q> ds/dX_c, with ds/dX_c = U diag(∂s/∂σ) Vᵀ of norm at most 1
        along = (c.diagonal(dim1=-2, dim2=-1) * sigma * keep).sum(-1, keepdim=True)
        inner.diagonal(dim1=-2, dim2=-1).add_(along * slope / scale)
    left = (u @ inner).add_(gu).mul_((scale / math.sqrt(vt.shape[-1])).unsqueeze(-1))
    dx = left @ vt
    # the mean is projected out again: rows of Vᵀ next to the null space are centred only up to rounding
    return dx.sub_(dx.mean(-1, keepdim=True))


#: largest batch × channels³ at which matrix products are faster than cuSOLVER's batched eigensolver
_PRODUCTS_LIMIT = 2**34

#: relative error of Q in the Frobenius norm against a float64 SVD, at condition number 1e10 and full rank
ERROR_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}


def choose_solver(
    device_type: str,
    channels: int,
    positions: int,
    dtype: torch.dtype = torch.float64,
    *,
    batch: int = 1,
    spectrum: bool = False,
) -> str:
    """The solver of ``solver="auto"``: a fixed rule. That for CUDA is derived from ``benchmarks/solver-choice-h200.csv``.

    1. ``products`` if no eigenvalues are needed: on MPS in float32, where torch has no eigensolver, and on CUDA for
       batch × channels³ up to 2³⁴, where it is faster than ``eigh``; in float64 only for more positions than channels,
       because its gradient is less accurate for singular covariances.
    2. ``gram`` for fewer positions than channels: it decomposes the smaller matrix.
    3. ``eigh`` otherwise.

    Args:
        device_type: ``torch.device.type`` of the features.
        channels, positions: C and N of the features.
        dtype, batch: working precision, and number of feature maps.
        spectrum: whether eigenvalues are needed: for a subset, a published gradient rule, or to return them.

    Example:
        >>> choose_solver("cpu", channels=256, positions=784), choose_solver("cuda", channels=512, positions=196)
        ('eigh', 'gram')
    """
    on_mps = device_type == "mps" and dtype == torch.float32
    on_cuda = device_type == "cuda" and batch * channels**3 <= _PRODUCTS_LIMIT
    if (on_mps or (on_cuda and (dtype == torch.float32 or positions > channels))) and not spectrum:
        return "products"
    return "gram" if positions < channels else "eigh"


def _resolve_dtype(dtype: torch.dtype | str, x: Tensor, solver: str) -> torch.dtype:
    if dtype == "auto":
        dtype = torch.float64 if solver == "products" else choose_dtype(x.device, x.dtype)
    dtype = named_dtype(dtype)
    # compiled products would be in TF32 or bfloat16, and no context here can prevent that
    reduced = torch.compiler.is_compiling() and not torch.compiler.is_exporting() and reduces_float32(x.device.type)
    return torch.float64 if reduced else dtype


def _resolve_solver(solver: str, x: Tensor, dtype: torch.dtype, spectrum: bool) -> str:
    if solver not in SOLVERS:
        raise UnknownName("solver", solver, SOLVERS)
    if solver != "auto":
        return solver
    batch, channels, *size = x.shape
    return choose_solver(x.device.type, channels, math.prod(size), dtype, batch=batch, spectrum=spectrum)


@overload
def sqrt_covariance(
    x: Tensor,
    seb: bool = ...,
    subset: EigenSubset | str | None = ...,
    cut: Cut = ...,
    solver: str = ...,
    gradient: str | GradientRule = ...,
    *,
    dtype: torch.dtype | str = ...,
    accuracy: float = ...,
    return_eigenvalues: Literal[False] = ...,
) -> Tensor: ...


@overload
def sqrt_covariance(
    x: Tensor,
    seb: bool = ...,
    subset: EigenSubset | str | None = ...,
    cut: Cut = ...,
    solver: str = ...,
    gradient: str | GradientRule = ...,
    *,
    dtype: torch.dtype | str = ...,
    accuracy: float = ...,
    return_eigenvalues: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def sqrt_covariance(
    x: Tensor,
    seb: bool = False,
    subset: EigenSubset | str | None = None,
    cut: Cut = "exact",
    solver: str = "auto",
    gradient: str | GradientRule = "exact",
    *,
    dtype: torch.dtype | str = "auto",
    accuracy: float = 1e-4,
    return_eigenvalues: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Square root of the covariance of features, with a gradient bounded at every rank and condition number.

    .. math:: Q = \big(\tfrac1N (X - \bar X)(X - \bar X)^T\big)^{1/2}, \qquad
       \Big\|\frac{\partial l}{\partial X}\Big\|_F \le \sqrt{\tfrac2N}\,\Big\|\frac{\partial l}{\partial Q}\Big\|_F

    With ``seb`` the Scaling Eigen Branch is applied, :math:`A = (1 + s)Q` with :math:`s = \|QS^T\|_F` (Eqs. 23 and 24), and
    the bound is :math:`(\sqrt2(1+s) + \|Q\|_F)/\sqrt N`. Dead channels, constant input and a single position are allowed:
    null directions stay null, and where the root has no derivative the symmetric one is returned.

    Args:
        x: features, (B, C, H, W) or (B, C, N), any floating dtype, also under autocast.
        seb: return A instead of Q.
        subset: eigenvalues kept in Q, such as ``"top:206"``; s always uses all of them.
        cut: how a cut spectrum is differentiated, ``exact`` or ``projector``, see :func:`spectral_function`. The bound
            holds for the full spectrum and for ``projector``.
        solver: ``auto``, ``eigh`` (of the C × C covariance), ``gram`` (of the N × N Gram matrix, for N < C), ``svd`` (of
            the features), or ``products`` (no decomposition, see :func:`quintic_sqrt`; it exports and compiles into one
            graph; in float64 the error of s is described in :func:`scaling_factor`; in float32 s has a relative error of
            about ε tr P, and is 0 for a covariance with a trace above 2²¹). ``auto`` is the rule of :func:`choose_solver`.
        gradient: ``exact``, or a published rule for comparison, see :class:`GradientRule`.
        dtype: working precision, ``torch.float64`` or ``torch.float32``, also as ``"float64"`` or ``"float32"``. ``"auto"``
            is the rule of :func:`choose_dtype`, and float64 for ``products``, published gradient rules, and an
            ``accuracy`` that float32 does not guarantee.
        accuracy: required relative error of Q at condition number 1e10 and full rank. Every float64 solver guarantees
            1e-9, float32 guarantees 1e-4; a smaller value raises.
        return_eigenvalues: also return the eigenvalues of the covariance (B, C), descending, without gradient.

    Returns:
        (B, C, C), float64 if x is float64 and float32 otherwise; with ``return_eigenvalues`` a pair.

    Raises:
        ValueError: for a shape, dtype, subset or option that does not fit.
        NonFiniteError: if the features contain NaN or infinity, with the bad ``samples`` (not with ``products``).
        SecondOrderError: in a second backward pass.

    Example:
        >>> sqrt_covariance(torch.tensor([[[0.0, 2.0, 4.0], [1.0, 1.0, 1.0]]]))
        tensor([[[1.6330, 0.0000],
                 [0.0000, 0.0000]]])
    """
    check_features(x)
    check_cut(cut)
    chosen, d = EigenSubset.parse(subset), x.shape[1]
    rule = GradientRule.of(gradient)
    spectrum = return_eigenvalues or rule.name != "exact" or not chosen.covers(d)
    check_number(accuracy, "accuracy", 0)
    if dtype == "auto" and (rule.name != "exact" or accuracy < ERROR_BOUNDS[torch.float32]):
        dtype = torch.float64
    dtype = _resolve_dtype(dtype, x, solver)
    solver = _resolve_solver(solver, x, dtype, spectrum)
    if accuracy < ERROR_BOUNDS[dtype]:
        remedy = "use {dtype}=torch.float64" if dtype == torch.float32 else ""
        raise ArgumentError("accuracy", f"must be at least {ERROR_BOUNDS[dtype]:g} in {dtype}", accuracy, remedy)
    if solver != "products" and rule.name == "exact":
        [q], eigenvalues = _roots(x, [chosen], seb, cut, solver, dtype)
        return (q, eigenvalues) if return_eigenvalues else q
    q = _by_products(x, seb, chosen, rule, dtype) if solver == "products" else _by_rule(x, seb, chosen, cut, rule)
    if not return_eigenvalues:
        return q
    return q, zero_rounding(decompose(covariance(x.detach(), dtype=torch.float64)).values).to(q)


def _roots(
    x: Tensor, subsets: Sequence[EigenSubset], seb: bool, cut: Cut, solver: str, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Q or A of each subset from one factorisation, and the eigenvalues (B, d)."""
    d = x.shape[1]
    xc, scale = centre_in_range(x.detach(), dtype)
    recorded = torch.compiler.is_compiling() or in_transform(x) or (torch.is_grad_enabled() and x.requires_grad)
    with full_precision(xc):
        u, sigma, vt = _FACTORS[solver](xc, recorded)
    if scale is not None:
        sigma = sigma * scale.nan_to_num(1.0)  # NaN for a sample with NaN, whose σ is 0 on CUDA
    token, matrices = graph_token(x), []
    for chosen in subsets:
        q: Tensor = _Root.apply(x, token, u, sigma, vt, *_kept(chosen, sigma, d), cut, seb)
        matrices.append(q.to(x.device, output_dtype(x)))
    return matrices, torch.nn.functional.pad(sigma.square(), (0, d - sigma.shape[-1])).to(matrices[0])


def sqrt_covariance_of_subsets(
    x: Tensor,
    subsets: Sequence[EigenSubset | str],
    seb: bool = False,
    cut: Cut = "exact",
    solver: str = "auto",
    *,
    dtype: torch.dtype | str = "auto",
) -> tuple[list[Tensor], Tensor]:
    """:func:`sqrt_covariance` of several eigenvalue subsets from one decomposition.

    The arguments are those of :func:`sqrt_covariance`, with at least one subset and a solver that computes eigenvalues.

    Returns:
        one matrix (B, C, C) per subset, with gradient, and the eigenvalues (B, C), descending, without gradient.

    Example:
        >>> x = torch.tensor([[[0.0, 2.0, 4.0], [1.0, 1.0, 1.0]]])
        >>> (whole, rest), eigenvalues = sqrt_covariance_of_subsets(x, ["all", "last:1"])
        >>> whole[0, 0, 0].item() > 1, rest.abs().max().item(), eigenvalues
        (True, 0.0, tensor([[2.6667, 0.0000]]))
    """
    check_features(x)
    check_cut(cut)
    if not subsets:
        raise ArgumentError("subsets", "must contain at least one subset, such as 'all'", subsets)
    dtype = _resolve_dtype(dtype, x, solver)
    solver = _resolve_solver(solver, x, dtype, spectrum=True)
    if solver == "products":
        raise ArgumentError("solver", "must compute eigenvalues for a subset", solver, "use solver='eigh'")
    return _roots(x, [EigenSubset.parse(subset) for subset in subsets], seb, cut, solver, dtype)


def _by_products(x: Tensor, seb: bool, subset: EigenSubset, rule: GradientRule, dtype: torch.dtype) -> Tensor:
    if not subset.covers(x.shape[1]):
        raise ArgumentError("solver", "must compute eigenvalues for a subset", "products", "use solver='eigh'")
    if rule.name != "exact":
        raise ArgumentError("solver", f"must be 'auto' or 'eigh' for gradient={rule.name!r}", "products")
    if dtype == torch.float64:
        return root_by_products(x, seb).to(x.device, output_dtype(x))
    return root_by_polar(x, seb).to(output_dtype(x))


def _by_rule(x: Tensor, seb: bool, subset: EigenSubset, cut: Cut, rule: GradientRule) -> Tensor:
    """Covariance, root and factor in separate steps, as in the published rules."""
    p = covariance(x, dtype=torch.float64)
    q = matrix_sqrt(p, subset=subset, cut=cut, gradient=rule)
    if seb:
        q = q * (1 + scaling_factor(p, solver="eigh"))[..., None, None]
    return q.to(x.device, output_dtype(x))
