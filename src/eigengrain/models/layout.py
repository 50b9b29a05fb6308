"""Whatever layout a backbone's features have, the head sees (B, C, H, W)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn


@dataclass(frozen=True)
class FeatureLayout:
    """How a backbone's ``forward_features`` lays out what it returns.

    Args:
        kind: ``NCHW``, ``NHWC``, or ``tokens`` for (B, prefix + positions, C).
        prefix_tokens: class and register tokens in front of the positions; they are dropped.
    """

    kind: Literal["NCHW", "NHWC", "tokens"]
    prefix_tokens: int = 0

    def to_map(self, features: Tensor, net: nn.Module, image_size: tuple[int, int]) -> Tensor:
        """Features as a map (B, C, H, W)."""
        if self.kind == "NCHW":
            return features
        if self.kind == "NHWC":
            return features.permute(0, 3, 1, 2)
        positions = features[:, self.prefix_tokens :]  # (B, N, C)
        grid = token_grid(net, positions.shape[1], image_size)
        return positions.transpose(1, 2).unflatten(2, grid)


def token_grid(net: nn.Module, tokens: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the patches: what the patch embedding says, or else the image's own proportions."""
    embedded_size = getattr(getattr(net, "patch_embed", None), "dynamic_feat_size", None)
    if embedded_size is not None:
        rows, columns = embedded_size(image_size)
        if rows * columns == tokens:
            return rows, columns
    height, width = image_size
    rows = max(round(math.sqrt(tokens * height / width)), 1)
    if rows * (tokens // rows) != tokens:
        raise ValueError(
            f"{tokens} tokens do not form a grid for an image of {height} × {width} pixels: use image sides that are "
            "multiples of the patch size"
        )
    return rows, tokens // rows


def takes_img_size(net: nn.Module) -> bool:
    """Whether a network is built for images of one size, by what it or its patch embedding says."""
    description: Any = getattr(net, "pretrained_cfg", None) or {}
    embedding = getattr(net, "patch_embed", None)
    return bool(dict(description).get("fixed_input_size")) or getattr(embedding, "img_size", None) is not None


def detect_layout(net: nn.Module, features: object, name: str) -> FeatureLayout:
    """The layout of one network, from what it declares and the shape of what it returned.

    Raises:
        ValueError: if what came is not one feature map.
    """
    shape = tuple(features.shape) if isinstance(features, Tensor) else ()
    if len(shape) == 3:
        # networks that do not count their prefix have a class token at most; some have one for each stage
        class_token = any(name.startswith("cls_token") for name, _ in net.named_parameters(recurse=False))
        prefix = int(getattr(net, "num_prefix_tokens", class_token))
        if shape[1] > prefix:
            return FeatureLayout("tokens", prefix)
    elif len(shape) == 4:
        declared = str(getattr(net, "output_fmt", ""))
        channels = getattr(net, "num_features", None)
        last = declared == "NHWC" or (not declared and shape[3] == channels and shape[1] != channels)
        return FeatureLayout("NHWC" if last else "NCHW")
    came = f"a tensor of shape {shape}" if shape else type(features).__name__
    raise ValueError(f"backbone {name!r} gives {came} before its classifier, not one feature map: choose another backbone")
