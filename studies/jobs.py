"""The training runs of a study: planned as jobs, each ending in one small record, skipped where the record is there.

A record holds everything that tables and figures need, so a study can be continued on another machine from its records
alone: ``records/NAME.json`` beside ``runs/NAME`` (checkpoints and the model, which may be thrown away).
"""

import gc
import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eigengrain import output
from eigengrain.data.device_cache import Decoded
from eigengrain.environment import describe, pick_device
from eigengrain.models import from_pretrained
from eigengrain.training.checkpoint import BEST, LAST, write_atomically
from eigengrain.training.config import Train, differences, to_mapping
from eigengrain.training.distributed import Process, join
from eigengrain.training.loop import DivergedError, train
from eigengrain.training.sources import Sources, make_loaders, open_sources
from eigengrain.training.telemetry import read_summary
from studies.analyses import ANALYSES, Trained
from studies.claims import claimed

Record = dict[str, Any]

#: seconds between two looks at runs of other processes
LOOK_AGAIN = 2.0

#: what those who read a record look for in it, and of which kind it is
_PARTS: Mapping[str, type | tuple[type, ...]] = {
    "config": dict,
    "scores": dict,
    "seconds": (int, float),
    "epochs": list,
    "environment": dict,
    "analyses": dict,
}

#: options that say where things are on this machine
_PLACES = {("data", "root"), ("model", "weights")}


@dataclass(frozen=True)
class Job:
    """One training run and what is measured on the network that it ends with.

    Args:
        name: of its record; letters, digits, '.', '_', '+' and '-'.
        config: of the training; where it writes is decided by :func:`run_jobs`.
        analyses: names of :data:`studies.analyses.ANALYSES`.
        kept: whether other runs start from its model, which has to be here then.
    """

    name: str
    config: Train
    analyses: tuple[str, ...] = ()
    kept: bool = False


def described(config: Train) -> dict[str, Any]:
    """The options of a run without the places of this machine: what makes two runs the same."""
    values = json.loads(json.dumps(to_mapping(config)))
    for part, key in _PLACES:
        if values[part][key] is not None:
            values[part][key] = Path(values[part][key]).name if key == "weights" else None
    return {key: value for key, value in values.items() if key not in ("out", "resume", "dry_run")}


def open_record(path: Path, parts: Mapping[str, type | tuple[type, ...]] = _PARTS) -> Record:
    """A record from its file.

    Args:
        path: of the file.
        parts: what those who read it look for in it, and of which kind it is.

    Raises:
        ValueError: if it is none, or only a part of one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a record of a run ({error}): remove it") from error
    record: Record = found if isinstance(found, dict) else {}
    lacking = [part for part, kind in parts.items() if not isinstance(record.get(part), kind)]
    scores = record.get("scores")
    if isinstance(scores, dict) and scores:  # a training that diverged has none
        numbers = {"test_top1": None} | scores
        lacking += [f"number {name}" for name, value in numbers.items() if not isinstance(value, int | float)]
    if lacking:
        raise ValueError(f"{path} is not a record of a run (it has no {', '.join(lacking)}): remove it")
    return record


def read_record(places: Sequence[Path], job: Job, ignored: Collection[str] = ()) -> Record | None:
    """What is known of a job, or None.

    Args:
        places: folders of records; the first that has one of the job counts.
        job: whose name the record has.
        ignored: options, in dots, that may be others than the job's.

    Raises:
        ValueError: if the record is of a run with other options, or no record at all.
    """
    path = next((file for file in (place / f"{job.name}.json" for place in places) if file.is_file()), None)
    if path is None:
        return None
    record = open_record(path)
    changed = [name for name in differences(record["config"], described(job.config)) if name not in ignored]
    if changed:
        raise ValueError(
            f"{path} is of a run with other options ({', '.join(changed[:5])}): remove it to run again, or choose another "
            f"{'--out' if path.parent == places[0] else '--records'}"
        )
    return record


def run_jobs(
    plan: Callable[[], Sequence[Job]],
    folder: Path,
    *,
    seconds: float | None = None,
    places: Sequence[Path] = (),
    decoded: Decoded | None = None,
    keep_models: bool = True,
) -> dict[str, Record]:
    """Run the jobs that have no record yet, in order, and return the records of all that have one then.

    A job that was interrupted goes on from its checkpoint. Images that a cache on the device holds are decoded once.
    Several processes may work on one folder, each with the same plan: a job that another has begun is left to it, and its
    record is waited for when nothing else is left to do.

    Args:
        plan: the jobs that can be named by now, with names of their own; asked again after each, since some follow from the
            records of others.
        folder: for ``records`` and ``runs``.
        seconds: no job is begun that would, as long as the longest before it, end after this time; None for no limit.
        places: more folders of records, whose jobs are not done again.
        decoded: images on the device, shared with other calls.
        keep_models: whether the folder of a finished run keeps its model; that of a job that is ``kept`` does anyway.

    Raises:
        ValueError: for options that do not fit, or a record of another run.
    """
    start, done, waits = time.perf_counter(), 0, False
    decoded = {} if decoded is None else decoded
    records = (folder / "records", *places)
    console = output.progress()
    while True:
        jobs = plan()
        if len({job.name for job in jobs}) < len(jobs):
            raise ValueError("two jobs of the study have the same name")
        known = {job.name: read_record(records, job) for job in jobs}
        found = {name: record for name, record in known.items() if record is not None}
        todo = [job for job in jobs if is_missing(job, known[job.name], folder)]
        if not todo:
            return found
        if seconds is not None:
            longest = max((record["seconds"] for record in found.values()), default=0.0)
            with join(todo[0].config.device) as process:  # those that share every run stop together
                [late] = process.max(time.perf_counter() - start + longest > seconds)
            if late:
                console.print(f"stopped for lack of time, runs left: {len(todo)}; the same command goes on")
                return found
        for job in todo:
            with claimed(folder, job.name) as mine:
                # another process may have ended it since the plan was made
                if not mine or not is_missing(job, record := read_record(records, job), folder):
                    continue
                done += 1
                console.rule(f"run {done} of {done + len(todo) - 1}: {job.name}")
                run_job(job, folder, record, decoded)
                if not keep_models and not job.kept:
                    with join(job.config.device) as process:
                        process.wait()  # those that share the run analyse its model too
                    shutil.rmtree(_run_folder(job, folder), ignore_errors=True)
                break
        else:
            if not waits:
                console.print(f"waiting for runs of other processes: {len(todo)}")
            waits = True
            time.sleep(LOOK_AGAIN)


def run_job(job: Job, folder: Path, known: Record | None = None, decoded: Decoded | None = None) -> Record:
    """Train as far as it is needed, analyse, and write the record.

    That a training diverges is a result too: its record says where, and has no scores.

    Args:
        job: what to do.
        folder: for ``records`` and ``runs``.
        known: its record, if only analyses are missing.
        decoded: images on the device, shared by the jobs.
    """
    out = _run_folder(job, folder)
    config = replace(job.config, out=str(out), resume=True)
    sources = open_sources(config.data, config.seed)._replace(decoded=decoded)
    if known is None or not (out / "model").is_dir():
        begun = time.perf_counter()
        torch.compiler.reset()  # another network of the same class: after eight of them it would be compiled no more
        gc.collect()  # the network before this one, whose memory may be needed
        outcome = _outcome(config, sources)
        seconds = time.perf_counter() - begun
        record: Record = {
            "name": job.name,
            "config": described(job.config),
            **outcome,
            "seconds": round(seconds, 1),
            "epochs": read_summary(out / "summary.csv"),
            "environment": describe(pick_device(config.device)),
            "analyses": {},
        }
    else:
        record = known
    write_record(record, folder)  # whatever an analysis comes to, the training is not lost
    for checkpoint in (LAST, BEST):  # now, and not before: a record may be killed, or find the disk full
        (out / checkpoint).unlink(missing_ok=True)
    # a network that had to be trained again is analysed again as a whole
    wanted = dict.fromkeys((*(known["analyses"] if known else ()), *job.analyses))
    missing = [name for name in wanted if name not in record["analyses"]]
    if missing and record["scores"]:
        trained = _trained(config, sources, out / "model")
        for name in missing:
            record["analyses"][name] = ANALYSES[name](trained)
            write_record(record, folder)
    return record


def _outcome(config: Train, sources: Sources) -> Record:
    """What a training comes to: its scores, or where it diverged."""
    try:
        result = train(config, sources)
    except DivergedError as error:
        output.progress().print(f"diverged, and recorded so: {error.where}", markup=False)
        return {"select": config.select, "epoch": None, "scores": {}, "diverged": error.where}
    assert result is not None
    return {"select": result.select, "epoch": result.epoch, "scores": result.scores}


def write_record(record: Record, folder: Path) -> None:
    """Under its name in ``records``, whole or not at all."""
    (folder / "records").mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(folder / "records" / f"{record['name']}.json", lambda file: file.write(text.encode()))


def is_missing(job: Job, record: Record | None, folder: Path) -> bool:
    """Whether a job has to be run, or an analysis of it, or its model is wanted and not here."""
    if record is None:
        return True
    if not record["scores"]:  # it diverged, and would again
        return False
    gone = job.kept and not (_run_folder(job, folder) / "model").is_dir()
    return gone or any(name not in record["analyses"] for name in job.analyses)


def _run_folder(job: Job, folder: Path) -> Path:
    return folder / "runs" / job.name


def _trained(config: Train, sources: Sources, folder: Path) -> Trained:
    """The network of a finished run where it was trained, and its test images."""
    device = pick_device(config.device)
    model = from_pretrained(str(folder)).to(device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loaders = make_loaders(sources, model, config, Process(device))
    return Trained(model.eval(), loaders.test.dataset, loaders.test, config)
