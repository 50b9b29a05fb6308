"""A smooth map of an image: how much each position of the feature map contributes to the score of a class."""

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError
from eigengrain.explain.targets import Classes, read_classes
from eigengrain.models import CovarianceNet
from eigengrain.models.contributions import contributions
from eigengrain.models.model import check_unwrapped, eval_mode


@torch.no_grad()
def smooth_maps(model: CovarianceNet, images: Tensor, target: Classes | None = None) -> Tensor:
    """Compute smooth maps of a batch, (B, H, W), at least 0, enlarged to the size of the images.

    They are those of :func:`eigengrain.models.contributions.contributions`.

    Args:
        model: from :func:`create_model`, with a classifier; its mode is restored.
        images: (B, 3, H, W), normalised for the model.
        target: a class, one class per image, or None for the predicted ones.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3)
        >>> smooth_maps(model, torch.rand(2, 3, 64, 64), target=[1, 3]).shape
        torch.Size([2, 64, 64])
    """
    check_unwrapped(model)
    if not model.num_classes:
        raise ArgumentError("model", "must have a classifier, whose scores the maps explain")
    with eval_mode(model):
        features = model.forward_features(images)
        if target is None:
            target = model.forward_head(features).argmax(1)
        classes = read_classes(target, images, model.num_classes)
        return contributions(model, features, classes, images.shape[-2:])
