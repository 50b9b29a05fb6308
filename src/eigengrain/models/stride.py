"""Larger feature maps by taking a stride out, never by dilation, and ResNets that stride on another convolution."""

from typing import Any, Literal

from timm.layers import BlurPool2d, Conv2dSame
from torch import Tensor, nn
from torch.nn import functional as F

from eigengrain.models.layout import takes_img_size
from eigengrain.models.probe import Call, Probe, probe

StrideOn = Literal["3x3", "1x1"]


def edit_strides(
    net: nn.Module,
    found: Probe,
    image_shape: tuple[int, int, int],
    name: str,
    last_stride: int | None,
    stride_on: str,
) -> Probe:
    """Apply ``stride_on`` and ``last_stride`` to a network, in place, and probe it again if anything changed.

    Raises:
        ValueError: for values there are not, or a network that cannot follow, with the remedy.
    """
    if last_stride not in (None, 1, 2):
        raise ValueError(f"last_stride must be None (as the backbone is), 1 or 2, got {last_stride!r}")
    if stride_on not in ("3x3", "1x1"):
        raise ValueError(f"stride_on must be '3x3' or '1x1', got {stride_on!r}")
    if stride_on == "1x1":
        stride_on_first_1x1(net, name)
        found = probe(net, image_shape, name, find_unused=False)
    if last_stride == 1:
        found = remove_last_stride(net, found, image_shape, name)
    return found


def stride_on_first_1x1(net: nn.Module, name: str) -> None:
    """Move the stride of the stages ``layer2`` to ``layer4`` from the 3 × 3 to the first 1 × 1 convolution.

    That is where the first ResNets had it, and weights converted from Caffe or Keras expect it.

    Raises:
        ValueError: unless each stage begins with a bottleneck whose 3 × 3 convolution strides.
    """
    for stage in ("layer2", "layer3", "layer4"):
        block = next(getattr(net, stage, nn.Module()).children(), nn.Module())
        first, second = getattr(block, "conv1", None), getattr(block, "conv2", None)
        if not (
            isinstance(first, nn.Conv2d)
            and isinstance(second, nn.Conv2d)
            and first.kernel_size == (1, 1)
            and second.kernel_size == (3, 3)
            and second.stride == (2, 2)
        ):
            raise ValueError(
                f"stride_on='1x1' is for ResNets with bottlenecks, and {stage} of {name!r} begins with none that strides "
                "on its 3 × 3 convolution: leave stride_on out"
            )
        first.stride, second.stride = (2, 2), (1, 1)


def remove_last_stride(net: nn.Module, found: Probe, image_shape: tuple[int, int, int], name: str) -> Probe:
    """Let the network's last halving of the map be none, with kernels, weights and dilation as they are.

    Convolutions keep their kernel and lose their stride; pooling that only halves goes. The result is measured: the new
    map has the size that the old one was made from.

    Raises:
        ValueError: for a network whose last halving is not a stride of 2 that can be taken out.
    """
    halving = _last_halving(found)
    if not halving:
        raise _refusal(net, name, "its last stage does not halve the map by a stride")
    for call in halving:
        parent, _, child = call.name.rpartition(".")
        if hasattr(net.get_submodule(parent), "rel_pos_h"):  # a look beyond its end would show with data only
            raise _refusal(net, name, f"{parent} has a table of relative positions that ends with the map as it is")
        replacement = _without_stride(call.module)
        if replacement is None:
            raise _refusal(net, name, f"{call.name} cannot run at stride 1 without another padding")
        setattr(net.get_submodule(parent), child, replacement)
    try:
        after = probe(net, image_shape, name, find_unused=False)
    except ValueError as error:
        raise _refusal(net, name, "its branches would no longer meet") from error
    if after.size != halving[0].size_in:
        raise _refusal(net, name, f"the map would be {after.size}, not {halving[0].size_in}")
    return after


def _last_halving(found: Probe) -> list[Call]:
    """The strided modules of one stage that take the map from twice its final size to its final size."""

    def halves(call: Call) -> bool:
        return (
            call.size_out == found.size
            and hasattr(call.module, "stride")
            # up to 2 pixels are lost at an edge without padding
            and all(
                2 * after - 1 <= before <= 2 * after + 2 for before, after in zip(call.size_in, found.size, strict=False)
            )
            and len(call.size_in) == 2
            and call.size_in != found.size
        )

    calls = [call for call in found.calls if halves(call)]
    if not calls:
        return []
    # a strided side branch of an earlier stage, such as spatially reduced attention, keeps its stride
    stage = calls[-1].name.split(".")[:2]
    return [call for call in calls if call.name.split(".")[:2] == stage and call.size_in == calls[-1].size_in]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _without_stride(module: nn.Module) -> nn.Module | None:
    """The module at stride 1 with an output as large as its input, or None where that needs more than the stride."""
    if isinstance(module, BlurPool2d | Conv2dSame):  # their padding follows the stride by itself
        module.stride = 1 if isinstance(module, BlurPool2d) else (1, 1)
        return module
    if not isinstance(module, nn.Conv2d | nn.AvgPool2d | nn.MaxPool2d):
        return None
    kernel, padding = _pair(module.kernel_size), module.padding
    centred = not isinstance(padding, str) and all(2 * p + 1 == k for p, k in zip(_pair(padding), kernel, strict=True))
    if isinstance(module, nn.Conv2d):
        if centred and module.dilation == (1, 1):
            module.stride = (1, 1)
            return module
        return EvenConv2d.like(module) if kernel == (2, 2) and _pair(padding) == (0, 0) else None
    if centred:
        module.stride = 1
        return module
    return nn.Identity()  # pooling without a centre pixel is there to halve


class EvenConv2d(nn.Conv2d):
    """A 2 × 2 convolution at stride 1 that keeps the size of the map: one row and one column of zeros at its far edges."""

    @classmethod
    def like(cls, conv: nn.Conv2d) -> "EvenConv2d":
        """The same convolution, with the very same parameters, at stride 1."""
        weight = conv.weight
        even = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,  # type: ignore[arg-type]
            groups=conv.groups,
            bias=conv.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        even.weight, even.bias = conv.weight, conv.bias
        return even

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


def _refusal(net: nn.Module, name: str, reason: str) -> ValueError:
    remedy = "create it with a larger img_size" if takes_img_size(net) else "feed larger images"
    return ValueError(f"last_stride=1 is not possible for backbone {name!r}: {reason}. For a larger map {remedy}")
