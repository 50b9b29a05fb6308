"""Optimisers and schedules of timm, by the words of the config."""

import math
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import MultiStepLRScheduler, PlateauLRScheduler, create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from eigengrain.errors import UnknownName
from eigengrain.models import parameter_groups
from eigengrain.training.config import Optimiser, Schedule


def build_optimiser(model: nn.Module, config: Optimiser) -> torch.optim.Optimizer:
    """The optimiser of a model, with a learning rate for each part of it.

    ``sgd`` is plain momentum as in the paper; timm's own ``sgd`` means Nesterov's, which is ``nesterov`` here.

    Raises:
        ValueError: for an unknown name, with near matches, or an option that the optimiser does not have.
    """
    if config.opt not in list_optimizers():
        raise UnknownName("--optimiser.opt", config.opt, list_optimizers())
    groups = parameter_groups(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        head_lr_scale=config.head_lr_scale,
        classifier_lr_scale=config.classifier_lr_scale,
        decay_norms_and_biases=config.decay_norms_and_biases,
    )
    name = "momentum" if config.opt == "sgd" else config.opt
    try:
        optimiser = create_optimizer_v2(
            groups, name, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum, **config.options
        )
    except (TypeError, AssertionError, ImportError, ValueError) as error:
        raise ValueError(f"optimiser {config.opt!r} cannot be made: {error}") from error
    if getattr(optimiser, "is_second_order", False):
        raise ValueError(f"optimiser {config.opt!r} takes second derivatives, which training does not: choose another")
    return optimiser


class _Plateau(PlateauLRScheduler):
    """timm's, with a warm-up that climbs at every update, as those of the other schedules do, and not once an epoch."""

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
    """The schedule, counted in updates, so that warm-up and cosine are smooth; only ``plateau`` counts evaluations.

    Raises:
        ValueError: if the warm-up is longer than the training.
    """
    if config.warmup_epochs > epochs:
        raise ValueError(f"--schedule.warmup_epochs must be at most --epochs {epochs}, got {config.warmup_epochs}")
    warmup: dict[str, Any] = {
        "warmup_t": math.ceil(config.warmup_epochs * updates_per_epoch),
        "warmup_lr_init": config.warmup_lr,
    }
    if config.kind in ("drops", "constant"):
        # timm drops one update early: it looks at the update that follows
        drops = [drop * updates_per_epoch + 1 for drop in config.drops]
        return MultiStepLRScheduler(
            optimiser,
            decay_t=drops,
            decay_rate=config.factor,
            warmup_prefix=False,
            t_in_epochs=False,
            **warmup,
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


def rates(optimiser: torch.optim.Optimizer) -> dict[str, float]:
    """Learning rates of backbone, head and classifier now, as columns; a part without parameters has none."""
    return {f"lr_{group['name'].split('/')[0]}": float(group["lr"]) for group in optimiser.param_groups}
