"""A network up to its feature map: find the map's layout without computing anything, and remove what follows it."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError

ImageSize = int | tuple[int, int]

T = TypeVar("T")


@dataclass(frozen=True)
class FeatureLayout:
    """Layout of the output of a network's ``forward_features``, and what of it becomes the feature map."""

    kind: Literal["NCHW", "NHWC", "tokens"]  # tokens: (B, prefix + positions, C)
    prefix_tokens: int = 0  # class and register tokens before the positions; they are not positions of the map
    class_token: bool = False  # the first token follows the maps as further channels, the same at every position
    norm: bool | None = None  # the final norm is applied to every stacked block, to none, or (None) to the last one
    mid_level: int = 0  # the map of the stage before the last follows, f × f positions in one; 0 leaves it out

    def to_map(self, features: Tensor, net: nn.Module, image_size: tuple[int, int]) -> Tensor:
        """Convert features to a map (B, C, H, W)."""
        if self.kind == "NCHW":
            return features
        if self.kind == "NHWC":
            return features.permute(0, 3, 1, 2)
        positions = features[:, self.prefix_tokens :]  # (B, N, C)
        embedded_size = getattr(getattr(net, "patch_embed", None), "dynamic_feat_size", None)
        grid = token_grid(positions.shape[1], image_size, embedded_size(image_size) if embedded_size else None)
        return positions.transpose(1, 2).unflatten(2, grid)


@dataclass(frozen=True)
class Backbone:
    """A network that ends with its feature map."""

    name: str  # builds the network again, without the hub or folder that it may have come from
    options: dict[str, Any]  # further arguments it was built with
    img_size: tuple[int, int] | None  # (height, width) it was built for, None for any size
    net: nn.Module
    layout: FeatureLayout  # of the output of net.forward_features
    channels: tuple[int, ...]  # of the maps of the last stages, which are stacked to one feature map
    description: dict[str, Any]  # size, mean, std and crop of its images, as in timm's pretrained_cfg
    classifier: str  # name of the removed classifier, as in checkpoints of the whole network
    mid_level: int = 0  # channels of the map of the stage before the last, if it follows the feature map


def feature_parts(net: nn.Module, images: Tensor, layout: FeatureLayout, stages: int = 1) -> list[Tensor]:
    """Parts (B, C, H, W) of the feature map, from one pass: maps of the last stages, then what goes beside the head.

    The maps of earlier stages (blocks of a ViT) are pooled on average to the size of the last one. Beside the head go the
    class token or the map of the stage before the last, as further channels, so that the features stay one tensor. The
    class token, the first one, has the network's final norm and is repeated at every position.
    """
    maps: list[Tensor] = []
    count = max(stages, 2) if layout.mid_level else stages
    if count == 1 and layout.norm is None:
        own = net.forward_features(images)  # type: ignore[operator]
    else:
        options: dict[str, Any] = {} if layout.norm is None else {"norm": layout.norm}
        own, maps = net.forward_intermediates(images, indices=count, output_fmt="NCHW", **options)  # type: ignore[operator]
    last = maps[-1] if layout.norm is False else layout.to_map(own, net, (images.shape[-2], images.shape[-1]))
    parts = [*(average_to(part, last) for part in maps[-stages:-1]), last]
    if layout.class_token:
        parts.append(own[:, 0, :, None, None].expand(-1, -1, last.shape[2], last.shape[3]))
    if layout.mid_level:
        parts.append(fold(maps[-2], last, layout.mid_level))
    return parts


@torch.fx.wrap  # one node of a traced graph, because it branches on sizes
def average_to(part: Tensor, like: Tensor) -> Tensor:
    """Pool a map on average to the size of another one."""
    height, width = like.shape[2:]
    return part if part.shape[2:] == like.shape[2:] else nn.functional.adaptive_avg_pool2d(part, (height, width))


@torch.fx.wrap  # one node of a traced graph, because it branches on sizes
def fold(part: Tensor, like: Tensor, factor: int) -> Tensor:
    """A map as one of the size of ``like``, with ``factor``² times the channels; :func:`unfold` undoes it.

    If its sides are not ``factor`` times those of ``like``, some of its positions are first repeated or, rarely, left out.

    Example:
        >>> part, like = torch.rand(2, 3, 7, 8), torch.rand(2, 5, 4, 4)
        >>> fold(part, like, 2).shape, torch.equal(unfold(fold(part, like, 2), 2).amax((2, 3)), part.amax((2, 3)))
        (torch.Size([2, 12, 4, 4]), True)
    """
    size = (factor * like.shape[2], factor * like.shape[3])
    part = part if part.shape[2:] == size else nn.functional.interpolate(part, size)
    return nn.functional.pixel_unshuffle(part, factor)


def unfold(features: Tensor, factor: int) -> Tensor:
    """The map whose positions :func:`fold` made channels."""
    return nn.functional.pixel_shuffle(features, factor)


def add_mid_level(
    net: nn.Module, image_shape: tuple[int, int, int], layout: FeatureLayout, name: str
) -> tuple[FeatureLayout, int]:
    """The layout with the map of the stage before the last, and the channels of that map.

    Raises:
        ArgumentError: for a network without earlier stages.
    """
    remedy = "leave it out, or use another backbone, such as a ResNet of timm"
    if layout.kind == "tokens" or not hasattr(net, "forward_intermediates"):
        reason = "whose blocks are not stages" if layout.kind == "tokens" else "which returns no maps of earlier stages"
        raise ArgumentError("mid_level", f"must be None for backbone {name!r}, {reason}", remedy=remedy)
    try:
        with torch.inference_mode():
            images = torch.empty(1, *image_shape, device="meta")
            *_, part, last = (
                _meta_copy(net)
                .eval()
                .forward_intermediates(  # type: ignore[operator]
                    images, indices=2, output_fmt="NCHW", intermediates_only=True
                )
            )
    except (RuntimeError, AssertionError, TypeError, IndexError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentError("mid_level", f"must be None for backbone {name!r} ({reason})", remedy=remedy) from error
    return replace(layout, mid_level=max(1, round(part.shape[-1] / last.shape[-1]))), part.shape[1]


def stage_channels(
    net: nn.Module, image_shape: tuple[int, int, int], layout: FeatureLayout, stages: int, name: str
) -> tuple[int, ...]:
    """Channels of the maps of the last stages, found on the meta device; raises ArgumentError if they are not available."""
    remedy = "use {stages} 1, or another backbone"
    if not hasattr(net, "forward_intermediates"):
        problem = f"must be 1 for backbone {name!r}, which returns no maps of earlier stages"
        raise ArgumentError("stages", problem, stages, remedy)
    try:
        with torch.inference_mode():
            images = torch.empty(1, *image_shape, device="meta")
            parts = feature_parts(_meta_copy(net).eval(), images, layout, stages)
            return tuple(part.shape[1] for part in parts[:stages])
    except (RuntimeError, AssertionError, TypeError, IndexError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentError("stages", f"cannot be {stages} for backbone {name!r} ({reason})", remedy=remedy) from error


@torch.fx.wrap  # one node of a traced graph, because it branches on sizes
def token_grid(tokens: int, image_size: tuple[int, int], embedded: tuple[int, int] | None = None) -> tuple[int, int]:
    """Rows and columns of the patches: those of the patch embedding if they fit, or by the proportions of the image."""
    if embedded is not None and embedded[0] * embedded[1] == tokens:
        return embedded
    height, width = image_size
    rows = max(round(math.sqrt(tokens * height / width)), 1)
    if rows * (tokens // rows) != tokens:
        raise ArgumentError(
            "x", f"gives {tokens} tokens, which do not form a grid", image_size, "use multiples of the patch size"
        )
    return rows, tokens // rows


def has_fixed_size(net: nn.Module) -> bool:
    """Whether a network is built for images of one size, according to its description or patch embedding."""
    description: Any = getattr(net, "pretrained_cfg", None) or {}
    embedding = getattr(net, "patch_embed", None)
    return bool(dict(description).get("fixed_input_size")) or getattr(embedding, "img_size", None) is not None


def detect_layout(net: nn.Module, features: object, name: str) -> FeatureLayout:
    """Find the layout of a network from its attributes and the shape of its features; raise if they are not one map."""
    shape = tuple(features.shape) if isinstance(features, Tensor) else ()
    if len(shape) == 3:
        # networks without a count of prefix tokens have at most a class token; some have one for each stage
        class_token = any(name.startswith("cls_token") for name, _ in net.named_parameters(recurse=False))
        prefix = int(getattr(net, "num_prefix_tokens", class_token))
        if shape[1] > prefix:
            return FeatureLayout("tokens", prefix)
    elif len(shape) == 4:
        declared = str(getattr(net, "output_fmt", ""))
        channels = getattr(net, "num_features", None)
        last = declared == "NHWC" or (not declared and shape[3] == channels and shape[1] != channels)
        return FeatureLayout("NHWC" if last else "NCHW")
    output = f"a tensor of shape {shape}" if shape else type(features).__name__
    raise ArgumentError("backbone", f"must end with one feature map, not with {output}", name)


def use_tokens(
    layout: FeatureLayout, net: nn.Module, name: str, class_token: bool, token_norm: bool | None
) -> FeatureLayout:
    """The layout with the class token beside the map, or another use of the final norm; raise if the network has none."""
    has_class_token = any(key.startswith("cls_token") for key, _ in net.named_parameters(recurse=False))
    if class_token and (layout.kind != "tokens" or not has_class_token):
        remedy = "leave it out, or use a ViT with a class token"
        raise ArgumentError("class_token", f"cannot be 'beside' for backbone {name!r}, which has none", remedy=remedy)
    norm: Any = getattr(net, "norm", None)
    normed = isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) and hasattr(net, "forward_intermediates")
    if token_norm is not None and (layout.kind != "tokens" or not normed):
        problem = f"must be None for backbone {name!r}, whose feature map is not made of tokens with a final norm"
        raise ArgumentError("token_norm", problem, token_norm, "leave it out")
    return replace(layout, class_token=class_token, norm=token_norm)


def on_meta(build: Callable[[], T]) -> T:
    """Call a function that builds a network on the meta device, where it has no values and costs nothing.

    Networks that read values while they are built, as some do in timm before 1.0.30, are built on the CPU.
    """
    try:
        with torch.device("meta"):
            return build()
    except RuntimeError:
        with torch.device("cpu"):
            return build()


@dataclass(frozen=True)
class Call:
    """One call of a module without children, with the sizes of its input and output maps; () if they are not maps."""

    name: str
    module: nn.Module
    size_in: tuple[int, ...]
    size_out: tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """Result of :func:`probe`."""

    layout: FeatureLayout  # of the network's own features
    channels: int
    size: tuple[int, int]  # (H, W) of the feature map
    calls: tuple[Call, ...]  # modules without children, in the order of their calls
    called: frozenset[str]  # names of all modules that were called
    unused: frozenset[str]  # names of the parameters that the feature map does not depend on


def _meta_copy(net: nn.Module) -> nn.Module:
    """Copy a network with meta tensors, so that nothing a pass leaves in it (such as a table of positions) is kept."""
    copied: dict[int, Tensor] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        copied[id(tensor)] = nn.Parameter(empty, tensor.is_floating_point()) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(net, copied)  # deepcopy takes the entries of its second argument as already copied


def _map_size(value: Any) -> tuple[int, ...]:
    return tuple(value.shape[2:]) if isinstance(value, Tensor) and value.ndim == 4 else ()


def _record_calls(net: nn.Module, meta_copy: nn.Module, calls: list[Call], called: set[str]) -> None:
    """Record the calls in the copy as calls of the modules of the network itself."""

    def recorder(name: str, module: nn.Module) -> Any:
        leaf = next(module.children(), None) is None

        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            called.add(name)
            if leaf:
                calls.append(Call(name, module, _map_size(inputs[0]) if inputs else (), _map_size(output)))

        return hook

    for name, module in net.named_modules():
        meta_copy.get_submodule(name).register_forward_hook(recorder(name, module))


def probe(
    net: nn.Module,
    image_shape: tuple[int, int, int],
    name: str,
    find_unused: bool = True,
    class_token: bool = False,
    token_norm: bool | None = None,
) -> Probe:
    """Run ``net.forward_features`` once on the meta device, where nothing is computed.

    The network is not changed. ``name`` is for errors. ``find_unused`` also finds the parameters that the map does not
    depend on, which takes a backward pass. ``class_token`` and ``token_norm`` are those of the layout.

    Raises:
        ArgumentError: if the network has no feature map or does not run on such images.
    """
    if not hasattr(net, "forward_features"):
        raise ArgumentError("backbone", "must have forward_features, which makes its feature map", name)
    calls: list[Call] = []
    called: set[str] = set()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            # eval mode, without batch statistics of a single image, dropout and stochastic depth
            meta_copy = _meta_copy(net).eval()
            _record_calls(net, meta_copy, calls, called)
            images = torch.empty(1, *image_shape, device="meta")
            own = meta_copy.forward_features(images)  # type: ignore[operator]
            layout = use_tokens(detect_layout(meta_copy, own, name), meta_copy, name, class_token, token_norm)
            parts = [layout.to_map(own, meta_copy, image_shape[1:])]
            if class_token or token_norm is not None:
                parts = feature_parts(meta_copy, images, layout)
            parameters = dict(meta_copy.named_parameters())
            gradients: tuple[Tensor | None, ...] = ()
            if find_unused:
                gradients = torch.autograd.grad(torch.cat(parts, 1).sum(), list(parameters.values()), allow_unused=True)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        shape = " × ".join(map(str, image_shape))
        raise ArgumentError("backbone", f"does not run on images of {shape} ({reason})", name) from error
    unused = frozenset(key for key, g in zip(parameters, gradients, strict=False) if g is None)
    height, width = parts[0].shape[2:]
    return Probe(layout, parts[0].shape[1], (height, width), tuple(calls), frozenset(called), unused)


def cut_after_map(net: nn.Module, probed: Probe) -> None:
    """Replace everything after the feature map with identities, so that all parameters get a gradient.

    This removes the children after the last one that was called (pooling, dropout, classifier), and modules of whose
    parameters none is used. Modules that run without an effect on the map (class-token layers) are frozen instead.
    """
    # compared by identity: a shared module or parameter has several names, and is listed under one of them
    called = {net.get_submodule(name) for name in probed.called}
    used = {parameter for name, parameter in net.named_parameters() if name not in probed.unused}

    def needed(module: nn.Module) -> bool:
        return not called.isdisjoint(module.modules()) or not used.isdisjoint(module.parameters())

    children = dict(net.named_children())
    last = max((number for number, child in enumerate(children.values()) if needed(child)), default=-1)
    for name in list(children)[last + 1 :]:
        setattr(net, name, nn.Identity())
    _remove_unused(net, needed)
    for name, parameter in net.named_parameters():
        if name in probed.unused:
            parameter.requires_grad_(False)


def _remove_unused(module: nn.Module, needed: Callable[[nn.Module], bool]) -> None:
    for name, child in list(module.named_children()):
        if next(child.parameters(), None) is None:
            continue
        if needed(child):
            _remove_unused(child, needed)
        else:
            setattr(module, name, nn.Identity())
