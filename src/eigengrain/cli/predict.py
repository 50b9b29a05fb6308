"""``eigengrain predict``: the classes of a user's images, as a table and a CSV file."""

import csv
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eigengrain import names, output
from eigengrain.data.datasets.layout import SUFFIXES, count_suffixes, describe_skipped, images_below, is_image_name, walk
from eigengrain.errors import ArgumentError, FileError, did_you_mean
from eigengrain.files import read_text
from eigengrain.options import check, setting
from eigengrain.text import counted, few, printable

if TYPE_CHECKING:
    from torch import Tensor, device

    from eigengrain.models.backbone import ImageSize
    from eigengrain.training.run_folder import TrainedModel

#: rows of the table on the terminal, and paths in a message
SHOWN = 10


@dataclass(frozen=True)
class Predict:
    """Which images, which model, and where the classes go.

    Args:
        images: files, folders (with all folders inside) and quoted patterns such as 'photos/**/*.jpg'.
        checkpoint: folder of 'eigengrain train' or of save_pretrained, or a weights file together with --backbone, --head
            and --num_classes.
        topk: number of classes per image, the most likely first.
        accept: answer 'none of these' for images unlike the validation images of the training, so that this share of the
            latter is accepted; by default the share that the model has stored (0.95), 1 to accept every image.
        min_probability: answer 'unsure' if no class has this probability, such as 0.8.
        flip: average the probabilities of each image and its mirror image.
        out: CSV file with one row per image, in UTF-8 with a byte order mark for spreadsheets.
        batch_size: number of images per batch.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        workers: processes that read images; none are started for a single batch.
        img_size: size of the images that the model sees; that of the model by default.
        class_names: text file with one class name per line, in the order of the scores, for a model without names.
        backbone: backbone of a weights file; 'eigengrain models' lists them.
        head: head of a weights file; 'eigengrain heads' lists them.
        num_classes: number of classes of a weights file.
        reduce: number of channels after the reduction, for a weights file.
        last_stride: 1 for a weights file of a model that was trained with it.
    """

    images: list[str] = setting([])
    checkpoint: str = ""
    topk: int = setting(5, least=1)
    accept: float | None = setting(None, above=0, most=1)
    min_probability: float = setting(0.0, least=0, below=1)
    flip: bool = False
    out: str = "predictions.csv"
    batch_size: int = setting(32, least=1)
    device: str = setting("auto", offers=names.DEVICES)
    workers: int = setting(4, least=0)
    img_size: int | None = setting(None, least=1, most=names.MAX_SIDE)
    class_names: str | None = None
    backbone: str | None = setting(None, offers=names.BACKBONES)
    head: str | None = setting(None, offers=names.HEADS)
    num_classes: int | None = setting(None, least=1)
    reduce: int | Literal["auto"] | None = "auto"
    last_stride: int | None = None

    def __post_init__(self) -> None:
        if not self.images:
            raise ArgumentError("images", "are missing", remedy="give files, folders or patterns such as 'photos/*.jpg'")
        if not self.checkpoint:
            remedy = "give a folder of 'eigengrain train' or of save_pretrained, or a weights file"
            raise ArgumentError("checkpoint", "is missing", remedy=remedy)
        check(self)


def run(config: Predict) -> int:
    """Classify, print a table, write the CSV file; the exit code is 1 if an image could not be read."""
    paths, missing = find_images(config.images)
    if not paths:
        reasons = few([f"{printable(each.path)}: {each.problem}" for each in missing], SHOWN)
        raise ArgumentError("images", f"contains no image ({reasons})")
    import torch

    from eigengrain.environment import pick_device
    from eigengrain.errors import ShortRankWarning
    from eigengrain.files import writable
    from eigengrain.progress import progress_bar

    device, trained = pick_device(config.device), open_classifier(config)
    out = writable(config.out)
    trained.model.to(device)
    done: list[Prediction] = []
    try:
        batches = classify(trained, paths, config, device)
        with progress_bar() as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore", ShortRankWarning)  # it is about the training, not about these images
            task = progress.add_task("images", total=len(paths))
            for batch in batches:
                done += batch
                progress.advance(task, len(batch))
    except torch.OutOfMemoryError as error:
        raise ArgumentError("batch_size", "is too large for the memory", config.batch_size, "reduce it") from error
    except RuntimeError as error:
        if config.img_size is None:
            raise
        reason = str(error).splitlines()[0]
        raise ArgumentError("img_size", f"does not fit the model ({reason})", config.img_size) from error
    finally:  # what was done before Ctrl-C is not lost
        named = [prediction for prediction in done if prediction.classes]
        if named:
            write_predictions(out, done, min(config.topk, trained.model.num_classes))
    if named:
        more = f", the first {SHOWN} are shown" if len(named) > SHOWN else ""
        _print_table(named)
        output.say(f"{counted(len(named), 'image')} classified{more}; written to {out}")
    failed = missing + [prediction for prediction in done if prediction.problem]
    if failed:
        lines = [f"  {printable(prediction.path)}: {printable(prediction.problem)}" for prediction in failed]
        print(f"{len(failed)} could not be read:", *lines, sep="\n", file=sys.stderr)
    document = {"predictions": [each.as_dict() for each in (*done, *missing)], "file": out if named else None}
    output.result(document, [f"{printable(each.path)}\t{printable(each.answer)}" for each in named])
    return 1 if failed else 0


@dataclass(frozen=True)
class Prediction:
    """The (class, probability) pairs of one image, the most likely first; or the reason why there are none.

    ``doubt`` is 'none of these' or 'unsure' if the most likely class is not the answer.
    """

    path: str
    classes: list[tuple[str, float]] = field(default_factory=list)
    problem: str = ""
    doubt: str = ""

    @property
    def answer(self) -> str:
        return self.doubt or (self.classes[0][0] if self.classes else "")

    def as_dict(self) -> dict[str, object]:
        """The prediction for ``--json``."""
        classes = [{"class": name, "probability": p} for name, p in self.classes]
        return {"path": self.path, "answer": self.answer or None, "classes": classes, "problem": self.problem or None}


def find_images(places: Sequence[str]) -> tuple[list[str], list[Prediction]]:
    """Image files at the given places, each once, and the places without images with the reason."""
    images: dict[str, None] = {}
    problems: list[Prediction] = []
    for place in places:
        # the name of an existing file may look like a pattern
        matches = sorted(glob(place, recursive=True)) if has_magic(place) and not os.path.exists(place) else [place]
        files = [name for match in matches for name in (images_below(match) if os.path.isdir(match) else [match])]
        files = [name for name in files if os.path.lexists(name)]
        images |= dict.fromkeys(files)
        if not files:
            problems.append(Prediction(place, problem=_why_nothing(place)))
        others = (name for match in matches if os.path.isdir(match) for _, names in walk(match) for name in names)
        for line in describe_skipped(count_suffixes(name for name in others if not is_image_name(name))):
            output.note(f"{printable(place)}: {line}")
    return list(images), problems


def _why_nothing(place: str) -> str:
    if os.path.isdir(place):
        return f"no images in this folder (files named {', '.join(SUFFIXES[:7])}, …)"
    if has_magic(place):
        return "no file matches this pattern"
    from eigengrain.training.run_folder import similar_paths

    return ": ".join(filter(None, ("there is no such file or folder", did_you_mean(similar_paths(place)))))


def open_model(options: Any, img_size: "ImageSize | None" = None) -> "TrainedModel":
    """Open a folder with a model, or a weights file with the options that describe its model.

    Args:
        options: options of a command: checkpoint, backbone, head, num_classes, reduce, last_stride.
        img_size: size of the images, for a weights file of a network that is built for one size.
    """
    from eigengrain.training.run_folder import TrainedModel, open_run, open_weights

    path = Path(options.checkpoint)
    if path.is_file() and (path.name != "model.safetensors" or options.backbone is not None):
        described = {name: getattr(options, name) for name in ("backbone", "head", "num_classes", "reduce", "last_stride")}
        return TrainedModel(open_weights(path, img_size=img_size, **described), path)
    for name, default in {"backbone": None, "head": None, "reduce": "auto", "last_stride": None}.items():
        if getattr(options, name) != default:
            raise ArgumentError(name, "is only for a weights file", getattr(options, name), f"{path} describes its model")
    trained = open_run(path)
    if options.num_classes not in (None, trained.model.num_classes):
        raise ArgumentError("num_classes", f"must be {trained.model.num_classes} or left out", options.num_classes)
    return trained


def open_classifier(config: Predict) -> "TrainedModel":
    """Open the model, set its class names and its image size; refuse one without a classifier."""
    trained = open_model(config, config.img_size)
    model = trained.model
    if model.num_classes == 0:
        raise ArgumentError("checkpoint", "has no classifier (num_classes is 0)", config.checkpoint)
    if config.class_names is not None:
        try:
            lines = read_text(config.class_names).strip().splitlines()
        except FileError as error:
            problem = f"expected a text file with one class name per line ({error.problem})"
            raise FileError(config.class_names, problem) from None
        if len(lines) != model.num_classes:
            problem = f"must have {model.num_classes} names, one per class of the model, not {len(lines)}"
            raise ArgumentError("class_names", problem, config.class_names)
        model.class_names = [line.strip() for line in lines]
    return trained.with_transforms(img_size=config.img_size)


class _Images:
    """Images by number, ready for the model, or the reason why one cannot be read."""

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


def _stack(samples: "list[Tensor | str]") -> "tuple[Tensor | None, list[str]]":
    """The readable images as one tensor, and the problem of each sample, empty if it has none."""
    import torch

    images = [sample for sample in samples if not isinstance(sample, str)]
    return torch.stack(images) if images else None, [sample if isinstance(sample, str) else "" for sample in samples]


def classify(
    trained: "TrainedModel", paths: Sequence[str], config: Predict, device: "device"
) -> Iterator[list[Prediction]]:
    """Predictions for image files, batch by batch in their order; worker processes start at the call."""
    import torch

    from eigengrain.data.workers import Workers
    from eigengrain.models.calibration import Judged
    from eigengrain.training.calibration import find_doubts, rejection_threshold

    batches = -(-len(paths) // config.batch_size)
    workers = min(config.workers, batches) if batches > 1 else 0
    images: Any = _Images(paths, trained.images(paths).transform)
    loader = Workers(images, _stack, workers=workers, batch_size=config.batch_size)
    model, classes = trained.model, trained.classes

    net, threshold = Judged(model), rejection_threshold(model, config.accept)

    @torch.inference_mode()
    def most_likely(images: "Tensor | None") -> Iterator[dict[str, Any]]:
        if images is None:
            return
        views = [images.to(device), images.to(device).flip(-1)][: 1 + config.flip]
        judged = [[value.cpu().double() for value in net(view)] for view in views]
        scores, probabilities, *familiar = (torch.stack(values).mean(0) for values in zip(*judged, strict=True))
        if not scores.isfinite().all():
            raise FileError(config.checkpoint, "its scores are not finite: did the training diverge?", "use")
        best = probabilities.topk(min(config.topk, model.num_classes))
        familiarity = familiar[0] if familiar else torch.zeros(len(scores))
        doubts = find_doubts(best.values[:, 0], familiarity, threshold, config.min_probability)
        for values, indices, doubt in zip(best.values.tolist(), best.indices.tolist(), doubts, strict=True):
            yield {"classes": [(classes[i], p) for p, i in zip(values, indices, strict=True)], "doubt": doubt}

    def predictions(batches: "Iterator[tuple[Tensor | None, list[str]]]") -> Iterator[list[Prediction]]:
        path = iter(paths)
        for images, problems in batches:
            answers = most_likely(images)
            yield [Prediction(next(path), problem=text, **({} if text else next(answers))) for text in problems]

    return predictions(iter(loader))


def write_predictions(path: Path, predictions: Sequence[Prediction], topk: int) -> None:
    """Write one row per image: path, answer, class_1, probability_1, class_2, …, and the problem of an unreadable one."""
    ranked = [f"{what}_{rank}" for rank in range(1, topk + 1) for what in ("class", "probability")]
    rows = [["path", "answer", *ranked, "problem"]]
    for prediction in predictions:
        cells = [cell for name, p in prediction.classes for cell in (_no_formula(name, "'"), f"{p:.6f}")]
        cells += [""] * (2 * topk - len(cells))
        first = [_no_formula(printable(prediction.path), "./"), _no_formula(prediction.answer, "'")]
        rows.append([*first, *cells, prediction.problem])
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # spreadsheets need the byte order mark
        csv.writer(file).writerows(rows)


def _no_formula(text: str, prefix: str) -> str:
    """Put a harmless prefix in front of text that a spreadsheet would run as a formula."""
    return prefix + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _print_table(predictions: Sequence[Prediction]) -> None:
    """Print the first predictions, with paths relative to the folder that contains all images."""
    try:
        folder = os.path.commonpath([os.path.dirname(prediction.path) for prediction in predictions])
    except ValueError:  # absolute and relative paths, or several drives
        folder = ""
    lines = []
    for prediction in predictions[:SHOWN]:
        (name, p), *others = prediction.classes
        others = prediction.classes if prediction.doubt else others
        share = "" if prediction.doubt else f"{100 * p:.1f} %"
        second = ", ".join(f"{other} {100 * q:.1f} %" for other, q in others[:1])
        path = os.path.relpath(prediction.path, folder) if folder else prediction.path
        lines.append((printable(path), printable(prediction.doubt or name), share, printable(second)))
    output.console().print(output.table("", ("image", "answer", "probability", "or else"), lines, left=2))
