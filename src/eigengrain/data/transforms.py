"""Transforms from an image to a normalised tensor, built from a :class:`~eigengrain.data.Transforms` config."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from timm.data import create_transform
from torchvision.transforms import InterpolationMode, RandomCrop, RandomResizedCrop
from torchvision.transforms import functional as F

from eigengrain.data.preprocessing import Transforms
from eigengrain.errors import ArgumentError

#: aspect ratios of a crop of random size, the defaults of torchvision and timm
_RATIO = (3 / 4, 4 / 3)

#: top, left, height and width in pixels
Crop = tuple[int, int, int, int]


def build_transform(
    config: Transforms, train: bool, mean: Sequence[float], std: Sequence[float]
) -> Callable[[Image.Image], Tensor]:
    """Build the transform of a config: a function from an RGB image to a normalised (3, H, W) float32 tensor.

    Args:
        config: the preprocessing.
        train: whether to augment.
        mean, std: mean and standard deviation of red, green and blue in the training data of the backbone, from 0 to 1.

    Raises:
        ArgumentError: if mean or std are not three numbers, or timm does not have the augmentation.

    Example:
        >>> transform = build_transform(Transforms("paper"), train=False, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> image = transform(Image.new("RGB", (600, 400), "white"))
        >>> tuple(image.shape), image.min().item()
        ((3, 448, 448), 1.0)
    """
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != 3 or (name == "std" and min(values) <= 0):
            raise ArgumentError(name, f"must be three numbers{', all positive' if name == 'std' else ''}", tuple(values))
    if config.kind != "timm" or not train:
        return Pipeline(config, train, mean, std)
    try:
        return create_transform(
            input_size=config.img_size,
            is_training=True,
            scale=config.scale,
            ratio=config.ratio,
            hflip=0.5 if config.flip else 0.0,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment,
            interpolation=config.interpolation,
            mean=tuple(mean),
            std=tuple(std),
            re_prob=config.reprob,
            re_mode="pixel",
        )
    except (AssertionError, KeyError, ValueError) as error:
        problem = f"is not accepted by timm ({error})"
        remedy = "such as rand-m9-mstd0.5-inc1, original or augmix-m5"
        raise ArgumentError("auto_augment", problem, config.auto_augment, remedy) from error


class Pipeline:
    """Resize, crop, flip, normalise; the steps that are the same in every epoch are separate from the random ones.

    So images can be stored after :meth:`prepare` and augmented later, on another device, in the same way.
    """

    def __init__(self, config: Transforms, train: bool, mean: Sequence[float], std: Sequence[float]):
        self.interpolation = InterpolationMode(config.interpolation)
        self.crop: int | None = None if config.kind == "none" else config.img_size
        self.random_crop = train and config.kind == "imagenet"
        #: ranges of the area and the aspect ratio of random crops; None for crops that are not resized
        self.random_size = (config.scale, config.ratio or _RATIO) if self.random_crop and config.scale is not None else None
        self.flip = train and config.flip
        # one number is the short side, two are height and width
        side = math.floor(config.img_size / (config.crop_pct or 0.875)) if config.kind == "timm" else config.resized
        self.size: list[int] | None = None if config.kind == "none" else [side] * (2 if config.warped else 1)
        self.mean = torch.tensor(mean, dtype=torch.float32).view(3, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(3, 1, 1)

    @property
    def preparation(self) -> tuple[Any, ...]:
        """The settings of :meth:`prepare`: pipelines with equal settings prepare images in the same way."""
        crop = None if self.random_crop else self.crop
        return (*(self.size or ()), crop, self.interpolation)

    def prepare(self, image: Image.Image) -> Image.Image:
        """Apply the steps that are the same in every epoch: the resizing, and the crop unless it is random."""
        if self.size is not None:
            image = F.resize(image, self.size, self.interpolation)
        if self.crop is not None and not self.random_crop:
            image = F.center_crop(image, [self.crop, self.crop])
        return image

    def choose(self, image: Image.Image | Tensor) -> tuple[Crop | None, bool]:
        """Draw the crop of a prepared image, None if it is not random, and whether to flip; as torchvision draws them."""
        crop: Crop | None = None
        if self.random_size is not None:
            scale, ratio = self.random_size
            crop = RandomResizedCrop.get_params(image, list(scale), list(ratio))  # type: ignore[arg-type]
        elif self.random_crop and self.crop is not None:
            crop = RandomCrop.get_params(image, (self.crop, self.crop))
        return crop, self.choose_flip()

    def choose_flip(self) -> bool:
        """Draw whether to flip: all that is random without random crops."""
        return self.flip and bool(torch.rand(1) < 0.5)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert uint8 (…, 3, H, W) to float32: the same numbers as torchvision, without its intermediate copy."""
        floats = pixels.to(torch.float32)
        return floats.div_(255).sub_(self.mean.to(pixels.device)).div_(self.std.to(pixels.device))

    def __call__(self, image: Image.Image) -> Tensor:
        image = self.prepare(image)
        crop, flip = self.choose(image)
        if crop is not None and self.crop is not None:
            image = F.resized_crop(image, *crop, [self.crop, self.crop], self.interpolation)  # type: ignore[arg-type]
        if flip:
            image = F.hflip(image)
        return self.normalise(to_pixels(image))


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an RGB image to uint8 (3, H, W)."""
    # transposing bytes is faster than transposing floats later
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())
