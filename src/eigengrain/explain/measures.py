"""Similarity of two maps, and the share of a map on an object: float64 (B,), one number per image.

Two maps ``a, b`` have the same shape (B, ...). A map and a mask are ``maps``, (B, H, W) or (B, C, H, W), and ``mask``,
boolean (B, H, W). Shapes that do not fit raise ``ArgumentError``; a measure that is undefined for an image is NaN.
"""

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError, UnknownName

COLLAPSES = ("abs-max", "abs-sum", "signed-sum", "none")
NORMALISATIONS = ("max", "minmax", "none")


def collapse(maps: Tensor, how: str = "abs-max") -> Tensor:
    r"""Combine the gradients of the colours, (B, C, H, W), into one number per pixel, (B, H, W).

    ============== =====================================================
    ``abs-max``    :math:`\max_c |g_c|`, the saliency map of Simonyan et al.
    ``abs-sum``    :math:`\sum_c |g_c|`
    ``signed-sum`` :math:`\sum_c g_c`
    ``none``       :math:`g_c`, unchanged: (B, C, H, W)
    ============== =====================================================

    Example:
        >>> g = torch.tensor([1.0, -3.0, 2.0]).view(1, 3, 1, 1)
        >>> [collapse(g, how).item() for how in ("abs-max", "abs-sum", "signed-sum")]
        [3.0, 6.0, 0.0]

    References:
        K. Simonyan et al., Deep Inside Convolutional Networks, ICLR Workshop 2014, Section 3.1.
    """
    if how not in COLLAPSES:
        raise UnknownName("way to collapse a map", how, COLLAPSES)
    if maps.ndim != 4:
        raise ArgumentError("maps", "must be (B, C, H, W)", tuple(maps.shape))
    if how == "none":
        return maps
    if how == "signed-sum":
        return maps.sum(1)
    return maps.abs().amax(1) if how == "abs-max" else maps.abs().sum(1)


def correlation(a: Tensor, b: Tensor, to_unit: bool = False) -> Tensor:
    r"""Pearson correlation of two maps (Eq. 8); NaN if a map is constant.

    .. math:: r = \frac{\sum_{mn} (A_{mn} - \bar A)(B_{mn} - \bar B)}
              {\sqrt{\sum_{mn} (A_{mn} - \bar A)^2}\,\sqrt{\sum_{mn} (B_{mn} - \bar B)^2}} \in [-1, 1]

    The paper normalises the values to [0, 1] without further detail; ``to_unit`` gives :math:`(1 + r)/2`.

    Example:
        >>> a = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
        >>> correlation(a, torch.tensor([[2.0, 4.0, 6.0], [3.0, 2.0, 1.0], [5.0, 5.0, 5.0]])).round(decimals=6)
        tensor([ 1., -1., nan], dtype=torch.float64)
    """
    a, b = _as_rows(a, b)
    r = _standardise(a).mul(_standardise(b)).sum(1).clamp(-1, 1)  # clamp keeps NaN
    return (1 + r) / 2 if to_unit else r


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman correlation of two maps, with mean ranks for ties; NaN if a map is constant or not finite."""
    a, b = _as_rows(a, b)
    r = correlation(_ranks(a), _ranks(b))
    # ranks are finite even if the values are not
    return torch.where((a.isfinite() & b.isfinite()).all(1), r, torch.nan)


def mae(a: Tensor, b: Tensor, normalise: str = "max") -> Tensor:
    r"""Mean absolute error of two maps (Eq. 9).

    .. math:: \frac{1}{MN} \sum_{mn} |A_{mn} - B_{mn}|

    Maps are normalised first, because the scale of a gradient is arbitrary. The paper does not describe its normalisation;
    the size of its numbers fits values from 0 to 1. ``max`` divides each map by its largest absolute value (NaN for a zero
    map), ``minmax`` scales each map to [0, 1] (NaN for a constant map), ``none`` compares the values as they are.
    """
    if normalise not in NORMALISATIONS:
        raise UnknownName("normalisation of maps", normalise, NORMALISATIONS)
    a, b = _as_rows(a, b)
    if normalise == "minmax":
        a, b = (m - m.amin(1, keepdim=True) for m in (a, b))
    if normalise != "none":
        a, b = (m / m.abs().amax(1, keepdim=True) for m in (a, b))  # 0/0 is NaN
    return (a - b).abs().mean(1)


def norm_ratio(a: Tensor, b: Tensor) -> Tensor:
    r"""Ratio of the norms of two maps, :math:`\|A\|_F / \|B\|_F`; NaN if B is zero or not finite."""
    a, b = _as_rows(a, b)
    bottom = b.norm(dim=1)
    return torch.where((bottom > 0) & bottom.isfinite(), a.norm(dim=1) / bottom, torch.nan)


def energy_inside(maps: Tensor, mask: Tensor) -> Tensor:
    r"""Share of the absolute sum of a map, over all channels, inside a mask; NaN if the map is zero or the mask empty.

    .. math:: E = \frac{\sum_{mn} M_{mn} |A_{mn}|}{\sum_{mn} |A_{mn}|}

    Example:
        >>> energy_inside(torch.tensor([[[3.0, -1.0]]]), torch.tensor([[[True, False]]])).item()
        0.75
    """
    pixels, inside = _with_mask(maps, mask)
    share = pixels.sum(1).mul(inside).sum(1) / pixels.sum((1, 2))  # 0/0 is NaN
    return torch.where(inside.any(1), share, torch.nan)


def share_over_area(maps: Tensor, mask: Tensor) -> Tensor:
    r"""Energy inside a mask divided by the mask's share of the image; 1 is the expected value for a constant map.

    .. math:: E \Big/ \frac{1}{MN} \sum_{mn} M_{mn}
    """
    energy = energy_inside(maps, mask)
    return energy / _detached(mask).flatten(1).mean(1).to(energy.device)


def pointing_hit(maps: Tensor, mask: Tensor) -> Tensor:
    """Whether the largest absolute value of a map is inside a mask (the pointing game, without a margin).

    1 or 0, or with ties the share of them inside, so that a constant map scores at chance. NaN if the map is zero or the
    mask empty.

    Example:
        >>> mask = torch.tensor([[[True, False]]])
        >>> [pointing_hit(torch.tensor([[m]]), mask).item() for m in ([-3.0, 1.0], [1.0, 2.0], [1.0, 1.0])]
        [1.0, 0.0, 0.5]

    References:
        J. Zhang et al., Top-down Neural Attention by Excitation Backprop, ECCV 2016, Section 4.2.
    """
    pixels, inside = _with_mask(maps, mask)
    pixels = pixels.amax(1)
    peak = pixels.amax(1, keepdim=True)
    largest = pixels == peak  # all False for a map with NaN, and 0/0 is NaN
    hit = (largest & inside).sum(1) / largest.sum(1).double()
    return torch.where((peak[:, 0] > 0) & peak[:, 0].isfinite() & inside.any(1), hit, torch.nan)


def _detached(values: Tensor) -> Tensor:
    """A float64 tensor without graph; on the CPU for MPS, which has no float64."""
    values = values.detach()
    return (values.cpu() if values.device.type == "mps" else values).double()


def _as_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two maps as rows, (B, n)."""
    if a.shape != b.shape or a.ndim < 2 or a.shape[1:].numel() == 0:
        raise ArgumentError("a", "and {b} must have the same shape (B, ...)", (tuple(a.shape), tuple(b.shape)))
    return _detached(a).flatten(1), _detached(b).flatten(1)


def _standardise(rows: Tensor) -> Tensor:
    """Rows with mean 0 and norm 1; NaN for a constant row, whose rounding errors would otherwise count."""
    constant = rows.amax(1, keepdim=True) == rows.amin(1, keepdim=True)
    centred = rows - rows.mean(1, keepdim=True)
    # divided twice, so that squares of tiny or huge gradients neither underflow nor overflow
    centred = centred / centred.abs().amax(1, keepdim=True)
    return torch.where(constant, torch.nan, centred / centred.norm(dim=1, keepdim=True))


def _ranks(rows: Tensor) -> Tensor:
    """Ranks of the values in ascending order, (B, n), with mean ranks for ties; the smallest possible rank is 1/2."""
    ordered = rows.sort(dim=1).values
    below, up_to = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
    return (below + up_to).double() / 2


def _with_mask(maps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Absolute values (B, C, n) and the mask (B, n)."""
    if maps.ndim == 3:
        maps = maps[:, None]
    if maps.ndim != 4 or mask.dtype != torch.bool or mask.shape != maps[:, 0].shape:
        problem = f"must be boolean (B, H, W) and fit the maps {tuple(maps.shape)}"
        raise ArgumentError("mask", problem, (mask.dtype, tuple(mask.shape)))
    pixels = _detached(maps).abs().flatten(2)
    return pixels, mask.to(pixels.device).flatten(1)
