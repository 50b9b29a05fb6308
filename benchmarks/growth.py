"""How the time of the SEB layer grows with the batch and with the channels."""

import csv
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import functional
from benchmarks.config import GrowthBench, warmup_runs
from benchmarks.functional import Case, Row, by_time, in_turn, random_case, short, solver_of
from eigengrain import output
from eigengrain.environment import describe, pick_device
from eigengrain.errors import UnknownName
from eigengrain.files import writable, write_csv
from eigengrain.progress import progress_bar


def methods_of(config: GrowthBench) -> list[str]:
    """Names of the methods, each once; without the Gram matrix, which is no smaller at full rank.

    Raises:
        ValueError: for a method that there is not.

    Example:
        >>> methods_of(GrowthBench(methods=["eigh", "gram", "eigh"]))
        ['eigh']
    """
    for name in config.methods:
        if name not in functional.METHODS:
            raise UnknownName("method", name, functional.METHODS)
    names = [name for name in dict.fromkeys(config.methods) if name != "gram"]
    if not names:
        raise ValueError(
            "--methods has the Gram matrix alone, which is for maps with fewer positions than channels: add eigh"
        )
    return names


def point(cases: dict[str, Case], *, repeats: int, warmup: int, limit: float) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the forward pass and of both, by method: as many runs, in turn, as fit into the limit.

    Args:
        cases: by method, on the same features.
        repeats: runs at most.
        warmup: runs before, one at least: the last of them says how many fit, and is the result if none does.
        limit: seconds that the runs of a method may take together.

    Returns:
        an empty list for a method that needs more memory than the device has.
    """
    works = {name: case.timed for name, case in cases.items()}
    rehearsal = in_turn(works, repeats=1, warmup=max(warmup - 1, 0))
    fitting = {name: int(min(repeats, limit / runs[0][1])) if runs else 0 for name, runs in rehearsal.items()}
    found = {name: [] if fitting[name] else runs for name, runs in rehearsal.items()}
    for turn in range(max(fitting.values())):
        again = in_turn({name: works[name] for name in works if fitting[name] > turn}, repeats=1, warmup=0)
        for name, runs in again.items():
            found[name] += runs
    return found


def measure(
    config: GrowthBench,
    device: torch.device,
    advance: Callable[[str], None] = lambda size: None,
) -> list[Row]:
    """Follow both sweeps; a method leaves a sweep after the first size on which a run takes longer than the limit.

    Args:
        advance: called with each size, as text, when it is done or left out.

    Returns:
        a row a size and method: milliseconds forward and forward with backward, the solver that ``auto`` took.
    """
    warmup = warmup_runs(config.warmup, device.type)
    rows: list[Row] = []
    for sweep, shapes in config.sweeps.items():
        names = methods_of(config)
        for shape in shapes:
            if names:
                # the very first size waits for libraries, which should not be taken for its time
                found = _size(shape, names, config, warmup if rows else warmup + 1, device)
                rows += [{"sweep": sweep, **row} for row in found]
                names = [str(row["method"]) for row in found if by_time(row) <= 1e3 * config.limit]
            advance(" × ".join(map(str, shape)))
    return rows


def _size(
    shape: tuple[int, int, int], names: list[str], config: GrowthBench, warmup: int, device: torch.device
) -> list[Row]:
    """A row a method that fits into memory."""
    batch, d, n = shape
    try:
        first = random_case(shape, functional.METHODS[names[0]], device, torch.float32, config.seed)
    except torch.OutOfMemoryError:
        return []
    cases = {name: replace(first, layer=functional.METHODS[name]) for name in names}
    seconds = point(cases, repeats=config.repeats, warmup=warmup, limit=config.limit)
    return [
        {
            "batch": batch,
            "channels": d,
            "positions": n,
            "method": name,
            "solver": solver_of(name, first.x),
            "forward_ms": round(1e3 * median(f for f, _ in runs), 4),
            "forward_backward_ms": round(1e3 * median(b for _, b in runs), 4),
            "repeats": len(runs),
        }
        for name, runs in seconds.items()
        if runs
    ]


def table(rows: list[Row]) -> Table:
    """Milliseconds of both passes: a line a size, a column a method."""
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    view = Table(
        title="the SEB layer, forward + backward, in milliseconds",
        caption="medians; –: a smaller size took longer than the limit, or the memory is too small",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    view.add_column("B × d × N", no_wrap=True)
    for method in methods:
        view.add_column(method, no_wrap=True, justify="right")
    if "auto" in methods:
        view.add_column("auto took", no_wrap=True)
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        cells: dict[str, dict[str, Row]] = {}
        for row in rows:
            if row["sweep"] == sweep:
                cells.setdefault(f"{row['batch']} × {row['channels']} × {row['positions']}", {})[str(row["method"])] = row
        for size, here in cells.items():
            times = [short(here[method]["forward_backward_ms"] if method in here else None) for method in methods]
            solver = [str(here["auto"]["solver"]) if "auto" in here else "–"] if "auto" in methods else []
            view.add_row(size, *times, *solver)
        view.add_section()
    return view


# --- files -------------------------------------------------------------------------------------------------------

#: columns that the chart needs, and how to read them
_COLUMNS: dict[str, Callable[[str], str | int | float]] = {
    "sweep": str,
    "batch": int,
    "channels": int,
    "positions": int,
    "method": str,
    "solver": str,
    "forward_ms": float,
    "forward_backward_ms": float,
    "device_name": str,
}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that the benchmark has written: what table and chart need of them, and the device's name.

    Raises:
        ValueError: if there is no such file, or it is not one of this benchmark.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} ({error}): name a file of 'bench growth' with --out") from error
    missing = [name for name in _COLUMNS if not rows or rows[0].get(name) is None]
    if missing:
        raise ValueError(
            f"{path} has no rows of 'bench growth': expected the columns {', '.join(_COLUMNS)}, without "
            f"{', '.join(missing)}: name another file with --out"
        )
    try:
        return [{name: read(row[name]) for name, read in _COLUMNS.items()} for row in rows]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has a row that cannot be read ({error}): measure it again without --redraw") from error


def _show(rows: list[Row], device_name: str, picture: Path, console: Console) -> list[Path]:
    """The chart, beside the CSV file; the files that were drawn."""
    if find_spec("matplotlib"):
        from benchmarks.chart import draw_growth

        draw_growth(rows, device_name, picture)
        console.print(f"drawn to {picture}", soft_wrap=True, markup=False)
        return [picture]
    console.print("no chart without matplotlib: pip install 'eigengrain[explain]'", markup=False)
    return []


def _redraw(config: GrowthBench, console: Console) -> None:
    """The chart anew; no device is asked for, as the file may be of one that is not here."""
    named = config.device.partition(":")[0]
    kind = pick_device("auto").type if named == "auto" else named
    path = Path(config.out or f"benchmarks/growth-{kind}.csv")
    rows = read_rows(path)
    console.print(table(rows))
    files = _show(rows, str(rows[0]["device_name"]), writable(path.with_suffix(".png")), console)
    output.result({"rows": rows, "files": files}, files)


def run(config: GrowthBench) -> None:
    """``eigengrain bench growth``."""
    methods_of(config)  # refuses what there is not before a file is made
    console = output.reading()
    if config.redraw:
        _redraw(config, console)
        return
    device = pick_device(config.device)
    path = Path(config.out or f"benchmarks/growth-{device.type}.csv")
    picture = writable(path.with_suffix(".png"))
    path = writable(path)
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=sum(map(len, config.sweeps.values())))
        rows = measure(config, device, lambda size: progress.update(task, advance=1, description=f"after {size}"))
    if not rows:
        raise ValueError("the smallest size needs more memory than the device has: use smaller sizes")
    environment = describe(device)
    write_csv(path, [{**row, **environment} for row in rows])
    console.print(table(rows))
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), style="dim")
    console.print(f"written to {path}", soft_wrap=True, markup=False)
    files = [path, *_show(rows, str(environment["device_name"]), picture, console)]
    output.result({"rows": rows, "environment": environment, "files": files}, files)
