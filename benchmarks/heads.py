"""Time and memory of every head on one feature map."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from rich import box
from rich.table import Table

from benchmarks.config import HeadsBench, warmup_runs
from benchmarks.functional import Case, Row, by_time, figures, short, solver_of
from eigengrain import output
from eigengrain.environment import describe, pick_device
from eigengrain.errors import UnknownName
from eigengrain.files import writable, write_csv
from eigengrain.heads import CovarianceHead, Head, create_head, list_heads
from eigengrain.progress import progress_bar


def known_heads(names: Iterable[str]) -> list[str]:
    """Names of heads, each once.

    Raises:
        ValueError: for a head that there is not.

    Example:
        >>> known_heads(["mpncov", "gap", "mpncov"])
        ['mpncov', 'gap']
    """
    once = list(dict.fromkeys(names))
    for name in once:
        if name not in list_heads():
            raise UnknownName("head", name, list_heads())
    return once


def build(names: list[str], channels: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> dict[str, Head]:
    """Heads with their default options, in training mode, the same ones for the same seed.

    Parameters stay in float32 for 16-bit features, as in mixed precision.
    """
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    heads = {}
    with torch.random.fork_rng(devices=[]):
        for name in names:
            torch.manual_seed(seed)
            heads[name] = create_head(name, channels).to(device, parameters)
    return heads


def _solver(head: Head, x: torch.Tensor) -> str | None:
    """Which solver takes the square root, if a covariance head has one."""
    if not isinstance(head, CovarianceHead) or head.normalise != "sqrt":
        return None
    return solver_of(head.solver, x)


def measure(
    shape: tuple[int, int, int, int],
    names: list[str],
    reference: str,
    *,
    repeats: int,
    warmup: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Measure heads on one random feature map, in turn; the backward pass is that to the map and to the parameters.

    Args:
        shape: (batch, channels, height, width).
        names: of registered heads, the reference among them.
        advance: called with the head's name after each run.

    Returns:
        a row a head: length of the vector, milliseconds forward and forward with backward, ratio to the reference, MiB.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).relu().to(device, dtype).requires_grad_()  # as behind a ReLU
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    heads = build(names, shape[1], device, dtype, seed)
    cases = {}
    for name, head in heads.items():
        grad = torch.randn(shape[0], head.out_features, generator=generator).to(device, out_dtype)
        cases[name] = Case(head, x, grad, [*head.parameters(), *head.buffers()])
    found = figures(cases, reference, repeats=repeats, warmup=warmup, advance=advance)
    size: Row = dict(zip(("batch", "channels", "height", "width"), shape, strict=True))
    end: Row = {"features": str(dtype).removeprefix("torch."), "repeats": repeats}
    rows: list[Row] = []
    for name, head in heads.items():
        about: Row = {
            "head": name,
            "vector": head.out_features,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "solver": None if found[name]["forward_ms"] is None else _solver(head, x),
        }
        rows.append(size | about | found[name] | end)
    return rows


def table(rows: list[Row], reference: str) -> Table:
    """The rows for reading, fastest first."""
    size = " × ".join(str(rows[0][part]) for part in ("batch", "channels", "height", "width"))
    view = Table(
        title=f"heads on a feature map of {size}",
        caption=f"medians; ratio: of forward + backward to {reference}; peak: forward + backward; saved: kept between "
        "them; –: the device's memory is too small",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    view.add_column("head", no_wrap=True)
    for heading in ("vector", "fwd ms", "+ bwd ms", "ratio", "peak MiB", "saved MiB"):
        view.add_column(heading, no_wrap=True, justify="right")
    for row in sorted(rows, key=by_time):
        numbers = ("forward_ms", "forward_backward_ms", f"ratio_to_{reference}", "peak_mib", "saved_mib")
        view.add_row(label(row), str(row["vector"]), *(short(row[number]) for number in numbers))
    return view


def label(row: Row) -> str:
    """The head's name, and the solver that it took.

    Example:
        >>> label({"head": "gap", "solver": None}), label({"head": "mpncov", "solver": "eigh"})
        ('gap', 'mpncov (eigh)')
    """
    return f"{row['head']} ({row['solver']})" if row["solver"] else str(row["head"])


def run(config: HeadsBench) -> None:
    """``eigengrain bench heads``."""
    device = pick_device(config.device)
    names = known_heads([*(config.heads or list_heads()), config.reference])
    path = writable(config.out or f"benchmarks/heads-{device.type}.csv")
    picture = writable(path.with_suffix(".png"))
    warmup = warmup_runs(config.warmup, device.type)
    console = output.reading()
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(names) * (warmup + config.repeats + 1))
        rows = measure(
            config.shape(device.type),
            names,
            config.reference,
            repeats=config.repeats,
            warmup=warmup,
            device=device,
            dtype=getattr(torch, config.dtype),
            seed=config.seed,
            advance=lambda name: progress.update(task, advance=1, description=name),
        )
    environment = describe(device)
    write_csv(path, [{**row, **environment} for row in rows])
    console.print(table(rows, config.reference))
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), style="dim")
    console.print(f"written to {path}", soft_wrap=True, markup=False)
    files = [path]
    if find_spec("matplotlib"):
        from benchmarks.chart import draw_heads

        draw_heads(rows, config.reference, str(environment["device_name"]), picture)
        console.print(f"drawn to {picture}", soft_wrap=True, markup=False)
        files.append(picture)
    else:
        console.print("no chart without matplotlib: pip install 'eigengrain[explain]'", markup=False)
    output.result({"rows": rows, "environment": environment, "files": files}, files)
