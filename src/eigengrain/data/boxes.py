"""Where the object is in the square that the network sees: boxes and masks carried through the evaluation transform."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from eigengrain.data.image_set import Box, ImageSet
from eigengrain.data.transforms import Pipeline


def box_mask(box: Box, original_size: tuple[int, int], pipeline: object) -> Tensor:
    r"""Which pixels of the transformed image have their centre in a box of the original.

    .. math:: M_{yx} = [\,l\,\tfrac{w'}{w} - x_0 \le x + \tfrac12 < r\,\tfrac{w'}{w} - x_0\,]
              \cdot [\,t\,\tfrac{h'}{h} - y_0 \le y + \tfrac12 < b\,\tfrac{h'}{h} - y_0\,]

    with the image resized from (w, h) to (w', h') and cropped at :math:`(x_0, y_0)`.

    Args:
        box: (left, top, right, bottom) in pixels of the original, as :meth:`ImageSet.boxes` gives it.
        original_size: (width, height) of the original, as ``image.size`` gives it.
        pipeline: the evaluation transform, of ``build_transform(..., train=False)``.

    Returns:
        boolean (H, W); nothing is True where the crop leaves the box outside.

    Raises:
        ValueError: for a transform that draws its crop or mirrors, a box whose sides are swapped, or an empty image.

    Example:
        >>> from eigengrain.data import Transforms, build_transform
        >>> transform = build_transform(Transforms("paper", 4, resize=4), False, (0.5,) * 3, (0.5,) * 3)
        >>> box_mask((0, 0, 4, 4), (8, 8), transform).int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    pipeline = _evaluation(pipeline)
    width, height = original_size
    left, top, right, bottom = box
    if min(original_size) < 1 or right < left or bottom < top:
        raise ValueError(
            f"a box is (left, top, right, bottom) in an image of (width, height), got {box} in {original_size}"
        )
    across = _inside(left / width, right / width, *_resized_and_cut(width, height, pipeline))
    down = _inside(top / height, bottom / height, *_resized_and_cut(height, width, pipeline, vertical=True))
    return down[:, None] & across[None, :]


def mask_through(mask: Tensor | NDArray[np.bool_], pipeline: object) -> Tensor:
    """A mask of the original's pixels (h, w) as a mask (H, W) of the transformed image's, by nearest interpolation.

    Raises:
        ValueError: for a mask that is not boolean (h, w), or a transform that draws its crop or mirrors.

    Example:
        >>> from eigengrain.data import Transforms, build_transform
        >>> transform = build_transform(Transforms("paper", 2, resize=2), False, (0.5,) * 3, (0.5,) * 3)
        >>> mask_through(torch.eye(4) > 0, transform).int().tolist()
        [[1, 0], [0, 1]]
    """
    pipeline = _evaluation(pipeline)
    pixels = np.asarray(mask)
    if pixels.ndim != 2 or pixels.dtype != np.bool_:
        raise ValueError(f"a mask must be boolean (height, width), got {pixels.dtype} {pixels.shape}")
    image = Image.fromarray(pixels.astype(np.uint8))
    if pipeline.size is not None:
        image = F.resize(image, pipeline.size, InterpolationMode.NEAREST)
    if pipeline.crop is not None:
        image = F.center_crop(image, [pipeline.crop, pipeline.crop])
    return torch.from_numpy(np.asarray(image) > 0)


def object_mask(dataset: ImageSet, index: int, original_size: tuple[int, int]) -> Tensor | None:
    """The object of a sample in its transformed image (H, W): its mask where the data set has one, else its box, else None.

    Args:
        dataset: whose transform is an evaluation transform.
        index: of the sample.
        original_size: (width, height) of its image, which the caller has opened anyway.
    """
    mask = dataset.masks(index)
    if mask is not None:
        return mask_through(mask, dataset.transform)
    box = dataset.boxes(index)
    return None if box is None else box_mask(box, original_size, dataset.transform)


def part_mask(dataset: ImageSet, index: int) -> Tensor | None:
    """The parts that tell the class of a sample in its transformed image (H, W); None where the data set does not say."""
    parts = getattr(dataset, "parts", None)
    return None if parts is None else mask_through(parts(index), dataset.transform)


def _evaluation(pipeline: object) -> Pipeline:
    if not isinstance(pipeline, Pipeline) or pipeline.random_crop or pipeline.flip:
        raise ValueError(
            "regions are carried through an evaluation transform, build_transform(..., train=False), "
            f"got {'one for training' if isinstance(pipeline, Pipeline) else type(pipeline).__name__}"
        )
    return pipeline


def _resized_and_cut(side: int, other: int, pipeline: Pipeline, vertical: bool = False) -> tuple[int, int, int]:
    """One side of the image after resizing, where the crop begins on it, and how long the crop is."""
    resized = side
    if pipeline.size is not None:
        if len(pipeline.size) == 2:  # height, width
            resized = pipeline.size[0 if vertical else 1]
        else:  # torchvision cuts the long side down to whole pixels
            resized = pipeline.size[0] if side <= other else int(pipeline.size[0] * side / other)
    if pipeline.crop is None:
        return resized, 0, resized
    # no side is shorter than the crop: see Transforms.resize
    return resized, round((resized - pipeline.crop) / 2), pipeline.crop


def _inside(start: float, stop: float, resized: int, cut: int, length: int) -> Tensor:
    """Which of ``length`` pixel centres lie in the part from ``start`` to ``stop`` of a side, both as shares of it."""
    centres = torch.arange(length, dtype=torch.float64) + cut + 0.5
    return (centres >= start * resized) & (centres < stop * resized)
