"""The images of a run: data sets, what is done to them, and the loaders."""

import copy
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from eigengrain.data import (
    DeviceCache,
    ImageSet,
    build_transform,
    find_unreadable,
    make_loader,
    open_dataset,
    split_validation,
)
from eigengrain.data.device_cache import Decoded
from eigengrain.data.files import printable
from eigengrain.data.transforms_config import Transforms
from eigengrain.files import writable
from eigengrain.models import CovarianceNet
from eigengrain.training.config import Data, Train
from eigengrain.training.distributed import Process


class Batches(Protocol):
    """What is needed of a loader."""

    dataset: ImageSet

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None: ...

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...


class Sources(NamedTuple):
    """The data sets of a run; ``val`` is a part of the training images that is never trained on.

    Runs whose sources share ``decoded`` decode the images of ``--cache device`` once.
    """

    train: ImageSet
    test: ImageSet
    val: ImageSet | None = None
    decoded: Decoded | None = None

    @property
    def datasets(self) -> list[ImageSet]:
        return [dataset for dataset in (self.train, self.test, self.val) if dataset is not None]


class Loaders(NamedTuple):
    train: Batches
    test: Batches
    val: Batches | None = None


def open_sources(data: Data, seed: int) -> Sources:
    """The data sets that a config names.

    Raises:
        ValueError: if there is no such data set, or its folder is not as it should be.
    """
    train = open_dataset(data.name, data.root, split="train", **data.options)
    test = open_dataset(data.name, data.root, split="test", **data.options)
    if not data.val_fraction:
        return Sources(train, test)
    kept, validation = split_validation(train, data.val_fraction, seed=seed)
    return Sources(kept, test, validation)


def check_readable(sources: Sources, out: Path, workers: int, process: Process) -> None:
    """Open every file once rather than meet a broken one in the third epoch.

    Each process takes a share: those that only waited for the first would give up after some minutes.

    Raises:
        ValueError: in all processes, if images cannot be read; ``unreadable.txt`` in the folder lists them all.
    """
    files = [dataset for dataset in sources.datasets if dataset.paths is not None]
    shares = [dataset.subset(range(process.rank, len(dataset), process.world_size)) for dataset in files]
    found = [problem for share in shares for problem in find_unreadable(share, workers, progress=process.is_main)]
    problems = [problem for part in process.gather(found) for problem in part]
    if not problems:
        return
    table = out / "unreadable.txt"
    if process.is_main:
        lines = [f"{printable(p.path)}\t{printable(p.reason)}\n" for p in problems]
        writable(table).write_text("".join(lines), encoding="utf-8")
    first = ", ".join(f"{p.path} ({p.reason})" for p in problems[:3])
    raise ValueError(
        f"{len(problems)} images cannot be read, such as {first}; all are in {table}: replace them or take them out of the "
        "data set"
    )


def describe_input(model: CovarianceNet, transforms: Transforms, images: ImageSet) -> None:
    """Write into the model how its images are prepared, in timm's words, so that others can prepare theirs alike.

    Images that are not resized have the size of the first one.
    """
    side = transforms.img_size
    width, height = images.image(0).size if transforms.kind == "none" else (side, side)
    squashed = transforms.kind == "paper" or (transforms.kind == "scripts" and not transforms.keep_aspect)
    share = transforms.crop_pct or 0.875 if transforms.kind == "timm" else side / transforms.resized
    if transforms.kind != "timm" and math.floor(side / share) < transforms.resized:
        share = math.nextafter(share, 0)  # timm divides and rounds down, which must lead back to the side before the crop
    model.pretrained_cfg |= {
        "input_size": (3, height, width),
        "crop_pct": 1.0 if transforms.kind == "none" else share,
        "crop_mode": "squash" if squashed else "center",
        "interpolation": transforms.interpolation,
    }


def make_loaders(sources: Sources, model: CovarianceNet, config: Train, process: Process) -> Loaders:
    """Loaders for the share of this process; mean and deviation are those that the backbone wants.

    Raises:
        ValueError: if the batch cannot be shared evenly by the processes.
    """
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]

    def loader(dataset: ImageSet, train: bool) -> Batches:
        options: dict[str, Any] = {
            "train": train,
            "workers": config.workers,
            "seed": config.seed,
            "rank": process.rank,
            "world_size": process.world_size,
            # a last batch of one image would ruin batch statistics
            "drop_last": train and len(dataset) >= config.batch_size,
        }
        dataset = copy.copy(dataset)  # one and the same may be trained and tested on, and a user's own is left as it was
        dataset.transform = build_transform(config.data.transforms, train, mean, std)
        if config.cache == "device":
            options |= {"progress": process.is_main, "decoded": sources.decoded}
            return DeviceCache(dataset, config.batch_size, device=process.device, **options)
        return make_loader(dataset, config.batch_size, pin_memory=process.device.type == "cuda", **options)

    val = loader(sources.val, train=False) if sources.val is not None else None
    return Loaders(loader(sources.train, train=True), loader(sources.test, train=False), val)


def to_device(batch: tuple[Tensor, Tensor], process: Process) -> tuple[Tensor, Tensor]:
    images, labels = batch
    return images.to(process.device, non_blocking=True), labels.to(process.device, non_blocking=True)
