"""Sample covariance of a feature map, and the upper triangle as a vector."""

import math

import torch
from torch import Tensor

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

    The first position is subtracted before the mean is: a constant channel then becomes exactly zero, where
    ``x - x.mean()`` would leave rounding noise that a square root magnifies.
    """
    x = to_compute(x.flatten(2), dtype)  # (B, C, N)
    x = x - x[..., :1]
    # in place from here, on memory that is ours: fresh pages for such a map cost a CPU as much as the arithmetic
    return x.sub_(x.mean(-1, keepdim=True)).mul_(1 / math.sqrt(x.shape[-1]))


def outer_product(xc: Tensor) -> Tensor:
    """X Xᵀ (B, d, d) of (B, d, N), without gradient.

    Libraries have no batched product that uses the symmetry. On a CPU it pays to compute the lower left quarter as the
    transpose of the upper right one; on CUDA one large product is faster.
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
        dtype: of the result; float64 if ``x`` is float64 and float32 otherwise when None. It is computed in float64
            unless float32 is named here. A float32 covariance has lost eigenvalues below 1e-7 of the largest: to take
            functions of it, ask for float64, or use :func:`sqrt_covariance`, which starts from the features.

    Returns:
        (B, C, C), symmetric positive semi-definite.

    Raises:
        ValueError: if the shape or the dtype does not fit.

    Example:
        >>> covariance(torch.tensor([[[1.0, 3.0], [2.0, 2.0]]]))
        tensor([[[1., 0.],
                 [0., 0.]]])
    """
    check_features(x, "covariance")
    if dtype is not None:
        check_compute_dtype(dtype, "covariance")
    xc = centre(x, torch.float32 if dtype == torch.float32 else torch.float64)
    with full_precision(xc):
        p = xc @ xc.mT
    return p.to(device=x.device, dtype=dtype or output_dtype(x))


def _triu_positions(d: int, device: torch.device) -> Tensor:
    """Flat positions of the upper triangle, row by row."""
    row, col = torch.triu_indices(d, d, device=device)
    return row * d + col


def _place_in_triu(d: int, device: torch.device) -> Tensor:
    """For each entry of the matrix, flat, its place in the vector: row i starts at i·d − i(i−1)/2, with column i."""
    index = torch.arange(d, device=device)
    low, high = torch.minimum(index[:, None], index), torch.maximum(index[:, None], index)
    return (low * d - low * (low - 1) // 2 + high - low).flatten()


def _isometric_weights(d: int, like: Tensor, power: int) -> Tensor:
    weights = torch.full((d, d), math.sqrt(2.0) ** power, dtype=like.dtype, device=like.device)
    return weights.fill_diagonal_(1.0)


def triu_vector(matrix: Tensor, *, isometric: bool = False) -> Tensor:
    r"""Upper triangle of symmetric matrices, row by row, as a vector of length d(d+1)/2.

    Args:
        matrix: (*, d, d).
        isometric: multiply off-diagonal entries by :math:`\sqrt2`, so that the vector's norm is the matrix's
            Frobenius norm. The paper does not.

    Returns:
        (*, d(d+1)/2), same dtype.

    Example:
        >>> triu_vector(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([1., 2., 3.])
    """
    check_square(matrix, "triu_vector")
    d = matrix.shape[-1]
    if isometric:
        matrix = matrix * _isometric_weights(d, matrix, 1)
    return matrix.flatten(-2).index_select(-1, _triu_positions(d, matrix.device))


def matrix_from_triu(vector: Tensor, *, isometric: bool = False) -> Tensor:
    """Symmetric matrices from their upper triangles: the inverse of :func:`triu_vector`.

    Example:
        >>> matrix_from_triu(torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2.],
                [2., 3.]])
    """
    check_floating(vector, "matrix_from_triu")
    length = vector.shape[-1] if vector.ndim else 0
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if length == 0 or d * (d + 1) // 2 != length:
        raise ValueError(f"matrix_from_triu expects vectors of length d(d+1)/2, got shape {tuple(vector.shape)}")
    matrix = vector.index_select(-1, _place_in_triu(d, vector.device)).unflatten(-1, (d, d))
    return matrix * _isometric_weights(d, matrix, -1) if isometric else matrix
