"""Models by name."""

import inspect
import os
from difflib import get_close_matches
from typing import Any

from eigengrain.errors import UnknownName
from eigengrain.heads import list_heads
from eigengrain.models.backbone import ImageSize, create_backbone
from eigengrain.models.model import CovarianceNet, Reduction
from eigengrain.models.stride import StrideOn
from eigengrain.models.weights import load_weights

#: of an argument that is None; the signature spells them out, as the reference shows it as it is written
DEFAULT_HEAD, DEFAULT_CLASSES = "mpncov+seb", 1000


def create_model(
    backbone: str,
    head: str | None = "mpncov+seb",
    num_classes: int | None = 1000,
    reduce: Reduction = "auto",
    last_stride: int | None = None,
    stride_on: StrideOn | None = "3x3",
    img_size: ImageSize | None = None,
    weights: str | os.PathLike[str] | None = None,
    pretrained: bool | None = False,
    head_options: dict[str, Any] | None = None,
    drop_rate: float | None = 0.0,
    **backbone_options: Any,
) -> CovarianceNet:
    """A backbone and a head by name.

    An argument that is None leaves the default of the model; only ``reduce=None`` has a meaning of its own.

    Args:
        backbone: a network of timm, of torchvision with ``tv:`` in front, or timm's ``hf-hub:…`` and ``local-dir:…``;
            see :func:`list_backbones`.
        head: see :func:`eigengrain.heads.list_heads`.
        num_classes: 0 for a model that returns the head's vector.
        reduce: channels left by a 1 × 1 convolution before the head; ``auto`` means 256 for a head whose vector grows with
            the square of the channels on a map of more than 512; None means no reduction.
        last_stride: 1 takes the last halving of the map out, without dilation, for a map twice as large in each direction.
        stride_on: ``1x1`` for ResNet weights from Caffe or Keras, whose stages stride on the first 1 × 1 convolution.
        img_size: side, or (height, width), for backbones that are built for one size (ViT, Swin).
        weights: local file, ``.safetensors`` or a PyTorch file without code, see :func:`load_weights`.
        pretrained: weights for the backbone from its library.
        head_options: keyword arguments of the head.
        drop_rate: dropout between the head's vector and the classifier.
        backbone_options: keyword arguments of the backbone, such as ``drop_path_rate`` or ``dynamic_img_size``.

    Raises:
        ValueError: for an unknown name, an option that does not fit, or a file that does not.

    Example:
        >>> import torch
        >>> model = create_model("resnet18", head="gap", num_classes=10, last_stride=1)
        >>> model(torch.zeros(2, 3, 64, 64)).shape, model.forward_features(torch.zeros(2, 3, 64, 64)).shape
        (torch.Size([2, 10]), torch.Size([2, 512, 4, 4]))
    """
    head_name = DEFAULT_HEAD if head is None else head
    classes = DEFAULT_CLASSES if num_classes is None else num_classes
    drop = 0.0 if drop_rate is None else drop_rate
    if head_name not in list_heads():
        raise UnknownName("head", head_name, list_heads())  # before a backbone is downloaded for it
    own = [name for name in inspect.signature(create_model).parameters if name != "backbone_options"]
    for option in backbone_options:
        near = get_close_matches(option, own, n=1, cutoff=0.88)  # so near is a slip, not an option of a backbone
        if near:
            raise ValueError(f"create_model has no argument {option!r}: did you mean {near[0]!r}?")
    body = create_backbone(backbone, bool(pretrained), last_stride, stride_on or "3x3", img_size, **backbone_options)
    model = CovarianceNet(body, head_name, classes, reduce, head_options, drop)
    model.config |= {"last_stride": last_stride, "stride_on": stride_on or "3x3", "img_size": body.img_size}
    if weights is not None:
        load_weights(model, weights)
    return model
