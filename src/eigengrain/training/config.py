"""The options of training. No torch here: the command line, its help and the recipes are made from these dataclasses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from eigengrain.data.datasets.catalogue import check_names
from eigengrain.data.transforms_config import Transforms
from eigengrain.errors import UnknownName
from eigengrain.options import build

AMP = ("none", "bf16", "fp16")
CACHES = ("none", "device")
LOGS = ("none", "tensorboard")
SELECTIONS = ("last", "best-val", "best-test")
#: ``drops`` divides the rate at given epochs; the others are timm's, by its names
SCHEDULES = ("drops", "constant", "cosine", "tanh", "step", "poly", "plateau")
STRIDES = ("3x3", "1x1")

#: options that may change between the parts of an interrupted run: none of them changes what is learned
FREE_TO_CHANGE = (
    *("recipe", "data.root", "out", "resume", "dry_run"),
    *("device", "workers", "log", "save_every", "check_images", "cuda_graphs"),
)


@dataclass(frozen=True)
class Data:
    """Which images.

    Args:
        name: of the data set; 'eigengrain datasets' lists them.
        root: its folder; none for images that are drawn.
        val_fraction: share of the training images, the same of every class, that is kept for validation.
        transforms: from a file to what the network sees.
        options: more keyword arguments of the data set.
    """

    name: str = "cub"
    root: str | None = None
    val_fraction: float = 0.0
    transforms: Transforms = field(default_factory=Transforms)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"--data.val_fraction must be at least 0 and below 1, got {self.val_fraction}")
        check_names(self.options)


@dataclass(frozen=True)
class Model:
    """Which network; see eigengrain.create_model.

    Args:
        backbone: of timm, or of torchvision with 'tv:' in front; 'eigengrain models' lists them.
        head: 'eigengrain heads' lists them.
        head_options: keyword arguments of the head, such as '{solver: eigh}'.
        reduce: channels before the covariance: a number, 'auto' (256 for wide maps) or null for no reduction.
        last_stride: 1 takes the last halving of the feature map out; null leaves the backbone as it is.
        stride_on: 1x1 for ResNet weights that stride on the first convolution of a stage, else 3x3.
        img_size: for backbones that are built for one size (ViT, Swin); others take the size of the transforms.
        weights: file with weights for the backbone or for the whole model.
        pretrained: weights from the backbone's library.
        drop_rate: dropout in front of the classifier.
        backbone_options: keyword arguments of the backbone.
    """

    backbone: str = "resnet50"
    head: str = "mpncov+seb"
    head_options: dict[str, Any] = field(default_factory=dict)
    reduce: int | Literal["auto"] | None = "auto"
    last_stride: int | None = None
    stride_on: str = "3x3"
    img_size: int | None = None
    weights: str | None = None
    pretrained: bool = False
    drop_rate: float = 0.0
    backbone_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _choice("model.stride_on", self.stride_on, STRIDES)
        if not 0 <= self.drop_rate < 1:
            raise ValueError(f"--model.drop_rate must be at least 0 and below 1, got {self.drop_rate}")


@dataclass(frozen=True)
class Optimiser:
    """How the parameters move.

    Args:
        opt: an optimiser of timm by name: sgd (without Nesterov momentum here), adamw, lamb, lion and many more.
        lr: learning rate of the backbone.
        momentum: of optimisers that have one.
        weight_decay: of all parameters, as in the paper, unless decay_norms_and_biases is false.
        decay_norms_and_biases: whether vectors and scalars decay too.
        head_lr_scale: the head's learning rate is this many times lr.
        classifier_lr_scale: the classifier's learning rate is this many times lr.
        options: more keyword arguments of the optimiser, such as '{betas: [0.9, 0.95]}'.
    """

    opt: str = "sgd"
    lr: float = 3e-3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms_and_biases: bool = True
    head_lr_scale: float = 1.0
    classifier_lr_scale: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("lr", "head_lr_scale", "classifier_lr_scale"):
            _number(f"optimiser.{name}", getattr(self, name), above=0)
        for name in ("momentum", "weight_decay"):
            _number(f"optimiser.{name}", getattr(self, name), least=0)


@dataclass(frozen=True)
class Schedule:
    """How the learning rates change; all parts of the model keep their ratios where warmup_lr and min_lr are 0.

    Args:
        kind: drops, constant, cosine, or timm's tanh, step, poly, plateau.
        drops: epochs after which the rates are multiplied by the factor, such as [50,100].
        factor: of a drop (drops, step, plateau); the power of poly.
        every: epochs between the drops of 'step'.
        patience: evaluations without progress before 'plateau' drops.
        warmup_epochs: in which the rates climb in a straight line from warmup_lr; they may be fractions of an epoch.
        warmup_lr: where the climb starts, in all parts alike.
        min_lr: where cosine, tanh, poly and plateau end, in all parts alike.
    """

    kind: str = "drops"
    drops: list[int] = field(default_factory=list)
    factor: float = 0.1
    every: int = 30
    patience: int = 10
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        _choice("schedule.kind", self.kind, SCHEDULES)
        if list(self.drops) != sorted(set(self.drops)) or any(drop < 1 for drop in self.drops):
            raise ValueError(f"--schedule.drops must be growing epochs of at least 1, such as [50,100], got {self.drops}")
        if self.drops and self.kind != "drops":
            raise ValueError(f"--schedule.drops belongs to --schedule.kind drops, got kind {self.kind}")
        _number("schedule.factor", self.factor, above=0)
        for name, least in (("every", 1), ("patience", 1), ("warmup_epochs", 0), ("warmup_lr", 0), ("min_lr", 0)):
            _number(f"schedule.{name}", getattr(self, name), least=least)


@dataclass(frozen=True)
class Train:
    """A training run.

    Args:
        recipe: a packaged YAML file to start from, such as birds-resnet50-paper; without a name the option is answered with
            all of them. All other options override it.
        data: the images.
        model: the network.
        optimiser: how the parameters move.
        schedule: how the learning rates change.
        epochs: passes over the training images.
        batch_size: images in a batch, over all processes together.
        accumulate: batches whose gradients are averaged before each step of the optimiser.
        clip_grad: largest norm of the gradient of all parameters; null for no limit.
        label_smoothing: share of the target that is spread over all classes.
        amp: precision of the backbone: none (float32), bf16 or fp16. Head, classifier and loss stay in float32 or above.
        ema: decay of averaged weights, such as 0.999, which are then the ones that are evaluated and kept; null for none.
        channels_last: the memory layout that half precision likes.
        compile: compile the backbone with torch.compile.
        cuda_graphs: record the kernels of the backbone at the first batch and launch them together from then on, which
            small batches gain from; for one process without gradient accumulation. The results are the same to the bit.
        sync_bn: share batch statistics between processes.
        cache: device keeps all images, decoded, in the memory of the device; none reads files every epoch.
        check_images: open all files once before training starts, and list those that cannot be read.
        early_stop: epochs without progress after which training ends; null for never.
        select: the weights that are kept as the model: last, best-val or best-test. The results say which.
        eval_every: epochs between evaluations; the last epoch is always evaluated.
        save_every: batches between checkpoints inside an epoch; 0 for one at the end of each epoch only.
        seed: of initial weights, order and augmentation.
        workers: processes that read images, at most one for each core.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        out: folder for checkpoints, summary.csv, results.json and the model.
        resume: go on from the checkpoint in the folder; start anew where there is none.
        log: tensorboard writes its files beside summary.csv.
        dry_run: build everything, try two images, print the plan and stop.
    """

    recipe: str | None = None
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: Schedule = field(default_factory=Schedule)
    epochs: int = 100
    batch_size: int = 10
    accumulate: int = 1
    clip_grad: float | None = None
    label_smoothing: float = 0.0
    amp: str = "none"
    ema: float | None = None
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    sync_bn: bool = False
    cache: str = "none"
    check_images: bool = True
    early_stop: int | None = None
    select: str = "last"
    eval_every: int = 1
    save_every: int = 0
    seed: int = 0
    workers: int = 4
    device: str = "auto"
    out: str = "runs/train"
    resume: bool = False
    log: str = "none"
    dry_run: bool = False

    def __post_init__(self) -> None:
        for option, choices in (("amp", AMP), ("cache", CACHES), ("log", LOGS), ("select", SELECTIONS)):
            _choice(option, getattr(self, option), choices)
        for option in ("epochs", "batch_size", "accumulate", "eval_every", "early_stop"):
            if getattr(self, option) is not None:
                _number(option, getattr(self, option), least=1)
        for option in ("save_every", "workers", "seed"):
            _number(option, getattr(self, option), least=0)
        if self.seed >= 1 << 64:
            raise ValueError(f"--seed must be below 2**64, got {self.seed}")
        if self.clip_grad is not None:
            _number("clip_grad", self.clip_grad, above=0)
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"--ema must lie between 0 and 1, such as 0.999, got {self.ema}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"--label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.save_every % self.accumulate:
            raise ValueError(
                f"--save_every must be a multiple of --accumulate {self.accumulate}, got {self.save_every}: both count "
                "batches"
            )
        if self.cuda_graphs and self.accumulate > 1:
            raise ValueError("--cuda_graphs does not go with --accumulate: a graph overwrites the gradients before it")
        if self.select == "best-val" and not self.data.val_fraction:
            raise ValueError("--select best-val needs validation images: set --data.val_fraction, such as 0.1")
        if self.early_stop is not None and self.select == "last" and not self.data.val_fraction:
            raise ValueError(
                "--early_stop needs something to watch: set --data.val_fraction, or say --select best-test if the test "
                "images shall decide"
            )
        if self.schedule.kind == "plateau" and self.select != "best-test" and not self.data.val_fraction:
            raise ValueError(
                "--schedule.kind plateau needs something to watch: set --data.val_fraction, or say --select best-test if "
                "the test images shall decide"
            )


def to_mapping(config: Train) -> dict[str, Any]:
    """The options as plain values, for YAML."""
    return asdict(config)


def from_mapping(values: Mapping[str, Any]) -> Train:
    """Options from plain values, as a YAML file holds them.

    Raises:
        ValueError: for a key that is misspelt, with what is near it, and for a value of the wrong kind.

    Example:
        >>> from_mapping({"epochs": 3, "optimiser": {"lr": 0.1}}).optimiser.lr
        0.1
        >>> from_mapping({"optimiser": {"lrr": 0.1}})
        Traceback (most recent call last):
        ValueError: unknown option 'optimiser.lrr': did you mean 'optimiser.lr' or ...
    """
    return build(Train, values)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Options, in dots, that differ and may not: a run that is continued with others would be neither of the two.

    Example:
        >>> differences({"epochs": 3, "data": {"root": "a", "name": "cub"}}, {"epochs": 4, "data": {"root": "b"}})
        ['epochs', 'data.name']
    """
    found: list[str] = []
    for key in dict.fromkeys((*old, *new)):
        name, before, now = prefix + key, old.get(key), new.get(key)
        if name in FREE_TO_CHANGE:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            found += differences(before, now, f"{name}.")
        elif _plain(before) != _plain(now):
            found.append(name)
    return found


def _plain(value: Any) -> Any:
    """Tuples and lists alike: YAML has lists only."""
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UnknownName(f"--{option}", value, choices)


def _number(option: str, value: float, least: float = -math.inf, above: float = -math.inf) -> None:
    if not math.isfinite(value) or value < least or value <= above:
        bound = f"above {above}" if above > -math.inf else f"at least {least}"
        raise ValueError(f"--{option} must be a number {bound}, got {value}")
