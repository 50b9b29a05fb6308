"""Time and memory of every way from features to the square root of their covariance."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eigengrain import functional as F
from eigengrain.bench.config import FunctionalBench
from eigengrain.bench.display import progress_bar
from eigengrain.bench.environment import describe, pick_device
from eigengrain.bench.memory import peak_bytes, saved_bytes
from eigengrain.bench.records import writable, write_csv
from eigengrain.errors import unknown_name

Layer = Callable[[Tensor], Tensor]
Row = dict[str, str | int | float | None]

#: what times are divided by in the column of ratios
REFERENCE = "newton_schulz"


def _seb(solver: str) -> Layer:
    return lambda x: F.sqrt_covariance(x, seb=True, solver=solver)


#: name -> features (B, C, N) to matrices (B, C, C). The solvers of sqrt_covariance do more than the others: they are
#: exact, and the Scaling Eigen Branch is on.
METHODS: dict[str, Layer] = {
    **{solver: _seb(solver) for solver in F.SOLVERS if solver != "auto"},
    "newton_schulz": lambda x: F.newton_schulz(F.covariance(x), 5),
    "mpa_sqrt": lambda x: F.mpa_sqrt(F.covariance(x)),
    "mtp_sqrt": lambda x: F.mtp_sqrt(F.covariance(x)),
}


def methods_for(channels: int, positions: int, wanted: list[str] | None = None) -> list[str]:
    """Names of the methods that make sense for a size: the Gram matrix only where it is the smaller one.

    Example:
        >>> methods_for(64, 196, ["eigh", "gram"])
        ['eigh', 'newton_schulz']
    """
    for name in wanted or ():
        if name not in METHODS:
            raise unknown_name("method", name, METHODS)
    names = [name for name in METHODS if wanted is None or name in wanted or name == REFERENCE]
    return [name for name in names if name != "gram" or positions < channels]


@dataclass
class _Case:
    """One layer on one batch of features, ready to be run again and again."""

    layer: Layer
    x: Tensor
    grad: Tensor

    def work(self) -> None:
        torch.autograd.grad(self.layer(self.x), self.x, self.grad)

    def timed(self) -> tuple[float, float]:
        """Seconds of the forward pass, and of both passes."""
        _synchronise(self.x.device)
        start = time.perf_counter()
        out = self.layer(self.x)
        _synchronise(self.x.device)
        middle = time.perf_counter()
        torch.autograd.grad(out, self.x, self.grad)
        _synchronise(self.x.device)
        return middle - start, time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def measure(
    shape: tuple[int, int, int],
    names: list[str],
    *,
    repeats: int,
    warmup: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Measure methods on features of one shape. Their repeats take turns, so that a disturbance meets them all.

    Args:
        shape: (batch, channels, positions).
        names: keys of ``METHODS``, the reference among them.
        advance: called with the method's name after each run.

    Returns:
        a row a method: milliseconds forward and forward with backward, the ratio to the reference, MiB.
    """
    batch, d, n = shape
    generator = torch.Generator().manual_seed(seed)
    # rectified, as behind a ReLU
    x = torch.randn(shape, generator=generator).relu().to(device, dtype).requires_grad_()
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    grad = torch.randn(batch, d, d, generator=generator).to(device, out_dtype)
    cases = {name: _Case(METHODS[name], x, grad) for name in names}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        for name, case in cases.items():
            passes = case.timed()
            if turn >= warmup:
                seconds[name].append(passes)
            advance(name)

    forward = {name: 1e3 * median(f for f, _ in runs) for name, runs in seconds.items()}
    both = {name: 1e3 * median(b for _, b in runs) for name, runs in seconds.items()}
    rows: list[Row] = []
    for name, case in cases.items():
        peak = peak_bytes(case.work, x, grad)
        saved = saved_bytes(lambda case=case: case.layer(x), x)  # type: ignore[misc]
        rows.append(
            {
                "batch": batch,
                "channels": d,
                "positions": n,
                "method": name,
                "forward_ms": round(forward[name], 4),
                "forward_backward_ms": round(both[name], 4),
                f"ratio_to_{REFERENCE}": round(both[name] / both[REFERENCE], 4),
                "peak_mib": None if peak is None else round(peak / 2**20, 4),
                "saved_mib": round(saved / 2**20, 4),
                "features": str(dtype).removeprefix("torch."),
                "repeats": repeats,
            }
        )
        advance(name)
    return rows


def table(rows: list[Row]) -> Table:
    """The rows for reading: fastest first within each size."""
    view = Table(
        title="from features to the root of their covariance",
        caption=f"medians; ratio: of forward + backward to {REFERENCE}; peak: forward + backward; saved: kept between them",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("B × d × N", "method"):
        view.add_column(heading, no_wrap=True)
    for heading in ("fwd ms", "+ bwd ms", "ratio", "peak MiB", "saved MiB"):
        view.add_column(heading, no_wrap=True, justify="right")
    sizes = list(dict.fromkeys((r["batch"], r["channels"], r["positions"]) for r in rows))
    for size in sizes:
        here = [r for r in rows if (r["batch"], r["channels"], r["positions"]) == size]
        here.sort(key=lambda r: float(r["forward_backward_ms"] or 0))
        for place, r in enumerate(here):
            numbers = (r["forward_ms"], r["forward_backward_ms"], r[f"ratio_to_{REFERENCE}"], r["peak_mib"], r["saved_mib"])
            shown = ["–" if v is None else f"{float(v):.3g}" if float(v) < 100 else f"{float(v):.0f}" for v in numbers]
            view.add_row("" if place else " × ".join(map(str, size)), str(r["method"]), *shown)
        view.add_section()
    return view


def run(config: FunctionalBench) -> None:
    """``eigengrain bench functional``."""
    device = pick_device(config.device)
    plan = [(shape, methods_for(*shape[1:], config.methods)) for shape in config.shapes]
    path = writable(config.out or f"benchmarks/functional-{device.type}.csv")
    console = Console()
    rows: list[Row] = []
    with progress_bar(console) as progress:
        total = sum(len(names) for _, names in plan) * (config.warmup + config.repeats + 1)
        task = progress.add_task("measuring", total=total)
        for shape, names in plan:
            size = "×".join(map(str, shape))
            rows += measure(
                shape,
                names,
                repeats=config.repeats,
                warmup=config.warmup,
                device=device,
                dtype=getattr(torch, config.dtype),
                seed=config.seed,
                advance=lambda name, size=size: progress.update(  # type: ignore[misc]
                    task, advance=1, description=f"{size} {name}"
                ),
            )
    environment = describe(device)
    write_csv(path, [{**row, **environment} for row in rows])
    console.print(table(rows))
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), style="dim")
    console.print(f"written to {path}", soft_wrap=True)
