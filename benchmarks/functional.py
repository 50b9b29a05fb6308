"""Time and memory of every way from features to the square root of their covariance, and how layers are measured."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import TypeVar

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from benchmarks.config import FunctionalBench, warmup_runs
from benchmarks.memory import peak_bytes, saved_bytes
from eigengrain import functional as F
from eigengrain import output
from eigengrain.environment import describe, pick_device
from eigengrain.errors import UnknownName
from eigengrain.files import writable, write_csv
from eigengrain.functional import autotune
from eigengrain.functional._cuda import graphs as _graphs
from eigengrain.progress import progress_bar

Layer = Callable[[Tensor], Tensor]
Row = dict[str, str | int | float | None]
T = TypeVar("T")

#: what times are divided by in the column of ratios
REFERENCE = "newton_schulz"


def _seb(solver: str) -> Layer:
    return lambda x: F.sqrt_covariance(x, seb=True, solver=solver)


#: name -> features (B, C, N) to matrices (B, C, C). The solvers of sqrt_covariance do more than the others: they are
#: exact, and the Scaling Eigen Branch is on.
METHODS: dict[str, Layer] = {
    **{solver: _seb(solver) for solver in F.SOLVERS},
    "newton_schulz": lambda x: F.newton_schulz(F.covariance(x), 5),
    "isqrt_covariance": lambda x: F.isqrt_covariance(x, 5),
    "mpa_sqrt": lambda x: F.mpa_sqrt(F.covariance(x)),
    "mtp_sqrt": lambda x: F.mtp_sqrt(F.covariance(x)),
}


def solver_of(method: str, x: Tensor) -> str | None:
    """The solver behind a method on these features: its own name, what ``auto`` takes, or None for an iteration.

    Example:
        >>> x = torch.ones(1, 8, 5)
        >>> solver_of("auto", x), solver_of("svd", x), solver_of("mpa_sqrt", x)
        ('gram', 'svd', None)
    """
    if method == "auto":
        return autotune.fastest(x)
    return method if method in F.SOLVERS else None


def methods_for(channels: int, positions: int, wanted: list[str] | None = None) -> list[str]:
    """Names of the methods that make sense for a size: the Gram matrix only where it is the smaller one.

    Example:
        >>> methods_for(64, 196, ["eigh", "gram"])
        ['eigh', 'newton_schulz']
    """
    for name in wanted or ():
        if name not in METHODS:
            raise UnknownName("method", name, METHODS)
    names = [name for name in METHODS if wanted is None or name in wanted or name == REFERENCE]
    return [name for name in names if name != "gram" or positions < channels]


# --- one layer, measured -----------------------------------------------------------------------------------------


@dataclass
class Case:
    """One layer on one batch of features, ready to be run again and again.

    Args:
        layer: from features to the output.
        x: features, which ask for their gradient.
        grad: of the output.
        state: parameters and buffers of the layer, which take no memory anew; gradients are made for the parameters.
    """

    layer: Layer
    x: Tensor
    grad: Tensor
    state: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        self.sources = [self.x, *(tensor for tensor in self.state if tensor.requires_grad)]

    def work(self) -> None:
        torch.autograd.grad(self.layer(self.x), self.sources, self.grad)

    def timed(self) -> tuple[float, float]:
        """Seconds of the forward pass, and of both passes."""
        synchronise(self.x.device)
        start = time.perf_counter()
        out = self.layer(self.x)
        synchronise(self.x.device)
        middle = time.perf_counter()
        torch.autograd.grad(out, self.sources, self.grad)
        synchronise(self.x.device)
        return middle - start, time.perf_counter() - start

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes: the peak of both passes, and what is kept between them; None where there is no room to find out.

        What a recorded CUDA graph keeps for its replays comes on top.
        """
        with unrecorded():
            try:
                peak = peak_bytes(self.work, self.x, self.grad, *self.state)
                return peak, saved_bytes(lambda: self.layer(self.x), self.x, *self.state)
            except torch.OutOfMemoryError:  # beside the graphs that were recorded for the times
                return None, None


@contextmanager
def unrecorded() -> Iterator[None]:
    """Nothing is replayed from a CUDA graph inside: a replay works in memory of the graph's own, which no peak shows."""
    recordable = _graphs._recordable
    _graphs._recordable = lambda tensor: False
    try:
        yield
    finally:
        _graphs._recordable = recordable


def synchronise(device: torch.device) -> None:
    """Wait until everything that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def in_turn(
    works: Mapping[str, Callable[[], T]],
    *,
    repeats: int,
    warmup: int,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, list[T]]:
    """What each piece of work returns, again and again. They take turns, so that a disturbance meets them all.

    Args:
        works: by name.
        repeats: results of each.
        warmup: runs before them, whose results are dropped.
        advance: called with the name after each run.

    Returns:
        lists of results by name; an empty one for work that needs more memory than the device has.

    Example:
        >>> log = []
        >>> in_turn({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, repeats=1, warmup=1), "".join(log)
        ({'a': [None], 'b': [None]}, 'abab')
    """
    results: dict[str, list[T]] = {name: [] for name in works}
    too_large: set[str] = set()
    for turn in range(warmup + repeats):
        for name, work in works.items():
            if name not in too_large:
                try:
                    result = work()
                except torch.OutOfMemoryError:
                    too_large.add(name)
                    results[name].clear()
                else:
                    if turn >= warmup:
                        results[name].append(result)
                if name in too_large:  # outside the handler, which still holds the tensors
                    torch.cuda.empty_cache()
            advance(name)
    return results


def figures(
    cases: Mapping[str, Case],
    reference: str,
    *,
    repeats: int,
    warmup: int,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, Row]:
    """The measured columns of each case: times in milliseconds, the ratio to the reference, MiB.

    All of them are None for a case that needs more memory than the device has.

    Args:
        cases: by name, measured in turn.
        reference: name of the case that times are divided by.
        repeats, warmup, advance: as in :func:`in_turn`; ``advance`` is called once more when memory has been measured.
    """
    seconds = in_turn({name: case.timed for name, case in cases.items()}, repeats=repeats, warmup=warmup, advance=advance)
    forward = {name: 1e3 * median(f for f, _ in runs) for name, runs in seconds.items() if runs}
    both = {name: 1e3 * median(b for _, b in runs) for name, runs in seconds.items() if runs}
    found: dict[str, Row] = {}
    for name, case in cases.items():
        peak, saved = case.memory() if name in both else (None, None)
        ratio = both[name] / both[reference] if name in both and reference in both else None
        found[name] = {
            "forward_ms": _rounded(forward.get(name)),
            "forward_backward_ms": _rounded(both.get(name)),
            f"ratio_to_{reference}": _rounded(ratio),
            "peak_mib": mebibytes(peak),
            "saved_mib": mebibytes(saved),
        }
        advance(name)
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def mebibytes(count: int | None) -> float | None:
    return None if count is None else round(count / 2**20, 4)


def short(value: str | float | None) -> str:
    """A number in three figures, for tables.

    Example:
        >>> short(0.0123456), short(1234.5), short(None)
        ('0.0123', '1234', '–')
    """
    if value is None:
        return "–"
    return f"{float(value):.3g}" if float(value) < 100 else f"{float(value):.0f}"


# --- the benchmark -----------------------------------------------------------------------------------------------


def random_case(shape: tuple[int, int, int], layer: Layer, device: torch.device, dtype: torch.dtype, seed: int) -> Case:
    """A layer from features (batch, channels, positions) to matrices, on random features."""
    batch, d, _ = shape
    generator = torch.Generator().manual_seed(seed)
    # rectified, as behind a ReLU
    x = torch.randn(shape, generator=generator).relu().to(device, dtype).requires_grad_()
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(layer, x, torch.randn(batch, d, d, generator=generator).to(device, out_dtype))


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
    """Measure methods on features of one shape, in turn.

    Args:
        shape: (batch, channels, positions).
        names: keys of ``METHODS``, the reference among them.
        advance: called with the method's name after each run.

    Returns:
        a row a method: milliseconds forward and forward with backward, the ratio to the reference, MiB.
    """
    batch, d, n = shape
    first = random_case(shape, METHODS[names[0]], device, dtype, seed)
    cases = {name: replace(first, layer=METHODS[name]) for name in names}
    found = figures(cases, REFERENCE, repeats=repeats, warmup=warmup, advance=advance)
    size: Row = {"batch": batch, "channels": d, "positions": n}
    end: Row = {"features": str(dtype).removeprefix("torch."), "repeats": repeats}
    rows: list[Row] = []
    for name in names:
        solver = None if found[name]["forward_ms"] is None else solver_of(name, first.x)
        rows.append(size | {"method": name, "solver": solver} | found[name] | end)
    return rows


def by_time(row: Row) -> float:
    """For sorting: rows without a time last."""
    return float(inf if row["forward_backward_ms"] is None else row["forward_backward_ms"])


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
        here.sort(key=by_time)
        for place, r in enumerate(here):
            numbers = (r["forward_ms"], r["forward_backward_ms"], r[f"ratio_to_{REFERENCE}"], r["peak_mib"], r["saved_mib"])
            method = f"auto ({r['solver']})" if r["method"] == "auto" else str(r["method"])
            view.add_row("" if place else " × ".join(map(str, size)), method, *map(short, numbers))
        view.add_section()
    return view


def run(config: FunctionalBench) -> None:
    """``eigengrain bench functional``."""
    device = pick_device(config.device)
    warmup = warmup_runs(config.warmup, device.type)
    plan = [(shape, methods_for(*shape[1:], config.methods)) for shape in config.shapes]
    path = writable(config.out or f"benchmarks/functional-{device.type}.csv")
    console = output.reading()
    rows: list[Row] = []
    with progress_bar() as progress:
        total = sum(len(names) for _, names in plan) * (warmup + config.repeats + 1)
        task = progress.add_task("measuring", total=total)
        for shape, names in plan:
            size = "×".join(map(str, shape))
            rows += measure(
                shape,
                names,
                repeats=config.repeats,
                warmup=warmup,
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
    console.print(f"written to {path}", soft_wrap=True, markup=False)
    output.result({"rows": rows, "environment": environment, "files": [path]}, [path])
