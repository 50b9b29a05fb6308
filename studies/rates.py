"""How much hangs on the rate of the classifier: accuracy of each head against it, from the runs by which it is chosen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eigengrain.pages import Cell, TableData
from eigengrain.text import counted
from studies.accuracy import DIVERGED, NOT_RUN, SMOKE_NOTE, factors, gcp_methods, paths
from studies.comparison import best_rate, rate_jobs
from studies.jobs import Record
from studies.published import TITLES
from studies.settings import NETWORKS
from studies.study import Findings, Row, Setup, data_title, where_run

#: rate of the classifier → record of the run, if there is one
Tried = dict[float, Record | None]

#: of MPN-COV: what ×3 comes to with the branch, whose vectors are 3.9 times as long, so that the two can be compared there
MATCHING = (46.0,)

NOTE = (
    "After training on 90 % of the training images: accuracy on the other 10 %, by which a rate is chosen, and on the test "
    "images. A vector c times as long learns as if the rate were c² times as high: where that is much, other rates are "
    "tried, and the figure has the rate times c², c = 1 for MPN-COV. There MPN-COV at ×46, which has no part in the "
    "choice, is beside MPN-COV + SEB at ×3."
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
            more = MATCHING if row.head == "mpncov" else ()
            found.setdefault((row.data, row.backbone, row.head, options), replace(row, search=True, more_rates=more))
    return sorted(found.values(), key=lambda row: list(TITLES).index(row.data))


def rate_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """A table a data set, a row a head and rate; data sets without a run are left out if there is one with."""
    searches = [(row, *_search(setup, row)) for row in rows]
    tried_on = {row.data for row, tried, _ in searches if any(tried.values())}
    csv: list[dict[str, object]] = []
    tables = []
    for data in dict.fromkeys(row.data for row in rows if row.data in tried_on or not tried_on):
        mine = [search for search in searches if search[0].data == data]
        lines = [
            [Cell(f"{row.method}, ×{rate:g}{' (chosen)' * (rate == best)}"), *map(Cell, _shown(tried[rate]))]
            for row, tried, best in mine
            for rate in sorted(tried)
        ]
        epochs = counted(setup.config(mine[0][0]).epochs, "epoch")
        caption = f"{data_title(setup, data)}, ResNet-50: accuracy in % after {epochs}"
        tables.append(TableData(caption, ["", "validation", "test"], lines))
        csv += [_csv_row(setup, row, rate, record, best) for row, tried, best in mine for rate, record in tried.items()]

    def draw(path: Path) -> None:
        from studies.study_plot import draw_rates

        panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        for data in dict.fromkeys(row.data for row in rows):
            for split, images in (("val", "validation images"), ("test", "test images")):
                for row, tried, _ in searches:
                    done = {rate: record["scores"] for rate, record in sorted(tried.items()) if record and record["scores"]}
                    if row.data == data and done:
                        lines = panels.setdefault(f"{data_title(setup, data)}, {images}", {})
                        rates = [float(f"{rate * row.length**2:.2g}") for rate in done]
                        lines[row.method] = rates, [each[f"{split}_top1"] for each in done.values()]
        scaled = any(row.length != 1 for row, tried, _ in searches if any(tried.values()))
        draw_rates(panels, scaled, path)

    known = any(record and record["scores"] for _, tried, _ in searches for record in tried.values())
    notes = [NOTE, *([SMOKE_NOTE] if setup.options.scale == "smoke" else [])]
    return Findings(csv, tables, notes, draw if known else None)


def _search(setup: Setup, row: Row) -> tuple[Tried, float | None]:
    """What was tried for a row, and the rate that it came to."""
    config = setup.config(row)
    jobs = setup.tried(row, "", config)
    shown = [*jobs, *rate_jobs(config, row.more_rates)]
    records = {job.name: setup.record(job) for job in shown}
    best = best_rate(jobs, {name: record for name, record in records.items() if record is not None})
    return {job.config.optimiser.classifier_lr_scale: records[job.name] for job in shown}, best


def _shown(record: Record | None) -> tuple[str, str]:
    """On validation and test images."""
    if record is None:
        return NOT_RUN, NOT_RUN
    scores = record["scores"]
    return (f"{scores['val_top1']:.1f}", f"{scores['test_top1']:.1f}") if scores else (DIVERGED, DIVERGED)


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
