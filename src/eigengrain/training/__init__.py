"""Training: configs and recipes, one loop, checkpoints that resume to the same weights, evaluation, several processes.

Loaded on first use (PEP 562), so that the options can be read without torch.
"""

from typing import TYPE_CHECKING

from eigengrain._lazy import loader

if TYPE_CHECKING:
    from eigengrain.training.config import Train as Train
    from eigengrain.training.evaluation import evaluate as evaluate
    from eigengrain.training.loop import train as train

_EXPORTS = {
    "Train": "eigengrain.training.config",
    "evaluate": "eigengrain.training.evaluation",
    "train": "eigengrain.training.loop",
}

__all__ = ["Train", "evaluate", "train"]


if not TYPE_CHECKING:  # type checkers read the names above, and should refuse all others
    __getattr__ = loader(__name__, _EXPORTS)
