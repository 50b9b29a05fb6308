"""Options of a training as dataclasses. No torch here: the command line, its help and the recipes use them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from eigengrain.data.datasets.registry import check_names, find_entry, list_datasets
from eigengrain.data.preprocessing import Transforms
from eigengrain.errors import ArgumentError
from eigengrain.names import AMP, BACKBONES, BALANCES, CACHES, DEVICES, FREEZES, HEADS, LOGS, SCHEDULES, SELECTIONS, STRIDES
from eigengrain.options import build, check, setting
from eigengrain.recipes import list_recipes, recipe_path
from eigengrain.yaml_files import read_mapping

#: options that may change when a run is resumed: none of them changes the weights
FREE_TO_CHANGE = (
    *("recipe", "data.root", "out", "resume", "dry_run"),
    *("device", "workers", "log", "save_every", "check_images", "cuda_graphs", "license", "report"),
)


@dataclass(frozen=True)
class Data:
    """The images.

    Args:
        name: name of the data set; 'eigengrain datasets' lists them.
        root: folder of the data set, or a table (CSV) of images; not needed for synthetic images.
        val_fraction: fraction of the training images of each class that is held out for validation, if there are no
            validation images.
        test_fraction: fraction of the images of each class that is held out for test, if there is no split; 0.2 by default.
        split_seed: seed of the choice of these test images, which split.csv in the folder of the run records.
        skip_unreadable: leave out images that cannot be read, and list them in unreadable.txt in the folder of the run.
        balance: for classes of different sizes: sampler (all classes are drawn equally often) or weights (of the loss).
        transforms: preprocessing and augmentation.
        options: more keyword arguments of the data set.
    """

    name: str = setting("cub", offers=list_datasets)
    root: str | None = None
    val_fraction: float = setting(0.0, least=0, below=1)
    test_fraction: float | None = setting(None, above=0, below=1)
    split_seed: int = setting(0, least=0)
    skip_unreadable: bool = False
    balance: str = setting("none", choices=BALANCES)
    transforms: Transforms = field(default_factory=Transforms)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "data.")
        check_names(self.options)

    @property
    def reader_options(self) -> dict[str, Any]:
        """Options of the reader: ``options``, and those of a drawn split if they are set."""
        split = {"test_fraction": self.test_fraction, "split_seed": self.split_seed or None}
        return {**self.options, **{name: value for name, value in split.items() if value is not None}}

    @property
    def may_have_validation(self) -> bool:
        """Whether there are validation images, or whether only opening the data set shows it."""
        return self.val_fraction > 0 or (self.name in list_datasets() and find_entry(self.name).custom)


@dataclass(frozen=True)
class Model:
    """The network, see eigengrain.create_model.

    Args:
        backbone: name of a timm model, or of a torchvision model with the prefix 'tv:'; 'eigengrain models' lists them.
        head: name of the head; 'eigengrain heads' lists them.
        head_options: keyword arguments of the head, such as '{solver: eigh}'.
        reduce: number of channels before the covariance, 'auto' (256 for wide maps, and fewer than a map has positions) or
            null for no reduction.
        last_stride: 1 removes the last downsampling of the feature map; null leaves the backbone unchanged.
        stride_on: 1x1 for ResNet weights with the stride on the first convolution of a stage, else 3x3.
        stages: number of last stages whose maps are pooled together; null for the head's own number, 2 for hcov and else 1.
        class_token: beside joins the class token of a ViT with the head's vector; null leaves it out.
        token_norm: whether the tokens of a ViT have its final norm in all stages; null normalises those of the last one.
        mid_level: channels of a branch on the map of the stage before the last, such as 512, with a classifier of its own
            whose scores are added; null for none.
        img_size: image size of backbones that are built for one size (ViT, Swin); others use the size of the transforms.
        weights: file with weights of the backbone or of the whole model, or the folder of a finished run.
        pretrained: load the pretrained weights of timm or torchvision.
        drop_rate: dropout before the classifier.
        calibrate: before the first step, scale the head's vectors to one length, so that one learning rate suits all heads.
        backbone_options: keyword arguments of the backbone.
    """

    backbone: str = setting("resnet50", offers=BACKBONES)
    head: str = setting("mpncov+seb", offers=HEADS)
    head_options: dict[str, Any] = field(default_factory=dict)
    reduce: int | Literal["auto"] | None = "auto"
    last_stride: int | None = None
    stride_on: str = setting("3x3", choices=STRIDES)
    stages: int | None = setting(None, least=1)
    class_token: Literal["beside"] | None = None
    token_norm: bool | None = None
    mid_level: int | None = setting(None, least=1)
    img_size: int | None = None
    weights: str | None = None
    pretrained: bool = False
    drop_rate: float = setting(0.0, least=0, below=1)
    calibrate: bool = False
    backbone_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "model.")


@dataclass(frozen=True)
class Optimiser:
    """The optimiser.

    Args:
        opt: name of a timm optimiser, such as sgd (here without Nesterov momentum), adamw, lamb or lion.
        lr: learning rate of the backbone.
        momentum: momentum, for optimisers that have one.
        weight_decay: weight decay of all parameters, as in the paper.
        decay_norms_and_biases: apply the weight decay to vectors and scalars too.
        head_lr_scale: learning rate of the head as a multiple of lr.
        classifier_lr_scale: learning rate of the classifier as a multiple of lr.
        sam: radius of sharpness-aware minimisation, such as 0.05: each step uses the gradient at weights that are moved
            this far along the gradient, so it takes twice as long; null for plain steps.
        options: more keyword arguments of the optimiser, such as '{betas: [0.9, 0.95]}'.
    """

    opt: str = "sgd"
    lr: float = setting(3e-3, above=0)
    momentum: float = setting(0.9, least=0)
    weight_decay: float = setting(1e-4, least=0)
    decay_norms_and_biases: bool = True
    head_lr_scale: float = setting(1.0, above=0)
    classifier_lr_scale: float = setting(1.0, above=0)
    sam: float | None = setting(None, above=0)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "optimiser.")


@dataclass(frozen=True)
class Schedule:
    """The learning rate schedule. The ratios between the parts of the model are kept if warmup_lr and min_lr are 0.

    Args:
        kind: drops, constant, cosine, or timm's tanh, step, poly, plateau.
        drops: epochs after which the learning rates are multiplied by factor, such as [50,100].
        factor: factor of a drop (drops, step, plateau); the power of poly.
        every: epochs between the drops of 'step'.
        patience: evaluations without improvement before 'plateau' drops.
        warmup_epochs: epochs, or fractions of an epoch, of linear warm-up from warmup_lr.
        warmup_lr: learning rate at the start of the warm-up, for all parts of the model.
        min_lr: final learning rate of cosine, tanh, poly and plateau, for all parts of the model.
    """

    kind: str = setting("drops", choices=SCHEDULES)
    drops: list[int] = field(default_factory=list)
    factor: float = setting(0.1, above=0)
    every: int = setting(30, least=1)
    patience: int = setting(10, least=1)
    warmup_epochs: float = setting(0.0, least=0)
    warmup_lr: float = setting(0.0, least=0)
    min_lr: float = setting(0.0, least=0)

    def __post_init__(self) -> None:
        check(self, "schedule.")
        if list(self.drops) != sorted(set(self.drops)) or min(self.drops, default=1) < 1:
            raise ArgumentError("schedule.drops", "must be increasing epochs from 1 on, such as [50,100]", self.drops)
        if self.drops and self.kind != "drops":
            raise ArgumentError("schedule.drops", "is only used with {schedule.kind} drops", self.drops)


@dataclass(frozen=True)
class Train:
    """A training run.

    Args:
        recipe: packaged YAML file to start from, such as birds-resnet50-paper; without a name the option lists all of them.
            All other options override it.
        data: the images.
        model: the network.
        optimiser: the optimiser.
        schedule: the learning rate schedule.
        epochs: number of passes over the training images.
        batch_size: images per batch, over all processes.
        accumulate: number of batches whose gradients are averaged before each optimiser step.
        clip_grad: maximum norm of the gradient of all parameters; null for no limit.
        label_smoothing: fraction of the target that is spread over all classes.
        mixup: average pairs of images and their labels, with weights from a beta distribution with this parameter, such as
            0.2; 0 for none.
        cutmix: replace a rectangle of each image by that of another one, with a size from a beta distribution with this
            parameter, such as 1; 0 for none. With mixup too, each batch uses one of them.
        snapmix: replace a box of each image by a box of another one, resized, and weight the labels by how much these boxes
            contribute to the scores of their classes; the sizes are from a beta distribution with this parameter, such as
            5; 0 for none. Not with mixup or cutmix. It takes one more forward pass per batch.
        mix_probability: fraction of the batches that mixup, cutmix or snapmix changes.
        freeze: 'backbone' trains head and classifier alone: the backbone gets no gradient, and its batch statistics stay.
        cache_features: with a frozen backbone, compute the features of each image once, if its training images are the same
            in every epoch or flipped; false computes them for every batch.
        amp: precision of the backbone: none (float32), bf16 or fp16. Head, classifier and loss use at least float32.
        ema: decay of averaged weights, such as 0.999, which are then evaluated and kept; null for no averaging.
        channels_last: use the channels-last memory layout, which is faster in half precision.
        compile: compile the backbone with torch.compile.
        cuda_graphs: capture the backbone in a CUDA graph at the first batch, which is faster for small batches; for one
            process without gradient accumulation. The results are identical.
        sync_bn: share batch statistics between processes.
        cache: 'device' keeps all decoded images in device memory, 'none' reads the files in every epoch.
        check_images: open all files before training, or in a dry run, and list those that cannot be read.
        early_stop: epochs without improvement after which training ends; null for never.
        select: weights that are kept as the model: last, best-val or best-test. The results record the choice.
        eval_every: epochs between evaluations; the last epoch is always evaluated.
        save_every: batches between checkpoints within an epoch; 0 saves at the end of each epoch only.
        seed: seed of initialisation, order and augmentation.
        workers: processes that read images, at most one per core.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: folder for checkpoints, summary.csv, results.json and the model.
        resume: continue from the checkpoint in the folder, or start if there is none.
        license: licence of the model for its model card, such as cc-by-4.0.
        report: write report.html after the training, when it is started by 'eigengrain train'.
        log: 'tensorboard' also writes TensorBoard files.
        dry_run: build everything, train on a few batches, print the plan with time and memory, and stop.
    """

    recipe: str | None = setting(None, offers=list_recipes)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: Schedule = field(default_factory=Schedule)
    epochs: int = setting(100, least=1)
    batch_size: int = setting(10, least=1)
    accumulate: int = setting(1, least=1)
    clip_grad: float | None = setting(None, above=0)
    label_smoothing: float = setting(0.0, least=0, below=1)
    mixup: float = setting(0.0, least=0)
    cutmix: float = setting(0.0, least=0)
    snapmix: float = setting(0.0, least=0)
    mix_probability: float = setting(1.0, above=0)
    freeze: str | None = setting(None, choices=FREEZES)
    cache_features: bool = True
    amp: str = setting("none", choices=AMP)
    ema: float | None = setting(None, above=0, below=1)
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    sync_bn: bool = False
    cache: str = setting("none", choices=CACHES)
    check_images: bool = True
    early_stop: int | None = setting(None, least=1)
    select: str = setting("last", choices=SELECTIONS)
    eval_every: int = setting(1, least=1)
    save_every: int = setting(0, least=0)
    seed: int = setting(0, least=0)
    workers: int = setting(4, least=0)
    device: str = setting("auto", offers=DEVICES)
    out: str = "runs/train"
    resume: bool = False
    license: str | None = None
    report: bool = True
    log: str = setting("none", choices=LOGS)
    dry_run: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.seed >= 1 << 64:
            raise ArgumentError("seed", "must be below 2**64", self.seed)
        if self.save_every % self.accumulate:
            problem = f"must be a multiple of {{accumulate}} ({self.accumulate}), because both count batches"
            raise ArgumentError("save_every", problem, self.save_every)
        if self.mix_probability > 1:
            raise ArgumentError("mix_probability", "must be at most 1", self.mix_probability)
        if self.snapmix and (self.mixup or self.cutmix):
            problem = "cannot be combined with {mixup} or {cutmix}, which mix the same batches"
            raise ArgumentError("snapmix", problem, self.snapmix, "use one of them")
        if self.mix_probability < 1 and not (self.mixup or self.cutmix or self.snapmix):
            problem = "has no effect without {mixup}, {cutmix} or {snapmix}"
            raise ArgumentError("mix_probability", problem, self.mix_probability)
        if self.optimiser.sam is not None:
            for name, used in {
                "amp": self.amp == "fp16",
                "accumulate": self.accumulate > 1,
                "cuda_graphs": self.cuda_graphs,
            }.items():
                if used:
                    problem = "cannot be combined with {optimiser.sam}, which needs two gradients of each batch"
                    raise ArgumentError(name, problem, getattr(self, name), "leave one of them out")
        if self.cuda_graphs and self.accumulate > 1:
            problem = "cannot be combined with {accumulate}: a CUDA graph overwrites the previous gradients"
            raise ArgumentError("cuda_graphs", problem)
        if self.cuda_graphs and self.freeze is not None:
            raise ArgumentError("cuda_graphs", "cannot be combined with {freeze}: there is no backward pass to capture")
        self.check_validation(self.data.may_have_validation)

    @property
    def precision(self) -> dict[str, Any]:
        """Arguments ``amp`` and ``channels_last`` of every evaluation of the model, during the training and later."""
        return {"amp": self.amp, "channels_last": self.channels_last}

    def check_validation(self, available: bool) -> None:
        """Raise an ArgumentError if an option needs validation images and there are none."""
        watched = {
            "select": self.select == "best-val",
            "early_stop": self.early_stop is not None and self.select == "last",
            "schedule.kind": self.schedule.kind == "plateau" and self.select != "best-test",
        }
        for name, needed in watched.items():
            if needed and not available:
                value = self.schedule.kind if name == "schedule.kind" else getattr(self, name)
                other = "" if name == "select" else ", or {select} to best-test to use the test images"
                raise ArgumentError(name, "needs validation images", value, f"set {{data.val_fraction}}{other}")


def to_mapping(config: Train) -> dict[str, Any]:
    """Options as JSON and YAML represent them."""
    return json.loads(json.dumps(asdict(config)))


def from_mapping(values: Mapping[str, Any]) -> Train:
    """Build options from plain values, such as those of a YAML file.

    Raises:
        UnknownName: for an unknown key, with close matches.
        ArgumentError: for a value of the wrong type or out of range.

    Example:
        >>> from_mapping({"epochs": 3, "optimiser": {"lr": 0.1}}).optimiser.lr
        0.1
        >>> from_mapping({"optimiser": {"lrr": 0.1}})
        Traceback (most recent call last):
        eigengrain.errors.UnknownName: unknown option 'optimiser.lrr': did you mean 'optimiser.lr'? ...
    """
    return build(Train, values)


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Train:
    """Options of a packaged recipe.

    Args:
        name: one of :func:`eigengrain.recipes.list_recipes`.
        overrides: dotted option name to value.

    Raises:
        UnknownName: for an unknown recipe or option.
        ArgumentError: for a value of the wrong type or out of range.

    Example:
        >>> load_recipe("birds-resnet50-paper", {"data.root": "birds", "epochs": 3}).optimiser.classifier_lr_scale
        20.0
    """
    return _override(read_mapping(recipe_path(name)), overrides or {})


def override(config: Train, options: Mapping[str, Any]) -> Train:
    """The same options with other values for some of them.

    Args:
        config: the options.
        options: dotted option name to value.

    Raises:
        UnknownName: for an unknown option.
        ArgumentError: for a value of the wrong type or out of range.

    Example:
        >>> override(Train(), {"optimiser.lr": 0.1, "epochs": 3}).optimiser.lr
        0.1
    """
    return _override(to_mapping(config), options) if options else config


def _override(values: dict[str, Any], options: Mapping[str, Any]) -> Train:
    for option, value in options.items():
        *parents, last = option.split(".")
        group = values
        for parent in parents:
            group = group.setdefault(parent, {})
            if not isinstance(group, dict):
                raise ArgumentError(option, f"does not exist: {parent} is not a group of options")
        group[last] = value
    return from_mapping(values)


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "", defaults: Mapping[str, Any] | None = None
) -> list[str]:
    """Dotted names of options that differ although a resumed run must not change them.

    An option that an old run did not have yet has its default there.

    Example:
        >>> differences({"epochs": 3, "data": {"root": "a", "name": "cub"}}, {"epochs": 4, "data": {"root": "b"}})
        ['epochs', 'data.name']
    """
    defaults = to_mapping(Train()) if defaults is None else defaults
    changed: list[str] = []
    for key in dict.fromkeys((*old, *new)):
        name, before, now = prefix + key, old.get(key, defaults.get(key)), new.get(key)
        if name in FREE_TO_CHANGE:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            changed += differences(before, now, f"{name}.", defaults.get(key) or {})
        elif before != now:
            changed.append(name)
    return changed
