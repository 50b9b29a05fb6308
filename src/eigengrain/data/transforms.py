"""From an image to a normalised tensor, as a :class:`~eigengrain.data.transforms_config.Transforms` says."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from timm.data import create_transform
from torchvision.transforms import InterpolationMode, RandomCrop
from torchvision.transforms import functional as F

from eigengrain.data.transforms_config import Transforms

#: how torchvision draws whether to mirror
_HALF = 0.5


def build_transform(
    config: Transforms, train: bool, mean: Sequence[float], std: Sequence[float]
) -> Callable[[Image.Image], Tensor]:
    """The transform of a config, for training or for tests.

    Args:
        config: what to do.
        train: whether to augment.
        mean: of the red, green and blue that the model was trained with, from 0 to 1.
        std: the same for the standard deviation.

    Returns:
        a function from an RGB image to a (3, H, W) float32 tensor, normalised by mean and std.

    Raises:
        ValueError: if mean or std are not three numbers, or timm does not know the augmentation.

    Example:
        >>> transform = build_transform(Transforms("paper"), train=False, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> image = transform(Image.new("RGB", (600, 400), "white"))
        >>> tuple(image.shape), image.min().item()
        ((3, 448, 448), 1.0)
    """
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"mean and std must have 3 numbers each, std above 0; got {tuple(mean)} and {tuple(std)}")
    if config.kind == "timm" and train:
        return _timm_training(config, mean, std)
    return Pipeline(config, train, mean, std)


class Pipeline:
    """Resize, crop, mirror, normalise: the parts that are always the same and the choices that are drawn stand apart.

    So the images can be kept as :meth:`prepare` leaves them and be augmented later, elsewhere, in the same way.
    """

    def __init__(self, config: Transforms, train: bool, mean: Sequence[float], std: Sequence[float]):
        self.interpolation = InterpolationMode(config.interpolation)
        self.crop: int | None = None if config.kind == "none" else config.img_size
        self.random_crop = train and config.kind == "imagenet"
        self.flip = train and config.flip
        # one number is the short side, two are height and width
        self.size: list[int] | None
        if config.kind == "none":
            self.size = None
        elif config.kind == "timm":
            self.size = [math.floor(config.img_size / (config.crop_pct or 0.875))]
        else:
            whole = config.kind == "paper" or not config.keep_aspect
            self.size = [config.resized] * (2 if whole else 1)
        self.mean = torch.tensor(mean, dtype=torch.float32).view(3, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(3, 1, 1)

    @property
    def preparation(self) -> tuple[Any, ...]:
        """What :meth:`prepare` depends on: pipelines that agree in it prepare alike."""
        crop = None if self.random_crop else self.crop
        return (*(self.size or ()), crop, self.interpolation)

    def prepare(self, image: Image.Image) -> Image.Image:
        """What every epoch does alike: the resizing, and the crop unless its place is drawn."""
        if self.size is not None:
            image = F.resize(image, self.size, self.interpolation)
        if self.crop is not None and not self.random_crop:
            image = F.center_crop(image, [self.crop, self.crop])
        return image

    def choose(self, image: Image.Image | Tensor) -> tuple[int, int, bool]:
        """Top and left of the crop and whether to mirror, drawn from torch's generator as torchvision draws them."""
        top = left = 0
        if self.random_crop and self.crop is not None:
            top, left, _, _ = RandomCrop.get_params(image, (self.crop, self.crop))
        return top, left, self.flip and bool(torch.rand(1) < _HALF)

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 (…, 3, H, W) to float32: the same numbers as torchvision's, without its copy in between."""
        floats = pixels.to(torch.float32)
        return floats.div_(255).sub_(self.mean.to(pixels.device)).div_(self.std.to(pixels.device))

    def __call__(self, image: Image.Image) -> Tensor:
        image = self.prepare(image)
        top, left, mirrored = self.choose(image)
        if self.random_crop and self.crop is not None:
            image = F.crop(image, top, left, self.crop, self.crop)
        if mirrored:
            image = F.hflip(image)
        return self.normalise(pixels_of(image))


def pixels_of(image: Image.Image) -> Tensor:
    """An RGB image as uint8 (3, H, W).

    Example:
        >>> pixels_of(Image.new("RGB", (2, 1), "red")).tolist()
        [[[255, 255]], [[0, 0]], [[0, 0]]]
    """
    # channels are parted while each pixel is a byte: later, as floats, it takes longer
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def _timm_training(config: Transforms, mean: Sequence[float], std: Sequence[float]) -> Callable[[Image.Image], Tensor]:
    try:
        transform: Callable[[Image.Image], Tensor] = create_transform(
            input_size=config.img_size,
            is_training=True,
            scale=config.scale,
            ratio=config.ratio,
            hflip=_HALF if config.flip else 0.0,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment,
            interpolation=config.interpolation,
            mean=tuple(mean),
            std=tuple(std),
            re_prob=config.reprob,
            re_mode="pixel",
        )
    except (AssertionError, KeyError, ValueError) as error:
        said = f"auto_augment {config.auto_augment!r}" if config.auto_augment else "these options"
        raise ValueError(
            f"timm does not know {said} ({error}): such as rand-m9-mstd0.5-inc1, original or augmix-m5"
        ) from error
    return transform
