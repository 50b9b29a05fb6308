"""One pass through a network without data, on the meta device: what runs, what it makes, and what is never used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eigengrain.models.layout import FeatureLayout, detect_layout
from eigengrain.models.modes import evaluating


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


class _FeatureMap(nn.Module):
    """``net.forward_features`` as a module's forward, which is what functional_call runs."""

    layout: FeatureLayout

    def __init__(self, net: nn.Module, name: str):
        super().__init__()
        self.net, self.name = net, name

    def forward(self, x: Tensor) -> Tensor:
        features = self.net.forward_features(x)  # type: ignore[operator]
        self.layout = detect_layout(self.net, features, self.name)
        return self.layout.to_map(features, self.net, (x.shape[-2], x.shape[-1]))


def _places(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those of each module once.

    ``functional_call`` puts them back in the order in which it took them out. A module that is shared has several names;
    taken out under all of them, it would keep what was lent to it.
    """
    return {
        key: tensor
        for prefix, module in net.named_modules()
        for tensors in (module.named_parameters, module.named_buffers)
        for key, tensor in tensors(prefix, recurse=False, remove_duplicate=False)
    }


def _double(tensor: Tensor) -> Tensor:
    trained = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return torch.empty_like(tensor, device="meta").requires_grad_(trained)


def _map_size(value: Any) -> tuple[int, ...]:
    return tuple(value.shape[2:]) if isinstance(value, Tensor) and value.ndim == 4 else ()


@contextmanager
def _recorded(net: nn.Module, calls: list[Call], called: set[str]) -> Iterator[None]:
    def record(name: str, leaf: bool) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            called.add(name)
            if leaf:
                calls.append(Call(name, module, _map_size(inputs[0]) if inputs else (), _map_size(output)))

        return hook

    handles = [
        module.register_forward_hook(record(name, leaf=next(module.children(), None) is None))
        for name, module in net.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    wrapper = _FeatureMap(net, name)
    calls: list[Call] = []
    called: set[str] = set()
    try:
        # in evaluation: batch statistics of a single image, dropout and stochastic depth are no part of the question
        with evaluating(net), torch.inference_mode(False), torch.enable_grad(), _recorded(net, calls, called):
            places = _places(wrapper)
            doubles = {tensor: _double(tensor) for tensor in places.values()}
            parameters = {key: doubles[parameter] for key, parameter in wrapper.named_parameters()}
            x = torch.empty(1, *image_shape, device="meta")
            swapped = {key: doubles[tensor] for key, tensor in places.items()}
            features = torch.func.functional_call(wrapper, swapped, (x,), tie_weights=False)
            gradients: tuple[Tensor | None, ...] = ()
            if find_unused:
                gradients = torch.autograd.grad(features.sum(), list(parameters.values()), allow_unused=True)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"backbone {name!r} does not run on images of {' × '.join(map(str, image_shape))}: {reason}"
        ) from error
    unused = frozenset(key.removeprefix("net.") for key, g in zip(parameters, gradients, strict=False) if g is None)
    return Probe(
        wrapper.layout,
        features.shape[1],
        (features.shape[2], features.shape[3]),
        tuple(calls),
        frozenset(called),
        unused,
    )
