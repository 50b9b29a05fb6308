r"""Published gradient rules for the square root through an eigendecomposition, for comparison with the exact one.

The usual derivation differentiates U and Λ separately, with :math:`1/(\lambda_i - \lambda_j)`; the rules differ in what
they replace it with. Their gradient has the same form as the exact one, :math:`U[(U^T \mathrm{sym}(G) U) \circ E]U^T`, with
:math:`E_{ij} = (\sigma_i - \sigma_j)\,\tilde K_{ij}`, :math:`E_{ii} = \tfrac12\lambda_i^{-1/2}` and
:math:`\tilde K_{ij}` for :math:`1/(\lambda_i - \lambda_j)`; the truth is :math:`E_{ij} = 1/(\sigma_i + \sigma_j)`. As
published, eigenvalues are first raised to the machine epsilon.

The accidents of the released code are not repeated: an infinite value stays infinite or is replaced within its own sample,
never by the largest value of the batch; dropped eigenvalues get no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional.inputs import check_integer, check_number
from eigengrain.functional.matrix_products import nonzero, norm
from eigengrain.functional.newton_schulz import MOST_STEPS, newton_schulz, root_with_lyapunov
from eigengrain.functional.scalar_functions import geometric_ratio
from eigengrain.functional.subsets import EigenSubset


def _pairs(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Larger and smaller eigenvalue of each pair, and the difference of their roots."""
    a, b = values.unsqueeze(-1), values.unsqueeze(-2)
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    return high, low, high.sqrt() - low.sqrt()


def _original(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, roots = _pairs(values)
    return roots / (high - low)


def _trunc(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, roots = _pairs(values)
    return roots * (1 / (high - low)).clamp_max(rule.threshold)


def _taylor(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, roots = _pairs(values)
    return roots / high * geometric_ratio(high, low, rule.degree + 1)


def _pade(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, roots = _pairs(values)
    k = 1 / (high * ((high - low) / high))
    finite = torch.where(k.isinf(), 0.0, k)
    return roots * torch.where(k.isinf(), finite.amax((-2, -1), keepdim=True), k)


def _power_iteration(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, _ = _pairs(values)
    # u_i takes `steps` products with P, from which the larger ones are deflated; the smaller of a pair gets one fewer
    longer, shorter = (geometric_ratio(high, low, steps) for steps in (rule.steps, rule.steps - 1))
    return (high.sqrt() * longer - low.sqrt() * shorter) / high


_FROM_SPECTRUM: dict[str, Callable[[Tensor, "GradientRule"], Tensor]] = {
    "original": _original,
    "trunc": _trunc,
    "topn": _original,
    "taylor": _taylor,
    "pade": _pade,
    "power-iteration": _power_iteration,
}

#: largest degree and number of steps of the rules that sum a series
_MOST_TERMS = 10**6

#: every value of ``gradient=``
GRADIENTS = ("exact", *_FROM_SPECTRUM, "newton", "lyapunov")


@dataclass(frozen=True)
class GradientRule:
    r"""A published gradient of the matrix square root, with its parameters.

    With :math:`x = \lambda_j/\lambda_i \le 1`, the smaller over the larger eigenvalue of a pair, the rules replace
    :math:`1/(\lambda_i - \lambda_j) = \lambda_i^{-1}(1 + x + x^2 + \dots)` by:

    - ``original``: itself. Exact except for cancellation, an error of about eps/(1 − x); NaN at equal eigenvalues.
    - ``trunc``: itself, at most ``threshold``. Exact while :math:`|\lambda_i - \lambda_j| > 1/\mathrm{threshold}`, and
      0 at equal eigenvalues, where the true value is :math:`1/(2\sigma)`.
    - ``topn``: ``original`` with all but the largest ``keep`` (206/256 of d by default, or as many as the subset has) set
      to the machine epsilon ε, for a truncated spectrum. Truncated directions then have the slope
      :math:`\tfrac12\varepsilon^{-1/2}` = 3e7, although features do vary in them, and dominate the gradient.
    - ``taylor``: the series up to :math:`x^K`, K = ``degree``. Relative error :math:`x^{K+1}`, which is 1 at equal
      eigenvalues; bounded by :math:`(K+1)/\lambda_i`.
    - ``pade``: the published [K/K] Padé approximant of 1/(1 − x). That function is rational, so the approximant is the
      function itself, evaluated as :math:`\lambda_i^{-1}/(1 - x)`; infinite values are replaced by the largest finite one
      of the same sample, which the equal roots multiply to 0.
    - ``power-iteration``: the derivative of ``steps`` power iterations with deflation, started from the converged
      eigenvectors: the series up to :math:`x^{\mathrm{steps}-1}` in one triangle and one term fewer in the other.

    Two rules do not use the spectrum: ``newton`` is the gradient of ``steps_newton`` Newton–Schulz steps at P (which do
    not converge for eigenvalues below 1e-2 of the trace), ``lyapunov`` uses eight cubic steps for the Lyapunov equation.

    All rules except ``newton`` and ``lyapunov`` have :math:`\tfrac12\lambda_i^{-1/2}` on the diagonal, with λ raised to
    the machine epsilon: 3e7 at a zero eigenvalue. In the gradient to the features this is multiplied by the zero variance
    in that direction, so in float64 it does little harm; but features so small that all their eigenvalues are below the
    epsilon get almost no gradient. With features the rules fail by losing gradient or by NaN, rather than by exceeding
    the bound.

    References:
        Song et al., Why Approximate Matrix Square Root Outperforms Accurate SVD in Global Covariance Pooling?, ICCV 2021;
        Wang et al., Backpropagation-Friendly Eigendecomposition, NeurIPS 2019.
    """

    name: str = "exact"
    threshold: float = 1e10
    keep: int | None = None
    degree: int = 100
    steps: int = 19
    steps_newton: int = 5

    def __post_init__(self) -> None:
        if self.name not in GRADIENTS:
            raise UnknownName("gradient rule", self.name, GRADIENTS)
        check_integer(self.degree, "degree", _MOST_TERMS, least=0)
        check_integer(self.steps, "steps", _MOST_TERMS)
        check_integer(self.steps_newton, "steps_newton", MOST_STEPS)
        check_number(self.threshold, "threshold", 0)
        check_integer(1 if self.keep is None else self.keep, "keep")

    @classmethod
    def of(cls, rule: "str | GradientRule") -> "GradientRule":
        return rule if isinstance(rule, GradientRule) else cls(rule)

    @property
    def from_spectrum(self) -> bool:
        return self.name in _FROM_SPECTRUM

    def differences(self, values: Tensor) -> Tensor:
        """E (*, d, d) from descending eigenvalues (*, d)."""
        eps, d = torch.finfo(values.dtype).eps, values.shape[-1]
        floored = values.clamp_min(eps)
        on_diagonal = torch.eye(d, dtype=torch.bool, device=values.device)
        if self.name == "topn":
            keep = round(d * 206 / 256) if self.keep is None else self.keep
            if not 1 <= keep <= d:
                raise ArgumentError("keep", f"must be from 1 to {d}, the number of eigenvalues", keep)
            floored = torch.where(torch.arange(d, device=values.device) < keep, floored, eps)
        e = _FROM_SPECTRUM[self.name](floored, self)
        if self.name == "topn":  # a pair of truncated eigenvalues gives 0/0, which the released code sets to 0
            e = torch.where(floored.unsqueeze(-1) == floored.unsqueeze(-2), 0.0, e)
        return torch.where(on_diagonal, 0.5 * floored.rsqrt().unsqueeze(-1), e)

    def of_subset(self, subset: EigenSubset, d: int) -> "GradientRule":
        """The rule for the eigenvalues that a subset keeps, which must be the largest."""
        if subset.covers(d):
            return self
        mask = subset.mask(d)
        keep = int(mask.sum())
        if not mask[:keep].all():
            problem = "must be the largest eigenvalues for gradient='topn'"
            raise ArgumentError("subset", problem, str(subset), f"use 'top:{keep}'")
        return replace(self, keep=keep)

    def attach(self, P: Tensor, root: Tensor) -> Tensor:
        """The finished root of P with the gradient of this rule, for rules that do not use the spectrum."""
        if self.name == "newton":
            iterated = newton_schulz(P, self.steps_newton)
            return root + (iterated - iterated.detach())
        batch = P.to(root.dtype).reshape(-1, *P.shape[-2:])
        scale = nonzero(norm(batch.detach())).sqrt()
        return root_with_lyapunov(batch, root.reshape(batch.shape), scale).reshape(P.shape)
