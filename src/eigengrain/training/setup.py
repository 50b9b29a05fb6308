"""Everything that a training uses, built from its config: data sets, loaders, model, optimiser, schedule."""

import copy
import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]
from timm.layers import convert_sync_batchnorm
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eigengrain.data import Batches, ImageSet, build_transform, find_unreadable, make_loader, open_dataset, split_validation
from eigengrain.data.device_cache import Decoded, DeviceCache
from eigengrain.errors import ArgumentError, FileError, MissingPackageError, UnreadableImages
from eigengrain.files import writable
from eigengrain.models import CovarianceNet, create_model
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.text import printable
from eigengrain.training.checkpoint import LAST, remove_temporary_files, write_atomically
from eigengrain.training.config import Data, Train, to_mapping
from eigengrain.training.distributed import Process
from eigengrain.training.run_folder import ARGUMENTS
from eigengrain.training.schedule import build_optimiser, build_schedule

#: list of images that cannot be read, in the folder of the run
UNREADABLE = "unreadable.txt"


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


@dataclass
class Run:
    """The parts of a run."""

    config: Train
    process: Process
    sources: Sources
    loaders: Loaders
    model: CovarianceNet
    net: nn.Module  # the model as the loop calls it: in mixed precision, compiled, distributed
    optimiser: torch.optim.Optimizer
    schedule: Scheduler
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None  # averaged weights

    @property
    def evaluated(self) -> CovarianceNet:
        """The model that is evaluated and kept: the averaged one if there is one."""
        return self.model if self.ema is None else self.ema.module  # type: ignore[return-value]

    @property
    def updates_per_epoch(self) -> int:
        return -(-len(self.loaders.train) // self.config.accumulate)

    def to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Move a batch to the device, in the memory layout of the run."""
        images, labels = (tensor.to(self.process.device, non_blocking=True) for tensor in batch)
        return images.contiguous(memory_format=torch.channels_last) if self.config.channels_last else images, labels

    def state(self) -> dict[str, Any]:
        """Everything that changes in training, and what is needed to use the weights elsewhere."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": _inner(self.schedule).state_dict() if _inner(self.schedule) is not None else {},
            "scaler": self.scaler.state_dict(),
            "config": to_mapping(self.config),
            "class_names": list(self.model.class_names or []),
            "preparation": json.loads(json.dumps(self.model.pretrained_cfg)),  # without tuples, like the config
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state`."""
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimiser.load_state_dict(state["optimiser"])
        if _inner(self.schedule) is not None:
            _inner(self.schedule).load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])


def _inner(schedule: Scheduler) -> Any:
    """The only part of timm's schedules that has a state (plateau); the others depend on the number of updates."""
    return getattr(schedule, "lr_scheduler", None)


def build(config: Train, sources: Sources | None, process: Process) -> Run:
    """Build all parts of a run. Nothing is written, except a list of unreadable images if there are any.

    Raises:
        ValueError: for a name, folder or option that does not fit, and for images that cannot be read.
        MissingPackageError: if TensorBoard is requested and not installed.
    """
    if config.log == "tensorboard" and find_spec("tensorboard") is None:
        raise MissingPackageError("TensorBoard logs need tensorboard: pip install 'eigengrain[log]'")
    out = Path(config.out)
    if (out / LAST).exists() and not config.resume and not config.dry_run:
        raise ArgumentError("out", "already contains a run", config.out, "continue it with {resume} or use another folder")
    sources = sources or open_sources(config.data, config.seed)
    if sources.val is None and config.data.val_fraction:
        raise ArgumentError("data.val_fraction", "is set, but the given data sets have no validation images")
    options = asdict(config.model)
    more = options.pop("backbone_options")
    model = create_model(**options, **more, num_classes=len(sources.train.classes))
    model.class_names = list(sources.train.classes)
    if config.sync_bn and process.distributed:
        if process.device.type != "cuda":
            raise ArgumentError("sync_bn", "needs CUDA devices", remedy="leave it out on the CPU")
        model = convert_sync_batchnorm(model)  # timm's, which keeps the activations of its own normalisations
    model.to(process.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.check_images and not config.dry_run and not (out / LAST).exists():
        check_readable(sources, out, config.workers, process)  # before a device cache reads the first unreadable one
    loaders = make_loaders(sources, model, config, process)
    if len(loaders.train) == 0:
        raise ValueError(f"{sources.train.name} has no training images")
    transforms = config.data.transforms
    model.pretrained_cfg |= transforms.to_pretrained_cfg(sources.train.image(0).size if transforms.kind == "none" else None)
    optimiser = build_optimiser(model, config.optimiser)
    schedule = build_schedule(
        optimiser, config.schedule, config.epochs, updates_per_epoch=-(-len(loaders.train) // config.accumulate)
    )
    # with a constant decay, a short training would average mostly the initialisation: the decay grows with the updates
    ema = ModelEmaV3(model, decay=config.ema, use_warmup=True) if config.ema is not None else None
    if config.cuda_graphs and (process.device.type != "cuda" or process.distributed):
        raise ArgumentError("cuda_graphs", "needs a CUDA device and a single process", remedy="leave it out")
    net: nn.Module = MixedPrecision(model, config.amp, config.compile, config.cuda_graphs)
    if process.distributed:
        net = DistributedDataParallel(net, device_ids=[process.device] if process.device.type == "cuda" else None)
    scaler = torch.amp.GradScaler(process.device.type, enabled=config.amp == "fp16")
    return Run(config, process, sources, loaders, model, net, optimiser, schedule, scaler, ema)


def open_sources(data: Data, seed: int) -> Sources:
    """Open the data sets of a config. Raises as :func:`eigengrain.data.open_dataset`."""
    train = open_dataset(data.name, data.root, split="train", **data.options)
    test = open_dataset(data.name, data.root, split="test", **data.options)
    if not data.val_fraction:
        return Sources(train, test)
    kept, validation = split_validation(train, data.val_fraction, seed=seed)
    return Sources(kept, test, validation)


def check_readable(sources: Sources, out: Path, workers: int, process: Process) -> None:
    """Open every image file once, so that an unreadable one is reported before training.

    Each process checks a share: processes that only waited for the first would time out.

    Raises:
        UnreadableImages: in all processes, if images cannot be read; ``unreadable.txt`` in the folder lists all of them.
    """
    datasets = [dataset for dataset in sources[:3] if dataset is not None and dataset.paths is not None]
    shares = [dataset.subset(range(process.rank, len(dataset), process.world_size)) for dataset in datasets]
    own = [problem for share in shares for problem in find_unreadable(share, workers, progress=process.is_main)]
    problems = [problem for part in process.gather(own) for problem in part]
    if not problems:
        return
    listed = [(printable(problem.path), printable(problem.reason)) for problem in problems]
    if process.is_main:
        text = "".join(f"{path}\t{reason}\n" for path, reason in listed)
        writable(out / UNREADABLE).write_text(text, encoding="utf-8")
    raise UnreadableImages(listed, out / UNREADABLE)


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
        }
        dataset = copy.copy(dataset)  # it may be used for several splits, and the caller's data set must not change
        dataset.transform = build_transform(config.data.transforms, train, mean, std)
        if config.cache == "device":
            options |= {"progress": process.is_main, "decoded": sources.decoded}
            return DeviceCache(dataset, config.batch_size, device=process.device, **options)
        return make_loader(dataset, config.batch_size, pin_memory=process.device.type == "cuda", **options)

    val = loader(sources.val, train=False) if sources.val is not None else None
    return Loaders(loader(sources.train, train=True), loader(sources.test, train=False), val)


def write_arguments(out: Path, config: Train) -> None:
    """Create the folder with all options in ``args.yaml``, so that the run can be repeated with ``--config``.

    Raises:
        FileError: if the folder cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(out, f"{error.strerror}: use another folder", "create the folder") from error
    remove_temporary_files(out)
    text = yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)
    write_atomically(out / ARGUMENTS, lambda file: file.write(text.encode()))
