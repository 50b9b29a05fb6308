"""Optimisers and learning rate schedules of timm, built from the config."""

import math
from dataclasses import asdict
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import MultiStepLRScheduler, PlateauLRScheduler, create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.models import parameter_groups
from eigengrain.training.config import Optimiser, Schedule

#: schedules that do not depend on the number of epochs
UNBOUNDED = ("drops", "constant", "step", "plateau")


def build_optimiser(model: nn.Module, config: Optimiser) -> torch.optim.Optimizer:
    """Create the optimiser of a model, with one learning rate per part of the model.

    ``sgd`` is plain momentum as in the paper; timm's own ``sgd`` uses Nesterov momentum, which is ``nesterov`` here.

    Raises:
        UnknownName: for an unknown optimiser, with close matches.
        ArgumentError: for an option that the optimiser does not have, or an optimiser that needs second derivatives.
    """
    if config.opt not in list_optimizers():
        raise UnknownName("optimiser.opt", config.opt, list_optimizers())
    others = ("opt", "momentum", "sam", "options")
    groups = parameter_groups(model, **{name: value for name, value in asdict(config).items() if name not in others})
    name = "momentum" if config.opt == "sgd" else config.opt
    try:
        optimiser = create_optimizer_v2(
            groups, name, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum, **config.options
        )
    except (TypeError, AssertionError, ImportError, ValueError) as error:
        raise ArgumentError("optimiser.options", f"do not fit {config.opt} ({error})", config.options) from error
    if getattr(optimiser, "is_second_order", False):
        raise ArgumentError("optimiser.opt", "needs second derivatives, which training does not compute", config.opt)
    return optimiser


class _Plateau(PlateauLRScheduler):
    """timm's plateau schedule with a warm-up per update, as the other schedules have it, instead of per epoch."""

    def __init__(self, optimiser: torch.optim.Optimizer, updates_per_epoch: int, **options: Any):
        super().__init__(optimiser, **options)
        self.updates_per_epoch = updates_per_epoch

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if num_updates <= self.warmup_t:
            self.update_groups([self.warmup_lr_init + num_updates * step for step in self.warmup_steps])

    def step(self, epoch: int, metric: float | None = None) -> None:
        if metric is not None and epoch * self.updates_per_epoch > self.warmup_t:
            self.lr_scheduler.step(metric)


def build_schedule(optimiser: torch.optim.Optimizer, config: Schedule, epochs: int, updates_per_epoch: int) -> Scheduler:
    """Create the schedule. It counts updates, so that warm-up and cosine are smooth; ``plateau`` counts evaluations.

    Raises:
        ArgumentError: if the warm-up is longer than the training.
    """
    if config.warmup_epochs > epochs:
        raise ArgumentError("schedule.warmup_epochs", f"must be at most {{epochs}} ({epochs})", config.warmup_epochs)
    warmup: dict[str, Any] = {
        "warmup_t": math.ceil(config.warmup_epochs * updates_per_epoch),
        "warmup_lr_init": config.warmup_lr,
    }
    if config.kind in ("drops", "constant"):
        # timm drops one update early, because it looks at the next update
        drops = [drop * updates_per_epoch + 1 for drop in config.drops]
        return MultiStepLRScheduler(
            optimiser, decay_t=drops, decay_rate=config.factor, warmup_prefix=False, t_in_epochs=False, **warmup
        )
    if config.kind == "plateau":
        return _Plateau(
            optimiser,
            updates_per_epoch,
            decay_rate=config.factor,
            patience_t=config.patience,
            lr_min=config.min_lr,
            **warmup,
        )
    schedule, _ = create_scheduler_v2(
        optimiser,
        config.kind,
        num_epochs=epochs,
        decay_epochs=config.every,
        decay_rate=config.factor,
        min_lr=config.min_lr,
        warmup_lr=config.warmup_lr,
        warmup_epochs=config.warmup_epochs,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return schedule


def learning_rates(optimiser: torch.optim.Optimizer) -> dict[str, float]:
    """Current learning rates of backbone, head and classifier, as columns; a part without parameters has none."""
    return {f"lr_{group['name'].split('/')[0]}": float(group["lr"]) for group in optimiser.param_groups}
