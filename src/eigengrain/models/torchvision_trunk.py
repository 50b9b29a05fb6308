"""torchvision's networks without their classifiers, for the backbones that timm does not have."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision import models as torchvision_models

PREFIX = "tv:"

# class of the network -> its children up to the feature map, in the order in which they run
_TRUNKS: dict[str, tuple[str, ...]] = {
    "AlexNet": ("features",),
    "ConvNeXt": ("features",),
    "DenseNet": ("features", "relu"),
    "EfficientNet": ("features",),
    "MNASNet": ("layers",),
    "MobileNetV2": ("features",),
    "MobileNetV3": ("features",),
    "RegNet": ("stem", "trunk_output"),
    "ResNet": ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"),
    "ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5"),
    "SqueezeNet": ("features",),
    "SwinTransformer": ("features", "norm", "permute"),
    "VGG": ("features",),
}

# class of the network -> its classifier, where nothing but the mean of the map comes before it
_CLASSIFIERS = {
    "DenseNet": "classifier",
    "EfficientNet": "classifier.1",
    "MNASNet": "classifier.1",
    "MobileNetV2": "classifier.1",
    "RegNet": "fc",
    "ResNet": "fc",
    "ShuffleNetV2": "fc",
    "SwinTransformer": "head",
}


class TorchvisionTrunk(nn.Sequential):
    """The part of a torchvision network that makes its feature map, with torchvision's own parameter names.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     trunk, images = TorchvisionTrunk("alexnet"), torch.empty(1, 3, 224, 224)
        >>> trunk.forward_features(images).shape
        torch.Size([1, 256, 6, 6])
    """

    def __init__(self, name: str, pretrained: bool = False, **options: Any):
        net = torchvision_models.get_model(name, weights="DEFAULT" if pretrained else None, **options)
        kind = type(net).__name__
        if kind not in _TRUNKS:
            raise ValueError(
                f"torchvision's {name!r} has no feature map that can be cut off: use a network of timm, by its name there, "
                f"or one of torchvision's {', '.join(sorted(_TRUNKS))}"
            )
        if kind == "DenseNet":  # a function in torchvision's forward, so it has no child of its own
            net.relu = nn.ReLU(inplace=True)
        children: OrderedDict[str, nn.Module] = OrderedDict((child, getattr(net, child)) for child in _TRUNKS[kind])
        super().__init__(children)
        self.grad_checkpointing = False
        self.pretrained_cfg = {
            "architecture": PREFIX + name,
            "input_size": (3, 224, 224),
            "interpolation": "bilinear",
            "crop_pct": 0.875,
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "classifier": _CLASSIFIERS.get(kind, ""),
        }

    def _steps(self) -> "OrderedDict[str, nn.Module]":
        """Children, with containers opened one level: what is counted as a layer and recomputed as one."""
        steps: OrderedDict[str, nn.Module] = OrderedDict()
        for name, child in self.named_children():
            if isinstance(child, nn.Sequential):
                steps.update((f"{name}.{inner}", module) for inner, module in child.named_children())
            else:
                steps[name] = child
        return steps

    def _segments(self) -> list[nn.Sequential]:
        """About √n segments of about √n steps: the least memory, if each keeps its input and is computed again.

        None begins with a step that works in place, which would overwrite the input that was kept.
        """
        steps = list(self._steps().values())
        segments: list[list[nn.Module]] = [[]]
        for step in steps:
            if len(segments[-1]) >= math.isqrt(len(steps)) and not getattr(step, "inplace", False):
                segments.append([])
            segments[-1].append(step)
        return [nn.Sequential(*segment) for segment in segments]

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, C, h, w)."""
        if not (self.grad_checkpointing and self.training):
            return super().forward(x)
        for segment in self._segments():
            x = checkpoint(segment, x, use_reentrant=False)
        return x

    forward = forward_features

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """From a parameter's name to the number of its layer."""
        names = [name for name, _ in (self.named_children() if coarse else self._steps().items())]

        def layer(parameter: str) -> float:
            for number, name in enumerate(names):
                if parameter.startswith(name + "."):
                    return float(number)
            return math.inf

        return layer
