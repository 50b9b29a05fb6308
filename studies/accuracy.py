"""Tables of accuracies beside those of the paper: the rows of Tables 3 to 7, 9 and 11, and their report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from eigengrain.text import counted
from studies import charts
from studies.settings import FINE_GRAINED, NETWORKS, PAPER, RESNET50, TEXTS, TITLES
from studies.study import NOT_RUN, Report, Row, Score, Setup, Table, environment_columns

DIVERGED = "diverged"
COVARIANCE_HEADS = ("isqrt", "mpncov", "mpncov+seb")
#: length of a head's vector relative to MPN-COV, whose vectors have a length of about 10 on Birds; bilinear heads end with
#: vectors of length 1
LENGTHS = dict.fromkeys(("bcnn", "bcnn-improved", "cbp", "kp", "monet", "run"), 0.1) | {"mpncov+seb": 3.9}
#: the same for factors and paths of the branch: on Birds the median of ‖QSᵀ‖ is 2.9, ‖S‖ is near √256, ‖Q‖ is that length
BRANCH_LENGTHS = {"scaled": 2.9, "constant": 100.0, "s": 16.0, "q": 12.0, "mlp-eigenvalues": 1.0, "mlp-matrix": 1.0}
#: options of the model for TransFG, whose paper moves patches of 16 pixels by 12
OVERLAPPING = {"backbone_options": {"patch_stride": 12}}
PROTOCOLS = {
    "fair": "fair: each method at its own best classifier rate (×) of the grid, which continues by factors of three while "
    "its edge is best (at most three times), chosen on 10 % of the training images, then trained on all of them, last "
    "epoch.",
    "paper": "paper's protocol: one classifier rate for all, the best test epoch, which favours every method.",
}
HEADINGS = {"fair": "ours, fair", "paper": "ours, paper's protocol"}


def table_rows(table: str, core: str, heads: Sequence[str], datasets: Sequence[str], setup: Setup) -> list[Row]:
    """One row per number of a table; ``core`` and ``heads`` are those of scale small."""
    rows = []
    for place, data in enumerate(datasets):
        for backbone, methods in PAPER[table].items():
            for method, numbers in methods.items():
                head = PAPER["methods"].get(method)
                options = {"compact": True} if head == "run" else {}
                small = backbone == core and head in heads
                model = OVERLAPPING if head == "transfg" else {}
                rows.append(Row(data, backbone, method, head, options, numbers[place], core=small, model=model))
    return rows


def transformers(setup: Setup) -> list[Row]:
    """The class token of a vision transformer, parts selected by its attention, and covariances beside the class token."""
    own, options = TEXTS["transformers"]["rows"], setup.options
    rows = []
    for data, entry in own["sets"].items():
        sizes = entry["sizes"] if options.img_size is None else [options.img_size]
        rate_size = entry.get("rate_size") if options.img_size is None else options.img_size
        for size in sizes:
            for method, values in own["methods"].items():
                name = f"{method}, {size} px" if len(sizes) > 1 else method
                row = Row(data, entry["backbone"], name, values["head"], core=True, calibrate=True, img_size=size)
                row = replace(row, rate_size=rate_size, model=values.get("model", {}))
                rows.append(replace(row, rates=tuple(options.rates or entry["rates"])))
    return rows


def gcp_methods(setup: Setup) -> list[Row]:
    """Table 3, and two simpler heads that it does not have for ResNet-50."""
    rows = table_rows("table_3", "resnet50", COVARIANCE_HEADS, FINE_GRAINED, setup)
    first = next(place for place, row in enumerate(rows) if row.backbone == "resnet50")
    more = {"GAP": "gap", "B-CNN": "bcnn"}
    rows[first:first] = [Row("cub", "resnet50", method, head, core=True) for method, head in more.items()]
    return [replace(row, length=LENGTHS.get(row.head or "", 1.0)) for row in rows]


def resnet_rows(name: str, setup: Setup) -> list[Row]:
    """The rows of a study in ``studies.yaml``: heads with ResNet-50; one that the paper does not have gets no number."""
    own = TEXTS[name]["rows"]
    numbers = PAPER[own["numbers"]] if "numbers" in own else RESNET50
    rows = []
    for place, data in enumerate(FINE_GRAINED):
        for method, entry in own["heads"].items():
            head, options, printed = entry["head"], entry.get("options", {}), numbers.get(entry.get("paper", method))
            lengths = [BRANCH_LENGTHS[value] for value in options.values() if value in BRANCH_LENGTHS]
            row = Row(data, "resnet50", method, head, options, printed[place] if printed else None, core=True)
            analyses = tuple(entry.get("analyses", own.get("analyses", ())))
            length = lengths[0] if lengths else LENGTHS.get(head, 1.0)
            rows.append(replace(row, curve=own.get("curve", False), analyses=analyses, length=length))
    return rows


def imagenet(setup: Setup) -> list[Row]:
    """Table 9, top-1 and top-5 of the same runs, and Table 10 on one of them."""
    rows = []
    for backbone, methods in PAPER["table_9"].items():
        for method, numbers in methods.items():
            options = {"gradient": "pade"} if method == "SVD-Padé" else {}
            analyses = ("similarity",) if (backbone, method) == ("resnet50", "MPN-COV") else ()
            head = PAPER["methods"][method]
            for metric, number in zip(("test_top1", "test_top5"), numbers, strict=True):
                rows.append(Row("imagenet", backbone, method, head, options, number, metric, analyses=analyses))
    return rows


def gcp_pretrained(setup: Setup) -> list[Row]:
    """Table 11: networks that were trained on ImageNet with the head, and without it."""
    rows = []
    for place, data in enumerate(FINE_GRAINED):
        for method, numbers in PAPER["table_11"].items():
            head = PAPER["methods"][method]
            rows.append(Row(data, "resnet50", f"{method}, after ImageNet with it", head, {}, numbers[place], pretrain=head))
        for method, accuracies in RESNET50.items():
            if PAPER["methods"][method] in COVARIANCE_HEADS:
                rows.append(Row(data, "resnet50", method, PAPER["methods"][method], {}, accuracies[place], core=True))
    return rows


def format_scores(scores: Sequence[Score], digits: int = 1) -> str:
    """Mean, range, number of runs and rate.

    Example:
        >>> format_scores([Score(10, True, (81.5, 82.5))]), format_scores([])
        ('82.0 (81.5 to 82.5, 2 runs, ×10)', 'not run')
        >>> format_scores([Score(3, True, (), diverged=1)]), format_scores([Score(3, True, (80.0,), diverged=1)])
        ('diverged (1 run, ×3)', '80.0 (1 run and 1 that diverged, ×3)')
    """
    texts = []
    for score in scores:
        mean = f"{score.mean:.{digits}f}" if score.values else DIVERGED
        spread = f"{min(score.values):.{digits}f} to {max(score.values):.{digits}f}, " if len(score.values) > 1 else ""
        runs = counted(len(score.values) or score.diverged, "run")
        if score.values and score.diverged:
            runs += f" and {score.diverged} that {DIVERGED}"
        texts.append(f"{mean} ({spread}{runs}, ×{score.rate:g}{' not chosen' if score.chosen is False else ''})")
    return "; ".join(texts) or NOT_RUN


def row_columns(setup: Setup, row: Row) -> dict[str, Any]:
    """Columns of the CSV file about a row."""
    return {
        "data": TITLES[row.data],
        "backbone": NETWORKS[row.backbone].title,
        "method": row.method,
        "head": row.head or "",
        "head_options": " ".join(f"{key}={value}" for key, value in row.options.items()),
    }


def _csv_row(setup: Setup, row: Row, scores: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """A row of the CSV file; of several rates, while none is chosen, it has the last."""
    columns = row_columns(setup, row) | {"metric": row.metric, "scale": setup.options.scale}
    columns["paper"] = "" if row.paper is None else row.paper
    for protocol in PROTOCOLS:
        values: dict[str, Any] = {"mean": NOT_RUN, "low": "", "high": "", "n": 0, "rate": "", "rate_chosen": ""}
        for score in scores[protocol][-1:]:
            chosen = "" if score.chosen is None else int(score.chosen)
            values |= {"mean": DIVERGED, "n": len(score.values), "rate": score.rate, "rate_chosen": chosen}
            if score.values:
                numbers = {"mean": score.mean, "low": min(score.values), "high": max(score.values)}
                values |= {key: round(value, 4) for key, value in numbers.items()}
        columns |= {f"{protocol}_protocol_{key}": value for key, value in values.items()}
    records = [score.record for protocol in PROTOCOLS for score in scores[protocol]]
    return columns | environment_columns(records[0] if records else None)


def accuracy_report(setup: Setup, rows: Sequence[Row], *notes: str, digits: int = 1) -> Report:
    """One table per data set: numbers of the paper, and ours under each protocol that is requested or has records."""
    scores = [{protocol: setup.scores(row, protocol) for protocol in PROTOCOLS} for row in rows]
    both = list(zip(rows, scores, strict=True))
    protocols = [p for p in PROTOCOLS if p in setup.protocols or any(each[p] for each in scores)]
    two = len({row.metric for row in rows}) > 1
    tables = []
    for data in dict.fromkeys(row.data for row in rows):
        lines = [
            {
                "": row.title + (f", {row.metric.removeprefix('test_').replace('top', 'top-')}" if two else ""),
                "paper": "–" if row.paper is None else f"{row.paper:.{digits}f}",
                **{HEADINGS[p]: format_scores(each[p], digits) for p in protocols},
            }
            for row, each in both
            if row.data == data
        ]
        *shorter, longest = sorted({setup.config(row).epochs for row in rows if row.data == data and row.head}) or [0]
        epochs = " or ".join([*map(str, shorter), counted(longest, "epoch")])
        caption = f"{setup.title(data)}, test accuracy in %, ours after {epochs}"
        tables.append(Table(setup.title(data), caption, pd.DataFrame(lines)))
    all_notes = [PROTOCOLS[p] for p in protocols]
    if any(score.chosen is False for each in scores for score in each["fair"]):
        all_notes.append(
            "not chosen: a rate of the search before all rates were tried on validation images; not comparable."
        )
    panels: dict[str, list[charts.Dots]] = {}
    for row, each in both:
        if row.metric == "test_top1":
            last = {p: each[p][-1] for p in protocols if each[p] and each[p][-1].values}
            ours = {HEADINGS[p] + ", rate not chosen" * (s.chosen is False): list(s.values) for p, s in last.items()}
            panels.setdefault(setup.title(row.data), []).append(charts.Dots(row.title, row.paper, ours))
    draw = partial(charts.draw_dots, panels, "test accuracy, %")
    any_value = any(dots.ours for lines in panels.values() for dots in lines)
    csv = [_csv_row(setup, row, each) for row, each in both]
    return Report(csv, tables, [*all_notes, *notes], draw if any_value else None)


def gcp_methods_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """Table 3 with its last line: the mean gain of SEB over MPN-COV."""
    texts = []
    for data in dict.fromkeys(row.data for row in rows):
        own = [row for row in rows if row.data == data]
        gains = _gains(setup, own, "fair") or _gains(setup, own, "paper")
        ours = f"{sum(gains) / len(gains):+.1f} over {counted(len(gains), 'backbone')}" if gains else NOT_RUN
        texts.append(f"{TITLES[data]} {PAPER['average_gain'][data]:+.1f} (ours: {ours})")
    notes = [f"Mean gain of SEB over MPN-COV in the paper: {', '.join(texts)}."]
    if any(row.data == "cars" for row in rows):
        notes.append("On Cars the paper prints a gain of 1.8 for ResNet-101 beside 93.9 and 91.7.")
    return accuracy_report(setup, rows, *notes)


def _gains(setup: Setup, rows: Sequence[Row], protocol: str) -> list[float]:
    """Gains of the backbones with results of both heads."""
    means: dict[str, dict[str, float]] = {"mpncov": {}, "mpncov+seb": {}}
    for row in rows:
        for score in setup.scores(row, protocol) if row.head in means else ():
            if score.values and score.chosen is not False:
                means[str(row.head)][row.backbone] = score.mean
    return [means["mpncov+seb"][name] - mean for name, mean in means["mpncov"].items() if name in means["mpncov+seb"]]
