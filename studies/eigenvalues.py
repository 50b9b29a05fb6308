"""What trained networks do with parts of their spectra: Tables 1, 2 and 10, and Figure 6."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eigengrain.pages import Cell, TableData
from eigengrain.text import counted
from studies.accuracy import NOT_RUN
from studies.analyses import large_and_small, paper_subsets, subsets_of
from studies.jobs import Record
from studies.published import (
    ENERGY_OF_LAST,
    FIGURE_6,
    FINE_GRAINED,
    PEAK,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_10,
    TITLES,
)
from studies.study import Findings, Row, Setup, data_title, where_run

METHODS = {"mpncov": "MPN-COV", "mpncov+seb": "MPN-COV + SEB"}


def _rows(analysis: str) -> list[Row]:
    """MPN-COV, which the paper looks at, and SEB beside it, in ResNet-50."""
    return [
        Row(data, "resnet50", method, head, printed=TABLE_3["resnet50"][method][place], core=True, analyses=(analysis,))
        for place, data in enumerate(FINE_GRAINED)
        for head, method in METHODS.items()
    ]


def spectrum_rows(setup: Setup) -> list[Row]:
    """Figure 6."""
    return _rows("spectrum")


def subset_rows(setup: Setup) -> list[Row]:
    """Table 2."""
    return _rows("subset-accuracy")


def similarity_rows(setup: Setup) -> list[Row]:
    """Table 1."""
    return _rows("similarity")


def _networks(setup: Setup, rows: Sequence[Row], analysis: str) -> list[str]:
    """A note on the networks that were looked at."""
    said = []
    for row in rows:
        if (found := setup.analysis(row, analysis)) is None:
            continue
        record = found[0]
        rate, epochs = record["config"]["optimiser"]["classifier_lr_scale"], record["config"]["epochs"]
        accuracy = f"{record['scores'][row.metric]:.1f} % after {counted(epochs, 'epoch')}"
        text = f"{data_title(setup, row.data)}, {row.method}: ×{rate:g}, {accuracy}"
        best = setup.chosen_rate(row)
        said.append(text if best in (None, rate) else f"{text} (its best rate is ×{best:g})")
    return [f"The networks, with the rate of the classifier and their test accuracy: {'; '.join(said)}."] if said else []


# --- Figure 6 -------------------------------------------------------------------------------------------------------


def spectrum_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """Condition number, effective rank and energy of the covariances of the test images; the histogram as a figure."""
    csv: list[dict[str, object]] = []
    tables: list[TableData] = []
    drawn: dict[str, dict[str, Any]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        lines = []
        for row in rows:
            if row.data != data:
                continue
            found = setup.analysis(row, "spectrum")
            low, high = FIGURE_6[str(row.head)]
            printed = f"10^{math.log10(low):.0f} to 10^{math.log10(high):.0f}"
            if found is None:
                lines.append([Cell(row.method), Cell(printed), *[Cell(NOT_RUN)] * 5])
                csv.append(_spectrum_row(setup, row, None, None, low, high))
                continue
            record, values = found
            drawn.setdefault(data_title(setup, data), {})[row.method] = values
            condition = values["log10_condition"]
            lines.append(
                [
                    Cell(row.method),
                    Cell(printed),
                    Cell(f"10^{condition[2]:.1f} (10^{condition[0]:.1f} to 10^{condition[4]:.1f})"),
                    Cell(f"{values['effective_rank'][2]:.1f}"),
                    Cell(f"{values['energy_last'][2]:.1e}"),
                    Cell(f"{values['lambda_1'][2]:.3g}"),
                    Cell(f"{values['s'][2]:.3g}"),
                ]
            )
            csv.append(_spectrum_row(setup, row, values, record, low, high))
        heads = ["", "paper: κ(P)", "ours: κ(P)", "effective rank", "energy of the last", "λ₁", "s"]
        tables.append(TableData(f"{data_title(setup, data)}: medians over test images (5 % to 95 %)", heads, lines))
    notes = [
        "κ(P) = λ₁/λ_d; the effective rank is the exponential of the entropy of the eigenvalues' shares; the last ones are "
        "50 of 256 (elsewhere in proportion), of which the paper says that their energy is often below "
        f"{ENERGY_OF_LAST:g}; s = ‖QSᵀ‖.",
        f"The paper sees a peak of small eigenvalues at 2^-18 = {PEAK:.1e}, the dotted line of the figure.",
        *_networks(setup, rows, "spectrum"),
    ]

    def draw(path: Path) -> None:
        from studies.study_plot import draw_histograms

        draw_histograms(drawn, PEAK, path)

    return Findings(csv, tables, notes, draw if drawn else None)


def _spectrum_row(
    setup: Setup, row: Row, values: dict[str, Any] | None, record: Record | None, low: float, high: float
) -> dict[str, object]:
    found: dict[str, object] = {
        "data": TITLES[row.data],
        "method": row.method,
        "scale": setup.options.scale,
        "run": record["name"] if record else NOT_RUN,
        "paper_condition_low": low,
        "paper_condition_high": high,
        "images": values["images"] if values else "",
    }
    for measure in ("log10_condition", "effective_rank", "energy_last", "lambda_1", "s", "q_norm"):
        for place, share in enumerate(("5", "25", "50", "75", "95")):
            found[f"{measure}_{share}"] = values[measure][place] if values else ""
    return found | where_run(record)


# --- Table 2 --------------------------------------------------------------------------------------------------------


def subset_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """Accuracy with parts of the spectrum in inference; the paper's subsets first, then what lies between them."""
    names = subsets_of(setup.channels)
    printed = {ours: TABLE_2[theirs] for ours, theirs in paper_subsets(setup.channels).items()}
    csv: list[dict[str, object]] = []
    tables: list[TableData] = []
    drawn: dict[str, dict[str, list[float]]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        place = FINE_GRAINED.index(data)
        found = {row.method: setup.analysis(row, "subset-accuracy") for row in rows if row.data == data}
        lines = []
        for name in names:
            number = printed.get(name)
            cells = [Cell(name), Cell(f"{number[place]:.1f}" if number else "–")]
            for method, analysis in found.items():
                score = analysis[1].get(name) if analysis else None
                cells.append(Cell(f"{score['top1']:.1f}" if score else NOT_RUN))
                csv.append(
                    {
                        "data": TITLES[data],
                        "method": method,
                        "subset": name,
                        "scale": setup.options.scale,
                        "paper": number[place] if number and method == "MPN-COV" else "",
                        "top1": score["top1"] if score else NOT_RUN,
                        "top5": score["top5"] if score else "",
                        "loss": score["loss"] if score else "",
                        "run": analysis[0]["name"] if analysis else "",
                        **where_run(analysis[0] if analysis else None),
                    }
                )
            lines.append(cells)
        heads = ["eigenvalues", "paper, MPN-COV", *(f"ours, {method}" for method in found)]
        tables.append(TableData(f"{data_title(setup, data)}, test accuracy in %, in inference only", heads, lines))
        if any(found.values()):
            panel = {"paper, MPN-COV": [_or_nan(printed.get(n), place) for n in names]}
            for method, analysis in found.items():
                if analysis:
                    panel[f"ours, {method}"] = [analysis[1].get(n, {}).get("top1", float("nan")) for n in names]
            drawn[data_title(setup, data)] = panel
    notes = [
        "The first seed's network of each method; all eigenvalues were there in training. 'last:50' alone has no λ₁.",
        *_networks(setup, rows, "subset-accuracy"),
    ]

    def draw(path: Path) -> None:
        from studies.study_plot import draw_subsets

        draw_subsets(drawn, names, path)

    return Findings(csv, tables, notes, draw if drawn else None)


def _or_nan(values: tuple[float, ...] | None, place: int) -> float:
    return float("nan") if values is None else values[place]


# --- Tables 1 and 10 ------------------------------------------------------------------------------------------------

CUTS = ("exact", "projector")


def _mean(rows: list[dict[str, Any]], rule: str, cut: str, subset: str, collapse: str, measure: str) -> float | None:
    keys = {"rule": rule, "cut": cut, "subset": subset, "collapse": collapse, "measure": measure}
    values = [row["mean"] for row in rows if all(row[key] == value for key, value in keys.items())]
    return values[0] if values else None


def similarity_tables(
    setup: Setup, row: Row, printed: dict[tuple[str, str], tuple[float, float]]
) -> tuple[list[dict[str, object]], TableData]:
    """Correlation and mean absolute error of the maps of large and small eigenvalues, for one network.

    Args:
        setup: of the study.
        row: whose first network was analysed.
        printed: (rule, large or small) to the paper's correlation and error.
    """
    found = setup.analysis(row, "similarity")
    measured: list[dict[str, Any]] = found[1]["rows"] if found else []
    large, small = large_and_small(setup.channels)
    csv: list[dict[str, object]] = []
    lines = []
    for (rule, part), numbers in printed.items():
        subset = large if part == "large" else small
        cells = [Cell(f"{rule}, {part} ({subset})")]
        for measure, number in zip(("corr", "mae"), numbers, strict=True):
            form = ".2f" if measure == "corr" else ".1e"
            cells.append(Cell(f"{number:{form}}" if row.head == "mpncov" else "–"))
            for cut in CUTS:
                value = _mean(measured, rule, cut, subset, "abs-max", measure)
                cells.append(Cell(NOT_RUN if not found else "undefined" if value is None else f"{value:{form}}"))
            for cut in CUTS:
                for collapse in ("abs-max", "signed-sum"):
                    value = _mean(measured, rule, cut, subset, collapse, measure)
                    csv.append(
                        {
                            "data": TITLES[row.data],
                            "method": row.method,
                            "rule": rule,
                            "eigenvalues": part,
                            "subset": subset,
                            "measure": measure,
                            "cut": cut,
                            "collapse": collapse,
                            "scale": setup.options.scale,
                            "paper": number if row.head == "mpncov" else "",
                            "ours": NOT_RUN if not found else "undefined" if value is None else value,
                            "images": found[1]["images"] if found else "",
                            "run": found[0]["name"] if found else "",
                            **where_run(found[0] if found else None),
                        }
                    )
        lines.append(cells)
    heads = ["maps beside those of all", "Corr: paper", "exact cut", "projector", "MAE: paper", "exact cut", "projector"]
    return csv, TableData(f"{data_title(setup, row.data)}, {row.method}", heads, lines)


SIMILARITY_NOTE = (
    "Our Corr is Pearson's, in [−1, 1]; the paper says that its own is normalised to [0, 1] and not how: (1 + Corr)/2 "
    "would be one way. Colours are put together by the largest absolute value (the CSV file also has signed sums). Of the "
    "two readings of a cut spectrum, exact lets the subspaces turn and projector holds them."
)


def similarity_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """Table 1."""
    csv: list[dict[str, object]] = []
    tables = []
    for row in rows:
        place = FINE_GRAINED.index(row.data)
        printed = {
            (rule, part): (numbers[0][place], numbers[1][place])
            for rule, parts in TABLE_1.items()
            for part, numbers in parts.items()
        }
        more, table = similarity_tables(setup, row, printed)
        csv += more
        tables.append(table)
    notes = [SIMILARITY_NOTE, *_networks(setup, rows, "similarity")]
    return Findings(csv, tables, notes, _similarity_picture(csv))


def imagenet_similarity(setup: Setup, row: Row) -> tuple[list[dict[str, object]], TableData]:
    """Table 10."""
    return similarity_tables(setup, row, {("vanilla", part): numbers for part, numbers in TABLE_10.items()})


def _similarity_picture(csv: list[dict[str, object]]) -> Any:
    chosen = [row for row in csv if (row["measure"], row["collapse"]) == ("corr", "abs-max") and row["method"] == "MPN-COV"]
    if not any(isinstance(row["ours"], float) for row in chosen):
        return None

    def draw(path: Path) -> None:
        from studies.study_plot import Dots, draw_dots

        panels: dict[str, list[Dots]] = {}
        for row in chosen:
            ours = {f"ours, {row['cut']} cut": [row["ours"]]} if isinstance(row["ours"], float) else {}
            panel = panels.setdefault(f"{row['data']}{' (drawn)' * (row['scale'] == 'smoke')}", [])
            label = f"{row['rule']}, {row['eigenvalues']}"
            same = next((dots for dots in panel if dots.label == label), None)
            if same is None:
                panel.append(Dots(label, float(str(row["paper"])), ours))  # type: ignore[arg-type]
            else:
                same.ours.update(ours)  # type: ignore[arg-type]
        draw_dots(panels, "correlation with the map of all eigenvalues, MPN-COV", path)

    return draw
