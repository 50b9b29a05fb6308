"""A user's images to class names: a table on the terminal and a CSV file. Nothing heavy is imported before it runs."""

import csv
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eigengrain import output
from eigengrain.cli import checkpoint
from eigengrain.cli.checkpoint import near, preparation
from eigengrain.cli.options import check_least
from eigengrain.data.files import SUFFIXES, images_below, printable
from eigengrain.errors import did_you_mean
from eigengrain.text import counted

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, device

    from eigengrain.models import CovarianceNet

#: rows of the table on the terminal, and places in a message
SHOWN = 10


@dataclass(frozen=True)
class Predict:
    """Which images, which model, and where the class names go.

    Args:
        images: files, folders (searched to the bottom) and quoted patterns such as 'photos/**/*.jpg'.
        checkpoint: a folder of 'eigengrain train' or of save_pretrained, or a weights file together with
            --backbone, --head and --num_classes.
        topk: classes that are named for each image, the likeliest first.
        out: the CSV file, one row an image.
        batch_size: images that go through the model together.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        workers: processes that read images; none are started where one batch holds them all.
        img_size: side of the square that the model sees; as the checkpoint says by default.
        class_names: text file with one class a line, in the order of the scores, for a checkpoint that has no names.
        backbone: of a weights file; 'eigengrain models' lists them.
        head: of a weights file; 'eigengrain heads' lists them.
        num_classes: of a weights file.
        reduce: channels that a weights file's head reduces to.
        last_stride: 1 for a weights file of a model that was trained so.
    """

    images: list[str] = field(default_factory=list)
    checkpoint: str = ""
    topk: int = 5
    out: str = "predictions.csv"
    batch_size: int = 32
    device: str = "auto"
    workers: int = 4
    img_size: int | None = None
    class_names: str | None = None
    backbone: str | None = None
    head: str | None = None
    num_classes: int | None = None
    reduce: int | Literal["auto"] | None = "auto"
    last_stride: int | None = None

    def __post_init__(self) -> None:
        if not self.images:
            raise ValueError("name the images: files, folders or patterns such as 'photos/*.jpg'")
        if not self.checkpoint:
            raise ValueError(
                "name the model with --checkpoint: a folder of 'eigengrain train' or of save_pretrained, or a weights file"
            )
        check_least(self, topk=1, batch_size=1, workers=0, img_size=1, num_classes=1)


@dataclass(frozen=True)
class Prediction:
    """What one image shows: (class, probability), the likeliest first; or why there is no answer."""

    path: str
    classes: list[tuple[str, float]] = field(default_factory=list)
    problem: str = ""


def find_images(places: Sequence[str]) -> tuple[list[str], list[Prediction]]:
    """Image files at the given places, each once, and the places where there are none with the reason.

    Example:
        >>> find_images(["no/such/place.jpg"])
        ([], [Prediction(path='no/such/place.jpg', classes=[], problem='there is no such file or folder')])
    """
    images: dict[str, None] = {}
    problems: list[Prediction] = []
    for place in places:
        # a file may have a name that reads as a pattern
        matches = sorted(glob(place, recursive=True)) if has_magic(place) and not os.path.exists(place) else [place]
        found = [name for match in matches for name in (images_below(match) if os.path.isdir(match) else [match])]
        found = [name for name in found if os.path.lexists(name)]
        images |= dict.fromkeys(found)
        if not found:
            problems.append(Prediction(place, problem=_why_nothing(place)))
    return list(images), problems


def _why_nothing(place: str) -> str:
    if os.path.isdir(place):
        return f"no images in this folder (files named {', '.join(SUFFIXES[:7])}, …)"
    if has_magic(place):
        return "no file matches this pattern"
    return ": ".join(filter(None, ("there is no such file or folder", did_you_mean(near(place)))))


def open_model(config: Predict) -> "CovarianceNet":
    """The model of a checkpoint, with class names, in evaluation mode.

    Raises:
        ValueError: if there is no model, a part of it is missing, or it cannot name what images show.
    """
    model = checkpoint.open_model(config, config.img_size)
    _check_use(model, config)
    model.class_names = _names(model, config.class_names)
    return model.eval()


def _check_use(model: "CovarianceNet", config: Predict) -> None:
    if model.num_classes == 0:
        raise ValueError(f"{config.checkpoint!r} has no classifier (num_classes is 0), so there is nothing to name")
    channels = preparation(model)["input_size"][0]
    if channels != 3:
        raise ValueError(f"the model takes images with {channels} channels; here they are read as RGB")
    built_for = model.config.get("img_size")
    if config.img_size is not None and built_for and tuple(built_for) != (config.img_size, config.img_size):
        raise ValueError(f"the model is built for images of {built_for[0]} × {built_for[1]}: leave --img_size out")


def _names(model: "CovarianceNet", file: str | None) -> list[str]:
    """Class names from the checkpoint, from a text file, or numbers."""
    names = model.class_names
    if file is not None:
        try:
            names = Path(file).read_text(encoding="utf-8-sig").strip().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the class names of {file!r} ({error}): a text file, one name a line") from None
    if names is None:
        return [str(number) for number in range(model.num_classes)]
    if len(names) != model.num_classes:
        raise ValueError(f"the model has {model.num_classes} classes, {file!r} has {len(names)} names")
    return [str(name).strip() for name in names]


class _Images:
    """Images by number, ready for the model, or the reason why one is not."""

    def __init__(self, paths: Sequence[str], transform: Any):
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> "Tensor | str":
        from eigengrain.data.decode import ImageError, open_image

        try:
            image = open_image(self.paths[number])
        except ImageError as error:
            return str(error)
        return self.transform(image)


def _stacked(samples: "list[Tensor | str]") -> "tuple[Tensor | None, list[str]]":
    """Images that could be read in one tensor, and for each sample its problem, empty where there is none."""
    import torch

    images = [sample for sample in samples if not isinstance(sample, str)]
    return torch.stack(images) if images else None, [sample if isinstance(sample, str) else "" for sample in samples]


def classify(model: "CovarianceNet", paths: Sequence[str], config: Predict, device: "device") -> Iterator[list[Prediction]]:
    """Predictions for image files, batch by batch in their order; worker processes start at the call."""
    import torch
    from timm.data import create_transform

    from eigengrain.data.workers import Workers

    batches = -(-len(paths) // config.batch_size)
    loader = Workers(
        _Images(paths, create_transform(**preparation(model, config.img_size))),  # type: ignore[arg-type]
        _stacked,
        workers=min(config.workers, batches) if batches > 1 else 0,
        batch_size=config.batch_size,
    )
    names = model.class_names or []
    topk = min(config.topk, model.num_classes)

    @torch.inference_mode()
    def answers(images: "Tensor | None") -> Iterator[list[tuple[str, float]]]:
        if images is None:
            return iter(())
        scores = model(images.to(device)).cpu().double()
        if not scores.isfinite().all():
            raise ValueError("the model's scores are not finite: is the checkpoint of a training that diverged?")
        best = scores.softmax(-1).topk(topk)
        rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return iter([[(names[i], p) for p, i in zip(values, indices, strict=True)] for values, indices in rows])

    def predictions(batches: "Iterator[tuple[Tensor | None, list[str]]]") -> Iterator[list[Prediction]]:
        path = iter(paths)
        for images, problems in batches:
            answer = answers(images)
            yield [Prediction(next(path), [] if p else next(answer), p) for p in problems]

    return predictions(iter(loader))


def write_predictions(path: Path, predictions: Sequence[Prediction], topk: int) -> None:
    """One row an image: path, class_1, probability_1, class_2, …, and the problem of one that could not be read."""
    header = ["path", *(f"{what}_{rank}" for rank in range(1, topk + 1) for what in ("class", "probability")), "problem"]
    rows = [header]
    for prediction in predictions:
        cells = [cell for name, p in prediction.classes for cell in (_no_formula(name, "'"), f"{p:.6f}")]
        cells += [""] * (2 * topk - len(cells))
        rows.append([_no_formula(printable(prediction.path), "./"), *cells, prediction.problem])
    # spreadsheets take a file without the mark for one in the local alphabet
    plain = all(cell.isascii() for row in rows for cell in row)
    with path.open("w", newline="", encoding="utf-8" if plain else "utf-8-sig") as file:
        csv.writer(file).writerows(rows)


def _no_formula(text: str, prefix: str) -> str:
    """Text that a spreadsheet would run as a formula, with something harmless in front.

    Example:
        >>> _no_formula("=1+1.jpg", "./"), _no_formula("wren", "'")
        ('./=1+1.jpg', 'wren')
    """
    return prefix + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def table(predictions: Sequence[Prediction]) -> "Table":
    """The first predictions for reading."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    folder = _shared_folder([prediction.path for prediction in predictions])
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.add_column("image", overflow="fold")
    view.add_column("class", overflow="fold")
    view.add_column("probability", justify="right", no_wrap=True)
    view.add_column("or else", style="dim", overflow="fold")
    for prediction in predictions[:SHOWN]:
        (name, p), *others = prediction.classes
        rest = ", ".join(f"{other} {100 * q:.1f} %" for other, q in others[:1])
        shown = os.path.relpath(prediction.path, folder) if folder else prediction.path
        view.add_row(escape(printable(shown)), escape(printable(name)), f"{100 * p:.1f} %", escape(printable(rest)))
    return view


def _shared_folder(paths: Sequence[str]) -> str:
    """The folder that all paths are in, empty where there is none.

    Example:
        >>> _shared_folder(["photos/a/1.jpg", "photos/b/2.jpg"]), _shared_folder(["/photos/1.jpg", "2.jpg"])
        ('photos', '')
    """
    try:
        return os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # absolute and relative ones, or several drives
        return ""


def run(config: Predict) -> int:
    """``eigengrain predict``: 0 if every image was classified, 1 if one could not be read."""
    paths, missing = find_images(config.images)
    if not paths:
        more = f"; and {len(missing) - SHOWN} more like these" if len(missing) > SHOWN else ""
        raise ValueError("; ".join(f"{printable(m.path)}: {m.problem}" for m in missing[:SHOWN]) + more)
    import torch

    from eigengrain.environment import pick_device
    from eigengrain.files import writable
    from eigengrain.progress import progress_bar

    out, device = writable(config.out), pick_device(config.device)
    model = open_model(config).to(device)
    console = output.reading()
    done: list[Prediction] = []
    try:
        batches = classify(model, paths, config, device)
        with progress_bar() as progress, warnings.catch_warnings():
            # of a short rank: said in training, and no matter of these images
            warnings.filterwarnings("ignore", message="the covariance of")
            task = progress.add_task("images", total=len(paths))
            for batch in batches:
                done += batch
                progress.advance(task, len(batch))
    except torch.OutOfMemoryError as error:
        raise ValueError(f"out of memory with --batch_size {config.batch_size}: try a smaller one") from error
    except RuntimeError as error:
        if config.img_size is None:
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"the model does not run on images of --img_size {config.img_size}: {reason}") from error
    finally:  # what was done before Ctrl-C is not lost
        named = [prediction for prediction in done if prediction.classes]
        if named:
            write_predictions(out, done, min(config.topk, model.num_classes))
    if named:
        console.print(table(named))
        more = f", the first {SHOWN} are shown" if len(named) > SHOWN else ""
        images = counted(len(named), "image")
        console.print(f"{images} classified{more}; written to {out}", soft_wrap=True, markup=False, highlight=False)
    failed = missing + [prediction for prediction in done if prediction.problem]
    if failed:
        said = [f"  {printable(prediction.path)}: {printable(prediction.problem)}" for prediction in failed]
        print(f"{len(failed)} could not be read:", *said, sep="\n", file=sys.stderr)
    output.result(
        {"predictions": [_as_json(prediction) for prediction in (*done, *missing)], "file": out if named else None},
        [f"{printable(prediction.path)}\t{printable(prediction.classes[0][0])}" for prediction in named],
    )
    return 1 if failed else 0


def _as_json(prediction: Prediction) -> dict[str, object]:
    classes = [{"class": name, "probability": p} for name, p in prediction.classes]
    return {"path": prediction.path, "classes": classes, "problem": prediction.problem or None}
