"""Checkpoints as commands read them. No torch here until one is opened."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eigengrain.models import CovarianceNet

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
        raise ValueError(f"the training in {str(path)!r} has not ended: finish it with 'eigengrain train --resume'")
    return path / "model"


def fill(model: "CovarianceNet", path: Path) -> "CovarianceNet":
    """The model with the parameters of a weights file, to the last one: an untrained part makes noise of every answer.

    Raises:
        ValueError: if the file cannot be read, or leaves a part of the model as it was.
    """
    from eigengrain.models import load_weights

    report = load_weights(model, path)
    untrained = (*report.mismatched, *report.new)
    if untrained:
        more = f" and {len(untrained) - 3} more" if len(untrained) > 3 else ""
        raise ValueError(
            f"{path.name} does not fill the model: {', '.join(untrained[:3])}{more}; check --backbone, --head, "
            "--num_classes and --reduce"
        )
    return model
