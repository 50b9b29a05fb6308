"""How images are prepared for a network. No torch here: the command line's help is made from this."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["paper", "scripts", "imagenet", "timm", "none"]
Interpolation = Literal["bilinear", "bicubic", "nearest", "lanczos"]

#: options that only timm's augmentation has, with their neutral values
_TIMM_ONLY = {"auto_augment": None, "reprob": 0.0, "color_jitter": None, "scale": None, "ratio": None, "crop_pct": None}


@dataclass(frozen=True)
class Transforms:
    """From a photograph to the square that the network sees.

    ============ ============================================= ======================== ==========
    kind         resized to                                    cropped in training      flipped
    ============ ============================================= ======================== ==========
    ``paper``    512 × 512, whatever its proportions           centre 448               in training
    ``scripts``  short side 448 (Birds), or 448 × 448 (Cars)   centre 448               in training
    ``imagenet`` short side 256 for 224                        random 224               in training
    ``timm``     as ``timm.data.create_transform`` does        random size and place    in training
    ``none``     not at all                                    not at all               in training
    ============ ============================================= ======================== ==========

    Tests always see the centre. The sizes are those of the default ``img_size`` of the kind and scale with it.

    Args:
        kind: how images are resized and cropped: as in the paper, in its scripts, for ImageNet, in timm, or not at all.
        img_size: side of the square that the network sees.
        resize: side before the crop; 8/7 of img_size by default, img_size itself for scripts.
        flip: whether half of the training images are mirrored.
        keep_aspect: for scripts: True as for Birds, False as for Cars.
        interpolation: of the resizing.
        auto_augment: for timm: such as rand-m9-mstd0.5.
        reprob: for timm: probability that a rectangle is erased.
        color_jitter: for timm: strength of the change of colours; none by default.
        scale: for timm: least and largest share of the image's area in a crop.
        ratio: for timm: least and largest proportion of width to height of a crop.
        crop_pct: for timm: side of the test crop in proportion to the resized image; 0.875 by default.

    Raises:
        ValueError: for a size or probability out of range, or an option that the kind would not use.

    Example:
        >>> Transforms("paper").resized, Transforms("imagenet", img_size=224).resized
        (512, 256)
        >>> Transforms.of_scripts("cars")
        Transforms(kind='scripts', img_size=448, ..., keep_aspect=False, ...)
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
        kinds = Kind.__args__  # type: ignore[attr-defined]
        if self.kind not in kinds:
            raise ValueError(f"unknown kind of transforms {self.kind!r}: choose from {', '.join(kinds)}")
        if self.img_size < 1:
            raise ValueError(f"img_size must be at least 1 pixel, got {self.img_size}")
        if self.resize is not None and self.kind in ("timm", "none"):
            raise ValueError(f"resize is not used by the {self.kind} transforms: leave it out (timm has crop_pct)")
        if self.resize is not None and self.resize < self.img_size:
            raise ValueError(f"resize must be at least img_size {self.img_size}, which is cut from it; got {self.resize}")
        if not self.keep_aspect and self.kind != "scripts":
            raise ValueError(f"keep_aspect=False is for the scripts transforms, not for {self.kind}: leave it out")
        if self.kind != "timm":
            unused = [name for name, neutral in _TIMM_ONLY.items() if getattr(self, name) != neutral]
            if unused:
                raise ValueError(f"{', '.join(unused)}: for kind timm only, and this is {self.kind}; leave them out")
        if not 0 <= self.reprob <= 1:
            raise ValueError(f"reprob is a probability from 0 to 1, got {self.reprob}")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be above 0 and at most 1, got {self.crop_pct}")
        for name in ("scale", "ratio"):
            pair = getattr(self, name)
            if pair is not None and not (len(pair) == 2 and 0 < pair[0] <= pair[1]):
                raise ValueError(f"{name} must be a least and a largest value above 0, got {pair}")

    @classmethod
    def of_scripts(cls, dataset: str, img_size: int = 448) -> "Transforms":
        """What the paper's released scripts do for a data set: it differs from the text for Birds and Cars."""
        if dataset in ("cub", "cars"):
            return cls("scripts", img_size, keep_aspect=dataset == "cub")
        return cls("paper", img_size)

    @property
    def resized(self) -> int:
        """Side before the crop."""
        if self.resize is not None:
            return self.resize
        return self.img_size if self.kind == "scripts" else round(self.img_size * 8 / 7)
