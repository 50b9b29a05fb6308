r"""Every published gradient rule against the exact gradient, as the covariance becomes ill-conditioned.

For features X with covariance P and Q = P^½, each rule computes :math:`\partial l/\partial X` from
:math:`\partial l/\partial Q`. Two numbers are reported: the relative error against the closed form, and the norm over the
bound :math:`\sqrt{2/N}\,\|\partial l/\partial Q\|_F`, which the exact gradient never exceeds. The features are composed as
:math:`X = \sqrt N\, U \Sigma V^T` with centred rows of :math:`V^T`, so P, its root and the gradient need no decomposition.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from rich.table import Table
from torch import Tensor

from benchmarks import measure
from benchmarks.charts import draw_gradients
from benchmarks.measure import Advance, Row, ignore
from eigengrain import output, pages
from eigengrain.environment import describe
from eigengrain.errors import ArgumentError
from eigengrain.files import writable
from eigengrain.functional import GRADIENTS, sqrt_covariance
from eigengrain.pages import Cell, TableData


@dataclass(frozen=True)
class Factors:
    """Factors of centred features: U (B, d, d), σ (d) descending with 0 for null directions, Vᵀ (B, d, N), null rows 0."""

    u: Tensor
    sigma: Tensor
    vt: Tensor

    @property
    def positions(self) -> int:
        return self.vt.shape[-1]

    @property
    def features(self) -> Tensor:
        """X (B, d, N)."""
        return math.sqrt(self.positions) * (self.u * self.sigma) @ self.vt

    def root_gradient(self, grad: Tensor) -> Tensor:
        r"""The gradient with respect to X for a loss on Q = P^½, from the factors alone.

        .. math:: \frac{\partial l}{\partial X} = \frac{2}{\sqrt N} U[(U^T G U) \circ R]V^T, \qquad
           R_{ij} = \frac{\sigma_j}{\sigma_i + \sigma_j}

        Args:
            grad: symmetric G = ∂l/∂Q, (B, d, d).
        """
        total = self.sigma[:, None] + self.sigma
        ratios = torch.where(total > 0, self.sigma / torch.where(total > 0, total, 1.0), 0.0)
        inner = (self.u.mT @ grad @ self.u) * ratios
        return 2 / math.sqrt(self.positions) * (self.u @ inner @ self.vt)


def with_spectrum(sigma: Tensor, positions: int, samples: int, generator: torch.Generator) -> Factors:
    """Random factors with the singular values ``sigma`` (d), descending; at most N − 1 of them may be above 0."""
    d, rank = len(sigma), int((sigma > 0).sum())
    if rank > positions - 1:
        raise ValueError(f"centred features of {positions} positions have rank {positions - 1} at most, got {rank}")
    u = torch.randn(samples, d, d, generator=generator, dtype=torch.float64)
    v = torch.randn(samples, positions, rank, generator=generator, dtype=torch.float64)
    v = torch.linalg.qr(v - v.mean(1, keepdim=True))[0]
    vt = torch.cat([v.mT, v.new_zeros(samples, d - rank, positions)], 1)
    return Factors(torch.linalg.qr(u)[0], sigma.double(), vt)


def equal_eigenvalues(d: int, positions: int, samples: int, generator: torch.Generator) -> Factors:
    """Factors of P = I whose eigenvalues are equal to the last bit: channel i is 1 at one position and −1 at another.

    The first position is 0 in all channels, so that centring changes nothing; the others are shuffled.
    """
    if positions < 2 * d + 1:
        raise ValueError(f"{d} equal eigenvalues need at least {2 * d + 1} positions, got {positions}")
    vt = torch.zeros(samples, d, positions, dtype=torch.float64)
    channels = torch.arange(d)
    for sample in vt:
        shuffled = 1 + torch.randperm(positions - 1, generator=generator)
        sample[channels, shuffled[:d]] = math.sqrt(0.5)
        sample[channels, shuffled[d : 2 * d]] = -math.sqrt(0.5)
    return Factors(torch.eye(d, dtype=torch.float64).expand(samples, d, d), torch.ones(d, dtype=torch.float64), vt)


@dataclass(frozen=True)
class GradientsBench:
    """Compare gradient rules with the exact gradient.

    Args:
        channels: channels d of the features.
        positions: positions N of the features, more than 2 d.
        samples: features drawn for each case, each with two loss gradients.
        seed: seed of the random numbers.
        out: folder for gradients.csv, gradients.png and report.html.
    """

    channels: int = 64
    positions: int = 196
    samples: int = 16
    seed: int = 0
    out: str = "runs/gradients"

    def __post_init__(self) -> None:
        measure.check_least(self, channels=8, samples=1)
        if self.positions <= 2 * self.channels:  # for a covariance with equal eigenvalues
            raise ArgumentError("positions", "must be more than twice {channels}", self.positions)


CONDITION_NUMBERS = tuple(10.0**power for power in range(2, 17, 2))
#: name of a rule -> options of sqrt_covariance. All but the first decompose P with the default solver.
RULES: dict[str, dict[str, str]] = {"exact, svd": {"solver": "svd"}, **{rule: {"gradient": rule} for rule in GRADIENTS}}


def cases(config: GradientsBench) -> Iterator[tuple[str, float, Factors]]:
    """Name, condition number of the eigenvalues above 0 and features of each case."""
    generator = torch.Generator().manual_seed(config.seed)
    d, n, samples = config.channels, config.positions, config.samples

    def spread(count: int, kappa: float) -> Tensor:
        return torch.logspace(0, -math.log10(kappa) / 2, count, dtype=torch.float64)  # σ = √λ

    for kappa in CONDITION_NUMBERS:
        yield f"1e{round(math.log10(kappa))}", kappa, with_spectrum(spread(d, kappa), n, samples, generator)
    few = 3 * d // 4
    short = torch.cat([spread(few - 1, 100), torch.zeros(d - few + 1, dtype=torch.float64)])
    yield "N<d", 100.0, with_spectrum(short, few, samples, generator)
    yield "P=cI", 1.0, equal_eigenvalues(d, n, samples, generator)


def losses(factors: Factors, generator: torch.Generator) -> dict[str, Tensor]:
    """Symmetric ∂l/∂Q (B, d, d): a generic one, and one that depends on the smallest eighth of the eigenvalues alone."""
    g = torch.randn(factors.u.shape, generator=generator, dtype=torch.float64)
    g = (g + g.mT) / 2
    rank = int((factors.sigma > 0).sum())
    small = factors.u[..., rank - max(1, len(factors.sigma) // 8) : rank]
    return {"generic": g, "smallest": small @ (small.mT @ g @ small) @ small.mT}


def _norms(tensor: Tensor) -> Tensor:
    """Frobenius norm of each sample; infinite if anything in it is not finite."""
    norms = torch.linalg.vector_norm(tensor.flatten(1), dim=1)
    return torch.where(norms.isfinite(), norms, torch.inf)


def compare(factors: Factors, grad: Tensor, options: dict[str, str]) -> Row:
    """Error and norm of one rule for one ∂l/∂Q, over the samples."""
    x = factors.features.requires_grad_()
    (gradient,) = torch.autograd.grad(sqrt_covariance(x, **options), x, grad)  # type: ignore[call-overload]
    exact = factors.root_gradient(grad)
    errors = _norms(gradient - exact) / _norms(exact)
    ratios = _norms(gradient) / (math.sqrt(2 / factors.positions) * _norms(grad))
    return {
        "error_median": float(errors.quantile(0.5, interpolation="higher")),
        "error_worst": float(errors.max()),
        "bound_ratio_median": float(ratios.quantile(0.5, interpolation="higher")),
        "bound_ratio_worst": float(ratios.max()),
        "not_finite": int(ratios.isinf().sum()),
    }


def measure_rules(config: GradientsBench, advance: Advance = ignore) -> list[Row]:
    """One row per case, loss and rule."""
    generator = torch.Generator().manual_seed(config.seed + 1)
    rows = []
    for name, kappa, factors in cases(config):
        size = {"channels": config.channels, "positions": factors.positions, "samples": config.samples}
        for loss, grad in losses(factors, generator).items():
            for rule, options in RULES.items():
                case = {"case": name, "kappa": kappa, **size, "loss": loss, "rule": rule}
                rows.append(case | compare(factors, grad, options))
                advance(name)
    return rows


def summary(rows: list[Row]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Median error for the generic loss, and worst ratio to the bound over all losses: rules × cases."""
    frame = pd.DataFrame(rows)
    order = {"index": list(dict.fromkeys(frame["rule"])), "columns": list(dict.fromkeys(frame["case"]))}
    errors = frame[frame["loss"] == "generic"].pivot(index="rule", columns="case", values="error_median")
    ratios = frame.pivot_table("bound_ratio_worst", "rule", "case", aggfunc="max")
    return errors.reindex(**order), ratios.reindex(**order)


def _short(value: float) -> str:
    """A number in few characters.

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


def tables(errors: pd.DataFrame, ratios: pd.DataFrame) -> list[TableData]:
    """Two tables; values that are not finite or above the limit are marked. Rounding may carry a ratio a little above 1."""
    titles = ("relative error of ∂l/∂X, by κ(P)", "‖∂l/∂X‖ over its bound √(2/N)·‖∂l/∂Q‖, by κ(P)")
    return [
        TableData(
            title,
            ["rule", *frame.columns],
            [[Cell(str(rule)), *(Cell(_short(v), bad=not v <= limit) for v in row)] for rule, row in frame.iterrows()],
        )
        for title, frame, limit in zip(titles, (errors, ratios), (1.0, 1.0 + 1e-9), strict=True)
    ]


def run(config: GradientsBench) -> None:
    """``python -m benchmarks gradients``."""
    folder, device = Path(config.out), torch.device("cpu")
    csv, png, html = (writable(folder / name) for name in ("gradients.csv", "gradients.png", "report.html"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for matrices this small
    try:
        with measure.progress((len(CONDITION_NUMBERS) + 2) * 2 * len(RULES)) as advance:
            rows = measure_rules(config, advance)
    finally:
        torch.set_num_threads(threads)
    measure.save(csv, rows, device)
    draw_gradients(*summary(rows), png)
    views, template = tables(*summary(rows)), Path(__file__).with_name("gradients.html")
    title, environment = "Gradients of the square root of a covariance", describe(device)
    page = pages.render(template, title=title, picture=png, tables=views, environment=environment)
    html.write_text(page, encoding="utf-8")
    console = output.console()
    for view in views:
        table = Table(*view.heads, title=view.caption, box=None, padding=(0, 1, 0, 0))
        for row in view.rows:
            table.add_row(*(f"[bold red]{cell.text}[/]" if cell.bad else cell.text for cell in row))
        console.print(table, "")
    console.print(f"report: {html}", soft_wrap=True, highlight=False, markup=False)
    output.result({"rows": rows, "environment": environment, "files": [csv, png, html]}, [html])
