"""Accuracy: exact over any number of processes, and for several eigenvalue subsets from one pass of the backbone."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eigengrain.errors import NonFiniteError
from eigengrain.models import CovarianceNet
from eigengrain.models.eval_mode import evaluating
from eigengrain.training.cuda_graphs import recorded_features
from eigengrain.training.distributed import Process

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision(nn.Module):
    """A model whose backbone runs in half precision; head and classifier see float32, which eigenvalues need.

    Args:
        model: from create_model.
        amp: ``none``, ``bf16`` or ``fp16``.
        compile: whether the backbone is compiled.
        cuda_graphs: whether the backbone is recorded, at its first batch of training, and then replayed.
    """

    def __init__(self, model: CovarianceNet, amp: str = "none", compile: bool = False, cuda_graphs: bool = False):
        super().__init__()
        self.model = model
        self.dtype = AUTOCAST.get(amp)
        self.cuda_graphs = cuda_graphs
        self._map: Callable[[Tensor], Tensor] = torch.compile(model.forward_features) if compile else model.forward_features
        self._recorded: tuple[torch.Size, Callable[[Tensor], Tensor]] | None = None

    def features(self, images: Tensor) -> Tensor:
        """Images → feature map, in float32."""
        with torch.autocast(images.device.type, self.dtype, enabled=self.dtype is not None):
            features = self._map_for(images)(images)
        return features if self.dtype is None else features.float()

    def _map_for(self, images: Tensor) -> Callable[[Tensor], Tensor]:
        """The recorded backbone where it fits: a last, smaller batch runs as it is."""
        if not (self.cuda_graphs and self.model.training):
            return self._map
        if self._recorded is None:
            self._recorded = images.shape, recorded_features(self.model, images, self.dtype, self._map)
        shape, recorded = self._recorded
        return recorded if images.shape == shape else self._map

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_head(self.features(images))


@dataclass(frozen=True)
class Score:
    """How well one setting does.

    Args:
        subset: of the eigenvalues.
        samples: that were seen.
        top1: percentage with the right class first.
        top5: percentage with the right class among the first five (or among all, where there are fewer).
        loss: mean cross-entropy; of the mean probabilities with flips.
        correct: right answers of each class.
        count: samples of each class.
    """

    subset: str
    samples: int
    top1: float
    top5: float
    loss: float
    correct: list[int]
    count: list[int]


@contextmanager
def eigenvalue_subset(model: CovarianceNet, subset: str) -> Iterator[None]:
    """Keep only these eigenvalues for a while; ``own`` means those that the model was made with.

    Raises:
        ValueError: if the head has no eigenvalues to choose from, or not so many.
    """
    if subset == "own":
        yield
        return
    head: Any = model.head
    if not hasattr(head, "subset"):
        raise ValueError(f"head {model.config['head']!r} has no eigenvalues, so no subset '{subset}': leave --subset out")
    before = head.subset
    head.subset = subset
    try:
        yield
    finally:
        head.subset = before


def _vectors(model: CovarianceNet, features: Tensor, subsets: Sequence[str]) -> list[Tensor]:
    """The vectors of a feature map, one a subset; the covariance is decomposed once."""
    if list(subsets) == ["own"]:
        return [model.forward_head(features, pre_logits=True)]
    model.warn_of_short_rank(features)
    head: Any = model.head
    chosen = [head.subset if subset == "own" else subset for subset in subsets]
    vectors: list[Tensor] = head.pool_subsets(head.reduce(features), chosen)[0]
    return vectors


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
    each: Callable[[], object] = lambda: None,
) -> list[Score]:
    """Accuracy of a model, a :class:`Score` for each eigenvalue subset, from one pass of the backbone.

    Args:
        model: from create_model; its mode is put back afterwards.
        batches: (images, labels); under several processes each has its own share, and the sums are added up.
        process: where to compute; by default alone and where the model is.
        subsets: such as ``("all", "top:206")``; ``own`` is the model as it was made.
        flip: average the probabilities of each image and of its mirror image.
        amp: precision of the backbone.
        channels_last: memory layout of the images.
        each: called after every batch.

    Raises:
        ValueError: if there is no image, or the head has no such subset.
        NonFiniteError: if the model's scores are no numbers.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="gap", num_classes=2)
        >>> [score] = evaluate(model, [(torch.zeros(3, 3, 32, 32), torch.tensor([0, 1, 1]))])
        >>> score.samples, score.count, score.top5
        (3, [1, 2], 100.0)
    """
    process = process or Process(next(model.parameters()).device)
    device, classes = process.device, model.num_classes
    exact = torch.device("cpu") if device.type == "mps" else device  # where float64 is: MPS has none
    for subset in subsets:
        with eigenvalue_subset(model, subset):
            pass  # refused now, not after the first pass of the backbone
    net = MixedPrecision(model, amp)
    # of each subset: right answers of each class; and the sums of top-5 hits and of the loss
    correct = torch.zeros(len(subsets), classes, dtype=torch.float64, device=exact)
    sums = torch.zeros(len(subsets), 2, dtype=torch.float64, device=exact)
    count = torch.zeros(classes, dtype=torch.float64, device=exact)
    with evaluating(model):
        for images, labels in batches:
            images, labels = images.to(device, non_blocking=True), labels.to(exact, non_blocking=True)
            if channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            maps = [net.features(view) for view in ((images, images.flip(-1)) if flip else (images,))]
            count += torch.bincount(labels, minlength=classes)
            vectors = [_vectors(model, features, subsets) for features in maps]
            for row in range(len(subsets)):
                views = [model.classifier(view[row]).to(exact).double().log_softmax(-1) for view in vectors]
                scores = torch.stack(views).logsumexp(0) - math.log(len(views))
                best = scores.topk(min(5, classes), dim=-1).indices
                correct[row] += torch.bincount(labels[best[:, 0] == labels], minlength=classes)
                sums[row, 0] += (best == labels[:, None]).sum()
                sums[row, 1] -= scores.gather(1, labels[:, None]).sum()
            each()
    process.sum(correct), process.sum(sums), process.sum(count)
    samples = int(count.sum())
    if samples == 0:
        raise ValueError("there is no image to evaluate on: is the split empty?")
    if not sums.isfinite().all():
        raise NonFiniteError("the model's scores are NaN or infinite: is it of a training that diverged?")
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
