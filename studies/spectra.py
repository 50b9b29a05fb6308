"""Trained networks with parts of their spectra: Tables 1, 2 and 10, and Figure 6."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from eigengrain.text import counted
from studies import charts
from studies.analyses import large_and_small, list_subsets, paper_subsets
from studies.settings import FINE_GRAINED, PAPER, TITLES
from studies.study import NOT_RUN, Report, Row, Setup, Table, environment_columns

CUTS = ("exact", "projector")


def _networks(setup: Setup, rows: Sequence[Row], analysis: str) -> list[str]:
    """A note on the networks that were analysed."""
    texts = []
    for row in rows:
        record, _ = setup.analysis(row, analysis)
        if record is not None:
            rate, epochs = record["config"]["optimiser"]["classifier_lr_scale"], record["config"]["epochs"]
            accuracy = f"{record['scores'][row.metric]:.1f} % after {counted(epochs, 'epoch')}"
            best = setup.search(row)[1]
            other = "" if best in (None, rate) else f" (its best rate is ×{best:g})"
            texts.append(f"{setup.title(row.data)}, {row.method}: ×{rate:g}, {accuracy}{other}")
    return [f"The networks, with the rate of the classifier and their test accuracy: {'; '.join(texts)}."] if texts else []


def spectrum_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """Figure 6: condition number, effective rank and energy of the covariances of the test images, and a histogram."""
    csv: list[dict[str, Any]] = []
    lines: dict[str, list[dict[str, str]]] = {}
    panels: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        record, values = setup.analysis(row, "spectrum")
        low, high = PAPER["figure_6"][str(row.head)]
        texts = dict.fromkeys(("ours: κ(P)", "effective rank", "energy of the last", "λ₁", "s"), NOT_RUN)
        if values:
            panels.setdefault(setup.title(row.data), {})[row.method] = values
            condition = values["log10_condition"]
            texts["ours: κ(P)"] = f"10^{condition[2]:.1f} (10^{condition[0]:.1f} to 10^{condition[4]:.1f})"
            forms = (("effective_rank", ".1f"), ("energy_last", ".1e"), ("lambda_1", ".3g"), ("s", ".3g"))
            for heading, (measure, form) in zip(list(texts)[1:], forms, strict=True):
                texts[heading] = format(values[measure][2], form)
        paper = f"10^{math.log10(low):.0f} to 10^{math.log10(high):.0f}"
        lines.setdefault(row.data, []).append({"": row.method, "paper: κ(P)": paper, **texts})
        columns = {"data": TITLES[row.data], "method": row.method, "scale": setup.options.scale}
        columns["run"] = record["name"] if record else NOT_RUN
        columns |= {"paper_condition_low": low, "paper_condition_high": high, "images": values.get("images", "")}
        for measure in ("log10_condition", "effective_rank", "energy_last", "lambda_1", "s", "q_norm"):
            for place, share in enumerate(("5", "25", "50", "75", "95")):
                columns[f"{measure}_{share}"] = values[measure][place] if values else ""
        csv.append(columns | environment_columns(record))
    tables = []
    for data, each in lines.items():
        caption = f"{setup.title(data)}: medians over test images (5 % to 95 %)"
        tables.append(Table(setup.title(data), caption, pd.DataFrame(each), ("paper: κ(P)",)))
    notes = _networks(setup, rows, "spectrum")
    return Report(csv, tables, notes, partial(charts.draw_histograms, panels, PAPER["peak"]) if panels else None)


def subset_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """Table 2: accuracy with parts of the spectrum in inference; the subsets of the paper first, then more between them."""
    names = list_subsets(setup.channels)
    printed = {ours: PAPER["table_2"][theirs] for ours, theirs in paper_subsets(setup.channels).items()}
    csv: list[dict[str, Any]] = []
    tables: list[Table] = []
    panels: dict[str, list[charts.Dots]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        place = FINE_GRAINED.index(data)
        analyses = {row.method: setup.analysis(row, "subset-accuracy") for row in rows if row.data == data}
        lines = []
        for name in names:
            number = printed[name][place] if name in printed else None
            line = {"eigenvalues": name, "paper, MPN-COV": "–" if number is None else f"{number:.1f}"}
            ours = {f"ours, {method}": [a[name]["top1"]] for method, (_, a) in analyses.items() if name in a}
            panels.setdefault(setup.title(data), []).append(charts.Dots(name, number, ours))
            for method, (record, analysis) in analyses.items():
                score = analysis.get(name, {})
                line[f"ours, {method}"] = f"{score['top1']:.1f}" if score else NOT_RUN
                columns = {"data": TITLES[data], "method": method, "subset": name, "scale": setup.options.scale}
                columns["paper"] = "" if number is None or method != "MPN-COV" else number
                columns |= {"top1": NOT_RUN, "top5": "", "loss": ""} | score
                csv.append(columns | {"run": record["name"] if record else ""} | environment_columns(record))
            lines.append(line)
        caption = f"{setup.title(data)}, test accuracy in %, in inference only"
        tables.append(Table(setup.title(data), caption, pd.DataFrame(lines), ("paper, MPN-COV",)))
    notes = _networks(setup, rows, "subset-accuracy")
    return Report(csv, tables, notes, partial(charts.draw_dots, panels, "test accuracy, %") if notes else None)


def similarity_table(setup: Setup, row: Row, printed: Mapping[tuple[str, str], Sequence[float]]) -> tuple[list[Any], Table]:
    """Correlation and mean absolute error of the maps of large and small eigenvalues; ``printed`` are the paper's.

    A mean is over the images for which the measure is defined; their number is in the table if there are others.
    """
    record, analysis = setup.analysis(row, "similarity")
    keys = ("rule", "cut", "subset", "collapse", "measure")
    measured = {tuple(each[key] for key in keys): each for each in analysis.get("rows", ())}
    subsets = dict(zip(("large", "small"), large_and_small(setup.channels), strict=True))
    csv: list[dict[str, Any]] = []
    lines = []
    for (rule, part), numbers in printed.items():
        line = {"maps beside those of all": f"{rule}, {part} ({subsets[part]})"}
        for measure, number in zip(("corr", "mae"), numbers, strict=True):
            form, heading = (".2f", "Corr") if measure == "corr" else (".1e", "MAE")
            line[f"{heading}: paper"] = f"{number:{form}}" if row.head == "mpncov" else "–"
            for cut in CUTS:
                for collapse in ("abs-max", "signed-sum"):
                    each = measured.get((rule, cut, subsets[part], collapse, measure), {"mean": None, "n": ""})
                    ours = NOT_RUN if record is None else "undefined" if each["mean"] is None else each["mean"]
                    if collapse == "abs-max":
                        some = "" if each["n"] == analysis.get("images") else f" (n = {each['n']})"
                        text = ours if isinstance(ours, str) else f"{ours:{form}}{some}"
                        line[f"{heading}: {cut}{' cut' * (cut == 'exact')}"] = text
                    columns: dict[str, Any] = {"data": TITLES[row.data], "method": row.method, "rule": rule}
                    columns["eigenvalues"] = part
                    columns |= {"subset": subsets[part], "measure": measure, "cut": cut, "collapse": collapse}
                    columns |= {"scale": setup.options.scale, "paper": number if row.head == "mpncov" else ""}
                    columns |= {"ours": ours, "images": each["n"]}
                    csv.append(columns | {"run": record["name"] if record else ""} | environment_columns(record))
        lines.append(line)
    title = f"{setup.title(row.data)}, {row.method}"
    return csv, Table(title, title, pd.DataFrame(lines), ("Corr: paper", "MAE: paper"))


def similarity_report(setup: Setup, rows: Sequence[Row]) -> Report:
    """Table 1."""
    csv: list[dict[str, Any]] = []
    tables = []
    for row in rows:
        place = FINE_GRAINED.index(row.data)
        rules = PAPER["table_1"].items()
        printed = {(rule, part): [n[place] for n in each] for rule, parts in rules for part, each in parts.items()}
        more, table = similarity_table(setup, row, printed)
        csv += more
        tables.append(table)
    panels: dict[str, dict[str, charts.Dots]] = {}
    for line in csv:
        if (line["measure"], line["collapse"], line["method"]) == ("corr", "abs-max", "MPN-COV"):
            label = f"{line['rule']}, {line['eigenvalues']}"
            title = f"{line['data']}{' (drawn)' * (setup.options.scale == 'smoke')}"
            dots = panels.setdefault(title, {}).setdefault(label, charts.Dots(label, line["paper"]))
            if isinstance(line["ours"], float):
                dots.ours[f"ours, {line['cut']} cut"] = [line["ours"]]
    lines = {title: list(panel.values()) for title, panel in panels.items()}
    draw = partial(charts.draw_dots, lines, "correlation with the map of all eigenvalues, MPN-COV")
    any_value = any(dots.ours for each in lines.values() for dots in each)
    return Report(csv, tables, _networks(setup, rows, "similarity"), draw if any_value else None)
