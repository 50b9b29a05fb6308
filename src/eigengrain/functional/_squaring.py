r"""Repeated squaring :math:`E \leftarrow 2E + E^2` of symmetric matrices on CUDA, each as often as it needs.

How often depends on the norm of a matrix, which is on the device: a loop on the host would either wait for it or square as
often as the largest norm could need. Here all launches are made, and a matrix that is done leaves them at once.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

#: sides of a tile of the result, and of the steps along the sum
_TILE, _DEPTH = 64, 32


@functools.cache
def _kernel() -> Any:
    """The kernel; ImportError where there is no Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["turn"])
    def square(source, target, times, turn, n: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
        item = tl.program_id(1)
        across = tl.cdiv(n, TILE)
        row, column = tl.program_id(0) // across, tl.program_id(0) % across
        # the lower triangle is written with the upper one
        if (turn < tl.load(times + item)) & (row <= column):
            first = item.to(tl.int64) * n * n
            i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
            inside = (i < n)[:, None] & (j < n)[None, :]
            total = tl.zeros((TILE, TILE), dtype=tl.float64)
            for k0 in range(0, n, DEPTH):
                k = k0 + tl.arange(0, DEPTH)
                left = tl.load(source + first + i[:, None] * n + k[None, :], (i < n)[:, None] & (k < n)[None, :], 0.0)
                right = tl.load(source + first + k[:, None] * n + j[None, :], (k < n)[:, None] & (j < n)[None, :], 0.0)
                total = tl.dot(left, right, total, input_precision="ieee", out_dtype=tl.float64)
            total += 2 * tl.load(source + first + i[:, None] * n + j[None, :], inside, 0.0)
            tl.store(target + first + i[:, None] * n + j[None, :], total, inside)
            if row < column:
                tl.store(target + first + j[:, None] * n + i[None, :], tl.trans(total), tl.trans(inside))

    return square


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernel runs there: tried once, with a warning where Triton is there and fails."""
    try:
        square_often(
            torch.zeros(1, 16, 16, dtype=torch.float64, device=device), torch.ones(1, dtype=torch.int32, device=device), 1
        )
    except ImportError:
        return False
    except Exception as error:  # what a compiler raises is of many kinds
        warnings.warn(f"Triton cannot compile for {device}, slower products are used ({error})", stacklevel=2)
        return False
    return True


def square_often(e: Tensor, times: Tensor, most: int) -> Tensor:
    """E after ``times`` squarings.

    Args:
        e: symmetric (B, d, d), float64, contiguous.
        times: (B,), int32; of each matrix, from 0 to ``most``.
        most: launches that are made.
    """
    n = e.shape[-1]
    across = -(-n // _TILE)
    source, target = e, torch.empty_like(e)
    for turn in range(most):
        _kernel()[(across * across, len(e))](source, target, times, turn, n=n, TILE=_TILE, DEPTH=_DEPTH)
        source, target = target, source
    # matrices that left after an odd number of turns are in the other of the two
    even, odd = (source, target) if most % 2 == 0 else (target, source)
    return torch.where((times % 2 == 0)[:, None, None], even, odd)
