"""Table 8: time and memory of a training step, with the benchmark of ``eigengrain bench step``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eigengrain.bench import step
from eigengrain.bench.config import StepBench
from eigengrain.runtime.environment import describe, pick_device
from eigengrain.runtime.page import Cell, TableData
from eigengrain.studies.accuracy import NOT_RUN
from eigengrain.studies.jobs import write_record
from eigengrain.studies.settings import SMOKE_CHANNELS, SMOKE_IMAGES
from eigengrain.studies.study import Findings, Row, Setup, where_run

METHODS = {"isqrt": "iSQRT-COV", "mpncov": "MPN-COV", "mpncov+seb": "MPN-COV + SEB"}


def bench(setup: Setup) -> StepBench:
    """What is measured: the setting of Table 8, or a smaller one."""
    heads = ["gap", *METHODS]
    device = setup.options.device
    if setup.options.scale == "smoke":
        side = int(SMOKE_IMAGES["size"])
        sizes: dict[str, Any] = {"batch": 2, "img_size": side, "reduce": SMOKE_CHANNELS, "repeats": 1, "warmup": 0}
        return StepBench(backbones=["plumage_net"], heads=heads, num_classes=3, device=device, **sizes)
    return StepBench(backbones=["resnet50"], heads=heads, num_classes=196, device=device).filled(pick_device(device).type)


def _name(setup: Setup) -> str:
    return f"speed-{setup.options.scale}-{pick_device(setup.options.device).type}"


def measure(setup: Setup) -> None:
    """Take the steps, unless there is a record of this kind of device."""
    if _records(setup).get(_name(setup)) is not None:
        return
    config, device = bench(setup), pick_device(setup.options.device)
    rows = step.measure(config, (config.backbones or [""])[0], device)
    record = {"name": _name(setup), "bench": asdict(config), "rows": rows, "environment": describe(device)}
    write_record(record, setup.out)


def _records(setup: Setup) -> dict[str, dict[str, Any]]:
    files = [file for place in reversed(setup.places) for file in sorted(place.glob(f"speed-{setup.options.scale}-*.json"))]
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """A table for each kind of device that was measured; there are no rows to train."""
    records = list(_records(setup).values()) or [{"rows": [], "environment": {}}]
    csv: list[dict[str, object]] = []
    tables = []
    for record in records:
        found = {row["head"]: row for row in record["rows"]}
        lines = []
        for head, method in METHODS.items():
            seconds, mebibytes = step.PAPER[head]
            row = found.get(head)
            ours = {
                "seconds": row["step_seconds"] if row else None,
                "head_seconds": row["head_seconds"] if row else None,
                "mebibytes": (row["held_mib"] or row["peak_mib"]) if row else None,
            }
            line = [method, f"{seconds:.2f}", _said(ours["seconds"], ".4f"), _said(ours["head_seconds"], ".4f")]
            lines.append([Cell(text) for text in (*line, str(mebibytes), _said(ours["mebibytes"], ".0f"))])
            csv.append(
                {
                    "method": method,
                    "scale": setup.options.scale,
                    "backbone": row["backbone"] if row else "",
                    "batch": row["batch"] if row else "",
                    "img_size": row["img_size"] if row else "",
                    "paper_seconds": seconds,
                    "paper_mib": mebibytes,
                    **{f"ours_{key}": NOT_RUN if value is None else value for key, value in ours.items()},
                    **where_run(record),
                }
            )
        where = record["environment"].get("device_name", NOT_RUN)
        first = next(iter(found.values()), None)
        what = f"{first['backbone']}, {first['batch']} images of {first['img_size']} pixels, " if first else ""
        heads = ["", "paper, s", "ours, s", "of it the head, s", "paper, MiB", "ours, MiB"]
        tables.append(TableData(f"a training step: {what}{where}", heads, lines))
    notes = [
        f"Paper: {step.PAPER_SETTING}. Times of different devices are no comparison; their ratios between methods are."
    ]
    return Findings(csv, tables, notes, _picture(csv))


def _said(value: float | None, form: str) -> str:
    return NOT_RUN if value is None else format(value, form)


def _picture(csv: list[dict[str, Any]]) -> Callable[[Path], None] | None:
    if not any(isinstance(row["ours_seconds"], float) for row in csv):
        return None

    def draw(path: Path) -> None:
        from eigengrain.studies.study_plot import Dots, draw_dots

        panels: dict[str, list[Dots]] = {}
        for name in dict.fromkeys(row["device_name"] for row in csv):
            mine = [row for row in csv if row["device_name"] == name]
            first = mine[0]
            panels[name] = [
                Dots(
                    row["method"],
                    row["paper_seconds"] / first["paper_seconds"],
                    {"ours": [row["ours_seconds"] / first["ours_seconds"]]},
                )
                for row in mine
            ]
        draw_dots(panels, "time of a training step, iSQRT-COV = 1", path)

    return draw
