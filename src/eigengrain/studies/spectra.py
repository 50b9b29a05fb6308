"""What a trained model sees in a data set: the spectrum of each image's covariance, and its answers."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eigengrain.functional import covariance, eigh, scaling_factor
from eigengrain.models import CovarianceNet


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


@torch.inference_mode()
def look(model: CovarianceNet, batches: Iterable[tuple[Tensor, Tensor]]) -> Seen:
    """Pass images through a model in evaluation mode; a head without a covariance has one here all the same.

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
    device = next(model.parameters()).device
    scaled = getattr(head, "seb", False) and head.factor == "qs"
    values, factors, predictions = [], [], []
    training = model.training
    model.eval()
    try:
        for images, _ in batches:
            features = model.forward_features(images.to(device))
            predictions.append(model.forward_head(features).argmax(1).cpu())
            p = covariance(head.reduce(features), dtype=torch.float64)
            values.append(eigh(p).values.cpu())
            if scaled:
                factors.append(scaling_factor(p).cpu())
    finally:
        model.train(training)
    return Seen(torch.cat(values), torch.cat(factors) if scaled else None, torch.cat(predictions))
