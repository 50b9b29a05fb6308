"""The options of a study, the numbers of the paper, and the training options for each scale, backbone and data set."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eigengrain.data import Transforms
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.models.weights import TORCH_SUFFIXES
from eigengrain.recipes import list_recipes
from eigengrain.training.config import Data, Schedule, Train, from_mapping, load_recipe
from eigengrain.yaml_files import read_mapping

ACTIONS = ("list", "all", "report")
SCALES = ("smoke", "quick", "small", "modern", "paper")
#: scales with a part of the rows of a table, unless they are named
SHORT = ("quick", "small", "modern")
PROTOCOLS = ("fair", "paper", "both")
#: learning rates of the classifier from which the fair protocol chooses by default
RATES = (3.0, 10.0, 20.0)


@dataclass(frozen=True)
class StudyOptions:
    """Reproduce a table or figure of the paper.

    Args:
        name: name of a study; or list (all studies with their cost), all (one after the other), report (one page of all
            results).
        data: folder with the data sets, each in its own folder, or that of one data set; 'eigengrain datasets' shows their
            layout. A folder with the name of a data set, such as cars, may also have train/CLASS and test/CLASS instead.
            A smoke run draws its images.
        scale: smoke (a small network on drawn birds, seconds), quick (7 epochs at 224 pixels), small (15 epochs),
            modern (the recipes DATA-resnet50-modern, for the data sets that have one) or paper (the recipes of the paper).
        epochs: number of epochs, in place of that of the scale.
        img_size: size of the images in pixels, in place of that of the scale.
        protocol: fair (each method at its own best classifier rate, chosen on validation images, last epoch), paper (one
            rate for all, best test epoch) or both.
        datasets: such as [cub,cars]; all of the study by default, of which those in the folder are trained.
        backbones: such as [resnet50,vgg16]; all of the study by default, a few at scales quick, small and modern.
        heads: such as [mpncov,mpncov+seb]; all of the study by default, a few at scales quick, small and modern.
        settings: YAML file with other settings for the study recipe: names, each with dotted options of 'eigengrain train'.
        seeds: seeds of the runs that are tested; [0,1,2] by default, [0] at scales smoke and quick, and at scales small
            and modern except for branch, gcp-methods and paths.
        rates: learning rates of the classifier, as multiples of that of the backbone, from which the fair protocol chooses;
            [3,10,20] by default, or those of the study. They are divided by c² for a head whose vector is many times (c)
            longer or shorter than that of MPN-COV. If the lowest or the highest is best, a third or three times of it is
            tried too, and so on. A single rate is used as it is.
        search_epochs: number of epochs of the runs for this choice; that of the other runs by default.
        weights: file with the weights of ResNet-50, or folder with a file per backbone, such as resnet101.safetensors,
            vgg16_bn.safetensors or, without batch normalisation, vgg16.safetensors; those of timm by default, which are
            downloaded.
        stride_on: convolution with the stride in ResNets, 1x1 or 3x3; 1x1 with --weights, 3x3 with timm's by default.
        seconds: time budget in seconds. A run is not started if it would exceed the budget, assuming it takes as long as
            the slowest so far. Rerun the command to continue.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        workers: processes that read images, at most one per core.
        out: folder for NAME.csv, NAME.md, NAME.png, and the records and models of the runs.
        records: folder with further records.
        only_report: train nothing and show the records.
        drop_models: delete the model of a run when it is recorded, unless other runs of the study start from it; another
            study may have to train it again.
    """

    name: str = "list"
    data: str | None = None
    scale: str = "small"
    epochs: int | None = None
    img_size: int | None = None
    protocol: str = "fair"
    datasets: list[str] | None = None
    backbones: list[str] | None = None
    heads: list[str] | None = None
    settings: str | None = None
    seeds: list[int] | None = None
    rates: list[float] | None = None
    search_epochs: int | None = None
    weights: str | None = None
    stride_on: str | None = None
    seconds: float | None = None
    device: str = "auto"
    workers: int = 4
    out: str = "runs/study"
    records: str | None = None
    only_report: bool = False
    drop_models: bool = False

    def __post_init__(self) -> None:
        choices = {"scale": SCALES, "protocol": PROTOCOLS, "stride_on": (None, "1x1", "3x3")}
        for name, names in choices.items():
            if getattr(self, name) not in names:
                raise UnknownName(name, getattr(self, name), [choice for choice in names if choice])
        for name in ("datasets", "backbones", "heads", "seeds", "rates"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) != len(values)):
                raise ArgumentError(name, "must be a list of one or more different values", values)
        least = {"seeds": min(self.seeds or [0]), "workers": self.workers}
        above = {"rates": min(self.rates or [1])}
        optional = ("epochs", "img_size", "search_epochs", "seconds")
        above |= {name: value for name in optional if (value := getattr(self, name)) is not None}
        for name, value in (least | above).items():
            if value < 0 or (value == 0 and name in above):
                raise ArgumentError(name, "must be above 0" if name in above else "must be at least 0", getattr(self, name))


@dataclass(frozen=True)
class Network:
    """A backbone of the tables, see ``settings.yaml``."""

    title: str
    timm: str
    cost: float
    reduce: int | None = None
    last_stride: int | None = None
    resnet: bool = False
    transformer: bool = False
    plain: str | None = None

    @property
    def architecture(self) -> str:
        """Name in timm without the weights."""
        return self.timm.split(".")[0]


SETTINGS, PAPER, TEXTS = (
    dict(read_mapping(Path(__file__).with_name(f"{name}.yaml"))) for name in ("settings", "paper", "studies")
)
#: data set -> name in the tables
TITLES: dict[str, str] = PAPER["titles"]
FINE_GRAINED: list[str] = PAPER["fine_grained"]
#: accuracies of ResNet-50 by method
RESNET50: dict[str, list[float]] = PAPER["table_3"]["resnet50"]
NETWORKS = {name: Network(**values) for name, values in SETTINGS["networks"].items()}

#: name of the drawn birds on which the backbone of ``plumage`` is trained first
FIRST = "plumage-first"
#: heads whose vectors do not grow with the square of the channels, and which need no reduction
UNREDUCED = ("gap", "gmp", "cbp", "kp", "lrbp", "svpn", "token", "transfg", "aftrans")


def base_config(options: StudyOptions, backbone: str, dataset: str) -> Train:
    """The training options of a scale with the head ``mpncov`` and the rate of the paper.

    Example:
        >>> run = base_config(StudyOptions(weights="resnet50.safetensors"), "resnet50", "cub")
        >>> run.epochs, run.batch_size, run.model.stride_on, run.optimiser.classifier_lr_scale
        (15, 20, '1x1', 20.0)
        >>> base_config(StudyOptions(scale="paper"), "resnet101", "aircraft").model.backbone
        'resnet101.tv_in1k'
    """
    if options.scale == "smoke" or dataset in ("plumage", FIRST):
        part = "smoke" if options.scale == "smoke" else {"plumage": "drawn", FIRST: "drawn_first"}[dataset]
        part += "_vit" * NETWORKS[backbone].transformer
        run = from_mapping(SETTINGS[part])
    else:
        run = {"modern": _modern, "paper": _paper}.get(options.scale, _small)(options, backbone, dataset)
        name, root = find_images(options.data, dataset)
        run = replace(run, data=replace(run.data, name=name, root=root), workers=options.workers)
    transforms = run.data.transforms if options.img_size is None else run.data.transforms.at_size(options.img_size)
    data = replace(run.data, transforms=transforms)
    run = replace(run, data=data, epochs=options.epochs or run.epochs, device=options.device)
    return at_size(run, transforms.img_size) if NETWORKS[backbone].transformer else run


def at_size(run: Train, img_size: int) -> Train:
    """The same training of a transformer, which is built for one size of the images, at another size."""
    data = replace(run.data, transforms=run.data.transforms.at_size(img_size))
    return replace(run, data=data, model=replace(run.model, img_size=img_size))


def find_images(folder: str | None, dataset: str) -> tuple[str, str | None]:
    """The reader of a data set and its root: the reader ``folder`` if FOLDER/DATASET has folders train and test.

    Example:
        >>> find_images("/data", "cub")
        ('cub', '/data')
    """
    own = Path(folder or "").expanduser() / dataset
    if folder is not None and (own / "train").is_dir() and (own / "test").is_dir():
        return "folder", str(own)
    return dataset, folder


def has_recipe(options: StudyOptions, dataset: str) -> bool:
    """Whether a data set can be used at the scale: at scale modern it needs a recipe."""
    return options.scale != "modern" or dataset in ("plumage", FIRST) or modern_recipe(dataset) in list_recipes()


def modern_recipe(dataset: str) -> str:
    """Name of the recipe of scale modern."""
    return f"{SETTINGS['recipes'][dataset]}-resnet50-modern"


def network_name(backbone: str) -> str:
    """Name of a backbone of timm in studies, whatever its weights; the architecture if studies do not use it.

    Example:
        >>> network_name("resnet50.tv_in1k"), network_name("vgg16"), network_name("plumage_net")
        ('resnet50', 'vgg16', 'plumage_net')
    """
    architecture = backbone.split(".")[0]
    named = [name for name, network in NETWORKS.items() if architecture in (network.architecture, network.plain)]
    return named[0] if named else architecture


def _small(options: StudyOptions, backbone: str, dataset: str) -> Train:
    if dataset == "imagenet":  # from random weights, as in the paper, and shorter
        long = _paper(options, backbone, dataset)
        return replace(long, schedule=Schedule("cosine", warmup_epochs=1), epochs=15, amp="bf16", channels_last=True)
    cuda = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    quick, transformer = options.scale == "quick", NETWORKS[backbone].transformer
    settings = SETTINGS[options.scale] | (SETTINGS["transformer"] if transformer else {})
    run, network = from_mapping(settings), _network(options, backbone)
    optimiser = run.optimiser
    if not transformer:
        optimiser = replace(
            optimiser,
            lr=SETTINGS["plain_rate"] if network["backbone"] == NETWORKS[backbone].plain else optimiser.lr,
            weight_decay=SETTINGS["decays"].get(dataset, optimiser.weight_decay),
            classifier_lr_scale=SETTINGS["rates"].get(dataset, optimiser.classifier_lr_scale),
        )
    data = Data(dataset, transforms=run.data.transforms if quick else Transforms.of_scripts(dataset))
    network = {**network, **({"reduce": run.model.reduce} if quick else {})}
    model = replace(run.model, **network)
    # compiling takes longer than a quick run saves
    return replace(run, data=data, model=model, optimiser=optimiser, compile=cuda and not quick, cuda_graphs=cuda)


def _modern(options: StudyOptions, backbone: str, dataset: str) -> Train:
    cuda = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    changes: dict[str, Any] = {f"model.{key}": value for key, value in _network(options, backbone).items()}
    changes |= {"model.head": "mpncov", "data.name": dataset, "check_images": False, "eval_every": 100, "compile": cuda}
    run = load_recipe(modern_recipe(dataset), changes)
    # the augmentation of timm needs the CPU, and a graph overwrites gradients that are accumulated
    cache = "none" if run.data.transforms.kind == "timm" else "device"
    return replace(run, cache=cache, cuda_graphs=cuda and run.accumulate == 1)


def _paper(options: StudyOptions, backbone: str, dataset: str) -> Train:
    if NETWORKS[backbone].transformer:
        return _paper_transformer(options, backbone, dataset)
    own = {("vgg16", d) for d in SETTINGS["rates"]} | {(b, "imagenet") for b in ("alexnet", "resnet50")}
    network = backbone if (backbone, dataset) in own else "resnet50" if dataset in SETTINGS["rates"] else "efficientnet_b5"
    changes: dict[str, Any] = {"model.head": "mpncov", "recipe": None}
    if dataset != "imagenet":  # its weights are random
        changes |= {f"model.{key}": value for key, value in _network(options, backbone).items()}
    return load_recipe(f"{SETTINGS['recipes'][dataset]}-{network}-paper", changes)


def _paper_transformer(options: StudyOptions, backbone: str, dataset: str) -> Train:
    """The settings of TransFG, whose paper changes the learning rate and the size of the images for some data sets."""
    model = {"head": "mpncov", "backbone_options": {}, **_network(options, backbone)}  # patches overlap for some rows alone
    changes = {"recipe": None, "data.name": dataset} | SETTINGS["transfg"].get(dataset, {})
    return load_recipe("birds-vit_base-transfg", changes | {f"model.{key}": value for key, value in model.items()})


def _network(options: StudyOptions, backbone: str) -> Mapping[str, Any]:
    """Options of the model: the network and its weights."""
    network, weights, place = NETWORKS[backbone], None, Path(options.weights or "").expanduser()
    if options.weights is not None and place.is_dir():
        files = [file for name in (network.architecture, backbone) for file in sorted(place.glob(f"{name}.*"))]
        suffixes = (".safetensors", *TORCH_SUFFIXES)
        weights = next((str(file) for file in files if file.is_file() and file.suffix in suffixes), None)
    elif options.weights is not None and backbone == "resnet50":
        weights = str(place)
    model: dict[str, Any] = {"backbone": network.timm, "reduce": network.reduce, "last_stride": network.last_stride}
    model |= {"weights": weights, "pretrained": weights is None}
    if weights is not None:
        model["backbone"] = network.plain if network.plain == Path(weights).stem else network.architecture
    if network.resnet:
        model["stride_on"] = options.stride_on or ("3x3" if weights is None else "1x1")
    return model
