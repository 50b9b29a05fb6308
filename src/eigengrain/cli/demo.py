"""``eigengrain demo``: trains a few heads on drawn birds, compares them, and writes one page about it.

Every run goes through the loop of ``eigengrain train`` with the recipe ``plumage-demo``. The difficulty of the birds was
settled with the head ``gap`` alone, so that no other head is favoured; see ``benchmarks/plumage-difficulty.csv``.
"""

import io
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from studies.config import HEADS, Demo
from studies.report import on_terminal
from studies.spectra import Seen, look

from eigengrain import output
from eigengrain.data import build_transform, make_loader
from eigengrain.environment import describe, pick_device
from eigengrain.errors import UnknownName
from eigengrain.files import writable, write_csv
from eigengrain.heads import list_heads
from eigengrain.models import from_pretrained
from eigengrain.pages import Cell, Commands, Figure, Gallery, Heading, Part, TableData, Tile, page
from eigengrain.recipes import load_recipe
from eigengrain.text import counted
from eigengrain.training.config import Train, differences, to_mapping
from eigengrain.training.loop import train
from eigengrain.training.setup import ARGUMENTS
from eigengrain.training.signals import Interrupted
from eigengrain.training.sources import Sources, open_sources
from eigengrain.training.telemetry import read_summary, spectrum_row
from eigengrain.yaml_files import read_mapping

RECIPE = "plumage-demo"
RESULTS = "results.json"
#: test images that the page shows: the first ones, so one of each class
EXAMPLES = 10

Row = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and what its model sees in the test images.

    Args:
        config: of the run.
        epochs: rows of its summary.csv, with numbers where there are any.
        seen: spectra and answers.
    """

    config: Train
    epochs: list[dict[str, float]]
    seen: Seen

    @property
    def head(self) -> str:
        return self.config.model.head

    def curve(self, column: str) -> tuple[list[int], list[float]]:
        """Epochs and values of a column of summary.csv."""
        rows = [row for row in self.epochs if column in row]
        return [int(row["epoch"]) for row in rows], [row[column] for row in rows]

    def row(self, images: int) -> Row:
        """The run in a line of ``demo.csv``; ``images`` is how many are trained on in an epoch."""
        last = self.epochs[-1]
        speeds = [row["images_per_second"] for row in self.epochs]
        spectrum = spectrum_row(self.seen.eigenvalues, self.seen.factor)
        return {
            "head": self.head,
            "seed": self.config.seed,
            "epochs": self.config.epochs,
            "test_top1": last["test_top1"],
            "test_loss": last["test_loss"],
            "train_loss": last["train_loss"],
            "train_seconds": round(sum(images / speed for speed in speeds), 1),
            "images_per_second": round(statistics.median(speeds), 1),
            "lambda_1": spectrum["lambda_1"],
            "log10_condition": spectrum["log10_condition"],
            "energy_last": spectrum["energy_last"],
            "q_norm": spectrum["q_norm"],
            "s": spectrum.get("s", ""),
        }


def plan(demo: Demo) -> list[Train]:
    """The runs, head by head.

    Raises:
        ValueError: for an unknown head.
    """
    for head in demo.heads:
        if head not in list_heads():
            raise UnknownName("head", head, list_heads())
    common: dict[str, Any] = {"device": demo.device, "resume": True}
    if demo.epochs is not None:
        common["epochs"] = demo.epochs
    if demo.per_class is not None:
        common["data.options"] = {"per_class": demo.per_class}
    return [
        load_recipe(RECIPE, {**common, "model.head": head, "seed": seed, "out": str(_folder(demo, head, seed))})
        for head in demo.heads
        for seed in demo.seeds
    ]


def _folder(demo: Demo, head: str, seed: int) -> Path:
    return Path(demo.out) / (f"{head}-seed{seed}" if seed else head)


def prepare(runs: Sequence[Train], fresh: bool) -> None:
    """Delete what is there, if that is wanted, or make sure that the runs can go on from it.

    Raises:
        ValueError: if a run in the folder was started with other options.
    """
    for run in runs:
        arguments = Path(run.out) / ARGUMENTS
        if not arguments.is_file():
            continue
        if fresh:
            shutil.rmtree(run.out)
            continue
        changed = differences(read_mapping(arguments), to_mapping(run))
        if changed:
            raise ValueError(
                f"{run.out} holds a run with other options ({', '.join(changed[:3])}): add --fresh to delete it and start "
                "anew, or choose another folder with --out"
            )


def is_finished(run: Train) -> bool:
    return (Path(run.out) / RESULTS).is_file() and (Path(run.out) / "model").is_dir()


def open_finished(run: Train, sources: Sources) -> Finished:
    """The model and the record of a run, and a pass of the test images through the model."""
    model = from_pretrained(Path(run.out) / "model").to(pick_device(run.device))
    test = sources.test
    test.transform = build_transform(run.data.transforms, False, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    seen = look(model, make_loader(test, 100, train=False))
    return Finished(run, read_summary(Path(run.out) / "summary.csv"), seen)


def comparison(rows: Sequence[Row]) -> TableData:
    """A line a head, in the order in which they were trained: means over the seeds, with the range of the accuracy."""
    heads = ["head", "test top-1, %", "seconds", "images/s", "log₁₀ κ", "last fifth", "s"]
    lines = []
    for head in dict.fromkeys(row["head"] for row in rows):
        mine = [row for row in rows if row["head"] == head]

        def mean(column: str, form: str, mine: list[Row] = mine) -> str:
            values = [row[column] for row in mine if row[column] != ""]
            return format(statistics.mean(values), form) if values else "–"

        scores = [row["test_top1"] for row in mine]
        spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
        cells = (
            *(head, mean("test_top1", ".1f") + spread, mean("train_seconds", ".0f"), mean("images_per_second", ".0f")),
            *(mean("log10_condition", ".2f"), mean("energy_last", ".1e"), mean("s", ".3f")),
        )
        lines.append([Cell(text) for text in cells])
    seeds = sorted({row["seed"] for row in rows})
    many = f"mean of {len(seeds)} seeds (lowest to highest)" if len(seeds) > 1 else f"one seed ({seeds[0]})"
    epochs = rows[0]["epochs"]
    return TableData(f"{counted(epochs, 'epoch')}, {many}", heads, lines)


def _by_head(runs: Sequence[Finished], what: Callable[[Finished], Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for run in runs:
        found.setdefault(run.head, []).append(what(run))
    return found


def _curves(runs: Sequence[Finished], column: str) -> dict[str, list[tuple[list[int], list[float]]]]:
    return _by_head(runs, lambda run: run.curve(column))


def pictures(runs: Sequence[Finished], folder: Path) -> tuple[Path, Path]:
    """Curves and spectra as PNG files."""
    from eigengrain.cli.demo_plot import draw_curves, draw_spectra

    curves, spectra = folder / "curves.png", folder / "spectra.png"
    accuracy, loss, training_loss = (_curves(runs, column) for column in ("test_top1", "test_loss", "train_loss"))
    draw_curves(accuracy, loss, training_loss, curves)
    values = {head: torch.cat(parts) for head, parts in _by_head(runs, lambda run: run.seen.eigenvalues).items()}
    floor = torch.finfo(torch.float64).eps
    shares = {head: (v / v[:, :1]).clamp_min(v.shape[1] * floor).numpy() for head, v in values.items()}
    conditions = {head: -torch.from_numpy(share[:, -1]).log10().numpy() for head, share in shares.items()}
    draw_spectra(shares, conditions, spectra)
    return curves, spectra


def examples(runs: Sequence[Finished], sources: Sources) -> Gallery:
    """The first test images, what they show, and what each head says."""
    test, first = sources.test, runs[0].config.seed
    tiles = []
    for index in range(min(EXAMPLES, len(test))):
        stream = io.BytesIO()
        test.image(index).save(stream, "PNG")
        label = test.labels[index]
        lines = []
        for run in runs:
            said = int(run.seen.predictions[index])
            if run.config.seed == first:
                right = said == label
                lines.append(Cell(f"{run.head}: {'right' if right else test.classes[said]}", bad=not right))
        tiles.append(Tile(stream.getvalue(), test.classes[label], lines))
    return Gallery(tiles)


def _words(demo: Demo) -> str:
    """The command of this demo, but for its seeds."""
    words = ["eigengrain demo"]
    if tuple(demo.heads) != HEADS:
        words.append("--heads " + shlex.quote(f"[{','.join(demo.heads)}]"))
    for name in ("epochs", "per_class"):
        if getattr(demo, name) is not None:
            words.append(f"--{name} {getattr(demo, name)}")
    if demo.out != Demo.out:
        words.append(f"--out {shlex.quote(demo.out)}")
    return " ".join(words)


def next_commands(demo: Demo) -> list[str]:
    """What to try next; each line can be run as it is, the last but for the name of a folder."""
    example = next((head for head in ("mpncov", "mpncov+seb") if head in demo.heads), None)
    lines = []
    if example is not None:
        place = shlex.quote(str(_folder(demo, example, demo.seeds[0])))
        lines.append(f"eigengrain evaluate --checkpoint {place} --subset all --subset top:32 --subset last:32 --workers 0")
    lines.append(f"eigengrain train --recipe {RECIPE} --data.name folder --data.root FOLDER --out runs/mine")
    return lines


def describe_page(
    demo: Demo, rows: Sequence[Row], runs: Sequence[Finished], sources: Sources, drawn: Sequence[Path]
) -> list[Part]:
    """Everything on the page, from top to bottom."""
    config, train_set, test_set = runs[0].config, sources.train, sources.test
    one_seed = len(demo.seeds) == 1
    seeds = (
        "This is one seed, and another moves accuracies by points: a small difference between heads is no result. The "
        "command for three seeds is below."
        if one_seed
        else f"Each head was trained with {len(demo.seeds)} seeds."
    )
    parts: list[Part] = [
        f"A small network was trained from random weights on {len(train_set)} drawn birds of {len(train_set.classes)} "
        f"species that differ in small parts only, once with each of several heads between backbone and classifier, and "
        f"tested on {len(test_set)} others. All else is the same for all heads, and how hard the birds are was settled "
        f"by the accuracy of average pooling (gap) alone. {seeds}",
        Heading("Accuracy"),
        comparison(rows),
        "Seconds and images/s are those of training, without tests. κ, the share of the last fifth of the eigenvalues in "
        "their sum, and the factor s of the Scaling Eigen Branch are medians over the test images.",
    ]
    if drawn:
        curves, spectra = drawn
        parts += [
            Heading("Learning"),
            Figure(curves, "Test accuracy, and test and training loss, after each epoch, a line a run"),
            Heading("Spectra"),
            "Eigenvalues λ₁ ≥ λ₂ ≥ … of the covariance of each test image's features, after training; the condition number "
            "κ is the largest over the smallest. Average pooling never sees this covariance: its spectrum is what a "
            "network makes when nothing asks for it.",
            Figure(spectra, "By head, the mean spectrum of the test images and the spread of their condition numbers"),
        ]
    return [
        *parts,
        Heading("The first test images"),
        f"The species in bold, and what each head says{'' if one_seed else f' (seed {demo.seeds[0]})'}.",
        examples(runs, sources),
        Heading("Commands"),
        Commands(
            [
                f"eigengrain train --config {shlex.quote(f'{config.out}/{ARGUMENTS}')} --out runs/again   # one run again",
                *([f"{_words(demo)} --seeds '[0,1,2]'   # every head three times"] if one_seed else []),
                *next_commands(demo),
            ]
        ),
    ]


def run(demo: Demo) -> int:
    """Train what is not trained yet, then compare; 0, or 130 and 143 after Ctrl-C and SIGTERM, with everything saved."""
    began = time.perf_counter()
    folder, console, progress = Path(demo.out), output.reading(), output.progress()
    html, table = writable(folder / "report.html"), writable(folder / "demo.csv")
    runs = plan(demo)
    prepare(runs, demo.fresh)
    sources = open_sources(runs[0].data, runs[0].seed)
    try:
        for number, config in enumerate(runs, start=1):
            name = f"{config.model.head}, seed {config.seed}   ({number} of {len(runs)})"
            if is_finished(config):
                progress.print(f"{name}   trained before", highlight=False, markup=False)
                continue
            progress.print(name, style="bold", highlight=False, markup=False)
            train(config, sources)
    except Interrupted as stop:
        said = str(stop).removesuffix("; go on with --resume")
        print(f"eigengrain: {said}; the same command goes on from there", file=sys.stderr)
        return stop.exit_code

    finished = [open_finished(config, sources) for config in runs]
    images = len(sources.train) // runs[0].batch_size * runs[0].batch_size or len(sources.train)
    rows = [each.row(images) for each in finished]
    environment = describe(pick_device(demo.device))
    write_csv(table, [row | environment for row in rows])
    drawn: Sequence[Path] = ()
    if find_spec("matplotlib"):
        drawn = pictures(finished, folder)
    else:
        console.print("no pictures without matplotlib: pip install 'eigengrain[explain]'", markup=False)
    text = page("Covariance heads on drawn birds", describe_page(demo, rows, finished, sources, drawn), environment)
    html.write_text(text, encoding="utf-8")
    console.print("", on_terminal(comparison(rows)), "")
    console.print(f"{time.perf_counter() - began:.0f} s in all", highlight=False)
    console.print(f"report: {html}", soft_wrap=True, highlight=False, markup=False)
    for number, command in enumerate(next_commands(demo)):
        console.print(f"{'    or:' if number else '  next:'} {command}", soft_wrap=True, highlight=False, markup=False)
    output.result({"rows": rows, "environment": environment, "files": [table, *drawn, html]}, [html])
    return 0
