"""Table 8: time and memory of a training step, with the benchmark of ``eigengrain bench step``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.config import StepBench

from benchmarks import step
from eigengrain.environment import describe, pick_device
from eigengrain.pages import Cell, TableData
from studies.accuracy import NOT_RUN
from studies.jobs import open_record, write_record
from studies.settings import SMOKE_CHANNELS, SMOKE_IMAGES
from studies.study import Findings, Row, Setup, where_run

#: of a step that was tried and could not be measured
NO_NUMBER = "–"
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
    return {file.stem: open_record(file, {"rows": list, "environment": dict}) for file in files}


def findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """A table for each kind of device that was measured; there are no rows to train."""
    measured = list(_records(setup).values())
    for record in measured:
        setup.note_machine(record)
    records = measured or [{"rows": [], "environment": {}}]
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
            missing = NOT_RUN if row is None else NO_NUMBER
            said = [
                missing if ours[key] is None else format(ours[key], form)
                for key, form in (("seconds", ".4f"), ("head_seconds", ".4f"), ("mebibytes", ".0f"))
            ]
            line = [method, f"{seconds:.2f}", *said[:2], str(mebibytes), said[2]]
            lines.append([Cell(text) for text in line])
            csv.append(
                {
                    "method": method,
                    "scale": setup.options.scale,
                    "backbone": row["backbone"] if row else "",
                    "batch": row["batch"] if row else "",
                    "img_size": row["img_size"] if row else "",
                    "paper_seconds": seconds,
                    "paper_mib": mebibytes,
                    **{f"ours_{key}": missing if value is None else value for key, value in ours.items()},
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
    if any(value == NO_NUMBER for row in csv for value in row.values()):
        notes.append(f"{NO_NUMBER}: the memory of the device was too small, or cannot be counted there.")
    return Findings(csv, tables, notes, _picture(csv))


def _picture(csv: list[dict[str, Any]]) -> Callable[[Path], None] | None:
    """Times over that of the first method, where that is known."""
    first = {row["device_name"]: row["ours_seconds"] for row in csv if row["method"] == csv[0]["method"]}
    units = {name: seconds for name, seconds in first.items() if isinstance(seconds, float)}
    if not units:
        return None

    def draw(path: Path) -> None:
        from studies.study_plot import Dots, draw_dots

        panels: dict[str, list[Dots]] = {}
        for row in csv:
            if (name := row["device_name"]) in units:
                known = isinstance(row["ours_seconds"], float)
                ours = {"ours": [row["ours_seconds"] / units[name]]} if known else {}
                panel = panels.setdefault(name, [])
                panel.append(Dots(row["method"], row["paper_seconds"] / csv[0]["paper_seconds"], ours))
        draw_dots(panels, f"time of a training step, {csv[0]['method']} = 1", path)

    return draw
