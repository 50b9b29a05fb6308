"""How a study trains: the options of a run for each scale, backbone and data set, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.data.transforms_config import Transforms
from eigengrain.models.weight_files import TORCH_SUFFIXES
from eigengrain.recipes import load_recipe
from eigengrain.training.config import Data, Model, Optimiser, Schedule, Train
from studies.config import StudyRun


@dataclass(frozen=True)
class Network:
    """A backbone of the tables.

    Args:
        title: as the tables have it.
        timm: its name in timm, with the weights that are taken by default.
        reduce: channels before a covariance; None for as many as there are.
        last_stride: 1 takes the last halving of the map out.
        cost: of a training step beside that of ResNet-50, a rough guess.
        resnet: whether it has weights of two kinds, see ``Model.stride_on``.
        plain: its name in timm without batch normalisation, for a weights file of that name.
    """

    title: str
    timm: str
    reduce: int | None
    last_stride: int | None
    cost: float
    resnet: bool = False
    plain: str | None = None

    @property
    def architecture(self) -> str:
        """Its name in timm, whatever the weights."""
        return self.timm.split(".")[0]


NETWORKS = {
    "vgg16": Network("VGG-16", "vgg16_bn.tv_in1k", None, 1, 2.5, plain="vgg16"),
    "resnet50": Network("ResNet-50", "resnet50.tv_in1k", 256, 1, 1.0, resnet=True),
    "resnet101": Network("ResNet-101", "resnet101.tv_in1k", 256, 1, 1.7, resnet=True),
    "resnet152": Network("ResNet-152", "resnet152.tv_in1k", 256, 1, 2.4, resnet=True),
    "efficientnet_b5": Network("EfficientNet-b5", "tf_efficientnet_b5", 256, 1, 3.5),
    "inception_v3": Network("Inception V3", "inception_v3.tv_in1k", 256, None, 0.9),
    "densenet169": Network("DenseNet-169", "densenet169.tv_in1k", 256, 1, 1.5),
    "vit": Network("ViT", "vit_base_patch16_224", 256, None, 3.5),
    "alexnet": Network("AlexNet", "tv:alexnet", None, 1, 0.2),
}

#: heads whose vectors do not grow with the square of the channels: the map is not reduced for them
UNREDUCED = ("gap", "gmp", "cbp", "kp", "lrbp")

#: the classifier's rate as a multiple of the backbone's, and the weight decay, as the paper has them for ResNets
RATES = {"cub": 20.0, "aircraft": 5.0, "cars": 10.0}
DECAYS = {"aircraft": 1e-3}

#: the backbone's rate at scale small, and that of a VGG without batch normalisation, whose features the higher one shrinks
#: to a third in the first hundred steps
SMALL_RATE, PLAIN_RATE = 6e-3, 1.5e-3

#: of the smoke scale: birds that are drawn, a network with a map of 64 × 4 × 4, eight channels of it
SMOKE_CHANNELS = 8
SMOKE_IMAGES = {"classes": 3, "per_class": 4, "size": 32}

#: first words of the recipes
_WORDS = {
    "cub": "birds",
    "aircraft": "aircrafts",
    "cars": "cars",
    "dogs": "dogs",
    "inat2017": "inats",
    "imagenet": "imagenet",
}


def base(options: StudyRun, backbone: str, dataset: str) -> Train:
    """The run of a scale with the head ``mpncov`` and the paper's rate, whose head and rate a study then changes.

    Args:
        options: of the study.
        backbone: one of :data:`NETWORKS`.
        dataset: of the catalogue.

    Example:
        >>> run = base(StudyRun(weights="resnet50.safetensors"), "resnet50", "cub")
        >>> run.epochs, run.batch_size, run.model.stride_on, run.optimiser.classifier_lr_scale
        (15, 20, '1x1', 20.0)
        >>> base(StudyRun(scale="paper"), "resnet101", "aircraft").model.backbone
        'resnet101.tv_in1k'
    """
    make = {"smoke": _smoke, "small": _small, "paper": _paper}[options.scale]
    run = make(options, backbone, dataset)
    if options.scale != "smoke":
        run = replace(run, data=replace(run.data, root=options.data))
    return replace(run, device=options.device, workers=0 if options.scale == "smoke" else options.workers)


def network_name(backbone: str) -> str:
    """The name that studies have for a backbone, whatever weights it has; its own if it is none of theirs.

    Example:
        >>> network_name("resnet50.tv_in1k"), network_name("vgg16"), network_name("plumage_net")
        ('resnet50', 'vgg16', 'plumage_net')
    """
    architecture = backbone.split(".")[0]
    for name, network in NETWORKS.items():
        if architecture in (network.architecture, network.plain):
            return name
    return architecture


def with_reduction(run: Train) -> Train:
    """The same without a reduction if the head needs none."""
    return replace(run, model=replace(run.model, reduce="auto")) if run.model.head in UNREDUCED else run


def training_images(run: Train) -> int:
    """How many a run sees in an epoch."""
    if run.data.name == "plumage":
        count = int(run.data.options["classes"]) * int(run.data.options["per_class"])
    else:
        published = find_entry(run.data.name).published
        count = published[1] if published else 0
    return round(count * (1 - run.data.val_fraction))


def _smoke(options: StudyRun, backbone: str, dataset: str) -> Train:
    transforms = Transforms("scripts", img_size=int(SMOKE_IMAGES["size"]))
    return Train(
        data=Data("plumage", transforms=transforms, options=dict(SMOKE_IMAGES)),
        model=Model("plumage_net", head="mpncov", reduce=SMOKE_CHANNELS),
        optimiser=Optimiser(lr=6e-3, classifier_lr_scale=10),
        epochs=1,
        batch_size=6,
        cache="device",
        check_images=False,
    )


def _small(options: StudyRun, backbone: str, dataset: str) -> Train:
    if dataset == "imagenet":  # from random weights, as the paper does, and shorter
        long = _paper(options, backbone, dataset)
        return replace(long, schedule=Schedule("cosine", warmup_epochs=1), epochs=15, amp="bf16", channels_last=True)
    cuda = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    network = _network(options, backbone)
    return Train(
        data=Data(dataset, transforms=Transforms.of_scripts(dataset)),
        model=Model(head="mpncov", **network),
        optimiser=Optimiser(
            lr=PLAIN_RATE if network["backbone"] == NETWORKS[backbone].plain else SMALL_RATE,
            weight_decay=DECAYS.get(dataset, 1e-4),
            classifier_lr_scale=RATES.get(dataset, RATES["cub"]),
        ),
        schedule=Schedule("cosine", warmup_epochs=1),
        epochs=15,
        batch_size=20,
        amp="bf16",
        channels_last=True,
        compile=cuda,
        cuda_graphs=cuda,
        cache="device",
        check_images=False,
        eval_every=100,
    )


def _paper(options: StudyRun, backbone: str, dataset: str) -> Train:
    own = {("vgg16", d) for d in RATES} | {(b, "imagenet") for b in ("alexnet", "resnet50")}
    network = backbone if (backbone, dataset) in own else "resnet50" if dataset in RATES else "efficientnet_b5"
    changes: dict[str, Any] = {"model.head": "mpncov", "recipe": None}
    if dataset != "imagenet":  # there the weights are random
        changes |= {f"model.{key}": value for key, value in _network(options, backbone).items()}
    return load_recipe(f"{_WORDS[dataset]}-{network}-paper", changes)


def _network(options: StudyRun, backbone: str) -> Mapping[str, Any]:
    network = NETWORKS[backbone]
    weights = _weights(options, backbone)
    found: dict[str, Any] = {
        "backbone": network.timm if weights is None else _architecture(network, weights),
        "reduce": network.reduce,
        "last_stride": network.last_stride,
        "weights": weights,
        "pretrained": weights is None,
    }
    if network.resnet:
        found["stride_on"] = options.stride_on or ("3x3" if weights is None else "1x1")
    if backbone == "vit":
        found["img_size"] = 448
    return found


def _weights(options: StudyRun, backbone: str) -> str | None:
    """The file for a backbone, or None where timm's weights are taken."""
    if options.weights is None:
        return None
    place = Path(options.weights).expanduser()
    if not place.is_dir():
        return str(place) if backbone == "resnet50" else None
    for name in (NETWORKS[backbone].architecture, backbone):
        for file in sorted(place.glob(f"{name}.*")):
            if file.is_file() and file.suffix in (".safetensors", *TORCH_SUFFIXES):
                return str(file)
    return None


def _architecture(network: Network, weights: str) -> str:
    """The name in timm that fits a file."""
    return network.plain if network.plain == Path(weights).stem else network.architecture
