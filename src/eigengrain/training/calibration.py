"""Probabilities that mean what they say, and images that are none of the classes.

Temperature scaling (Guo et al., ICML 2017) divides the scores of a model by one number T, fitted on validation images, so
that of all answers given with probability p a share of p is right. It does not change the order of the classes. Images that
are less familiar than nearly all validation images, see :mod:`eigengrain.models.calibration`, are none of the classes.
"""

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eigengrain.data import build_transform, make_loader
from eigengrain.errors import ArgumentError, NonFiniteError
from eigengrain.models import CovarianceNet
from eigengrain.models.calibration import Calibration, encode_subspace, familiarity
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.models.model import eval_mode
from eigengrain.training.distributed import Process
from eigengrain.training.setup import Run

#: share of the validation images that the stored threshold accepts
ACCEPTED = 0.95
#: principal directions of the training images, and number of images from which they are measured
DIRECTIONS, TRAINING_IMAGES = 16, 1000
#: answers about images that are unlike those of the training, and about images without a probable class
NONE, UNSURE = "none of these", "unsure"
#: range of temperatures
LOWEST, HIGHEST = 0.02, 50.0


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""The temperature T that minimises the negative log-likelihood of softmax(z/T), by Newton's method in float64.

    The likelihood is convex in 1/T, and its mean is never worse than at T = 1. If every image is right, it has no maximum:
    1/T grows only until the mean probability of the answers is (n + 1)/(n + 2), and T is at most 1.

    Args:
        logits: scores z (n, classes) of images that were not used for training.
        labels: their classes (n,).

    Raises:
        ArgumentError: if there are no images, or labels do not fit.
        NonFiniteError: if a score is not finite.

    Example:
        >>> scores, labels = torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
        >>> round(fit_temperature(scores, labels), 4), round(2 / math.log(3), 4)  # a share of 3/4 is right
        (1.8205, 1.8205)
    """
    z, labels = _checked(logits, labels)
    z = z - z.max(-1, keepdim=True).values
    right = z.gather(1, labels[:, None])
    separable = bool((right == 0).all() and (z == 0).sum() == len(z))

    def slope(inverse: float) -> tuple[float, float]:
        """Derivatives of the mean negative log-likelihood by 1/T."""
        p = (inverse * z).softmax(-1)
        mean = (p * z).sum(-1, keepdim=True)
        return float((mean - right).mean()), float((p * (z - mean) ** 2).sum(-1).mean())

    def excess(inverse: float) -> tuple[float, float]:
        """Mean probability of the answers above (n + 1)/(n + 2), and its derivative by 1/T."""
        p = (inverse * z).softmax(-1)
        top, mean = p.max(-1).values, (p * z).sum(-1)
        return float(top.mean()) - (len(z) + 1) / (len(z) + 2), float((-top * mean).mean())

    return 1 / (max(_root(excess), 1.0) if separable else _root(slope))


def _root(function: Callable[[float], tuple[float, float]]) -> float:
    """Root of an increasing function in the range of 1/T, or the nearest end, by Newton steps that stay in a bracket."""
    low, high, x = 1 / HIGHEST, 1 / LOWEST, 1.0
    for _ in range(200):
        value, derivative = function(x)
        if value == 0:  # also for scores that are all equal
            break
        low, high = (x, high) if value < 0 else (low, x)
        step = x - value / derivative if derivative > 0 else math.nan
        new = step if low < step < high else (low + high) / 2
        if abs(new - x) <= 1e-14 * x:
            break
        x = new
    return x


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    r"""Expected calibration error: mean distance of confidence and accuracy over bins of equal width.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{n}\, \big|\mathrm{accuracy}_b - \mathrm{confidence}_b\big|

    The confidence of an answer is its probability; bin b contains those in ((b − 1)/bins, b/bins].

    Args:
        probabilities: (n, classes).
        labels: classes (n,).

    Example:
        >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
        >>> round(expected_calibration_error(p, torch.tensor([0, 1])), 6)  # 0.9 promised, 0.5 kept
        0.4
    """
    return sum(abs(row[0] - row[1]) * row[2] for row in reliability(probabilities, labels, bins)) / len(labels)


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> list[tuple[float, float, int]]:
    """Mean confidence, accuracy and number of images of each bin of :func:`expected_calibration_error` that has images."""
    if bins < 1:
        raise ArgumentError("bins", "must be at least 1", bins)
    p, labels = _checked(probabilities, labels)
    confidence, answers = p.max(-1)
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    right = (answers == labels).double()
    rows = ((confidence[place == b], right[place == b]) for b in range(bins))
    return [(float(c.mean()), float(r.mean()), len(c)) for c, r in rows if len(c)]


def energy_threshold(logits: Tensor, accepted: float = ACCEPTED) -> float:
    """The :func:`acceptance_threshold` of the energy log Σ exp of the scores (Liu et al., NeurIPS 2020).

    The package itself uses the familiarity, which rejects many more images; see ``benchmarks/unfamiliar.csv``.
    """
    return acceptance_threshold(_checked(logits)[0].logsumexp(-1), accepted)


def acceptance_threshold(values: Tensor, accepted: float = ACCEPTED) -> float:
    """The largest threshold that at least a share ``accepted`` of the values (n,) reaches.

    Example:
        >>> acceptance_threshold(torch.arange(1.0, 21.0), accepted=0.95)  # 19 of 20
        2.0
    """
    if not 0 < accepted <= 1:
        raise ArgumentError("accepted", "must be above 0 and at most 1", accepted)
    ordered = values.detach().cpu().double().sort().values
    return float(ordered[len(ordered) - math.ceil(accepted * len(ordered) - 1e-9)])


def _checked(values: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values in float64 and labels, both on the CPU (MPS has no float64), or an error."""
    values = values.detach().cpu().double()
    if values.ndim != 2 or not values.numel():
        raise ArgumentError("logits", "must be (images, classes), with at least one image", tuple(values.shape))
    if not values.isfinite().all():
        raise NonFiniteError("the scores of the model are not finite: its training may have diverged")
    labels = torch.zeros(len(values), dtype=torch.long) if labels is None else labels.detach().cpu().long()
    if labels.shape != values.shape[:1] or int(labels.min()) < 0 or int(labels.max()) >= values.shape[1]:
        problem = f"must be one class from 0 to {values.shape[1] - 1} for each of {len(values)} images"
        raise ArgumentError("labels", problem, tuple(labels.shape))
    return values, labels


class Collected(NamedTuple):
    """What a model computes for n images: scores (n, classes), labels (n,), means of the feature maps (n, num_features)."""

    logits: Tensor
    labels: Tensor
    means: Tensor


@torch.inference_mode()
def collect(
    model: CovarianceNet,
    batches: Iterable[tuple[Tensor, Tensor]],
    process: Process | None = None,
    *,
    amp: str = "none",
    channels_last: bool = False,
    each: Callable[[], object] = lambda: None,
) -> Collected:
    """Pass images through a model in eval mode; the arguments are those of :func:`~eigengrain.training.evaluate`.

    Scores and means are float64, on the CPU. With several processes, each has its own share of the batches, and all get the
    images of all, those of the first process first.
    """
    process = process or Process(next(model.parameters()).device)
    net = MixedPrecision(model, amp)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    # growing arrays: a small tensor per batch would stay between freed images, whose memory could then not be used again
    logits, means, labels = array("d"), array("d"), array("q")
    with eval_mode(model):
        for images, targets in batches:
            features = net.features(images.to(process.device, non_blocking=True).contiguous(memory_format=layout))
            logits.frombytes(model.forward_head(features).cpu().double().numpy().tobytes())
            means.frombytes(features.flatten(2).mean(-1).cpu().double().numpy().tobytes())
            labels.frombytes(targets.cpu().long().numpy().tobytes())
            each()
    n = len(labels)
    own = (np.array(logits).reshape(n, model.num_classes), np.array(labels), np.array(means).reshape(n, model.num_features))
    shares = process.gather(tuple(map(torch.from_numpy, own)))
    return Collected(*(torch.cat(parts) for parts in zip(*shares, strict=True)))


def fit_subspace(means: Tensor) -> Tensor:
    """Mean of the rows (n, C), and their principal directions, at most DIRECTIONS: (1 + k, C)."""
    centre = means.mean(0)
    directions = torch.linalg.svd(means - centre, full_matrices=False).Vh
    return torch.cat([centre[None], directions[: min(DIRECTIONS, len(means) // 2, means.shape[1] // 2)]])


def fit_calibration(validation: Collected, training: Collected | None, accepted: float = ACCEPTED) -> dict[str, Any]:
    """``CovarianceNet.calibration`` from validation images, and the familiarity of these from training images, if given."""
    values: dict[str, Any] = {"temperature": fit_temperature(validation.logits, validation.labels), "accepted": accepted}
    if training is not None and len(training.means) > 1:
        subspace = fit_subspace(training.means).float()
        familiarities = familiarity(validation.means[..., None, None].float(), subspace)
        values["subspace"] = encode_subspace(subspace)
        values["familiarity_threshold"] = acceptance_threshold(familiarities, accepted)
        values["familiarities"] = [acceptance_threshold(familiarities, 1 - percent / 100) for percent in range(100)]
    return asdict(Calibration(**values))


def calibrate(run: Run) -> None:
    """Set the calibration of the model of a run from its validation images, never from test images; None without them.

    The subspace is from at most TRAINING_IMAGES training images, prepared as for a test.
    """
    if run.images.val is None:
        return
    train, model = run.sources.train, run.evaluated
    some = train.subset(range(0, len(train), -(-len(train) // TRAINING_IMAGES)))
    described = model.pretrained_cfg
    some.transform = build_transform(run.config.data.transforms, False, described["mean"], described["std"])
    share: dict[str, Any] = {"rank": run.process.rank, "world_size": run.process.world_size}
    loader = make_loader(some, run.config.batch_size, train=False, workers=run.config.workers, **share)
    training = collect(model, loader, run.process)
    model.calibration = fit_calibration(collect(model, run.images.val, run.process), training)


def rejection_threshold(model: CovarianceNet, accept: float | None = None) -> float:
    """Threshold of the familiarity that at least a share ``accept`` of the validation images reaches, to one percent.

    By default it is the stored one, or −∞ for a model without calibration; it is −∞ for 1, to accept every image.

    Raises:
        ArgumentError: if the model has no such threshold.
    """
    stored = model.calibration or {}
    own, thresholds = stored.get("familiarity_threshold"), stored.get("familiarities") or []
    if accept == 1 or (accept is None and own is None):
        return -math.inf
    if own is not None and accept in (None, stored.get("accepted")):
        return float(own)
    place = math.floor(100 * (1 - float(accept or 0)) + 1e-9)
    if not 0 <= place < len(thresholds):
        problem = "is not a share for which the model has a threshold, which is measured on validation images"
        raise ArgumentError("accept", problem, accept, "leave it out" if own is None else f"use {stored.get('accepted')}")
    return float(thresholds[place])


def find_doubts(probabilities: Tensor, familiar: Tensor, threshold: float, min_probability: float = 0.0) -> list[str]:
    """For each image NONE if its familiarity is below the threshold, UNSURE if its answer is not probable enough, else "".

    Example:
        >>> find_doubts(torch.tensor([0.9, 0.9, 0.4]), torch.tensor([0.5, 0.1, 0.5]), 0.2, min_probability=0.5)
        ['', 'none of these', 'unsure']
    """
    pairs = zip(probabilities.tolist(), familiar.tolist(), strict=True)
    return [NONE if value < threshold else UNSURE if share < min_probability else "" for share, value in pairs]
