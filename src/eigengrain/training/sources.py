"""The data sets of a run, and the batches of each split."""

import copy
import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

from eigengrain import output
from eigengrain.data import Batches, ImageSet, build_transform, find_unreadable, make_loader, open_splits
from eigengrain.data.check import describe_imbalance, leave_out
from eigengrain.data.device_cache import Decoded, DeviceCache
from eigengrain.errors import UnreadableImages
from eigengrain.files import writable
from eigengrain.models import CovarianceNet
from eigengrain.text import printable
from eigengrain.training.checkpoint import LAST, write_atomically
from eigengrain.training.config import Data, Train
from eigengrain.training.distributed import Process
from eigengrain.training.run_folder import SPLIT, UNREADABLE, names_below


class Sources(NamedTuple):
    """The data sets of a run; ``val`` is a part of the training images that is not trained on.

    Runs whose sources share ``decoded`` decode the images of ``cache="device"`` once.
    """

    train: ImageSet
    test: ImageSet
    val: ImageSet | None = None
    decoded: Decoded | None = None


class Loaders(NamedTuple):
    """Batches of each split."""

    train: Batches
    test: Batches
    val: Batches | None = None


def open_sources(data: Data, seed: int, run: Path | None = None) -> Sources:
    """Open the data sets of a config, with the split of an earlier ``run`` if it was drawn.

    Raises as :func:`eigengrain.data.open_dataset`.
    """
    table = run / SPLIT if run is not None and (run / SPLIT).is_file() else None
    choice: dict[str, Any] = {"val_fraction": data.val_fraction, "seed": seed, **data.reader_options}
    opened = open_splits(data.name, data.root, **choice | ({"split_file": table} if table else {}))
    return Sources(opened["train"], opened["test"], opened.get("val"))


def print_notes(sources: Sources, data: Data) -> None:
    """Print how the images were found, and a hint if the classes differ much in size."""
    hint = describe_imbalance(sources.train) if data.balance == "none" else ""
    for line in filter(None, dict.fromkeys((*sources.train.notes, *sources.test.notes, hint))):
        output.note(line)


def write_split(out: Path, sources: Sources, root: str | None) -> None:
    """Write ``split.csv`` at the start of a run if the split was drawn, so that it always uses the same images for test."""
    if (out / LAST).exists():
        return
    (out / SPLIT).unlink(missing_ok=True)
    if sources.train.groups is None or root is None:
        return
    file = io.StringIO(newline="")
    table = csv.writer(file)
    table.writerow(("path", "label", "split"))
    for split, dataset in zip(("train", "test", "val"), sources[:3], strict=True):
        if dataset is not None:
            for name, label in zip(names_below(root, dataset.paths or ()), dataset.labels, strict=True):
                # blanks around an entry of a table are removed when it is read
                table.writerow((name if name == name.strip() else f"./{name}", dataset.classes[label], split))
    text = file.getvalue().encode("utf-8", "backslashreplace")
    write_atomically(out / SPLIT, lambda stream: stream.write(text))


def check_readable(
    sources: Sources, out: Path, workers: int, process: Process, root: str | None = None
) -> tuple[Sources, UnreadableImages | None]:
    """Open every image file once: sources without the images that cannot be read, and the error that lists them.

    Each process checks a share: processes that only waited for the first would time out. ``unreadable.txt`` in the folder
    lists the images, relative to ``root``.
    """
    datasets = [dataset for dataset in sources[:3] if dataset is not None and dataset.paths is not None]
    shares = [dataset.subset(range(process.rank, len(dataset), process.world_size)) for dataset in datasets]
    own = [problem for share in shares for problem in find_unreadable(share, workers, progress=process.is_main)]
    problems = [problem for part in process.gather(own) for problem in part]
    if not problems:
        if process.is_main and (out / UNREADABLE).is_file():  # of an earlier dry run
            (out / UNREADABLE).unlink()
        return sources, None
    listed = [(printable(problem.path), printable(problem.reason)) for problem in problems]
    if process.is_main:
        names = names_below(root, [Path(problem.path) for problem in problems])
        text = "".join(f"{printable(name)}\t{reason}\n" for name, (_, reason) in zip(names, listed, strict=True))
        writable(out / UNREADABLE).write_text(text, encoding="utf-8")
    train, test = (leave_out(dataset, problems) for dataset in (sources.train, sources.test))
    val = None if sources.val is None else leave_out(sources.val, problems)
    return sources._replace(train=train, test=test, val=val), UnreadableImages(listed, out / UNREADABLE)


def make_loaders(sources: Sources, model: CovarianceNet, config: Train, process: Process) -> Loaders:
    """Loaders for the share of this process, normalised with the mean and standard deviation of the backbone.

    Raises:
        ValueError: if the batch cannot be divided evenly among the processes.
    """
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]

    def loader(dataset: ImageSet, train: bool) -> Batches:
        options: dict[str, Any] = {
            "train": train,
            "workers": config.workers,
            "seed": config.seed,
            "rank": process.rank,
            "world_size": process.world_size,
            # batch statistics of a last batch with one image would be useless
            "drop_last": train and len(dataset) >= config.batch_size,
            "balanced": train and config.data.balance == "sampler",
        }
        dataset = copy.copy(dataset)  # it may be used for several splits, and the caller's data set must not change
        dataset.transform = build_transform(config.data.transforms, train, mean, std)
        if config.cache == "device":
            options |= {"progress": process.is_main, "decoded": sources.decoded}
            return DeviceCache(dataset, config.batch_size, device=process.device, **options)
        return make_loader(dataset, config.batch_size, pin_memory=process.device.type == "cuda", **options)

    val = loader(sources.val, train=False) if sources.val is not None else None
    return Loaders(loader(sources.train, train=True), loader(sources.test, train=False), val)
