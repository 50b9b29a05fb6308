"""What every function of this package checks about its input, and the precision it then works in.

The spectral part works in float64 unless asked otherwise: the square root of a covariance with condition number 1e12
has no correct digit in float32. What comes out is float64 if float64 went in, and float32 otherwise.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # missing from torch's own __all__

COMPUTE_DTYPES = (torch.float64, torch.float32)


def check_floating(x: Tensor, who: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{who} expects a torch.Tensor, got {type(x).__name__}: convert with torch.as_tensor(...)")
    if not x.is_floating_point():
        raise ValueError(f"{who} expects real floating-point values, got {x.dtype}: convert with .float()")


def check_features(x: Tensor, who: str) -> None:
    """Features are (B, C, H, W) or (B, C, N)."""
    check_floating(x, who)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{who} expects features of shape (B, C, H, W) or (B, C, N), got {tuple(x.shape)}: "
            "add the batch dimension with x.unsqueeze(0) or flatten what follows the channels with x.flatten(2)"
        )
    if 0 in x.shape[1:]:
        raise ValueError(f"{who} expects at least one channel and one position, got shape {tuple(x.shape)}")


def check_square(matrix: Tensor, who: str) -> None:
    """Symmetric matrices are (*, d, d)."""
    check_floating(matrix, who)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(
            f"{who} expects square matrices of shape (*, d, d), got {tuple(matrix.shape)}: "
            "features go through covariance(x) first"
        )


def check_compute_dtype(dtype: torch.dtype, who: str) -> None:
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"{who} computes in torch.float64 or torch.float32, got dtype={dtype}")


def output_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def in_transform(x: Tensor) -> bool:
    """Whether vmap or another transform of torch.func is at work on it."""
    return bool(torch._C._functorch.maybe_get_level(x) != -1)  # type: ignore[attr-defined]


@cache
def say_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def to_compute(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Cast to the working precision, differentiably, and leave devices that do not have it."""
    if x.device.type == "mps" and dtype == torch.float64:
        say_once("MPS has no float64: the spectral part runs on the CPU. Ask for dtype=torch.float32 to stay on MPS.")
        x = x.cpu()
    return x.to(dtype)


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """Keep autocast and TF32 out of float32 matrix products; both leave float64 alone, so there it does nothing."""
    if x.dtype == torch.float64:
        yield
        return
    tf32 = x.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    with torch.autocast(x.device.type, enabled=False):
        try:
            if tf32:
                torch.backends.cuda.matmul.allow_tf32 = False
            yield
        finally:
            if tf32:
                torch.backends.cuda.matmul.allow_tf32 = True
