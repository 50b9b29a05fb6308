"""Time and memory of every square root of a covariance, and how the time of the SEB layer grows with its input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import Advance, Case, Layer, Row, as_list, ignore
from eigengrain import functional as F
from eigengrain.environment import describe, pick_device
from eigengrain.errors import ArgumentError, FileError
from eigengrain.files import writable

#: method that times are divided by in the column of ratios
REFERENCE = "newton_schulz"
SIZES = ("batch", "channels", "positions")


#: name -> function from features (B, C, N) to matrices (B, C, C). The solvers of sqrt_covariance do more than the others:
#: they are exact, and the Scaling Eigen Branch is on by default.
METHODS: dict[str, Layer] = {
    **{solver: partial(F.sqrt_covariance, seb=True, solver=solver) for solver in F.SOLVERS},
    "newton_schulz": lambda x: F.newton_schulz(F.covariance(x), 5),
    "isqrt_covariance": lambda x: F.isqrt_covariance(x, 5),
    "mpa_sqrt": lambda x: F.mpa_sqrt(F.covariance(x)),
    "mtp_sqrt": lambda x: F.mtp_sqrt(F.covariance(x)),
}


def solver_of(method: str, x: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """The solver of a method for these features: its own name, the choice of ``auto``, or None for an iteration.

    Example:
        >>> x = torch.ones(1, 8, 5)
        >>> solver_of("auto", x), solver_of("svd", x), solver_of("mpa_sqrt", x)
        ('gram', 'svd', None)
    """
    if method == "auto":
        dtype = dtype or F.choose_dtype(x.device, x.dtype)
        return F.choose_solver(x.device.type, x.shape[1], math.prod(x.shape[2:]), dtype, batch=x.shape[0])
    return method if method in F.SOLVERS else None


def methods_for(channels: int, positions: int, names: Sequence[str] | None = None) -> list[str]:
    """Names of the methods that fit a size, and the reference: the Gram matrix only where it is the smaller one.

    Example:
        >>> methods_for(64, 196, ["eigh", "gram"])
        ['eigh', 'newton_schulz']
    """
    measure.check_names("method", names or (), METHODS)
    chosen = [name for name in METHODS if names is None or name in names or name == REFERENCE]
    return [name for name in chosen if name != "gram" or positions < channels]


@dataclass(frozen=True)
class FunctionalBench(measure.Bench):
    """Measure the square roots of a covariance.

    Args:
        batch: samples in a batch; several as [1,10].
        channels: channels d, the size of the covariance; several as [64,256].
        positions: positions N of the feature map; several as [196,784].
        methods: methods to measure, such as [eigh,svd]; all by default. The reference of the ratios is always measured.
        dtype: precision of the features.
        seb: whether the solvers have the Scaling Eigen Branch.
    """

    batch: list[int] | int = 10
    channels: list[int] | int = field(default_factory=lambda: [64, 256])
    positions: list[int] | int = field(default_factory=lambda: [196, 784])
    methods: list[str] | None = None
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    seb: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        measure.check_sizes(self, "batch", "channels", "positions", "methods")


def measure_methods(
    shape: tuple[int, int, int], names: list[str], config: FunctionalBench, device: torch.device, advance: Advance = ignore
) -> list[Row]:
    """Measure methods, including the reference, on features (batch, channels, positions) in turn; one row per method."""
    branch = {name: config.seb and name in F.SOLVERS for name in names}
    layers = {name: METHODS[name] for name in names}
    layers |= {name: partial(F.sqrt_covariance, seb=config.seb, solver=name) for name in names if name in F.SOLVERS}
    first = measure.random_case(shape, layers[names[0]], device, getattr(torch, config.dtype), config.seed)
    cases = {name: replace(first, layer=layer) for name, layer in layers.items()}
    figures = measure.time_and_memory(cases, REFERENCE, repeats=config.repeats, warmup=config.runs(device), advance=advance)
    return [
        {
            **dict(zip(SIZES, shape, strict=True)),
            "method": name,
            "solver": None if figures[name]["forward_ms"] is None else solver_of(name, first.x),
            "seb": "yes" if branch[name] else "no",
            **figures[name],
            "features": config.dtype,
            "repeats": config.repeats,
        }
        for name in names
    ]


def run(config: FunctionalBench) -> None:
    """``python -m benchmarks functional``."""
    device = pick_device(config.device)
    shapes = product(as_list(config.batch), as_list(config.channels), as_list(config.positions))
    plan = [(shape, methods_for(*shape[1:], config.methods)) for shape in shapes]
    path = config.path("functional", device)
    rows: list[Row] = []
    with measure.progress(sum(len(names) for _, names in plan) * (config.runs(device) + config.repeats + 1)) as advance:
        for shape, names in plan:
            rows += measure_methods(shape, names, config, device, advance)
    measure.save(path, rows, device)
    numbers = ("forward_ms", "forward_backward_ms", f"ratio_to_{REFERENCE}", "peak_mib", "saved_mib")
    measure.finish({"rows": rows}, [path], device, measure.format_table(rows, (*SIZES, "method", "solver", *numbers)))


@dataclass(frozen=True)
class GrowthBench(measure.Bench):
    """Measure how the time of the SEB layer grows with the batch and with the channels.

    Args:
        batch: batch sizes, with the channels of --at_channels.
        channels: numbers of channels d, with the batch of --at_batch.
        at_batch: the batch while the channels grow.
        at_channels: the channels while the batch grows.
        positions: positions N of the feature map; for as many channels or more, the smallest square above the channels.
        methods: methods to measure, as for functional.
        limit: time limit of a run in seconds. A method that exceeds it is not measured on larger sizes.
        redraw: measure nothing and draw the chart again from the CSV file --out; the device need not be present.
    """

    batch: list[int] | int = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    channels: list[int] | int = field(default_factory=lambda: [64, 128, 256, 512, 1024])
    at_batch: int = 32
    at_channels: int = 256
    positions: int = 784
    methods: list[str] = field(default_factory=lambda: ["auto", "eigh", "products"])
    limit: float = 2.0
    redraw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        measure.check_sizes(self, *SIZES, "at_batch", "at_channels", "methods")
        if not self.limit > 0:
            raise ArgumentError("limit", "must be above 0", self.limit)

    @property
    def sweeps(self) -> dict[str, list[tuple[int, int, int]]]:
        """The shapes (batch, channels, positions) of each sweep, in ascending order; every covariance has full rank.

        Example:
            >>> GrowthBench(batch=[2, 1], channels=[8, 16], at_channels=8, at_batch=4, positions=16).sweeps
            {'batch': [(1, 8, 16), (2, 8, 16)], 'channels': [(4, 8, 16), (4, 16, 25)]}
        """
        batches = [(batch, self.at_channels) for batch in sorted(set(as_list(self.batch)))]
        channels = [(self.at_batch, d) for d in sorted(set(as_list(self.channels)))]
        sweeps = {"batch": batches, "channels": channels}
        return {
            s: [(b, d, measure.full_rank_positions(d, self.positions)) for b, d in sizes] for s, sizes in sweeps.items()
        }


def growth_methods(names: Sequence[str]) -> list[str]:
    """Names of the methods, each once, without the Gram matrix, which is not smaller at full rank."""
    methods = [name for name in measure.check_names("method", names, METHODS) if name != "gram"]
    if not methods:
        raise ArgumentError("methods", "must contain a method other than gram, which has no part at full rank", names)
    return methods


def time_within(cases: dict[str, Case], *, repeats: int, warmup: int, limit: float) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the forward pass and of both passes by method: as many runs, in turn, as fit into a limit in seconds.

    The last run of the warm-up, at least one, tells how many fit, and is the result if none does. The list of a method that
    runs out of memory is empty.
    """
    works = {name: case.timed for name, case in cases.items()}
    rehearsal = measure.take_turns(works, repeats=1, warmup=max(warmup - 1, 0))
    count = {name: int(min(repeats, limit / runs[0][1])) if runs else 0 for name, runs in rehearsal.items()}
    times = {name: [] if count[name] else runs for name, runs in rehearsal.items()}
    for turn in range(max(count.values())):
        again = measure.take_turns({name: works[name] for name in works if count[name] > turn}, repeats=1, warmup=0)
        for name, runs in again.items():
            times[name] += runs
    return times


def measure_growth(config: GrowthBench, device: torch.device, advance: Advance = ignore) -> list[Row]:
    """Measure both sweeps; a method leaves a sweep after the first size on which a run exceeds the limit."""
    warmup = config.runs(device)
    rows: list[Row] = []
    for sweep, shapes in config.sweeps.items():
        names = growth_methods(config.methods)
        for shape in shapes:
            if names:
                # one run more for the very first size, which loads libraries
                new = _measure_size(shape, names, config, warmup if rows else warmup + 1, device)
                rows += [{"sweep": sweep, **row} for row in new]
                names = [row["method"] for row in new if row["forward_backward_ms"] <= 1e3 * config.limit]
            advance(" × ".join(map(str, shape)))
    return rows


def _measure_size(
    shape: tuple[int, int, int], names: list[str], config: GrowthBench, warmup: int, device: torch.device
) -> list[Row]:
    """One row per method that fits into memory."""
    try:
        first = measure.random_case(shape, METHODS[names[0]], device, torch.float32, config.seed)
    except torch.OutOfMemoryError:
        return []
    cases = {name: replace(first, layer=METHODS[name]) for name in names}
    times = time_within(cases, repeats=config.repeats, warmup=warmup, limit=config.limit)
    return [
        {
            **dict(zip(SIZES, shape, strict=True)),
            "method": name,
            "solver": solver_of(name, first.x),
            "forward_ms": round(1e3 * median(f for f, _ in runs), 4),
            "forward_backward_ms": round(1e3 * median(b for _, b in runs), 4),
            "repeats": len(runs),
        }
        for name, runs in times.items()
        if runs
    ]


def growth_table(rows: list[Row]) -> str:
    """Milliseconds of both passes: one line per size, one column per method, and the choice of auto."""
    frame = pd.DataFrame(rows)
    size = ["sweep", *SIZES]
    wide = frame.pivot_table("forward_backward_ms", size, "method", sort=False)[list(dict.fromkeys(frame["method"]))]
    choice = frame[frame["method"] == "auto"].set_index(size)["solver"].rename("choice of auto")
    lines = wide.join(choice).reset_index()
    return measure.format_table(lines.to_dict("records"), list(lines.columns))


#: columns of the CSV file that table and chart need, with their types
COLUMNS = {
    **dict.fromkeys(("sweep", "method", "solver", "device_name"), "str"),
    **dict.fromkeys(SIZES, "int64"),
    **dict.fromkeys(("forward_ms", "forward_backward_ms"), "float64"),
}


def read_growth(path: Path) -> list[Row]:
    """Read a file of this benchmark."""
    try:
        rows: list[Row] = pd.read_csv(path, keep_default_na=False)[list(COLUMNS)].astype(COLUMNS).to_dict("records")
    except (OSError, KeyError, ValueError) as error:
        raise FileError(path, f"it is not a file of the growth benchmark: {error}") from error
    return rows


def run_growth(config: GrowthBench) -> None:
    """``python -m benchmarks growth``."""
    from benchmarks.charts import draw_growth

    growth_methods(config.methods)  # before a file is made
    if config.redraw:  # no device is opened: the file may come from another machine
        kind = pick_device("auto").type if config.device == "auto" else config.device.partition(":")[0]
        path = Path(config.out or f"benchmarks/growth-{kind}.csv")
        rows, picture = read_growth(path), writable(path.with_suffix(".png"))
        draw_growth(rows, rows[0]["device_name"], picture)
        measure.finish({"rows": rows}, [picture], torch.device("cpu"), growth_table(rows))
        return
    device = pick_device(config.device)
    path = config.path("growth", device)
    picture = writable(path.with_suffix(".png"))
    with measure.progress(sum(map(len, config.sweeps.values()))) as advance:
        rows = measure_growth(config, device, advance)
    if not rows:
        raise ArgumentError("batch", "needs more memory than the device has, even at its smallest", config.batch)
    measure.save(path, rows, device)
    draw_growth(rows, str(describe(device)["device_name"]), picture)
    measure.finish({"rows": rows}, [path, picture], device, growth_table(rows))
