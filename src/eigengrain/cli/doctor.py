"""``eigengrain doctor``: what is installed, and what keeps the package from working."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigengrain import output
from eigengrain.errors import FileError
from eigengrain.text import counted

if TYPE_CHECKING:
    from eigengrain.data.datasets.registry import Entry

#: packages without which nothing works
REQUIRED = ("torch", "timm", "torchvision")


@dataclass(frozen=True)
class Doctor:
    """Where to look for data sets.

    Args:
        data: folder with the data sets, each in its own folder, or folder of one data set; by default that of the
            environment variable EIGENGRAIN_DATA.
    """

    data: str | None = None


def run(config: Doctor) -> int:
    """Print a report; the exit code is 1 if something keeps the package from working."""
    from torch.utils.collect_env import get_env_info

    from eigengrain.data.plumage import cache_folder

    place = config.data or os.environ.get("EIGENGRAIN_DATA")
    sets, problems = find_data(place) if place else [], find_problems(cache_folder())
    tables: dict[str, list[dict[str, Any]]] = {
        "packages": [{"name": name, "version": installed(name)} for name in ("eigengrain", *REQUIRED)],
        "missing_extras": missing_extras(),
        "devices": devices(),
        "caches": caches(cache_folder()),
    }
    for title, rows in {**tables, f"data sets in {place}": sets}.items():
        if rows:
            cells = [map(_cell, row.values()) for row in rows]
            output.console().print(output.table(title.replace("_", " "), rows[0], cells, left=len(rows[0])))
    output.say(*([] if place else ["give the folder of your data sets with --data or EIGENGRAIN_DATA to look for them"]))
    output.say(*([f"problem: {problem}" for problem in problems] or ["no problems"]))
    environment = {name: value for name, value in get_env_info()._asdict().items() if name != "pip_packages"}
    more = {"data": {"folder": place, "sets": sets}, "cache_folder": cache_folder(), "environment": environment}
    output.result({**tables, **more, "problems": problems}, problems)
    return 1 if problems else 0


def _cell(value: Any) -> object:
    return "" if value is None else ", ".join(value) if isinstance(value, list) else value


def find_problems(cache: Path) -> list[str]:
    """Missing or broken packages, such as a torchvision that was built for another torch, and a cache that is read-only."""
    missing = [name for name in REQUIRED if installed(name) is None]
    problems = [f"{name} is missing: pip install {name}" for name in missing]
    if not missing and (error := import_error("torchvision, timm")):
        pair = " and ".join(f"{name} {installed(name)}" for name in ("torch", "torchvision"))
        own = import_error("eigengrain._torchvision")  # which repairs one error that other programs do not repair
        scope = "eigengrain fails too" if own else "eigengrain works, but other programs that import timm do not"
        remedy = "install both together, from the same index: pip install --force-reinstall torch torchvision"
        if import_error("torchvision"):
            problems.append(f"{pair} do not belong together ({error}); {scope}: {remedy}")
        else:
            problems.append(f"importing timm {installed('timm')} fails ({error}): pip install --force-reinstall timm")
    parent = next(each for each in (cache, *cache.parents) if os.path.exists(each))
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)):
        problems.append(f"cannot write to the cache folder {cache}: set EIGENGRAIN_CACHE to another one")
    return problems


def installed(package: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing_extras() -> list[dict[str, Any]]:
    """Extras of this package that lack packages."""
    missing: dict[str, list[str]] = {}
    for requirement in requires("eigengrain") or []:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if match and match[2] not in ("dev", "docs") and installed(match[1]) is None:
            missing.setdefault(match[2], []).append(match[1])
    return [{"name": e, "missing": p, "install": f"pip install 'eigengrain[{e}]'"} for e, p in missing.items()]


def import_error(modules: str) -> str:
    """The last line of the error when modules are imported in another process; empty if there is none."""
    done = subprocess.run([sys.executable, "-c", f"import {modules}"], capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def devices() -> list[dict[str, str]]:
    """The devices, with the eigensolver and the working precision of the square root that each uses by default."""
    import torch

    from eigengrain.environment import cpu_name
    from eigengrain.functional import choose_dtype
    from eigengrain.functional._cuda import cusolver

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = counted(torch.get_num_threads(), "thread")
    rows = [("cpu", f"{cpu_name()}, {threads} on {counted(cores, 'core')}", "torch")]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        reason = cusolver.why_not(torch.device("cuda", index))
        solver = f"torch, one matrix at a time ({reason})" if reason else "cusolver"
        rows.append((f"cuda:{index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB", solver))
    if torch.backends.mps.is_available():
        rows.append(("mps", "Metal", "torch, or on the CPU where torch has none for MPS"))
    named = [dict(zip(("device", "what", "eigensolver"), row, strict=True)) for row in rows]
    return [row | {"dtype": str(choose_dtype(row["device"])).removeprefix("torch.")} for row in named]


def caches(folder: Path) -> list[dict[str, Any]]:
    """Files that this package, timm and torchvision keep on disk."""
    import torch

    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    weights = Path(torch.hub.get_dir(), "checkpoints")
    places = {
        "drawn birds": folder / "plumage",
        "weights of timm": Path(hub).expanduser(),
        "weights of torchvision": weights,
    }
    rows = []
    for what, path in places.items():
        files = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
        sizes = [os.path.getsize(file) for file in files if os.path.isfile(file) and not os.path.islink(file)]
        rows.append({"what": what, "path": str(path), "files": len(sizes), "bytes": sum(sizes)})
    return rows


def find_data(root: str | Path) -> list[dict[str, Any]]:
    """Look for the files of every data set in a folder and in the usual subfolders; no file is opened."""
    from eigengrain.data.datasets.registry import list_entries

    place = Path(root).expanduser()
    if not place.is_dir():
        raise FileError(root, "there is no such folder")
    return [row for entry in list_entries() if entry.required and (row := _find_entry(entry, place)) is not None]


def _find_entry(entry: "Entry", root: Path) -> dict[str, Any] | None:
    places = [root, *(root / name for name in entry.folders if (root / name).is_dir())]
    # a required name "a|b" is a choice, and * matches any name
    states = [
        (place, form, [names.split("|")[0] for names in form if not any(any(place.glob(n)) for n in names.split("|"))])
        for place in places
        for form in entry.required
    ]
    place, form, missing = min(states, key=lambda state: len(state[2]) / len(state[1]))
    row = {"name": entry.name, "state": "found", "folder": str(place), "missing": missing, "remedy": ""}
    if not missing:
        return row | {"remedy": "".join(extra["install"] for extra in missing_extras() if extra["name"] == entry.extra)}
    if not entry.folders:
        return None  # a folder of a user's own images is only reported if it is complete
    if len(missing) < len(form) or place != root:
        return row | {"state": "incomplete", "remedy": f"see 'eigengrain datasets list {entry.name}'"}
    return row | {
        "state": "not found",
        "folder": None,
        "missing": [],
        "remedy": f"{entry.page} → {root / entry.folders[0]}",
    }
