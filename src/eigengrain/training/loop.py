"""The training loop, top to bottom."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

from eigengrain import output
from eigengrain.data.sampler import derive
from eigengrain.environment import describe
from eigengrain.errors import ArgumentError, CheckpointError, Diverged, Interrupted, NonFiniteError
from eigengrain.functional import solver_repairs
from eigengrain.heads import SpectralHead
from eigengrain.models import CovarianceNet, save_pretrained
from eigengrain.models.card import ModelCard
from eigengrain.progress import TrainingProgress
from eigengrain.text import counted
from eigengrain.training.calibration import calibrate
from eigengrain.training.checkpoint import (
    BEST,
    LAST,
    copy_atomically,
    read_checkpoint,
    restoring,
    write_atomically,
    write_checkpoint,
)
from eigengrain.training.config import Train, differences, to_mapping
from eigengrain.training.distributed import generator_states, join, preserve_generators, restore_generators, seed_everything
from eigengrain.training.evaluation import evaluate
from eigengrain.training.features import FeatureBatches
from eigengrain.training.loss import hits
from eigengrain.training.plan import dry_run
from eigengrain.training.run_folder import ARGUMENTS, MODEL, RESULTS
from eigengrain.training.schedule import UNBOUNDED, learning_rates
from eigengrain.training.setup import Run, build, write_arguments
from eigengrain.training.signals import StopRequest, catch_signals
from eigengrain.training.sources import Sources, write_split
from eigengrain.training.telemetry import Meter, Summary, spectrum_row

#: function that is called after each batch with epoch, batch (both from 0) and the loss of this process
OnStep = Callable[[int, int, float], object]


@dataclass
class Progress:
    """Progress of a run, part of the checkpoint."""

    epoch: int = 0  # the current one, from 0
    batch: int = 0  # the next one of this epoch
    updates: int = 0  # optimiser steps so far
    best: float = -math.inf  # best accuracy so far on the split that selects the epoch
    best_epoch: int = 0  # from 1; 0 for none
    scores: dict[int, dict[str, float]] = field(default_factory=dict)  # of the last and of the best epoch, from 1
    meter: Meter = field(default_factory=Meter)  # sums over this epoch


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Args:
        select: how the epoch was selected: last, best-val or best-test.
        epoch: epoch whose weights are in the model folder, from 1.
        scores: accuracies and losses of that epoch, by column of summary.csv.
        epochs_trained: number of epochs trained.
        model: folder of the model.
    """

    select: str
    epoch: int
    scores: dict[str, float]
    epochs_trained: int
    model: str


def train(config: Train, sources: Sources | None = None, on_step: OnStep | None = None) -> Result | None:
    """Train a model.

    Args:
        config: the options.
        sources: data sets to use instead of those of the config.
        on_step: function that is called after each batch with (epoch, batch, loss).

    Returns:
        the result; None after a dry run.

    Raises:
        ValueError: for an option that does not fit, before training starts; for a batch that does not fit into memory.
        UnreadableImages: before training, or at the end of a dry run.
        Diverged: if the loss, the features or the scores are not finite, or if all covariances are zero at the end of an
            epoch, so that the backbone receives no gradient; the previous checkpoint is kept.
        CheckpointError: if a checkpoint cannot be written or read.
        Interrupted: after Ctrl-C or SIGTERM, when the checkpoint is written.
    """
    with join(config.device) as process, preserve_generators(process.device):
        seed_everything(config.seed)  # the same initialisation in every process
        run = build(config, sources, process)
        try:
            if config.dry_run:
                dry_run(run)
                return None
            with catch_signals() as request, _fastest_kernels():
                return _train(run, request, on_step)
        except torch.OutOfMemoryError as error:
            problem, remedy = f"is too large for the memory of {process.device}", "reduce it, and use more {accumulate}"
            raise ArgumentError("batch_size", problem, config.batch_size, remedy) from error


def _train(run: Run, request: StopRequest, on_step: OnStep | None) -> Result:
    config, process, model, optimiser = run.config, run.process, run.model, run.optimiser
    out, total = Path(config.out), len(run.loaders.train)

    def stop_before_training() -> None:
        if request.signal and not process.distributed:
            raise Interrupted(request.signal, "while the features were computed")

    features = [loader for loader in run.loaders if isinstance(loader, FeatureBatches)]
    for kept in features:
        kept.each = stop_before_training
    resumed = (out / LAST).exists()
    with restoring(out / LAST) if resumed else nullcontext():
        progress, generators = _resume(run, out) if resumed else (Progress(), None)
    if process.is_main:
        write_arguments(out, config)
        write_split(out, run.sources, config.data.root)
        if progress.epoch < config.epochs:
            (out / RESULTS).unlink(missing_ok=True)  # a finished run that gets more epochs has no result yet
    if not resumed:
        run.calibrate()
    if progress.epoch < config.epochs and not _stalled(config, progress):
        for kept in features:
            kept.fill()  # here, so that the first epoch is not timed with it
    summary = Summary(out / "summary.csv", progress.epoch) if process.is_main else None
    head = model.head if isinstance(model.head, SpectralHead) else None
    board: Any = None
    if config.log == "tensorboard" and process.is_main:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(out / "tensorboard"), purge_step=progress.epoch + 1)  # drops what is trained again
    check_every = check_interval(process.device)

    def save() -> None:
        states = process.gather(generator_states(process.device))
        if process.is_main:
            write_checkpoint(out / LAST, {**run.state(), "progress": asdict(progress), "generators": states})
        process.wait()  # torchrun ends all processes when one exits: none may exit before the checkpoint is written

    def save_and_stop(signal: int) -> None:
        save()
        raise Interrupted(signal, f"in epoch {progress.epoch + 1} after batch {progress.batch} of {total}")

    def stop_evaluation() -> None:
        if request.signal and not process.distributed:  # several processes have different numbers of batches
            save_and_stop(request.signal)

    def diverged(reason: str, batch: int = total, loss: float | None = None) -> Diverged:
        checkpoint = out / LAST if (out / LAST).exists() else None
        return Diverged(reason, progress.epoch + 1, batch, total, loss, checkpoint)

    shown = TrainingProgress(config.epochs, total, config.batch_size, process.is_main)
    with shown, nullcontext() if board is None else board:
        while progress.epoch < config.epochs and not _stalled(config, progress):
            epoch, meter = progress.epoch, progress.meter
            shown.start_epoch(epoch, progress.batch)
            accuracy = _accuracy(progress.scores.get(max(progress.scores, default=0), {}))
            run.loaders.train.set_epoch(epoch, start_batch=progress.batch)
            run.net.train()
            solver_repairs(reset=True)  # do not count those of the evaluation
            losses: list[Tensor] = []  # on the device, not yet checked
            right: list[Tensor] = []  # numbers of images with the highest score for their class
            norms: list[Tensor] = []
            seen = 0  # images of these losses
            clock = time.perf_counter()
            for batch, data in enumerate(run.loaders.train, start=progress.batch):
                # A loader draws from the generators when it starts. Only after its first batch can a resumed epoch have
                # the generator states of an uninterrupted one.
                if generators is not None:
                    restore_generators(generators, process.device)
                    generators = None
                elif batch == 0:
                    seed_everything(derive(config.seed, epoch, process.rank))

                # forward and backward; gradients are averaged over a group of batches, and the last group may be smaller
                begin = batch - batch % config.accumulate
                group = min(config.accumulate, total - begin)
                ends_group, ends_epoch = batch + 1 == begin + group, batch + 1 == total
                try:
                    images, targets = run.loss.mix(*run.to_device(data), epoch, batch)
                    # one spectrum per epoch (some heads need a decomposition for it), one gradient exchange per group
                    waits = isinstance(run.net, DistributedDataParallel) and not ends_group
                    with run.net.no_sync() if waits else nullcontext():  # type: ignore[operator]
                        scores, loss = run.backward(images, targets, group, record_spectrum=ends_epoch)
                except NonFiniteError as error:
                    raise diverged("the features are not finite", batch + 1) from error
                losses.append(loss)
                right.append(hits(scores, targets))
                seen += len(images) * process.world_size
                if on_step is not None:
                    on_step(epoch, batch, float(losses[-1]))
                shown.advance(*meter.facts(), *accuracy)
                if not ends_group:
                    continue

                # optimiser step
                run.scaler.unscale_(optimiser)
                norms.append(_gradient_norm(model, config.clip_grad))
                run.scaler.step(optimiser)
                run.scaler.update()
                optimiser.zero_grad(set_to_none=True)
                meter.rates = learning_rates(optimiser)
                progress.updates += 1
                run.schedule.step_update(progress.updates)
                if run.ema is not None:
                    run.ema.update(model, step=progress.updates)

                # check the losses, save, stop: at the same batches in all processes
                saves = config.save_every > 0 and (batch + 1) % config.save_every == 0
                if saves or ends_epoch or len(losses) >= check_every:
                    meter.images, seen = meter.images + seen, 0
                    for number, value in enumerate(meter.add(losses, right, norms, process), start=batch + 2 - len(losses)):
                        if not math.isfinite(value):
                            raise diverged(f"the loss is {value}", number, value)
                    for checked in (losses, right, norms):
                        checked.clear()
                    progress.batch = batch + 1
                    spectrum = head.last_spectrum if head is not None and ends_epoch else None
                    if spectrum is not None:
                        meter.spectrum = spectrum_row(*spectrum)
                    meter.seconds, clock = meter.seconds + time.perf_counter() - clock, time.perf_counter()
                    alive = spectrum is None or bool(spectrum.eigenvalues.any())
                    signal, alive_anywhere = process.max(request.signal, alive)
                    if not alive_anywhere:
                        raise diverged("all covariances are zero")
                    if signal:
                        save_and_stop(signal)
                    if saves and not ends_epoch:
                        save()

            # end of the epoch: accuracy, a row of the summary, the checkpoint
            generators = None
            process.share_buffers(run.evaluated)
            results: dict[str, float] = {}
            if (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs:
                for split, loader in (("val", run.loaders.val), ("test", run.loaders.test)):
                    if loader is None:
                        continue
                    try:
                        [score] = evaluate(run.evaluated, loader, process, **run.precision, each=stop_evaluation)
                    except NonFiniteError as error:
                        raise diverged("the scores are not finite") from error
                    results |= {f"{split}_top1": score.top1, f"{split}_top5": score.top5, f"{split}_loss": score.loss}
            row: dict[str, Any] = {"epoch": epoch + 1, **meter.row(), **results}
            watched = results.get("test_top1" if config.select == "best-test" or run.loaders.val is None else "val_top1")
            improved = watched is not None and watched > progress.best
            if watched is not None and improved:
                progress.best, progress.best_epoch = watched, epoch + 1
            progress.scores = {e: s for e, s in progress.scores.items() if e == progress.best_epoch} | {epoch + 1: results}
            run.schedule.step(epoch + 1, watched)
            shown.end_epoch()
            if summary is not None:
                summary.append(row)
                shown.print("   ".join([_line(row, config.epochs), *shown.left()]))
            if board is not None:
                for name, value in row.items():
                    board.add_scalar(name, value, epoch + 1)
                board.flush()
            progress.epoch, progress.batch, progress.meter = epoch + 1, 0, Meter()
            save()
            if improved and process.is_main:
                copy_atomically(out / LAST, out / BEST)
            [signal] = process.max(request.signal)
            if signal and progress.epoch < config.epochs:
                raise Interrupted(signal, f"after epoch {progress.epoch}")
    return _finish(run, progress, out)


def check_interval(device: torch.device) -> int:
    """Least number of batches between two checks of the losses; on an accelerator, each check waits for the device."""
    return 1 if device.type == "cpu" else 25


@contextmanager
def _fastest_kernels() -> Iterator[None]:
    """Let cuDNN search for the fastest convolutions, because all batches have one shape, unless they must be repeatable."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _resume(run: Run, out: Path) -> tuple[Progress, dict[str, Any] | None]:
    """Restore a run; returns its progress, and the generator states if that is within an epoch.

    The number of epochs may change: from here on the learning rate is that of a run with the new number. For ``drops``,
    ``constant``, ``step`` and ``plateau``, which do not depend on it, the results are those of such a run.
    """
    state = read_checkpoint(out / LAST)
    if changed := [name for name in differences(state["config"], to_mapping(run.config)) if name != "epochs"]:
        names = ", ".join(f"{{{name}}}" for name in changed[:5])
        remedy = f"use the values of {out / ARGUMENTS} or another folder"
        raise ArgumentError("out", f"contains a run with other values of {names}", str(out), remedy)
    if state["class_names"] != run.model.class_names:
        raise ArgumentError("out", "contains a run with other classes", str(out), "use the same data set")
    run.load(state)
    values = state["progress"]
    progress = Progress(**{**values, "meter": Meter(**values["meter"])})
    before, epochs, kind = state["config"]["epochs"], run.config.epochs, run.config.schedule.kind
    evaluated = progress.batch == 0 and progress.scores.get(progress.epoch)
    if epochs < (least := progress.epoch + (not evaluated)):
        raise ArgumentError("epochs", f"must be at least {least}, because {progress.epoch} are trained", epochs)
    if epochs != before:
        run.schedule.step_update(progress.updates)  # the learning rate of the next update
        change = "as before" if kind in UNBOUNDED else f"that of {counted(epochs, 'epoch')}"
        if _stalled(run.config, progress):
            change = f"not used, because early_stop {run.config.early_stop} ended the run after epoch {progress.epoch}"
        else:
            change += " from here on"
        if run.process.is_main:
            output.note(f"{epochs} instead of {counted(before, 'epoch')}: the schedule ({kind}) is {change}")
    if run.process.is_main and progress.batch == 0 and progress.best_epoch == progress.epoch:
        copy_atomically(out / LAST, out / BEST)  # the run may have been killed between the two
    states = state["generators"][run.process.rank :] if progress.batch else []
    return progress, next(iter(states), None)


def _gradient_norm(model: nn.Module, limit: float | None) -> Tensor:
    """Norm of the gradient of all parameters before it is clipped to the limit."""
    if limit is not None:
        return clip_grad_norm_(model.parameters(), limit)
    return get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def _stalled(config: Train, progress: Progress) -> bool:
    """Whether early stopping applies; epochs without an evaluation do not count."""
    evaluated = max((epoch for epoch, scores in progress.scores.items() if scores), default=0)
    return config.early_stop is not None and evaluated - progress.best_epoch >= config.early_stop


def _accuracy(row: Mapping[str, Any]) -> list[str]:
    """Accuracies of a row of the summary, in words."""
    return [f"{split} {row[f'{split}_top1']:.2f} %" for split in ("train", "val", "test") if f"{split}_top1" in row]


def _line(row: dict[str, Any], epochs: int) -> str:
    """One line about an epoch for the terminal."""
    parts = [f"epoch {row['epoch']}/{epochs}", f"loss {row['train_loss']:.4f}", *_accuracy(row)]
    parts.append(f"{row['images_per_second']:.1f} images/s")
    if "log10_condition" in row:
        parts.append(f"log10 condition {row['log10_condition']:.2f}")
    return "   ".join(parts)


def _finish(run: Run, progress: Progress, out: Path) -> Result:
    """Write the selected weights as a model folder, and ``results.json``."""
    config = run.config
    epoch = progress.epoch if config.select == "last" else progress.best_epoch
    result = Result(config.select, epoch, progress.scores.get(epoch, {}), progress.epoch, str(out / MODEL))
    if config.select != "last":
        state = read_checkpoint(out / BEST)
        run.evaluated.load_state_dict(state["model" if run.ema is None else "ema"])
    calibrate(run)
    if run.process.is_main:
        _write_model(run.evaluated, out / MODEL, _card(run, result))
        record = {
            **asdict(result),
            "chosen_by": {"last": "nothing", "best-val": "validation images", "best-test": "test images"}[config.select],
            "weights": "averaged" if run.ema is not None else "plain",
            "test_time_augmentation": "none",
            "amp": config.amp,
            "temperature": run.evaluated.temperature,
            "recipe": config.recipe,
            "seed": config.seed,
            "environment": describe(run.process.device),
        }
        text = json.dumps(record, indent=2) + "\n"
        write_atomically(out / RESULTS, lambda file: file.write(text.encode()))
    run.process.wait()
    return result


def _card(run: Run, result: Result) -> ModelCard:
    """What the model card states about data and accuracy; of the data of a user, only the name of the folder."""
    root, (train, test, *_) = run.config.data.root, run.sources
    name = Path(root).resolve().name if train.name == "folder" and root is not None else train.name
    chosen = "The epoch was chosen by its accuracy on the test images, so this accuracy is too high for other images."
    return ModelCard(
        data=name,
        train_images=len(train),
        test_images=len(test) or None,
        accuracy=result.scores.get("test_top1"),
        license=run.config.license,
        remark=chosen if result.select == "best-test" else "",
    )


def _write_model(model: CovarianceNet, folder: Path, card: ModelCard) -> None:
    """Write a folder of save_pretrained atomically; other files in an existing folder stay."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        save_pretrained(model, temporary, card=card)
        if folder.is_dir():
            for file in temporary.iterdir():
                file.replace(folder / file.name)
            temporary.rmdir()
        else:
            temporary.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        problem = f"{error} ({LAST} contains the weights: free some space and resume the run)"
        raise CheckpointError(folder, problem, "write") from error
