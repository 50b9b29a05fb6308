"""What a trained model sees in a data set: the spectrum of each image's covariance, and its answers."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eigengrain.functional import covariance, eigh
from eigengrain.functional.scaling_eigen_branch import qs_and_slope
from eigengrain.models import CovarianceNet
from eigengrain.models.eval_mode import evaluating
from eigengrain.training.evaluation import MixedPrecision


class Seen(NamedTuple):
    """One row an image.

    Args:
        eigenvalues: of the covariance of the features that the head pools, (n, d), descending, float64.
        factor: s of the Scaling Eigen Branch, (n,), or None for a head without it.
        predictions: the most likely class, (n,).
    """

    eigenvalues: Tensor
    factor: Tensor | None
    predictions: Tensor


def passes(
    model: CovarianceNet, batches: Iterable[tuple[Tensor, Tensor]], amp: str = "none", channels_last: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each batch the feature map, and the eigenvalues (B, d) of its covariances, descending, in float64 on the CPU.

    The model stays in the mode in which it is; a head without a covariance has one here all the same.
    """
    net, device = MixedPrecision(model, amp), next(model.parameters()).device
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for images, _ in batches:
        features = net.features(images.to(device, memory_format=layout))
        yield features, eigh(covariance(model.head.reduce(features), dtype=torch.float64)).values.cpu()


@torch.inference_mode()
def look(model: CovarianceNet, batches: Iterable[tuple[Tensor, Tensor]]) -> Seen:
    """Pass images through a model in evaluation mode.

    Args:
        model: from create_model; its mode is put back afterwards.
        batches: (images, labels).

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("plumage_net", head="gap", num_classes=10)
        >>> seen = look(model, [(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))])
        >>> seen.eigenvalues.shape, seen.factor, seen.predictions.shape
        (torch.Size([2, 64]), None, torch.Size([2]))
    """
    head: Any = model.head
    scaled = getattr(head, "seb", False) and head.factor == "qs"
    spectra, predictions = [], []
    with evaluating(model):
        for features, values in passes(model, batches):
            predictions.append(model.forward_head(features).argmax(1).cpu())
            spectra.append(values)
    eigenvalues = torch.cat(spectra)
    return Seen(eigenvalues, qs_and_slope(eigenvalues)[0] if scaled else None, torch.cat(predictions))
