"""The training runs of a study. Each ends in one small record, and is skipped if its record exists.

A record has everything that tables and figures need, so that a study can be continued on another machine from its records
alone: ``records/NAME.json`` beside ``runs/NAME``, the checkpoints and the model, which may be deleted.
"""

import gc
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from eigengrain import output
from eigengrain.data.device_cache import Decoded
from eigengrain.environment import describe, pick_device
from eigengrain.errors import Diverged, FileError
from eigengrain.files import check_file, read_json
from eigengrain.models import from_pretrained
from eigengrain.names import SPLITS
from eigengrain.training.checkpoint import BEST, LAST, write_atomically
from eigengrain.training.config import Data, Train, differences, to_mapping
from eigengrain.training.distributed import Process, join
from eigengrain.training.loop import train
from eigengrain.training.sources import make_loaders, open_sources
from eigengrain.training.telemetry import read_summary
from studies.analyses import ANALYSES, Trained
from studies.settings import network_name

Record = dict[str, Any]
Parts = tuple[tuple[str, type | tuple[type, ...]], ...]

#: seconds between two checks for runs of other processes
POLL = 2.0
#: entries of a record and their types
_PARTS: Parts = (
    *((name, dict) for name in ("config", "scores", "environment", "analyses")),
    *(("seconds", (int, float)), ("epochs", list)),
)
#: options in a record that tables and figures use
_OPTIONS: Parts = (
    *((name, int) for name in ("seed", "epochs", "data.transforms.img_size")),
    *((name, str) for name in ("select", "amp", "data.name", "model.backbone")),
    ("optimiser.classifier_lr_scale", (int, float)),
)


@dataclass(frozen=True)
class Job:
    """A training run and the analyses of its network."""

    name: str  # of its record; letters, digits, '.', '_', '+' and '-'
    config: Train  # without the folder
    analyses: tuple[str, ...] = ()
    kept: bool = False  # whether other runs start from its model, which must not be deleted then

    @property
    def rate(self) -> float:
        """Learning rate of the classifier as a multiple of that of the backbone."""
        return self.config.optimiser.classifier_lr_scale


def describe_run(config: Train) -> dict[str, Any]:
    """The options of a run without the folders of this machine: equal for equal runs."""
    values = to_mapping(config)
    values["data"]["root"] = None
    if values["model"]["weights"] is not None:
        values["model"]["weights"] = Path(values["model"]["weights"]).name
    return {key: value for key, value in values.items() if key not in ("out", "resume", "dry_run")}


def load_record(path: Path, parts: Parts = _PARTS) -> Record:
    """Read a record with required entries; raises FileError if it is not complete."""
    return _load_record(check_file(path), path.stat().st_mtime_ns, parts)


@cache
def _load_record(path: Path, modified: int, parts: Parts) -> Record:
    try:
        content = read_json(path)
    except FileError as error:
        raise FileError(path, f"it is not a record of a run ({error.problem}); remove it") from error
    record: Record = content if isinstance(content, dict) else {}
    missing = [part for part, kind in parts if not isinstance(record.get(part), kind)]
    config, scores = record.get("config"), record.get("scores")
    if isinstance(config, dict) and config:
        missing += [name for name, kind in _OPTIONS if not isinstance(_find(config, name), kind)]
    if isinstance(scores, dict) and scores:  # a run that diverged has none
        numbers = {"test_top1": None} | scores
        finite = (name for name, value in numbers.items() if isinstance(value, int | float) and math.isfinite(value))
        missing += [f"number {name}" for name in sorted({*numbers} - {*finite})]
    if missing:
        raise FileError(path, f"it is not a record of a run ({', '.join(missing)} missing); remove it")
    return record


def _find(values: Any, name: str) -> Any:
    """An option of a record by its dotted name, or None."""
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def run_records(folders: Sequence[Path]) -> Iterator[Record]:
    """All records of runs in folders; other files are skipped."""
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        try:
            record = load_record(path)
        except FileError:
            continue
        if record["config"]:
            yield record


def read_record(folders: Sequence[Path], job: Job, ignored: Collection[str] = ()) -> Record | None:
    """The record of a job in the first folder that has it, or None; options in ``ignored`` may differ."""
    path = next((file for file in (folder / f"{job.name}.json" for folder in folders) if file.is_file()), None)
    if path is None:
        return None
    record = load_record(path)
    changed = [name for name in differences(record["config"], describe_run(job.config)) if name not in ignored]
    if changed:
        raise FileError(path, f"its run has other options ({', '.join(changed[:5])}); remove it or use another folder")
    return record


def write_record(record: Record, folder: Path) -> None:
    """Write a record to ``records`` atomically."""
    (folder / "records").mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(folder / "records" / f"{record['name']}.json", lambda file: file.write(text.encode()))


@contextmanager
def lock(folder: Path, name: str) -> Iterator[bool]:
    """Hold the lock of a run, if no other process holds it; yields whether it is held.

    It ends with the process, and is always granted without locks of the file system, and to processes of ``torchrun``.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> with lock(folder, "run") as first, lock(folder, "run") as second:
        ...     print(first, second)
        True False
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    (folder / "locks").mkdir(parents=True, exist_ok=True)
    with open(folder / "locks" / name, "w") as file:
        held = True
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = False
            except OSError:
                pass  # the file system has no locks
        yield held


def run_jobs(
    plan: Callable[[], Sequence[Job]],
    folder: Path,
    *,
    seconds: float | None = None,
    more_records: Sequence[Path] = (),
    decoded: Decoded | None = None,
    keep_models: bool = True,
) -> dict[str, Record]:
    """Run the jobs without a record here or in ``more_records``, in order, and return all records.

    ``plan`` returns the jobs that can be planned so far and is called after each job. A job that was interrupted continues
    from its checkpoint. It is not started if it would exceed the time budget ``seconds``, assuming it takes as long as the
    slowest so far. Several processes may work on one folder with the same plan: a job that another process runs is left to
    it, and its record is awaited when nothing else is left.
    """
    start, done, waiting = time.perf_counter(), 0, False
    decoded = {} if decoded is None else decoded
    folders = (folder / "records", *more_records)
    console = output.stderr_console()
    while True:
        jobs = plan()
        records = {job.name: read_record(folders, job) for job in jobs}
        if len(records) < len(jobs):
            raise ValueError("two jobs of the study have the same name")
        complete = {name: record for name, record in records.items() if record is not None}
        todo = [job for job in jobs if is_missing(job, records[job.name], folder)]
        if not todo:
            return complete
        if seconds is not None:
            slowest = max((record["seconds"] for record in complete.values()), default=0.0)
            with join(todo[0].config.device) as process:  # processes that share every run stop together
                [late] = process.max(time.perf_counter() - start + slowest > seconds)
            if late:
                console.print(f"stopped at the time budget with {len(todo)} runs left; rerun the command to continue")
                return complete
        for job in todo:
            with lock(folder, job.name) as held:
                # another process may have finished it since the plan was made
                if not held or not is_missing(job, record := read_record(folders, job), folder):
                    continue
                done += 1
                console.rule(f"run {done} of {done + len(todo) - 1}: {job.name}")
                run_job(job, folder, record, decoded)
                if not keep_models and not job.kept:
                    with join(job.config.device) as process:
                        process.wait()  # processes that share the run analyse its model too
                    shutil.rmtree(folder / "runs" / job.name, ignore_errors=True)
                break
        else:
            if not waiting:
                console.print(f"waiting for {len(todo)} runs of other processes")
            waiting = True
            time.sleep(POLL)


def run_job(job: Job, folder: Path, record: Record | None = None, decoded: Decoded | None = None) -> Record:
    """Train if necessary, analyse, and write the record. A run that diverges gets a record without scores."""
    out = folder / "runs" / job.name
    config = replace(job.config, out=str(out), resume=True)
    sources = open_sources(config.data, config.seed)._replace(decoded=decoded)
    analyses = dict.fromkeys((*(record["analyses"] if record else ()), *job.analyses))
    if record is None or not (out / "model").is_dir():
        start = time.perf_counter()
        torch.compiler.reset()  # after eight networks of the same class nothing would be compiled any more
        if pick_device(config.device).type != "cpu":
            gc.collect()  # the previous network, whose memory may be needed
        record = {"name": job.name, "config": describe_run(job.config)}
        try:
            result = train(config, sources)
            assert result is not None
            record |= {"select": result.select, "epoch": result.epoch, "scores": result.scores}
        except Diverged as error:
            output.stderr_console().print(f"diverged, and recorded: {error.event}", markup=False)
            record |= {"select": config.select, "epoch": None, "scores": {}, "diverged": error.event}
        record |= {"seconds": round(time.perf_counter() - start, 1), "epochs": read_summary(out / "summary.csv")}
        counts = {split: len(images) for split in SPLITS if (images := getattr(sources, split)) is not None}
        record |= {"images": counts, "environment": describe(pick_device(config.device)), "analyses": {}}
    write_record(record, folder)  # the training is not lost if an analysis fails
    for checkpoint in (LAST, BEST):  # only now: writing the record may fail
        (out / checkpoint).unlink(missing_ok=True)
    missing = [name for name in analyses if name not in record["analyses"]]
    if missing and record["scores"]:
        device = pick_device(config.device)
        model = from_pretrained(str(out / "model")).to(device)
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        test = make_loaders(sources, model, config, Process(device)).test
        trained = Trained(model.eval(), test.dataset, test, config, sources)
        for name in missing:
            record = record | {"analyses": record["analyses"] | {name: ANALYSES[name](trained)}}
            write_record(record, folder)
    return record


def is_missing(job: Job, record: Record | None, folder: Path) -> bool:
    """Whether a job, one of its analyses or a model that is needed is missing."""
    if record is None:
        return True
    if not record["scores"]:  # it diverged, and would again
        return False
    deleted = job.kept and not (folder / "runs" / job.name / "model").is_dir()
    return deleted or any(name not in record["analyses"] for name in job.analyses)


# A covariance head scales its vector in its own way, which changes the learning rate at which its classifier learns best.
# One rate for all would compare rates as much as heads. So each head is tested at its own best rate, chosen on validation
# images.

#: share of the training images on which a rate is chosen
VALIDATION = 0.1
#: beyond the grid, rates continue by this factor while the edge is best, at most so many times
STEP, FURTHER = 3.0, 3
REACH = STEP**FURTHER


def with_head(base: Train, head: str, rate: float | None = None) -> Train:
    """The same training with another head, and optionally another rate of its classifier."""
    optimiser = base.optimiser if rate is None else replace(base.optimiser, classifier_lr_scale=float(rate))
    return replace(base, model=replace(base.model, head=head), optimiser=optimiser)


def data_name(data: Data) -> str:
    """Name of the data set; with the reader ``folder`` it is that of its folder, see ``settings.find_images``."""
    return Path(data.root or "").name if data.name == "folder" else data.name


def job_name(config: Train, suffix: str = "") -> str:
    """Name of a run, different for different runs of a study. Birds are not named, and of recipes only those of a kind.

    Example:
        >>> job_name(Train(epochs=15, seed=1))
        'resnet50-mpncov+seb-x1-e15-all-s1'
    """
    model = config.model
    data = data_name(config.data)
    kind = "" if config.recipe is None else f"{config.recipe.rpartition('-')[2]}-"
    images = kind + ("" if data == "cub" else f"{data}-")
    part = ("val" if config.data.val_fraction else "all") + ("-best" if config.select == "best-test" else "")
    options = "".join(f"-{key}={value}" for key, value in sorted(model.head_options.items())).replace(":", "")
    options += "" if config.clip_grad is None else f"-clip{config.clip_grad:g}"
    options += "-calibrated" * model.calibrate
    options += "-token" * (model.class_token is not None)
    options += "".join(f"-stride{stride}" for stride in [model.backbone_options.get("patch_stride")] if stride)
    options += "" if model.img_size is None else f"-{model.img_size}px"
    rate = f"x{config.optimiser.classifier_lr_scale:g}"
    network = network_name(model.backbone).replace(":", "-")
    return f"{images}{network}-{model.head}{options}{suffix}-{rate}-e{config.epochs}-{part}-s{config.seed}"


def rate_jobs(config: Train, rates: Sequence[float], suffix: str = "") -> list[Job]:
    """A run at each rate without the validation images, with the seed of the config."""
    held_out = replace(config, data=replace(config.data, val_fraction=config.data.val_fraction or VALIDATION))
    runs = [with_head(held_out, config.model.head, rate) for rate in rates]
    return [Job(job_name(run, suffix), run) for run in runs]


def best_rate(jobs: Sequence[Job], records: Mapping[str, Record]) -> float | None:
    """The rate with the best validation accuracy, the lower of equals, diverged runs last; None until all are there."""
    if any(job.name not in records for job in jobs):
        return None
    return max(jobs, key=lambda job: (records[job.name]["scores"].get("val_top1", -1.0), -job.rate)).rate


def further_rate(jobs: Sequence[Job], records: Mapping[str, Record], grid: Sequence[float]) -> float | None:
    """A rate beyond those of the jobs if the best of them is the lowest or the highest, else None."""
    best, rates = best_rate(jobs, records), [job.rate for job in jobs]
    if best is None or len(jobs) - len(grid) == FURTHER or best not in (min(rates), max(rates)):
        return None
    return float(f"{best / STEP if best == min(rates) else best * STEP:.3g}")


def final_jobs(
    config: Train, rate: float, seeds: Sequence[int], analyses: Sequence[str] = (), suffix: str = ""
) -> list[Job]:
    """Runs on all training images at one rate; the network of the first seed is analysed."""
    runs = [replace(with_head(config, config.model.head, rate), seed=seed) for seed in seeds]
    return [Job(job_name(run, suffix), run, tuple(analyses) if run.seed == seeds[0] else ()) for run in runs]
