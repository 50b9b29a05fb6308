"""Change the strides of a network: remove the last one for a larger map, or move those of a ResNet."""

from typing import Any, Literal

from timm.layers import BlurPool2d, Conv2dSame
from torch import Tensor, nn
from torch.nn import functional as F

from eigengrain.errors import ArgumentError
from eigengrain.models.backbone import Call, Probe, has_fixed_size, probe

StrideOn = Literal["3x3", "1x1"]


def edit_strides(
    net: nn.Module, probed: Probe, image_shape: tuple[int, int, int], name: str, last_stride: int | None, stride_on: str
) -> Probe:
    """Apply ``stride_on`` and ``last_stride`` to a network, in place, and probe it again if anything changed."""
    if last_stride not in (None, 1, 2):
        raise ArgumentError("last_stride", "must be None (unchanged), 1 or 2", last_stride)
    if stride_on not in ("3x3", "1x1"):
        raise ArgumentError("stride_on", "must be '3x3' or '1x1'", stride_on)
    if stride_on == "1x1":
        stride_on_first_1x1(net, name)
        probed = probe(net, image_shape, name, find_unused=False)
    if last_stride == 1:
        probed = remove_last_stride(net, probed, image_shape, name)
    return probed


def stride_on_first_1x1(net: nn.Module, name: str) -> None:
    """Move the stride of the stages ``layer2`` to ``layer4`` from the 3 × 3 to the first 1 × 1 convolution.

    The first ResNets had it there, and weights converted from Caffe or Keras expect it.
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
            problem = f"is for ResNets, and {stage} of {name!r} does not begin with a bottleneck that strides on its 3 × 3"
            raise ArgumentError("stride_on", problem, "1x1", "leave it out")
        first.stride, second.stride = (2, 2), (1, 1)


def remove_last_stride(net: nn.Module, probed: Probe, image_shape: tuple[int, int, int], name: str) -> Probe:
    """Remove the network's last halving of the map; kernels, weights and dilation stay as they are.

    Convolutions keep their kernel and lose their stride; pooling that only halves is removed. The size of the new map is
    checked: it must be the size before the halving.

    Raises:
        ArgumentError: if the last halving is not a stride of 2 that can be removed.
    """
    halving = _last_halving(probed)
    if not halving:
        raise _refusal(net, name, "its last stage does not halve the map by a stride")
    for call in halving:
        parent, _, child = call.name.rpartition(".")
        if hasattr(net.get_submodule(parent), "rel_pos_h"):  # an index beyond its end would only fail with data
            raise _refusal(net, name, f"{parent} has a table of relative positions for the smaller map")
        replacement = _without_stride(call.module)
        if replacement is None:
            raise _refusal(net, name, f"{call.name} needs another padding at stride 1")
        setattr(net.get_submodule(parent), child, replacement)
    try:
        after = probe(net, image_shape, name, find_unused=False)
    except ValueError as error:
        raise _refusal(net, name, "the sizes of its branches would no longer agree") from error
    if after.size != halving[0].size_in:
        raise _refusal(net, name, f"the map would be {after.size}, not {halving[0].size_in}")
    return after


def _last_halving(probed: Probe) -> list[Call]:
    """The strided modules of one stage that halve the map to its final size."""

    def halves(call: Call) -> bool:
        return (
            call.size_out == probed.size
            and hasattr(call.module, "stride")
            # without padding up to 2 pixels are lost at an edge
            and all(2 * out - 1 <= size <= 2 * out + 2 for size, out in zip(call.size_in, probed.size, strict=False))
            and len(call.size_in) == 2
            and call.size_in != probed.size
        )

    calls = [call for call in probed.calls if halves(call)]
    # a strided side branch of an earlier stage, such as spatially reduced attention, keeps its stride
    stages = [(call.name.split(".")[:2], call.size_in) for call in calls]
    return [call for call, stage in zip(calls, stages, strict=True) if stage == stages[-1]]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _without_stride(module: nn.Module) -> nn.Module | None:
    """The module at stride 1 with an output as large as its input, or None if that needs more than another stride."""
    if isinstance(module, BlurPool2d | Conv2dSame):  # they compute their padding from the stride
        module.stride = 1 if isinstance(module, BlurPool2d) else (1, 1)
        return module
    if not isinstance(module, nn.Conv2d | nn.AvgPool2d | nn.MaxPool2d):
        return None
    kernel, padding = _pair(module.kernel_size), module.padding
    centred = not isinstance(padding, str) and all(2 * p + 1 == k for p, k in zip(_pair(padding), kernel, strict=True))
    if centred and (not isinstance(module, nn.Conv2d) or module.dilation == (1, 1)):
        module.stride = (1, 1)
        return module
    if isinstance(module, nn.Conv2d):
        return EvenConv2d.like(module) if kernel == (2, 2) and _pair(padding) == (0, 0) else None
    return nn.Identity()  # pooling without a centre pixel only halves


class EvenConv2d(nn.Conv2d):
    """A 2 × 2 convolution at stride 1 that pads one row and one column of zeros, so that the map keeps its size."""

    @classmethod
    def like(cls, conv: nn.Conv2d) -> "EvenConv2d":
        """Convert a convolution; the parameters are shared with it."""
        like, bias = conv.weight, conv.bias is not None
        even = cls(
            conv.in_channels, conv.out_channels, 2, groups=conv.groups, bias=bias, device=like.device, dtype=like.dtype
        )
        even.weight, even.bias = conv.weight, conv.bias
        return even

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


def _refusal(net: nn.Module, name: str, reason: str) -> ArgumentError:
    remedy = "set a larger {img_size} for a larger map" if has_fixed_size(net) else "use larger images for a larger map"
    return ArgumentError("last_stride", f"cannot be 1 for backbone {name!r} ({reason})", remedy=remedy)
