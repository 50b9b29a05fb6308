"""How networks learn: truncated eigenvalues (Figure 1), other normalisations (Figure 4), curves (Figures 5 and 10),
and the learning rate of the classifier."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from eigengrain.heads import list_heads
from eigengrain.text import counted
from studies import charts
from studies.accuracy import DIVERGED, LENGTHS, accuracy_report, gcp_methods, resnet_rows, row_columns
from studies.runs import Record, rate_jobs
from studies.settings import FINE_GRAINED, NETWORKS, PAPER, RESNET50, TEXTS, TITLES
from studies.spectra import similarity_table
from studies.study import NOT_RUN, Report, Row, Setup, Table, environment_columns

#: epochs and values
Curve = tuple[list[int], list[float]]

#: gradients with which truncation is tried: ours, and that of the released code
GRADIENTS = {"exact": "exact gradient", "topn": "released gradient"}
#: rate of MPN-COV that corresponds to ×3 with the branch, whose vectors are 3.9 times as long
MATCHING = (46.0,)
#: norm at which the released scripts clip gradients
RELEASED_CLIP = 5.0


def curve(record: Record, column: str) -> Curve:
    """A column of the epochs of a run, where it has a value."""
    rows = [row for row in record["epochs"] if column in row]
    return [int(row["epoch"]) for row in rows], [row[column] for row in rows]


def comparable_records(setup: Setup, rows: Sequence[Row], tested: bool = False) -> list[list[Record]]:
    """Records of each row, all under one protocol, fair if there are any; ``tested``: with a test after each epoch."""

    def first(row: Row, protocol: str) -> list[Record]:
        for _, _, records in setup.results(row, protocol):
            usable = [r for r in records if not tested or len(curve(r, "test_top1")[0]) == len(r["epochs"]) > 0]
            if usable:
                return usable
        return []

    fair = [first(row, "fair") for row in rows]
    return fair if any(fair) else [first(row, "paper") for row in rows]


def truncation_counts(channels: int) -> list[int]:
    """Numbers of truncated eigenvalues: up to 50 of 256.

    Example:
        >>> truncation_counts(256), truncation_counts(8)
        ([0, 10, 20, 30, 40, 50], [0, 1, 2])
    """
    return [0, 10, 20, 30, 40, 50] if channels >= 100 else list(range(channels // 5 + 2))


def truncation_rows(setup: Setup) -> list[Row]:
    """Figure 1: without the smallest eigenvalues in training and test, at the rate that is best with all of them."""
    d, counts = setup.channels, truncation_counts(setup.channels)
    rows = []
    for place, data in enumerate(FINE_GRAINED):
        for gradient, words in GRADIENTS.items():
            for count in counts:
                released = gradient == "topn"
                # without truncation it is the original gradient, repaired for equal eigenvalues: our 'pade'
                options = {"gradient": gradient if count else "pade"} if released else {}
                options |= {"subset": f"top:{d - count}"} if count else {}
                paper = RESNET50["MPN-COV"][place] if not count and not released else None
                row = Row(data, "resnet50", f"{count} truncated, {words}", "mpncov", options, paper, core=True)
                clip = RELEASED_CLIP if released else None
                rows.append(replace(row, rate_options={}, curve=count == counts[-1], clip_grad=clip))
    return rows


def truncation_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """Accuracy against the number of truncated eigenvalues, and the curves of the largest number."""
    counts = truncation_counts(setup.channels)
    panels: dict[str, dict[str, dict[str, list[Curve]]]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        own = [row for row in rows if row.data == data]
        records = dict(zip((row.method for row in own), comparable_records(setup, own), strict=True))
        lines: dict[str, list[Curve]] = {}
        curves: dict[str, dict[str, list[Curve]]] = {"test_top1": {}, "train_loss": {}}
        for words in GRADIENTS.values():
            by_count = {count: records[f"{count} truncated, {words}"] for count in counts}
            top1 = {count: [r["scores"]["test_top1"] for r in each if r["scores"]] for count, each in by_count.items()}
            means = {count: sum(each) / len(each) for count, each in top1.items() if each}
            if means:
                lines[words] = [(list(means), list(means.values()))]
            for record in by_count[counts[-1]][:1]:
                for column, panel in curves.items():
                    if (points := curve(record, column))[0]:
                        panel[words] = [points]
        if lines or curves["train_loss"]:
            last = [f"{counts[-1]} truncated: {name}" for name in ("test accuracy, %", "training loss")]
            titles = "test accuracy, %", *last
            panels[setup.title(data)] = dict(zip(titles, (lines, *curves.values()), strict=True))
    draw = partial(charts.draw_curves, panels, x="truncated eigenvalues") if panels else None
    return replace(accuracy_report(setup, rows), draw=draw)


def normalisation_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """The accuracies, and the normalised mean spectrum of a trained network."""
    spectra = {
        setup.title(row.data): analysis["mean_log10"]
        for row in rows
        if row.analyses and (analysis := setup.analysis(row, "spectrum")[1])
    }
    draw = partial(charts.draw_normalisations, spectra) if spectra else None
    return replace(accuracy_report(setup, rows), draw=draw)


def _draw_curves(setup: Setup, rows: Sequence[Row], columns: dict[str, str]) -> Any:
    panels: dict[str, dict[str, dict[str, list[Curve]]]] = {}
    for row, records in zip(rows, comparable_records(setup, rows, tested=True), strict=True):
        for column, title in columns.items() if records else ():
            panel = panels.setdefault(setup.title(row.data), {}).setdefault(f"{NETWORKS[row.backbone].title}, {title}", {})
            panel[row.method] = [curve(record, column) for record in records]
    return partial(charts.draw_curves, panels) if panels else None


def curve_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """Figure 5: test accuracy after each epoch."""
    return replace(accuracy_report(setup, rows), draw=_draw_curves(setup, rows, {"test_top1": "test accuracy, %"}))


def imagenet_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """Table 9, Figure 10 and Table 10, which follows Table 9 in the CSV file."""
    report = accuracy_report(setup, rows, digits=2)
    columns = {"train_loss": "training loss", "test_top1": "test accuracy, %"}
    draw = _draw_curves(setup, [row for row in rows if row.metric == "test_top1"], columns)
    csv, tables = list(report.rows), list(report.tables)
    for analysed in [row for row in rows if row.analyses][:1]:
        printed = {("vanilla", part): numbers for part, numbers in PAPER["table_10"].items()}
        measured, table = similarity_table(setup, analysed, printed)
        record, _ = setup.analysis(analysed, "similarity")
        protocol = "paper" if record is not None and record["config"]["select"] == "best-test" else "fair"
        tables.append(table)
        for row in (row for row in measured if row["collapse"] == "abs-max"):
            method = f"{row['method']}, {row['rule']}, {row['eigenvalues']}, {row['cut']} cut"
            values = {"data": row["data"], "method": method, "backbone": "ResNet-50", "head": "mpncov"}
            values |= {"metric": row["measure"], "scale": row["scale"], "paper": row["paper"]}
            values |= {f"{protocol}_protocol_mean": row["ours"]} | {name: row[name] for name in environment_columns(None)}
            csv.append(dict.fromkeys(csv[0], "") | values)
    return replace(report, rows=csv, tables=tables, draw=draw)


def rate_rows(setup: Setup) -> list[Row]:
    """The heads of Tables 3, 6 and 7 for ResNet-50, each once, with the runs of the search alone."""
    rows = [row for row in gcp_methods(setup) if row.backbone == "resnet50" and row.core]
    for kind, study in (("path", "paths"), ("factor", "factors")):
        rows += [replace(row, method=f"{kind} {row.method}") for row in resnet_rows(study, setup)]
    unique: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        more = MATCHING if row.head == "mpncov" else ()
        key = row.data, row.head, tuple(sorted(row.options.items()))
        unique.setdefault(key, replace(row, search_only=True, more_rates=more))
    return sorted(unique.values(), key=lambda row: list(TITLES).index(row.data))


def rate_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """One table per data set, one line per head and rate; data sets without a run are left out if another has one."""
    searches: list[tuple[Row, float | None, dict[float, Record | None]]] = []
    for row in rows:
        jobs, best = setup.search(row)
        runs = [*jobs, *rate_jobs(setup.config(row), row.more_rates, setup.suffix)]
        searches.append((row, best, {job.rate: setup.record(job) for job in runs}))
    used = [search for search in searches if any(search[2].values())] or searches
    csv: list[dict[str, Any]] = []
    tables: list[Table] = []
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for data in dict.fromkeys(row.data for row, _, _ in used):
        lines = []
        for row, best, records in (search for search in searches if search[0].data == data):
            for rate in sorted(records):
                texts = [f"{v:.1f}" if isinstance(v, float) else v for v in _accuracies(records[rate])]
                name = f"{row.method}, ×{rate:g}{' (chosen)' * (rate == best)}"
                lines.append(dict(zip(("", "validation", "test"), (name, *texts), strict=True)))
            for rate, record in records.items():
                values = dict(zip(("val_top1", "test_top1"), _accuracies(record), strict=True))
                chosen = "" if best is None else int(rate == best)
                columns = row_columns(setup, row) | {"scale": setup.options.scale, "rate": rate, **values, "chosen": chosen}
                csv.append(columns | environment_columns(record))
        caption = f"{setup.title(data)}, ResNet-50: accuracy in % after {counted(setup.config(row).epochs, 'epoch')}"
        tables.append(Table(setup.title(data), caption, pd.DataFrame(lines), ()))
        for split, images in (("val", "validation images"), ("test", "test images")):
            for row, _, records in searches:
                done = {rate: record["scores"] for rate, record in sorted(records.items()) if record and record["scores"]}
                if row.data == data and done:
                    scaled = [float(f"{rate * row.length**2:.2g}") for rate in done]
                    panel = panels.setdefault(f"{setup.title(data)}, {images}", {})
                    panel[row.method] = scaled, [scores[f"{split}_top1"] for scores in done.values()]
    lengths = any(row.length != 1 for row, _, records in searches if any(records.values()))
    return Report(csv, tables, [], partial(charts.draw_rates, panels, lengths) if panels else None)


def calibration_rows(setup: Setup) -> list[Row]:
    """Heads with their own vectors and with calibrated ones, with the runs of the search alone."""
    rows = []
    for data, entry in TEXTS["calibration"]["rows"].items():
        for head in entry.get("heads", list_heads(any_backbone=True)):
            row = Row(data, entry["backbone"], head, head, core=True, search_only=True, pretrain=entry.get("pretrain"))
            row = replace(row, every_seed="pretrain" in entry)
            own = tuple(entry["before"]) if "before" in entry else None
            before = replace(row, rates=own, length=LENGTHS.get(head, 1.0))
            rows += [before, replace(row, rates=tuple(entry["after"]), calibrate=True)]
    return rows


def calibration_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """One table per data set, one line per head: its best rate, and its accuracy there and at ×1, before and after."""
    csv: list[dict[str, Any]] = []
    tables: list[Table] = []
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        lines: dict[str, dict[str, str]] = {}
        for row in (row for row in rows if row.data == data):
            tried, _ = setup.search(row)
            jobs = [*tried, *(setup.seeded(tried) if row.every_seed else ())]
            means: dict[float, float] = {}
            for rate in sorted({job.rate for job in jobs}):
                records = [record for job in jobs if job.rate == rate and (record := setup.record(job)) is not None]
                values = {name: [r["scores"][name] for r in records if r["scores"]] for name in ("val_top1", "test_top1")}
                complete = len(values["test_top1"]) == len(records) > 0
                if complete:
                    means[rate] = sum(values["test_top1"]) / len(records)
                columns = row_columns(setup, row) | {"scale": setup.options.scale, "calibrated": int(row.calibrate)}
                columns |= {"rate": rate, "runs": len(records), "diverged": len(records) - len(values["test_top1"])}
                columns |= {name: round(sum(each) / len(each), 4) if each else "" for name, each in values.items()}
                csv.append(columns | environment_columns(records[0] if records else None))
            word, line = "calibrated" if row.calibrate else "own", lines.setdefault(row.method, {"": row.method})
            best = max(means, key=lambda rate: means[rate], default=None)
            line[f"best rate, {word}"] = NOT_RUN if best is None else f"×{best:g}"
            line[f"there, {word}"] = NOT_RUN if best is None else f"{means[best]:.1f}"
            line[f"at ×1, {word}"] = f"{means[1.0]:.1f}" if 1.0 in means else NOT_RUN
            if means:
                title = f"{setup.title(data)}, {'calibrated vectors' if row.calibrate else 'own vectors'}"
                panels.setdefault(title, {})[row.method] = list(means), list(means.values())
        caption = f"{setup.title(data)}: test accuracy in %"
        tables.append(Table(setup.title(data), caption, pd.DataFrame(lines.values()), ()))
    return Report(csv, tables, [], partial(charts.draw_rates, panels, False) if panels else None)


def _accuracies(record: Record | None) -> list[float | str]:
    """Accuracy on validation and test images, or why there is none."""
    if record is None or not record["scores"]:
        return [NOT_RUN if record is None else DIVERGED] * 2
    return [round(float(record["scores"][name]), 4) for name in ("val_top1", "test_top1")]
