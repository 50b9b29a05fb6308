"""The page of a report, as HTML."""

import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eigengrain.data import ImageSet
from eigengrain.data import check as data_check
from eigengrain.environment import describe, pick_device
from eigengrain.files import read_json
from eigengrain.options import as_words
from eigengrain.pages import Cell, TableData, percent, render
from eigengrain.report.charts import draw_confusion, draw_curves, draw_reliability
from eigengrain.report.examples import has_maps, pair_examples, worst_mistakes
from eigengrain.report.measured import ClassRow, Measured, class_rows, validation_images
from eigengrain.text import few, printable, wilson_interval
from eigengrain.training.config import Train, from_mapping, load_recipe
from eigengrain.training.run_folder import ARGUMENTS, RESULTS, TrainedModel, read_unreadable
from eigengrain.training.telemetry import read_summary
from eigengrain.yaml_files import read_mapping

#: classes up to which the confusion matrix is a table of numbers; more are a picture
MOST_NUMBERS = 15
#: rows of the table of data problems
PROBLEMS = 20


def render_page(
    folder: Path,
    trained: TrainedModel | None,
    measured: Measured | None,
    *,
    data: str | None = None,
    root: str | None = None,
    mistakes: int = 12,
    check_images: bool = True,
    workers: int = 4,
) -> str:
    """The page as HTML, with what is there: a run that was stopped has curves, and possibly no model yet.

    Args:
        folder: folder of the training, with its tables.
        trained: the model of the training, if there is one.
        measured: what it answers, if that was measured.
        data, root: as in :func:`measure`.
        mistakes: number of the worst mistakes that are shown.
        check_images: look for unreadable images, and for images that occur twice.
        workers: processes that read images.
    """
    drawing = find_spec("matplotlib") is not None
    summary, results = folder / "summary.csv", _read_results(folder / RESULTS)
    epochs = read_summary(summary) if summary.is_file() else []
    options = trained.config if trained is not None else _read_options(folder)
    values: dict[str, Any] = {
        "finished": bool(results),
        "results": results,
        "epochs": len(epochs),
        "options": options,
        "folder": folder,
        "model": trained.model if trained is not None else None,
        "image_size": trained.image_size if trained is not None else 0,
        "charts": draw_curves(epochs) if drawing and epochs else [],
        "drawing": drawing,
        "mapping": find_spec("captum") is not None and drawing,
        "has_maps": trained is not None and has_maps(trained),
        "command": train_command(options) if options is not None else "",
        "again": shlex.join(["eigengrain", "report", str(folder)]),
        "measured": measured,
        "data": None,
    }
    device = pick_device("auto")
    if measured is not None and trained is not None:
        device = next(trained.model.parameters()).device
        values |= _measured_values(trained, measured, mistakes, drawing)
        splits = [measured.dataset] if trained.config is None or data is not None else _splits(trained, root)
        left_out = {} if trained.folder is None else read_unreadable(trained.folder)
        values["data"] = data_facts(splits, measured.dataset, left_out, check_images, workers)
    environment = results.get("environment") or describe(device)
    return render("report.html", title=printable(f"Report on {folder.resolve().name}"), environment=environment, **values)


def _measured_values(trained: TrainedModel, measured: Measured, mistakes: int, drawing: bool) -> dict[str, Any]:
    confusion, classes = measured.confusion, measured.dataset.classes
    rows = class_rows(confusion, classes)
    before, after = measured.calibration_errors()
    samples = len(measured.labels)
    numbers = len(classes) <= MOST_NUMBERS
    return {
        "accuracy": measured.right / samples,
        "interval": wilson_interval(measured.right, samples),
        "samples": samples,
        "split": measured.dataset.split,
        "classes": class_table(rows, not numbers),
        "least_found": min((row for row in rows if row.images), key=lambda row: row.recall),
        "matrix": confusion.tolist() if numbers else None,
        "class_names": classes,
        "heat_map": draw_confusion(confusion) if drawing and not numbers else None,
        "pairs": pair_examples(measured, confusion),
        "mistakes": worst_mistakes(trained, measured, mistakes),
        "errors": (before, after),
        "confidence": float(measured.probabilities.max(-1).values.mean()),
        "reliability": draw_reliability(measured) if drawing else None,
        "calibration": trained.model.calibration,
    }


def _read_results(path: Path) -> dict[str, Any]:
    values = read_json(path) if path.is_file() else {}
    return values if isinstance(values, dict) else {}


def _read_options(folder: Path) -> Train | None:
    try:
        return from_mapping(read_mapping(folder / ARGUMENTS))
    except ValueError:
        return None


def train_command(options: Train) -> str:
    """The command that trains the model: the recipe and all options that differ from it."""
    base = load_recipe(options.recipe) if options.recipe else Train()
    recipe = ["--recipe", options.recipe] if options.recipe else []
    return shlex.join(["eigengrain", "train", *recipe, *as_words(options, skip=["recipe", "resume", "dry_run"], base=base)])


def class_table(rows: Sequence[ClassRow], numbered: bool) -> TableData:
    """Precision and recall of all classes; with the numbers that the picture of a large confusion matrix has."""
    lines = []
    for row in rows:
        other = f"{row.taken_for} ({row.times} of {row.images})" if row.times else "–"
        texts = [row.name, *map(percent, (row.recall, row.precision, row.f1)), str(row.images), other]
        lines.append([Cell(text) for text in (*texts[:5], *([str(row.number)] if numbered else []), *texts[5:])])
    heads = ["class", "recall", "precision", "F1", "images", *(["number"] if numbered else []), "most often taken for"]
    return TableData(f"Precision and recall of {len(rows)} classes", heads, lines, words=[len(heads) - 1])


def _splits(trained: TrainedModel, root: str | None) -> list[ImageSet]:
    """The data sets of a training."""
    train, test = (trained.dataset(split, root=root) for split in ("train", "test"))
    return [each for each in (train, validation_images(trained, root), test) if each is not None]


def data_facts(
    splits: Sequence[ImageSet], measured: ImageSet, left_out: Mapping[str, str], check_images: bool, workers: int
) -> dict[str, Any]:
    """Numbers of images of the splits, hints about classes, and images that spoil a result.

    ``left_out`` are the images that the training could not read, with the reason.
    """
    counts = [(each.split, each.class_counts()) for each in splits]
    lines = [[Cell(str(text)) for text in (name, sum(each), min(each), max(each))] for name, each in counts]
    empty = [name for name, count in zip(measured.classes, measured.class_counts(), strict=True) if not count]
    hints = [*splits[0].notes, data_check.describe_imbalance(splits[0])]
    hints += [f"without {measured.split} images, so not measured: {few(empty, 10)}"] if empty else []
    files = [each for each in splits if each.paths is not None]
    checked = check_images and bool(files)
    problems = data_check.find_problems(files, workers) if checked else []
    missing = [data_check.Problem("left out", None, path, "unreadable", reason) for path, reason in left_out.items()]
    problems = missing + problems
    shared = sum(each.kind == "duplicate" and each.original_split != each.split for each in problems)
    return {
        "table": TableData("Numbers of images", ["split", "images", "smallest class", "largest class"], lines),
        "hints": [printable(hint) for hint in hints if hint],
        "checked": checked,
        "problems": len(problems),
        "shared": shared,
        "listed": _problem_table(problems[:PROBLEMS]) if problems else None,
    }


def _problem_table(problems: Sequence[data_check.Problem]) -> TableData:
    lines = [[Cell(printable(text)) for text in (p.path, p.kind, p.reason, p.split)] for p in problems]
    return TableData("Problems of the images", ["image", "problem", "details", "split"], lines, words=[1, 2, 3])
