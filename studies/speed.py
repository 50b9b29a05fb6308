"""Table 8: time and memory of a training step, measured by ``python -m benchmarks step``."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from eigengrain.environment import pick_device
from eigengrain.errors import FailedError
from studies import charts
from studies.runs import Record, load_record, write_record
from studies.settings import PAPER, SETTINGS
from studies.study import NOT_RUN, Report, Row, Setup, Table, environment_columns

#: a step that could not be measured
NO_NUMBER = "–"
METHODS = {"isqrt": "iSQRT-COV", "mpncov": "MPN-COV", "mpncov+seb": "MPN-COV + SEB"}


def time_steps(**options: object) -> Record:
    """Run the benchmark of training steps in a process of its own, and return its rows and environment."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", "step", *words, "--out", f"{folder}/step.csv", "--json"]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        raise FailedError(f"the benchmark of training steps failed: {done.stderr.strip()}")
    result: Record = json.loads(done.stdout)
    return {key: result[key] for key in ("rows", "environment")}


def measure(setup: Setup) -> None:
    """Measure the steps, unless there is a record of this type of device."""
    name = f"speed-{setup.options.scale}-{pick_device(setup.options.device).type}"
    if name in _records(setup):
        return
    options: dict[str, object] = {"backbones": "[resnet50]", "num_classes": 196}
    if setup.options.scale == "smoke":
        size, channels = SETTINGS["smoke"]["data"]["options"]["size"], setup.channels
        sizes = {"batch": 2, "img_size": size, "reduce": channels, "repeats": 1, "warmup": 0}
        options = {"backbones": "[plumage_net]", "num_classes": 3, **sizes}
    options |= {"heads": f"[{','.join(['gap', *METHODS])}]", "device": setup.options.device}
    write_record({"name": name, "bench": options, **time_steps(**options)}, setup.out)


def _records(setup: Setup) -> dict[str, Record]:
    pattern = f"speed-{setup.options.scale}-*.json"
    files = [file for folder in reversed(setup.folders) for file in sorted(folder.glob(pattern))]
    return {file.stem: load_record(file, (("rows", list), ("environment", dict))) for file in files}


def speed_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """A table for each type of device with a record; no rows are trained."""
    csv: list[dict[str, Any]] = []
    tables = []
    records = list(_records(setup).values()) or [{"rows": [], "environment": {}}]
    for record in records:
        if record["rows"]:
            setup.note_machine(record)
        steps = {row["head"]: row for row in record["rows"]}
        lines = []
        for head, method in METHODS.items():
            seconds, mebibytes = PAPER["table_8"][head]
            step = steps.get(head, {})
            ours = {"seconds": step.get("step_seconds"), "head_seconds": step.get("head_seconds")}
            ours["mebibytes"] = step.get("held_mib") or step.get("peak_mib")
            missing = NO_NUMBER if step else NOT_RUN
            forms = dict(zip(ours, (".4f", ".4f", ".0f"), strict=True))
            texts = {key: missing if value is None else format(value, forms[key]) for key, value in ours.items()}
            line = {"": method, "paper, s": f"{seconds:.2f}", "ours, s": texts["seconds"]}
            line |= {"of it the head, s": texts["head_seconds"], "paper, MiB": str(mebibytes)}
            lines.append(line | {"ours, MiB": texts["mebibytes"]})
            columns = {"method": method, "scale": setup.options.scale}
            columns |= {key: step.get(key, "") for key in ("backbone", "batch", "img_size")}
            columns |= {"paper_seconds": seconds, "paper_mib": mebibytes}
            columns |= {f"ours_{key}": missing if value is None else value for key, value in ours.items()}
            csv.append(columns | environment_columns(record))
        name = record["environment"].get("device_name", NOT_RUN)
        first = next(iter(steps.values()), None)
        size = f"{first['backbone']}, {first['batch']} images of {first['img_size']} pixels, " if first else ""
        tables.append(Table(name, f"a training step: {size}{name}", pd.DataFrame(lines), ("paper, s", "paper, MiB")))
    panels: dict[str, list[charts.Dots]] = {}
    units = {row["device_name"]: row["ours_seconds"] for row in csv if row["method"] == csv[0]["method"]}
    for row in csv:  # relative to the first method, where that has a time
        unit, value = units[row["device_name"]], row["ours_seconds"]
        if isinstance(unit, float):
            dots = charts.Dots(row["method"], row["paper_seconds"] / csv[0]["paper_seconds"])
            dots.ours.update({"ours": [value / unit]} if isinstance(value, float) else {})
            panels.setdefault(row["device_name"], []).append(dots)
    draw = partial(charts.draw_dots, panels, f"time of a training step, {csv[0]['method']} = 1")
    return Report(csv, tables, [], draw if panels else None)
