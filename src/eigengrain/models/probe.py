"""One pass through a network without data, on the meta device: what runs, what it makes, and what is never used."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from eigengrain.models.layout import FeatureLayout, detect_layout

T = TypeVar("T")


def on_meta(look: Callable[[], T]) -> T:
    """What a function finds on a network that it builds, on the meta device where it can be built there.

    It then has no numbers and costs nothing. Networks that read numbers while they are built, as some do in timm before
    1.0.30, are built on the CPU.
    """
    try:
        with torch.device("meta"):
            return look()
    except RuntimeError:
        with torch.device("cpu"):
            return look()


@dataclass(frozen=True)
class Call:
    """A module without children as it ran: its name, itself, and the sizes of its maps, () where they are none."""

    name: str
    module: nn.Module
    size_in: tuple[int, ...]
    size_out: tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """What one pass found.

    Args:
        layout: of the network's own features.
        channels: of the feature map.
        size: (H, W) of the feature map.
        calls: modules without children, in the order in which they ran.
        called: names of all modules that ran.
        unused: names of the parameters that the feature map does not depend on.
    """

    layout: FeatureLayout
    channels: int
    size: tuple[int, int]
    calls: tuple[Call, ...]
    called: frozenset[str]
    unused: frozenset[str]


def _double(net: nn.Module) -> nn.Module:
    """The network again, with parameters and buffers that are shapes alone: what a pass leaves in it is not left in ours.

    Some networks keep what they computed in their first pass, such as a table of positions, for all that follow.
    """
    shapes: dict[int, Tensor] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        shape = torch.empty_like(tensor, device="meta")
        shapes[id(tensor)] = nn.Parameter(shape, tensor.is_floating_point()) if isinstance(tensor, nn.Parameter) else shape
    return copy.deepcopy(net, shapes)  # which takes what is in the second argument for copied already


def _map_size(value: Any) -> tuple[int, ...]:
    return tuple(value.shape[2:]) if isinstance(value, Tensor) and value.ndim == 4 else ()


def _record(net: nn.Module, double: nn.Module, calls: list[Call], called: set[str]) -> None:
    """Note what runs in the double, under the names and as the modules of the network itself."""

    def record(name: str, module: nn.Module) -> Any:
        leaf = next(module.children(), None) is None

        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            called.add(name)
            if leaf:
                calls.append(Call(name, module, _map_size(inputs[0]) if inputs else (), _map_size(output)))

        return hook

    for name, module in net.named_modules():
        double.get_submodule(name).register_forward_hook(record(name, module))


def probe(net: nn.Module, image_shape: tuple[int, int, int], name: str, find_unused: bool = True) -> Probe:
    """Run ``net.forward_features`` once on the meta device, where nothing is computed and nothing is copied.

    Args:
        net: network with ``forward_features``; its parameters stay as and where they are.
        image_shape: (channels, height, width) that the network takes.
        name: of the network, for errors.
        find_unused: also look for parameters that the map does not depend on, which takes a backward pass.

    Raises:
        ValueError: if the network gives no feature map, or does not run on such images.
    """
    if not hasattr(net, "forward_features"):
        raise ValueError(f"backbone {name!r} has no forward_features, so no feature map: choose another backbone")
    calls: list[Call] = []
    called: set[str] = set()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            # in evaluation: batch statistics of a single image, dropout and stochastic depth are no part of the question
            double = _double(net).eval()
            _record(net, double, calls, called)
            own = double.forward_features(torch.empty(1, *image_shape, device="meta"))  # type: ignore[operator]
            layout = detect_layout(double, own, name)
            features = layout.to_map(own, double, image_shape[1:])
            parameters = dict(double.named_parameters())
            gradients: tuple[Tensor | None, ...] = ()
            if find_unused:
                gradients = torch.autograd.grad(features.sum(), list(parameters.values()), allow_unused=True)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"backbone {name!r} does not run on images of {' × '.join(map(str, image_shape))}: {reason}"
        ) from error
    unused = frozenset(key for key, g in zip(parameters, gradients, strict=False) if g is None)
    return Probe(
        layout,
        features.shape[1],
        (features.shape[2], features.shape[3]),
        tuple(calls),
        frozenset(called),
        unused,
    )
