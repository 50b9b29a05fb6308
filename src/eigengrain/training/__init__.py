"""Training: configs and recipes, one loop, checkpoints that resume to the same weights, evaluation, several processes.

Loaded on first use (PEP 562), so that the options can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'eigengrain.training' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
