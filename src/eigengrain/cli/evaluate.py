"""``eigengrain evaluate``: accuracy of a trained model on a split, also with subsets of the eigenvalues."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigengrain import names, output
from eigengrain.data.datasets.registry import check_names, list_datasets
from eigengrain.errors import ArgumentError
from eigengrain.options import check, setting
from eigengrain.text import few, printable

if TYPE_CHECKING:
    from eigengrain.training.evaluation import Score


@dataclass(frozen=True)
class Evaluate:
    """Which model, on which images.

    Args:
        checkpoint: folder of 'eigengrain train' or of save_pretrained.
        data: name of the data set; that of the training by default.
        root: folder of the data set; that of the training by default.
        data_options: more keyword arguments of the data set, for --data.
        split: train, val (if the training has validation images) or test.
        skip_unreadable: leave out images that cannot be read, after opening all of them once.
        subset: eigenvalues to keep, such as top:206; repeat it for more subsets, which share one pass of the backbone.
        flip: average the probabilities of each image and its mirror image.
        kind: transforms, see 'eigengrain train --help'; those of the training by default.
        img_size: size of the images; that of the model by default.
        batch_size: number of images per batch, over all processes.
        workers: processes that read images, at most one per core.
        amp: precision of the backbone: none, bf16 or fp16; that of the training by default.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: CSV file with one row per subset; evaluation.csv in the folder of the model by default.
        per_class: CSV file with one row per class.
    """

    checkpoint: str = ""
    data: str | None = setting(None, offers=list_datasets)
    root: str | None = None
    data_options: dict[str, Any] = setting({})
    split: str = setting("test", choices=names.SPLITS)
    skip_unreadable: bool = False
    subset: list[str] = setting([])
    flip: bool = False
    kind: str | None = setting(None, choices=names.TRANSFORMS)
    img_size: int | None = setting(None, least=1)
    batch_size: int = setting(32, least=1)
    workers: int = setting(4, least=0)
    amp: str | None = setting(None, choices=names.AMP)
    device: str = setting("auto", offers=names.DEVICES)
    out: str | None = None
    per_class: str | None = None

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        check(self)
        check_data_options(self.data, self.data_options)


def check_checkpoint(checkpoint: str | Sequence[str]) -> None:
    """Raise an ArgumentError if no model is given."""
    if not checkpoint:
        raise ArgumentError("checkpoint", "is missing", remedy="give a folder of 'eigengrain train' or of save_pretrained")


def check_data_options(data: str | None, options: dict[str, Any]) -> None:
    """Raise an ArgumentError for options of a data set that is not given, or that are not options of a reader."""
    check_names(options)
    if options and data is None:
        raise ArgumentError("data_options", "are for the data set {data}, which is not given", options)


def run(config: Evaluate) -> None:
    """Evaluate, print a table, write CSV files."""
    from eigengrain.data import find_unreadable, make_loader
    from eigengrain.data.check import leave_out
    from eigengrain.environment import describe
    from eigengrain.files import writable, write_csv
    from eigengrain.functional import EigenSubset
    from eigengrain.training.distributed import join
    from eigengrain.training.evaluation import evaluate
    from eigengrain.training.run_folder import open_run

    subsets = [str(EigenSubset.parse(text)) for text in config.subset] or ["own"]
    trained = open_run(config.checkpoint).with_transforms(config.kind, config.img_size)
    model = trained.model
    checkpoint = Path(config.checkpoint)  # a folder, or a weights file with its config beside it
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    out = writable(config.out or folder / "evaluation.csv")
    per_class = writable(config.per_class) if config.per_class else None
    with join(config.device) as process:
        dataset = trained.dataset(config.split, name=config.data, root=config.root, options=config.data_options)
        if config.skip_unreadable and (problems := find_unreadable(dataset, config.workers, progress=process.is_main)):
            dataset = leave_out(dataset, problems)
            listed = few([printable(each.path) for each in problems], 3)
            if not len(dataset):
                raise ArgumentError("skip_unreadable", f"leaves no image: {listed} cannot be read", True)
            if process.is_main:
                output.note(f"unreadable images left out: {listed}")
        model.to(process.device)
        common: dict[str, Any] = {"train": False, "workers": config.workers, "pin_memory": process.device.type == "cuda"}
        loader = make_loader(dataset, config.batch_size, rank=process.rank, world_size=process.world_size, **common)
        precision = trained.precision if config.amp is None else trained.precision | {"amp": config.amp}
        scores = evaluate(model, loader, process, subsets=subsets, flip=config.flip, **precision)
        if not process.is_main:
            return
        first = {"checkpoint": config.checkpoint, "data": dataset.name, "split": config.split}
        last: dict[str, Any] = {"test_time_augmentation": "flip" if config.flip else "none", "amp": precision["amp"]}
        last |= {"img_size": trained.image_size, **describe(process.device)}
        rows = [{**first, **_row(score), **last} for score in scores]
        write_csv(out, rows)
        if per_class is not None:
            write_csv(per_class, [row for score in scores for row in _class_rows(score, dataset.classes)])
    title, files = (
        f"{dataset.name}, {config.split}, {scores[0].samples} images",
        [each for each in (out, per_class) if each],
    )
    lines = [(_label(s.subset), f"{s.top1:.2f}", f"{s.top5:.2f}", f"{s.loss:.4f}") for s in scores]
    output.console().print(output.table(title, ("eigenvalues", "top-1", "top-5", "loss"), lines))
    output.say(*files)
    exact = [row | {"top1": s.top1, "top5": s.top5, "loss": s.loss} for row, s in zip(rows, scores, strict=True)]
    output.result({"scores": exact, "files": files}, [f"{_label(s.subset)}\t{s.top1:.2f}" for s in scores])


def _label(subset: str) -> str:
    return "as trained" if subset == "own" else subset


def _row(score: "Score") -> dict[str, object]:
    numbers = {"top1": f"{score.top1:.4f}", "top5": f"{score.top5:.4f}", "loss": f"{score.loss:.6f}"}
    return {"subset": _label(score.subset), "samples": score.samples, **numbers}


def _class_rows(score: "Score", classes: Sequence[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, correct, count in zip(classes, score.correct, score.count, strict=True):
        accuracy = f"{100 * correct / count:.4f}" if count else ""
        rows.append({"subset": _label(score.subset), "class": name, "samples": count, "correct": correct, "top1": accuracy})
    return rows
