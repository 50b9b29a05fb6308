"""What is installed and what the package makes of it."""

import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eigengrain import __version__
from eigengrain.bench.config import Doctor
from eigengrain.functional import autotune, cusolver
from eigengrain.functional.eigen import _choose
from eigengrain.runtime.environment import cpu_name, device_name

#: extras that developers of the package need, and its users do not
_DEVELOPMENT = ("dev", "docs")


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
    for package in ("torch", "timm", "torchvision"):
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
    rows = [("cpu", f"{cpu_name()}, {torch.get_num_threads()} threads", backend_on(cpu))]
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


def run(config: Doctor) -> None:
    """``eigengrain doctor``."""
    packages = Table("package", "version", title="packages", title_justify="left")
    for row in package_rows():
        packages.add_row(*map(escape, row), style="yellow" if "missing:" in row[1] or "fails:" in row[1] else None)
    devices = Table("device", "what it is", "eigensolver of backend='auto'", title="devices", title_justify="left")
    for line in device_rows():
        devices.add_row(*map(escape, line))
    console = Console()
    console.print(packages, devices)
    file = autotune.cache_file()
    if remembered := solver_rows():
        solvers = Table("measured on", "ms", "taken", title="solver='auto' on CUDA", title_justify="left")
        for entry in remembered:
            solvers.add_row(*map(escape, entry))
        console.print(solvers)
    said = f"remembered in {file}" if remembered else f"no solver has been timed on CUDA yet; {file} will remember"
    console.print(said, soft_wrap=True, highlight=False, markup=False)
