"""Tables of accuracies, the paper's beside ours: the rows of Tables 3 to 7, 9 and 11, and how they are shown."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eigengrain.pages import Cell, TableData
from eigengrain.text import counted
from studies.published import (
    AVERAGE_GAIN,
    FINE_GRAINED,
    LARGER,
    METHODS,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TABLE_9,
    TABLE_11,
    TITLES,
    Accuracies,
)
from studies.settings import NETWORKS
from studies.study import Findings, Row, Score, Setup, data_title, titled, where_run

NOT_RUN = "not run"
DIVERGED = "diverged"
#: heads whose vector is shorter or longer than that of MPN-COV, which is about 10 on Birds: how many times. Bilinear heads
#: end with vectors of length 1.
LENGTHS = dict.fromkeys(("bcnn", "bcnn-improved", "cbp", "kp", "monet", "run"), 0.1) | {"mpncov+seb": 3.9}
#: the same for factors and paths of the branch: on Birds ‖QSᵀ‖ is 2.9 in the median, ‖S‖ near √256, ‖Q‖ that length itself
BRANCH_LENGTHS = {"scaled": 2.9, "constant": 100.0, "s": 16.0, "q": 12.0, "mlp-eigenvalues": 1.0, "mlp-matrix": 1.0}
PROTOCOLS = {
    "fair": "fair: each method at its own best classifier rate (×) of the grid, which goes on by factors of three while "
    "its edge is best, chosen on 10 % of the training images, then trained on all of them, last epoch.",
    "paper": "paper's protocol: one classifier rate for all, the best test epoch, which flatters every method.",
}
SMOKE_NOTE = (
    "Scale smoke: one small network on a few drawn birds stands in for every backbone and data set. These numbers show "
    "that the study runs, nothing else."
)
HEADINGS = {"fair": "ours, fair", "paper": "ours, paper's protocol"}


# --- what is trained ------------------------------------------------------------------------------------------------


def _from_table(table: Accuracies, datasets: Sequence[str], core: Sequence[tuple[str, str]]) -> list[Row]:
    """A row for each number of a table; ``core`` are backbones and heads of scale small."""
    rows = []
    for place, data in enumerate(datasets):
        for backbone, methods in table.items():
            for method, printed in methods.items():
                head = METHODS.get(method)
                options = {"compact": True} if head == "run" else {}
                small = (backbone, head or "") in core
                rows.append(Row(data, backbone, method, head, options, printed[place], core=small))
    return rows


def gcp_methods(setup: Setup) -> list[Row]:
    """Table 3, and two plainer heads that it does not have for ResNet-50."""
    rows = _from_table(TABLE_3, FINE_GRAINED, [("resnet50", head) for head in ("isqrt", "mpncov", "mpncov+seb")])
    first = next(place for place, row in enumerate(rows) if row.backbone == "resnet50")
    plain = [Row("cub", "resnet50", "GAP", "gap", core=True), Row("cub", "resnet50", "B-CNN", "bcnn", core=True)]
    rows = [*rows[:first], *plain, *rows[first:]]
    return [replace(row, length=LENGTHS.get(row.head or "", 1.0)) for row in rows]


def larger_sets(setup: Setup) -> list[Row]:
    """Table 4."""
    return _from_table(TABLE_4, LARGER, [("efficientnet_b5", head) for head in ("mpncov", "mpncov+seb")])


def architectures(setup: Setup) -> list[Row]:
    """Table 5."""
    return _from_table(TABLE_5, FINE_GRAINED, [("densenet169", head) for head in ("isqrt", "mpncov", "mpncov+seb")])


#: a head and its options
Setting = tuple[str, dict[str, object]]


def _ablation(table: Mapping[str, tuple[float, ...]], heads: Mapping[str, Setting]) -> list[Row]:
    """A row for each head on each data set; one that the paper does not have has no printed number."""
    rows = []
    for place, data in enumerate(FINE_GRAINED):
        for method, (head, options) in heads.items():
            printed = table[method][place] if method in table else None
            length = next((BRANCH_LENGTHS[str(value)] for value in options.values()), LENGTHS.get(head, 1.0))
            rows.append(Row(data, "resnet50", method, head, options, printed, core=True, length=length))
    return rows


def paths(setup: Setup) -> list[Row]:
    """Table 6."""
    heads: dict[str, Setting] = {
        "Q": ("mpncov", {}),
        "‖QSᵀ‖·Q": ("mpncov+seb", {"path": "scaled"}),
        "‖QSᵀ‖·Q + Q": ("mpncov+seb", {}),
    }
    return _ablation(TABLE_6, heads)


def factors(setup: Setup) -> list[Row]:
    """Table 7, and no factor."""
    names = dict(zip(TABLE_7, ("constant", "mlp-eigenvalues", "mlp-matrix", "s", "q"), strict=False))
    heads: dict[str, Setting] = {"no factor": ("mpncov", {})}
    heads |= {method: ("mpncov+seb", {"factor": names[method]} if method in names else {}) for method in TABLE_7}
    return _ablation(TABLE_7, heads)


def imagenet(setup: Setup) -> list[Row]:
    """Table 9, top-1 and top-5 of the same runs, and Table 10 on one of them."""
    rows = []
    for backbone, methods in TABLE_9.items():
        for method, printed in methods.items():
            options = {"gradient": "pade"} if method == "SVD-Padé" else {}
            analyses = ("similarity",) if (backbone, method) == ("resnet50", "MPN-COV") else ()
            for metric, number in zip(("test_top1", "test_top5"), printed, strict=True):
                row = Row("imagenet", backbone, method, METHODS[method], options, number, metric, analyses=analyses)
                rows.append(row)
    return rows


def gcp_pretrained(setup: Setup) -> list[Row]:
    """Table 11: the head is there on ImageNet already, or it meets a network that was trained without it."""
    rows = []
    for place, data in enumerate(FINE_GRAINED):
        for method, printed in TABLE_11.items():
            head = METHODS[method]
            rows.append(Row(data, "resnet50", f"{method}, after ImageNet with it", head, {}, printed[place], pretrain=head))
        for method, accuracies in TABLE_3["resnet50"].items():
            if METHODS[method] in ("isqrt", "mpncov", "mpncov+seb"):
                rows.append(Row(data, "resnet50", method, METHODS[method], {}, accuracies[place], core=True))
    return rows


# --- how it is shown ------------------------------------------------------------------------------------------------


def shown(scores: Sequence[Score], digits: int = 1) -> str:
    """Scores for reading: mean, range, number of runs, rate.

    Example:
        >>> shown([Score(10, True, (81.5, 82.5))]), shown([])
        ('82.0 (81.5 to 82.5, 2 runs, ×10)', 'not run')
        >>> shown([Score(3, True, (), diverged=1)]), shown([Score(3, True, (80.0,), diverged=1)])
        ('diverged (1 run, ×3)', '80.0 (1 run and 1 that diverged, ×3)')
    """
    said = []
    for score in scores:
        mean = f"{score.mean:.{digits}f}" if score.values else DIVERGED
        spread = f"{min(score.values):.{digits}f} to {max(score.values):.{digits}f}, " if len(score.values) > 1 else ""
        runs = counted(len(score.values) or score.diverged, "run")
        if score.values and score.diverged:
            runs += f" and {score.diverged} that {DIVERGED}"
        rate = f"×{score.rate:g}{' not chosen' if score.chosen is False else ''}"
        said.append(f"{mean} ({spread}{runs}, {rate})")
    return "; ".join(said) or NOT_RUN


def csv_row(setup: Setup, row: Row, scores: Mapping[str, Sequence[Score]]) -> dict[str, object]:
    """A row of the CSV file; a protocol with several rates has none chosen, and its last one stands here."""
    found: dict[str, object] = {
        "data": TITLES[row.data],
        "backbone": NETWORKS[row.backbone].title,
        "method": row.method,
        "head": row.head or "",
        "head_options": " ".join(f"{key}={value}" for key, value in row.options.items()),
        "metric": row.metric,
        "scale": setup.options.scale,
        "paper": "" if row.printed is None else row.printed,
    }
    for protocol in ("fair", "paper"):
        score = scores[protocol][-1] if scores[protocol] else None
        values: dict[str, object] = {"mean": NOT_RUN, "low": "", "high": "", "n": 0, "rate": "", "rate_chosen": ""}
        if score is not None:
            chosen = "" if score.chosen is None else int(score.chosen)
            values |= {"mean": DIVERGED, "n": len(score.values), "rate": score.rate, "rate_chosen": chosen}
            if score.values:
                values |= {
                    "mean": round(score.mean, 4),
                    "low": round(min(score.values), 4),
                    "high": round(max(score.values), 4),
                }
        found |= {f"{protocol}_protocol_{key}": value for key, value in values.items()}
    records = [record for protocol in ("fair", "paper") for _, _, each in setup.results(row, protocol) for record in each]
    return found | where_run(records[0] if records else None)


def accuracy_findings(setup: Setup, rows: Sequence[Row], digits: int = 1) -> Findings:
    """A table a data set: the paper's numbers, and ours under each protocol that was asked for or run."""
    scores = [{protocol: setup.scores(row, protocol) for protocol in ("fair", "paper")} for row in rows]
    protocols = [p for p in ("fair", "paper") if p in setup.protocols or any(each[p] for each in scores)]
    two = len({row.metric for row in rows}) > 1
    tables = []
    for data in dict.fromkeys(row.data for row in rows):
        lines = []
        for row, each in zip(rows, scores, strict=True):
            if row.data == data:
                metric = f", {row.metric.removeprefix('test_').replace('top', 'top-')}" if two else ""
                printed = "–" if row.printed is None else f"{row.printed:.{digits}f}"
                ours = [shown(each[p], digits) for p in protocols]
                lines.append([Cell(titled(row) + metric), Cell(printed), *map(Cell, ours)])
        caption = f"{data_title(setup, data)}, test accuracy in %, ours after {_epochs(setup, rows, data)}"
        tables.append(TableData(caption, ["", "paper", *(HEADINGS[p] for p in protocols)], lines))
    notes = [PROTOCOLS[p] for p in protocols]
    if any(score.chosen is False for each in scores for score in each["fair"]):
        notes.append("not chosen: a rate of the search, before all of them were tried on validation images: no comparison.")
    if setup.options.scale == "smoke":
        notes.append(SMOKE_NOTE)
    csv = [csv_row(setup, row, each) for row, each in zip(rows, scores, strict=True)]

    def draw(path: Path) -> None:
        from studies.study_plot import Dots, draw_dots

        panels: dict[str, list[Dots]] = {}
        for row, each in zip(rows, scores, strict=True):
            if row.metric == "test_top1":
                last = {p: each[p][-1] for p in protocols if each[p] and each[p][-1].values}
                ours = {HEADINGS[p] + ", rate not chosen" * (s.chosen is False): list(s.values) for p, s in last.items()}
                panels.setdefault(data_title(setup, row.data), []).append(Dots(titled(row), row.printed, ours))
        draw_dots(panels, "test accuracy, %", path)

    return Findings(
        csv, tables, notes, draw if any(score.values for each in scores for p in protocols for score in each[p]) else None
    )


def _epochs(setup: Setup, rows: Sequence[Row], data: str) -> str:
    """How long the rows of a data set are trained."""
    *shorter, longest = sorted({setup.config(row).epochs for row in rows if row.data == data and row.head is not None})
    return " or ".join([*map(str, shorter), counted(longest, "epoch")])


def gains(setup: Setup, rows: Sequence[Row]) -> list[str]:
    """The last line of Table 3: what SEB adds to MPN-COV, over the backbones where both were run under one protocol."""
    said = []
    for data in dict.fromkeys(row.data for row in rows):
        mine = [row for row in rows if row.data == data]
        both = _gains(setup, mine, "fair") or _gains(setup, mine, "paper")
        ours = f"{sum(both) / len(both):+.1f} over {counted(len(both), 'backbone')}" if both else NOT_RUN
        said.append(f"{TITLES[data]} {AVERAGE_GAIN[data]:+.1f} (ours: {ours})")
    return [f"Mean gain of SEB over MPN-COV in the paper: {', '.join(said)}."]


def _gains(setup: Setup, rows: Sequence[Row], protocol: str) -> list[float]:
    """One a backbone."""
    means: dict[str, dict[str, float]] = {"mpncov": {}, "mpncov+seb": {}}
    for row in rows:
        for score in setup.scores(row, protocol) if row.head in means else ():
            if score.values and score.chosen is not False:
                means[str(row.head)][row.backbone] = score.mean
    return [means["mpncov+seb"][name] - mean for name, mean in means["mpncov"].items() if name in means["mpncov+seb"]]
