"""CUDA graphs for functions made of many small kernels: the launches are recorded once and replayed.

For a batch of 10 matrices of size 256 on an H200 the products of a square root take less time than their launches.
"""

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from eigengrain.functional.inputs import in_transform

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")
B = TypeVar("B")

#: shapes remembered by each function; a training run needs two: its batch, and the smaller last one
_REMEMBERED = 4
#: a shape is recorded at its third call: one or two calls are not worth the memory
_WORTH_IT = 2


@functools.cache
def _pool(device: torch.device, stream: int) -> Any:
    """Memory shared by the recordings of a stream: they run one after the other, and their outputs are copied at once."""
    return torch.cuda.graph_pool_handle()


class _Recording:
    """A captured call: its own copies of the inputs, and outputs that the next replay overwrites."""

    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]):
        device = tensors[0].device
        current = torch.cuda.current_stream(device)
        # an evaluation may come first, and training could not write to tensors made in its inference mode
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = tuple(t.clone() for t in tensors)
            stream = torch.cuda.Stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries must allocate their workspaces before the capture
                function(*self.inputs, **options)
            current.wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as one that pins the next batch, may call CUDA during the capture
            options_of_graph = {"pool": _pool(device, current.cuda_stream), "capture_error_mode": "thread_local"}
            with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=stream, **options_of_graph):
                self.outputs = function(*self.inputs, **options)

    def replay(self, tensors: tuple[Tensor, ...]) -> Any:
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.outputs.clone() if isinstance(self.outputs, Tensor) else tuple(t.clone() for t in self.outputs)


def replayed(function: F) -> F:
    """Record and replay a function of CUDA tensors without side effects, one recording per shape.

    The function is called directly for other tensors, while compiling, under ``torch.func`` transforms, and inside a
    capture by the caller.
    """
    seen: OrderedDict[Any, _Recording | int | None] = OrderedDict()  # calls so far, or the recording; None if it failed

    @functools.wraps(function)
    def call(*tensors: Tensor, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not _recordable(tensors[0]):
            return function(*tensors, **options)
        shapes = tuple((t.shape, t.dtype) for t in tensors)
        device = tensors[0].device
        key = (device, torch.cuda.current_stream(device).cuda_stream, shapes, tuple(options.items()))
        entry = seen.pop(key, 0)
        if isinstance(entry, int):
            entry = entry + 1 if entry < _WORTH_IT else _record(function, tensors, options)
        seen[key] = entry
        if len(seen) > _REMEMBERED:
            seen.popitem(last=False)
        if isinstance(entry, _Recording):
            return entry.replay(tensors)
        return function(*tensors, **options)

    return cast(F, call)


def side_by_side(first: Callable[[], A], second: Callable[[], B], device_of: Tensor) -> tuple[A, B]:
    """Results of both functions; in a recording on CUDA they run concurrently on the device of a tensor."""
    if not device_of.is_cuda or torch.compiler.is_compiling() or not capturing(device_of.device):
        return first(), second()
    stream, beside = torch.cuda.current_stream(device_of.device), torch.cuda.Stream(device_of.device)
    beside.wait_stream(stream)
    with torch.cuda.stream(beside):
        other = second()
    own = first()
    stream.wait_stream(beside)
    return own, other


def _record(function: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> _Recording | None:
    try:
        return _Recording(function, tensors, options)
    except RuntimeError:
        # the allocator frees a pool with its last recording, and refuses it from then on
        _pool.cache_clear()
    try:
        return _Recording(function, tensors, options)
    except RuntimeError as error:  # out of memory, or a library that cannot be captured
        warnings.warn(f"CUDA graph not recorded, kernels are launched one by one ({error})", stacklevel=3)
        return None


def _recordable(tensor: Tensor) -> bool:
    return tensor.is_cuda and not in_transform(tensor) and not capturing(tensor.device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device, which need not be the current device, is being captured."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
