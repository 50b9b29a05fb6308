r"""The factors :math:`X_c = U Y` of features in float32, U orthogonal and the rows of Y orthogonal, by eigendecompositions.

The covariance squares the condition number: in float32 its eigenvectors are lost where :math:`\sigma_j` is below a few
thousandths of :math:`\sigma_1`. The rows :math:`Y = U^T X_c` still contain those directions, mixed with each other and with
a little of the larger ones. Rows that are shorter than 1/64 of the longest are therefore made orthogonal to the longer
ones, and their own covariance, whose largest eigenvalue is 4096 times smaller, is decomposed again:

.. math:: W = Y_2 Y_1^T \Sigma_1^{-2}, \qquad Y_2 \leftarrow Z^T (Y_2 - W Y_1), \qquad Y_1 \leftarrow Y_1 + W^T Y_2,

with Z the eigenvectors of the covariance of :math:`Y_2 - W Y_1`, and the same for the rows of :math:`U^T`. W is of the
order of :math:`64^2 \varepsilon`, so that U stays orthogonal. No gap between eigenvalues is divided by.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor

from eigengrain.functional.eigen import all_finite, decompose, workers
from eigengrain.functional.inputs import LinAlgError

#: a level decomposes again the rows that are shorter than this power of the longest one
_STEP = 2.0**-6
#: levels on a CPU, where only the rows in question are decomposed, and elsewhere, where the sizes are fixed
_LEVELS, _FIXED_LEVELS = 2, 1


def length_floor(lengths: Tensor, channels: int) -> Tensor:
    r"""Threshold at or below which lengths of rows of :math:`U^T X_c` are zero, :math:`4\sqrt d\,\varepsilon\,\sigma_1`.

    The counterpart of :func:`eigengrain.functional.rounding_floor` in float32, where lengths are measured on the features
    and not squared. For exact zeros products of d terms leave up to 1.6 √d ε σ_1. Lengths are (*, r), the result is (*, 1).
    """
    return 4 * math.sqrt(channels) * torch.finfo(lengths.dtype).eps * lengths.amax(-1, keepdim=True)


def resolve(rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonal ``rows`` of Uᵀ (B, m, m) and Y = UᵀX_c (B, m, n), resolved and in descending order of the lengths of Y.

    A CPU decomposes the rows in question, at most twice. Other devices would have to wait for their number: they
    decompose the whole matrix, with the other rows masked, once.
    """
    if y.device.type != "cpu":
        return resolve_fixed(rows, y)
    rows, y = _resolve_op(rows, y)
    return rows, y


@torch.library.custom_op("eigengrain::resolve", mutates_args=())
def _resolve_op(rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a worker could not write to tensors made in the inference mode of the caller
        out_rows, out_y = (t.reshape(-1, *t.shape[-2:]).clone(memory_format=torch.contiguous_format) for t in (rows, y))
    threads = min(torch.get_num_threads(), len(out_y))
    if threads < 2 or y.shape[-2] < 32:
        list(map(_resolve_sample, out_rows, out_y))
    else:
        list(workers(torch.get_num_threads(), os.getpid()).map(_resolve_sample, out_rows, out_y))
    return out_rows.reshape(rows.shape), out_y.reshape(y.shape)


@_resolve_op.register_fake
def _(rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), y.new_empty(y.shape)


@torch.library.register_vmap("eigengrain::resolve")
def _(info: Any, in_dims: tuple[int | None, int | None], rows: Tensor, y: Tensor) -> Any:
    assert in_dims[0] is not None
    assert in_dims[1] is not None
    return _resolve_op(rows.movedim(in_dims[0], 0), y.movedim(in_dims[1], 0)), (0, 0)


def _sort(rows: Tensor, y: Tensor) -> Tensor:
    """Sort the rows of one sample in place by the lengths of y, which are returned."""
    lengths = torch.linalg.vector_norm(y, dim=-1)
    if len(lengths) > 1 and bool((lengths.diff() > 0).any()):
        lengths, order = lengths.sort(descending=True)
        rows.copy_(rows[order])
        y.copy_(y[order])
    return lengths


def _resolve_sample(rows: Tensor, y: Tensor) -> None:
    """Resolve one sample, (m, m) and (m, n), in place."""
    for level in range(1, _LEVELS + 1):
        lengths = _sort(rows, y)
        longest = float(lengths[0])
        end = int((lengths > length_floor(lengths, len(y))).sum())
        begin = int((lengths > _STEP**level * longest).sum())
        if end <= begin:
            return
        g = y[begin:end] @ y[:end].mT
        w = g[:, :begin] / lengths[:begin].square()
        try:
            z = torch.linalg.eigh(g[:, begin:] - w @ g[:, :begin].mT)[1].flip(-1).mT
        except LinAlgError:
            return
        if not all_finite(z):  # the rows are orthogonal as far as the first decomposition has made them so
            return
        change = torch.cat([-(z @ w), z], -1)
        for t in (rows, y):
            short = change @ t[:end]
            t[:begin].addmm_(w.mT, t[begin:end])
            t[begin:end] = short
    _sort(rows, y)


def _take(t: Tensor, order: Tensor) -> Tensor:
    return t.gather(-2, order.unsqueeze(-1).expand_as(t))


def resolve_fixed(rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`resolve` for a batch without waiting for the device: what is not decomposed again is masked."""
    m = y.shape[-2]
    eye = torch.eye(m, dtype=y.dtype, device=y.device)
    for level in range(1, _FIXED_LEVELS + 1):
        lengths, order = torch.linalg.vector_norm(y, dim=-1).sort(-1, descending=True)
        alive = lengths > length_floor(lengths, m)
        rows, y = _take(rows, order), torch.where(alive.unsqueeze(-1), _take(y, order), 0.0)
        tail = alive & (lengths <= _STEP**level * lengths[..., :1])
        g = y @ y.mT
        head = torch.where(alive & ~tail, lengths.square(), 1.0)
        w = torch.where(tail.unsqueeze(-1) & (alive & ~tail).unsqueeze(-2), g / head.unsqueeze(-2), 0.0)
        both = tail.unsqueeze(-1) & tail.unsqueeze(-2)
        block = torch.where(both, g - w @ g, 0.0)
        # the longer rows come first in descending order, with eigenvalues as large as any of the block
        top = 2 * block.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        block = block + torch.diag_embed(torch.where(alive, torch.where(tail, 0.0, top), -top))
        z = torch.where(both, decompose(block).vectors.mT, torch.where(tail.unsqueeze(-1), 0.0, eye))
        change = z - z @ w + w.mT
        rows, y = change @ rows, change @ y
    lengths, order = torch.linalg.vector_norm(y, dim=-1).sort(-1, descending=True)
    return _take(rows, order), _take(y, order)
