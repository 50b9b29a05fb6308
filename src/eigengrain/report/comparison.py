"""Heads that were trained alike, compared on one page: accuracy, curves, spectra, and images where they differ."""

import io
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eigengrain.data import make_loader
from eigengrain.environment import pick_device
from eigengrain.functional import covariance, eigh
from eigengrain.functional.scaling_eigen_branch import qs_and_slope
from eigengrain.heads import CovarianceHead
from eigengrain.models import CovarianceNet
from eigengrain.models.model import eval_mode
from eigengrain.pages import Cell, TableData, percent, render
from eigengrain.text import counted
from eigengrain.training.config import Train
from eigengrain.training.run_folder import open_run
from eigengrain.training.sources import Sources
from eigengrain.training.telemetry import read_summary, spectrum_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: test images on the page, at most
EXAMPLES = 10
#: the colours of Okabe and Ito, which remain distinct with any colour vision, each with a marker for print
_STYLES = (
    *(("#000000", "o"), ("#E69F00", "^"), ("#0072B2", "s"), ("#D55E00", "D")),
    *(("#009E73", "v"), ("#CC79A7", "P"), ("#56B4E9", "X")),
)

Row = dict[str, Any]


class Spectra(NamedTuple):
    """Eigenvalues (n, d) of the covariances of n images, descending; factors s (n,) of the SEB; predicted classes (n,)."""

    eigenvalues: Tensor
    factor: Tensor | None
    predictions: Tensor


def measure_spectra(model: CovarianceNet, batches: Iterable[tuple[Tensor, Tensor]]) -> Spectra:
    """Pass batches of (images, labels) through a model in eval mode. A head without a covariance is given one here."""
    device = next(model.parameters()).device
    spectra, predictions = [], []
    with eval_mode(model), torch.inference_mode():
        for images, _ in batches:
            features = model.forward_features(images.to(device))
            spectra.append(eigh(covariance(model.head.reduce(features), dtype=torch.float64)).values.cpu())
            predictions.append(model.forward_head(features).argmax(1).cpu())
    values, head = torch.cat(spectra), model.head
    scaled = isinstance(head, CovarianceHead) and head.seb and head.factor == "qs"
    return Spectra(values, qs_and_slope(values)[0] if scaled else None, torch.cat(predictions))


@dataclass(frozen=True)
class Finished:
    """A finished run: its options, the rows of its summary.csv, and what its model computes for the test images."""

    config: Train
    epochs: list[dict[str, float]]
    measured: Spectra

    @property
    def head(self) -> str:
        return self.config.model.head

    def curve(self, column: str) -> tuple[list[int], list[float]]:
        """Epochs and values of a column of summary.csv."""
        rows = [row for row in self.epochs if column in row]
        return [int(row["epoch"]) for row in rows], [row[column] for row in rows]

    def row(self, images: int) -> Row:
        """The row of ``demo.csv``; ``images`` is the number of training images per epoch."""
        last = self.epochs[-1]
        speeds = [row["images_per_second"] for row in self.epochs]
        spectrum = spectrum_row(self.measured.eigenvalues, self.measured.factor)
        return {
            "head": self.head,
            "seed": self.config.seed,
            "epochs": self.config.epochs,
            **{column: last[column] for column in ("test_top1", "test_loss", "train_loss")},
            "train_seconds": round(sum(images / speed for speed in speeds), 1),
            "images_per_second": round(statistics.median(speeds), 1),
            **{column: spectrum[column] for column in ("lambda_1", "log10_condition", "energy_last", "q_norm")},
            "s": spectrum.get("s", ""),
        }


def open_finished(run: Train, sources: Sources) -> Finished:
    """Open a finished run and pass the test images through its model."""
    trained = open_run(run.out)
    sources.test.transform = trained.transform
    measured = measure_spectra(trained.model.to(pick_device(run.device)), make_loader(sources.test, 100, train=False))
    return Finished(run, read_summary(Path(run.out) / "summary.csv"), measured)


def average(rows: Sequence[Row]) -> TableData:
    """One row per head, in the order of training: means over the seeds, with the range of the accuracy."""
    columns = {
        "train_seconds": ".0f",
        "images_per_second": ".0f",
        "log10_condition": ".2f",
        "energy_last": ".1e",
        "s": ".3f",
    }
    lines = []
    for head in dict.fromkeys(row["head"] for row in rows):
        own = [row for row in rows if row["head"] == head]
        scores = [row["test_top1"] for row in own]
        spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
        cells = [head, f"{statistics.mean(scores):.1f}{spread}"]
        for column, form in columns.items():
            values = [row[column] for row in own if row[column] != ""]
            cells.append(format(statistics.mean(values), form) if values else "–")
        lines.append([Cell(text) for text in cells])
    seeds = sorted({row["seed"] for row in rows})
    many = f"mean of {len(seeds)} seeds (lowest to highest)" if len(seeds) > 1 else f"one seed ({seeds[0]})"
    heads = ["head", "test top-1, %", "seconds", "images/s", "log₁₀ κ", "last fifth", "s"]
    return TableData(f"{counted(rows[0]['epochs'], 'epoch')}, {many}", heads, lines)


@contextmanager
def _two_charts(path: Path) -> Iterator[tuple["Axes", "Axes"]]:
    """A figure with two charts at the width of a page, and the legend of the first below them."""
    from matplotlib.figure import Figure

    from eigengrain.plotting import style

    with style():
        figure = Figure(figsize=(7.4, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        yield left, right
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, dpi=200)


def draw_curves(runs: Sequence[Finished], path: Path) -> Path:
    """Draw test accuracy and losses against the epoch, one line per run; the runs of a head look alike."""
    from matplotlib.ticker import LogFormatter, MaxNLocator

    with _two_charts(path) as (left, right):
        for (head, own), (colour, marker) in zip(_by_head(runs).items(), cycle(_STYLES), strict=False):
            look: Row = {"color": colour, "markersize": 3.5, "linewidth": 1.2}
            for turn, run in enumerate(own):
                left.plot(*run.curve("test_top1"), marker=marker, label=None if turn else head, **look)
                right.plot(*run.curve("test_loss"), marker=marker, **look)
                right.plot(*run.curve("train_loss"), ":", marker=".", **look)
        left.set_ylim(0, 103)
        right.set_yscale("log")  # from chance to almost 0; the first epoch may be far above chance
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter(LogFormatter())  # labels only an axis that spans few powers of ten
        left.set_title("test accuracy, %")
        right.set_title("loss: test images (lines), training images (dotted)")
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return path


def draw_spectra(runs: Sequence[Finished], path: Path) -> Path:
    """Draw, for each head, the mean spectrum λ_i/λ_1 of the test images and a box of their condition numbers."""
    shares = {}  # log10 of λ_i/λ_1, by head
    for head, own in _by_head(runs).items():
        values = torch.cat([run.measured.eigenvalues for run in own])
        floor = values.shape[1] * torch.finfo(torch.float64).eps
        shares[head] = (values / values[:, :1]).clamp_min(floor).log10().numpy()
    with _two_charts(path) as (left, right):
        for (head, share), (colour, marker) in zip(shares.items(), cycle(_STYLES), strict=False):
            look: Row = {"color": colour, "marker": marker, "markersize": 3, "markevery": 8, "linewidth": 1.2}
            left.plot(range(1, share.shape[1] + 1), 10 ** share.mean(0), label=head, **look)
        left.set_yscale("log")
        left.set_xlabel("number i of the eigenvalue")
        left.set_title("eigenvalues λᵢ/λ₁, geometric mean of the test images")
        look = {"widths": 0.5, "patch_artist": True, "medianprops": {"color": "#ffffff", "linewidth": 1.4}}
        conditions = [-share[:, -1] for share in shares.values()]
        boxes = right.boxplot(conditions, tick_labels=list(shares), whis=(5, 95), showfliers=False, **look)
        for box, (colour, _) in zip(boxes["boxes"], cycle(_STYLES), strict=False):
            box.set(facecolor=colour, edgecolor="#222222")
        right.set_title("log₁₀ of the condition number, whiskers 5 % to 95 %")
    return path


def _by_head(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    return {head: [run for run in runs if run.head == head] for head in dict.fromkeys(run.head for run in runs)}


def render_page(
    runs: Sequence[Finished],
    sources: Sources,
    means: TableData,
    pictures: Sequence[Path],
    commands: Sequence[str],
    environment: dict[str, Any],
) -> str:
    """The page as HTML; ``means`` is that of :func:`average`, and ``commands`` are shown at its end."""
    test = sources.test
    return render(
        "demo.html",
        title="Covariance heads on drawn birds",
        headline=_headline(runs),
        train_images=len(sources.train),
        test_images=len(test),
        species=len(test.classes),
        seeds=list(dict.fromkeys(run.config.seed for run in runs)),
        comparison=means,
        pictures=pictures,
        classes=class_comparison(runs, test.classes, test.labels),
        tiles=_tiles(runs, sources),
        commands=commands,
        environment=environment,
    )


def _headline(runs: Sequence[Finished]) -> tuple[float, str]:
    """The highest mean accuracy, from 0 to 1, with its head; and those of the other heads in words."""
    means = {head: statistics.mean(run.epochs[-1]["test_top1"] for run in own) for head, own in _by_head(runs).items()}
    best = max(means, key=lambda head: means[head])
    others = ", ".join(f"{head} {means[head]:.1f} %" for head in means if head != best)
    text = f"of the test images are classified correctly with head {best}"
    return means[best] / 100, f"{text} ({others})" if others else text


def class_comparison(runs: Sequence[Finished], classes: Sequence[str], labels: Sequence[int]) -> TableData:
    """Share of the images of each class that each head classifies correctly (recall), the hardest class first."""
    truth, heads = torch.tensor(labels), _by_head(runs)

    def recall(own: Sequence[Finished], k: int) -> float:
        return float((torch.stack([run.measured.predictions for run in own])[:, truth == k] == k).double().mean())

    shares = {k: [recall(own, k) for own in heads.values()] for k in range(len(classes))}
    order = sorted(shares, key=lambda k: sum(shares[k]))
    rows = [[Cell(classes[k]), *(Cell(percent(share)) for share in shares[k])] for k in order]
    return TableData("Recall: share of each species that is classified correctly", ["species", *heads], rows)


def differing_images(runs: Sequence[Finished], labels: Sequence[int]) -> list[int]:
    """Test images that some heads classify correctly and others do not, for the first seed; one of each class in turn."""
    seed, turn, ranked = runs[0].config.seed, Counter[int](), []
    for index, label in enumerate(labels):
        right = {int(run.measured.predictions[index]) == label for run in runs if run.config.seed == seed}
        if len(right) == 2:
            turn[label] += 1
            ranked.append((turn[label], label, index))
    return [index for _, _, index in sorted(ranked)]


def _tiles(runs: Sequence[Finished], sources: Sources) -> list[Any]:
    """Test images where the heads differ, with their class and the predictions of each head."""
    test, seed = sources.test, runs[0].config.seed
    tiles = []
    for index in differing_images(runs, test.labels)[:EXAMPLES]:
        label = test.labels[index]
        test.image(index).save(stream := io.BytesIO(), "PNG")
        answers = {run.head: int(run.measured.predictions[index]) for run in runs if run.config.seed == seed}
        texts = {head: "right" if answer == label else test.classes[answer] for head, answer in answers.items()}
        lines = [Cell(f"{head}: {text}", bad=answers[head] != label) for head, text in texts.items()]
        tiles.append({"png": stream.getvalue(), "title": test.classes[label], "lines": lines})
    return tiles
