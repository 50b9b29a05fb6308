"""``eigengrain report``: one page about a training: its accuracy, what the model gets wrong, and how far to trust it."""

import io
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eigengrain import names, output
from eigengrain.cli.evaluate import check_checkpoint, check_data_options
from eigengrain.data.datasets.registry import list_datasets
from eigengrain.errors import ArgumentError
from eigengrain.options import as_words, check, setting
from eigengrain.pages import Cell, TableData, percent
from eigengrain.text import describe_accuracy, few, printable, wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image
    from torch import Tensor

    from eigengrain.data import ImageSet
    from eigengrain.data.check import Problem
    from eigengrain.training.config import Train
    from eigengrain.training.run_folder import TrainedModel

#: classes up to which the confusion matrix is a table of numbers; more are a picture
MOST_NUMBERS = 15
#: pairs of classes that are confused, and pictures of each kind for one pair
PAIRS, EXAMPLES = 6, 3
#: rows of the table of data problems
PROBLEMS = 20
#: side of a small picture, in pixels
SIDE = 224
#: colours of Okabe and Ito, which remain distinct with any colour vision, by the first and the last part of a column
COLOURS = {"train": "#0072B2", "val": "#D55E00", "test": "#009E73"}
COLOURS |= {"backbone": "#0072B2", "head": "#D55E00", "classifier": "#009E73"}


@dataclass(frozen=True)
class Report:
    """Which training, and what the page shows.

    Args:
        checkpoint: folder of 'eigengrain train', also of a stopped run, or of save_pretrained together with --data.
        data: name of the data set; that of the training by default.
        root: folder of the data set; that of the training by default.
        data_options: more keyword arguments of the data set, for --data.
        split: images that are classified: test, val or train.
        mistakes: number of the worst mistakes that are shown with their maps.
        check_images: look for unreadable images, and for images that occur twice; this reads all of them.
        batch_size: number of images per batch.
        workers: processes that read images, at most one per core.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: HTML file; report.html in the folder of the run by default.
    """

    checkpoint: str = ""
    data: str | None = setting(None, offers=list_datasets)
    root: str | None = None
    data_options: dict[str, Any] = setting({})
    split: str = setting("test", choices=names.SPLITS)
    mistakes: int = setting(12, least=0)
    check_images: bool = True
    batch_size: int = setting(32, least=1)
    workers: int = setting(4, least=0)
    device: str = setting("auto", offers=names.DEVICES)
    out: str | None = None

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        check(self)
        check_data_options(self.data, self.data_options)


def run(config: Report) -> None:
    """Classify the images, write the page, print its headline."""
    from eigengrain.files import writable
    from eigengrain.training.run_folder import open_run

    trained = open_run(config.checkpoint)
    folder = trained.folder or Path(config.checkpoint)
    out = writable(config.out or folder / "report.html")
    measured = measure(trained, config)
    out.write_text(render_page(folder, trained, measured, config), encoding="utf-8", errors="replace")
    output.say(f"{describe_accuracy(measured.right, len(measured.labels))}; report: {out}")
    output.result({**measured.summary(), "file": out}, [out])


def report_training(config: "Train", finished: bool) -> Path:
    """Write ``report.html`` of a training that has just ended; if it was stopped, without the images, which take time."""
    from eigengrain.files import writable
    from eigengrain.training.run_folder import open_run

    folder = Path(config.out)
    out = writable(folder / "report.html")
    size, workers = max(config.batch_size, 32), config.workers
    options = Report(config.out, batch_size=size, workers=workers, device=config.device, check_images=config.check_images)
    trained = open_run(folder) if finished else None
    measured = measure(trained, options) if trained is not None else None
    out.write_text(render_page(folder, trained, measured, options), encoding="utf-8", errors="replace")
    return out


# --- numbers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """The scores of a model for the images of a data set, and the temperature of its probabilities."""

    dataset: "ImageSet"
    logits: "Tensor"  # (n, classes), float64
    labels: "Tensor"  # (n,)
    temperature: float
    fitted_on: int  # validation images from which the temperature is; 0 for a temperature of 1

    @property
    def probabilities(self) -> "Tensor":
        return (self.logits / self.temperature).softmax(-1)

    @property
    def answers(self) -> "Tensor":
        return self.logits.argmax(-1)

    @property
    def right(self) -> int:
        return int((self.answers == self.labels).sum())

    @property
    def confusion(self) -> "Tensor":
        """Number of images by true class (row) and answer (column)."""
        import torch

        classes = self.logits.shape[1]
        return torch.bincount(self.labels * classes + self.answers, minlength=classes**2).view(classes, classes)

    def calibration_errors(self) -> tuple[float, float]:
        """Expected calibration error of the plain scores and with the temperature."""
        from eigengrain.training.calibration import expected_calibration_error

        return (
            expected_calibration_error(self.logits.softmax(-1), self.labels),
            expected_calibration_error(self.probabilities, self.labels),
        )

    def summary(self) -> dict[str, Any]:
        """The numbers of the page for ``--json``."""
        before, after = self.calibration_errors()
        samples = len(self.labels)
        return {
            "samples": samples,
            "top1": 100 * self.right / samples,
            "interval": [100 * bound for bound in wilson_interval(self.right, samples)],
            "temperature": self.temperature,
            "calibration_error": before,
            "calibration_error_with_temperature": after,
            "classes": [row._asdict() for row in class_rows(self.confusion, self.dataset.classes)],
        }


def measure(trained: "TrainedModel", config: Report) -> Measured:
    """Classify the images of a split; a model that was not calibrated yet is calibrated on its validation images."""
    from eigengrain.environment import pick_device
    from eigengrain.training.calibration import fit_temperature

    trained.model.to(pick_device(config.device))
    options: dict[str, Any] = {"name": config.data, "root": config.root, "options": config.data_options}
    dataset = trained.dataset(config.split, **options)
    logits, labels = _classify(trained, dataset, config)
    calibration = trained.model.calibration
    validation = None if config.data is not None else _validation_images(trained, config.root)
    if calibration is not None:
        temperature, fitted_on = trained.model.temperature, len(validation or ()) or 1
    elif validation is not None:
        temperature, fitted_on = fit_temperature(*_classify(trained, validation, config)), len(validation)
    else:
        temperature, fitted_on = 1.0, 0
    return Measured(dataset, logits, labels, temperature, fitted_on)


def _validation_images(trained: "TrainedModel", root: str | None) -> "ImageSet | None":
    try:
        return trained.dataset("val", root=root)
    except ArgumentError as error:
        if error.argument != "split":
            raise
        return None  # the training had none


def _classify(trained: "TrainedModel", dataset: "ImageSet", config: Report) -> "tuple[Tensor, Tensor]":
    from eigengrain.data import make_loader
    from eigengrain.progress import progress_bar
    from eigengrain.training.calibration import collect

    loader = make_loader(dataset, config.batch_size, train=False, workers=config.workers)
    with progress_bar() as bar:
        task = bar.add_task(f"report: {dataset.split} images", total=len(loader))
        return collect(trained.model, loader, each=lambda: bar.advance(task), **trained.precision)[:2]


class ClassRow(NamedTuple):
    """Precision and recall of one class; NaN where they are not defined."""

    number: int  # from 1
    name: str
    images: int
    recall: float  # share of its images that are found
    precision: float  # share of the answers with this class that are right
    f1: float  # harmonic mean of the two
    taken_for: str  # the most frequent wrong answer
    times: int


def class_rows(confusion: "Tensor", classes: Sequence[str]) -> list[ClassRow]:
    """One row per class, the worst (smallest F1) first; classes without images are last."""
    import torch

    right, images, answers = confusion.diag().double(), confusion.sum(1).double(), confusion.sum(0).double()
    recall, precision, f1 = right / images, right / answers, 2 * right / (images + answers)
    wrong = confusion - torch.diag(confusion.diag())
    times, other = wrong.max(1)
    rows = [
        ClassRow(
            number=k + 1,
            name=name,
            images=int(images[k]),
            recall=float(recall[k]),
            precision=float(precision[k]),
            f1=float(f1[k]) if images[k] else math.nan,
            taken_for=classes[int(other[k])] if times[k] else "",
            times=int(times[k]),
        )
        for k, name in enumerate(classes)
    ]
    return sorted(rows, key=lambda row: (math.isnan(row.f1), row.f1, row.recall))


def confused_pairs(confusion: "Tensor", count: int) -> list[tuple[int, int]]:
    """The most frequent (true class, answer) that are wrong, by the number of images."""
    wrong = confusion.clone().fill_diagonal_(0)
    order = wrong.flatten().argsort(descending=True, stable=True)[:count].tolist()
    classes = len(confusion)
    return [(place // classes, place % classes) for place in order if wrong.flatten()[place] > 0]


# --- the page -------------------------------------------------------------------------------------------------------


def render_page(folder: Path, trained: "TrainedModel | None", measured: Measured | None, config: Report) -> str:
    """The page as HTML, with what is there: a run that was stopped has curves, and possibly no model yet."""
    from eigengrain.environment import describe, pick_device
    from eigengrain.pages import render
    from eigengrain.training.run_folder import RESULTS
    from eigengrain.training.telemetry import read_summary

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
        "data": data_facts(trained, measured, config) if trained is not None and measured is not None else None,
    }
    if measured is not None and trained is not None:
        values |= _measured_values(trained, measured, config, drawing)
    environment = results.get("environment") or describe(pick_device(config.device))
    return render("report.html", title=printable(f"Report on {folder.resolve().name}"), environment=environment, **values)


def _measured_values(trained: "TrainedModel", measured: Measured, config: Report, drawing: bool) -> dict[str, Any]:
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
        "mistakes": worst_mistakes(trained, measured, config.mistakes),
        "errors": (before, after),
        "confidence": float(measured.probabilities.max(-1).values.mean()),
        "reliability": draw_reliability(measured) if drawing else None,
        "calibration": trained.model.calibration,
    }


def _read_results(path: Path) -> dict[str, Any]:
    from eigengrain.files import read_json

    values = read_json(path) if path.is_file() else {}
    return values if isinstance(values, dict) else {}


def _read_options(folder: Path) -> "Train | None":
    from eigengrain.training.config import from_mapping
    from eigengrain.training.run_folder import ARGUMENTS
    from eigengrain.yaml_files import read_mapping

    try:
        return from_mapping(read_mapping(folder / ARGUMENTS))
    except ValueError:
        return None


def train_command(options: "Train") -> str:
    """The command that trains the model: the recipe and all options that differ from it."""
    from eigengrain.training.config import Train, load_recipe

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


class Photo(NamedTuple):
    """A small picture (JPEG), a line about it, and its map if there is one."""

    jpeg: bytes
    text: str
    file: str
    map: bytes | None = None


def pair_examples(measured: Measured, confusion: "Tensor") -> list[dict[str, Any]]:
    """The most confused pairs: images that are mistaken, beside images of the class for which they are taken."""
    import torch

    confidence = measured.probabilities.max(-1).values
    pairs = []
    for true, answer in confused_pairs(confusion, PAIRS):

        def most_confident(label: int, answer: int = answer) -> list[int]:
            chosen = torch.nonzero((measured.labels == label) & (measured.answers == answer))[:, 0]
            return chosen[confidence[chosen].argsort(descending=True, stable=True)][:EXAMPLES].tolist()

        pairs.append(
            {
                "true": measured.dataset.classes[true],
                "answer": measured.dataset.classes[answer],
                "times": int(confusion[true, answer]),
                "images": int(confusion[true].sum()),
                "mistaken": [_photo(measured, index) for index in most_confident(true)],
                "others": [_photo(measured, index) for index in most_confident(answer)],
            }
        )
    return pairs


def worst_mistakes(trained: "TrainedModel", measured: Measured, count: int) -> list[dict[str, Any]]:
    """The wrong answers with the highest probability, with the map of the answer if captum and matplotlib are installed."""
    import torch

    probabilities, classes = measured.probabilities, measured.dataset.classes
    wrong = torch.nonzero(measured.answers != measured.labels)[:, 0]
    chosen = wrong[probabilities[wrong].max(-1).values.argsort(descending=True, stable=True)][:count].tolist()
    maps: list[bytes | None] = [None] * len(chosen)
    if chosen and has_maps(trained) and find_spec("captum") and find_spec("matplotlib"):
        maps = [*draw_maps(trained, measured.dataset, chosen, measured.answers[chosen])]
    return [
        {
            "photo": _photo(measured, index)._replace(map=map),
            "true": classes[int(measured.labels[index])],
            "answer": classes[int(measured.answers[index])],
            "probability": float(probabilities[index].max()),
            "probability_of_true": float(probabilities[index, measured.labels[index]]),
        }
        for index, map in zip(chosen, maps, strict=True)
    ]


def has_maps(trained: "TrainedModel") -> bool:
    """Whether a smooth map shows places of the image; a head that pools tokens of no place has none."""
    from eigengrain.heads import TransformerHead

    return not isinstance(trained.model.head, TransformerHead)


def draw_maps(trained: "TrainedModel", dataset: "ImageSet", indices: Sequence[int], target: "Tensor") -> Iterable[bytes]:
    """Smooth maps of a class for some images, over the images as the model sees them."""
    import torch
    from PIL import Image

    from eigengrain.explain.plots import brightest, overlay, rgb_pixels
    from eigengrain.explain.smooth import smooth_maps

    model = trained.model
    device, described = next(model.parameters()).device, model.pretrained_cfg
    for index, label in zip(indices, target.tolist(), strict=True):
        images = torch.stack([dataset[index][0]])
        map = smooth_maps(model, images.to(device), label)[0].cpu()
        pixels = rgb_pixels(images, described["mean"], described["std"])[0]
        yield _jpeg(Image.fromarray(overlay(pixels, map, brightest(map))))


def _photo(measured: Measured, index: int) -> Photo:
    path = measured.dataset.path(index)
    share = float(measured.probabilities[index].max())
    name = printable(path.name) if path is not None else f"{measured.dataset.split} {index}"
    return Photo(_jpeg(measured.dataset.image(index)), percent(share), name)


def _jpeg(image: "Image") -> bytes:
    """A small copy of an image."""
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    image.save(stream := io.BytesIO(), "JPEG", quality=82)
    return stream.getvalue()


def data_facts(trained: "TrainedModel", measured: Measured, config: Report) -> dict[str, Any]:
    """Numbers of images of the splits, hints about classes, and images that spoil a result."""
    from eigengrain.data import check as data_check
    from eigengrain.training.run_folder import UNREADABLE

    splits = [measured.dataset]
    if trained.config is not None and config.data is None:
        train, test = (trained.dataset(split, root=config.root) for split in ("train", "test"))
        splits = [each for each in (train, _validation_images(trained, config.root), test) if each is not None]
    counts = [(each.split, each.class_counts()) for each in splits]
    lines = [[Cell(str(text)) for text in (name, sum(each), min(each), max(each))] for name, each in counts]
    empty = [
        name for name, count in zip(measured.dataset.classes, measured.dataset.class_counts(), strict=True) if not count
    ]
    hints = [*splits[0].notes, data_check.describe_imbalance(splits[0])]
    hints += [f"without {measured.dataset.split} images, so not measured: {few(empty, 10)}"] if empty else []
    files = [each for each in splits if each.paths is not None]
    checked = config.check_images and bool(files)
    problems = data_check.find_problems(files, config.workers) if checked else []
    listing = (trained.folder or Path()) / UNREADABLE
    if trained.folder is not None and listing.is_file():  # images that the training left out
        parts = [line.partition("\t") for line in listing.read_text(encoding="utf-8", errors="replace").splitlines()]
        problems = [
            data_check.Problem("left out", None, path, "unreadable", reason) for path, _, reason in parts
        ] + problems
    shared = sum(each.kind == "duplicate" and each.original_split != each.split for each in problems)
    return {
        "table": TableData("Numbers of images", ["split", "images", "smallest class", "largest class"], lines),
        "hints": [printable(hint) for hint in hints if hint],
        "checked": checked,
        "problems": len(problems),
        "shared": shared,
        "listed": _problem_table(problems[:PROBLEMS]) if problems else None,
    }


def _problem_table(problems: "Sequence[Problem]") -> TableData:
    lines = [[Cell(printable(text)) for text in (p.path, p.kind, p.reason, p.split)] for p in problems]
    return TableData("Problems of the images", ["image", "problem", "details", "split"], lines, words=[1, 2, 3])


# --- charts ---------------------------------------------------------------------------------------------------------


def _chart(draw: "Callable[[Axes], object]", size: tuple[float, float] = (4.4, 3.0)) -> bytes:
    """A chart as PNG."""
    from matplotlib.figure import Figure

    from eigengrain.plotting import style

    with style():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(stream := io.BytesIO(), dpi=160)
    return stream.getvalue()


def draw_curves(epochs: Sequence[Mapping[str, float]]) -> list[tuple[bytes, str]]:
    """Charts of loss, accuracy and learning rate against the epoch, each with its description."""
    charts = (
        ("Loss", {"train_loss": "training", "val_loss": "validation", "test_loss": "test"}, "linear"),
        ("Accuracy, %", {"train_top1": "training", "val_top1": "validation", "test_top1": "test"}, "linear"),
        ("Learning rate", {"lr_backbone": "backbone", "lr_head": "head", "lr_classifier": "classifier"}, "log"),
    )
    pictures = []
    for title, columns, scale in charts:
        lines: dict[tuple[tuple[float, float], ...], list[str]] = {}  # columns with the same values are one line
        for column in columns:
            points = tuple((row["epoch"], row[column]) for row in epochs if column in row)
            if scale == "log":
                points = tuple(point for point in points if point[1] > 0)
            if points:
                lines.setdefault(points, []).append(column)

        def draw(axes: "Axes") -> None:
            from matplotlib.ticker import MaxNLocator

            for points, equal in lines.items():  # noqa: B023  (drawn at once)
                colour = COLOURS[next(part for part in equal[0].split("_") if part in COLOURS)]
                label = ", ".join(columns[column] for column in equal)  # noqa: B023
                axes.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=2.5, linewidth=1.3)
            axes.set(title=title, xlabel="epoch", yscale=scale)  # noqa: B023
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.legend(frameon=False)

        if lines:
            pictures.append((_chart(draw), f"{title} after each epoch"))
    return pictures


def draw_confusion(confusion: "Tensor") -> bytes:
    """The confusion matrix as a picture: the share of each true class (row) that gets each answer (column)."""
    shares = (confusion.double() / confusion.sum(1, keepdim=True).clamp_min(1)).numpy()
    classes = len(confusion)

    def draw(axes: "Axes") -> None:
        from matplotlib.colors import PowerNorm

        extent = (0.5, classes + 0.5, classes + 0.5, 0.5)
        picture = axes.imshow(
            shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest", extent=extent, aspect="equal"
        )
        axes.set(xlabel="number of the answer", ylabel="number of the true class")
        axes.grid(False)
        bar = axes.figure.colorbar(picture, ax=axes, shrink=0.7, ticks=[0, 0.05, 0.25, 0.5, 1])
        bar.ax.set_yticklabels(["0 %", "5 %", "25 %", "50 %", "100 %"])

    return _chart(draw, (7.5, 6.4))


def draw_reliability(measured: Measured) -> bytes:
    """Reliability diagram: the share of right answers against their probability, before and after the temperature."""
    from eigengrain.training.calibration import reliability

    def draw(axes: "Axes") -> None:
        series = {"plain scores": measured.logits.softmax(-1)}
        series |= {"with temperature": measured.probabilities} if measured.fitted_on else {}
        axes.plot([0, 100], [0, 100], color="#999999", linewidth=1, linestyle="--", label="as it should be")
        for (label, probabilities), colour in zip(series.items(), (COLOURS["val"], COLOURS["train"]), strict=False):
            bins = reliability(probabilities, measured.labels)
            x, y = [100 * row[0] for row in bins], [100 * row[1] for row in bins]
            axes.plot(x, y, color=colour, linewidth=1.3, label=label)
            axes.scatter(x, y, s=[6 + 90 * row[2] / len(measured.labels) for row in bins], color=colour)
        axes.set(xlim=(0, 102), ylim=(0, 102), xlabel="probability of the answer, %", ylabel="right answers, %")
        axes.set_title("Larger dots stand for more images")
        axes.legend(frameon=False)

    return _chart(draw, (4.4, 3.6))
