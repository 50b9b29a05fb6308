"""Heads with and without the Scaling Eigen Branch, and settings of the training, each with the error of its difference."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, stdev
from typing import Any

import pandas as pd

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.heads import list_heads
from eigengrain.text import counted
from eigengrain.yaml_files import read_mapping
from studies import charts
from studies.accuracy import DIVERGED, format_scores, row_columns
from studies.runs import Record, describe_run
from studies.settings import FINE_GRAINED, RESNET50, TEXTS, TITLES, has_recipe
from studies.study import NOT_RUN, Report, Row, Setup, Table, environment_columns

#: differences of more than so many standard errors are distinguished from 0
ERRORS = 2.0
BASE = "base"
BRANCH = "+seb"
COMPARED_HEAD = "mpncov"
#: headings of the differences of a head, and their columns in the CSV file
COMPARED = {"to MPN-COV": "mpncov", "to the same without SEB": "branch"}
SPLIT_TITLES = {"val_top1": "validation", "test_top1": "test"}


@dataclass(frozen=True)
class Difference:
    """A difference of two accuracies in points, and its standard error; NaN if it cannot be estimated."""

    points: float
    error: float
    count: int  # of the pairs of seeds, or of the images

    @property
    def is_distinguished(self) -> bool:
        return abs(self.points) > ERRORS * self.error

    def __str__(self) -> str:
        """The difference with its standard error.

        Example:
            >>> print(Difference(0.5, 0.2, 3), Difference(0.5, math.nan, 1))
            +0.5 ± 0.2 +0.5
        """
        return f"{self.points:+.1f}" + ("" if math.isnan(self.error) else f" ± {self.error:.1f}")


def paired_difference(values: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """Mean of the differences over common seeds, with the standard error of that mean.

    Example:
        >>> paired_difference({0: 84.0, 1: 85.0, 2: 86.0}, {0: 83.0, 1: 84.5})
        Difference(points=0.75, error=0.25, count=2)
    """
    each = [values[seed] - others[seed] for seed in values if seed in others]
    if not each:
        return None
    return Difference(mean(each), stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan, len(each))


def difference_of_proportions(value: float, other: float, count: int | None) -> Difference:
    """The difference of two percentages of ``count`` images, as if they were of different images.

    Example:
        >>> difference_of_proportions(90.0, 80.0, 100)
        Difference(points=10.0, error=5.0, count=100)
    """
    variance = value * (100 - value) + other * (100 - other)
    return Difference(value - other, math.sqrt(variance / count) if count else math.nan, count or 0)


def verdict(difference: Difference, other: str) -> str:
    """A difference from another line in words.

    Example:
        >>> verdict(Difference(0.5, 0.4, 3), "MPN-COV")
        'cannot be distinguished from MPN-COV (+0.5 ± 0.4)'
        >>> verdict(Difference(-0.5, 0.1, 3), "MPN-COV")
        'is 0.5 points below MPN-COV (-0.5 ± 0.1)'
    """
    if math.isnan(difference.error):
        return f"differs by {difference} points from {other}, without an estimate of the error"
    if not difference.is_distinguished:
        return f"cannot be distinguished from {other} ({difference})"
    return f"is {abs(difference.points):.1f} points {'above' if difference.points > 0 else 'below'} {other} ({difference})"


def readers(records: Sequence[Record]) -> str:
    """The readers of the images of runs: the name of the data set, or folder."""
    return " ".join(sorted({record["config"]["data"]["name"] for record in records}))


def branch_rows(setup: Setup) -> list[Row]:
    """Heads on three data sets, with calibrated vectors."""
    own = TEXTS["branch"]["rows"]
    rates = setup.options.rates or own["rates"]
    rows = []
    for data in own["datasets"]:
        for method, head in own["heads"].items():
            numbers = RESNET50.get(method) if data in FINE_GRAINED else None
            paper = numbers[FINE_GRAINED.index(data)] if numbers else None
            row = Row(data, "resnet50", method, head, paper=paper, core=True, calibrate=True)
            rows.append(replace(row, rates=tuple(float(rate) for rate in rates)))
    return rows


def branch_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """One table per data set: accuracies, and differences to MPN-COV and to the same head without the branch."""
    csv: list[dict[str, Any]] = []
    tables: list[Table] = []
    notes: list[str] = []
    panels: dict[str, list[charts.Dots]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        own = {str(row.head): row for row in rows if row.data == data}
        records = {head: _chosen(setup, row) for head, row in own.items()}
        values = {
            head: {record["config"]["seed"]: record["scores"]["test_top1"] for record in each if record["scores"]}
            for head, each in records.items()
        }
        lines, sentences = [], []
        for head, row in own.items():
            scores = setup.scores(row, "fair")
            columns = row_columns(setup, row) | {"scale": setup.options.scale, "epochs": setup.config(row).epochs}
            columns |= {"reader": readers(records[head]), "paper": "" if row.paper is None else row.paper}
            columns |= {"rate": scores[0].rate if records[head] else ""}
            numbers = list(values[head].values())
            columns |= {"n": len(numbers), "diverged": len(records[head]) - len(numbers)}
            columns |= dict(zip(("mean", "low", "high"), _summary(numbers, records[head]), strict=True))
            line = {"": row.method, "paper": "–" if row.paper is None else f"{row.paper:.1f}"}
            line["ours (range, runs, rate)"] = format_scores(scores)
            for (name, column), other in zip(COMPARED.items(), (COMPARED_HEAD, head.removesuffix(BRANCH)), strict=True):
                pair = paired_difference(values[head], values.get(other, {})) if other != head else None
                line[name] = str(pair) if pair else "–" if other == head else NOT_RUN
                columns |= _difference_columns(column, pair)
                if pair and column == "branch":
                    seeds = counted(pair.count, "pair") + " of seeds"
                    sentences.append(f"{row.method} {verdict(pair, own[other].method)}, {seeds}")
            lines.append(line)
            csv.append(columns | environment_columns(next(iter(records[head]), None)))
            ours = {"ours": numbers} if numbers else {}
            panels.setdefault(setup.title(data), []).append(charts.Dots(row.method, row.paper, ours))
        epochs, size = _length(setup, next(iter(own.values())))
        caption = f"{setup.title(data)}, ResNet-50, test accuracy in %, {epochs} at {size} pixels"
        tables.append(Table(setup.title(data), caption, pd.DataFrame(lines), ("paper", *COMPARED)))
        notes += [f"{setup.title(data)}: {sentence}." for sentence in sentences]
    any_value = any(dots.ours for each in panels.values() for dots in each)
    return Report(csv, tables, notes, partial(charts.draw_dots, panels, "test accuracy, %") if any_value else None)


def _chosen(setup: Setup, row: Row) -> list[Record]:
    """The records at the chosen rate, or the only one; none while it is not chosen."""
    return next((records for _, chosen, records in setup.results(row, "fair") if chosen is not False), [])


def _summary(values: Sequence[float], records: Sequence[Record]) -> tuple[float | str, float | str, float | str]:
    """Mean, lowest and highest value; without values, why there are none."""
    if not values:
        return DIVERGED if records else NOT_RUN, "", ""
    return round(mean(values), 4), round(min(values), 4), round(max(values), 4)


def _difference_columns(name: str, pair: Difference | None) -> dict[str, Any]:
    """Columns of the CSV file."""
    if pair is None:
        return {f"difference_{name}": "", f"error_{name}": "", f"pairs_{name}": 0}
    error = "" if math.isnan(pair.error) else round(pair.error, 4)
    return {f"difference_{name}": round(pair.points, 4), f"error_{name}": error, f"pairs_{name}": pair.count}


def _length(setup: Setup, row: Row) -> tuple[str, int]:
    """Epochs in words, and the size of the images."""
    config = setup.config(row)
    return counted(config.epochs, "epoch"), config.data.transforms.img_size


def recipe_rows(setup: Setup) -> list[Row]:
    """The base and each setting that changes it, with the runs on 90 % of the training images alone."""
    own = TEXTS["recipe"]["rows"]
    file = setup.options.settings
    settings = own["settings"] if file is None else read_mapping(file)
    for name, changes in settings.items():
        if name == BASE:
            raise ArgumentError("settings", "must not change the base, to which the others are compared", name)
        if not re.fullmatch(r"[A-Za-z0-9._+-]+", name):
            raise ArgumentError("settings", "must have names of letters, digits, '.', '_', '+' and '-'", name)
        if not isinstance(changes, Mapping):
            raise ArgumentError("settings", f"must have dotted options and their values for {name!r}", changes)
    rows = []
    for data in own["datasets"]:
        if data not in (setup.options.datasets or ()) and not has_recipe(setup.options, data):
            continue
        base = _setting(setup, data, BASE, own["base"])
        rows.append(replace(base, analyses=("size-accuracy",)))
        for name, changes in settings.items():
            row = _setting(setup, data, name, own["base"] | dict(changes))
            if describe_run(setup.config(row)) != describe_run(setup.config(base)):
                rows.append(row)
    return rows


def _setting(setup: Setup, data: str, name: str, options: Mapping[str, Any]) -> Row:
    """A row of the study recipe; the rate of the classifier is that of its options."""
    changes = dict(options)
    head = changes.pop("model.head")
    if head not in list_heads():
        raise UnknownName("head", head, list_heads())
    row = Row(data, "resnet50", name, head, core=True, search_only=True, every_seed=True, changes=changes, tag=name)
    return replace(row, rates=(setup.config(row).optimiser.classifier_lr_scale,))


def recipe_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """One table per data set: accuracies of each setting, and the differences to the base."""
    csv: list[dict[str, Any]] = []
    tables: list[Table] = []
    notes: list[str] = []
    panels: dict[str, list[charts.Dots]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        own = [row for row in rows if row.data == data]
        records = {row.method: _setting_records(setup, row) for row in own}
        scores = {name: [record["scores"] for record in each if record["scores"]] for name, each in records.items()}
        texts = {row.method: _options_text(row, own) for row in own}
        sizes = [r["analyses"]["size-accuracy"] for r in records.get(BASE, ()) if "size-accuracy" in r["analyses"]]
        for pixels in sizes[0] if sizes else ():
            name = f"{BASE}, test at {pixels} pixels"
            scores[name], texts[name] = [each[pixels] for each in sizes], f"evaluate --img_size {pixels}"
            records[name] = records[BASE]
        values = {name: _mean_accuracies(each) for name, each in scores.items()}
        lines, differences = [], dict[str, Difference]()
        for name, accuracies in values.items():
            line, missing = {"setting": name}, DIVERGED if records[name] else NOT_RUN
            columns: dict[str, Any] = {
                "data": TITLES[data],
                "setting": name,
                "options": texts[name],
                "scale": setup.options.scale,
            }
            diverged = sum(not record["scores"] for record in records[name])
            columns |= {"reader": readers(records[name]), "n": len(scores[name]), "diverged": diverged}
            for key, title in SPLIT_TITLES.items():
                pair = None
                if name != BASE and key in accuracies and key in values.get(BASE, {}):
                    pair = difference_of_proportions(accuracies[key], values[BASE][key], _images(records[name], key))
                line[f"{title}, %"] = f"{accuracies[key]:.1f}" if key in accuracies else missing
                line[f"{title}: to the base"] = str(pair) if pair else "–" if name == BASE else NOT_RUN
                columns[key] = round(accuracies[key], 4) if key in accuracies else missing
                columns |= _difference_columns(key, pair)
                if pair and key == "val_top1":
                    differences[name] = pair
            lines.append(line)
            csv.append(columns | environment_columns(next(iter(records[name]), None)))
        epochs, size = _length(setup, own[0])
        caption = f"{setup.title(data)}, ResNet-50, accuracy in %, {epochs} at {size} pixels"
        differs = tuple(heading for heading in lines[0] if heading.endswith("to the base"))
        tables.append(Table(setup.title(data), caption, pd.DataFrame(lines), differs))
        panels[setup.title(data)] = [
            charts.Dots(name, None, {title: [each[key]] for key, title in SPLIT_TITLES.items() if key in each})
            for name, each in values.items()
        ]
        if differences:
            best = max(differences, key=lambda name: differences[name].points)
            pair = differences[best]
            images = counted(pair.count, "validation image") if pair.count else "validation images"
            notes.append(f"{setup.title(data)}: the best setting on {images}, {best}, {verdict(pair, 'the base')}.")
    notes += [f"{name}: {text}." for name, text in {row.method: _options_text(row, rows) for row in rows}.items()]
    any_value = any(dots.ours for each in panels.values() for dots in each)
    return Report(csv, tables, notes, partial(charts.draw_dots, panels, "accuracy, %") if any_value else None)


def _setting_records(setup: Setup, row: Row) -> list[Record]:
    """The records of all seeds."""
    tried, _ = setup.search(row)
    records = [setup.record(job) for job in (*tried, *setup.seeded(tried))]
    return [record for record in records if record is not None]


def _mean_accuracies(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: mean(each[key] for each in scores) for key in SPLIT_TITLES} if scores else {}


def _images(records: Sequence[Record], accuracy: str) -> int | None:
    """Number of images of an accuracy; None for records without it."""
    counts = {record.get("images", {}).get(accuracy.split("_")[0]) for record in records}
    return counts.pop() if len(counts) == 1 else None


def _options_text(row: Row, rows: Sequence[Row]) -> str:
    """The options of a setting, without those of the base."""
    bases = [{"model.head": base.head} | dict(base.changes) for base in rows if base.method == BASE]
    others = bases[0] if bases and row.method != BASE else {}
    changes = {"model.head": row.head} | dict(row.changes)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    return ", ".join(f"{key} {texts[key]}" for key, value in changes.items() if key not in others or others[key] != value)
