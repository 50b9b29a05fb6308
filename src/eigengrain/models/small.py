"""A small backbone for drawn birds and slow machines: registered with timm, so that its name works wherever theirs do."""

from typing import Any

from eigengrain import _torchvision  # noqa: F401  isort: skip
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from torch import nn

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
            "num_classes": 10,
            "input_size": (3, 96, 96),
            "pool_size": (12, 12),
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "first_conv": "stem.conv",
            "classifier": "head.fc",
        }
    }
)


@register_model
def plumage_net(pretrained: bool = False, zero_init_last: bool = False, **options: Any) -> nn.Module:
    """73,000 parameters: images of 96 pixels become a map of 64 × 12 × 12, so N = 144 positions for d = 64 channels.

    Args:
        pretrained: there are no weights for it, so timm refuses True.
        zero_init_last: start with residual branches that are silent; what is left of so shallow a network then sees single
            pixels, and training begins with epochs at chance.
        options: of timm's ByobNet.

    Example:
        >>> import torch
        >>> plumage_net(num_classes=0).forward_features(torch.zeros(1, 3, 96, 96)).shape
        torch.Size([1, 64, 12, 12])
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
