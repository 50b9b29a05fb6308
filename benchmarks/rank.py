"""Rank of the covariances of photographs, and maps of large and small eigenvalues beside those of all (Table 10)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from eigengrain import names
from eigengrain.cli.evaluate import check_checkpoint
from eigengrain.environment import pick_device
from eigengrain.errors import ArgumentError
from eigengrain.explain.saliency import attribute_rules
from eigengrain.explain.survey import image_batches, survey
from eigengrain.functional import rounding_floor
from eigengrain.functional.subsets import small_part
from eigengrain.heads import SpectralHead
from eigengrain.models import CovarianceNet
from eigengrain.options import check, setting
from eigengrain.training.run_folder import TrainedModel, open_run

MEASURES = ("corr", "mae", "norm_ratio")


@dataclass(frozen=True)
class RankBench:
    """Measure the rank of covariances and the similarity of the maps of large eigenvalues to those of all.

    Args:
        checkpoint: folders of trainings with a covariance head.
        img_sizes: sizes of the images in pixels; that of the training by default.
        count: number of test images, evenly spaced.
        rules: backward rules at the ReLUs: vanilla, deconv, guided.
        cuts: how a cut spectrum is differentiated: exact, projector.
        batch_size: number of images per batch.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: CSV file.
    """

    checkpoint: list[str] = setting([])
    img_sizes: list[int] = setting([])
    count: int = setting(300, least=1)
    rules: list[str] = setting(list(names.RULES[:2]), choices=names.RULES)
    cuts: list[str] = setting(list(names.CUTS), choices=names.CUTS)
    batch_size: int = setting(16, least=1)
    device: str = "auto"
    out: str = "benchmarks/rank.csv"

    def __post_init__(self) -> None:
        check(self)


@torch.no_grad()
def ranks(model: CovarianceNet, features: Tensor) -> Tensor:
    """Number of eigenvalues of the covariance of each feature map above the rounding error of the largest, (B,)."""
    head = model.head
    if not isinstance(head, SpectralHead):
        raise ArgumentError("checkpoint", "must have a head with eigenvalues", type(head).__name__)
    pooled, _ = model.split_features(features)
    values = head.eigenvalues(head.reduce(pooled)).cpu().double()  # first to the CPU, because MPS has no float64
    return (values > rounding_floor(values)).sum(-1)


def measure_run(trained: TrainedModel, config: RankBench) -> list[measure.Row]:
    """One row per rule, cut and subset."""
    model, dataset = trained.model.eval(), trained.dataset("test")
    count = min(config.count, len(dataset))
    images = dataset.subset([k * len(dataset) // count for k in range(count)])
    device = next(model.parameters()).device
    first = model.forward_features(images[0][0][None].to(device))
    channels = model.head.channels
    subsets = ("all", f"top:{channels - small_part(channels)}", f"last:{small_part(channels)}")
    numbers: list[Tensor] = []
    right: list[Tensor] = []
    same: dict[tuple[str, str, str], int] = {}

    def attribute(model: CovarianceNet, batch: Tensor, subsets: Any, rules: Any, **options: Any) -> Any:
        if options["cut"] == config.cuts[0]:
            with torch.no_grad():
                features = model.forward_features(batch)
                right.append((model.forward_head(features).argmax(-1) == options["target"]).cpu())
            numbers.append(ranks(model, features))
        results = attribute_rules(model, batch, subsets, rules, **options)
        for rule, result in results.items():
            for name, maps in result.maps.items():
                equal = (maps == result.maps["all"]).flatten(1).all(1)
                key = rule, options["cut"], name
                same[key] = same.get(key, 0) + int(equal.sum())
        return results

    rows = []
    for cut in config.cuts:
        batches = image_batches(images, config.batch_size, regions=False)
        result = survey(model, batches, subsets, config.rules, cut=cut, measures=MEASURES, attribute=attribute)
        for rule in config.rules:
            for name in subsets[1:]:
                row: dict[str, Any] = {"img_size": trained.image_size}
                row |= {"positions": first[0, 0].numel(), "channels": channels, "images": count}
                row |= {"rule": rule, "cut": cut, "subset": name, "identical_maps": same[rule, cut, name]}
                for key in MEASURES:
                    summary = result.find(key, rule, name)
                    row |= {key: summary.mean, f"{key}_error": summary.standard_error, f"{key}_images": summary.n}
                rows.append(row)
    number = torch.cat(numbers)
    about = {"rank_lowest": int(number.min()), "rank_median": float(number.double().median())}
    about |= {"rank_highest": int(number.max()), "top1": round(100 * torch.cat(right).double().mean().item(), 4)}
    return [{**row, **about} for row in rows]


def run(config: RankBench) -> None:
    """``python -m benchmarks rank``."""
    check_checkpoint(config.checkpoint)
    device, rows = pick_device(config.device), list[measure.Row]()
    for checkpoint in config.checkpoint:
        for size in config.img_sizes or (None,):
            trained = open_run(checkpoint).with_transforms(None, size)
            trained.model.to(device)
            rows += [{"run": Path(checkpoint).name, **row} for row in measure_run(trained, config)]
    path = Path(config.out)
    measure.save(path, rows, device)
    columns = ["run", "img_size", "positions", "rank_highest", "rule", "cut", "subset", "identical_maps", "corr", "mae"]
    measure.finish({"rows": rows}, [path], device, measure.format_table(rows, columns))
