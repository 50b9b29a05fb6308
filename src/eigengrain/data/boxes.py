"""The position of the object in the input of the network: boxes and masks under the evaluation transform."""

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from torchvision.transforms import InterpolationMode

from eigengrain.data.image_set import Box, ImageSet
from eigengrain.data.transforms import Pipeline
from eigengrain.errors import ArgumentError


def box_mask(box: Box, original_size: tuple[int, int], pipeline: object) -> Tensor:
    r"""Mask of the pixels of the transformed image whose centre is in a box of the original.

    .. math:: M_{yx} = [\,l\,\tfrac{w'}{w} - x_0 \le x + \tfrac12 < r\,\tfrac{w'}{w} - x_0\,]
              \cdot [\,t\,\tfrac{h'}{h} - y_0 \le y + \tfrac12 < b\,\tfrac{h'}{h} - y_0\,]

    with the image resized from (w, h) to (w', h') and cropped at :math:`(x_0, y_0)`.

    Args:
        box: (left, top, right, bottom) in pixels of the original.
        original_size: (width, height) of the original.
        pipeline: the evaluation transform, from ``build_transform(..., train=False)``.

    Returns:
        boolean (H, W); all False if the box is outside the crop.

    Raises:
        ArgumentError: for a random transform, a box whose sides are swapped, or an empty image.

    Example:
        >>> from eigengrain.data import Transforms, build_transform
        >>> transform = build_transform(Transforms("paper", 4, resize=4), False, (0.5,) * 3, (0.5,) * 3)
        >>> box_mask((0, 0, 4, 4), (8, 8), transform).int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    pipeline = _check_evaluation(pipeline)
    width, height = original_size
    left, top, right, bottom = box
    if min(original_size) < 1 or right < left or bottom < top:
        raise ArgumentError("box", f"must be (left, top, right, bottom) in an image of size {original_size}", box)
    across = _inside(left / width, right / width, width, height, pipeline)
    down = _inside(top / height, bottom / height, height, width, pipeline, vertical=True)
    return down[:, None] & across[None, :]


def mask_through(mask: Tensor | NDArray[np.bool_], pipeline: object) -> Tensor:
    """Transform a boolean mask (h, w) of the original to a mask (H, W) of the transformed image, by nearest interpolation.

    Raises:
        ArgumentError: for a mask of another shape or type, or a random transform.
    """
    nearest = copy.copy(_check_evaluation(pipeline))
    nearest.interpolation = InterpolationMode.NEAREST
    pixels = np.asarray(mask)
    if pixels.ndim != 2 or pixels.dtype != np.bool_:
        raise ArgumentError("mask", f"must be boolean (height, width), not {pixels.dtype} {pixels.shape}")
    return torch.from_numpy(np.asarray(nearest.prepare(Image.fromarray(pixels.astype(np.uint8)))) > 0)


def object_mask(dataset: ImageSet, index: int, original_size: tuple[int, int]) -> Tensor | None:
    """Mask (H, W) of the object in the transformed image of a sample: from its mask, else from its box, else None."""
    mask = dataset.masks(index)
    if mask is not None:
        return mask_through(mask, dataset.transform)
    box = dataset.boxes(index)
    return None if box is None else box_mask(box, original_size, dataset.transform)


def part_mask(dataset: ImageSet, index: int) -> Tensor | None:
    """Mask (H, W) of the parts that distinguish the classes, in the transformed image of a sample; None without masks."""
    parts = dataset.parts(index)
    return None if parts is None else mask_through(parts, dataset.transform)


def _check_evaluation(pipeline: object) -> Pipeline:
    if not isinstance(pipeline, Pipeline) or pipeline.random_crop or pipeline.flip:
        name = "a training transform" if isinstance(pipeline, Pipeline) else type(pipeline).__name__
        raise ArgumentError("pipeline", f"must be a transform of build_transform(..., train=False), not {name}")
    return pipeline


def _inside(start: float, stop: float, side: int, other: int, pipeline: Pipeline, vertical: bool = False) -> Tensor:
    """Which pixel centres along one side of the transformed image are between two fractions of the original's side."""
    resized = side
    if pipeline.size is not None:
        if len(pipeline.size) == 2:  # height, width
            resized = pipeline.size[0 if vertical else 1]
        else:  # torchvision rounds the long side down
            resized = pipeline.size[0] if side <= other else int(pipeline.size[0] * side / other)
    length = resized if pipeline.crop is None else pipeline.crop
    # no side is shorter than the crop, see Transforms.resize
    centres = torch.arange(length, dtype=torch.float64) + round((resized - length) / 2) + 0.5
    return (centres >= start * resized) & (centres < stop * resized)
