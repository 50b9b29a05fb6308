"""A network without its classifier: built by name, cut after its feature map, and asked what that map looks like."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from torch import nn

from eigengrain.models.layout import FeatureLayout, takes_img_size
from eigengrain.models.names import SOURCES, check_backbone
from eigengrain.models.probe import Probe, probe
from eigengrain.models.stride import StrideOn, edit_strides
from eigengrain.models.torchvision_trunk import PREFIX, TorchvisionTrunk

ImageSize = int | tuple[int, int]

# what a model says about its input; the origin of weights that may have been replaced since is no part of it
_DESCRIPTION = (
    *("architecture", "tag", "license"),
    *("input_size", "min_input_size", "fixed_input_size", "test_input_size"),
    *("interpolation", "crop_pct", "test_crop_pct", "crop_mode", "mean", "std"),
)

# options that a description may hold and that are decided here
_OURS = {"num_classes", "global_pool", "img_size"}


@dataclass(frozen=True)
class Backbone:
    """A network that ends with its feature map.

    Args:
        name: that builds the network again, without the hub or folder that it may have come from.
        options: what the network was built with besides its name.
        img_size: (height, width) that it was built for, None if it takes any.
        net: the network itself.
        layout: of what ``net.forward_features`` returns.
        channels: of the feature map.
        description: size, mean, std and crop of the images it expects, as in timm's ``pretrained_cfg``.
        classifier: what the classifier was called before it was removed, as checkpoints still call it.
    """

    name: str
    options: dict[str, Any]
    img_size: tuple[int, int] | None
    net: nn.Module
    layout: FeatureLayout
    channels: int
    description: dict[str, Any]
    classifier: str


def create_backbone(
    name: str,
    pretrained: bool = False,
    last_stride: int | None = None,
    stride_on: StrideOn = "3x3",
    img_size: ImageSize | None = None,
    **options: Any,
) -> Backbone:
    """A network of timm or torchvision by name, up to its feature map.

    Everything behind ``forward_features`` is removed, so that every parameter that is left serves the feature map.

    Args:
        name: of timm, of torchvision behind ``tv:``, or with timm's ``hf-hub:`` or ``local-dir:``.
        pretrained: load the weights that the library has for it.
        last_stride: 1 for a map twice as large in each direction; None or 2 for the network as it is.
        stride_on: ``1x1`` for ResNets whose weights were trained with the stride on the first 1 × 1 convolution.
        img_size: for networks that are built for one size.
        options: of the network, see its library; None leaves the network's own default.

    Raises:
        ValueError: for an unknown name, or an option that the network does not have or cannot follow.

    Example:
        >>> backbone = create_backbone("resnet18")
        >>> backbone.channels, backbone.layout.kind
        (512, 'NCHW')
    """
    check_backbone(name)
    _check_size(img_size)
    options = {key: value for key, value in options.items() if value is not None}
    source_options = _source_options(name)
    net = _build(name, pretrained, img_size, options)
    options = {key: source_options[key] for key in source_options.keys() - _OURS} | options
    own = _own_description(net)
    description = {
        key: tuple(own[key]) if isinstance(own[key], list) else own[key] for key in _DESCRIPTION if own.get(key) is not None
    }
    image_shape = _image_shape(net, description, img_size, options)
    description["input_size"] = image_shape
    if img_size is not None:
        description.pop("test_input_size", None)

    found = probe(net, image_shape, name)
    cut_after_map(net, found)
    found = edit_strides(net, found, image_shape, name, last_stride, stride_on)
    description["pool_size"] = found.size
    return Backbone(
        name=own["architecture"] if name.startswith(SOURCES) else name,
        options=options,
        img_size=image_shape[1:] if takes_img_size(net) else None,
        net=net,
        layout=found.layout,
        channels=found.channels,
        description=description,
        # distilled networks have several
        classifier=own["classifier"] if isinstance(own.get("classifier"), str) else "",
    )


def _check_size(img_size: ImageSize | None) -> None:
    sides = img_size if isinstance(img_size, tuple | list) else (img_size, img_size)
    if img_size is not None and not (len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)):
        raise ValueError(f"img_size must be a side, or (height, width), in whole pixels, got {img_size!r}")


def _build(name: str, pretrained: bool, img_size: ImageSize | None, options: dict[str, Any]) -> nn.Module:
    """The network with whatever stands behind its map."""
    if name.startswith(PREFIX):
        if img_size is not None:
            raise _any_size(name)
        try:
            return TorchvisionTrunk(name.removeprefix(PREFIX), pretrained, **options)
        except TypeError as error:
            raise _unknown_option(name, error) from error
        except OSError as error:
            raise _out_of_reach(name, error) from error
    # The pooling stays the network's own until it is cut off: timm moves the last normalisation in or out of
    # forward_features with it, and weights would no longer fit.
    try:
        net = timm.create_model(name, pretrained, num_classes=0, img_size=img_size, **options)
    except TypeError as error:
        if "'img_size'" in str(error):
            raise _any_size(name) from error
        raise _unknown_option(name, error) from error
    except RuntimeError as error:
        if "pretrained" not in str(error):
            raise
        raise ValueError(f"backbone {name!r}: {error}") from error
    except OSError as error:
        raise _out_of_reach(name, error) from error
    if img_size is not None and not takes_img_size(net):
        raise _any_size(name)
    return net


def _source_options(name: str) -> dict[str, Any]:
    """Options in the description of a network on the hub or in a folder: they make it reproducible without it."""
    if not name.startswith(SOURCES):
        return {}
    source, _, place = name.partition(":")
    if source == "hf-hub":
        try:
            return dict(timm.models.load_model_config_from_hf(place)[2] or {})
        except OSError as error:
            raise _out_of_reach(name, error) from error
    path = Path(place) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"backbone {name!r}: {path} cannot be read ({error})") from error
    if "eigengrain" in config:
        raise ValueError(f"{place} holds a whole model, not a backbone: open it with from_pretrained({place!r})")
    return dict(config.get("model_args") or {})


def _own_description(net: nn.Module) -> dict[str, Any]:
    description: Any = net.pretrained_cfg
    return dict(description)


def _out_of_reach(name: str, error: OSError) -> ValueError:
    """Weights that the library would download, and could not."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
    return ValueError(
        f"the weights of backbone {name!r} cannot be downloaded or read ({reason}): without a network, take a file with "
        "pretrained=False and weights=FILE, on the command line --model.pretrained false --model.weights FILE, for a study "
        "--weights FILE"
    )


def _any_size(name: str) -> ValueError:
    return ValueError(f"backbone {name!r} takes images of any size: leave img_size out and feed the size you want")


def _unknown_option(name: str, error: TypeError) -> Exception:
    if "unexpected keyword argument" not in str(error):
        return error
    return ValueError(f"backbone {name!r} {str(error).split(') ')[-1]}: leave it out, or see the options of its library")


def _image_shape(
    net: nn.Module, description: dict[str, Any], img_size: ImageSize | None, options: dict[str, Any]
) -> tuple[int, int, int]:
    channels, height, width = description.get("input_size", (3, 224, 224))
    built_for = img_size or getattr(getattr(net, "patch_embed", None), "img_size", None)
    if built_for is not None:
        height, width = (built_for, built_for) if isinstance(built_for, int) else built_for
    return int(options.get("in_chans", channels)), int(height), int(width)


def cut_after_map(net: nn.Module, found: Probe) -> None:
    """Replace by identities what a network has behind its feature map, so that all of its parameters get a gradient.

    Gone are the children behind the last one that ran (pooling, dropout, classifier), and any module with parameters of
    which none was used. What runs without an effect on the map (class-token layers) cannot be taken out, it is frozen.
    """
    # by identity, because a module or parameter that is shared has several names and is listed under one
    ran = {net.get_submodule(name) for name in found.called}
    used = {parameter for name, parameter in net.named_parameters() if name not in found.unused}

    def needed(module: nn.Module) -> bool:
        return not ran.isdisjoint(module.modules()) or not used.isdisjoint(module.parameters())

    children = dict(net.named_children())
    last = max((number for number, child in enumerate(children.values()) if needed(child)), default=-1)
    for name in list(children)[last + 1 :]:
        setattr(net, name, nn.Identity())
    _drop_unused(net, needed)
    for name, parameter in net.named_parameters():
        if name in found.unused:
            parameter.requires_grad_(False)


def _drop_unused(module: nn.Module, needed: Callable[[nn.Module], bool]) -> None:
    for name, child in list(module.named_children()):
        if next(child.parameters(), None) is None:
            continue
        if needed(child):
            _drop_unused(child, needed)
        else:
            setattr(module, name, nn.Identity())
