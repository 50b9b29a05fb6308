"""Checks of the input, and the precision that the functions of this package compute in.

Spectral functions of a covariance compute in float64: the square root of one with condition number 1e12 has no correct
digit in float32. The square root of features also computes in float32, see :func:`choose_dtype`. The output is float64 if
the input is float64, and float32 otherwise.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.names import DTYPES

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # missing from torch's own __all__

_Function = TypeVar("_Function", bound=Callable[..., object])

COMPUTE_DTYPES = (torch.float64, torch.float32)
MOST_NUMBER = torch.finfo(torch.float64).max


def check_floating(x: Tensor, argument: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(argument, f"must be a torch.Tensor, not {type(x).__name__}", remedy="use torch.as_tensor(...)")
    if not x.is_floating_point():
        raise ArgumentError(argument, "must have a real floating-point dtype", x.dtype, "convert it with .float()")


def check_features(x: Tensor) -> None:
    """Check features, (B, C, H, W) or (B, C, N)."""
    check_floating(x)
    if x.ndim not in (3, 4):
        remedy = "add a batch dimension with x.unsqueeze(0), or flatten the dimensions after the channels with x.flatten(2)"
        raise ArgumentError("x", "must have shape (B, C, H, W) or (B, C, N)", tuple(x.shape), remedy)
    if 0 in x.shape[1:]:
        raise ArgumentError("x", "must have at least one channel and one position", tuple(x.shape))


def check_square(matrix: Tensor, argument: str = "P") -> None:
    """Check square matrices, (*, d, d)."""
    check_floating(matrix, argument)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        remedy = "compute covariance(x) of features first"
        raise ArgumentError(argument, "must have shape (*, d, d)", tuple(matrix.shape), remedy)


def check_compute_dtype(dtype: torch.dtype) -> None:
    if dtype not in COMPUTE_DTYPES:
        raise ArgumentError("dtype", "must be torch.float64 or torch.float32", dtype)


def named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A working precision, also by name; ``auto`` is left to the caller."""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UnknownName("dtype", dtype, DTYPES)
        return torch.float64 if dtype == "float64" else torch.float32
    check_compute_dtype(dtype)
    return dtype


def _constant(function: _Function) -> _Function:
    """:func:`torch.compiler.assume_constant_result`, which would import the compiler, for half of the import time."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: compute capabilities of CUDA devices whose float64 rate is half of the float32 rate: P100, V100, A100, H100 and B200
_FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))


@_constant
def _has_fast_float64(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) in _FAST_FLOAT64


def choose_dtype(device: torch.device | str, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """The working precision of ``dtype="auto"`` for features of a dtype on a device: a fixed rule.

    1. float64 for float64 features.
    2. float64 on CUDA devices that compute it at half of their float32 rate: compute capability 6.0, 7.0, 8.0, 9.0, 10.0.
    3. float32 otherwise: on other GPUs, which have 1/32 or 1/64 of the rate, on MPS, which has no float64, and on a CPU,
       where it takes about two thirds of the time.

    Example:
        >>> choose_dtype("cpu"), choose_dtype("cpu", torch.float64)
        (torch.float32, torch.float64)
    """
    device = torch.device(device)
    if dtype == torch.float64 or (device.type == "cuda" and _has_fast_float64(device.index)):
        return torch.float64
    return torch.float32


def check_integer(value: object, argument: str, most: int | None = None, least: int = 1) -> None:
    """Check an integer of at least 1 and, if ``most`` is given, at most that."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ArgumentError(argument, f"must be an integer {limits}", value)


def check_number(value: object, argument: str, least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> None:
    """Check a real number in [least, most]; NaN, infinity and bool are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = "finite" if most == MOST_NUMBER and least == -most else f"at least {least:g}"
        limits = limits if most == MOST_NUMBER else f"from {least:g} to {most:g}"
        raise ArgumentError(argument, f"must be a number, {limits}", value)


def output_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def in_transform(x: Tensor) -> bool:
    """Whether x is inside vmap or another transform of torch.func."""
    return bool(torch._C._functorch.maybe_get_level(x) != -1)  # type: ignore[attr-defined]


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def to_compute(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Cast to the working precision, differentiably; float64 on MPS, which does not have it, moves to the CPU."""
    if x.device.type == "mps" and dtype == torch.float64:
        warn_once("MPS has no float64: the spectral part runs on the CPU. Use dtype=torch.float32 to stay on MPS.")
        x = x.cpu()
    return x.to(dtype)


def _products(device_type: str) -> Any:
    """torch's setting of float32 matrix products on a device; None if it has none."""
    cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set by a module that replaces itself
    return {"cpu": cpu, "cuda": torch.backends.cuda.matmul}.get(device_type)


def _is_reduced(setting: Any) -> bool:
    return setting is not None and setting.fp32_precision in ("tf32", "bf16")


@_constant
def reduces_float32(device_type: str) -> bool:
    """Whether torch is set to compute float32 products in TF32 or bfloat16 on a device."""
    return _is_reduced(_products(device_type))


class _FullProducts:
    """Float32 matrix products in float32 while any thread is inside: the setting is that of the whole process."""

    def __init__(self, setting: Any):
        self._setting, self._lock, self._inside, self._before = setting, threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if _is_reduced(self._setting):
                self._before, self._setting.fp32_precision = self._setting.fp32_precision, "ieee"
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._before and not self._inside:
                self._before, self._setting.fp32_precision = "", self._before


_FULL_PRODUCTS = {device_type: _FullProducts(_products(device_type)) for device_type in ("cpu", "cuda")}


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """Disable autocast, TF32 and bfloat16 for float32 matrix products; none of them affects float64.

    Compiled code has its own products, which follow the setting of the process, see :func:`reduces_float32`.
    """
    if x.dtype == torch.float64 or x.device.type == "meta":
        yield
        return
    with torch.autocast(x.device.type, enabled=False):
        if torch.compiler.is_compiling() or x.device.type not in _FULL_PRODUCTS:
            yield
            return
        with _FULL_PRODUCTS[x.device.type]:
            yield
