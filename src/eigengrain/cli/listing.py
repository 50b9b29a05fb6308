"""``eigengrain models`` and ``eigengrain heads``: names, and the sizes of feature maps and vectors."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase

from eigengrain import names, output
from eigengrain.errors import UnknownName
from eigengrain.options import setting

#: longest list with sizes; a longer one has only names
MEASURED_UP_TO = 20
#: size of the images for which maps are measured
IMAGE = 224


@dataclass(frozen=True)
class Models:
    """Which backbones to list.

    Args:
        pattern: name, part of a name, or quoted pattern such as 'resnet*'; the backbones of the paper by default.
    """

    pattern: str | None = setting(None, offers=names.BACKBONES)


@dataclass(frozen=True)
class Heads:
    """Which heads to list.

    Args:
        pattern: name, part of a name, or quoted pattern such as '*+seb'; all heads by default.
    """

    pattern: str | None = setting(None, offers=names.HEADS)


@dataclass(frozen=True)
class BackboneSizes:
    """A backbone and its feature map."""

    name: str
    channels: int
    image: int  # size of the images: 224, or that of the backbone if it accepts no other
    map: tuple[int, int]  # height and width
    map_last_stride_1: tuple[int, int] | None  # the same with last_stride=1, if there is a stride to remove
    parameters: int  # without the classifier


@dataclass(frozen=True)
class HeadSizes:
    """A head and its vector."""

    name: str
    description: str
    vector_256: int  # length of the vector for 256 channels
    vector_512: int  # and for 512 channels
    parameters: int  # for 256 channels, without reduction and classifier
    reduces_wide_maps: bool  # whether reduce="auto" adds a 1 × 1 convolution before it on wide maps


def matches(pattern: str, choices: Sequence[str]) -> list[str]:
    """The name itself, or the names that match a pattern, or those that contain the text.

    Example:
        >>> choices = ["isqrt", "mpncov", "mpncov+seb"]
        >>> matches("mpncov", choices), matches("*seb", choices), matches("cov", choices)
        (['mpncov'], ['mpncov+seb'], ['mpncov', 'mpncov+seb'])
    """
    if pattern in choices:
        return [pattern]
    if any(character in pattern for character in "*?["):
        return [name for name in choices if fnmatchcase(name, pattern)]
    return [name for name in choices if pattern in name]


def run_models(config: Models) -> None:
    """List backbones with the sizes of their feature maps."""
    from rich.columns import Columns

    from eigengrain.models import list_backbones
    from eigengrain.progress import progress_bar

    chosen = list(names.BACKBONES) if config.pattern is None else matches(config.pattern, list_backbones())
    if not chosen:
        bare = str(config.pattern).strip("*")
        raise UnknownName("backbone", bare, list_backbones(), listing="eigengrain models '*'")
    console = output.console()
    if len(chosen) > MEASURED_UP_TO:
        console.print(Columns(chosen, column_first=True, padding=(0, 2)), highlight=False)
        console.print(f"{len(chosen)} names; lists of up to {MEASURED_UP_TO} are shown with sizes", style="dim")
        output.result([{"name": name} for name in chosen], chosen)
        return
    if output.current().quiet and not output.current().json:
        output.result(None, chosen)  # the sizes would not be shown
        return
    rows: list[BackboneSizes | dict[str, str]] = []
    lines = []
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(chosen))
        for name in chosen:
            progress.update(task, description=name)
            try:
                rows.append(row := backbone_sizes(name))
            except ValueError as error:  # a network without a feature map
                rows.append({"name": name, "problem": str(error)})
            else:
                at = f" at {row.image}" if row.image != IMAGE else ""
                maps = [f"{' × '.join(map(str, size))}{at}" if size else "–" for size in (row.map, row.map_last_stride_1)]
                lines.append((row.name, row.channels, *maps, f"{row.parameters / 1e6:.1f}"))
            progress.advance(task)
    headings = ("backbone", "channels", "map", "with last_stride=1", "parameters (M)")
    console.print(output.table(f"feature maps of images of {IMAGE} × {IMAGE}", headings, lines))
    output.say(*(each["problem"] for each in rows if isinstance(each, dict)))
    output.result(rows)


def run_heads(config: Heads) -> None:
    """List heads with the lengths of their vectors."""
    from eigengrain.heads import list_heads

    chosen = list_heads() if config.pattern is None else matches(config.pattern, list_heads())
    if not chosen:
        raise UnknownName("head", config.pattern, list_heads())
    rows = [head_sizes(name) for name in chosen]
    headings = ("head", "description", "vector\nfor 256", "vector\nfor 512", "para-\nmeters", "reduces\nwide maps")
    lines = [(*astuple(row)[:-1], "yes" if row.reduces_wide_maps else "no") for row in rows]
    output.console().print(output.table("heads", headings, lines, left=2))
    output.result(rows, chosen)


def backbone_sizes(name: str) -> BackboneSizes:
    """Measure a backbone on the meta device, which computes nothing; raise a ValueError if it has no feature map.

    Example:
        >>> backbone_sizes("tv:alexnet")
        BackboneSizes(name='tv:alexnet', channels=256, image=224, map=(6, 6), map_last_stride_1=(13, 13),
                      parameters=2469696)
    """
    from eigengrain.models.backbone import on_meta

    return on_meta(lambda: _measure(name))


def _measure(name: str) -> BackboneSizes:
    from eigengrain import _torchvision  # noqa: F401
    from eigengrain.models.backbone import probe
    from eigengrain.models.create import create_backbone
    from eigengrain.models.stride import edit_strides

    backbone = create_backbone(name)
    own = backbone.description["input_size"]
    shape = own if backbone.img_size else (own[0], IMAGE, IMAGE)
    try:
        layout = probe(backbone.net, shape, name)
    except ValueError:  # blocks of attention divide only some sizes
        shape = own
        layout = probe(backbone.net, shape, name)
    try:
        larger = edit_strides(backbone.net, layout, shape, name, last_stride=1, stride_on="3x3").size
    except ValueError:  # the network has no stride to remove
        larger = None
    parameters = sum(parameter.numel() for parameter in backbone.net.parameters())
    return BackboneSizes(name, sum(backbone.channels), shape[1], layout.size, larger, parameters)


def head_sizes(name: str) -> HeadSizes:
    """Measure a head."""
    from eigengrain.heads import create_head

    head, wider = create_head(name, in_channels=256), create_head(name, in_channels=512)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return HeadSizes(name, head.summary, head.out_features, wider.out_features, parameters, head.quadratic)
