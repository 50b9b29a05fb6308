"""A dry run: build everything, train on a few batches, and print what the training would do."""

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count, cycle, islice
from typing import NamedTuple

import torch
from torch import Tensor

from eigengrain import output
from eigengrain.data import Batches
from eigengrain.text import counted, duration, few
from eigengrain.training.evaluation import evaluate
from eigengrain.training.features import FeatureBatches, TrainingFeatures
from eigengrain.training.setup import Run

#: images or features, and labels
Batch = tuple[Tensor, Tensor]

#: batches before the timed ones, least number of timed batches, and seconds after which slow batches are enough
WARMUP, TIMED, SECONDS = 2, 5, 10.0
#: unreadable images that are named
UNREADABLE_SHOWN = 10


class Speed(NamedTuple):
    """What the batches of a dry run measure."""

    loss: float
    seconds: float  # per batch, including reading its images, unless their features are kept
    batches: int  # timed ones
    once: float  # for the features that are kept


def dry_run(run: Run) -> None:
    """Train on a few batches, without keeping the weights, and print the plan.

    Raises:
        UnreadableImages: at the end, if images cannot be read; the plan is for the others.
    """
    model, process = run.model, run.process
    speed = _time_training(run)
    times = [_time_evaluation(run, loader) for loader in (run.loaders.val, run.loaders.test) if loader is not None]
    evaluation = sum(seconds for seconds, _ in times)
    speed = speed._replace(once=speed.once + sum(once for _, once in times))
    memory = _peak_memory(process.device)
    image = run.images.test.dataset[0][0].to(process.device)
    with torch.no_grad():
        map_size = tuple(model.eval().forward_features(image[None]).shape[1:])
    if process.is_main:
        _print_plan(run, speed, evaluation, memory, tuple(image.shape), map_size)
    if run.unreadable is not None:
        raise run.unreadable


def _print_plan(
    run: Run, speed: Speed, evaluation: float, memory: int, image_size: tuple[int, ...], map_size: tuple[int, ...]
) -> None:
    model, config, process, sources = run.model, run.config, run.process, run.sources
    total = len(run.loaders.train)
    evaluations = -(-config.epochs // config.eval_every)
    seconds = speed.once + config.epochs * total * speed.seconds + evaluations * evaluation
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    plan = {
        "data": f"{sources.train.name}: {len(sources.train)} training, "
        f"{len(sources.val) if sources.val is not None else 0} validation, {len(sources.test)} test images, "
        f"{len(sources.train.classes)} classes",
        "model": f"{config.model.backbone} + {config.model.head}, {millions:.1f} M parameters; images "
        f"{image_size} -> map {map_size} -> vector {model.head_hidden_size}",
        "rates": ", ".join(
            f"{g['name']} {g['initial_lr']:.3g} (weight decay {g['weight_decay']:.3g})" for g in run.optimiser.param_groups
        ),
        "schedule": f"{config.schedule.kind}, {counted(config.epochs, 'epoch')} of "
        f"{counted(run.updates_per_epoch, 'update')}, {config.batch_size * config.accumulate} images each, "
        f"epochs of warm-up: {config.schedule.warmup_epochs:g}",
        "selection": config.select,
        "device": f"{process.device}, processes: {process.world_size}, amp {config.amp}",
        "batch": f"loss {speed.loss:.4f}, {duration(speed.seconds)}, {config.batch_size / speed.seconds:.1f} images/s",
        "memory": f"at most {memory / 2**30:.1f} GiB" if memory else "not known on this system",
        "estimate": f"{duration(seconds)} for all epochs: {duration(total * speed.seconds)} per epoch and "
        f"{duration(evaluation)} per evaluation, from {speed.batches} batches after the first {WARMUP}",
    }
    if run.from_features:
        plan["features"] = f"{duration(speed.once)} to compute them once, which the estimate includes"
    if run.unreadable is not None:
        plan["unreadable"] = few([path for path, _ in run.unreadable.problems], UNREADABLE_SHOWN)
    for name, text in plan.items():
        output.console().print(f"{name:12}{text}", soft_wrap=True, markup=False, highlight=False)
    numbers = {"seconds": seconds, "seconds_per_batch": speed.seconds, "seconds_per_evaluation": evaluation}
    document = {"plan": plan, "estimate": numbers | {"memory_bytes": memory}}
    output.result(document, [f"{name}\t{text}" for name, text in plan.items()])


def _time_training(run: Run) -> Speed:
    """Train on batches until enough are timed; those that the workers read during the warm-up do not show their speed."""
    process, accumulate = run.process, run.config.accumulate
    batches, once = _endless(run.loaders.train), 0.0
    if isinstance(run.loaders.train, TrainingFeatures):
        kept, once = _time_features(run, run.loaders.train)
        batches, once = cycle(kept), once * run.loaders.train.views
    losses: list[float] = []
    begin = start = time.perf_counter()
    warm = 0
    run.net.train()
    for number, data in enumerate(batches):
        images, targets = run.loss.mix(*run.to_device(data), 0, number)
        _, loss = run.backward(images, targets, accumulate)
        if (number + 1) % accumulate == 0:
            run.scaler.step(run.optimiser)
            run.scaler.update()
            run.optimiser.zero_grad(set_to_none=True)
            if run.ema is not None:
                run.ema.update(run.model, step=number)
        losses.append(float(loss))  # waits for the device
        now, timed = time.perf_counter(), len(losses) - warm
        if not warm:
            enough = len(losses) >= WARMUP or now - start > SECONDS
            warm, begin = (len(losses), now) if any(process.max(enough)) else (0, begin)
        elif any(process.max(now - begin > SECONDS or timed >= max(TIMED, 2 * run.config.workers + 1))):
            break
    return Speed(losses[0], (now - begin) / timed, timed, once)


def _time_features(run: Run, loader: FeatureBatches) -> tuple[list[Batch], float]:
    """The first batches of features, and the seconds for those of all images, which a dry run does not compute."""
    batches, stamps = [], [time.perf_counter()]
    for batch in islice(loader.computed(), WARMUP + TIMED):
        batches.append(batch)
        float(batch[0].sum())  # waits for the device
        stamps.append(time.perf_counter())
        if stamps[-1] - stamps[0] > SECONDS:
            break
    first = min(WARMUP, len(batches) - 1)
    return batches, (stamps[-1] - stamps[first]) / (len(batches) - first) * len(loader)


def _time_evaluation(run: Run, loader: Batches) -> tuple[float, float]:
    """Seconds for the evaluation of a split, from its first batches, and for its features if they are kept.

    The very first batch also starts workers.
    """
    batches: Iterable[Batch] = islice(loader, 1 + TIMED)
    once = 0.0
    if isinstance(loader, FeatureBatches):
        batches, once = _time_features(run, loader)
    stamps = [time.perf_counter()]
    options = run.precision
    evaluate(run.evaluated, batches, run.process, **options, each=lambda: stamps.append(time.perf_counter()))
    first, timed = (1, len(stamps) - 2) if len(stamps) > 2 else (0, 1)
    return (time.perf_counter() - stamps[first]) / timed * len(loader), once


def _endless(loader: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of all epochs."""
    for epoch in count():
        loader.set_epoch(epoch)
        yield from loader


def _peak_memory(device: torch.device) -> int:
    """Largest memory of the device, or of this process on the CPU, in bytes so far; 0 if it cannot be measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    if sys.platform == "win32" or device.type != "cpu":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
