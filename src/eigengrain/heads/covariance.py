r"""The covariance head: reduce → covariance → normalise → branch → vectorise.

MPN-COV, iSQRT-COV, MPA, MTP and the log-covariance of DeepO2P, each with and without the Scaling Eigen Branch, and the
ablations of the paper are settings of this one head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eigengrain.errors import UnknownName
from eigengrain.functional import (
    SOLVERS,
    EigenSubset,
    GradientRule,
    covariance,
    eigh,
    isqrt_covariance,
    matrix_log,
    matrix_power,
    mpa_sqrt,
    mtp_sqrt,
    newton_schulz,
    scaling_factor,
    sqrt_covariance,
    sqrt_covariance_of_subsets,
    triu_vector,
)
from eigengrain.functional.inputs import output_dtype
from eigengrain.functional.newton_schulz import check_steps, log_products
from eigengrain.functional.scaling_eigen_branch import qs_and_slope
from eigengrain.functional.spectral import CUTS
from eigengrain.heads.base import Head
from eigengrain.heads.registry import register_head
from eigengrain.heads.scaling import FACTORS, EigenvalueFactor, MatrixFactor

PATHS = ("both", "scaled")

#: up to this condition number log_products is as accurate as an eigensolver
LOG_CONDITION = 1e10


class Spectrum(NamedTuple):
    """What a head saw in its last batch: descending eigenvalues of the covariance (B, d), and the factor s (B,) or None."""

    eigenvalues: Tensor
    factor: Tensor | None


class CovarianceHead(Head):
    r"""Normalised covariance pooling with an optional Scaling Eigen Branch; d(d+1)/2 numbers.

    .. math:: A = f(P) \ \text{or}\ (1 + s)\,f(P) \ \text{or}\ s\,f(P), \qquad P = \tfrac1N (X - \bar X)(X - \bar X)^T

    Args:
        in_channels: channels of the feature map.
        reduce: channels d after the 1 × 1 convolution; the paper has 256 for ResNets and none for VGG.
        normalise: f. ``sqrt`` is exact (MPN-COV), ``newton-schulz`` iterates (iSQRT-COV), ``mpa`` and ``mtp`` are the Padé
            and Taylor square roots, ``log`` is the logarithm of :math:`P + \varepsilon I` (DeepO2P), ``power`` is
            :math:`P^p`, ``none`` is P.
        seb: scale by the Scaling Eigen Branch. It has no parameters unless the factor is learned.
        path: ``both`` for (1 + s) f(P), the paper's; ``scaled`` for s f(P) (Table 6).
        factor: ``qs`` (the paper's), ``q``, ``s``, ``constant``, ``mlp-eigenvalues`` or ``mlp-matrix`` (Table 7). The
            learned ones are :math:`\mathrm{ReLU}(\mathrm{MLP}(\cdot)) + 1` and stand alone, whatever ``path`` is.
        constant: for ``factor="constant"``, which multiplies f(P) alone as well.
        subset: eigenvalues that are kept, such as ``"top:206"``, in training and inference; for ``sqrt``, ``log`` and
            ``power``.
        cut: how a cut spectrum is differentiated, see :func:`eigengrain.functional.spectral_function`.
        solver: of the square root, see :func:`eigengrain.functional.sqrt_covariance`; ``products`` needs no eigensolver, so
            that the head exports (for ``log`` without a gradient).
        gradient: of the square root, ``exact`` or a published rule.
        steps: of Newton–Schulz.
        degree: of the Taylor (10) or Padé (5) approximant.
        power: p of ``power``.
        epsilon: of ``log``, relative to the mean eigenvalue tr(P)/d.
        isometric: multiply off-diagonal entries by √2; the paper does not.
    """

    rank_sensitive = True

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
        ):
            if value not in choices:
                raise UnknownName(kind, value, choices)
        check_steps(steps, "a number of steps", "the head")
        check_steps(1 if degree is None else degree, "a degree", "the head")
        if not epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0, got {epsilon!r}: it keeps the logarithm away from 0")
        self.out_features = self.channels * (self.channels + 1) // 2
        self.normalise, self.seb, self.path, self.factor = normalise, seb, path, factor
        self.constant, self.cut, self.solver = constant, cut, solver
        self.gradient = GradientRule.of(gradient)
        self.steps, self.degree, self.power, self.epsilon, self.isometric = steps, degree, power, epsilon, isometric
        self.subset = EigenSubset.parse(subset)
        self.learned_factor: nn.Module | None = None
        if seb and factor == "mlp-eigenvalues":
            self.learned_factor = EigenvalueFactor(self.channels)
        elif seb and factor == "mlp-matrix":
            self.learned_factor = MatrixFactor(self.channels)
        #: filled at each forward pass while ``record_spectrum`` is True; for telemetry, never part of the state
        self.record_spectrum = False
        self.last_spectrum: Spectrum | None = None

    @property
    def subset(self) -> EigenSubset:
        """Eigenvalues that are kept; may be set between forward passes."""
        return self._subset

    @subset.setter
    def subset(self, value: EigenSubset | str | None) -> None:
        subset = EigenSubset.parse(value)
        if not subset.covers(self.channels):
            subset.mask(self.channels)  # refuses what does not fit
            if self.normalise not in ("sqrt", "log", "power") or self.solver == "products":
                how = f"normalise={self.normalise!r}, solver={self.solver!r}"
                raise ValueError(f"a head with {how} has no eigenvalues to choose from: use 'mpncov' with solver='auto'")
        self._subset = subset

    def use_products(self) -> None:
        if not self.subset.covers(self.channels):
            raise ValueError(f"its subset of eigenvalues, '{self.subset}', needs a decomposition: set head.subset = 'all'")
        if self.normalise == "power":
            raise ValueError("normalise='power' needs eigenvalues: use normalise='sqrt'")
        if self.seb and self.factor in ("s", "mlp-eigenvalues"):
            raise ValueError(f"factor={self.factor!r} needs eigenvalues: use factor='qs', 'q', 'constant' or 'mlp-matrix'")
        # the condition number of P + εI is at most d/ε + 1; beyond this the logarithm loses its digits
        if self.normalise == "log" and self.channels > LOG_CONDITION * self.epsilon:
            raise ValueError(
                f"the logarithm with epsilon={self.epsilon:g} is too ill-conditioned for matrix products: use an epsilon "
                f"of at least {self.channels / LOG_CONDITION:g}"
            )
        super().use_products()
        # published gradient rules are for training; what is left is the value, which they have in common
        self.solver, self.gradient, self.record_spectrum = "products", GradientRule.of("exact"), False

    def matrix(self, x: Tensor) -> Tensor:
        """The representation as a matrix (B, d, d), from the reduced map (B, d, H, W)."""
        paper = self.seb and self.factor == "qs" and self.path == "both"
        if self.normalise == "sqrt":
            fused: dict[str, Any] = {
                "subset": self.subset,
                "cut": self.cut,
                "solver": self.solver,
                "gradient": self.gradient,
            }
            if self.record_spectrum:
                q, eigenvalues = sqrt_covariance(x, paper, return_eigenvalues=True, **fused)
                self._record(eigenvalues)
            else:
                q = sqrt_covariance(x, paper, **fused)
            return q if paper or not self.seb else q * self._scale(covariance(x, dtype=torch.float64), q)
        iterated = self.normalise == "newton-schulz" and self.solver != "products"
        if iterated and not self.seb and not self.record_spectrum:
            return isqrt_covariance(x, self.steps)
        p = covariance(x, dtype=torch.float64)
        if self.record_spectrum:
            self._record(eigh(p.detach()).values)
        q = isqrt_covariance(x, self.steps) if iterated else NORMALISATIONS[self.normalise](self, p)
        return q * self._scale(p, q) if self.seb else q

    def pool_subsets(
        self, reduced: Tensor, subsets: Sequence[EigenSubset | str], cut: str | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """What :meth:`pool` gives with each of several subsets, from one decomposition where that is possible.

        Args:
            reduced: feature map after the reduction, (B, channels, H, W).
            subsets: such as ``["all", "top:206"]``.
            cut: how a cut spectrum is differentiated; the head's own by default.

        Returns:
            vectors (B, out_features), one a subset, and the eigenvalues of the covariance (B, channels), descending and 0
            where they are rounding.

        Raises:
            ValueError: for a subset that does not fit.
        """
        cut = self.cut if cut is None else cut
        paper = self.factor == "qs" and self.path == "both"
        shared = self.normalise == "sqrt" and self.solver != "products" and self.gradient.name == "exact"
        # a class that is made from this one may pool in a way of its own
        if not shared or (self.seb and not paper) or type(self) is not CovarianceHead:
            return [self._with_subset(reduced, subset, cut) for subset in subsets], self.eigenvalues(reduced)
        matrices, values = sqrt_covariance_of_subsets(reduced, subsets, self.seb, cut, self.solver)  # type: ignore[arg-type]
        return [triu_vector(a, isometric=self.isometric).to(output_dtype(reduced)) for a in matrices], values

    def eigenvalues(self, reduced: Tensor) -> Tensor:
        """Eigenvalues of the covariance (B, channels), descending and 0 where they are rounding, without a gradient."""
        values = eigh(covariance(reduced.detach(), dtype=torch.float64)).values
        return torch.where(values > self.channels * torch.finfo(values.dtype).eps * values[..., :1], values, 0.0)

    def _with_subset(self, reduced: Tensor, subset: EigenSubset | str, cut: str) -> Tensor:
        before = self.subset, self.cut
        self.subset, self.cut = EigenSubset.parse(subset), cut
        try:
            return self.pool(reduced)
        finally:
            self.subset, self.cut = before

    def _scale(self, p: Tensor, q: Tensor) -> Tensor:
        """What multiplies f(P), (B, 1, 1)."""
        if isinstance(self.learned_factor, MatrixFactor):
            scale = self.learned_factor(q)
        elif self.learned_factor is not None:
            scale = self.learned_factor(eigh(p).values)
        else:
            solver = "products" if self.solver == "products" and self.factor == "qs" else "auto"
            scale = scaling_factor(p, self.factor, constant=self.constant, solver=solver)
            if self.path == "both" and self.factor != "constant":
                scale = 1 + scale
        return scale[:, None, None].to(q.dtype)

    def _record(self, eigenvalues: Tensor) -> None:
        factor = qs_and_slope(eigenvalues.double())[0] if self.seb and self.factor == "qs" else None
        self.last_spectrum = Spectrum(eigenvalues, factor)

    def pool(self, x: Tensor) -> Tensor:
        return triu_vector(self.matrix(x), isometric=self.isometric).to(output_dtype(x))

    def extra_repr(self) -> str:
        branch = f", seb({self.factor}, {self.path})" if self.seb else ""
        cut = "" if self.subset.covers(self.channels) else f", subset={self.subset}"
        return f"normalise={self.normalise}{branch}{cut}"


def _log(head: CovarianceHead, p: Tensor) -> Tensor:
    """log(P + εI), ε relative to the mean eigenvalue, and 1e-12 at least so that a constant map has a logarithm."""
    mean = p.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = (head.epsilon * mean).clamp_min(1e-12)
    shifted = p + torch.diag_embed(ridge.unsqueeze(-1).expand(p.shape[:-1]))
    if head.solver == "products":
        return log_products(shifted)
    return matrix_log(shifted, subset=head.subset, cut=head.cut)  # type: ignore[arg-type]


#: f of the head by name; each takes the head's settings and the covariance in float64
NORMALISATIONS: dict[str, Callable[[CovarianceHead, Tensor], Tensor]] = {
    "sqrt": lambda head, p: p,  # goes from the features, not from here
    "newton-schulz": lambda head, p: newton_schulz(p, head.steps),
    "mpa": lambda head, p: mpa_sqrt(p, 5 if head.degree is None else head.degree),
    "mtp": lambda head, p: mtp_sqrt(p, 10 if head.degree is None else head.degree),
    "log": _log,
    "power": lambda head, p: matrix_power(p, head.power, subset=head.subset, cut=head.cut),  # type: ignore[arg-type]
    "none": lambda head, p: p,
}

#: name → f; each also with ``+seb``
SYSTEMS = {"mpncov": "sqrt", "isqrt": "newton-schulz", "mpa": "mpa", "mtp": "mtp", "logcov": "log"}


for _name, _normalise in SYSTEMS.items():
    register_head(_name)(partial(CovarianceHead, normalise=_normalise, seb=False))
    register_head(_name + "+seb")(partial(CovarianceHead, normalise=_normalise, seb=True))
