"""Eigensolvers beside torch's own, and what the solvers of the square root err by."""

import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from benchmarks import accuracy
from benchmarks.config import SolversBench, full_rank_positions
from benchmarks.functional import Row, in_turn, short, synchronise
from eigengrain import functional as F
from eigengrain import output
from eigengrain.environment import describe, pick_device
from eigengrain.files import writable, write_csv
from eigengrain.functional._cuda import cusolver
from eigengrain.functional.eigen import _choose, decompose
from eigengrain.progress import progress_bar

Eigensolver = Callable[[Tensor], tuple[Tensor, Tensor]]  # (B, d, d) -> eigenvalues (B, d), eigenvectors in the columns

#: what times are divided by in the column of ratios
REFERENCE = "torch.linalg.eigh"

#: of the feature maps whose covariances are decomposed, unless their channels reach it
POSITIONS = 784


def backends_on(device: torch.device) -> list[str]:
    """The backends of :func:`eigengrain.functional.eigh` that a device has, each under one name.

    Example:
        >>> backends_on(torch.device("cpu"))
        ['torch']
    """
    here = {
        "cusolver-batched": device.type == "cuda" and cusolver.available(),
        "cpu": device.type != "cpu",  # where the CPU is the device, this is 'torch'
    }
    return [name for name in F.BACKENDS if name != "auto" and here.get(name, True)]


def _backend(name: str) -> Eigensolver:
    # below the public function, which decomposes in float64 whatever it is given
    return lambda p: decompose(p, name)


def eigensolvers_on(device: torch.device) -> dict[str, Eigensolver]:
    """By name, the reference first."""
    return {REFERENCE: torch.linalg.eigh} | {name: _backend(name) for name in backends_on(device)}


def random_covariances(batch: int, d: int, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """(batch, d, d) of full rank, from random features that are rectified as behind a ReLU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, d, full_rank_positions(d, POSITIONS), generator=generator).relu().to(device)
    return F.covariance(x, dtype=torch.float64).to(dtype)


def random_symmetric(batch: int, d: int, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """(batch, d, d) with independent entries, whose eigenvalues spread evenly around 0, as no covariance's do."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(batch, d, d, generator=generator, dtype=torch.float64).to(device)
    return (a + a.mT).div_(2).to(dtype)


#: an iterative eigensolver takes longer where eigenvalues are far apart, so both are timed
MATRICES = {"covariance": random_covariances, "symmetric": random_symmetric}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until everything is done."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def residual(p: Tensor, solver: Eigensolver) -> float:
    r"""The largest :math:`\|P - U \Lambda U^T\|_F/\|P\|_F` of a batch, taken in float64.

    Example:
        >>> residual(torch.ones(1, 1, 1), lambda p: (torch.ones(1, 1), 2 * p))
        3.0
    """
    values, vectors = (part.double() for part in solver(p))
    return accuracy.worst_error((vectors * values.unsqueeze(-2)) @ vectors.mT, p.double())


def measure(
    batch: int,
    d: int,
    *,
    repeats: int,
    warmup: int,
    device: torch.device,
    dtype: torch.dtype,
    kind: str = "covariance",
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Time every eigensolver on one batch of matrices, in turn.

    Args:
        batch, d: of the matrices (batch, d, d).
        dtype: of the matrices, and of the work.
        kind: of :data:`MATRICES`.
        advance: called with the eigensolver's name after each run.

    Returns:
        a row an eigensolver: milliseconds, the ratio to the reference, what is left of P; None without enough memory.
    """
    p = MATRICES[kind](batch, d, device, dtype, seed)
    solvers = eigensolvers_on(device)
    works = {name: (lambda solver=solver: _timed(lambda: solver(p), device)) for name, solver in solvers.items()}
    seconds = in_turn(works, repeats=repeats, warmup=warmup, advance=advance)
    times = {name: 1e3 * median(runs) for name, runs in seconds.items() if runs}
    rows: list[Row] = []
    for name, solver in solvers.items():
        both = name in times and REFERENCE in times
        rows.append(
            {
                "batch": batch,
                "channels": d,
                "matrices": kind,
                "dtype": str(dtype).removeprefix("torch."),
                "eigensolver": name,
                "of_auto": "yes" if name == _choose("auto", p) else "no",
                "ms": round(times[name], 4) if name in times else None,
                f"ratio_to_{REFERENCE}": round(times[name] / times[REFERENCE], 4) if both else None,
                "residual": float(f"{residual(p, solver):.3g}") if name in times else None,
                "repeats": repeats,
            }
        )
    return rows


def table(rows: list[Row]) -> Table:
    """The rows for reading."""
    view = Table(
        title="eigenvalues and eigenvectors of random matrices",
        caption=f"medians; ratio: to {REFERENCE}; residual: what the factors leave of P, relative; *: what backend='auto' "
        "takes (the public function decomposes float32 matrices in float64 too); –: the device's memory is too small",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("B × d²", "matrices", "dtype", "eigensolver"):
        view.add_column(heading, no_wrap=True)
    for heading in ("ms", "ratio", "residual"):
        view.add_column(heading, no_wrap=True, justify="right")
    columns = ("batch", "channels", "matrices", "dtype")
    for case in dict.fromkeys(tuple(row[name] for name in columns) for row in rows):
        here = [row for row in rows if tuple(row[name] for name in columns) == case]
        for place, row in enumerate(here):
            said = ("", "", "") if place else (f"{case[0]} × {case[1]}²", str(case[2]), str(case[3]))
            name = f"{row['eigensolver']} *" if row["of_auto"] == "yes" else str(row["eigensolver"])
            left = "–" if row["residual"] is None else f"{float(row['residual']):.1e}"
            view.add_row(*said, name, short(row["ms"]), short(row[f"ratio_to_{REFERENCE}"]), left)
        view.add_section()
    return view


def run(config: SolversBench) -> None:
    """``eigengrain bench solvers``."""
    device = pick_device(config.device)
    if device.type == "mps":
        raise ValueError("bench solvers compares float64 with float32, and MPS has no float64: use --device cpu")
    config = config.filled(device.type)
    assert config.warmup is not None
    assert config.at_channels is not None
    folder = Path(config.out)
    times_path, errors_path = (writable(folder / f"{kind}-{config.label}.csv") for kind in ("eigensolvers", "accuracy"))
    console, environment = output.reading(), describe(device)
    times: list[Row] = []
    errors: list[Row] = []
    with progress_bar() as progress:
        runs = len(MATRICES) * len(config.matrices) * len(eigensolvers_on(device)) * (config.warmup + config.repeats)
        runs += sum(len(accuracy.routes_for(config.at_channels, positions)) for _, positions in config.cases)
        task = progress.add_task("measuring", total=runs)
        for (batch, d, dtype), kind in product(config.matrices, MATRICES):
            times += measure(
                batch,
                d,
                kind=kind,
                repeats=config.repeats,
                warmup=config.warmup,
                device=device,
                dtype=getattr(torch, dtype),
                seed=config.seed,
                advance=lambda name, size=f"{batch} × {d}²": progress.update(  # type: ignore[misc]
                    task, advance=1, description=f"{size} {name}"
                ),
            )
        write_csv(times_path, [{**row, **environment} for row in times])
        for kappa, positions in config.cases:
            errors += accuracy.measure(
                kappa,
                config.at_channels,
                positions,
                samples=config.samples,
                svd_batch=config.svd_batch,
                device=device,
                seed=config.seed,
                advance=lambda name, kappa=kappa: progress.update(  # type: ignore[misc]
                    task, advance=1, description=f"κ = {kappa:.0e} {name}"
                ),
            )
        write_csv(errors_path, [{**row, **environment} for row in errors])
    console.print(table(times), accuracy.table(errors))
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), style="dim")
    console.print(f"written to {times_path} and {errors_path}", soft_wrap=True, markup=False)
    files = [times_path, errors_path]
    output.result({"eigensolvers": times, "accuracy": errors, "environment": environment, "files": files}, files)
