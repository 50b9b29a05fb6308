"""What a study costs: images that are trained on, divided by images a second."""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from eigengrain.training.config import Train
from studies.comparison import job_name
from studies.jobs import open_record
from studies.settings import NETWORKS, network_name, training_images
from studies.study import Row, Setup, Study

#: ResNet-50 with MPN-COV at 448 pixels, last stride 1, on one NVIDIA H200: images a second in training, compiled at scale
#: small
STATED = {"small": 1000.0, "paper": 331.0}
STATED_FOR = "one NVIDIA H200 (ResNet-50 as measured, other backbones by a rough guess)"
#: seconds of a run of the smoke scale, most of which is not training
SMOKE_RUN = 0.3


@dataclass(frozen=True)
class Cost:
    """Runs of a study, the seconds they take together, and how the speed is known: stated, records or measured."""

    runs: int
    seconds: float
    known: str


class Speeds:
    """Images a second by backbone: measured now, or from records of such runs, or stated.

    Args:
        setup: whose records are looked at.
        measured: time a step of each backbone here.
    """

    def __init__(self, setup: Setup, measured: bool):
        self._setup, self._measured = setup, measured
        self._known: dict[tuple[str, int], tuple[float, str]] = {}
        self._recorded = _recorded(setup.places)

    def of(self, row: Row, config: Train) -> tuple[float, str]:
        """Images a second, and how that is known."""
        key = row.backbone, config.data.transforms.img_size
        if key not in self._known:
            self._known[key] = self._find(row, config)
        return self._known[key]

    def _find(self, row: Row, config: Train) -> tuple[float, str]:
        if self._measured and (speed := _timed(config)) is not None:
            return speed, "measured"
        found = self._recorded.get((row.backbone, config.data.transforms.img_size, config.amp))
        if found:
            return statistics.median(found), "records"
        pixels = (448 / config.data.transforms.img_size) ** 2
        return STATED[self._setup.options.scale] * pixels / NETWORKS[row.backbone].cost, "stated"


def _recorded(places: list[Path]) -> dict[tuple[str, int, str], list[float]]:
    """Backbone as studies call it, size and precision to the median speeds of runs."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for file in (file for place in places for file in sorted(place.glob("*.json"))):
        try:
            record = open_record(file)
            config = record["config"]
            network = network_name(config["model"]["backbone"])
            key = network, config["data"]["transforms"]["img_size"], config["amp"]
        except (ValueError, KeyError):  # of something else than a run, or half of one, of which its study will speak
            continue
        speeds = [row["images_per_second"] for row in record["epochs"] if row.get("images_per_second")]
        if speeds:
            found.setdefault(key, []).append(statistics.median(speeds))
    return found


def _timed(config: Train) -> float | None:
    """Images a second of one training step here, None without the memory for it; few images on the CPU: no slower."""
    from benchmarks.config import StepBench

    from benchmarks import step
    from eigengrain.environment import pick_device

    device = pick_device(config.device)
    model = config.model
    bench = StepBench(
        backbones=[model.backbone],
        heads=[model.head],
        batch=min(config.batch_size, 2) if device.type == "cpu" else config.batch_size,
        img_size=config.data.transforms.img_size,
        last_stride=1 if model.last_stride == 1 else 2,
        reduce=model.reduce or "auto",
        amp="none" if device.type == "cpu" else config.amp,  # type: ignore[arg-type]
        channels_last=config.channels_last,
        repeats=1,
    ).filled(device.type)
    [row] = step.measure(bench, model.backbone, device)
    speed = row["images_per_second"]
    return None if speed is None else float(str(speed))


def cost(study: Study, setup: Setup, speeds: Speeds) -> Cost:
    """Runs and training time of a study from nothing, each run counted once; tests and analyses come on top."""
    images: dict[str, tuple[float, int, Row, Train]] = {}
    for row in study.rows(setup):
        if not setup.runs(row):
            continue
        stages = [row]
        if row.pretrain:
            stages.append(replace(row, data="imagenet", head=row.pretrain, pretrain=None))
        for stage in stages:
            config = setup.config(stage)
            seen = training_images(config) * config.epochs
            for protocol in setup.protocols:
                curve = stage.curve and config.eval_every > 1 and protocol == "fair"
                marks = f"-{protocol}{'-gcp' * bool(stage.pretrain)}"
                if protocol == "fair":
                    searched = setup.tried(stage, marks, config)
                    search, count = searched[0].name.split("-x")[0], len(searched) + len(stage.more_rates)
                    images[f"search {search}"] = seen * 0.9 * count, count, stage, config
                if stage.search:
                    continue
                seeds = 1 if curve or stage is not row else len(setup.seeds)
                images[job_name(config, marks + "-curve" * curve)] = float(seen * seeds), seeds, stage, config
    runs = sum(count for _, count, _, _ in images.values())
    if setup.options.scale == "smoke":
        return Cost(runs, runs * SMOKE_RUN, "stated")
    seconds, known = 0.0, set()
    for trained, _, row, config in images.values():
        speed, how = speeds.of(row, config)
        seconds += trained / speed
        known.add(how)
    return Cost(runs, seconds, " and ".join(sorted(known)))
