"""Accuracy, exact for any number of processes, and for several eigenvalue subsets from one pass of the backbone."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError, NonFiniteError
from eigengrain.heads import SpectralHead
from eigengrain.models import CovarianceNet
from eigengrain.models.mixed_precision import FromFeatures, MixedPrecision
from eigengrain.models.model import eval_mode
from eigengrain.training.distributed import Process


@dataclass(frozen=True)
class Score:
    """Accuracy of a model with one subset of the eigenvalues.

    Args:
        subset: the subset, ``own`` for that of the model.
        samples: number of images.
        top1: percentage of images whose class has the highest score.
        top5: percentage of images whose class is among the five highest scores.
        loss: mean cross-entropy; with flips, that of the mean probabilities.
        correct: correct predictions per class.
        count: images per class.
    """

    subset: str
    samples: int
    top1: float
    top5: float
    loss: float
    correct: list[int]
    count: list[int]


def _scores(model: CovarianceNet, features: Tensor, subsets: Sequence[str]) -> list[Tensor]:
    """Scores of a feature map, one tensor per subset, from one decomposition."""
    if list(subsets) == ["own"]:
        return [model.forward_head(features)]
    model.warn_of_short_rank(features)
    head = model.head
    assert isinstance(head, SpectralHead)
    chosen = [head.subset if subset == "own" else subset for subset in subsets]
    pooled, beside = model.split_features(features)
    vectors, _ = head.pool_subsets(head.reduce(pooled), chosen)
    return [model.forward_vector(vector, beside=beside) for vector in vectors]


@torch.inference_mode()
def evaluate(
    model: CovarianceNet,
    batches: Iterable[tuple[Tensor, Tensor]],
    process: Process | None = None,
    *,
    subsets: Sequence[str] = ("own",),
    flip: bool = False,
    amp: str = "none",
    channels_last: bool = False,
    from_features: bool = False,
    each: Callable[[], object] = lambda: None,
) -> list[Score]:
    """Accuracy of a model, one :class:`Score` per eigenvalue subset, from one pass of the backbone.

    Args:
        model: model of ``create_model``; its training mode is restored.
        batches: (images, labels); with several processes each has its own share, and the results are summed.
        process: this process and its device; by default a single process on the device of the model.
        subsets: subsets such as ``("all", "top:206")``; ``own`` is the subset of the model.
        flip: average the probabilities of each image and its mirror image.
        amp: precision of the backbone.
        channels_last: use the channels-last memory layout.
        from_features: the batches have feature maps of the backbone instead of images, without ``flip``.
        each: function that is called after every batch.

    Raises:
        ArgumentError: if the head cannot select a subset.
        ValueError: if there are no images.
        NonFiniteError: if the scores of the model are not finite.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="gap", num_classes=2)
        >>> [score] = evaluate(model, [(torch.zeros(3, 3, 32, 32), torch.tensor([0, 1, 1]))])
        >>> score.samples, score.count, score.top5
        (3, [1, 2], 100.0)
    """
    process = process or Process(next(model.parameters()).device)
    if flip and from_features:
        raise ArgumentError("flip", "needs images instead of their features", remedy="leave it out")
    device, classes = process.device, model.num_classes
    exact = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    for subset in (subset for subset in subsets if subset != "own"):  # check before the first pass of the backbone
        if not isinstance(model.head, SpectralHead):
            problem = f"cannot be selected: the head {model.config['head']!r} has no eigenvalues"
            raise ArgumentError("subset", problem, subset, "leave it out")
        with model.head.keeping(subset):
            pass
    net = (FromFeatures if from_features else MixedPrecision)(model, amp)
    # per subset: correct predictions of each class; sums of top-5 hits and of the loss
    correct = torch.zeros(len(subsets), classes, dtype=torch.float64, device=exact)
    sums = torch.zeros(len(subsets), 2, dtype=torch.float64, device=exact)
    count = torch.zeros(classes, dtype=torch.float64, device=exact)
    with eval_mode(model):
        for images, labels in batches:
            images, labels = images.to(device, non_blocking=True), labels.to(exact, non_blocking=True)
            if channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            maps = [net.features(view) for view in ((images, images.flip(-1)) if flip else (images,))]
            count += torch.bincount(labels, minlength=classes)
            outputs = [_scores(model, features, subsets) for features in maps]
            for row in range(len(subsets)):
                views = [view[row].to(exact).double().log_softmax(-1) for view in outputs]
                scores = torch.stack(views).logsumexp(0) - math.log(len(views))
                best = scores.topk(min(5, classes), dim=-1).indices
                correct[row] += torch.bincount(labels[best[:, 0] == labels], minlength=classes)
                sums[row, 0] += (best == labels[:, None]).sum()
                sums[row, 1] -= scores.gather(1, labels[:, None]).sum()
            each()
    process.sum(correct), process.sum(sums), process.sum(count)
    samples = int(count.sum())
    if samples == 0:
        raise ValueError("there are no images to evaluate: the split is empty")
    if not sums.isfinite().all():
        raise NonFiniteError("the scores of the model are not finite: its training may have diverged")
    return [
        Score(
            subset=subset,
            samples=samples,
            top1=100 * float(correct[row].sum()) / samples,
            top5=100 * float(sums[row, 0]) / samples,
            loss=float(sums[row, 1]) / samples,
            correct=[int(n) for n in correct[row].tolist()],
            count=[int(n) for n in count.tolist()],
        )
        for row, subset in enumerate(subsets)
    ]
