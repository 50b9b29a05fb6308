"""A dry run: build everything, train on two images, and print what the training would do."""

import time

import torch
from torch.nn.functional import cross_entropy

from eigengrain import output
from eigengrain.text import counted
from eigengrain.training.setup import Run

PASSES = 2


def dry_run(run: Run) -> None:
    """Train on two images of the first batch, without an optimiser step, and print the plan."""
    model, config, process = run.model, run.config, run.process
    run.loaders.train.set_epoch(0)
    images, labels = (tensor[:2] for tensor in run.to_device(next(iter(run.loaders.train))))
    if len(images) == 1:
        images, labels = images.repeat(2, 1, 1, 1), labels.repeat(2)  # batch statistics need two images
    run.net.train()
    for _ in range(PASSES):  # the first one also compiles, chooses algorithms and allocates
        begin = time.perf_counter()
        loss = cross_entropy(run.net(images), labels, label_smoothing=config.label_smoothing)
        run.scaler.scale(loss).backward()
        value = float(loss.detach())  # waits for the device
        seconds = time.perf_counter() - begin
        run.optimiser.zero_grad(set_to_none=True)
    with torch.no_grad():
        map_size = tuple(model.eval().forward_features(images).shape[1:])
    if not process.is_main:
        return
    sources, total = run.sources, len(run.loaders.train)
    per_image = seconds / len(images)
    epoch = per_image * total * config.batch_size / process.world_size
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    plan = {
        "data": f"{sources.train.name}: {len(sources.train)} training, "
        f"{len(sources.val) if sources.val is not None else 0} validation, {len(sources.test)} test images, "
        f"{len(sources.train.classes)} classes",
        "model": f"{config.model.backbone} + {config.model.head}, {millions:.1f} M parameters; images "
        f"{tuple(images.shape[1:])} -> map {map_size} -> vector {model.head_hidden_size}",
        "rates": ", ".join(
            f"{g['name']} {g['initial_lr']:.3g} (weight decay {g['weight_decay']:.3g})" for g in run.optimiser.param_groups
        ),
        "schedule": f"{config.schedule.kind}, {counted(config.epochs, 'epoch')} of "
        f"{counted(run.updates_per_epoch, 'update')}, {config.batch_size * config.accumulate} images each, "
        f"epochs of warm-up: {config.schedule.warmup_epochs:g}",
        "selection": config.select,
        "device": f"{process.device}, processes: {process.world_size}, amp {config.amp}",
        "two images": f"loss {value:.4f}, {per_image:.3f} s per image forward and backward",
        "estimate": f"{_duration(epoch)} per epoch, {_duration(epoch * config.epochs)} in total, measured on these two "
        "images: larger batches are faster on a GPU, and reading images and evaluation are not included",
    }
    for name, text in plan.items():
        output.console().print(f"{name:12}{text}", soft_wrap=True, markup=False, highlight=False)
    output.result({"plan": plan}, [f"{name}\t{text}" for name, text in plan.items()])


def _duration(seconds: float) -> str:
    """
    Example:
        >>> _duration(4.21), _duration(125), _duration(7300)
        ('4.2 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
