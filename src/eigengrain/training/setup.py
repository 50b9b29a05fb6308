"""Everything that a training uses, built from its config: data sets, loaders, model, optimiser, schedule."""

import json
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from timm.layers import convert_sync_batchnorm
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eigengrain import output
from eigengrain.data import ImageSet
from eigengrain.errors import ArgumentError, FileError, MissingPackageError, UnreadableImages
from eigengrain.heads import SpectralHead, TransformerHead
from eigengrain.models import CovarianceNet, create_model
from eigengrain.models.backbone import on_meta
from eigengrain.models.contributions import contributions
from eigengrain.models.mixed_precision import FromFeatures, MixedPrecision
from eigengrain.models.model import eval_mode, full_rank_reduce
from eigengrain.models.pretrained import current_config, description_of
from eigengrain.training.checkpoint import LAST, remove_temporary_files, write_atomically
from eigengrain.training.config import Train, to_mapping
from eigengrain.training.distributed import Process
from eigengrain.training.features import FeatureBatches, keep_features, reason_against
from eigengrain.training.loss import Loss, Maps
from eigengrain.training.run_folder import ARGUMENTS, leave_out_listed
from eigengrain.training.sam import sharpen
from eigengrain.training.schedule import build_optimiser, build_schedule
from eigengrain.training.sources import Loaders, Sources, check_readable, make_loaders, open_sources, print_notes
from eigengrain.training.vector_length import calibrate_vectors


@dataclass
class Run:
    """The parts of a run."""

    config: Train
    process: Process
    sources: Sources
    loaders: Loaders  # of images, or of features if a frozen backbone computes them once
    images: Loaders
    model: CovarianceNet
    net: nn.Module  # the model as the loop calls it: in mixed precision, compiled, distributed
    optimiser: torch.optim.Optimizer
    schedule: Scheduler
    loss: Loss
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None  # averaged weights
    unreadable: UnreadableImages | None = None  # what a dry run left out

    @property
    def evaluated(self) -> CovarianceNet:
        """The model that is evaluated and kept: the averaged one if there is one."""
        return self.model if self.ema is None else self.ema.module  # type: ignore[return-value]

    @property
    def from_features(self) -> bool:
        """Whether the loaders return features instead of images."""
        return isinstance(self.loaders.train, FeatureBatches)

    @property
    def precision(self) -> dict[str, Any]:
        """Arguments of every evaluation of the model on the loaders."""
        return {**self.config.precision, "from_features": self.from_features}

    @property
    def updates_per_epoch(self) -> int:
        return -(-len(self.loaders.train) // self.config.accumulate)

    def to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Move a batch to the device, in the memory layout of the run."""
        images, labels = (tensor.to(self.process.device, non_blocking=True) for tensor in batch)
        return images.contiguous(memory_format=torch.channels_last) if self.config.channels_last else images, labels

    def backward(
        self, images: Tensor, targets: Tensor, group: int = 1, record_spectrum: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of a batch, one of a ``group`` whose gradients are averaged; returns scores and loss."""
        head = self.model.head

        def once() -> tuple[Tensor, Tensor]:
            scores, added = self.net(images, targets)
            loss = self.loss(scores, targets, added)
            self.scaler.scale(loss / group).backward()
            return scores, loss.detach()

        with head.recording() if record_spectrum and isinstance(head, SpectralHead) else nullcontext():
            scores, loss = once()
        if self.config.optimiser.sam is not None:
            sharpen(self.model, self.config.optimiser.sam, once)
        return scores, loss

    def calibrate(self) -> None:
        """Calibrate the vectors from the first batches, if the config says so; before the first step of a run."""
        if self.config.model.calibrate:
            self.loaders.train.set_epoch(0)
            batches = map(self.to_device, self.loaders.train)
            calibrate_vectors(self.model, batches, self.process, self.config.amp, self.from_features)
            if self.ema is not None:
                self.ema.module.load_state_dict(self.model.state_dict())

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
            "architecture": json.loads(json.dumps(current_config(self.model))),
            "preparation": json.loads(json.dumps(description_of(self.model))),  # without tuples, like the config
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
    if sources is None:
        sources = open_sources(config.data, config.seed, out if (out / LAST).exists() else None)
        if process.is_main:
            print_notes(sources, config.data)
    config.check_validation(sources.val is not None)
    if sources.val is None and config.data.val_fraction:
        raise ArgumentError("data.val_fraction", "is set, but the given data sets have no validation images")
    model = create_model(**_model_options(config, sources.train))
    model.class_names = list(sources.train.classes)
    _check_mixing(config, model)
    if config.sync_bn and process.distributed:
        if process.device.type != "cuda":
            raise ArgumentError("sync_bn", "needs CUDA devices", remedy="leave it out on the CPU")
        model = convert_sync_batchnorm(model)  # timm's, which keeps the activations of its own normalisations
    if config.freeze is not None:
        model.freeze_backbone()
    model.to(process.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sources, unreadable = _check_images(config, sources, process)
    keeps_features = config.freeze is not None and config.cache_features
    if keeps_features and (reason := reason_against(config, model.head)) is not None:
        keeps_features = False
        if process.is_main:
            output.note(f"features are computed for every batch: {reason}")
    # images that are read once are not stored
    images = make_loaders(sources, model, replace(config, cache="none") if keeps_features else config, process)
    loaders = images
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
    precise = MixedPrecision(model, config.amp, config.compile, config.cuda_graphs)
    net: nn.Module = precise
    if keeps_features:
        loaders, net = keep_features(images, precise, config, process), FromFeatures(model, config.amp)
    if process.distributed:
        net = DistributedDataParallel(net, device_ids=[process.device] if process.device.type == "cuda" else None)
    scaler = torch.amp.GradScaler(process.device.type, enabled=config.amp == "fp16")
    names = ("label_smoothing", "mixup", "cutmix", "snapmix", "mix_probability", "seed")
    options = {name: getattr(config, name) for name in names}
    balance = config.data.balance == "weights"
    loss = Loss(sources.train.class_counts(), balance=balance, maps=_maps(precise, process), **options)
    parts = (config, process, sources, loaders, images, model, net, optimiser, schedule, loss, scaler, ema)
    return Run(*parts, unreadable)


def _check_mixing(config: Train, model: CovarianceNet) -> None:
    """Raise if images are to be mixed, and the loss of the head is not defined for them."""
    for name in ("mixup", "cutmix", "snapmix"):
        if getattr(config, name) and not model.head.mixes_labels:
            problem = f"mixes labels, for which the loss of head {config.model.head!r} is not defined"
            raise ArgumentError(name, problem, getattr(config, name), "leave it out")
    if config.snapmix and isinstance(model.head, TransformerHead):
        problem = f"needs a head that pools a feature map, not {config.model.head!r}"
        raise ArgumentError("snapmix", problem, config.snapmix, "leave it out")


def _check_images(config: Train, sources: Sources, process: Process) -> tuple[Sources, UnreadableImages | None]:
    """Sources without the images that cannot be read, and for a dry run the error that lists these.

    A resumed run leaves out the images that it left out before.

    Raises:
        UnreadableImages: if the config does not leave such images out, or none of a class is left.
    """
    out, skip, root = Path(config.out), config.data.skip_unreadable, config.data.root
    if (out / LAST).exists():
        if skip:
            train, test = (leave_out_listed(images, out, root) for images in (sources.train, sources.test))
            val = None if sources.val is None else leave_out_listed(sources.val, out, root)
            sources = sources._replace(train=train, test=test, val=val)
        return sources, None
    if not skip and not config.check_images:
        return sources, None
    sources, unreadable = check_readable(sources, out, config.workers, process, root)
    if unreadable is None:
        return sources, None
    counts = sources.train.class_counts()
    empty = [f"training image of {name!r}" for name, count in zip(sources.train.classes, counts, strict=True) if not count]
    named = (("test", sources.test), ("validation", sources.val))
    empty += [f"{name} image" for name, images in named if images is not None and not len(images)]
    if skip and empty:
        problem = f"leaves no {empty[0]}; {unreadable.listing} lists the unreadable ones"
        raise ArgumentError("data.skip_unreadable", problem)
    if empty or not (skip or config.dry_run):
        raise unreadable
    if process.is_main:
        output.note(f"unreadable images left out: {len(unreadable.problems)}, listed in {unreadable.listing}")
    return sources, None if skip else unreadable


def _maps(net: MixedPrecision, process: Process) -> Maps:
    """Maps of training images for SnapMix, by the running batch statistics."""

    @torch.no_grad()
    def maps(images: Tensor, labels: Tensor) -> Tensor:
        process.share_buffers(net.model)  # as DistributedDataParallel does before each batch
        with eval_mode(net.model):
            return contributions(net.model, net.features(images), labels, images.shape[-2:])

    return maps


def _model_options(config: Train, images: ImageSet) -> dict[str, Any]:
    """Arguments of create_model; if the maps of the images have few positions, ``reduce="auto"`` becomes a number."""
    options = asdict(config.model)
    options |= {**options.pop("backbone_options"), "num_classes": len(images.classes)}
    del options["calibrate"]
    options["pretrained"] &= config.model.weights is None
    if config.model.reduce == "auto":
        transforms = config.data.transforms
        # what does not fit is reported when the model is created, or by the first batch
        with torch.no_grad(), torch.random.fork_rng(devices=()), suppress(ValueError, RuntimeError):
            width, height = images.image(0).size if transforms.kind == "none" else (transforms.img_size,) * 2
            model = on_meta(lambda: create_model(**options | {"weights": None, "pretrained": False})).eval()
            shape = 1, model.pretrained_cfg["input_size"][0], height, width
            features = model.forward_features(torch.empty(shape, device=next(model.parameters()).device))
            options["reduce"] = full_rank_reduce(model.head, features[0, 0].numel()) or "auto"
    return options


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
