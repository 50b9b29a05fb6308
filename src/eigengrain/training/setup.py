"""All parts of a run from its config, and the files that it starts with."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from timm.layers import convert_sync_batchnorm
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eigengrain.models import CovarianceNet, create_model
from eigengrain.training.checkpoint import LAST, write_atomically
from eigengrain.training.config import Model, Train, to_mapping
from eigengrain.training.distributed import Process
from eigengrain.training.evaluation import MixedPrecision
from eigengrain.training.schedule import build_optimiser, build_schedule
from eigengrain.training.sources import Loaders, Sources, check_readable, describe_input, make_loaders, open_sources

ARGUMENTS = "args.yaml"


@dataclass
class Run:
    """The parts of a run.

    Args:
        config: what was asked for.
        process: this one among its peers.
        sources: the data sets.
        loaders: their batches.
        model: whose parameters are trained.
        net: the model as the loop calls it: in mixed precision, compiled, exchanging gradients.
        optimiser: of the parameters.
        schedule: of the learning rates.
        scaler: of the loss, against underflow in fp16.
        ema: averaged weights, or None.
    """

    config: Train
    process: Process
    sources: Sources
    loaders: Loaders
    model: CovarianceNet
    net: nn.Module
    optimiser: torch.optim.Optimizer
    schedule: Scheduler
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None

    @property
    def evaluated(self) -> CovarianceNet:
        """The model that is evaluated and kept: the averaged one if there is one."""
        return self.model if self.ema is None else self.ema.module  # type: ignore[return-value]

    @property
    def updates_per_epoch(self) -> int:
        return -(-len(self.loaders.train) // self.config.accumulate)

    def state(self) -> dict[str, Any]:
        """Everything that changes in training, with what is needed to use the weights elsewhere."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": _inner(self.schedule).state_dict() if _inner(self.schedule) is not None else {},
            "scaler": self.scaler.state_dict(),
            "config": _plain(to_mapping(self.config)),
            "class_names": list(self.model.class_names or []),
            "preparation": _plain(self.model.pretrained_cfg),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put everything where :meth:`state` found it."""
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimiser.load_state_dict(state["optimiser"])
        if _inner(self.schedule) is not None:
            _inner(self.schedule).load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])


def _inner(schedule: Scheduler) -> Any:
    """The only part of timm's schedules with a memory (plateau); the others follow from the number of updates."""
    return getattr(schedule, "lr_scheduler", None)


def _plain(values: Any) -> Any:
    """As JSON has it, so that a checkpoint can be read without code."""
    return json.loads(json.dumps(values))


def build(config: Train, sources: Sources | None, process: Process) -> Run:
    """All parts of a run; nothing is written yet, but for a list of unreadable images if there are any.

    Raises:
        ValueError: for a name, a folder or an option that does not fit, and for images that cannot be read.
    """
    if config.log == "tensorboard" and find_spec("tensorboard") is None:
        raise ValueError("--log tensorboard needs TensorBoard: pip install 'eigengrain[log]'")
    out = Path(config.out)
    if (out / LAST).exists() and not config.resume and not config.dry_run:
        raise ValueError(f"{out} holds a run already: go on with --resume, or choose another folder with --out")
    sources = sources or open_sources(config.data, config.seed)
    if sources.val is None and config.data.val_fraction:
        raise ValueError("--data.val_fraction is set, and the data sets that were given have no validation images")
    model = build_model(config.model, sources.train.classes)
    if config.sync_bn and process.many:
        if process.device.type != "cuda":
            raise ValueError("--sync_bn needs CUDA devices: leave it out on the CPU")
        model = convert_sync_batchnorm(model)  # timm's, which keeps the activations of its own normalisations
    model.to(process.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.check_images and not config.dry_run and not (out / LAST).exists():
        check_readable(sources, out, config.workers, process)  # before a cache on the device meets the first bad one
    loaders = make_loaders(sources, model, config, process)
    if len(loaders.train) == 0:
        raise ValueError(f"there is no training image in {sources.train.name}")
    describe_input(model, config.data.transforms, sources.train)
    optimiser = build_optimiser(model, config.optimiser)
    schedule = build_schedule(
        optimiser, config.schedule, config.epochs, updates_per_epoch=-(-len(loaders.train) // config.accumulate)
    )
    # a long average of few updates would still be made of first weights: the decay grows with the number of updates
    ema = ModelEmaV3(model, decay=config.ema, use_warmup=True) if config.ema is not None else None
    if config.cuda_graphs and (process.device.type != "cuda" or process.many):
        raise ValueError("--cuda_graphs needs a CUDA device and one process: leave it out")
    net: nn.Module = MixedPrecision(model, config.amp, config.compile, config.cuda_graphs)
    if process.many:
        net = DistributedDataParallel(net, device_ids=[process.device] if process.device.type == "cuda" else None)
    scaler = torch.amp.GradScaler(process.device.type, enabled=config.amp == "fp16")
    return Run(config, process, sources, loaders, model, net, optimiser, schedule, scaler, ema)


def build_model(config: Model, classes: list[str]) -> CovarianceNet:
    """The network for these classes."""
    model = create_model(
        config.backbone,
        head=config.head,
        num_classes=len(classes),
        reduce=config.reduce,
        last_stride=config.last_stride,
        stride_on=config.stride_on,  # type: ignore[arg-type]
        img_size=config.img_size,
        weights=config.weights,
        pretrained=config.pretrained,
        head_options=config.head_options,
        drop_rate=config.drop_rate,
        **config.backbone_options,
    )
    model.class_names = list(classes)
    return model


def write_arguments(out: Path, config: Train) -> None:
    """``args.yaml``: all options, so that the run can be repeated with ``--config``.

    Raises:
        ValueError: if the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {out} ({error.strerror}): choose another with --out") from error
    text = yaml.safe_dump(_plain(to_mapping(config)), sort_keys=False, allow_unicode=True)
    write_atomically(out / ARGUMENTS, lambda file: file.write(text.encode()))


def tensorboard(out: Path, purge_step: int) -> Any:
    """A writer of TensorBoard's files; steps after ``purge_step`` of an interrupted run are dropped."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tensorboard"), purge_step=purge_step + 1)
