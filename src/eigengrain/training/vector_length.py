"""Vectors of one length for all heads, so that one learning rate suits them."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from eigengrain.errors import NonFiniteError
from eigengrain.models import CovarianceNet
from eigengrain.models.mixed_precision import FromFeatures, MixedPrecision
from eigengrain.training.distributed import Process

#: root mean square length of calibrated vectors, and number of images from which it is measured
LENGTH, IMAGES = 32.0, 64


@torch.no_grad()
def calibrate_vectors(
    model: CovarianceNet,
    batches: Iterable[tuple[Tensor, Tensor]],
    process: Process | None = None,
    amp: str = "none",
    from_features: bool = False,
) -> float:
    """Set ``model.vector_scale`` so that the vectors of the first images have the root mean square length LENGTH.

    If the class token joins the head's vector, each of the two has its own factor and the length LENGTH/√2. A mid-level
    branch has its own factor too, for vectors of the length LENGTH.

    A classifier learns from a vector that is c times as long as if its learning rate were c² times as high. With vectors of
    one length, one learning rate suits all heads. The weights of a linear classifier are divided by a factor above 1, so
    that the scores do not change. The statistics of normalisation layers are those of the batches, as in training, and the
    running ones stay as they are. A model whose factor is not 1 is calibrated already and is not changed.

    Args:
        model: model of ``create_model``, before its training.
        batches: (images, labels) of the training; the first that have IMAGES images are used.
        process: this process and its device, by default a single process on the device of the model; all processes compute
            the same factor.
        amp: precision of the backbone.
        from_features: the batches have feature maps of the backbone instead of images.

    Returns:
        the factor; it stays 1 if the vectors are zero or not finite.

    Example:
        >>> from eigengrain.models import create_model
        >>> model, images = create_model("test_resnet", "gap", num_classes=2), torch.rand(8, 3, 32, 32)
        >>> factor = calibrate_vectors(model, [(images, torch.zeros(8))])
        >>> vectors = model.train().forward_head(model.forward_features(images), pre_logits=True)
        >>> print(f"{vectors.square().sum(1).mean().sqrt():.4f}")
        32.0000
    """
    process = process or Process(next(model.parameters()).device)
    if model.vector_scale != 1:
        return float(model.vector_scale)
    net = (FromFeatures if from_features else MixedPrecision)(model, amp)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    images_seen, squares = 0, [0.0, 0.0]  # of the head's vectors, and of the class tokens or the mid-level vectors
    model.train()
    try:
        for images, _ in batches:
            features = net.features(images.to(process.device, non_blocking=True))
            pooled, beside = model.split_features(features)
            if beside is not None and model.mid_level is not None:
                beside = model.mid_level.vector(beside)
            try:
                squares[0] += _sum_of_squares(model.head(pooled))
            except NonFiniteError:  # the first step will report it
                squares[0] = math.nan
            squares[1] += 0.0 if beside is None else _sum_of_squares(beside)
            images_seen += len(images)
            if images_seen * process.world_size >= IMAGES:
                break
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)
        for module, training in modes:
            module.training = training
    shares = process.gather((images_seen, squares))
    count = max(1, sum(seen for seen, _ in shares))
    split, length = model.head.out_features, LENGTH
    scales = [(model.vector_scale, model.classifier, slice(split))]
    if model.class_token_channels:
        scales.append((model.token_scale, model.classifier, slice(split, None)))
        length /= math.sqrt(2)
    elif model.mid_level is not None:
        scales.append((model.mid_level.vector_scale, model.mid_level.classifier, slice(None)))
    for part, (scale, classifier, columns) in enumerate(scales):
        mean_square = sum(sums[part] for _, sums in shares) / count
        if 0 < mean_square < math.inf:
            scale.fill_(length / math.sqrt(mean_square))
            # larger scores of a random classifier would send larger random gradients into the backbone
            if isinstance(classifier, nn.Linear) and scale > 1:
                classifier.weight[:, columns].div_(scale)
    return float(model.vector_scale)


def _sum_of_squares(vectors: Tensor) -> float:
    return float(vectors.cpu().double().square().sum())
