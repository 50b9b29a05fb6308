"""Checkpoints as commands read them. No torch here until one is opened."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eigengrain.models import CovarianceNet


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
