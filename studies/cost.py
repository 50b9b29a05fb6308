"""The cost of a study: images that are trained on, divided by images per second."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from eigengrain.data.datasets.registry import find_entry
from eigengrain.training.config import Train
from studies.runs import Job, Record, data_name, rate_jobs, run_records
from studies.settings import NETWORKS, network_name
from studies.study import Row, Setup, Study

#: images per second in training of ResNet-50 with MPN-COV at 448 pixels, last stride 1, on one NVIDIA H200; compiled at
#: scale small
STATED = {"quick": 1000.0, "small": 1000.0, "modern": 1000.0, "paper": 331.0}
STATED_FOR = "one NVIDIA H200 (ResNet-50 as measured, other backbones by a rough guess)"
#: seconds of a run of scale smoke, most of which is not training
SMOKE_RUN = 0.3
#: images per second by backbone, size of the images and precision
Speeds = Mapping[tuple[str, int, str], float]


def recorded_speeds(setup: Setup) -> Speeds:
    """Median speeds of the records."""
    speeds: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for record in run_records(setup.folders):
        config = record["config"]
        key = network_name(config["model"]["backbone"]), config["data"]["transforms"]["img_size"], config["amp"]
        speeds[key] += [row["images_per_second"] for row in record["epochs"] if row.get("images_per_second")]
    return {key: median(values) for key, values in speeds.items() if values}


def simulate(study: Study, setup: Setup) -> list[Job]:
    """All runs of a study from nothing, if the middle rate of each grid is the best."""
    rows = [row for row in study.rows(setup) if row.head is not None]
    rows += [replace(row, data="imagenet", pretrain=None) for row in rows if row.pretrain and row.data != "plumage"]
    middle = {
        job.name
        for row in rows
        for suffix in (setup.suffix, f"{setup.suffix}-gcp")
        for job in rate_jobs(_at_search(row, setup), setup.grid(row)[1:2], suffix)
    }
    records: dict[str, Record] = {}
    jobs: dict[str, Job] = {}
    setup = replace(setup, simulated=records)
    while new := [job for job in study.plan(setup) if job.name not in jobs]:
        for job in new:
            jobs[job.name] = job
            records[job.name] = {"scores": {"val_top1": 60.0 if job.name in middle else 50.0}}
    return list(jobs.values())


def _at_search(row: Row, setup: Setup) -> Train:
    config = setup.config(row, row.rate_options)
    return config if row.search_only else replace(config, epochs=setup.options.search_epochs or config.epochs)


def estimate_cost(study: Study, setup: Setup, speeds: Speeds) -> tuple[int, float, set[str]]:
    """Number of runs of a study from nothing, seconds of training alone, and sources of the speeds: stated or records."""
    jobs = simulate(study, setup)
    if setup.options.scale == "smoke":
        return len(jobs), len(jobs) * SMOKE_RUN, set()
    seconds, sources = 0.0, set()
    for config in (job.config for job in jobs):
        backbone, size = network_name(config.model.backbone), config.data.transforms.img_size
        speed = speeds.get((backbone, size, config.amp))
        sources.add("records" if speed else "stated")
        speed = speed or STATED[setup.options.scale] * (448 / size) ** 2 / NETWORKS[backbone].cost
        published = find_entry(data_name(config.data)).published
        images = round((published[1] if published else 0) * (1 - config.data.val_fraction))
        seconds += images * config.epochs / speed
    return len(jobs), seconds, sources
