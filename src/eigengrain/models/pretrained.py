"""Whole models in a folder: parameters as safetensors, and a JSON file with all that is needed to use them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import eigengrain
from eigengrain.heads import CovarianceHead
from eigengrain.models.create import create_model
from eigengrain.models.model import CovarianceNet, check_bare
from eigengrain.models.weights import load_weights

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def save_pretrained(model: CovarianceNet, folder: str | os.PathLike[str], class_names: Sequence[str] | None = None) -> None:
    """Write a model to a folder: ``model.safetensors``, and ``config.json`` with architecture, classes, preprocessing.

    Args:
        model: from :func:`create_model`, also in DistributedDataParallel or torch.compile.
        folder: made if it is not there.
        class_names: in the order of the scores; the model's own if None.

    Raises:
        ValueError: if the names are not as many as the classes, the model was made with options that JSON cannot hold or
            has something else around it, or there is a file in the place of the folder.

    Example:
        >>> import tempfile
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="gap", num_classes=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder, class_names=["sparrow", "wren"])
        ...     from_pretrained(folder).class_names
        ['sparrow', 'wren']
    """
    while not isinstance(model, CovarianceNet) and (inner := _inside(model)) is not None:
        model = inner
    check_bare(model, "save_pretrained")
    names = model.class_names if class_names is None else list(class_names)
    _check_names(names, model)
    config = {
        "eigengrain": eigengrain.__version__,
        "architecture": model.config["backbone"],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "model": current_config(model),
        "pretrained_cfg": model.pretrained_cfg,
        "label_names": names,
    }
    try:
        text = json.dumps(config, indent=2)
    except TypeError as error:
        raise ValueError(f"the model's options must be plain values to be saved: {error}") from error
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{str(folder)!r} is to be a folder, and there is a file in its place: name another") from error
    # copies, because a module that is shared has several names, and the format refuses two of one memory
    state = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    save_file(state, path / WEIGHTS_FILE, metadata={"format": "pt"})
    (path / CONFIG_FILE).write_text(text + "\n")


def current_config(model: CovarianceNet) -> dict[str, Any]:
    """``model.config`` with the subset that its head keeps by now: ``head.subset`` may be set after the model was made.

    Example:
        >>> model = create_model("resnet18", head="mpncov", num_classes=2)
        >>> model.head.subset = "top:9"
        >>> current_config(model)["head_options"]
        {'subset': 'top:9'}
    """
    options = dict(model.config["head_options"])
    kept = str(model.head.subset) if isinstance(model.head, CovarianceHead) else "all"
    if kept != options.get("subset", "all"):
        options["subset"] = kept
    return {**model.config, "head_options": options}


def from_pretrained(folder: str | os.PathLike[str]) -> CovarianceNet:
    """The model that :func:`save_pretrained` wrote to a folder, in eval mode; ``runs/NAME/model`` of a training is one.

    Raises:
        ValueError: if the folder does not hold one, or a part of it does not fit the rest.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        options, description = dict(config["model"]), dict(config["pretrained_cfg"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        inside = path.parent / "model" if (path.parent / "model" / CONFIG_FILE).is_file() else None
        raise ValueError(
            f"{str(folder)!r} is not a folder of save_pretrained: {path.name} is missing or not as expected"
            + (f": did you mean {str(inside)!r}?" if inside else f" ({type(error).__name__}: {error})")
        ) from error
    for key in ("weights", "pretrained"):  # a folder is read for itself: its config must not lead to other files or a hub
        options.pop(key, None)
    try:
        model = create_model(**_with_tuples(options))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} does not describe a model: {error}") from error
    load_weights(model, Path(folder) / WEIGHTS_FILE, strict=True)
    model.pretrained_cfg |= _with_tuples(description)
    model.class_names = config.get("label_names")
    _check_names(model.class_names, model)
    return model.eval()


def _inside(model: Any) -> Any:
    """What DistributedDataParallel, DataParallel or torch.compile was put around, or None."""
    return getattr(model, "module", getattr(model, "_orig_mod", None))


def _check_names(names: object, model: CovarianceNet) -> None:
    if names is None:
        return
    if not isinstance(names, list):
        raise ValueError(f"class names must be a list, got {names!r}")
    if len(names) != model.num_classes:
        raise ValueError(f"class_names must be as many as the classes, {model.num_classes}, got {len(names)}")


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only; sizes, means and deviations are tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
