"""Checkpoints as commands read them. No torch here until one is opened."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from eigengrain.errors import did_you_mean
from eigengrain.text import few

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from eigengrain.models import CovarianceNet
    from eigengrain.models.backbone import ImageSize

#: the file in a folder of 'eigengrain train' that says its options
ARGUMENTS = "args.yaml"


def training_folder(path: Path) -> Path:
    """The folder of 'eigengrain train' that a checkpoint belongs to, if it is the model in one; else the path itself."""
    return path.parent if path.name == "model" and (path.parent / ARGUMENTS).is_file() else path


def model_folder(path: Path) -> Path:
    """The model of a checkpoint: the one in it for a folder of 'eigengrain train', else the path itself.

    Raises:
        ValueError: if the training has not ended, so that there is no model yet.
    """
    if not (path / ARGUMENTS).is_file():
        return path
    if not (path / "model").is_dir():
        raise ValueError(
            f"the training in {str(path)!r} has not ended: finish it with "
            f"'eigengrain train --config {path / ARGUMENTS} --resume'"
        )
    return path / "model"


class NamesAModel(Protocol):
    """Options that name a model: a checkpoint, and what a weights file alone does not say."""

    @property
    def checkpoint(self) -> str: ...
    @property
    def backbone(self) -> str | None: ...
    @property
    def head(self) -> str | None: ...
    @property
    def num_classes(self) -> int | None: ...
    @property
    def reduce(self) -> int | Literal["auto"] | None: ...
    @property
    def last_stride(self) -> int | None: ...


#: options that say what is in a weights file, and what they are when not given
_OF_WEIGHTS = {"backbone": None, "head": None, "reduce": "auto", "last_stride": None}


def open_model(options: NamesAModel, img_size: "ImageSize | None" = None) -> "CovarianceNet":
    """The model of a checkpoint.

    Args:
        options: of a command.
        img_size: side, or (height, width), of the images, for a weights file of a network that is built for one size.

    Raises:
        ValueError: if there is no model, a part of it is missing, or the options do not fit it.
    """
    from eigengrain.models import from_pretrained

    path = Path(options.checkpoint)
    if not path.exists():
        give = did_you_mean(near(options.checkpoint))
        give = give or "give a folder of 'eigengrain train' or of save_pretrained, or a weights file"
        raise ValueError(f"there is no checkpoint {options.checkpoint!r}: {give}")
    if path.name == "model.safetensors" and options.backbone is None and (path.parent / "config.json").is_file():
        path = path.parent  # the file that was named is a part of a folder that says the rest
    path = model_folder(path)
    if path.is_file():
        return _from_weights(path, options, img_size)
    given = [f"--{name}" for name, default in _OF_WEIGHTS.items() if getattr(options, name) != default]
    if given:
        raise ValueError(f"{', '.join(given)} is for a weights file: the folder {str(path)!r} says what its model is")
    if not (path / "config.json").is_file():
        inner = sorted(str(file.parent) for file in path.glob("*/config.json"))[:3]
        reason = f"{str(path)!r} is not a folder of save_pretrained: it has no config.json"
        raise ValueError(": ".join(filter(None, (reason, did_you_mean(inner)))))
    model = from_pretrained(path)
    if options.num_classes not in (None, model.num_classes):
        raise ValueError(
            f"the model has {model.num_classes} classes, --num_classes says {options.num_classes}: leave it out"
        )
    return model


def _from_weights(path: Path, options: NamesAModel, img_size: "ImageSize | None") -> "CovarianceNet":
    """A model by its names, filled from a file."""
    from eigengrain.models import create_model
    from eigengrain.models.probe import on_meta

    missing = [f"--{name}" for name in ("backbone", "head", "num_classes") if getattr(options, name) is None]
    backbone = options.backbone
    if backbone is None or missing:
        raise ValueError(
            f"{str(path)!r} is a weights file, which does not say its model: give {', '.join(missing)} too, or the folder "
            "that save_pretrained wrote"
        )
    names = ("head", "num_classes", "reduce", "last_stride")
    arguments: dict[str, Any] = {name: getattr(options, name) for name in names}
    if img_size is not None:
        # only networks that are built for one size take img_size
        built_for = on_meta(lambda: create_model(backbone, **arguments).config["img_size"])
        arguments["img_size"] = img_size if built_for else None
    return fill(create_model(backbone, **arguments), path)


def near(place: str) -> list[str]:
    """Files whose names are near one that is not there."""
    parent, name = os.path.split(place.rstrip(os.sep))
    folder = parent or "."
    beside = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else []
    return [os.path.join(parent, other) for other in get_close_matches(name, beside, n=2)]


def fill(model: "CovarianceNet", path: Path) -> "CovarianceNet":
    """The model with the parameters of a weights file, to the last one: an untrained part makes noise of every answer.

    Raises:
        ValueError: if the file cannot be read, or leaves a part of the model as it was.
    """
    from eigengrain.models import load_weights

    report = load_weights(model, path)
    untrained = (*report.mismatched, *report.new)
    if untrained:
        raise ValueError(
            f"{path.name} does not fill the model: {few(untrained, 3)}; check --backbone, --head, "
            "--num_classes and --reduce"
        )
    return model


def preparation(model: "CovarianceNet", img_size: int | None = None) -> dict[str, Any]:
    """What the images go through, as the checkpoint says, in timm's words: size, crop, interpolation, mean, std."""
    from timm.data import create_transform, resolve_data_config

    try:
        how: dict[str, Any] = resolve_data_config({"img_size": img_size}, pretrained_cfg=model.pretrained_cfg)
        create_transform(**how)
        if not len(how["input_size"]) == len(how["mean"]) == len(how["std"]) == 3:
            raise ValueError("input_size, mean and std must have 3 numbers each")
        return how
    except Exception as error:  # values of any type may stand in a JSON file
        raise ValueError(f"the checkpoint's preprocessing cannot be followed ({error}): see its pretrained_cfg") from error


def plain_transform(model: "CovarianceNet") -> "Callable[[Image], Tensor]":
    """What the checkpoint says is done to images."""
    from timm.data import create_transform

    transform: Callable[[Image], Tensor] = create_transform(**preparation(model))
    return transform
