"""``eigengrain evaluate``: accuracy of a trained model on a split. Nothing heavy is imported before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigengrain import output
from eigengrain.cli.checkpoint import ARGUMENTS, model_folder, plain_transform, training_folder
from eigengrain.cli.options import check_choices, check_least
from eigengrain.data.datasets.catalogue import check_names
from eigengrain.data.transforms_config import Transforms
from eigengrain.errors import did_you_mean

if TYPE_CHECKING:
    from eigengrain.models import CovarianceNet
    from eigengrain.training.config import Train
    from eigengrain.training.evaluation import Score

SPLITS = ("train", "val", "test")
AMP = ("none", "bf16", "fp16")


@dataclass(frozen=True)
class Evaluate:
    """Which model, on which images.

    Args:
        checkpoint: a folder of 'eigengrain train' or of save_pretrained.
        data: name of the data set; a training folder says it by itself.
        root: folder of the data set; a training folder says it by itself.
        data_options: more keyword arguments of the data set, for --data.
        split: train, val (of a training folder with validation images) or test.
        subset: eigenvalues that are kept, such as top:206; give it again for more, all from one pass of the backbone.
        flip: average the probabilities of each image and its mirror image.
        kind: transforms, see 'eigengrain train --help'; those of the training by default.
        img_size: side of the images; as the checkpoint says by default.
        batch_size: images that go through the model together, over all processes.
        workers: processes that read images, at most one for each core.
        amp: precision of the backbone: none, bf16 or fp16.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        out: the CSV file with one row a subset; evaluation.csv in the folder of the checkpoint by default.
        per_class: a CSV file with one row a class.
    """

    checkpoint: str = ""
    data: str | None = None
    root: str | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    subset: list[str] = field(default_factory=list)
    flip: bool = False
    kind: str | None = None
    img_size: int | None = None
    batch_size: int = 32
    workers: int = 4
    amp: str = "none"
    device: str = "auto"
    out: str | None = None
    per_class: str | None = None

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError(
                "name the model: eigengrain evaluate CHECKPOINT, a folder of 'eigengrain train' or of save_pretrained"
            )
        check_choices(self, split=SPLITS, amp=AMP)
        check_least(self, batch_size=1, workers=0, img_size=1)
        check_data_options(self.data, self.data_options)


def check_data_options(data: str | None, options: dict[str, Any]) -> None:
    """Refuse options of a data set that is not named, as nothing would follow them, and what is no option of a data set."""
    check_names(options)
    if options and data is None:
        raise ValueError(f"--data_options are for the data set that --data names, and there is no --data: got {options}")


def expand(words: Sequence[str]) -> list[str]:
    """Words of a command line with every ``--subset`` adding to those before it instead of replacing them.

    Example:
        >>> expand(["--subset", "top:206", "--subset=top:1+last:50", "--flip"])
        ['--subset+', 'top:206', '--subset+=top:1+last:50', '--flip']
    """
    renamed = ["--subset+" if word == "--subset" else word for word in words]
    return ["--subset+=" + word.removeprefix("--subset=") if word.startswith("--subset=") else word for word in renamed]


def run(config: Evaluate) -> None:
    """Evaluate, print a table, write CSV files."""
    from rich import box
    from rich.table import Table

    from eigengrain.data import make_loader
    from eigengrain.environment import describe
    from eigengrain.files import writable, write_csv
    from eigengrain.functional import EigenSubset
    from eigengrain.training.distributed import join
    from eigengrain.training.evaluation import evaluate

    subsets = [str(EigenSubset.parse(text)) for text in config.subset] or ["own"]
    folder, training = find_run(config.checkpoint)
    out = writable(config.out or Path(config.checkpoint) / "evaluation.csv")
    per_class = writable(config.per_class, "--per_class") if config.per_class else None
    with join(config.device) as process:
        model, dataset = open_for_evaluation(config, folder, training)
        model.to(process.device)
        loader = make_loader(
            dataset,
            config.batch_size,
            train=False,
            workers=config.workers,
            rank=process.rank,
            world_size=process.world_size,
            pin_memory=process.device.type == "cuda",
        )
        scores = evaluate(model, loader, process, subsets=subsets, flip=config.flip, amp=config.amp)
        if not process.is_main:
            return
        common = {"checkpoint": config.checkpoint, "data": dataset.name, "split": config.split}
        settings = {"test_time_augmentation": "flip" if config.flip else "none", "amp": config.amp}
        settings |= {"img_size": model.pretrained_cfg["input_size"][-1]}
        where = describe(process.device)
        rows = [{**common, **_row(score), **settings, **where} for score in scores]
        write_csv(out, rows)
        if per_class is not None:
            write_csv(per_class, [row for score in scores for row in _class_rows(score, model, dataset.classes)])
    table = Table(
        title=f"{dataset.name}, {config.split}, {scores[0].samples} images", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("eigenvalues")
    for heading in ("top-1", "top-5", "loss"):
        table.add_column(heading, justify="right")
    for score in scores:
        table.add_row(_label(score.subset), f"{score.top1:.2f}", f"{score.top5:.2f}", f"{score.loss:.4f}")
    console, files = output.reading(), [path for path in (out, per_class) if path is not None]
    console.print(table)
    for path in files:
        console.print(str(path), soft_wrap=True, highlight=False, markup=False)
    numbers = [{"top1": score.top1, "top5": score.top5, "loss": score.loss} for score in scores]
    output.result(
        {"scores": [row | exact for row, exact in zip(rows, numbers, strict=True)], "files": files},
        [f"{_label(score.subset)}\t{score.top1:.2f}" for score in scores],
    )


def _label(subset: str) -> str:
    return "as trained" if subset == "own" else subset


def _row(score: "Score") -> dict[str, object]:
    numbers = {"top1": f"{score.top1:.4f}", "top5": f"{score.top5:.4f}", "loss": f"{score.loss:.6f}"}
    return {"subset": _label(score.subset), "samples": score.samples, **numbers}


def _class_rows(score: "Score", model: "CovarianceNet", classes: Sequence[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, correct, count in zip(model.class_names or classes, score.correct, score.count, strict=True):
        accuracy = f"{100 * correct / count:.4f}" if count else ""
        rows.append({"subset": _label(score.subset), "class": name, "samples": count, "correct": correct, "top1": accuracy})
    return rows


def find_run(checkpoint: str) -> tuple[Path, "Train | None"]:
    """The folder of the model, and the options that it was trained with where they are known."""
    from eigengrain.training.config import from_mapping
    from eigengrain.yaml_files import read_mapping

    path = training_folder(Path(checkpoint))
    if not path.is_dir():
        raise ValueError(f"there is no folder {checkpoint!r}: name one of 'eigengrain train' or of save_pretrained")
    arguments, folder = path / ARGUMENTS, model_folder(path)
    if not arguments.is_file():
        if not (folder / "config.json").is_file():
            inside = sorted(str(found.parent) for found in path.glob(f"*/{ARGUMENTS}"))
            hint = did_you_mean(inside[:3]) or "name one of them"
            raise ValueError(f"{checkpoint!r} is no folder of 'eigengrain train' or of save_pretrained: {hint}")
        return folder, None
    values = read_mapping(arguments)
    try:
        return folder, from_mapping(values)
    except ValueError as error:
        raise ValueError(f"the options in {arguments} cannot be read: {error}") from error


def open_for_evaluation(config: Evaluate, folder: Path, training: "Train | None") -> tuple["CovarianceNet", Any]:
    """The model and its images."""
    from eigengrain.data import build_transform
    from eigengrain.models import from_pretrained
    from eigengrain.training.config import Data
    from eigengrain.training.sources import describe_input, open_sources

    data = training.data if training is not None else None
    if config.data is not None:
        data = Data(config.data, config.root, options=config.data_options)
    elif data is not None and config.root is not None:
        data = Data(data.name, config.root, data.val_fraction, data.transforms, data.options)
    if data is None:
        raise ValueError(f"{config.checkpoint!r} does not say its images: give --data and --root")
    if config.split == "val" and not data.val_fraction:
        raise ValueError("there are no validation images, as --data.val_fraction of the training is 0: use --split test")
    sources = open_sources(data, training.seed if training is not None else 0)
    dataset = {"train": sources.train, "val": sources.val, "test": sources.test}[config.split]
    model = from_pretrained(folder)
    if dataset is None or model.num_classes != len(dataset.classes):
        found = 0 if dataset is None else len(dataset.classes)
        raise ValueError(f"the model has {model.num_classes} classes and {data.name} has {found}: they do not fit")
    if model.class_names is not None and model.class_names != dataset.classes:
        raise ValueError(f"the classes of the model and of {data.name} have other names or another order")
    transforms = _transforms(config, model, training)
    if transforms is None:
        dataset.transform = plain_transform(model)
    else:
        describe_input(model, transforms, dataset)
        dataset.transform = build_transform(transforms, False, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    return model, dataset


def _transforms(config: Evaluate, model: "CovarianceNet", training: "Train | None") -> Transforms | None:
    """What is done to the images: as asked for, else as in training, else None for what the checkpoint says."""
    own = training.data.transforms if training is not None else None
    if config.kind is None and config.img_size is None:
        return own
    kind = own.kind if config.kind is None and own is not None else config.kind
    if kind == "none" and config.img_size is not None:
        raise ValueError("--img_size has no effect on images that --kind none leaves as they are: add another --kind")
    size = config.img_size or int(model.pretrained_cfg["input_size"][-1])
    if config.kind is not None:
        return Transforms(config.kind, size)  # type: ignore[arg-type]
    if own is not None:
        return replace(own, img_size=size, resize=own.resize and round(own.resize * size / own.img_size))
    raise ValueError("--img_size of a folder without args.yaml needs --kind, such as paper")
