"""Save whole models to folders and load them: parameters as safetensors, everything else as JSON."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import eigengrain
from eigengrain.errors import ArgumentError, FileError, did_you_mean
from eigengrain.heads import SpectralHead
from eigengrain.models.create import create_model
from eigengrain.models.model import CovarianceNet, check_unwrapped
from eigengrain.models.weights import load_weights

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def save_pretrained(model: CovarianceNet, folder: str | os.PathLike[str], class_names: Sequence[str] | None = None) -> None:
    """Write a model to a folder: ``model.safetensors``, and ``config.json`` with architecture, classes, preprocessing.

    Args:
        model: from :func:`create_model`, also inside DistributedDataParallel or torch.compile.
        folder: created if it does not exist.
        class_names: names of the classes in the order of the scores; the model's own if None.

    Raises:
        ArgumentError: if there are more or fewer names than classes, the model has options that JSON cannot store, or it is
            wrapped in something else.
        FileError: if the folder cannot be created.

    Example:
        >>> import tempfile
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="gap", num_classes=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder, class_names=["sparrow", "wren"])
        ...     from_pretrained(folder).class_names
        ['sparrow', 'wren']
    """
    inner: Any = model
    while inner is not None and not isinstance(inner, CovarianceNet):  # DistributedDataParallel or torch.compile
        inner = getattr(inner, "module", getattr(inner, "_orig_mod", None))
    model = model if inner is None else inner
    check_unwrapped(model)
    names = model.class_names if class_names is None else list(class_names)
    _check_names(names, model)
    config = {
        "eigengrain": eigengrain.__version__,
        "architecture": model.config["backbone"],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "model": current_config(model),
        "subset": own_subset(model),
        "pretrained_cfg": model.pretrained_cfg,
        "label_names": names,
    }
    try:
        text = json.dumps(config, indent=2)
    except TypeError as error:
        raise ArgumentError("model", f"has options that JSON cannot store ({error})") from error
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise FileError(path, "a file with that name exists", "create the folder") from error
    # copies, because a shared module has several names, and the format refuses two tensors in the same memory
    state = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    save_file(state, path / WEIGHTS_FILE, metadata={"format": "pt"})
    (path / CONFIG_FILE).write_text(text + "\n")


def own_subset(model: CovarianceNet) -> str | None:
    """The subset of eigenvalues that the model's head keeps, None for all or a head without eigenvalues."""
    return model.head.own_subset if isinstance(model.head, SpectralHead) else None


def current_config(model: CovarianceNet) -> dict[str, Any]:
    """``model.config`` with the present subset of the head in place of the one the head was created with."""
    options = dict(model.config["head_options"])
    if "subset" in options and isinstance(model.head, SpectralHead):
        options["subset"] = str(model.head.subset)
    return {**model.config, "head_options": options}


def from_pretrained(folder: str | os.PathLike[str]) -> CovarianceNet:
    """Load a model that :func:`save_pretrained` wrote, in eval mode; ``runs/NAME/model`` of a training is such a folder.

    Raises:
        ValueError: if the folder does not contain a model, or its parts do not fit each other.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        options, description = dict(config["model"]), dict(config["pretrained_cfg"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        inside = path.parent / "model"
        exists = (inside / CONFIG_FILE).is_file()
        hint = did_you_mean([str(inside)]) if exists else f"({type(error).__name__}: {error})"
        problem = f"it is not a folder of save_pretrained, {path.name} is missing or not as expected: {hint}"
        raise FileError(path.parent, problem) from error
    for key in ("weights", "pretrained"):  # a config must not lead to other files or to a hub
        options.pop(key, None)
    try:
        model = create_model(**_with_tuples(options))
    except (TypeError, AttributeError) as error:
        raise FileError(path, f"it does not describe a model ({error})") from error
    load_weights(model, Path(folder) / WEIGHTS_FILE, strict=True)
    model.pretrained_cfg |= _with_tuples(description)
    model.class_names = config.get("label_names")
    _check_names(model.class_names, model)
    if config.get("subset") is not None:
        if not isinstance(model.head, SpectralHead):
            raise FileError(path, f"it has a subset of eigenvalues, and head {model.config['head']!r} has no eigenvalues")
        model.head.subset = config["subset"]
    return model.eval()


def _check_names(names: object, model: CovarianceNet) -> None:
    if names is None:
        return
    if not isinstance(names, list):
        raise ArgumentError("class_names", "must be a list", names)
    if len(names) != model.num_classes:
        raise ArgumentError("class_names", f"must have one name for each of the {model.num_classes} classes", len(names))


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Convert lists, which is all that JSON has, to the tuples of sizes, means and standard deviations."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
