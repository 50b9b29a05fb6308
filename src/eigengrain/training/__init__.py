"""Training: configs and recipes, one loop, checkpoints that resume to the same weights, evaluation, several processes.

Loaded on first use (PEP 562), so that the options can be read without torch.
"""

from typing import TYPE_CHECKING

from eigengrain._lazy import loader

if TYPE_CHECKING:
    from eigengrain.training.config import Train as Train
    from eigengrain.training.evaluation import evaluate as evaluate
    from eigengrain.training.loop import train as train
    from eigengrain.training.run_folder import TrainedModel as TrainedModel
    from eigengrain.training.run_folder import open_run as open_run
    from eigengrain.training.run_folder import open_weights as open_weights
    from eigengrain.training.vector_length import calibrate_vectors as calibrate_vectors

_EXPORTS = {
    "Train": "eigengrain.training.config",
    "evaluate": "eigengrain.training.evaluation",
    "train": "eigengrain.training.loop",
    "calibrate_vectors": "eigengrain.training.vector_length",
    **dict.fromkeys(("TrainedModel", "open_run", "open_weights"), "eigengrain.training.run_folder"),
}

__all__ = [*_EXPORTS]


if not TYPE_CHECKING:  # type checkers read the names above, and should refuse all others
    __getattr__ = loader(__name__, _EXPORTS)
