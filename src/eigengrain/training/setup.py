"""Everything that a training uses, built from its config: data sets, loaders, model, optimiser, schedule."""

import copy
import csv
import io
import json
import math
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
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

from eigengrain import output
from eigengrain.data import Batches, ImageSet, build_transform, find_unreadable, make_loader, open_splits
from eigengrain.data.check import describe_imbalance, leave_out
from eigengrain.data.device_cache import Decoded, DeviceCache
from eigengrain.data.transforms import Pipeline
from eigengrain.errors import ArgumentError, FileError, MissingPackageError, NonFiniteError, UnreadableImages
from eigengrain.files import writable
from eigengrain.heads import SpectralHead, TransformerHead
from eigengrain.models import CovarianceNet, create_model
from eigengrain.models.backbone import on_meta
from eigengrain.models.contributions import contributions
from eigengrain.models.mixed_precision import FromFeatures, MixedPrecision
from eigengrain.models.model import eval_mode, full_rank_reduce
from eigengrain.models.pretrained import current_config, description_of
from eigengrain.text import counted, printable
from eigengrain.training.checkpoint import LAST, remove_temporary_files, write_atomically
from eigengrain.training.config import Data, Train, to_mapping
from eigengrain.training.distributed import Process
from eigengrain.training.features import EvaluationFeatures, FeatureBatches, TrainingFeatures, choose_store, reason_against
from eigengrain.training.loss import Loss, Maps
from eigengrain.training.run_folder import ARGUMENTS, SPLIT, UNREADABLE
from eigengrain.training.sam import sharpen
from eigengrain.training.schedule import build_optimiser, build_schedule

#: root mean square length of calibrated vectors, and number of images from which it is measured
LENGTH, IMAGES = 32.0, 64


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
            _print_notes(sources, config.data)
    config.check_validation(sources.val is not None)
    if sources.val is None and config.data.val_fraction:
        raise ArgumentError("data.val_fraction", "is set, but the given data sets have no validation images")
    model = create_model(**_model_options(config, sources.train))
    model.class_names = list(sources.train.classes)
    for name in ("mixup", "cutmix", "snapmix"):
        if getattr(config, name) and not model.head.mixes_labels:
            problem = f"mixes labels, for which the loss of head {config.model.head!r} is not defined"
            raise ArgumentError(name, problem, getattr(config, name), "leave it out")
    if config.snapmix and isinstance(model.head, TransformerHead):
        problem = f"needs a head that pools a feature map, not {config.model.head!r}"
        raise ArgumentError("snapmix", problem, config.snapmix, "leave it out")
    if config.sync_bn and process.distributed:
        if process.device.type != "cuda":
            raise ArgumentError("sync_bn", "needs CUDA devices", remedy="leave it out on the CPU")
        model = convert_sync_batchnorm(model)  # timm's, which keeps the activations of its own normalisations
    if config.freeze is not None:
        model.freeze_backbone()
    model.to(process.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    unreadable = None
    if config.data.skip_unreadable or (config.check_images and not (out / LAST).exists()):
        # before a device cache reads the first unreadable one
        sources, unreadable = check_readable(sources, out, config.workers, process)
    if unreadable is not None:
        skip, lost = config.data.skip_unreadable, 0 in sources.train.class_counts()
        if skip and lost:
            name = sources.train.classes[sources.train.class_counts().index(0)]
            problem = f"leaves no training image of {name!r}; {unreadable.listing} lists the unreadable ones"
            raise ArgumentError("data.skip_unreadable", problem)
        if lost or not (skip or config.dry_run):
            raise unreadable
        if process.is_main:
            output.note(f"unreadable images left out: {len(unreadable.problems)}, listed in {unreadable.listing}")
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
    return Run(*parts, unreadable=None if config.data.skip_unreadable else unreadable)


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


@torch.no_grad()
def calibrate_vectors(
    model: CovarianceNet,
    batches: Iterable[tuple[Tensor, Tensor]],
    process: Process | None = None,
    amp: str = "none",
    from_features: bool = False,
) -> float:
    """Set ``model.vector_scale`` so that the vectors of the first images have the root mean square length LENGTH.

    If the class token joins the head's vector, each of the two has its own factor and the length LENGTH/√2. A mid-level
    branch has its own factor too, for vectors of the length LENGTH.

    A classifier learns from a vector that is c times as long as if its learning rate were c² times as high. With vectors of
    one length, one learning rate suits all heads. The weights of a linear classifier are divided by a factor above 1, so
    that the scores do not change. The statistics of normalisation layers are those of the batches, as in training, and the
    running ones stay as they are. A model whose factor is not 1 is calibrated already and is not changed.

    Args:
        model: model of ``create_model``, before its training.
        batches: (images, labels) of the training; the first that have IMAGES images are used.
        process: this process and its device, by default a single process on the device of the model; all processes compute
            the same factor.
        amp: precision of the backbone.
        from_features: the batches have feature maps of the backbone instead of images.

    Returns:
        the factor; it stays 1 if the vectors are zero or not finite.

    Example:
        >>> from eigengrain.models import create_model
        >>> model, images = create_model("test_resnet", "gap", num_classes=2), torch.rand(8, 3, 32, 32)
        >>> factor = calibrate_vectors(model, [(images, torch.zeros(8))])
        >>> vectors = model.train().forward_head(model.forward_features(images), pre_logits=True)
        >>> print(f"{vectors.square().sum(1).mean().sqrt():.4f}")
        32.0000
    """
    process = process or Process(next(model.parameters()).device)
    if model.vector_scale != 1:
        return float(model.vector_scale)
    net = (FromFeatures if from_features else MixedPrecision)(model, amp)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    images_seen, squares = 0, [0.0, 0.0]  # of the head's vectors, and of the class tokens or the mid-level vectors
    model.train()
    try:
        for images, _ in batches:
            features = net.features(images.to(process.device, non_blocking=True))
            pooled, beside = model.split_features(features)
            if beside is not None and model.mid_level is not None:
                beside = model.mid_level.vector(beside)
            try:
                squares[0] += _sum_of_squares(model.head(pooled))
            except NonFiniteError:  # the first step will report it
                squares[0] = math.nan
            squares[1] += 0.0 if beside is None else _sum_of_squares(beside)
            images_seen += len(images)
            if images_seen * process.world_size >= IMAGES:
                break
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)
        for module, training in modes:
            module.training = training
    shares = process.gather((images_seen, squares))
    count = max(1, sum(seen for seen, _ in shares))
    split, length = model.head.out_features, LENGTH
    scales = [(model.vector_scale, model.classifier, slice(split))]
    if model.class_token_channels:
        scales.append((model.token_scale, model.classifier, slice(split, None)))
        length /= math.sqrt(2)
    elif model.mid_level is not None:
        scales.append((model.mid_level.vector_scale, model.mid_level.classifier, slice(None)))
    for part, (scale, classifier, columns) in enumerate(scales):
        mean_square = sum(sums[part] for _, sums in shares) / count
        if 0 < mean_square < math.inf:
            scale.fill_(length / math.sqrt(mean_square))
            # larger scores of a random classifier would send larger random gradients into the backbone
            if isinstance(classifier, nn.Linear) and scale > 1:
                classifier.weight[:, columns].div_(scale)
    return float(model.vector_scale)


def _sum_of_squares(vectors: Tensor) -> float:
    return float(vectors.cpu().double().square().sum())


def open_sources(data: Data, seed: int, run: Path | None = None) -> Sources:
    """Open the data sets of a config, with the split of an earlier ``run`` if it was drawn.

    Raises as :func:`eigengrain.data.open_dataset`.
    """
    table = run / SPLIT if run is not None and (run / SPLIT).is_file() else None
    choice: dict[str, Any] = {"val_fraction": data.val_fraction, "seed": seed, **data.reader_options}
    opened = open_splits(data.name, data.root, **choice | ({"split_file": table} if table else {}))
    return Sources(opened["train"], opened["test"], opened.get("val"))


def _print_notes(sources: Sources, data: Data) -> None:
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
    place = Path(root).expanduser()
    place = place if place.is_dir() else place.parent
    file = io.StringIO(newline="")
    table = csv.writer(file)
    table.writerow(("path", "label", "split"))
    for split, dataset in zip(("train", "test", "val"), sources[:3], strict=True):
        if dataset is not None:
            for path, label in zip(dataset.paths or (), dataset.labels, strict=True):
                name = path.relative_to(place) if path.is_relative_to(place) else path
                table.writerow((name.as_posix(), dataset.classes[label], split))
    text = file.getvalue().encode("utf-8", "backslashreplace")
    write_atomically(out / SPLIT, lambda stream: stream.write(text))


def check_readable(sources: Sources, out: Path, workers: int, process: Process) -> tuple[Sources, UnreadableImages | None]:
    """Open every image file once: sources without the images that cannot be read, and the error that lists them.

    Each process checks a share: processes that only waited for the first would time out. ``unreadable.txt`` in the folder
    lists the images.
    """
    datasets = [dataset for dataset in sources[:3] if dataset is not None and dataset.paths is not None]
    shares = [dataset.subset(range(process.rank, len(dataset), process.world_size)) for dataset in datasets]
    own = [problem for share in shares for problem in find_unreadable(share, workers, progress=process.is_main)]
    problems = [problem for part in process.gather(own) for problem in part]
    if not problems:
        return sources, None
    listed = [(printable(problem.path), printable(problem.reason)) for problem in problems]
    if process.is_main:
        text = "".join(f"{path}\t{reason}\n" for path, reason in listed)
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


def keep_features(images: Loaders, net: MixedPrecision, config: Train, process: Process) -> Loaders:
    """Loaders of the features of a frozen backbone, which are computed at their first use.

    Raises:
        ArgumentError: if there is too little memory for them.
    """
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model, plain = net.model, MixedPrecision(net.model, config.amp)

    def compute(batch: Tensor, training: bool = False) -> Tensor:
        batch = batch.to(process.device, non_blocking=True).contiguous(memory_format=layout)
        if training:  # the model is told the size of training images
            model.train()
            return net.raw_features(batch)
        with eval_mode(model):
            return plain.raw_features(batch)

    pipeline = images.train.dataset.transform
    assert isinstance(pipeline, Pipeline)
    first = images.test.dataset if len(images.test.dataset) else images.train.dataset
    with torch.no_grad():
        each = compute(first[0][0][None])
    views = 2 if pipeline.flip else 1
    counts = [len(split.dataset) for split in images if split is not None]
    number = views * counts[0] + sum(counts[1:])
    needed = -(-number // process.world_size) * each.numel() * each.element_size()
    store = choose_store(needed, sum(counts), process)
    if process.is_main:
        both = ", with their mirror images" if views == 2 else ""
        size = f"{needed / 2**30:.2f} GiB on {store}" if needed >= 2**27 else f"{needed / 2**20:.1f} MiB on {store}"
        output.note(f"features of {counted(sum(counts), 'image')} are computed once{both} for training: {size}")
    place = (store, process)
    return Loaders(
        TrainingFeatures(images.train, partial(compute, training=True), *place, workers=config.workers),
        EvaluationFeatures(images.test, compute, *place),
        None if images.val is None else EvaluationFeatures(images.val, compute, *place),
    )


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
