"""CUDA graphs for functions that are many small kernels: the launches are recorded once and replayed.

At a batch of 10 matrices of size 256 the products of a square root take less time on an H200 than their launches.
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

#: shapes remembered by each function; a training run needs two, its batch and the last smaller one
_REMEMBERED = 4
#: a shape is recorded when it comes for the third time: what is seen once or twice is not worth the memory
_WORTH_IT = 2


@functools.cache
def _pool(device: torch.device, stream: int) -> Any:
    """Memory that recordings of a stream share: they run one after the other, and their outputs are copied at once."""
    return torch.cuda.graph_pool_handle()


class _Recording:
    """A captured call: its own copies of the inputs, and outputs that the next replay overwrites."""

    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]):
        device = tensors[0].device
        current = torch.cuda.current_stream(device)
        # an evaluation may come first, and what is made in its inference mode could not be written by a training
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = tuple(t.clone() for t in tensors)
            stream = torch.cuda.Stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries make their workspaces before the capture, not in it
                function(*self.inputs, **options)
            current.wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            # other threads, such as one that pins the next batch, may go on while this one records
            how = {"pool": _pool(device, current.cuda_stream), "capture_error_mode": "thread_local"}
            with torch.cuda.device(device), torch.cuda.graph(self.graph, **how):
                self.outputs = function(*self.inputs, **options)

    def replay(self, tensors: tuple[Tensor, ...]) -> Any:
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.outputs.clone() if isinstance(self.outputs, Tensor) else tuple(t.clone() for t in self.outputs)


def replayed(function: F) -> F:
    """Record and replay a function of CUDA tensors without side effects, shape by shape; elsewhere just call it.

    It is called plainly while compiling, under ``torch.func`` transforms, and inside a capture of the caller's own.
    """
    seen: OrderedDict[Any, _Recording | int | None] = OrderedDict()  # None: it could not be recorded

    @functools.wraps(function)
    def call(*tensors: Tensor, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not _recordable(tensors[0]):
            return function(*tensors, **options)
        shapes = tuple((t.shape, t.dtype) for t in tensors)
        device = tensors[0].device
        key = (device, torch.cuda.current_stream(device).cuda_stream, shapes, tuple(options.items()))
        known = seen.pop(key, 0)
        if isinstance(known, int):
            known = known + 1 if known < _WORTH_IT else _record(function, tensors, options)
        seen[key] = known
        if len(seen) > _REMEMBERED:
            seen.popitem(last=False)
        return known.replay(tensors) if isinstance(known, _Recording) else function(*tensors, **options)

    return cast(F, call)


def side_by_side(first: Callable[[], A], second: Callable[[], B], where: Tensor) -> tuple[A, B]:
    """Results of both; in a recording on CUDA they do not wait for each other, and fill the device together."""
    if not where.is_cuda or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        return first(), second()
    stream, beside = torch.cuda.current_stream(where.device), torch.cuda.Stream(where.device)
    beside.wait_stream(stream)
    with torch.cuda.stream(beside):
        other = second()
    own = first()
    stream.wait_stream(beside)
    return own, other


def _record(function: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> _Recording | None:
    try:
        return _Recording(function, tensors, options)
    except RuntimeError as error:  # no memory for it, or a library that cannot be captured
        warnings.warn(f"CUDA graph not recorded, kernels are launched one by one ({error})", stacklevel=3)
        return None


def _recordable(tensor: Tensor) -> bool:
    return tensor.is_cuda and not in_transform(tensor) and not torch.cuda.is_current_stream_capturing()
