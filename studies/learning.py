"""How networks learn: truncated eigenvalues (Figure 1), other normalisations (Figure 4), curves (Figures 5 and 10)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from studies.accuracy import accuracy_findings
from studies.eigenvalues import SIMILARITY_NOTE, imagenet_similarity
from studies.jobs import Record
from studies.published import FINE_GRAINED, NO_CONVERGENCE_BEYOND, TABLE_3
from studies.settings import NETWORKS
from studies.study import Findings, Row, Setup, data_title, where_run

#: (epochs, values)
Curve = tuple[list[int], list[float]]

#: gradients that truncation is tried with: ours, and that of the paper's released code
GRADIENTS = {"exact": "exact gradient", "topn": "released gradient"}
#: the released scripts clip gradients at this norm
RELEASED_CLIP = 5.0


def curve(record: Record, column: str) -> Curve:
    """A column of a run's epochs, where it has a value."""
    rows = [row for row in record["epochs"] if column in row]
    return [int(row["epoch"]) for row in rows], [row[column] for row in rows]


def first_records(setup: Setup, rows: Sequence[Row], complete: bool = False) -> list[list[Record]]:
    """Of each row those of its seeds, of all rows under the fair protocol if one was run under it.

    Args:
        setup: of the study.
        rows: that are compared.
        complete: whether only runs with a test each epoch count.
    """
    for protocol in ("fair", "paper"):
        found = [_first(setup, row, protocol, complete) for row in rows]
        if any(found):
            return found
    return [[] for _ in rows]


def _first(setup: Setup, row: Row, protocol: str, complete: bool) -> list[Record]:
    for _, _, records in setup.results(row, protocol):
        found = [r for r in records if not complete or len(curve(r, "test_top1")[0]) == len(r["epochs"]) > 0]
        if found:
            return found
    return []


# --- Figure 1 -------------------------------------------------------------------------------------------------------


def truncated_counts(channels: int) -> list[int]:
    """How many of the smallest eigenvalues are truncated: up to 50 of 256.

    Example:
        >>> truncated_counts(256), truncated_counts(8)
        ([0, 10, 20, 30, 40, 50], [0, 1, 2])
    """
    return [0, 10, 20, 30, 40, 50] if channels >= 100 else list(range(channels // 5 + 2))


def truncation_rows(setup: Setup) -> list[Row]:
    """Without the smallest eigenvalues in training and test, at the rate that is best with all of them."""
    d, counts = setup.channels, truncated_counts(setup.channels)
    rows = []
    for place, data in enumerate(FINE_GRAINED):
        for gradient, words in GRADIENTS.items():
            for count in counts:
                released = gradient == "topn"
                # with nothing truncated it is the ordinary one, repaired where eigenvalues are equal: our 'pade'
                options = {"gradient": gradient if count else "pade"} if released else {}
                options |= {"subset": f"top:{d - count}"} if count else {}
                plain = not count and gradient == "exact"
                printed = TABLE_3["resnet50"]["MPN-COV"][place] if plain else None
                row = Row(data, "resnet50", f"{count} truncated, {words}", "mpncov", options, printed, core=True)
                clip = RELEASED_CLIP if released else None
                rows.append(replace(row, rate_of={}, curve=count == counts[-1], clip_grad=clip))
    return rows


def truncation_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """Accuracy against the number of truncated eigenvalues, and the curves of the largest number."""
    counts = truncated_counts(setup.channels)
    found = accuracy_findings(setup, rows)
    notes = [
        *found.notes,
        "All at the classifier rate that is best without truncation. The paper draws this figure for Aircrafts and prints "
        f"no numbers; it says that the model cannot converge beyond {NO_CONVERGENCE_BEYOND} truncated eigenvalues. Its "
        "released code sets truncated eigenvalues to the machine epsilon ε, and their slope of ½ε^-½ = 3e7 comes back to "
        f"the features; the norm of all gradients together is clipped at {RELEASED_CLIP:g} there, and so it is here. "
        "Training accuracy is not recorded; the right panel has the training loss.",
    ]

    panels: dict[str, tuple[dict[str, Curve], dict[str, Curve], dict[str, Curve]]] = {}
    for data in dict.fromkeys(row.data for row in rows):
        mine = [row for row in rows if row.data == data]
        records = dict(zip((row.method for row in mine), first_records(setup, mine), strict=True))
        lines: dict[str, Curve] = {}
        tested: dict[str, Curve] = {}
        losses: dict[str, Curve] = {}
        for words in GRADIENTS.values():
            by_count = {count: records[f"{count} truncated, {words}"] for count in counts}
            top1 = {count: [r["scores"]["test_top1"] for r in each if r["scores"]] for count, each in by_count.items()}
            means = {count: sum(each) / len(each) for count, each in top1.items() if each}
            if means:
                lines[words] = list(means), list(means.values())
            for record in by_count[counts[-1]][:1]:
                for curves, column in ((tested, "test_top1"), (losses, "train_loss")):
                    if (drawn := curve(record, column))[0]:
                        curves[words] = drawn
        if lines or losses:
            panels[data_title(setup, data)] = lines, tested, losses

    def draw(path: Path) -> None:
        from studies.study_plot import draw_truncation

        draw_truncation(panels, counts[-1], path)

    return Findings(found.rows, found.tables, notes, draw if panels else None)


# --- Figure 4 -------------------------------------------------------------------------------------------------------


def normalisation_rows(setup: Setup) -> list[Row]:
    """Powers, root and logarithm of the covariance."""
    heads: dict[str, tuple[str, dict[str, object]]] = {
        "P^0.1": ("mpncov", {"normalise": "power", "power": 0.1}),
        "P^0.3": ("mpncov", {"normalise": "power", "power": 0.3}),
        "P^0.5": ("mpncov", {}),
        "log P": ("logcov", {}),
        "e^-P": ("", {}),
    }
    rows = []
    for place, data in enumerate(FINE_GRAINED):
        for method, (head, options) in heads.items():
            root = method == "P^0.5"
            printed = TABLE_3["resnet50"]["MPN-COV"][place] if root else None
            row = Row(data, "resnet50", method, head or None, options, printed, core=True)
            rows.append(replace(row, analyses=("spectrum",) if root else ()))
    return rows


def normalisation_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """The accuracies, and what each normalisation makes of the mean spectrum of a trained network."""
    found = accuracy_findings(setup, rows)
    spectra = {
        data_title(setup, row.data): analysis[1]["mean_log10"]
        for row in rows
        if row.method == "P^0.5" and (analysis := setup.analysis(row, "spectrum"))
    }
    notes = [
        *found.notes,
        "Figure 4 prints no numbers. It draws the normalised eigenvalues; ours are of the geometric mean spectrum of the "
        "test images of MPN-COV. e^-P is drawn only: it turns the order of the eigenvalues round and is no head.",
    ]

    def draw(path: Path) -> None:
        from studies.study_plot import draw_normalisations

        draw_normalisations(spectra, path)

    return Findings(found.rows, found.tables, notes, draw if spectra else None)


# --- Figures 5 and 10 -----------------------------------------------------------------------------------------------


def curve_rows(setup: Setup) -> list[Row]:
    """The three methods of Figure 5, tested after each epoch."""
    heads = {"iSQRT-COV": "isqrt", "MPN-COV": "mpncov", "MPN-COV + SEB": "mpncov+seb"}
    return [
        replace(Row(data, "resnet50", method, head, {}, TABLE_3["resnet50"][method][place], core=True), curve=True)
        for place, data in enumerate(FINE_GRAINED)
        for method, head in heads.items()
    ]


def _curves(setup: Setup, rows: Sequence[Row], columns: dict[str, str]) -> dict[str, dict[str, dict[str, list[Curve]]]]:
    """Data set → panel → method → curves of the seeds."""
    panels: dict[str, dict[str, dict[str, list[Curve]]]] = {}
    for row, records in zip(rows, first_records(setup, rows, complete=True), strict=True):
        for column, title in columns.items() if records else ():
            panel = f"{NETWORKS[row.backbone].title}, {title}"
            lines = panels.setdefault(data_title(setup, row.data), {}).setdefault(panel, {})
            lines[row.method] = [curve(record, column) for record in records]
    return panels


def curve_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """Figure 5: test accuracy after each epoch."""
    found = accuracy_findings(setup, rows)
    panels = _curves(setup, rows, {"test_top1": "test accuracy, %"})
    notes = [*found.notes, "Figure 5 prints no numbers: those of Table 3 are given for orientation. Ours are not smoothed."]

    def draw(path: Path) -> None:
        from studies.study_plot import draw_curves

        draw_curves(panels, path)

    return Findings(found.rows, found.tables, notes, draw if panels else None)


def imagenet_findings(setup: Setup, rows: Sequence[Row]) -> Findings:
    """Table 9, Figure 10 and Table 10. The rows of the CSV file are those of Table 9."""
    found = accuracy_findings(setup, rows, digits=2)
    analysed = next(row for row in rows if row.analyses)
    more, table = imagenet_similarity(setup, analysed)
    panels = _curves(
        setup,
        [row for row in rows if row.metric == "test_top1"],
        {"train_loss": "training loss", "test_top1": "test accuracy, %"},
    )
    measured = [row for row in more if row["collapse"] == "abs-max"]
    network = setup.analysis(analysed, "similarity")
    protocol = "paper" if network is not None and network[0]["config"]["select"] == "best-test" else "fair"
    csv = [
        *found.rows,
        *(
            dict.fromkeys(found.rows[0], "")
            | {
                "data": row["data"],
                "method": f"{row['method']}, {row['rule']}, {row['eigenvalues']}, {row['cut']} cut",
                "backbone": "ResNet-50",
                "head": "mpncov",
                "metric": row["measure"],
                "scale": row["scale"],
                "paper": row["paper"],
                f"{protocol}_protocol_mean": row["ours"],
                **{name: row[name] for name in where_run(None)},
            }
            for row in measured
        ),
    ]
    notes = [
        *found.notes,
        SIMILARITY_NOTE,
        "At 224 pixels and stride 32 a covariance of 256 channels has rank 48 at most (195 at stride 16), so the 206 "
        "largest eigenvalues are all of them and their maps are those of all by identity: the paper's 1.00 says no more.",
        "The paper's top-5 of iSQRT-COV with AlexNet, 66.36, is likely a misprint: its top-1 is above that of MPN-COV, "
        "whose top-5 is 75.72.",
    ]

    def draw(path: Path) -> None:
        from studies.study_plot import draw_curves

        draw_curves(panels, path)

    return Findings(csv, [*found.tables, table], notes, draw if panels else None)
