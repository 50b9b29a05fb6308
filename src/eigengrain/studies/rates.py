"""How much hangs on the rate of the classifier: accuracy of each head against it, from the runs by which it is chosen."""

from dataclasses import replace
from pathlib import Path

from eigengrain.runtime.page import Cell, TableData
from eigengrain.studies.accuracy import DIVERGED, NOT_RUN, SMOKE_NOTE, factors, gcp_methods, paths
from eigengrain.studies.comparison import best_rate
from eigengrain.studies.jobs import Record
from eigengrain.studies.published import TITLES
from eigengrain.studies.settings import NETWORKS
from eigengrain.studies.study import Findings, Row, Setup, data_title, where_run

#: rate of the classifier → record of the run, if there is one
Tried = dict[float, Record | None]

NOTE = (
    "Accuracy on validation images, and behind it that on the test images of the same network, after training on the other "
    "90 % of the training images. A head that only makes its vector longer has the curve of another, moved to lower rates."
)


def rate_rows(setup: Setup) -> list[Row]:
    """What Tables 3, 6 and 7 compare for ResNet-50, each head once; only the runs by which a rate is chosen."""
    rows = [row for row in gcp_methods(setup) if row.backbone == "resnet50" and row.core]
    rows += [replace(row, method=f"path {row.method}") for row in paths(setup)]
    rows += [replace(row, method=f"factor {row.method}") for row in factors(setup)]
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.head is not None:
            options = tuple(sorted(row.options.items()))
            found.setdefault((row.data, row.backbone, row.head, options), replace(row, search=True))
    return sorted(found.values(), key=lambda row: list(TITLES).index(row.data))


def rate_findings(setup: Setup) -> Findings:
    """A table a data set, a row a head, a column a rate; data sets without a run are left out if there is one with."""
    rows = rate_rows(setup)
    searches = [_search(setup, row) for row in rows]
    tried_on = {row.data for row, (tried, _) in zip(rows, searches, strict=True) if any(tried.values())}
    csv: list[dict[str, object]] = []
    tables = []
    for data in dict.fromkeys(row.data for row in rows if row.data in tried_on or not tried_on):
        mine = [(row, *search) for row, search in zip(rows, searches, strict=True) if row.data == data]
        rates = sorted({rate for _, tried, _ in mine for rate in tried})
        lines = [
            [Cell(row.method), *(Cell(_shown(tried, rate)) for rate in rates), Cell(f"×{best:g}" if best else NOT_RUN)]
            for row, tried, best in mine
        ]
        caption = f"{data_title(setup, data)}, ResNet-50: accuracy in % on validation images, on test images"
        tables.append(TableData(caption, ["", *(f"×{rate:g}" for rate in rates), "chosen"], lines))
        csv += [_csv_row(setup, row, rate, record, best) for row, tried, best in mine for rate, record in tried.items()]

    def draw(path: Path) -> None:
        from eigengrain.studies.study_plot import draw_rates

        panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        for row, (tried, _) in zip(rows, searches, strict=True):
            values = {rate: record["scores"]["val_top1"] for rate, record in tried.items() if record and record["scores"]}
            if values:
                lines = panels.setdefault(data_title(setup, row.data), {})
                lines[row.method] = sorted(values), [values[rate] for rate in sorted(values)]
        draw_rates(panels, path)

    known = any(record and record["scores"] for tried, _ in searches for record in tried.values())
    notes = [NOTE, *([SMOKE_NOTE] if setup.options.scale == "smoke" else [])]
    return Findings(csv, tables, notes, draw if known else None)


def _search(setup: Setup, row: Row) -> tuple[Tried, float | None]:
    """What was tried for a row, and the rate that it came to."""
    jobs = setup.tried(row, "", setup.config(row))
    records = {job.name: setup.record(job) for job in jobs}
    best = best_rate(jobs, {name: record for name, record in records.items() if record is not None})
    return {job.config.optimiser.classifier_lr_scale: records[job.name] for job in jobs}, best


def _shown(tried: Tried, rate: float) -> str:
    if rate not in tried:
        return "–"  # beyond an edge of the grid that is not the best
    record = tried[rate]
    if record is None:
        return NOT_RUN
    scores = record["scores"]
    return f"{scores['val_top1']:.1f}, {scores['test_top1']:.1f}" if scores else DIVERGED


def _csv_row(setup: Setup, row: Row, rate: float, record: Record | None, best: float | None) -> dict[str, object]:
    scores = record["scores"] if record else {}
    missing = DIVERGED if record else NOT_RUN
    return {
        "data": TITLES[row.data],
        "backbone": NETWORKS[row.backbone].title,
        "method": row.method,
        "head": row.head,
        "head_options": " ".join(f"{key}={value}" for key, value in row.options.items()),
        "scale": setup.options.scale,
        "rate": rate,
        "val_top1": round(scores["val_top1"], 4) if scores else missing,
        "test_top1": round(scores["test_top1"], 4) if scores else missing,
        "chosen": "" if best is None else int(rate == best),
        **where_run(record),
    }
