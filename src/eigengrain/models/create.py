"""Create backbones and models by name."""

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from threading import get_ident
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torchvision import models as torchvision_models

from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.files import read_json
from eigengrain.functional.inputs import check_integer
from eigengrain.heads import list_heads
from eigengrain.heads.registry import default_stages
from eigengrain.models.attention import overlap_patches
from eigengrain.models.backbone import (
    Backbone,
    ImageSize,
    add_mid_level,
    cut_after_map,
    has_fixed_size,
    probe,
    stage_channels,
)
from eigengrain.models.extra_backbones import PREFIX, TorchvisionTrunk
from eigengrain.models.model import CovarianceNet, Reduction
from eigengrain.models.stride import StrideOn, edit_strides
from eigengrain.models.weights import load_weights
from eigengrain.names import MAX_SIDE

#: defaults of arguments that are None; the signature repeats them, because the API reference prints it
DEFAULT_HEAD, DEFAULT_CLASSES = "mpncov+seb", 1000

#: timm's prefixes for a network whose description is on the Hugging Face hub or in a folder
SOURCES = ("hf-hub:", "local-dir:")

# description of a model's input; the origin of its weights is left out, because they may have been replaced
_DESCRIPTION = (
    *("architecture", "tag", "license"),
    *("input_size", "min_input_size", "fixed_input_size", "test_input_size"),
    *("first_conv", "interpolation", "crop_pct", "test_crop_pct", "crop_mode", "mean", "std"),
)

#: limits of what a description, which may come from a stranger, can build: side of the images, numbers in the options of a
#: backbone, tensors of a model
MAX_NUMBER, MAX_TENSORS = 1_000_000, 5000

#: options of timm that lead to files, which some of its versions open in a way that runs code in them
FILE_OPTIONS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")

# options in the description of a network that our own arguments decide
_OURS = {"num_classes", "global_pool", "img_size"}


def create_model(
    backbone: str,
    head: str | None = "mpncov+seb",
    num_classes: int | None = 1000,
    reduce: Reduction = "auto",
    last_stride: int | None = None,
    stride_on: StrideOn | None = "3x3",
    stages: int | None = None,
    class_token: Literal["beside"] | bool | None = None,
    token_norm: bool | None = None,
    mid_level: int | None = None,
    img_size: ImageSize | None = None,
    weights: str | os.PathLike[str] | None = None,
    pretrained: bool | None = False,
    head_options: dict[str, Any] | None = None,
    drop_rate: float | None = 0.0,
    global_pool: str | None = None,
    **backbone_options: Any,
) -> CovarianceNet:
    """Create a model from a backbone and a head by name.

    None stands for the default of an argument, except for ``reduce=None``, which means no reduction.

    Args:
        backbone: a network of timm, of torchvision with the prefix ``tv:``, or timm's ``hf-hub:…`` and ``local-dir:…``;
            see :func:`list_backbones`.
        head: name of a head, see :func:`eigengrain.heads.list_heads`.
        num_classes: number of classes; 0 for a model that returns the head's vector.
        reduce: channels after a 1 × 1 convolution before the head; ``auto`` reduces maps with more than 512 channels to 256
            for heads whose vector grows with the square of the channels, and to fewer channels than the map has positions
            for backbones that are built for one size and heads that need a covariance of full rank.
        last_stride: 1 removes the last halving of the map, without dilation, for a map twice as large in each direction.
        stride_on: ``1x1`` for ResNet weights from Caffe or Keras, whose stages stride on the first 1 × 1 convolution.
        stages: number of last stages (blocks of a ViT) whose maps are stacked, each with its own reduction; by default 2
            for ``hcov``, else 1.
        class_token: ``beside`` joins the class token of a ViT, after its final norm, with the head's vector, for one linear
            classifier of both. By default the feature map has the patch tokens alone. A bool is timm's option of that name,
            whether the network has a class token.
        token_norm: whether the tokens of a ViT have its final norm in the feature map, in all of ``stages``; None
            normalises those of the last block, not of earlier ones. Register tokens are always left out.
        mid_level: channels of a branch beside the head, such as 512: the map of the stage before the last, a 1 × 1
            convolution to this number of channels, maximum pooling and a classifier of its own, whose scores are added; see
            :class:`eigengrain.models.mid_level.MidLevel`. None for no branch.
        img_size: side, or (height, width), for backbones that are built for one size (ViT, Swin).
        weights: local file, ``.safetensors``, ``.npz`` or a PyTorch file without code, see :func:`load_weights`.
        pretrained: download the weights of the backbone from its library.
        head_options: keyword arguments of the head.
        drop_rate: dropout between the head's vector and the classifier.
        global_pool: timm's name for ``head``, used instead of it unless None; ``""``, with ``num_classes=0``, for a model
            that returns the feature map.
        backbone_options: keyword arguments of the backbone, such as ``drop_path_rate`` or ``dynamic_img_size``;
            ``patch_stride`` moves the patches of a ViT by fewer pixels than their size, so that they overlap.

    Raises:
        ValueError: for an unknown name (:class:`~eigengrain.errors.UnknownName`), an argument that does not fit
            (:class:`~eigengrain.errors.ArgumentError`) or a file that does not (:class:`~eigengrain.errors.FileError`).

    Example:
        >>> import torch
        >>> model = create_model("resnet18", head="gap", num_classes=10, last_stride=1)
        >>> model(torch.zeros(2, 3, 64, 64)).shape, model.forward_features(torch.zeros(2, 3, 64, 64)).shape
        (torch.Size([2, 10]), torch.Size([2, 512, 4, 4]))
    """
    head_name = (DEFAULT_HEAD if head is None else head) if global_pool is None else global_pool
    classes = DEFAULT_CLASSES if num_classes is None else num_classes
    drop = 0.0 if drop_rate is None else drop_rate
    if head_name and head_name not in list_heads():
        raise UnknownName("head", head_name, list_heads())  # before a backbone is downloaded
    if class_token not in (None, True, False, "beside"):
        raise ArgumentError("class_token", "must be 'beside' or None", class_token)
    if isinstance(class_token, bool):
        backbone_options["class_token"] = class_token
    beside = class_token == "beside"
    own = [name for name in inspect.signature(create_model).parameters if name != "backbone_options"]
    for option in backbone_options:
        if option not in own and get_close_matches(option, own, n=1, cutoff=0.88):  # so close that it is a misspelling
            raise UnknownName("argument", option, own)
    stages = default_stages(head_name) if stages is None else stages
    own_options: dict[str, Any] = {"last_stride": last_stride, "stride_on": stride_on or "3x3", "img_size": img_size}
    own_options |= {"join_class_token": beside, "token_norm": token_norm, "mid_level": mid_level is not None}
    given = {key: value for key, value in {"img_size": img_size, **backbone_options}.items() if value is not None}
    with limit_size(_memory() // 4):
        with _refusing(backbone, given):
            body = create_backbone(backbone, bool(pretrained), stages=stages, **own_options, **backbone_options)
        model = CovarianceNet(body, head_name, classes, reduce, head_options, drop, mid_level)
    model.config |= {"last_stride": last_stride, "stride_on": stride_on or "3x3", "img_size": body.img_size}
    if stages != default_stages(head_name):
        model.config["stages"] = stages
    if beside:
        model.config["class_token"] = class_token
    if token_norm is not None:
        model.config["token_norm"] = token_norm
    if mid_level is not None:
        model.config["mid_level"] = mid_level
    if weights is not None:
        load_weights(model, weights)
    return model


@contextmanager
def limit_size(numbers: int, tensors: int = MAX_TENSORS) -> Iterator[None]:
    """Raise an ArgumentError as soon as the modules that are built inside have more numbers or tensors than allowed.

    A tensor is counted before its values are set, so that it does not need memory yet; those on the meta device never do.
    """
    thread, total, count = get_ident(), 0, 0
    problem = f"must have at most {numbers:,} parameters and buffers, in {tensors:,} tensors"
    error = ArgumentError("model", problem, remedy="use smaller sizes")

    def add(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal total, count
        if tensor is None or get_ident() != thread:
            return
        total += 0 if tensor.is_meta or nn.parameter.is_lazy(tensor) else tensor.numel()
        count += 1
        if total > numbers or count > tensors:
            raise error

    hooks = [register_module_parameter_registration_hook(add), register_module_buffer_registration_hook(add)]
    try:
        yield
    except (RuntimeError, MemoryError) as reason:  # a single tensor that is larger than the memory
        if isinstance(reason, MemoryError) or re.search("alloc|overflow|memory", str(reason)):
            raise error from reason
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _memory() -> int:
    """Bytes of memory of this machine; where it cannot be found, more than any machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 50


def list_backbones(pattern: str = "*") -> list[str]:
    """Names of the backbones that match a shell pattern: timm's, our ``plumage_net``, and torchvision's with ``tv:``.

    Example:
        >>> list_backbones("*alexnet")
        ['tv:alexnet']
    """
    return [name for name in (*timm.list_models(), *_torchvision_names()) if fnmatch(name, pattern)]


def _torchvision_names() -> list[str]:
    return [PREFIX + name for name in torchvision_models.list_models(module=torchvision_models)]


def check_backbone(name: str) -> None:
    """Raise UnknownName, with close matches, unless timm or torchvision has a backbone of this name."""
    if name.startswith(SOURCES):
        return
    bare = name if name.startswith(PREFIX) else name.partition(".")[0]  # timm names weights as name.tag
    if not timm.is_model(bare) and bare not in _torchvision_names():
        raise UnknownName("backbone", bare, list_backbones(), listing="list_backbones(), or 'eigengrain models'")


def create_backbone(
    name: str,
    pretrained: bool = False,
    last_stride: int | None = None,
    stride_on: StrideOn = "3x3",
    img_size: ImageSize | None = None,
    stages: int = 1,
    join_class_token: bool = False,
    token_norm: bool | None = None,
    mid_level: bool = False,
    patch_stride: int | None = None,
    **options: Any,
) -> Backbone:
    """Create a network of timm or torchvision up to its feature map.

    Everything after ``forward_features`` is removed, so that every remaining parameter serves the feature map.

    Args:
        name, pretrained, last_stride, stride_on, img_size, stages, token_norm: as in :func:`create_model`.
        join_class_token: join the class token with the feature map.
        mid_level: join the map of the stage before the last.
        patch_stride: pixels between the patches of a ViT; None for their size.
        options: arguments of the network, see its library; None stands for the network's own default.

    Raises:
        ValueError: for an unknown name, or an option that does not fit the network.
    """
    check_backbone(name)
    check_integer(stages, "stages")
    sides = img_size if isinstance(img_size, tuple | list) else (img_size, img_size)
    if img_size is not None and not (
        len(sides) == 2 and all(isinstance(side, int) and 0 < side <= MAX_SIDE for side in sides)
    ):
        raise ArgumentError("img_size", f"must be a side or (height, width) of 1 to {MAX_SIDE} pixels", img_size)
    options = {key: value for key, value in options.items() if value is not None}
    for option, value in options.items():
        if option in FILE_OPTIONS:
            raise ArgumentError(
                option, "is not available", remedy="give {weights} the file, which is read without running code"
            )
        check_numbers(value, option)
    source_options = _source_options(name)
    net = _build(name, pretrained, img_size, options)
    if patch_stride is not None:
        overlap_patches(net, patch_stride, name)
        options |= {"patch_stride": patch_stride}
    options = {key: source_options[key] for key in source_options.keys() - _OURS} | options
    own: dict[str, Any] = dict(net.pretrained_cfg)  # type: ignore[arg-type]
    description = {
        key: tuple(own[key]) if isinstance(own[key], list) else own[key] for key in _DESCRIPTION if own.get(key) is not None
    }
    channels, *size = description.get("input_size", (3, 224, 224))
    built_for = img_size or getattr(getattr(net, "patch_embed", None), "img_size", None) or size
    height, width = (built_for, built_for) if isinstance(built_for, int) else built_for
    image_shape = int(options.get("in_chans", channels)), int(height), int(width)
    description["input_size"] = image_shape
    if img_size is not None:
        description.pop("test_input_size", None)

    probed = probe(net, image_shape, name, class_token=join_class_token, token_norm=token_norm)
    layout = probed.layout
    if layout.norm is False and not layout.class_token:  # nothing needs the norm
        net.norm, layout = nn.Identity(), replace(layout, norm=None)
    elif layout.norm and stages == 1:  # as it is
        layout = replace(layout, norm=None)
    cut_after_map(net, probed)
    probed = edit_strides(net, probed, image_shape, name, last_stride, stride_on)
    description["pool_size"] = probed.size
    layout, mid_channels = add_mid_level(net, image_shape, layout, name) if mid_level else (layout, 0)
    return Backbone(
        name=own["architecture"] if name.startswith(SOURCES) else name,
        options=options,
        img_size=image_shape[1:] if has_fixed_size(net) else None,
        net=net,
        layout=layout,
        channels=(probed.channels,) if stages == 1 else stage_channels(net, image_shape, layout, stages, name),
        description=description,
        # distilled networks have several
        classifier=own["classifier"] if isinstance(own.get("classifier"), str) else "",
        mid_level=mid_channels,
    )


def check_numbers(value: Any, argument: str) -> None:
    """Raise an ArgumentError if a plain value, or a list or mapping of such values, has numbers that no network has."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            check_numbers(item, argument)
    elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        raise ArgumentError(argument, f"must have numbers of at most {MAX_NUMBER:,}", value)


@contextmanager
def _refusing(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Raise an ArgumentError for options that a network does not accept, whatever error its library raises."""
    try:
        yield
    except (ArgumentError, UnknownName, FileError):
        raise
    except Exception as error:
        # on the meta device a RuntimeError only means that the network reads values while it is built
        if not options or (isinstance(error, RuntimeError) and torch.get_default_device().type == "meta"):
            raise
        reason = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
        argument, value = next(iter(options.items())) if len(options) == 1 else ("backbone_options", dict(options))
        raise ArgumentError(argument, f"is not accepted by backbone {name!r} ({reason})", value) from error


def _build(name: str, pretrained: bool, img_size: ImageSize | None, options: dict[str, Any]) -> nn.Module:
    """The network, still with everything after its map."""
    any_size = ArgumentError(
        "img_size", f"is not an option of backbone {name!r}, which takes images of any size", img_size, "leave it out"
    )
    try:
        if name.startswith(PREFIX):
            if img_size is not None:
                raise any_size
            return TorchvisionTrunk(name.removeprefix(PREFIX), pretrained, **options)
        # The pooling stays the network's own until it is cut off: timm moves the last normalisation in or out of
        # forward_features with it, and weights would no longer fit.
        net = timm.create_model(name, pretrained, num_classes=0, img_size=img_size, **options)
    except TypeError as error:
        if "'img_size'" in str(error):
            raise any_size from error
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected is None:
            raise
        problem, remedy = f"is not an option of backbone {name!r}", "leave it out, or see the options of its library"
        raise ArgumentError(unexpected[1], problem, remedy=remedy) from error
    except RuntimeError as error:
        if "pretrained" not in str(error):
            raise
        raise ArgumentError("backbone", f"{name!r} is not available: {error}") from error
    except OSError as error:
        raise _download_error(name, error) from error
    if img_size is not None and not has_fixed_size(net):
        raise any_size
    return net


def _source_options(name: str) -> dict[str, Any]:
    """Options in the description of a network on the hub or in a folder, to build it without that source."""
    if not name.startswith(SOURCES):
        return {}
    source, _, place = name.partition(":")
    if source == "hf-hub":
        try:
            return dict(timm.models.load_model_config_from_hf(place)[2] or {})
        except OSError as error:
            raise _download_error(name, error) from error
    path = Path(place) / "config.json"
    try:
        config = read_json(path)
    except FileError as error:
        raise FileError(path, f"backbone {name!r} needs it ({error.problem})") from error
    if not isinstance(config, dict):
        raise FileError(path, f"backbone {name!r} needs a mapping in it")
    if "eigengrain" in config:
        raise FileError(place, f"it is a whole model, not a backbone: open it with from_pretrained({place!r})")
    return dict(config.get("model_args") or {})


def _download_error(name: str, error: OSError) -> ArgumentError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
    return ArgumentError(
        "backbone",
        f"{name!r} has files that cannot be downloaded or read ({reason})",
        remedy="without a network, give {weights} a local file and leave {pretrained} off",
    )
