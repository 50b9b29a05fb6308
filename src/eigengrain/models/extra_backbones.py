"""Backbones that timm does not have: torchvision's networks without their classifiers, and a small one of our own."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from eigengrain import _torchvision  # noqa: F401  isort: skip
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision import models as torchvision_models

from eigengrain.errors import ArgumentError

PREFIX = "tv:"

# class of the network -> its children up to the feature map, in the order of their calls
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

# class of the network -> its classifier, if only the mean of the map comes before it
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

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bilinear"}


class TorchvisionTrunk(nn.Sequential):
    """The part of a torchvision network that makes its feature map, with torchvision's own parameter names."""

    def __init__(self, name: str, pretrained: bool = False, **options: Any):
        net = torchvision_models.get_model(name, weights="DEFAULT" if pretrained else None, **options)
        kind = type(net).__name__
        if kind not in _TRUNKS:
            remedy = f"use a network of timm, or one of torchvision's {', '.join(sorted(_TRUNKS))}"
            raise ArgumentError("backbone", "has no feature map that can be cut off", PREFIX + name, remedy)
        if kind == "DenseNet":  # a function in torchvision's forward, not a child
            net.relu = nn.ReLU(inplace=True)
        children: OrderedDict[str, nn.Module] = OrderedDict((child, getattr(net, child)) for child in _TRUNKS[kind])
        super().__init__(children)
        self.grad_checkpointing = False
        self.pretrained_cfg = {
            **_IMAGENET,
            "architecture": PREFIX + name,
            "input_size": (3, 224, 224),
            "crop_pct": 0.875,
            "classifier": _CLASSIFIERS.get(kind, ""),
            "first_conv": next(name for name, module in self.named_modules() if isinstance(module, nn.Conv2d)),
        }

    def _steps(self) -> dict[str, nn.Module]:
        """Children, and the children of containers: each counts as one layer and is recomputed as one."""
        steps: dict[str, nn.Module] = {}
        for name, child in self.named_children():
            if isinstance(child, nn.Sequential):
                steps.update((f"{name}.{inner}", module) for inner, module in child.named_children())
            else:
                steps[name] = child
        return steps

    def _segments(self) -> list[nn.Sequential]:
        """About √n segments of about √n steps, which needs the least memory if each keeps its input and is recomputed.

        A segment does not begin with an in-place step, which would overwrite the kept input.
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
        names = [name + "." for name, _ in (self.named_children() if coarse else self._steps().items())]
        return lambda parameter: next((float(n) for n, name in enumerate(names) if parameter.startswith(name)), math.inf)


#: three halvings, two of them in residual blocks of two 3 × 3 convolutions
_PLUMAGE_NET = ByoModelCfg(
    tuple(ByoBlockCfg(type="basic", d=1, c=channels, s=2, gs=0) for channels in (32, 64)),
    stem_type="3x3",
    stem_chs=16,
    stem_pool="",
)

# timm looks for this name when a model is registered
default_cfgs = generate_default_cfgs(
    {
        "plumage_net": {
            **_IMAGENET,
            "num_classes": 10,
            "input_size": (3, 96, 96),
            "pool_size": (12, 12),
            "crop_pct": 1.0,
            "first_conv": "stem.conv",
            "classifier": "head.fc",
        }
    }
)


@register_model
def plumage_net(pretrained: bool = False, zero_init_last: bool = False, **options: Any) -> nn.Module:
    """Small network for the demo data: images of 96 pixels give a map of 64 × 12 × 12, so N = 144 positions for d = 64.

    It has 73,000 parameters and is registered with timm, so that its name works wherever timm's names do.

    Args:
        pretrained: must be False; there are no pretrained weights.
        zero_init_last: initialise the residual branches to zero. The rest of so shallow a network sees single pixels, and
            training then begins with epochs at chance.
        options: arguments of timm's ByobNet.
    """
    net: nn.Module = build_model_with_cfg(
        ByobNet,
        "plumage_net",
        pretrained,
        model_cfg=_PLUMAGE_NET,
        feature_cfg={"flatten_sequential": True},
        zero_init_last=zero_init_last,
        **options,
    )
    return net
