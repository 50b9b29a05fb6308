r"""Published gradient rules for the square root through an eigendecomposition, for comparison with the exact one.

The usual derivation differentiates U and Λ apart, with :math:`1/(\lambda_i - \lambda_j)`; the rules differ in what they
put in its place. Their gradient is of the same form as the exact one, :math:`U[(U^T \mathrm{sym}(G) U) \circ E]U^T`, with
:math:`E_{ij} = (\sigma_i - \sigma_j)\,\tilde K_{ij}`, :math:`E_{ii} = \tfrac12\lambda_i^{-1/2}` and
:math:`\tilde K_{ij}` for :math:`1/(\lambda_i - \lambda_j)`; the truth is :math:`E_{ij} = 1/(\sigma_i + \sigma_j)`. As
published, eigenvalues are first raised to the machine epsilon.

None of the accidents of released code is repeated here: what is infinite stays infinite or is replaced within its own
sample, never by the largest value of the batch; dropped eigenvalues get no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eigengrain.errors import UnknownName
from eigengrain.functional import matrix_products as products
from eigengrain.functional.newton_schulz import newton_schulz, root_with_lyapunov
from eigengrain.functional.scalar_functions import geometric_ratio
from eigengrain.functional.subsets import EigenSubset


def _pairs(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Larger and smaller eigenvalue of each pair, the gap relative to the larger, and the difference of the roots."""
    a, b = values.unsqueeze(-1), values.unsqueeze(-2)
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    return high, low, (high - low) / high, high.sqrt() - low.sqrt()


def _original(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, _, roots = _pairs(values)
    return roots / (high - low)


def _trunc(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, _, roots = _pairs(values)
    return roots * (1 / (high - low)).clamp_max(rule.threshold)


def _taylor(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, _, roots = _pairs(values)
    return roots / high * geometric_ratio(high, low, rule.degree + 1)


def _pade(values: Tensor, rule: "GradientRule") -> Tensor:
    high, _, gap, roots = _pairs(values)
    k = 1 / (high * gap)
    finite = torch.where(k.isinf(), 0.0, k)
    return roots * torch.where(k.isinf(), finite.amax((-2, -1), keepdim=True), k)


def _power_iteration(values: Tensor, rule: "GradientRule") -> Tensor:
    high, low, _, _ = _pairs(values)
    # u_i is reached by `steps` products with P deflated of the larger ones; the smaller of a pair sees one fewer
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

#: every value that ``gradient=`` takes
GRADIENTS = ("exact", *_FROM_SPECTRUM, "newton", "lyapunov")


@dataclass(frozen=True)
class GradientRule:
    r"""A published gradient of the matrix square root, with its parameters.

    With :math:`x = \lambda_j/\lambda_i \le 1` for the smaller over the larger eigenvalue of a pair, the rules put for
    :math:`1/(\lambda_i - \lambda_j) = \lambda_i^{-1}(1 + x + x^2 + \dots)`:

    - ``original``: itself. Exact but for cancellation, an error of about eps/(1 − x); not a number at equal eigenvalues.
    - ``trunc``: itself, at most ``threshold``. Exact while :math:`|\lambda_i - \lambda_j| > 1/\mathrm{threshold}`, and
      0 in the end at equal eigenvalues, where the truth is :math:`1/(2\sigma)`.
    - ``topn``: ``original`` with all but the largest ``keep`` (206/256 of d by default, or as many as the subset has) set
      to the machine epsilon ε, for a truncated spectrum. Truncated directions then have the slope
      :math:`\tfrac12\varepsilon^{-1/2}` = 3e7, although features do vary in them: what comes back is nearly all theirs.
    - ``taylor``: the series up to :math:`x^K`, K = ``degree``. Relative error :math:`x^{K+1}`, all of it at equal
      eigenvalues; bounded by :math:`(K+1)/\lambda_i`.
    - ``pade``: the published [K/K] Padé approximant of 1/(1 − x). That function is rational already, so the approximant
      is the function itself, evaluated as :math:`\lambda_i^{-1}/(1 - x)`; where it is infinite the largest finite value
      of the same sample stands, which the equal roots multiply to 0.
    - ``power-iteration``: the derivative of ``steps`` power iterations with deflation from the converged eigenvectors:
      the series up to :math:`x^{\mathrm{steps}-1}` in one triangle and one term fewer in the other.

    Two do not use the spectrum: ``newton`` is the gradient of ``steps_newton`` Newton–Schulz steps at P (which do not
    converge for eigenvalues below 1e-2 of the trace), ``lyapunov`` eight cubic steps for the Lyapunov equation.

    All of them but ``newton`` and ``lyapunov`` have :math:`\tfrac12\lambda_i^{-1/2}` on the diagonal, with λ raised to the
    machine epsilon: 3e7 at a zero eigenvalue. Carried on to the features this is multiplied by the zero variance in that
    direction, so in float64 it does little harm; but features so small that all their eigenvalues lie below the epsilon
    get almost no gradient. From features the rules fail by losing gradient, or by NaN, more than by exceeding the bound.

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
        for field, least in (("degree", 0), ("steps", 1), ("steps_newton", 1), ("threshold", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"gradient rule needs {field} of at least {least}, got {getattr(self, field)!r}")

    @classmethod
    def of(cls, rule: "str | GradientRule") -> "GradientRule":
        return rule if isinstance(rule, GradientRule) else cls(rule)

    @property
    def from_spectrum(self) -> bool:
        return self.name in _FROM_SPECTRUM

    def differences(self, values: Tensor) -> Tensor:
        """E (*, d, d) from descending eigenvalues (*, d)."""
        eps = torch.finfo(values.dtype).eps
        floored = values.clamp_min(eps)
        on_diagonal = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
        if self.name == "topn":
            kept = self._kept(values.shape[-1], values.device)
            floored = torch.where(kept, floored, eps)
        e = _FROM_SPECTRUM[self.name](floored, self)
        if self.name == "topn":  # two that are truncated are equal, 0/0, which the released code repairs to 0
            e = torch.where(floored.unsqueeze(-1) == floored.unsqueeze(-2), 0.0, e)
        return torch.where(on_diagonal, 0.5 * floored.rsqrt().unsqueeze(-1), e)

    def of_subset(self, subset: EigenSubset, d: int) -> "GradientRule":
        """The same for the eigenvalues that a subset keeps, which must be the largest."""
        if subset.covers(d):
            return self
        mask = subset.mask(d)
        keep = int(mask.sum())
        if not mask[:keep].all():
            raise ValueError(
                f"gradient='topn' keeps the largest eigenvalues: use a subset such as 'top:{keep}', not {subset}"
            )
        return replace(self, keep=keep)

    def _kept(self, d: int, device: torch.device) -> Tensor:
        keep = round(d * 206 / 256) if self.keep is None else self.keep
        if not 1 <= keep <= d:
            raise ValueError(f"gradient rule 'topn' keeps {keep} of {d} eigenvalues: choose keep from 1 to {d}")
        return torch.arange(d, device=device) < keep

    def attach(self, P: Tensor, root: Tensor) -> Tensor:
        """The finished root of P with the gradient of this rule, for those that do not use the spectrum."""
        if self.name == "newton":
            iterated = newton_schulz(P, self.steps_newton)
            return root + (iterated - iterated.detach())
        batch = P.to(root.dtype).reshape(-1, *P.shape[-2:])
        scale = products.nonzero(products.norm(batch.detach())).sqrt()
        return root_with_lyapunov(batch, root.reshape(batch.shape), scale).reshape(P.shape)
