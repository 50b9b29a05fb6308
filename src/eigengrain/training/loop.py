"""The training loop, top to bottom."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

from eigengrain.data.randomness import derive
from eigengrain.environment import describe
from eigengrain.errors import FailedError, NonFiniteError
from eigengrain.functional import solver_repairs
from eigengrain.models import CovarianceNet, save_pretrained
from eigengrain.progress import progress_bar
from eigengrain.training.checkpoint import (
    BEST,
    LAST,
    CheckpointError,
    keep_copy,
    read_checkpoint,
    remove_halves,
    write_atomically,
    write_checkpoint,
)
from eigengrain.training.config import Train, differences, to_mapping
from eigengrain.training.distributed import (
    Process,
    generator_states,
    generators_put_back,
    join,
    restore_generators,
    seed_everything,
)
from eigengrain.training.evaluation import evaluate
from eigengrain.training.plan import dry_run
from eigengrain.training.schedule import rates
from eigengrain.training.setup import Run, build, tensorboard, write_arguments
from eigengrain.training.signals import Interrupted, Wish, polite_signals
from eigengrain.training.sources import Sources, to_device
from eigengrain.training.telemetry import Meter, Summary, spectrum_row

#: on an accelerator, batches between two looks at the losses: each look makes the device wait
LOOK_EVERY = 25

#: called after each batch with epoch, batch (both from 0) and the loss of this process
OnStep = Callable[[int, int, float], object]


class DivergedError(FailedError):
    """The loss, what the head is given, or what the model answers is no longer a number, or the features are dead.

    Args:
        what: has happened.
        epoch: from 1.
        batch: of that epoch, from 1.
        total: batches of an epoch.
        out: folder of the run.
    """

    def __init__(self, what: str, epoch: int, batch: int, total: int, out: Path):
        self.where = f"{what} in epoch {epoch} at batch {batch} of {total}"
        kept = f"the last good checkpoint is {out / LAST}" if (out / LAST).exists() else "no checkpoint was due before it"
        super().__init__(
            f"{self.where}: lower --optimiser.lr, add --schedule.warmup_epochs or --clip_grad, and choose another --out; "
            f"{kept}"
        )


@dataclass
class Progress:
    """How far a run is; all of it is in the checkpoint.

    Args:
        epoch: the one that is being trained, from 0.
        batch: the next one of this epoch.
        updates: steps of the optimiser so far.
        best: the best accuracy so far of the split that is watched.
        best_epoch: after which it was seen, from 1; 0 for none.
        scores: accuracies and losses of the last and of the best epoch, by epoch from 1.
        meter: sums over this epoch.
    """

    epoch: int = 0
    batch: int = 0
    updates: int = 0
    best: float = -math.inf
    best_epoch: int = 0
    scores: dict[int, dict[str, float]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)


@dataclass(frozen=True)
class Result:
    """What a run ended with.

    Args:
        select: how the epoch was chosen: last, best-val or best-test.
        epoch: whose weights are in the model folder, from 1.
        scores: accuracies and losses of that epoch, by column of summary.csv.
        epochs_trained: how many there were.
        model: folder of the model.
    """

    select: str
    epoch: int
    scores: dict[str, float]
    epochs_trained: int
    model: str


def train(config: Train, sources: Sources | None = None, on_step: OnStep | None = None) -> Result | None:
    """Train a model as a config says; None after a dry run.

    Args:
        config: see :class:`eigengrain.training.config.Train`.
        sources: data sets to use instead of those that the config names.
        on_step: called after each batch with (epoch, batch, loss).

    Raises:
        ValueError: for an option that does not fit, before training starts.
        DivergedError: if the loss, the features or the scores become NaN or infinite, or if an epoch leaves covariances
            that are all zero, behind which nothing learns any more; the checkpoint before it is kept.
        CheckpointError: if a checkpoint cannot be written or read.
        Interrupted: after Ctrl-C or SIGTERM, when the checkpoint is written.
    """
    with join(config.device) as process, generators_put_back(process.device):
        seed_everything(config.seed)  # the same first weights in every process
        run = build(config, sources, process)
        if config.dry_run:
            dry_run(run)
            return None
        with polite_signals() as wish, _fastest_kernels():
            return _train(run, wish, on_step)


def _train(run: Run, wish: Wish, on_step: OnStep | None) -> Result:
    config, process, model, optimiser = run.config, run.process, run.model, run.optimiser
    out, total = Path(config.out), len(run.loaders.train)
    progress, generators = _start_or_resume(run, out)
    if process.is_main:
        write_arguments(out, config)
        remove_halves(out)
    summary = Summary(out / "summary.csv", progress.epoch) if process.is_main else None
    board = tensorboard(out, progress.epoch) if config.log == "tensorboard" and process.is_main else None
    look_every = 1 if process.device.type == "cpu" else LOOK_EVERY

    def save() -> None:
        states = process.gather(generator_states(process.device))
        if process.is_main:
            state = {**run.state(), "progress": asdict(progress), "generators": states}
            write_checkpoint(out / LAST, state)
        process.wait()  # torchrun ends all processes when one of them leaves: none may before the checkpoint is there

    def save_and_stop(signal: int) -> None:
        save()
        raise Interrupted(signal, f"in epoch {progress.epoch + 1} after batch {progress.batch} of {total}")

    bar = progress_bar()
    bar.disable = bar.disable or not process.is_main
    with bar, nullcontext() if board is None else board:
        task = bar.add_task("")
        while progress.epoch < config.epochs and not _stalled(config, progress):
            epoch, meter = progress.epoch, progress.meter
            bar.reset(task, total=total, completed=progress.batch, description=f"epoch {epoch + 1}/{config.epochs}")
            run.loaders.train.set_epoch(epoch, start_batch=progress.batch)
            run.net.train()
            solver_repairs(reset=True)  # those of an evaluation are not of this epoch's training
            losses: list[Tensor] = []  # on the device, not yet looked at
            norms: list[Tensor] = []
            clock = time.perf_counter()
            for batch, data in enumerate(run.loaders.train, start=progress.batch):
                # here and not before: a loader that starts draws from the generators, so only behind its first batch
                # a continued epoch can be put where an uninterrupted one would be
                if generators is not None:
                    restore_generators(generators, process.device)
                    generators = None
                elif batch == 0:
                    seed_everything(derive(config.seed, epoch, process.rank))

                # forward and backward; gradients of a group of batches are averaged, the last group may be smaller
                images, labels = to_device(data, process)
                if config.channels_last:
                    images = images.contiguous(memory_format=torch.channels_last)
                begin = batch - batch % config.accumulate
                group = min(config.accumulate, total - begin)
                ends_group, ends_epoch = batch + 1 == begin + group, batch + 1 == total
                try:
                    with _recording(model, ends_epoch), _exchanging(run.net, ends_group):
                        loss = cross_entropy(run.net(images), labels, label_smoothing=config.label_smoothing)
                        run.scaler.scale(loss / group).backward()
                except NonFiniteError as error:
                    raise DivergedError("features are NaN or infinite", epoch + 1, batch + 1, total, out) from error
                losses.append(loss.detach())
                meter.images += len(images) * process.world_size
                if on_step is not None:
                    on_step(epoch, batch, float(losses[-1]))
                bar.advance(task)
                if not ends_group:
                    continue

                # one step of the optimiser
                run.scaler.unscale_(optimiser)
                norms.append(_gradient_norm(model, config.clip_grad))
                run.scaler.step(optimiser)
                run.scaler.update()
                optimiser.zero_grad(set_to_none=True)
                meter.rates = rates(optimiser)
                progress.updates += 1
                run.schedule.step_update(progress.updates)
                if run.ema is not None:
                    run.ema.update(model, step=progress.updates)

                # look at the losses, save, stop: at the same batches in all processes, so that they agree
                saves = config.save_every > 0 and (batch + 1) % config.save_every == 0
                if saves or ends_epoch or (batch + 1) % look_every == 0:
                    _look(losses, norms, batch, total, progress, process, out)
                    progress.batch = batch + 1
                    if ends_epoch:
                        meter.spectrum = _last_spectrum(model)
                    meter.seconds, clock = meter.seconds + time.perf_counter() - clock, time.perf_counter()
                    signal, alive = process.max(wish.signal, not ends_epoch or _has_variance(model))
                    if not alive:
                        raise DivergedError("all covariances are zero", epoch + 1, batch + 1, total, out)
                    if signal:
                        save_and_stop(signal)
                    if saves and not ends_epoch:
                        save()

            # the end of an epoch: accuracy, a row of the summary, the checkpoint
            generators = None
            process.share_buffers(run.evaluated)
            scores: dict[str, float] = {}
            if (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs:
                for split, loader in (("val", run.loaders.val), ("test", run.loaders.test)):
                    if loader is None:
                        continue
                    try:
                        [score] = evaluate(
                            run.evaluated,
                            loader,
                            process,
                            amp=config.amp,
                            channels_last=config.channels_last,
                            # alone only: shares of the images differ in length, so that several could not agree here
                            each=lambda: save_and_stop(wish.signal) if wish.signal and not process.many else None,
                        )
                    except NonFiniteError as error:
                        raise DivergedError("scores are NaN or infinite", epoch + 1, total, total, out) from error
                    scores |= {f"{split}_top1": score.top1, f"{split}_top5": score.top5, f"{split}_loss": score.loss}
            row: dict[str, Any] = {"epoch": epoch + 1, **meter.row(), **scores}
            watched = scores.get(f"{_watched_split(run)}_top1")
            improved = watched is not None and watched > progress.best
            if watched is not None and improved:
                progress.best, progress.best_epoch = watched, epoch + 1
            progress.scores = {e: s for e, s in progress.scores.items() if e == progress.best_epoch} | {epoch + 1: scores}
            run.schedule.step(epoch + 1, watched)
            if summary is not None:
                summary.append(row)
                bar.console.print(_line(row, config.epochs), highlight=False, soft_wrap=True)
            if board is not None:
                for name, value in row.items():
                    board.add_scalar(name, value, epoch + 1)
                board.flush()
            progress.epoch, progress.batch, progress.meter = epoch + 1, 0, Meter()
            save()
            if improved and process.is_main:
                keep_copy(out / LAST, out / BEST)
            [signal] = process.max(wish.signal)
            if signal and progress.epoch < config.epochs:
                raise Interrupted(signal, f"after epoch {progress.epoch}")
    return _finish(run, progress, out)


@contextmanager
def _fastest_kernels() -> Iterator[None]:
    """All batches have one shape, so that a search for the fastest convolutions pays, unless they must be repeatable."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _start_or_resume(run: Run, out: Path) -> tuple[Progress, dict[str, Any] | None]:
    """Where to begin, and the state of the generators there if that is in the middle of an epoch."""
    if not (out / LAST).exists():
        return Progress(), None
    state = read_checkpoint(out / LAST)
    changed = differences(state["config"], to_mapping(run.config))
    if changed:
        raise ValueError(
            f"the run in {out} was started with other options ({', '.join(changed[:5])}): go on with those of its "
            "args.yaml, or choose another folder with --out"
        )
    if state["class_names"] != run.model.class_names:
        raise ValueError(f"the run in {out} was started with other classes: give it the images that it began with")
    run.load(state)
    values = state["progress"]
    progress = Progress(**{**values, "meter": Meter(**values["meter"])})
    if run.process.is_main and progress.batch == 0 and progress.best_epoch == progress.epoch:
        keep_copy(out / LAST, out / BEST)  # the run may have been killed between the two
    states = state["generators"]
    middle = progress.batch > 0 and run.process.rank < len(states)
    return progress, states[run.process.rank] if middle else None


def _look(
    losses: list[Tensor], norms: list[Tensor], batch: int, total: int, progress: Progress, process: Process, out: Path
) -> None:
    """Add up the losses since the last look; the first that is no number ends the training."""
    meter = progress.meter
    repaired = losses[0].new_tensor(sum(solver_repairs(reset=True).values()))
    *sums, helped = process.sum(torch.stack([*losses, repaired])).tolist()  # one exchange for both
    meter.repaired += int(helped)
    for place, loss in enumerate((each / process.world_size for each in sums), start=batch + 1 - len(losses)):
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss}", progress.epoch + 1, place + 1, total, out)
        meter.loss += loss
        meter.batches += 1
    for norm in torch.stack(norms).tolist():
        if math.isfinite(norm):  # fp16 overflows now and then, and its scaler leaves such steps out
            meter.gradient_norm += norm
            meter.updates += 1
    losses.clear()
    norms.clear()


def _gradient_norm(model: nn.Module, limit: float | None) -> Tensor:
    """The norm of the gradient of all parameters, which is then no longer than the limit."""
    if limit is not None:
        return clip_grad_norm_(model.parameters(), limit)
    return get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def _exchanging(net: nn.Module, ends_group: bool) -> AbstractContextManager[Any]:
    """Processes add up their gradients once for each group of batches."""
    return net.no_sync() if isinstance(net, DistributedDataParallel) and not ends_group else nullcontext()


@contextmanager
def _recording(model: CovarianceNet, now: bool) -> Iterator[None]:
    """Have the head keep the spectrum of a batch, which costs it a decomposition: for one batch of an epoch."""
    head: Any = model.head
    if not now or not hasattr(head, "record_spectrum"):
        yield
        return
    head.record_spectrum = True
    try:
        yield
    finally:
        head.record_spectrum = False


def _last_spectrum(model: CovarianceNet) -> dict[str, float]:
    """Columns from the spectrum that the head has kept; none for a head without one."""
    spectrum = getattr(model.head, "last_spectrum", None)
    return {} if spectrum is None else spectrum_row(spectrum.eigenvalues, spectrum.factor)


def _has_variance(model: CovarianceNet) -> bool:
    """Whether some image's features vary, as far as the head can tell: a covariance of zero has no gradient."""
    spectrum = getattr(model.head, "last_spectrum", None)
    return spectrum is None or bool(spectrum.eigenvalues.any())


def _watched_split(run: Run) -> str:
    """Whose accuracy decides what is best: the test images only if that is asked for or there is nothing else."""
    return "test" if run.config.select == "best-test" or run.loaders.val is None else "val"


def _stalled(config: Train, progress: Progress) -> bool:
    """Whether the last evaluation saw no progress for so long; epochs that were not evaluated say nothing."""
    evaluated = max((epoch for epoch, scores in progress.scores.items() if scores), default=0)
    return config.early_stop is not None and evaluated - progress.best_epoch >= config.early_stop


def _line(row: dict[str, Any], epochs: int) -> str:
    """An epoch for reading."""
    parts = [f"epoch {row['epoch']}/{epochs}", f"loss {row['train_loss']:.4f}"]
    parts += [f"{split} {row[f'{split}_top1']:.2f} %" for split in ("val", "test") if f"{split}_top1" in row]
    parts.append(f"{row['images_per_second']:.1f} images/s")
    if "log10_condition" in row:
        parts.append(f"log10 condition {row['log10_condition']:.2f}")
    return "   ".join(parts)


def _finish(run: Run, progress: Progress, out: Path) -> Result:
    """Write the chosen weights as a model, and what they reached."""
    config = run.config
    epoch = progress.epoch if config.select == "last" else progress.best_epoch
    result = Result(config.select, epoch, progress.scores.get(epoch, {}), progress.epoch, str(out / "model"))
    if run.process.is_main:
        if config.select != "last":
            state = read_checkpoint(out / BEST)
            run.evaluated.load_state_dict(state["model" if run.ema is None else "ema"])
        _write_model(run.evaluated, out / "model")
        record = {
            **asdict(result),
            "chosen_by": {"last": "nothing", "best-val": "validation images", "best-test": "test images"}[config.select],
            "weights": "averaged" if run.ema is not None else "plain",
            "test_time_augmentation": "none",
            "recipe": config.recipe,
            "seed": config.seed,
            "environment": describe(run.process.device),
        }
        text = json.dumps(record, indent=2) + "\n"
        write_atomically(out / "results.json", lambda file: file.write(text.encode()))
    run.process.wait()
    return result


def _write_model(model: CovarianceNet, folder: Path) -> None:
    """A folder of save_pretrained, whole or not at all; where there is one of that name, what else it holds stays."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        save_pretrained(model, temporary)
        if folder.is_dir():
            for file in temporary.iterdir():
                file.replace(folder / file.name)
            temporary.rmdir()
        else:
            temporary.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the model to {folder} ({error}): {LAST} holds its weights; free some space, then --resume"
        ) from error
