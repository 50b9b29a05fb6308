"""The covariance head: reduce → covariance → normalise → branch → vectorise.

MPN-COV, iSQRT-COV, MPA, MTP and the log-covariance of DeepO2P, each with and without the Scaling Eigen Branch, and the
ablations of the paper are settings of this one head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional.covariance import covariance, covariance_in_range, triu_vector
from eigengrain.functional.eigen import eigh, zero_rounding
from eigengrain.functional.gradient_rules import GradientRule
from eigengrain.functional.inputs import check_integer, check_number, output_dtype
from eigengrain.functional.newton_schulz import (
    LARGEST_SCALE,
    MOST_STEPS,
    MPA_DEGREES,
    MTP_DEGREES,
    isqrt,
    isqrt_dtype,
    log_products,
    mpa_sqrt,
    mtp_sqrt,
)
from eigengrain.functional.scaling_eigen_branch import qs_and_slope, scaling_factor
from eigengrain.functional.spectral import matrix_log, matrix_power
from eigengrain.functional.sqrt_covariance import sqrt_covariance, sqrt_covariance_of_subsets
from eigengrain.functional.subsets import EigenSubset
from eigengrain.heads.base import SpectralHead, Spectrum
from eigengrain.heads.registry import register_head
from eigengrain.names import CUTS, DTYPES, SOLVERS

FACTORS = ("qs", "q", "s", "constant", "mlp-eigenvalues", "mlp-matrix")
PATHS = ("both", "scaled")

#: up to this condition number log_products is accurate to 1e-8
LOG_CONDITION = 1e10


class _LearnedFactor(nn.Module):
    """ReLU(MLP(·)) + 1; the paper gives no size for the network: one hidden layer, with torch's initialisation.

    With about half of all seeds the last ReLU is 0 for every image at the start: no gradient, and a factor of 1.
    """

    def __init__(self, in_features: int, hidden: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1), nn.ReLU())

    def _factor(self, x: Tensor) -> Tensor:
        # replicas of DataParallel list no parameters
        out: Tensor = self.mlp(x.to(self.mlp[0].weight))  # type: ignore[arg-type]
        return out.squeeze(-1) + 1


class EigenvalueFactor(_LearnedFactor):
    r""":math:`\mathrm{ReLU}(\mathrm{MLP}(\Lambda^{1/2})) + 1` from descending eigenvalues (B, d), shape (B,)."""

    def __init__(self, channels: int):
        super().__init__(channels, channels)

    def forward(self, eigenvalues: Tensor) -> Tensor:
        # the root of a zero eigenvalue has an infinite slope; 1e-12 of the largest is below anything the network could use
        floor = 1e-12 * eigenvalues[:, :1].detach() + 1e-24
        return self._factor((eigenvalues.clamp_min(0) + floor).sqrt())


class MatrixFactor(_LearnedFactor):
    r""":math:`\mathrm{ReLU}(\mathrm{MLP}(Q)) + 1` from the upper triangle of Q (B, d, d), shape (B,)."""

    def __init__(self, channels: int):
        super().__init__(channels * (channels + 1) // 2, channels)

    def forward(self, q: Tensor) -> Tensor:
        return self._factor(triu_vector(q))


class CovarianceHead(SpectralHead):
    r"""Normalised covariance pooling with an optional Scaling Eigen Branch; d(d+1)/2 numbers.

    .. math:: A = f(P) \ \text{or}\ (1 + s)\,f(P) \ \text{or}\ s\,f(P), \qquad P = \tfrac1N (X - \bar X)(X - \bar X)^T

    Args:
        in_channels, reduce: as in :class:`Head`; the paper reduces ResNets to 256 channels and VGG not at all.
        normalise: f. ``sqrt`` is exact (MPN-COV), ``newton-schulz`` iterates (iSQRT-COV), ``mpa`` and ``mtp`` are the Padé
            and Taylor square roots, ``log`` is the logarithm of :math:`P + \varepsilon I` (DeepO2P), ``log-cholesky`` its
            Cholesky factor with the logarithm of the diagonal (see below), ``power`` is :math:`P^p`, ``none`` is P.
        seb: scale by the Scaling Eigen Branch. It has no parameters unless the factor is learned.
        path: ``both`` for (1 + s) f(P), the paper's; ``scaled`` for s f(P) (Table 6).
        factor: ``qs`` (the paper's), ``q``, ``s``, ``constant``, ``mlp-eigenvalues`` or ``mlp-matrix`` (Table 7). The
            learned ones, :math:`\mathrm{ReLU}(\mathrm{MLP}(\cdot)) + 1`, and the constant multiply f(P) for any ``path``.
        constant: value of ``factor="constant"``.
        subset: eigenvalues that are kept, such as ``"top:206"``, in training and inference; for ``sqrt``, ``log`` and
            ``power``.
        cut: how a cut spectrum is differentiated, see :func:`eigengrain.functional.spectral_function`.
        solver: solver of the square root, see :func:`eigengrain.functional.sqrt_covariance`; ``products`` needs no
            eigensolver, so that the head exports (``log`` then has no gradient).
        dtype: working precision of ``sqrt`` and ``newton-schulz``: ``float64``, ``float32``, or ``auto`` for the rule of
            :func:`eigengrain.functional.choose_dtype`, and float64 with more than 10 steps of ``newton-schulz``, which
            enlarge rounding errors. The other functions, and scaling factors other than ``qs``, compute in float64.
        gradient: gradient of the square root, ``exact`` or a published rule.
        steps: number of Newton–Schulz steps.
        degree: degree of the Taylor (10) or Padé (5) approximant.
        power: p of ``power``.
        epsilon: ε of ``log`` and ``log-cholesky``, relative to the mean eigenvalue tr(P)/d.
        isometric: multiply off-diagonal entries by √2; the paper does not.

    **Riemannian metrics.** In the coordinates ``log`` and ``log-cholesky`` the log-Euclidean and the log-Cholesky metric of
    positive definite matrices are flat. Those of the power-Euclidean one, :math:`2P^{1/2}` and :math:`2(P^{1/2} - I)`, need
    no option: a constant factor of the vector is a learning rate of the classifier, and a constant that is subtracted is a
    part of its bias.

    ``log-cholesky`` is, with :math:`L L^T = P + \varepsilon I`, the symmetric matrix with :math:`L_{ij}` at i > j and
    :math:`\log L_{ii}` on the diagonal. It depends on the order of the channels, has no eigenvalues to select, and does not
    export. Its gradient is bounded: with ε ≤ 0.1 and κ the condition number of :math:`P + \varepsilon I`, at most
    d/ε + 1, a change :math:`dX_c` of the centred features over :math:`\sqrt N` changes L by at most
    :math:`2\sqrt\kappa\,\|dX_c\|_F`, and the logarithms by at most
    :math:`2\sqrt{d/(\varepsilon\,\mathrm{tr} P)}\,\|dX_c\|_F`. Where :math:`P + \varepsilon I` is not positive definite,
    as with ε = 0 it can be, the result is NaN.

    References:
        Chen et al., Understanding Matrix Function Normalizations in Covariance Pooling through the Lens of Riemannian
        Geometry, ICLR 2025. Lin, Riemannian Geometry of Symmetric Positive Definite Matrices via Cholesky Decomposition,
        SIAM J. Matrix Anal. Appl. 2019.
    """

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        *,
        normalise: str = "sqrt",
        seb: bool = False,
        path: str = "both",
        factor: str = "qs",
        constant: float = 100.0,
        subset: EigenSubset | str | None = None,
        cut: str = "exact",
        solver: str = "auto",
        dtype: str = "auto",
        gradient: str | GradientRule = "exact",
        steps: int = 5,
        degree: int | None = None,
        power: float = 0.5,
        epsilon: float = 1e-3,
        isometric: bool = False,
    ):
        super().__init__(in_channels, reduce)
        for kind, value, choices in (
            ("normalisation", normalise, NORMALISATIONS),
            ("path", path, PATHS),
            ("scaling factor", factor, FACTORS),
            ("cut", cut, CUTS),
            ("solver", solver, SOLVERS),
            ("dtype", dtype, DTYPES),
        ):
            if value not in choices:
                raise UnknownName(kind, value, choices)
        check_integer(steps, "steps", MOST_STEPS)
        check_integer(1 if degree is None else degree, "degree", MPA_DEGREES if normalise == "mpa" else MTP_DEGREES)
        check_number(epsilon, "epsilon", 0)
        check_number(constant, "constant")
        check_number(power, "power", -100, 100)
        self.out_features = self.channels * (self.channels + 1) // 2
        self.normalise, self.seb, self.path, self.factor = normalise, seb, path, factor
        self.constant, self.cut, self.solver, self.dtype = constant, cut, solver, dtype
        self.gradient = GradientRule.of(gradient)
        self.steps, self.degree, self.power, self.epsilon, self.isometric = steps, degree, power, epsilon, isometric
        self.subset = subset  # type: ignore[assignment]
        self.learned_factor: nn.Module | None = None
        if seb and factor == "mlp-eigenvalues":
            self.learned_factor = EigenvalueFactor(self.channels)
        elif seb and factor == "mlp-matrix":
            self.learned_factor = MatrixFactor(self.channels)

    @property
    def summary(self) -> str:
        return SUMMARIES[self.normalise] + (", scaled (SEB)" if self.seb else "")

    @property
    def selectable(self) -> bool:
        has_spectrum = self.normalise in ("sqrt", "log", "power") and self.solver != "products"
        return has_spectrum and (self.gradient.name == "exact" or self.gradient.from_spectrum)

    def use_products(self) -> None:
        problem = "needs eigenvalues, which matrix products do not compute"
        if self.own_subset is not None:
            raise ArgumentError("subset", problem, self.own_subset, "set head.subset = 'all'")
        if self.normalise == "power":
            raise ArgumentError("normalise", problem, self.normalise, "use normalise='sqrt'")
        if self.normalise == "log-cholesky":
            factorisation = "needs a Cholesky factorisation, which matrix products do not compute"
            raise ArgumentError("normalise", factorisation, self.normalise, "use normalise='log'")
        if self.seb and self.factor in ("s", "mlp-eigenvalues"):
            raise ArgumentError("factor", problem, self.factor, "use 'qs', 'q', 'constant' or 'mlp-matrix'")
        # the condition number of P + εI is at most d/ε + 1
        if self.normalise == "log" and self.channels > LOG_CONDITION * self.epsilon:
            problem = f"must be at least {self.channels / LOG_CONDITION:g} for the logarithm by matrix products"
            raise ArgumentError("epsilon", problem, self.epsilon, "create the head with a larger one")
        super().use_products()
        # published gradient rules are for training and do not change the value
        self.solver, self.gradient, self.record_spectrum = "products", GradientRule.of("exact"), False
        self.dtype = "auto"  # float64, in which the products converge

    def matrix(self, x: Tensor) -> Tensor:
        """The representation as a matrix (B, d, d), from the reduced map (B, d, H, W)."""
        return self._matrix(x, with_eigenvalues=False)[0]

    def _matrix(self, x: Tensor, with_eigenvalues: bool) -> tuple[Tensor, Tensor | None]:
        """The representation, and the eigenvalues of the covariance if they are requested."""
        values: Tensor | None = None
        paper = self.seb and self.factor == "qs" and self.path == "both"
        if self.normalise == "sqrt":
            settings: Any = (self.subset, self.cut, self.solver, self.gradient)
            if with_eigenvalues:
                q, values = sqrt_covariance(x, paper, *settings, dtype=self.dtype, return_eigenvalues=True)
            else:
                q = sqrt_covariance(x, paper, *settings, dtype=self.dtype)
            if self.seb and not paper:
                q = q * self._scale(covariance(x, dtype=torch.float64), q)
            return q, values
        low = self.normalise == "newton-schulz" and (not self.seb or self.factor == "qs")
        p, scale = covariance_in_range(x, isqrt_dtype(self.dtype, x, self.steps) if low else torch.float64)
        if with_eigenvalues:
            values = self.eigenvalues(x)
        q = NORMALISATIONS[self.normalise](self, p)
        if scale is not None:
            q, p = q * scale, p * scale.clamp_max(LARGEST_SCALE).square()
        return q * self._scale(p, q) if self.seb else q, values

    def pool_subsets(
        self, reduced: Tensor, subsets: Sequence[EigenSubset | str], cut: str | None = None
    ) -> tuple[list[Tensor], Tensor]:
        cut = self.cut if cut is None else cut
        paper = self.factor == "qs" and self.path == "both"
        shared = self.normalise == "sqrt" and self.solver != "products" and self.gradient.name == "exact"
        # a subclass may override pool
        if not shared or (self.seb and not paper) or type(self) is not CovarianceHead:
            return super().pool_subsets(reduced, subsets, cut)
        settings: Any = (cut, self.solver)
        matrices, values = sqrt_covariance_of_subsets(reduced, subsets, self.seb, *settings, dtype=self.dtype)
        return [self._vector(matrix, reduced) for matrix in matrices], values

    def eigenvalues(self, reduced: Tensor) -> Tensor:
        return zero_rounding(eigh(covariance(reduced.detach(), dtype=torch.float64)).values)

    def _scale(self, p: Tensor, q: Tensor) -> Tensor:
        """The factor of f(P), (B, 1, 1)."""
        if isinstance(self.learned_factor, MatrixFactor):
            scale = self.learned_factor(q)
        elif self.learned_factor is not None:
            scale = self.learned_factor(eigh(p).values)
        else:
            solver = "products" if self.solver == "products" and self.factor == "qs" else "auto"
            scale = scaling_factor(p, self.factor, constant=self.constant, solver=solver, dtype=p.dtype)
            if self.path == "both" and self.factor != "constant":
                scale = 1 + scale
        return scale[:, None, None].to(q)

    def pool(self, x: Tensor) -> Tensor:
        return self._vector(self.matrix(x), x)

    def pool_with_spectrum(self, reduced: Tensor) -> tuple[Tensor, Spectrum]:
        matrix, values = self._matrix(reduced, with_eigenvalues=True)
        assert values is not None
        factor = qs_and_slope(values)[0] if self.seb and self.factor == "qs" else None
        return self._vector(matrix, reduced), Spectrum(values, factor)

    def _vector(self, matrix: Tensor, like: Tensor) -> Tensor:
        return triu_vector(matrix, isometric=self.isometric).to(like.device, output_dtype(like))

    def extra_repr(self) -> str:
        branch = f", seb({self.factor}, {self.path})" if self.seb else ""
        cut = f", subset={self.own_subset}" if self.own_subset else ""
        return f"normalise={self.normalise}{branch}{cut}"


def _definite(head: CovarianceHead, p: Tensor) -> Tensor:
    """P + εI, ε relative to the mean eigenvalue, and at least 1e-12 so that a constant map has a logarithm."""
    mean = p.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = (head.epsilon * mean).clamp_min(1e-12)
    return p + torch.diag_embed(ridge.unsqueeze(-1).expand(p.shape[:-1]))


def _log(head: CovarianceHead, p: Tensor) -> Tensor:
    """log(P + εI)."""
    shifted = _definite(head, p)
    if head.solver == "products":
        return log_products(shifted)
    return matrix_log(shifted, subset=head.subset, cut=head.cut)  # type: ignore[arg-type]


def _log_cholesky(head: CovarianceHead, p: Tensor) -> Tensor:
    """The Cholesky factor of P + εI with the logarithm of its diagonal, mirrored into the upper triangle."""
    factor, failed = torch.linalg.cholesky_ex(_definite(head, p))  # cholesky would wait for the device
    factor = torch.where(failed[:, None, None] == 0, factor, torch.nan)
    lower = factor.tril(-1)
    return lower + lower.mT + torch.diag_embed(factor.diagonal(dim1=-2, dim2=-1).log())


#: f by name, a function of the head and the covariance in float64
NORMALISATIONS: dict[str, Callable[[CovarianceHead, Tensor], Tensor]] = {
    "sqrt": lambda head, p: p,  # not used: the root is computed from the features
    "newton-schulz": lambda head, p: isqrt(p, head.steps),
    "mpa": lambda head, p: mpa_sqrt(p, 5 if head.degree is None else head.degree),
    "mtp": lambda head, p: mtp_sqrt(p, 10 if head.degree is None else head.degree),
    "log": _log,
    "log-cholesky": _log_cholesky,
    "power": lambda head, p: matrix_power(p, head.power, subset=head.subset, cut=head.cut),  # type: ignore[arg-type]
    "none": lambda head, p: p,
}

#: one phrase per f, for listings
SUMMARIES = {
    "sqrt": "MPN-COV: exact square root of the covariance",
    "newton-schulz": "iSQRT-COV: Newton–Schulz square root of the covariance",
    "mpa": "square root of the covariance by a Padé approximant",
    "mtp": "square root of the covariance by a Taylor polynomial",
    "log": "DeepO2P: logarithm of the covariance",
    "log-cholesky": "log-Cholesky: Cholesky factor of the covariance with the logarithm of its diagonal",
    "power": "power of the covariance",
    "none": "covariance",
}

#: name → f; each also with ``+seb``
SYSTEMS = {
    "mpncov": "sqrt",
    "isqrt": "newton-schulz",
    "mpa": "mpa",
    "mtp": "mtp",
    "logcov": "log",
    "logchol": "log-cholesky",
}


for _name, _normalise in SYSTEMS.items():
    register_head(_name)(partial(CovarianceHead, normalise=_normalise, seb=False))
    register_head(_name + "+seb")(partial(CovarianceHead, normalise=_normalise, seb=True))


class HierarchicalCovarianceHead(CovarianceHead):
    """MPN-COV of the stacked maps of several stages: one covariance, with blocks within and between the stages."""

    @property
    def summary(self) -> str:
        return "Hierarchical MPN-COV: one covariance of the last two stages" + (", scaled (SEB)" if self.seb else "")


register_head("hcov", stages=2)(partial(HierarchicalCovarianceHead, normalise="sqrt", seb=False))
register_head("hcov+seb", stages=2)(partial(HierarchicalCovarianceHead, normalise="sqrt", seb=True))
