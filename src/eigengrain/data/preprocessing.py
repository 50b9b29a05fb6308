"""The preprocessing of images as a config dataclass. It imports no torch, so that the command line can use it for help."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.names import INTERPOLATIONS, TRANSFORMS

Kind = Literal["paper", "scripts", "imagenet", "timm", "none"]
Interpolation = Literal["bilinear", "bicubic", "nearest", "lanczos"]

#: neutral value of each option that only some kinds use, and these kinds
_KINDS_WITH: dict[str, tuple[object, tuple[str, ...]]] = {
    "resize": (None, ("paper", "scripts", "imagenet")),
    "keep_aspect": (True, ("scripts", "imagenet")),
    "scale": (None, ("timm", "imagenet")),
    "ratio": (None, ("timm", "imagenet")),
    "auto_augment": (None, ("timm",)),
    "reprob": (0.0, ("timm",)),
    "color_jitter": (None, ("timm",)),
    "crop_pct": (None, ("timm",)),
}


@dataclass(frozen=True)
class Transforms:
    """Preprocessing of images: resizing, cropping, flipping.

    ============ ============================================= ============================= ===========
    kind         resized to                                    crop in training              flipped
    ============ ============================================= ============================= ===========
    ``paper``    512 × 512, whatever its proportions           centre 448                    in training
    ``scripts``  short side 448 (Birds), or 448 × 448 (Cars)   centre 448                    in training
    ``imagenet`` short side 256 for 224                        random 224                    in training
    ``timm``     as ``timm.data.create_transform`` does        random size and position      in training
    ``none``     not resized                                   not cropped                   in training
    ============ ============================================= ============================= ===========

    Test images are cropped at the centre. The sizes above are for the default ``img_size`` of the kind and scale with it.

    With ``keep_aspect=False``, ``imagenet`` resizes the image to a square, such as 512 × 512 for crops of 448. With
    ``scale``, its training crops have a random area and aspect ratio: they are drawn from the resized image as by
    torchvision's ``RandomResizedCrop`` and resized to ``img_size``.

    Args:
        kind: how images are resized and cropped: as in the paper, in its scripts, for ImageNet, in timm, or not at all.
        img_size: side of the square that the network receives.
        resize: side before the crop; default 8/7 of img_size, or img_size for scripts.
        flip: whether training images are flipped horizontally with probability 0.5.
        keep_aspect: for scripts and imagenet: False resizes to a square (scripts for Cars).
        interpolation: interpolation of the resizing.
        auto_augment: for timm: augmentation policy such as rand-m9-mstd0.5.
        reprob: for timm: probability of random erasing.
        color_jitter: for timm: strength of the colour jitter; default none.
        scale: for timm and imagenet: minimum and maximum area of a training crop as a fraction of the image.
        ratio: minimum and maximum ratio of width to height of a training crop with scale; default 3/4 and 4/3.
        crop_pct: for timm: side of the test crop as a fraction of the resized side; default 0.875.

    Raises:
        ArgumentError: for a value out of range, or an option that the kind does not use.

    Example:
        >>> Transforms("paper").resized, Transforms("imagenet", img_size=224).resized
        (512, 256)
    """

    kind: Kind = "paper"
    img_size: int = 448
    resize: int | None = None
    flip: bool = True
    keep_aspect: bool = True
    interpolation: Interpolation = "bilinear"
    auto_augment: str | None = None
    reprob: float = 0.0
    color_jitter: float | None = None
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    crop_pct: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in TRANSFORMS:
            raise UnknownName("kind of transforms", self.kind, TRANSFORMS)
        if self.img_size < 1:
            raise ArgumentError("img_size", "must be at least 1 pixel", self.img_size)
        for name, (neutral, kinds) in _KINDS_WITH.items():
            if getattr(self, name) != neutral and self.kind not in kinds:
                raise ArgumentError(name, f"is only used by {{kind}} {' and '.join(kinds)}, not by {self.kind}")
        if self.resize is not None and self.resize < self.img_size:
            raise ArgumentError("resize", f"must be at least {{img_size}} {self.img_size}", self.resize)
        if self.kind == "imagenet" and self.ratio is not None and self.scale is None:
            raise ArgumentError("ratio", "is only used together with {scale}", remedy="set {scale}, for example (0.3, 1.0)")
        if not 0 <= self.reprob <= 1:
            raise ArgumentError("reprob", "must be a probability from 0 to 1", self.reprob)
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ArgumentError("crop_pct", "must be greater than 0 and at most 1", self.crop_pct)
        for name, pair in (("scale", self.scale), ("ratio", self.ratio)):
            if pair is not None and not (len(pair) == 2 and 0 < pair[0] <= pair[1]):
                raise ArgumentError(name, "must be a minimum and a maximum, both greater than 0", pair)

    @classmethod
    def of_scripts(cls, dataset: str, img_size: int = 448) -> "Transforms":
        """The preprocessing of the paper's released scripts, which differs from the paper for Birds and Cars."""
        if dataset in ("cub", "cars"):
            return cls("scripts", img_size, keep_aspect=dataset == "cub")
        return cls("paper", img_size)

    @property
    def warped(self) -> bool:
        """Whether images are resized to a square, whatever their proportions."""
        return self.kind == "paper" or not self.keep_aspect

    @property
    def resized(self) -> int:
        """Side of the image before the crop."""
        if self.resize is not None:
            return self.resize
        return self.img_size if self.kind == "scripts" else round(self.img_size * 8 / 7)

    def at_size(self, img_size: int) -> "Transforms":
        """The same transforms for another size; an explicit ``resize`` scales with it."""
        return replace(self, img_size=img_size, resize=self.resize and round(self.resize * img_size / self.img_size))

    def to_pretrained_cfg(self, image_size: tuple[int, int] | None = None) -> dict[str, Any]:
        """The test-time preprocessing in the terms of timm: input size, crop and interpolation, without mean and std.

        Args:
            image_size: (width, height) of the images, which kind ``none`` does not resize.

        Example:
            >>> Transforms("paper").to_pretrained_cfg()
            {'crop_pct': 0.875, 'crop_mode': 'squash', 'interpolation': 'bilinear', 'input_size': (3, 448, 448)}
        """
        mode = {"crop_mode": "squash" if self.warped else "center", "interpolation": self.interpolation}
        if self.kind == "none":
            return {"crop_pct": 1.0, **mode, **({"input_size": (3, *image_size[::-1])} if image_size else {})}
        side = self.img_size
        crop_pct = self.crop_pct or 0.875 if self.kind == "timm" else side / self.resized
        if self.kind != "timm" and math.floor(side / crop_pct) < self.resized:
            crop_pct = math.nextafter(crop_pct, 0)  # timm rounds side / crop_pct down; this makes it reach ``resized``
        return {"crop_pct": crop_pct, **mode, "input_size": (3, side, side)}

    @classmethod
    def from_pretrained_cfg(cls, cfg: Mapping[str, Any]) -> "Transforms | None":
        """The test-time preprocessing of a timm ``pretrained_cfg``; missing entries have timm's defaults.

        It is None without an equivalent here, such as for images that are not square or the crop mode ``border``, which
        ``timm.data.create_transform`` covers.

        Example:
            >>> Transforms.from_pretrained_cfg({"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic"})
            Transforms(kind='timm', img_size=224, ..., interpolation='bicubic', ..., crop_pct=0.9)
        """
        from eigengrain import _torchvision  # noqa: F401  isort: skip
        from timm.data import resolve_data_config

        values = resolve_data_config({}, pretrained_cfg=dict(cfg))
        (_, height, width), crop_pct, interpolation = values["input_size"], values["crop_pct"], values["interpolation"]
        if height != width or not 0 < crop_pct <= 1 or interpolation not in INTERPOLATIONS:
            return None
        if values["crop_mode"] == "squash":
            return cls("paper", width, resize=math.floor(width / crop_pct), interpolation=interpolation)
        if values["crop_mode"] == "center":
            return cls("timm", width, crop_pct=crop_pct, interpolation=interpolation)
        return None
