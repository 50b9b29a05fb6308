"""Time and memory of a computation, and how benchmarks report them."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

import pandas as pd
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from eigengrain import output
from eigengrain.environment import describe
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.files import writable, write_csv
from eigengrain.functional._cuda import graphs
from eigengrain.progress import progress_bar

T = TypeVar("T")
C = TypeVar("C")
Row = dict[str, Any]
Layer = Callable[[Tensor], Tensor]
Advance = Callable[[str], object]
Clock = Callable[[], float]


def ignore(name: str) -> None:
    """Report no progress."""


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds(work: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Duration of a computation on a device."""
    synchronise(device)
    start = clock()
    work()
    synchronise(device)
    return clock() - start


def take_turns(
    works: Mapping[str, Callable[[], T]], *, repeats: int, warmup: int, advance: Advance = ignore
) -> dict[str, list[T]]:
    """Run computations in turn, so that a disturbance of the machine affects all of them, and collect their results.

    The results of the warm-up are dropped. A computation that runs out of memory gets an empty list.

    Example:
        >>> log = []
        >>> take_turns({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, repeats=1, warmup=1), "".join(log)
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


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of a computation above what is allocated at its start; None if the device does not count it.

    Example:
        >>> x = torch.zeros(1000)
        >>> 8000 <= peak_bytes(lambda: (x + 1) * 2, x.device) < 8100  # two tensors of 4,000 bytes at the same time
        True
    """
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        work()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device) - start
    if device.type != "cpu":
        return None
    # the profiler records each allocation
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    live = peak = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def saved_bytes(work: Callable[[], object], *inputs: Tensor) -> int:
    """Bytes that the graph of a computation keeps for its backward pass, without its inputs; each storage counts once.

    Example:
        >>> x = torch.zeros(1000, requires_grad=True)
        >>> saved_bytes(lambda: x.exp(), x), saved_bytes(lambda: x.sin(), x)  # the result itself; the input alone
        (4000, 0)
    """
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no later storage has the same address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    ignored = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in ignored)


@dataclass
class Case:
    """A layer, features that require a gradient, and the gradient of the output.

    ``state`` are parameters and buffers of the layer: their memory does not count, and parameters get a gradient.
    """

    layer: Layer
    x: Tensor
    grad: Tensor
    state: Sequence[Tensor] = ()

    @cached_property
    def sources(self) -> list[Tensor]:
        return [self.x, *(tensor for tensor in self.state if tensor.requires_grad)]

    def work(self) -> None:
        torch.autograd.grad(self.layer(self.x), self.sources, self.grad)

    def timed(self) -> tuple[float, float]:
        """Seconds of the forward pass, and of both passes."""
        outputs: list[Tensor] = []
        forward = seconds(lambda: outputs.append(self.layer(self.x)), self.x.device)
        backward = seconds(lambda: torch.autograd.grad(outputs[0], self.sources, self.grad), self.x.device)
        return forward, forward + backward

    def memory(self) -> tuple[int | None, int | None]:
        """Peak of both passes and what is kept between them, in bytes; None if there is not enough memory to measure it.

        CUDA graphs are off meanwhile: a replay works in memory of the graph, which no peak shows.
        """
        with mock.patch.object(graphs, "_recordable", return_value=False):
            try:
                return peak_bytes(self.work, self.x.device), saved_bytes(lambda: self.layer(self.x), self.x, *self.state)
            except torch.OutOfMemoryError:  # the graphs that were recorded for the times take memory too
                return None, None


def random_case(shape: tuple[int, int, int], layer: Layer, device: torch.device, dtype: torch.dtype, seed: int) -> Case:
    """A layer from features (batch, channels, positions) to matrices, with random features as after a ReLU."""
    batch, d, _ = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).relu().to(device, dtype).requires_grad_()
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(layer, x, torch.randn(batch, d, d, generator=generator).to(device, out_dtype))


def time_and_memory(
    cases: Mapping[str, Case], reference: str, *, repeats: int, warmup: int, advance: Advance = ignore
) -> dict[str, Row]:
    """Measure layers in turn: milliseconds, the ratio to a reference, MiB; None for a layer that runs out of memory."""
    times = take_turns({name: case.timed for name, case in cases.items()}, repeats=repeats, warmup=warmup, advance=advance)
    forward = {name: 1e3 * median(f for f, _ in runs) for name, runs in times.items() if runs}
    both = {name: 1e3 * median(b for _, b in runs) for name, runs in times.items() if runs}
    rows: dict[str, Row] = {}
    for name, case in cases.items():
        peak, saved = case.memory() if name in both else (None, None)
        rows[name] = {"forward_ms": ratio(forward.get(name)), "forward_backward_ms": ratio(both.get(name))}
        rows[name][f"ratio_to_{reference}"] = ratio(both.get(name), both.get(reference))
        rows[name] |= {"peak_mib": ratio(peak, 2**20), "saved_mib": ratio(saved, 2**20)}
        advance(name)
    return rows


def ratio(value: float | None, unit: float | None = 1.0, digits: int = 4) -> float | None:
    """A value in a unit, rounded; None without one of them."""
    return None if value is None or unit is None else round(value / unit, digits)


def full_rank_positions(channels: int, positions: int) -> int:
    """The given positions, or the smallest square above the channels: the mean takes one rank.

    Example:
        >>> full_rank_positions(512, 784), full_rank_positions(1024, 784)
        (784, 1089)
    """
    return positions if positions > channels else (isqrt(channels) + 1) ** 2


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Options that benchmarks share; their descriptions are appended to those of the subclass.

    Args:
        repeats: measured runs; the median is reported.
        warmup: runs before them that do not count; 1 by default, 4 on CUDA, where the third run records graphs.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1.
        seed: seed of random features, images and weights.
        out: CSV file; benchmarks/NAME-DEVICE.csv by default. A chart, if any, has the same name with the ending .png.
    """

    repeats: int = 5
    warmup: int | None = None
    device: str = "auto"
    seed: int = 0
    out: str | None = None

    def __init_subclass__(cls) -> None:
        cls.__doc__ = (cls.__doc__ or "").rstrip() + (Bench.__doc__ or "").partition("Args:")[2]

    def __post_init__(self) -> None:
        check_least(self, repeats=1, warmup=0)
        if self.out is not None and self.out.lower().endswith(".png"):
            raise ArgumentError("out", "is the CSV file", self.out, "the chart has its name, with the ending .png")

    def path(self, name: str, device: torch.device) -> Path:
        """The CSV file, whose folder is made."""
        return writable(self.out or f"benchmarks/{name}-{device.type}.csv")

    def runs(self, device: torch.device) -> int:
        """Number of warm-up runs."""
        return self.warmup if self.warmup is not None else 4 if device.type == "cuda" else 1


def as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, int | float) else list(value or [])


def check_least(config: Any, **least: float) -> None:
    """Check options that are numbers or lists of numbers against a lower limit; None stands for a default."""
    for name, limit in least.items():
        value = getattr(config, name)
        if value is not None and not min(as_list(value), default=limit - 1) >= limit:
            raise ArgumentError(name, f"must be at least {limit}", value)


def check_sizes(config: Any, *sizes: str) -> None:
    """Check options that are integers of at least 1, or lists of them, or lists of names, which must not be empty."""
    for name in sizes:
        if (value := getattr(config, name)) == []:
            raise ArgumentError(name, "must not be empty", remedy="leave it out for the default")
        if not (isinstance(value, list) and isinstance(value[0], str)):
            check_least(config, **{name: 1})


def fill(config: C, defaults: Mapping[str, tuple[Any, Any]], device: torch.device) -> C:
    """A copy of the options with defaults, for the CPU and for other devices, in place of None."""
    values = {name: pair[device.type != "cpu"] for name, pair in defaults.items() if getattr(config, name) is None}
    return replace(config, **values)  # type: ignore[type-var]


def check_names(kind: str, names: Iterable[str], choices: Iterable[str]) -> list[str]:
    """Names that must be among the choices, each once."""
    once = list(dict.fromkeys(names))
    for name in once:
        if name not in choices:
            raise UnknownName(kind, name, choices)
    return once


def pick(config: object, *names: str) -> Row:
    """Columns with the values of options."""
    return {name: getattr(config, name) for name in names}


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A progress bar; yields the function that advances it by one."""
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def save(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """Write rows with the environment in further columns."""
    write_csv(path, [row | describe(device) for row in rows])


def format_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Columns of the rows as text, with numbers in three or four figures.

    Example:
        >>> print(format_table([{"name": "a", "ms": 0.0123456}, {"name": "b", "ms": None}], ["name", "ms"]))
        name      ms
           a 0.01235
           b       –
    """
    frame = pd.DataFrame(rows)[list(columns)].astype(object)
    return frame.to_string(index=False, na_rep="–", formatters=dict.fromkeys(columns, _text))


def _text(value: Any) -> str:
    if value is None or value != value:
        return "–"
    return str(value) if not isinstance(value, float) else f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def finish(document: Mapping[str, Any], files: Sequence[Path], device: torch.device, *texts: str) -> None:
    """Print tables, the environment and the files, and report the result."""
    console, environment = output.console(), describe(device)
    for text in texts:
        console.print(text, "", soft_wrap=True, markup=False, highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), style="dim")
    for file in files:
        console.print(f"written to {file}", soft_wrap=True, markup=False)
    output.result({**document, "environment": environment, "files": list(files)}, files)
