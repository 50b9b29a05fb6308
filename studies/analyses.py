"""Measurements on a trained network: spectra of its covariances, accuracy and maps with parts of them."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eigengrain.data import ImageSet
from eigengrain.functional import covariance, eigh, rounding_floor
from eigengrain.functional.scaling_eigen_branch import qs_and_slope
from eigengrain.functional.subsets import small_part
from eigengrain.models import CovarianceNet
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.training.config import Train
from eigengrain.training.distributed import Process
from eigengrain.training.evaluation import evaluate
from eigengrain.training.sources import Sources, make_loaders

#: quantiles over images in the records
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: edges of the histogram of log10 of the eigenvalues
EDGES = [-12 + 0.25 * k for k in range(65)]
#: largest number of test images, evenly spaced, for maps
SURVEYED = 2000


@dataclass(frozen=True)
class Trained:
    """A finished run: the network in evaluation mode, the test images, their batches, the options, and all images."""

    model: CovarianceNet
    images: ImageSet
    batches: Iterable[tuple[Tensor, Tensor]]
    config: Train
    sources: Sources


@torch.inference_mode()
def spectrum(trained: Trained) -> dict[str, Any]:
    """Eigenvalues of the covariance of every image: quantiles of measures, mean logarithms, a histogram.

    Eigenvalues below d·eps·λ_1 are rounding errors and are raised to that. Images with a zero covariance are counted and
    left out; if all are, their eigenvalues are raised to the smallest number.
    """
    model, config = trained.model, trained.config
    net, device = MixedPrecision(model, config.amp), next(model.parameters()).device
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    parts = []  # also of heads without a covariance
    for batch, _ in trained.batches:
        features = net.features(batch.to(device, memory_format=layout))
        pooled, _ = model.split_features(features)
        parts.append(eigh(covariance(model.head.reduce(pooled), dtype=torch.float64)).values.cpu())
    values = torch.cat(parts)
    images, d = values.shape
    alive = values[:, 0] > 0
    values = values[alive] if alive.any() else values.clamp_min(torch.finfo(values.dtype).tiny)
    values = torch.maximum(values, rounding_floor(values))
    share = values / values.sum(-1, keepdim=True)
    last, logs = small_part(d), values.log10()
    condition = logs[:, 0] - logs[:, -1]
    inside = logs.flatten().clamp(EDGES[0], EDGES[-1])  # the first and last bin contain what is beyond them
    counts = torch.histogram(inside, torch.tensor(EDGES, dtype=logs.dtype)).hist
    return {
        "images": images,
        "images_of_zero": images - int(alive.sum()),
        "channels": d,
        "quantiles": list(QUANTILES),
        "lambda_1": _quantiles(values[:, 0]),
        "log10_condition": _quantiles(condition),
        "log10_condition_of_images": [round(v, 3) for v in condition.tolist()],
        "effective_rank": _quantiles(torch.exp(-(share * share.log()).sum(-1))),
        "energy_last": _quantiles(share[:, -last:].sum(-1)),
        "last": last,
        "s": _quantiles(qs_and_slope(values)[0]),
        "q_norm": _quantiles(values.sum(-1).sqrt()),
        "mean_log10": [round(v, 4) for v in logs.mean(0).tolist()],
        "histogram_edges": EDGES,
        "histogram": [int(n) for n in counts.tolist()],
    }


def _quantiles(values: Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in values.quantile(torch.tensor(QUANTILES, dtype=values.dtype)).tolist()]


def paper_subsets(d: int) -> dict[str, str]:
    """The subsets of Table 2 in the same proportions of d eigenvalues, with the name in the paper.

    Example:
        >>> paper_subsets(10)
        {'all': 'all', 'top:8': 'top:206', 'top:1+last:2': 'top:1+last:50', 'top:1+last:1': 'top:1+last:40'}
    """
    last = small_part(d)
    subsets = {"all": "all", f"top:{d - last}": "top:206", f"top:1+last:{last}": "top:1+last:50"}
    for count in (40, 30):
        if (ours := last * count // 50) > 0:
            subsets.setdefault(f"top:1+last:{ours}", f"top:1+last:{count}")
    return subsets


def list_subsets(d: int) -> list[str]:
    """The subsets of Table 2, and more between them; for small d in the same proportions.

    Example:
        >>> list_subsets(256)[:6]
        ['all', 'top:206', 'top:1+last:50', 'top:1+last:40', 'top:1+last:30', 'last:50']
    """
    last = small_part(d)
    top = [k for k in (128, 64, 32, 16, 8, 4, 2, 1) if k < d - last]
    return [*paper_subsets(d), f"last:{last}", *(f"top:{k}" for k in top)]


def subset_accuracy(trained: Trained) -> dict[str, Any]:
    """Accuracy with parts of the spectrum, in inference only (Table 2)."""
    names, config = list_subsets(trained.model.head.channels), trained.config
    scores = evaluate(trained.model, trained.batches, subsets=names, amp=config.amp, channels_last=config.channels_last)
    return {score.subset: {"top1": score.top1, "top5": score.top5, "loss": score.loss} for score in scores}


def large_and_small(d: int) -> tuple[str, str]:
    """The two subsets of Table 1."""
    return f"top:{d - small_part(d)}", f"last:{small_part(d)}"


def similarity(trained: Trained) -> dict[str, Any]:
    """Maps of the large and of the small eigenvalues beside those of all (Table 1), for both kinds of a cut."""
    from eigengrain.explain.survey import image_batches, survey  # needs captum

    count = min(len(trained.images), SURVEYED)
    images = trained.images.subset([k * len(trained.images) // count for k in range(count)])
    rows: list[dict[str, Any]] = []
    for cut in ("exact", "projector"):
        result = survey(
            trained.model,
            image_batches(images, trained.config.batch_size, workers=trained.config.workers),
            ("all", *large_and_small(trained.model.head.channels)),
            cut=cut,
            collapse=("abs-max", "signed-sum"),
        )
        rows += [{key: None if value != value else value for key, value in asdict(row).items()} for row in result.table]
    return {"images": len(images), "target": "label", "rows": rows}


def size_accuracy(trained: Trained) -> dict[str, Any]:
    """Accuracy on validation and test images that are larger than those of the training."""
    model, config, transforms = trained.model, trained.config, trained.config.data.transforms
    process, result = Process(next(model.parameters()).device), {}
    for size in larger_sizes(transforms.img_size):
        data = replace(config.data, transforms=transforms.at_size(size))
        loaders = make_loaders(trained.sources, model, replace(config, data=data, cache="none"), process)
        splits = {name: images for name in ("val", "test") if (images := getattr(loaders, name)) is not None}
        scores = {name: evaluate(model, images, process, **config.precision)[0] for name, images in splits.items()}
        result[str(size)] = {f"{name}_top1": score.top1 for name, score in scores.items()}
    return result


def larger_sizes(img_size: int) -> list[int]:
    """Sizes of test images in pixels, 1/7 and 2/7 above that of the training.

    Example:
        >>> larger_sizes(448)
        [512, 576]
    """
    return [round(img_size * share / 7) for share in (8, 9)]


ANALYSES: dict[str, Callable[[Trained], dict[str, Any]]] = {
    "spectrum": spectrum,
    "subset-accuracy": subset_accuracy,
    "similarity": similarity,
    "size-accuracy": size_accuracy,
}
