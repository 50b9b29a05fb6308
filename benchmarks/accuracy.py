r"""Errors of every way from features to the root of their covariance, and of its gradient, against factors that are known.

The features are put together as :math:`X = \sqrt N\, U \Sigma V^T` (:mod:`studies.features`), so that the
reference needs no decomposition, and no route is measured against another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich import box
from rich.table import Table
from studies.features import Factors, with_spectrum
from torch import Tensor

from benchmarks.functional import Layer, Row, solver_of
from eigengrain import functional as F

#: relative errors in the Frobenius norm, of output and gradient, that are promised at κ(P) = 1e10 and full rank
BOUNDS = {"float64": (1e-9, 1e-6), "float32": (5e-6, 1e-3)}


# --- the reference -----------------------------------------------------------------------------------------------


class Exact(NamedTuple):
    """Output (B, d, d) and gradient (B, d, N)."""

    output: Tensor
    gradient: Tensor


def reference(factors: Factors, grad: Tensor, seb: bool) -> Exact:
    r"""Q, or A = (1 + s)Q with ``seb``, and the gradient with respect to the features, in closed form.

    .. math:: s = \sqrt{\textstyle\sum_i \lambda_i e^{-2\lambda_i}}, \qquad
       \frac{\partial l}{\partial X} = (1 + s)\frac{\partial\langle G, Q\rangle}{\partial X}
       + \langle G, Q\rangle \frac{\partial s}{\partial X}, \qquad
       \frac{\partial s}{\partial X} = \frac{1}{\sqrt N}\, U\, \mathrm{diag}\Big(\frac{(1 - 2\lambda)\,\sigma\,
       e^{-2\lambda}}{s}\Big) V^T

    Args:
        factors: of the features; the largest eigenvalue is of order 1, so that nothing underflows.
        grad: symmetric G = ∂l/∂Q, or ∂l/∂A, (B, d, d).
        seb: whether the Scaling Eigen Branch is on.
    """
    u, sigma, vt = factors.u, factors.sigma, factors.vt
    q, dq = (u * sigma) @ u.mT, factors.root_gradient(grad)
    if not seb:
        return Exact(q, dq)
    decay = torch.exp(-2 * sigma.square())
    s = (sigma.square() * decay).sum().sqrt()
    ds = (u * ((1 - 2 * sigma.square()) * sigma * decay / s)) @ vt / math.sqrt(factors.positions)
    along = (grad * q).sum((-2, -1), keepdim=True)  # <G, Q>
    return Exact((1 + s) * q, (1 + s) * dq + along * ds)


def known_features(kappa: float, channels: int, positions: int, samples: int, generator: torch.Generator) -> Factors:
    """Factors with eigenvalues of P from 1 to 1/κ, evenly on a logarithmic scale, and 0 beyond the rank."""
    rank = min(channels, positions - 1)
    sigma = torch.zeros(channels, dtype=torch.float64)
    sigma[:rank] = torch.logspace(0, -math.log10(kappa) / 2, rank, dtype=torch.float64)
    return with_spectrum(sigma, positions, samples, generator)


def worst_error(found: Tensor, exact: Tensor) -> float:
    """The largest relative error of a sample in the Frobenius norm; infinite if anything is not finite.

    Example:
        >>> worst_error(torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]]))
        0.5
    """
    off = torch.linalg.matrix_norm(found.double() - exact) / torch.linalg.matrix_norm(exact)
    return float(torch.where(off.isfinite(), off, torch.inf).max())


# --- the routes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """A way from features to the root: its name, the precision it works in, and its layer.

    Args:
        seb: whether the layer returns A, and not Q.
        note: what a reader of the numbers must know.
    """

    solver: str
    dtype: str
    layer: Layer
    seb: bool = True
    note: str = ""

    def taken(self, x: Tensor) -> str | None:
        """The solver behind it on these features."""
        return "svd" if self.dtype == "float32" else solver_of(self.solver, x)


def _fused(solver: str, dtype: str) -> Route:
    precision: torch.dtype = getattr(torch, dtype)
    return Route(solver, dtype, lambda x: F.sqrt_covariance(x, seb=True, solver=solver, dtype=precision))


#: In float32 sqrt_covariance refuses all solvers but the SVD. The published approximations come last, for comparison:
#: their number of steps, or their degree, is fixed, and at these condition numbers none of them has converged.
ROUTES = (
    *(_fused(solver, "float64") for solver in F.SOLVERS),
    *(_fused(solver, "float32") for solver in ("auto", "svd")),
    Route(
        "newton_schulz",
        "float64",
        lambda x: F.newton_schulz(F.covariance(x), 5),
        seb=False,
        note="5 steps, not a converged root",
    ),
    Route("mpa_sqrt", "float64", lambda x: F.mpa_sqrt(F.covariance(x)), seb=False, note="degree 5, not a converged root"),
    Route("mtp_sqrt", "float64", lambda x: F.mtp_sqrt(F.covariance(x)), seb=False, note="degree 10, not a converged root"),
)


def routes_for(channels: int, positions: int) -> list[Route]:
    """Those that make sense for a size: the Gram matrix only where it is the smaller one.

    Example:
        >>> [route.solver for route in routes_for(8, 20)][:4]
        ['auto', 'eigh', 'svd', 'products']
    """
    return [route for route in ROUTES if route.solver != "gram" or positions < channels]


# --- the measurement ---------------------------------------------------------------------------------------------


def errors(route: Route, factors: Factors, grad: Tensor, device: torch.device) -> tuple[float, float]:
    """The worst relative errors of output and gradient; the reference is computed on the CPU, in float64."""
    exact = reference(factors, grad, route.seb)
    x = factors.features.to(device).requires_grad_()
    output = route.layer(x)
    (gradient,) = torch.autograd.grad(output, x, grad.to(device, output.dtype))
    return worst_error(output.detach().cpu(), exact.output), worst_error(gradient.cpu(), exact.gradient)


def measure(
    kappa: float,
    channels: int,
    positions: int,
    *,
    samples: int,
    svd_batch: int,
    device: torch.device,
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Errors of every route on features of one kind.

    Args:
        kappa: condition number of P, or of its eigenvalues above 0 where the positions are no more than the channels.
        samples: in a batch.
        svd_batch: the same for routes by the SVD.
        advance: called with each route's name when it is done.

    Returns:
        a row a route: its errors, their bounds, and whether both are met.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = known_features(kappa, channels, positions, max(samples, svd_batch), generator)
    grad = torch.randn(factors.u.shape, generator=generator, dtype=torch.float64)
    grad = (grad + grad.mT) / 2
    rows: list[Row] = []
    for route in routes_for(channels, positions):
        taken = route.taken(factors.features[:samples].to(device))
        count = svd_batch if taken == "svd" else samples
        some = Factors(factors.u[:count], factors.sigma, factors.vt[:count])
        forward, backward = (float(f"{error:.3g}") for error in errors(route, some, grad[:count], device))
        bound_forward, bound_gradient = BOUNDS[route.dtype]
        rows.append(
            {
                "solver": route.solver,
                "taken": taken,
                "dtype": route.dtype,
                "output": "A" if route.seb else "Q",
                "condition": kappa,
                "channels": channels,
                "positions": positions,
                "rank": min(channels, positions - 1),
                "samples": count,
                "forward_error": forward,
                "gradient_error": backward,
                "bound_forward": bound_forward,
                "bound_gradient": bound_gradient,
                "meets": "yes" if forward <= bound_forward and backward <= bound_gradient else "no",
                "note": route.note,
            }
        )
        advance(route.solver)
    return rows


def table(rows: list[Row]) -> Table:
    """The rows for reading; errors above their bound stand out."""
    bounds = ", ".join(f"{_power(a)} and {_power(b)} in {dtype}" for dtype, (a, b) in BOUNDS.items())
    view = Table(
        title="errors against known factors, features in float64",
        caption="dtype: of the work; errors: relative, in the Frobenius norm, the largest of the samples; bounds, promised "
        f"at κ = 1e10 and full rank: {bounds}; the last ones, without the Scaling Eigen Branch, are not converged roots",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("κ, d × N", "solver", "dtype"):
        view.add_column(heading, no_wrap=True)
    for heading in ("forward", "gradient", "meets"):
        view.add_column(heading, no_wrap=True, justify="right")
    for case in dict.fromkeys((row["condition"], row["channels"], row["positions"]) for row in rows):
        here = [row for row in rows if (row["condition"], row["channels"], row["positions"]) == case]
        kappa, channels, positions = case
        for place, row in enumerate(here):
            size = "" if place else f"{_power(kappa)}, {channels} × {positions}"
            solver = f"auto ({row['taken']})" if row["solver"] == "auto" else str(row["solver"])
            shown = (_marked(row, "forward"), _marked(row, "gradient"), str(row["meets"]))
            view.add_row(size, solver, str(row["dtype"]), *shown)
        view.add_section()
    return view


def _power(value: str | float | None) -> str:
    """One figure and an exponent.

    Example:
        >>> _power(1e10), _power(5e-6)
        ('1e10', '5e-6')
    """
    mantissa, exponent = f"{float(value or 0):.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _marked(row: Row, part: str) -> str:
    """An error in two figures, in red above its bound."""
    error = float(row[f"{part}_error"] or 0)
    return f"{error:.1e}" if error <= float(row[f"bound_{part}"] or 0) else f"[red]{error:.1e}[/]"
