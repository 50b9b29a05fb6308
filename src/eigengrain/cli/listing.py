"""Which backbones and heads there are, and how large what they make is. Nothing heavy is imported before it runs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from eigengrain import output
from eigengrain.errors import UnknownName, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from eigengrain.heads import Head

#: backbones of the paper and of its comparisons, and that of the demo, listed where no pattern is given
COVERED = (
    "tv:alexnet",
    "vgg16",
    "vgg16_bn",
    "resnet18",
    "resnet50",
    "resnet101",
    "resnet152",
    "densenet169",
    "inception_v3",
    "efficientnet_b5",
    "tf_efficientnet_b5",
    "tf_efficientnet_lite0",
    "convnext_tiny",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "plumage_net",
)
#: with more matches than this, names alone are listed
MEASURED_UP_TO = 20
#: side of the images that maps are measured on
IMAGE = 224

# what the settings of the covariance head mean; settings that are not here are shown as they are
_NORMALISED = {
    "sqrt": "MPN-COV: exact square root of the covariance",
    "newton-schulz": "iSQRT-COV: Newton–Schulz square root of the covariance",
    "mpa": "square root of the covariance by a Padé approximant",
    "mtp": "square root of the covariance by a Taylor polynomial",
    "log": "DeepO2P: logarithm of the covariance",
}


@dataclass(frozen=True)
class Models:
    """Which backbones to list, and how.

    Args:
        pattern: a name, a part of one, or a pattern such as 'resnet*' in quotes; by default the backbones of the paper.
    """

    pattern: str | None = None


@dataclass(frozen=True)
class Heads:
    """Which heads to list, and how.

    Args:
        pattern: a name, a part of one, or a pattern such as '*+seb' in quotes; all heads by default.
    """

    pattern: str | None = None


@dataclass(frozen=True)
class BackboneSizes:
    """A backbone and its feature map.

    Args:
        name: of the backbone.
        channels: of the feature map.
        image: side of the images that the map was measured on: 224, or the backbone's own where it takes no other.
        map: (height, width) of the feature map.
        map_last_stride_1: the same with ``last_stride=1``, None where the backbone has no stride to take out.
        parameters: of the backbone without its classifier.
    """

    name: str
    channels: int
    image: int
    map: tuple[int, int]
    map_last_stride_1: tuple[int, int] | None
    parameters: int


@dataclass(frozen=True)
class HeadSizes:
    """A head and its vector.

    Args:
        name: of the head.
        description: in one line.
        vector_256: length of the vector for 256 channels.
        vector_512: length of the vector for 512 channels.
        parameters: of the head on 256 channels, without reduction and classifier.
        reduces_wide_maps: whether ``reduce="auto"`` puts a 1 × 1 convolution in front of it on wide maps.
    """

    name: str
    description: str
    vector_256: int
    vector_512: int
    parameters: int
    reduces_wide_maps: bool


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Names that a user means: the one of that name, those that match a pattern, or those that contain the text.

    Example:
        >>> names = ["isqrt", "mpncov", "mpncov+seb"]
        >>> matching("mpncov", names), matching("*seb", names), matching("cov", names)
        (['mpncov'], ['mpncov+seb'], ['mpncov', 'mpncov+seb'])
    """
    if pattern in names:
        return [pattern]
    if any(character in pattern for character in "*?["):
        return [name for name in names if fnmatchcase(name, pattern)]
    return [name for name in names if pattern in name]


def backbone_sizes(name: str) -> BackboneSizes:
    """Measure one backbone, without computing anything where that can be.

    Raises:
        ValueError: if the backbone has no feature map.

    Example:
        >>> backbone_sizes("tv:alexnet")
        BackboneSizes(name='tv:alexnet', channels=256, image=224, map=(6, 6), map_last_stride_1=(13, 13),
                      parameters=2469696)
    """
    from eigengrain.models.probe import on_meta

    return on_meta(lambda: _measured(name))


def _measured(name: str) -> BackboneSizes:
    from eigengrain import _torchvision  # noqa: F401
    from eigengrain.models.backbone import create_backbone
    from eigengrain.models.probe import probe
    from eigengrain.models.stride import edit_strides

    backbone = create_backbone(name)
    own = backbone.description["input_size"]
    shape = own if backbone.img_size else (own[0], IMAGE, IMAGE)
    try:
        found = probe(backbone.net, shape, name)
    except ValueError:  # attention in blocks, which divide some sizes only
        shape = own
        found = probe(backbone.net, shape, name)
    try:
        larger = edit_strides(backbone.net, found, shape, name, last_stride=1, stride_on="3x3").size
    except ValueError:  # the network has no stride that could go
        larger = None
    parameters = sum(parameter.numel() for parameter in backbone.net.parameters())
    return BackboneSizes(name, backbone.channels, shape[1], found.size, larger, parameters)


def head_sizes(name: str) -> HeadSizes:
    """Measure one head.

    Example:
        >>> head_sizes("gap")
        HeadSizes(name='gap', description='Global average pooling', vector_256=256, vector_512=512, parameters=0,
                  reduces_wide_maps=False)
    """
    from eigengrain.heads import create_head

    head, wider = create_head(name, in_channels=256), create_head(name, in_channels=512)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return HeadSizes(name, describe(head), head.out_features, wider.out_features, parameters, head.quadratic)


def describe(head: "Head") -> str:
    """A head in one line: its settings for the covariance head, else the first sentence about its class."""
    normalised = _NORMALISED.get(getattr(head, "normalise", ""))
    if normalised is not None:
        return f"{normalised}, scaled (SEB)" if getattr(head, "seb", False) else normalised
    sentence = first_sentence(type(head).__doc__ or "")
    return sentence or type(head).__name__


def first_sentence(text: str) -> str:
    """The first sentence of a docstring without formulas and what follows a semicolon.

    Example:
        >>> first_sentence("Maximum, :math:`v = max x`; C numbers. More.")
        'Maximum'
    """
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.split(r"\.(?:\s|$)|;", paragraph, maxsplit=1)[0]
    return re.sub(r",?\s*:math:`[^`]*`", "", sentence).strip()


def run_models(config: Models) -> None:
    """``eigengrain models``."""
    from rich.columns import Columns

    from eigengrain.models import list_backbones
    from eigengrain.progress import progress_bar

    names = list(COVERED) if config.pattern is None else matching(config.pattern, list_backbones())
    if not names:
        raise _no_backbone(str(config.pattern), list_backbones())
    console = output.reading()
    if len(names) > MEASURED_UP_TO:
        console.print(Columns(names, column_first=True, padding=(0, 2)), highlight=False)
        console.print(f"{len(names)} names; {MEASURED_UP_TO} or fewer are shown with their sizes", style="dim")
        output.result([{"name": name} for name in names], names)
        return
    if output.current().quiet and not output.current().json:
        output.result(None, names)  # the sizes would not be shown
        return
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(names))
        rows: list[BackboneSizes | tuple[str, str]] = []
        for name in names:
            progress.update(task, description=name)
            rows.append(_sizes_or_reason(name))
            progress.advance(task)
    console.print(backbone_table([row for row in rows if isinstance(row, BackboneSizes)]))
    for row in rows:
        if isinstance(row, tuple):
            console.print(row[1], soft_wrap=True, markup=False, highlight=False)
    output.result([{"name": row[0], "problem": row[1]} if isinstance(row, tuple) else row for row in rows])


def _sizes_or_reason(name: str) -> BackboneSizes | tuple[str, str]:
    """The sizes of a backbone, or (name, why there are none): some networks of the libraries make no feature map."""
    try:
        return backbone_sizes(name)
    except ValueError as error:
        return name, str(error)


def _no_backbone(pattern: str, names: Sequence[str]) -> ValueError:
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.5)
    said = " ".join(filter(None, (did_you_mean(near), f"All {len(names)} names: eigengrain models '*'")))
    return ValueError(f"no backbone matches {pattern!r}: {said}")


def run_heads(config: Heads) -> None:
    """``eigengrain heads``."""
    from eigengrain.heads import list_heads

    names = list_heads() if config.pattern is None else matching(config.pattern, list_heads())
    if not names:
        raise UnknownName("head", config.pattern, list_heads())
    rows = [head_sizes(name) for name in names]
    output.reading().print(head_table(rows))
    output.result(rows, names)


def backbone_table(rows: Sequence[BackboneSizes]) -> "Table":
    """Backbones for reading."""
    view = _table(f"feature maps of images of {IMAGE} × {IMAGE}", "backbone")
    for heading in ("channels", "map", "with last_stride=1", "parameters (M)"):
        view.add_column(heading, justify="right")
    for row in rows:
        at = f" at {row.image}" if row.image != IMAGE else ""
        larger = f"{_times(row.map_last_stride_1)}{at}" if row.map_last_stride_1 else "–"
        view.add_row(row.name, str(row.channels), f"{_times(row.map)}{at}", larger, f"{row.parameters / 1e6:.1f}")
    return view


def head_table(rows: Sequence[HeadSizes]) -> "Table":
    """Heads for reading."""
    from rich.markup import escape

    view = _table("heads", "head")
    view.add_column("what it does", ratio=1)
    for heading in ("vector\nof 256", "vector\nof 512", "para-\nmeters", "reduces\nwide maps"):
        view.add_column(heading, justify="right")
    for row in rows:
        wide = "yes" if row.reduces_wide_maps else "no"
        numbers = (row.vector_256, row.vector_512, row.parameters)
        view.add_row(escape(row.name), escape(row.description), *map(str, numbers), wide)
    return view


def _table(title: str, first: str) -> "Table":
    from rich import box
    from rich.table import Table

    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.add_column(first, no_wrap=True)
    return view


def _times(size: Sequence[int]) -> str:
    return " × ".join(map(str, size))
