"""Sample covariance of a feature map, and the upper triangle as a vector."""

import math

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError
from eigengrain.functional.inputs import (
    check_compute_dtype,
    check_features,
    check_floating,
    check_square,
    full_precision,
    output_dtype,
    to_compute,
)


def centre(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    r"""Features as the factor of their covariance, :math:`X_c = (X - \bar X)/\sqrt N`, shape (B, C, N).

    The first position is subtracted before the mean, so that a constant channel becomes exactly zero; ``x - x.mean()``
    would leave rounding noise that a square root magnifies.
    """
    x = to_compute(x.flatten(2), dtype)
    return _less_mean(x - x[..., :1], 1 / math.sqrt(x.shape[-1]))


def _less_mean(x: Tensor, factor: float | Tensor) -> Tensor:
    # in place, on memory that belongs to the caller: on a CPU a new allocation costs as much as the arithmetic
    return x.sub_(x.mean(-1, keepdim=True)).mul_(factor)


def centre_in_range(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """:func:`centre`, in float32 divided by a power of two (B, 1), which is returned, so that squares stay in its range."""
    if dtype == torch.float64:
        return centre(x, dtype), None
    x = to_compute(x.flatten(2).contiguous(), dtype)
    x = x - x[..., :1]
    scale = power_of_two(x)  # without the size of a constant channel, beside which the others may be small
    return _less_mean(x, (1 / (scale * math.sqrt(x.shape[-1]))).unsqueeze(-1)), scale


def power_of_two(x: Tensor, *, spread: bool = False) -> Tensor:
    """The power of two (B, 1) that tensors (B, C, N) are divided by in float32, so that their largest entry is about 1.

    With ``spread`` that is so for the largest difference of two entries of a row.
    """
    if x.is_cuda or spread:  # one pass instead of two; on a CPU aminmax is slower than both
        low, high = (each.float() for each in x.aminmax(dim=-1))
        largest = (high - low if spread else torch.maximum(high, -low)).amax(1, keepdim=True)
    else:
        largest = torch.maximum(x.amax((1, 2)), -x.amin((1, 2))).unsqueeze(-1)
    return largest.log2().floor().clamp(-120, 120).exp2()


def covariance_in_range(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """:func:`covariance`, in float32 of features divided by a power of two (B, 1, 1), which is returned."""
    if dtype == torch.float64:
        return covariance(x, dtype=dtype), None
    x = to_compute(x.flatten(2), dtype)
    scale = power_of_two(x.detach()).unsqueeze(-1)
    return covariance(x / scale, dtype=dtype), scale


def outer_product(xc: Tensor) -> Tensor:
    """X Xᵀ (B, d, d) of (B, d, N), without gradient.

    Libraries have no batched product that uses the symmetry. On a CPU it is faster to copy the lower left quarter from the
    upper right one; on CUDA one large product is faster.
    """
    d = xc.shape[-2]
    if xc.is_cuda or d < 128:
        return xc @ xc.mT
    upper, lower = xc[..., : d // 2, :], xc[..., d // 2 :, :]
    out = xc.new_empty(*xc.shape[:-1], d)
    out[..., : d // 2, :] = upper @ xc.mT
    out[..., d // 2 :, : d // 2] = out[..., : d // 2, d // 2 :].mT
    out[..., d // 2 :, d // 2 :] = lower @ lower.mT
    return out


def covariance(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Centred sample covariance of a feature map (Eq. 2 of the paper), without an N × N centring matrix.

    .. math:: P = \frac1N (X - \bar X)(X - \bar X)^T

    Args:
        x: features, (B, C, H, W) or (B, C, N), any floating dtype.
        dtype: dtype of the result. None gives float64 if ``x`` is float64 and float32 otherwise, computed in float64;
            ``torch.float32`` also computes in float32. A float32 covariance has lost eigenvalues below 1e-7 of the
            largest: request float64 to take functions of it, or use :func:`sqrt_covariance`, which starts from features.
            A float64 result for features on MPS, which has no float64, is on the CPU.

    Returns:
        (B, C, C), symmetric positive semi-definite.

    Example:
        >>> covariance(torch.tensor([[[1.0, 3.0], [2.0, 2.0]]]))
        tensor([[[1., 0.],
                 [0., 0.]]])
    """
    check_features(x)
    if dtype is not None:
        check_compute_dtype(dtype)
    xc = centre(x, torch.float32 if dtype == torch.float32 else torch.float64)
    with full_precision(xc):
        p = xc @ xc.mT
    dtype = dtype or output_dtype(x)
    return p if dtype == torch.float64 else p.to(x.device, dtype)


def _isometric_weights(d: int, like: Tensor, power: int) -> Tensor:
    weights = torch.full((d, d), math.sqrt(2.0) ** power, dtype=like.dtype, device=like.device)
    return weights.fill_diagonal_(1.0)


def triu_vector(matrix: Tensor, *, isometric: bool = False) -> Tensor:
    r"""Upper triangle of symmetric matrices, row by row, as a vector (*, d(d+1)/2) of the same dtype.

    Args:
        matrix: (*, d, d).
        isometric: multiply off-diagonal entries by :math:`\sqrt2`, so that the norm of the vector is the Frobenius norm
            of the matrix. The paper does not.

    Example:
        >>> triu_vector(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([1., 2., 3.])
    """
    check_square(matrix, "matrix")
    d = matrix.shape[-1]
    if isometric:
        matrix = matrix * _isometric_weights(d, matrix, 1)
    row, col = torch.triu_indices(d, d, device=matrix.device)
    return matrix.flatten(-2).index_select(-1, row * d + col)


def matrix_from_triu(vector: Tensor, *, isometric: bool = False) -> Tensor:
    """Symmetric matrices from their upper triangles: the inverse of :func:`triu_vector`.

    Example:
        >>> matrix_from_triu(torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2.],
                [2., 3.]])
    """
    check_floating(vector, "vector")
    length = vector.shape[-1] if vector.ndim else 0
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if length == 0 or d * (d + 1) // 2 != length:
        raise ArgumentError("vector", "must have a length d(d+1)/2 in its last dimension", tuple(vector.shape))
    index = torch.arange(d, device=vector.device)
    low, high = torch.minimum(index[:, None], index), torch.maximum(index[:, None], index)
    place = low * d - low * (low - 1) // 2 + high - low  # row i starts at i·d − i(i−1)/2 in the vector, with column i
    matrix = vector.index_select(-1, place.flatten()).unflatten(-1, (d, d))
    return matrix * _isometric_weights(d, matrix, -1) if isometric else matrix
