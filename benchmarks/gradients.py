r"""A tour of gradient rules: how each published one stands to the exact gradient as the covariance loses its condition.

For features X with covariance P and Q = P^½, every rule is asked for :math:`\partial l/\partial X` given
:math:`\partial l/\partial Q`. Two numbers are kept: the relative error against the closed form, and the norm over the
bound :math:`\sqrt{2/N}\,\|\partial l/\partial Q\|_F`, which the exact gradient never exceeds.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from studies.config import GradientTour
from studies.features import Factors, equal_eigenvalues, with_spectrum
from studies.report import on_terminal
from torch import Tensor

from eigengrain import output
from eigengrain.environment import describe
from eigengrain.files import writable, write_csv
from eigengrain.functional import GRADIENTS, sqrt_covariance
from eigengrain.pages import Cell, Part, TableData, page
from eigengrain.progress import progress_bar

Row = dict[str, Any]

CONDITION_NUMBERS = tuple(10.0**power for power in range(2, 17, 2))
SHORT_RANK, EQUAL = "N<d", "P=cI"

#: name of a row -> options of sqrt_covariance. All but the first start from P, by the solver that is the default.
RULES: dict[str, dict[str, str]] = {
    "exact, svd": {"solver": "svd"},
    **{rule: {"gradient": rule} for rule in GRADIENTS},
}

HOW_TO_READ = (
    "Each column is a set of random features whose covariance P has the largest eigenvalue 1 and the condition number κ(P) "
    f"at its head; in '{SHORT_RANK}' there are fewer positions than channels, so that P is singular, and in '{EQUAL}' all "
    "eigenvalues are equal.",
    "The error is that of ∂l/∂X against the closed form of the factors from which the features were made (median over "
    "samples), the other number its norm over the bound √(2/N)·‖∂l/∂Q‖, which the exact gradient keeps at every rank "
    "and condition number (the largest found): what is above 1, or not finite, the true gradient never is.",
    "All rows but 'exact, svd' start from P, which squares the condition number of the features, so that eigenvalues below "
    "1e-14 of the largest are lost to every rule; the exact gradient stays finite and bounded there, and with solver='svd' "
    "it is right as well.",
)


def cases(config: GradientTour) -> Iterator[tuple[str, float | None, Factors]]:
    """(name, κ of the eigenvalues above 0, features), one after the other."""
    generator = torch.Generator().manual_seed(config.seed)
    d, n, samples = config.channels, config.positions, config.samples

    def spread(count: int, kappa: float) -> Tensor:
        return torch.logspace(0, -math.log10(kappa) / 2, count, dtype=torch.float64)  # σ = √λ

    for kappa in CONDITION_NUMBERS:
        yield f"1e{round(math.log10(kappa))}", kappa, with_spectrum(spread(d, kappa), n, samples, generator)
    few = 3 * d // 4
    short = torch.cat([spread(few - 1, 100), torch.zeros(d - few + 1, dtype=torch.float64)])
    yield SHORT_RANK, 100.0, with_spectrum(short, few, samples, generator)
    yield EQUAL, 1.0, equal_eigenvalues(d, n, samples, generator)


def losses(factors: Factors, generator: torch.Generator) -> dict[str, Tensor]:
    """Symmetric ∂l/∂Q (B, d, d): one without preference, one that sees the smallest eighth of the eigenvalues alone."""
    g = torch.randn(factors.u.shape, generator=generator, dtype=torch.float64)
    g = (g + g.mT) / 2
    rank = int((factors.sigma > 0).sum())
    small = factors.u[..., rank - max(1, len(factors.sigma) // 8) : rank]
    return {"generic": g, "smallest": small @ (small.mT @ g @ small) @ small.mT}


def _norms(tensor: Tensor) -> Tensor:
    """Frobenius norm of each sample; infinite where anything in it is not finite."""
    norms = torch.linalg.vector_norm(tensor.flatten(1), dim=1)
    return torch.where(norms.isfinite(), norms, torch.inf)


def compare(factors: Factors, grad: Tensor, options: dict[str, str]) -> Row:
    """Error and norm of one rule for one ∂l/∂Q, over the samples."""
    x = factors.features.requires_grad_()
    (found,) = torch.autograd.grad(sqrt_covariance(x, **options), x, grad)  # type: ignore[call-overload]
    exact = factors.root_gradient(grad)
    errors = _norms(found - exact) / _norms(exact)
    ratios = _norms(found) / (math.sqrt(2 / factors.positions) * _norms(grad))
    return {
        "error_median": float(errors.quantile(0.5, interpolation="higher")),
        "error_worst": float(errors.max()),
        "bound_ratio_median": float(ratios.quantile(0.5, interpolation="higher")),
        "bound_ratio_worst": float(ratios.max()),
        "not_finite": int(ratios.isinf().sum()),
    }


def measure(config: GradientTour, advance: Callable[[str], None] = lambda case: None) -> list[Row]:
    """One row a case, loss and rule."""
    generator = torch.Generator().manual_seed(config.seed + 1)
    rows = []
    for name, kappa, factors in cases(config):
        common = {
            "case": name,
            "kappa": kappa,
            "channels": config.channels,
            "positions": factors.positions,
            "samples": config.samples,
        }
        for loss, grad in losses(factors, generator).items():
            for rule, options in RULES.items():
                rows.append(common | {"loss": loss, "rule": rule} | compare(factors, grad, options))
                advance(name)
    return rows


def summary(rows: list[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """What tables and picture show: by rule and case, the median error (generic loss) and the worst ratio (all losses)."""
    shown: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        cell = shown.setdefault(row["rule"], {})
        error, ratio = cell.get(row["case"], (math.nan, 0.0))
        if row["loss"] == "generic":
            error = row["error_median"]
        cell[row["case"]] = (error, max(ratio, row["bound_ratio_worst"]))
    return shown


def _short(value: float) -> str:
    """Two figures in few characters.

    Example:
        >>> _short(3.2e-07), _short(0.934), _short(1.44), _short(float("inf"))
        ('3e-7', '0.93', '1.44', 'NaN')
    """
    if not math.isfinite(value):
        return "NaN"
    if 0.01 <= value < 100:
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


#: rounding may carry a ratio this far above 1
_ROUNDING = 1e-9


def tables(shown: dict[str, dict[str, tuple[float, float]]]) -> list[TableData]:
    """The two tables: error, and ratio to the bound; what is not finite or above the bound is bad."""
    heads = ["rule", *next(iter(shown.values()))]

    def mark(value: float, limit: float) -> Cell:
        return Cell(_short(value), bad=not value <= limit)

    errors = [[Cell(rule), *(mark(e, 1.0) for e, _ in row.values())] for rule, row in shown.items()]
    ratios = [[Cell(rule), *(mark(r, 1.0 + _ROUNDING) for _, r in row.values())] for rule, row in shown.items()]
    return [
        TableData("relative error of ∂l/∂X, by κ(P)", heads, errors),
        TableData("‖∂l/∂X‖ over its bound √(2/N)·‖∂l/∂Q‖, by κ(P)", heads, ratios),
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and on a busy machine lose much by waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(config: GradientTour) -> None:
    """``eigengrain bench gradients``."""
    folder = Path(config.out)
    csv_path, png_path, html_path = (writable(folder / name) for name in ("gradients.csv", "gradients.png", "report.html"))
    console = output.reading()
    with progress_bar() as progress:
        total = (len(CONDITION_NUMBERS) + 2) * 2 * len(RULES)
        task = progress.add_task("gradients", total=total)
        with _one_thread():
            rows = measure(config, lambda case: progress.update(task, advance=1, description=f"gradients, {case}"))
    environment = describe(torch.device("cpu"))
    write_csv(csv_path, [row | environment for row in rows])
    shown = summary(rows)
    pictures = []
    if find_spec("matplotlib"):
        from benchmarks.gradient_plot import draw

        draw(shown, png_path)
        pictures.append(png_path)
    else:
        console.print("no picture without matplotlib: pip install 'eigengrain[explain]'", markup=False)
    data = tables(shown)
    parts: list[Part] = [*HOW_TO_READ, *pictures, *data]
    text = page("Gradients of the square root of a covariance", parts, environment)
    html_path.write_text(text, encoding="utf-8")
    for table in data:
        console.print(on_terminal(table), "")
    said = f"report: {html_path}   next: eigengrain bench functional"
    console.print(said, soft_wrap=True, highlight=False, markup=False)
    output.result({"rows": rows, "environment": environment, "files": [csv_path, *pictures, html_path]}, [html_path])
