"""Fair comparison of heads: each at its own best classifier rate, found on validation images, then tested once.

A covariance head scales its vector in its own way, which moves the rate at which its classifier learns best. One rate for
all compares rates as much as heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eigengrain.training.config import Train
from studies.jobs import Job, Record
from studies.settings import network_name

#: share of the training images that the choice of a rate is made on
VALIDATION = 0.1

#: beyond the grid rates go on by this factor while the edge is best, so many times at most
STEP, FURTHER = 3.0, 3
REACH = STEP**FURTHER


def with_head(base: Train, head: str, rate: float | None = None, **options: object) -> Train:
    """The same training with another head, and another rate of its classifier if one is given."""
    scale = base.optimiser.classifier_lr_scale if rate is None else rate
    return replace(
        base,
        model=replace(base.model, head=head, head_options={**base.model.head_options, **options}),
        optimiser=replace(base.optimiser, classifier_lr_scale=float(scale)),
    )


def job_name(config: Train, suffix: str = "") -> str:
    """What tells the runs of a comparison apart.

    Birds need no name; a run of which the best test epoch counts says so.

    Example:
        >>> job_name(Train(epochs=15, seed=1))
        'resnet50-mpncov+seb-x1-e15-all-s1'
    """
    model = config.model
    images = "" if config.data.name == "cub" else f"{config.data.name}-"
    part = ("val" if config.data.val_fraction else "all") + ("-best" if config.select == "best-test" else "")
    options = "".join(f"-{key}={value}" for key, value in sorted(model.head_options.items())).replace(":", "")
    options += "" if config.clip_grad is None else f"-clip{config.clip_grad:g}"
    rate = f"x{config.optimiser.classifier_lr_scale:g}"
    network = network_name(model.backbone).replace(":", "-")
    return f"{images}{network}-{model.head}{options}{suffix}-{rate}-e{config.epochs}-{part}-s{config.seed}"


def rate_jobs(config: Train, rates: Sequence[float], suffix: str = "") -> list[Job]:
    """A run at each rate without the validation images, of the config's own seed."""
    held_out = replace(config, data=replace(config.data, val_fraction=VALIDATION))
    tried = [replace(held_out, optimiser=replace(config.optimiser, classifier_lr_scale=float(rate))) for rate in rates]
    return [Job(job_name(run, suffix), run) for run in tried]


def best_rate(jobs: Sequence[Job], records: Mapping[str, Record]) -> float | None:
    """The rate with the best validation accuracy in the last epoch, the lower one of equals; None until all are known.

    Nothing is worse than a run that diverged.
    """
    if any(job.name not in records for job in jobs):
        return None

    def merit(job: Job) -> tuple[float, float]:
        return records[job.name]["scores"].get("val_top1", -1.0), -job.config.optimiser.classifier_lr_scale

    return max(jobs, key=merit).config.optimiser.classifier_lr_scale


def further_rate(jobs: Sequence[Job], records: Mapping[str, Record], grid: Sequence[float]) -> float | None:
    """A rate beyond those that were tried if the best of them is the lowest or the highest, else None.

    Args:
        jobs: those of the grid, and of rates beyond it.
        records: of jobs.
        grid: where the search began.
    """
    best = best_rate(jobs, records)
    if best is None or len(jobs) - len(grid) == FURTHER:
        return None
    tried = [job.config.optimiser.classifier_lr_scale for job in jobs]
    beyond = best / STEP if best == min(tried) else best * STEP if best == max(tried) else None
    return None if beyond is None else float(f"{beyond:.3g}")


def final_jobs(
    config: Train, rate: float, seeds: Sequence[int], analyses: tuple[str, ...] = (), suffix: str = ""
) -> list[Job]:
    """Runs on all training images at one rate; the analyses are made on the first seed's network."""
    runs = [replace(with_head(config, config.model.head, rate), seed=seed) for seed in seeds]
    return [Job(job_name(run, suffix), run, analyses if run.seed == seeds[0] else ()) for run in runs]
