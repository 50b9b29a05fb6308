"""What is installed and what the package makes of it."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from benchmarks.config import Doctor
from rich.markup import escape
from rich.table import Table

from eigengrain import __version__, output
from eigengrain.cli.doctor_caches import caches, is_writable
from eigengrain.cli.doctor_data import DataFolder, look
from eigengrain.data.plumage import cache_folder
from eigengrain.environment import cpu_name, device_name
from eigengrain.functional import autotune
from eigengrain.functional._cuda import cusolver
from eigengrain.functional.eigen import _choose
from eigengrain.text import counted

#: extras that developers of the package need, and its users do not
_DEVELOPMENT = ("dev", "docs")
#: packages without which nothing works
REQUIRED = ("torch", "timm", "torchvision")
#: the variable that names the folder with the data sets
DATA = "EIGENGRAIN_DATA"


def installed(package: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def extras(requirements: list[str]) -> dict[str, list[str]]:
    """Optional packages by extra, from the requirements in the package's metadata.

    Example:
        >>> extras(["rich>=13", "captum>=0.7; extra == 'explain'", "ruff; extra == 'dev'"])
        {'explain': ['captum']}
    """
    found: dict[str, list[str]] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if match and match[2] not in _DEVELOPMENT:
            found.setdefault(match[2], []).append(match[1])
    return found


def import_trouble(module: str) -> str:
    """Empty if the module can be imported, else the last line of its error; tried in a process of its own.

    Example:
        >>> import_trouble("no_such_module")
        "ModuleNotFoundError: No module named 'no_such_module'"
    """
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def package_rows() -> list[tuple[str, str]]:
    """(package, version or remedy), required ones first."""
    rows = [("eigengrain", __version__), ("python", platform.python_version())]
    for package in REQUIRED:
        rows.append((package, installed(package) or f"missing: pip install {package}"))
    # a version does not say that the binary fits this torch; tried as the package itself imports it
    trouble = installed("torchvision") and import_trouble("eigengrain._torchvision")
    if trouble:
        rows.append(("", f"import torchvision fails: {trouble}"))
    try:
        optional = extras(requires("eigengrain") or [])
    except PackageNotFoundError:
        return [*rows, ("extras", "unknown: eigengrain is not installed as a package, pip install -e .")]
    for extra, packages in optional.items():
        for package in packages:
            if package not in dict(rows):  # several extras may share one
                rows.append((package, installed(package) or f"missing: pip install 'eigengrain[{extra}]'"))
    return rows


def backend_on(device: torch.device) -> str:
    """The eigensolver that ``backend="auto"`` gives a batch on this device.

    Example:
        >>> backend_on(torch.device("cpu"))
        'torch'
    """
    if device.type == "mps":
        return f"{backend_on(torch.device('cpu'))}, on the CPU (MPS has no float64)"
    chosen = _choose("auto", torch.empty(2, 1, 1, dtype=torch.float64, device=device))
    if device.type == "cuda" and chosen == "torch":
        return f"torch, one matrix at a time ({cusolver.why_not(device)})"
    return chosen


def device_rows() -> list[tuple[str, str, str]]:
    """(device, what it is, eigensolver)."""
    cpu = torch.device("cpu")
    threads = torch.get_num_threads()
    rows = [("cpu", f"{cpu_name()}, {counted(threads, 'thread')}", backend_on(cpu))]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        rows.append((str(device), f"{device_name(device)}, {memory:.0f} GiB", backend_on(device)))
    if torch.cuda.device_count() == 0:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        rows.append(("cuda", f"none ({build})", "–"))
    if torch.backends.mps.is_available():
        rows.append(("mps", "Metal", backend_on(torch.device("mps"))))
    return rows


def solver_rows() -> list[tuple[str, str, str]]:
    """(kind of input, milliseconds by solver, the solver that is taken) for what was measured on this machine so far."""
    rows = []
    for kind, times in sorted(autotune.measurements().items()):
        taken = min(times, key=lambda solver: times[solver], default="–")
        rows.append((kind, ", ".join(f"{solver} {ms:.3g}" for solver, ms in times.items()), taken))
    return rows


@dataclass(frozen=True)
class Extra:
    """An optional part of the package that is not there: its name, the packages that it lacks, and how to get it."""

    name: str
    missing: tuple[str, ...]
    install: str


def missing_extras() -> list[Extra]:
    """Extras that lack a package."""
    try:
        optional = extras(requires("eigengrain") or [])
    except PackageNotFoundError:
        return []
    lacking = {extra: tuple(p for p in packages if installed(p) is None) for extra, packages in optional.items()}
    return [Extra(extra, packages, f"pip install 'eigengrain[{extra}]'") for extra, packages in lacking.items() if packages]


def thread_facts() -> dict[str, int | str | None]:
    """How many threads torch uses, of how many cores, and what the environment says of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cores": cores,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def problems_of(packages: Sequence[tuple[str, str]], folder: Path) -> list[str]:
    """What keeps the package from working: a required package that is missing or broken, a cache that cannot be written."""
    required = [f"{name or 'torchvision'}: {said}" for name, said in packages if name in REQUIRED or not name]
    found = [line for line in required if "missing:" in line or "fails:" in line]
    if not is_writable(folder):
        found.append(f"the cache folder {folder} cannot be written to: set EIGENGRAIN_CACHE to another")
    return found


def run(config: Doctor) -> int:
    """``eigengrain doctor``: 0, or 1 if something keeps the package from working."""
    place = config.data or os.environ.get(DATA)
    data = look(place) if place else []
    packages, devices, threads, solvers = package_rows(), device_rows(), thread_facts(), solver_rows()
    lacking, kept, folder = missing_extras(), caches(), cache_folder()
    problems = problems_of(packages, folder)
    console = output.reading()
    view = Table("package", "version", title="packages", title_justify="left")
    for row in packages:
        view.add_row(*map(escape, row), style="yellow" if "missing:" in row[1] or "fails:" in row[1] else None)
    console.print(view)
    for title, heads, lines in (
        ("extras that are not complete", ("extra", "missing", "get it with"), _extra_lines(lacking)),
        ("devices", ("device", "what it is", "eigensolver of backend='auto'"), devices),
        ("solver='auto' on CUDA", ("measured on", "ms", "taken"), solvers),
        (f"data sets in {place}", ("data set", "state", "what to do"), list(map(_data_line, data))),
        ("kept on disk", ("what", "how much", "where"), [(each.what, str(each), each.path) for each in kept]),
    ):
        if lines:
            console.print(_table(title, heads, lines))
    environment = f"OMP_NUM_THREADS is {threads['OMP_NUM_THREADS'] or 'not set'}"
    said = [f"threads of torch: {threads['threads']}, cores: {threads['cores']}; {environment}"]
    file = autotune.cache_file()
    timed = f"timings of solvers are remembered in {file}"
    said.append(timed if solvers else f"no solver has been timed on CUDA yet; {file} will remember")
    if not place:
        said.append(f"data sets are looked for with --data FOLDER, or in the folder of the variable {DATA}")
    said += [f"problem: {line}" for line in problems] or ["no problems"]
    for line in said:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    output.result(
        {
            "packages": [{"name": name or "torchvision", "version": said} for name, said in packages],
            "missing_extras": lacking,
            "devices": [dict(zip(("device", "what", "eigensolver"), row, strict=True)) for row in devices],
            "threads": threads,
            "solvers": autotune.measurements(),
            "data": {"folder": place, "sets": data},
            "caches": kept,
            "cache_folder": {"path": folder, "writable": is_writable(folder)},
            "problems": problems,
        },
        problems,
    )
    return 1 if problems else 0


def _extra_lines(lacking: Sequence[Extra]) -> list[tuple[str, str, str]]:
    return [(extra.name, ", ".join(extra.missing), extra.install) for extra in lacking]


def _data_line(seen: DataFolder) -> tuple[str, str, str]:
    lacks = f"{', '.join(seen.missing)} missing in {seen.folder}; " if seen.missing else ""
    state = f"found in {seen.folder}" if seen.state == "found" else seen.state
    return seen.name, state, f"{lacks}{seen.remedy}" or "–"


def _table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    view = Table(*heads, title=title, title_justify="left")
    for column in view.columns:
        column.overflow = "fold"  # a path is of no use cut short
    for line in lines:
        view.add_row(*map(escape, line))
    return view
