r"""Time of every eigensolver, and the error of every square root of a covariance and of its gradient.

The features of the errors are composed of factors (:mod:`benchmarks.gradients`), so the reference needs no decomposition,
and no solver is measured against another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from benchmarks.charts import draw_errors
from benchmarks.functional import METHODS, solver_of
from benchmarks.gradients import Factors, with_spectrum
from benchmarks.measure import Advance, Layer, Row, as_list, ignore
from eigengrain import functional as F
from eigengrain.environment import pick_device
from eigengrain.errors import ArgumentError
from eigengrain.files import writable
from eigengrain.functional import polar
from eigengrain.functional._cuda import cusolver
from eigengrain.functional.eigen import choose_backend, decompose
from eigengrain.functional.graded_factors import resolve_fixed


@dataclass(frozen=True)
class SolversBench(measure.Bench):
    """Time eigensolvers on random matrices and measure the errors of square roots on features with a known root.

    Args:
        batch: covariances in a batch for the eigensolvers; several as [32,128]. 4 on the CPU and 32 elsewhere by default.
        channels: their size d; several as [256,512]. 128 on the CPU, 256 and 512 elsewhere by default.
        dtypes: precisions in which they are decomposed.
        condition: condition numbers κ(P) of the features with a known root; several as [1e6,1e10].
        at_channels: channels of these features; 64 on the CPU and 256 elsewhere by default.
        positions: their positions; several as [784,196]. If there are no more than channels, P is singular and κ is the
            condition number of its eigenvalues above 0. 196 and 49 on the CPU, 784 and 196 elsewhere by default.
        samples: samples of them in a batch; the largest error is reported.
        svd_batch: the same for the singular value decomposition, which takes seconds on CUDA.
        only_errors: do not time eigensolvers.
        out: folder for eigensolvers-LABEL.csv, accuracy-LABEL.csv, for several condition numbers also its chart, and
            flops.csv; benchmarks by default.
        label: end of their names, such as h200; the type of the device by default.
    """

    batch: list[int] | int | None = None
    channels: list[int] | int | None = None
    dtypes: list[Literal["float32", "float64"]] = field(default_factory=lambda: ["float32", "float64"])
    condition: list[float] | float = 1e10
    at_channels: int | None = None
    positions: list[int] | int | None = None
    samples: int = 8
    svd_batch: int = 2
    only_errors: bool = False
    label: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        measure.check_sizes(self, "batch", "channels", "at_channels", "positions", "samples", "svd_batch", "dtypes")
        conditions = as_list(self.condition)
        if not conditions or not all(math.isfinite(kappa) and kappa >= 1 for kappa in conditions):
            raise ArgumentError("condition", "must be at least 1 and finite", self.condition)
        # a condition number needs two eigenvalues above 0
        if self.at_channels == 1:
            raise ArgumentError("at_channels", "must be at least 2", self.at_channels)
        if min(as_list(self.positions), default=3) < 3:
            raise ArgumentError("positions", "must be at least 3", self.positions)
        if self.label is not None and (not self.label or set(self.label) & set("/\\")):
            raise ArgumentError("label", "must be a part of a file name", self.label, "choose the folder with {out}")


#: on the CPU and elsewhere
DEFAULTS = {"batch": (4, 32), "channels": (128, [256, 512]), "at_channels": (64, 256), "positions": ([196, 49], [784, 196])}


Eigensolver = Callable[[Tensor], tuple[Tensor, Tensor]]  # (B, d, d) -> eigenvalues (B, d), eigenvectors in the columns

#: eigensolver that times are divided by in the column of ratios
REFERENCE = "torch.linalg.eigh"

#: positions of the feature maps whose covariances are decomposed, unless there are as many channels
POSITIONS = 784


def eigensolvers_on(device: torch.device) -> dict[str, Eigensolver]:
    """The reference and the backends of :func:`eigengrain.functional.eigh` on a device, each under one name."""
    available = {"cusolver-batched": device.type == "cuda" and cusolver.available(), "cpu": device.type != "cpu"}
    names = [name for name in F.BACKENDS if name != "auto" and available.get(name, True)]
    # in the precision of the matrix; the public function decomposes in float64
    return {REFERENCE: torch.linalg.eigh} | {name: partial(decompose, backend=name) for name in names}


#: iterative eigensolvers take longer if eigenvalues are far apart, so both kinds are timed
MATRICES = ("covariance", "symmetric")


def random_matrices(kind: str, batch: int, d: int, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """Covariances of full rank of random features as after a ReLU, or symmetric matrices with independent entries."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "covariance":
        x = torch.randn(batch, d, measure.full_rank_positions(d, POSITIONS), generator=generator).relu().to(device)
        return F.covariance(x, dtype=torch.float64).to(dtype)
    a = torch.randn(batch, d, d, generator=generator, dtype=torch.float64).to(device)
    return (a + a.mT).div_(2).to(dtype)


def worst_error(output: Tensor, exact: Tensor) -> float:
    """The largest relative error of a sample in the Frobenius norm; infinite if anything is not finite.

    Example:
        >>> worst_error(torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]]))
        0.5
    """
    error = torch.linalg.matrix_norm(output.double() - exact) / torch.linalg.matrix_norm(exact)
    return float(torch.where(error.isfinite(), error, torch.inf).max())


def residual(p: Tensor, solver: Eigensolver) -> float:
    r"""The largest :math:`\|P - U \Lambda U^T\|_F/\|P\|_F` of a batch, in float64."""
    values, vectors = (part.double() for part in solver(p))
    return worst_error((vectors * values.unsqueeze(-2)) @ vectors.mT, p.double())


def measure_eigensolvers(
    batch: int, d: int, dtype: str, kind: str, config: SolversBench, device: torch.device, advance: Advance = ignore
) -> list[Row]:
    """Time every eigensolver on one batch of matrices (batch, d, d) of a kind in turn; one row per eigensolver."""
    p = random_matrices(kind, batch, d, device, getattr(torch, dtype), config.seed)
    solvers = eigensolvers_on(device)
    works = {name: (lambda solver=solver: measure.seconds(lambda: solver(p), device)) for name, solver in solvers.items()}
    runs = measure.take_turns(works, repeats=config.repeats, warmup=config.runs(device), advance=advance)
    times = {name: 1e3 * median(each) for name, each in runs.items() if each}
    case = {"batch": batch, "channels": d, "matrices": kind, "dtype": dtype}
    return [
        {
            **case,
            "eigensolver": name,
            "of_auto": "yes" if name == choose_backend("auto", p) else "no",
            "ms": measure.ratio(times.get(name)),
            f"ratio_to_{REFERENCE}": measure.ratio(times.get(name), times.get(REFERENCE)),
            "residual": float(f"{residual(p, solver):.3g}") if name in times else None,
            "repeats": config.repeats,
        }
        for name, solver in solvers.items()
    ]


#: bounds of the relative errors of output and gradient in the Frobenius norm at κ(P) = 1e10 and full rank
BOUNDS = {"float64": (1e-9, 1e-6), "float32": (5e-6, 1e-3)}


def reference(factors: Factors, grad: Tensor, seb: bool) -> tuple[Tensor, Tensor]:
    r"""Q, or A = (1 + s)Q with ``seb``, and the gradient with respect to the features, in closed form.

    .. math:: s = \sqrt{\textstyle\sum_i \lambda_i e^{-2\lambda_i}}, \qquad
       \frac{\partial l}{\partial X} = (1 + s)\frac{\partial\langle G, Q\rangle}{\partial X}
       + \langle G, Q\rangle \frac{\partial s}{\partial X}, \qquad
       \frac{\partial s}{\partial X} = \frac{1}{\sqrt N}\, U\, \mathrm{diag}\Big(\frac{(1 - 2\lambda)\,\sigma\,
       e^{-2\lambda}}{s}\Big) V^T

    Args:
        factors: factors of the features; the largest eigenvalue is of order 1, so that nothing underflows.
        grad: symmetric G = ∂l/∂Q, or ∂l/∂A, (B, d, d).
        seb: whether the Scaling Eigen Branch is on.
    """
    u, sigma, vt = factors.u, factors.sigma, factors.vt
    q, dq = (u * sigma) @ u.mT, factors.root_gradient(grad)
    if not seb:
        return q, dq
    decay = torch.exp(-2 * sigma.square())
    s = (sigma.square() * decay).sum().sqrt()
    ds = (u * ((1 - 2 * sigma.square()) * sigma * decay / s)) @ vt / math.sqrt(factors.positions)
    along = (grad * q).sum((-2, -1), keepdim=True)  # <G, Q>
    return (1 + s) * q, (1 + s) * dq + along * ds


def conditioned_features(kappa: float, channels: int, positions: int, samples: int, generator: torch.Generator) -> Factors:
    """Factors with eigenvalues of P from 1 to 1/κ, evenly on a logarithmic scale, and 0 beyond the rank."""
    rank = min(channels, positions - 1)
    sigma = torch.zeros(channels, dtype=torch.float64)
    sigma[:rank] = torch.logspace(0, -math.log10(kappa) / 2, rank, dtype=torch.float64)
    return with_spectrum(sigma, positions, samples, generator)


@dataclass(frozen=True)
class Route:
    """A way from features to the root: name, precision of the work, function, and whether it returns A."""

    solver: str
    dtype: str
    layer: Layer
    seb: bool = True
    note: str = ""


def _route(solver: str, dtype: str) -> Route:
    layer = partial(F.sqrt_covariance, seb=True, solver=solver, dtype=getattr(torch, dtype))
    return Route(solver, dtype, layer)


#: The published approximations come last, for comparison: their number of
#: steps, or their degree, is fixed, and at these condition numbers none of them has converged.
ROUTES = (
    *(_route(solver, dtype) for dtype in ("float64", "float32") for solver in F.SOLVERS),
    Route("newton_schulz", "float64", METHODS["newton_schulz"], False, "5 steps, not a converged root"),
    Route("mpa_sqrt", "float64", METHODS["mpa_sqrt"], False, "degree 5, not a converged root"),
    Route("mtp_sqrt", "float64", METHODS["mtp_sqrt"], False, "degree 10, not a converged root"),
)


#: peak rates in operations per second, by their makers: float32 outside tensor cores, and float64
PEAKS: dict[str, dict[str, float]] = {
    "rtx4090": {"float32": 82.6e12, "float64": 1.29e12},
    "m3max": {"float32": 14.2e12, "float64": 0.0},
}
#: assumed shares of the peak. Products reach half of it. In float32 the batched eigensolver reaches what it does on an
#: H200, where it waits for memory and launches; in float64 a device with few float64 units waits for these.
PRODUCTS, EIGEN = 0.5, {"float32": 0.025, "float64": 0.25}


def routes_for(channels: int, positions: int) -> list[Route]:
    """The routes for a size: the Gram matrix only where it is the smaller one."""
    return [route for route in ROUTES if route.solver != "gram" or positions < channels]


def errors(route: Route, factors: Factors, grad: Tensor, device: torch.device) -> tuple[float, float]:
    """The worst relative errors of output and gradient; the reference is computed on the CPU, in float64."""
    exact_output, exact_gradient = reference(factors, grad, route.seb)
    x = factors.features.to(device).requires_grad_()
    output = route.layer(x)
    (gradient,) = torch.autograd.grad(output, x, grad.to(device, output.dtype))
    return worst_error(output.detach().cpu(), exact_output), worst_error(gradient.cpu(), exact_gradient)


def measure_errors(
    kappa: float, channels: int, positions: int, config: SolversBench, device: torch.device, advance: Advance = ignore
) -> list[Row]:
    """Errors of every route on features with a condition number (of the eigenvalues above 0); one row per route."""
    generator = torch.Generator().manual_seed(config.seed)
    factors = conditioned_features(kappa, channels, positions, max(config.samples, config.svd_batch), generator)
    grad = torch.randn(factors.u.shape, generator=generator, dtype=torch.float64)
    grad = (grad + grad.mT) / 2
    rows: list[Row] = []
    for route in routes_for(channels, positions):
        x = factors.features[: config.samples].to(device)
        solver = solver_of(route.solver, x, getattr(torch, route.dtype))
        count = config.svd_batch if solver == "svd" else config.samples
        some = Factors(factors.u[:count], factors.sigma, factors.vt[:count])
        forward, backward = errors(route, some, grad[:count], device)
        bound_forward, bound_gradient = BOUNDS[route.dtype]
        row: Row = {"solver": route.solver, "taken": solver, "dtype": route.dtype, "output": "A" if route.seb else "Q"}
        row |= {"condition": kappa, "channels": channels, "positions": positions, "rank": min(channels, positions - 1)}
        row |= {"samples": count, "forward_error": float(f"{forward:.3g}")}
        row |= {"gradient_error": float(f"{backward:.3g}")}
        row |= {"bound_forward": bound_forward, "bound_gradient": bound_gradient}
        row["meets"] = "yes" if forward <= bound_forward and backward <= bound_gradient else "no"
        rows.append(row | {"note": route.note})
        advance(route.solver)
    return rows


def _eigh_flops(shape: Any, *rest: object, **kwargs: object) -> int:
    """About 9 d³ for eigenvalues and vectors of a symmetric matrix (Golub and Van Loan, Matrix Computations, 8.3)."""
    return 9 * math.prod(shape[:-2]) * shape[-1] ** 3


def count_flops(channels: int, positions: int) -> list[Row]:
    """Floating-point operations of A and of its gradient for one feature map on a GPU; one row per route."""
    rows: list[Row] = []
    counted = [route for route in routes_for(channels, positions) if route.seb]
    for route in (route for route in counted if route.solver not in ("auto", "svd")):
        x = torch.randn(1, channels, positions).requires_grad_()
        counts = FlopCounterMode(display=False, custom_mapping={torch.ops.eigengrain.eigh: _eigh_flops})
        with patch.object(import_module("eigengrain.functional.sqrt_covariance"), "resolve", resolve_fixed), counts:
            with patch.object(polar, "_decides", lambda flags: False):
                route.layer(x).sum().backward()
        total, eigen = counts.get_total_flops(), counts.get_flop_counts()["Global"].get(torch.ops.eigengrain.eigh, 0)
        case = {"solver": route.solver, "dtype": route.dtype, "channels": channels, "positions": positions}
        row: Row = case | {"eigen_mflop": round(eigen / 1e6), "product_mflop": round((total - eigen) / 1e6)}
        for device, rates in PEAKS.items():
            peak = rates[route.dtype]
            seconds = 32 * ((total - eigen) / PRODUCTS + eigen / EIGEN[route.dtype]) / peak if peak else None
            row[f"{device}_ms"] = None if seconds is None else round(1e3 * seconds, 1)
        rows.append(row)
    return rows


def run(config: SolversBench) -> None:
    """``python -m benchmarks solvers``."""
    device = pick_device(config.device)
    if device.type == "mps":
        raise ArgumentError("device", "must have float64, and MPS does not", config.device, "use cpu")
    config = measure.fill(config, DEFAULTS, device)
    assert config.at_channels is not None
    sizes = [] if config.only_errors else [as_list(config.batch), as_list(config.channels)]
    matrices = list(product(*sizes, config.dtypes, MATRICES)) if sizes else []
    cases = list(product(as_list(config.condition), as_list(config.positions)))
    label = config.label or device.type
    names = (f"eigensolvers-{label}.csv", f"accuracy-{label}.csv", f"accuracy-{label}.png", "flops.csv")
    times_csv, errors_csv, chart, flops_csv = (writable(Path(config.out or "benchmarks") / name) for name in names)
    times: list[Row] = []
    accuracy: list[Row] = []
    flops = [row for n in as_list(config.positions) for row in count_flops(config.at_channels, n)]
    measure.save(flops_csv, flops, device)
    runs = len(matrices) * len(eigensolvers_on(device)) * (config.runs(device) + config.repeats)
    runs += sum(len(routes_for(config.at_channels, positions)) for _, positions in cases)
    with measure.progress(runs) as advance:
        for batch, d, dtype, kind in matrices:
            times += measure_eigensolvers(batch, d, dtype, kind, config, device, advance)
        for kappa, positions in cases:
            accuracy += measure_errors(kappa, config.at_channels, positions, config, device, advance)
    paths, texts = [errors_csv, flops_csv], []
    measure.save(errors_csv, accuracy, device)
    if times:
        measure.save(times_csv, times, device)
        paths = [times_csv, *paths]
        case, numbers = ("batch", "channels", "matrices", "dtype"), ("ms", f"ratio_to_{REFERENCE}", "residual")
        texts = [measure.format_table(times, (*case, "eigensolver", "of_auto", *numbers))]
    if len(as_list(config.condition)) > 1:
        first = as_list(config.positions)[0]
        draw_errors([row for row in accuracy if row["positions"] == first], chart)
        paths.append(chart)
    columns = ("condition", "channels", "positions", "solver", "taken", "dtype", "forward_error", "gradient_error", "meets")
    texts += [measure.format_table(accuracy, columns), measure.format_table(flops, list(flops[0]))]
    measure.finish({"eigensolvers": times, "accuracy": accuracy, "flops": flops}, paths, device, *texts)
