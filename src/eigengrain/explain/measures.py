"""How alike two maps are, and how much of a map lies on the object: one number an image, in float64."""

from typing import Literal

import torch
from torch import Tensor

from eigengrain.errors import UnknownName

Collapse = Literal["abs-max", "abs-sum", "signed-sum", "none"]
Normalise = Literal["max", "minmax", "none"]

COLLAPSES: tuple[Collapse, ...] = ("abs-max", "abs-sum", "signed-sum", "none")
NORMALISATIONS: tuple[Normalise, ...] = ("max", "minmax", "none")


def collapse(maps: Tensor, how: str = "abs-max") -> Tensor:
    r"""One number a pixel from the gradients of its three colours.

    ============== =====================================================
    ``abs-max``    :math:`\max_c |g_c|`, the saliency map of Simonyan et al.
    ``abs-sum``    :math:`\sum_c |g_c|`
    ``signed-sum`` :math:`\sum_c g_c`
    ``none``       :math:`g_c` as it is
    ============== =====================================================

    Args:
        maps: (B, C, H, W).
        how: a row of the table.

    Returns:
        (B, H, W), or ``maps`` itself for ``none``.

    Raises:
        ValueError: for another name or shape.

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
        raise ValueError(f"collapse expects maps (B, C, H, W), got {tuple(maps.shape)}")
    if how == "none":
        return maps
    if how == "signed-sum":
        return maps.sum(1)
    return maps.abs().amax(1) if how == "abs-max" else maps.abs().sum(1)


def correlation(a: Tensor, b: Tensor, to_unit: bool = False) -> Tensor:
    r"""Pearson's correlation of two maps (Eq. 8).

    .. math:: r = \frac{\sum_{mn} (A_{mn} - \bar A)(B_{mn} - \bar B)}
              {\sqrt{\sum_{mn} (A_{mn} - \bar A)^2}\,\sqrt{\sum_{mn} (B_{mn} - \bar B)^2}} \in [-1, 1]

    The paper speaks of values normalised to [0, 1] and does not say how; ``to_unit`` gives :math:`(1 + r)/2`.

    Args:
        a, b: (B, ...), of one shape; everything but the first dimension belongs to one map.
        to_unit: map to [0, 1].

    Returns:
        float64 (B,); NaN where a map is constant, because r is then undefined.

    Raises:
        ValueError: for shapes that differ.

    Example:
        >>> a = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
        >>> correlation(a, torch.tensor([[2.0, 4.0, 6.0], [3.0, 2.0, 1.0], [5.0, 5.0, 5.0]])).round(decimals=6)
        tensor([ 1., -1., nan], dtype=torch.float64)
    """
    a, b = _pair(a, b)
    r = _unit(a).mul(_unit(b)).sum(1).clamp(-1, 1)  # clamp leaves NaN as it is
    return (1 + r) / 2 if to_unit else r


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of two maps: Pearson's of the ranks of their pixels, equal pixels sharing their mean rank.

    Args:
        a, b: (B, ...), of one shape.

    Returns:
        float64 (B,) in [−1, 1]; NaN where a map is constant or not finite.

    Example:
        >>> a = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> rank_correlation(a, a.exp()).item(), rank_correlation(a, -a).item()
        (1.0, -1.0)
    """
    a, b = _pair(a, b)
    r = correlation(_ranks(a), _ranks(b))
    # ranks are finite even where the values are not
    return torch.where((a.isfinite() & b.isfinite()).all(1), r, torch.nan)


def mae(a: Tensor, b: Tensor, normalise: str = "max") -> Tensor:
    r"""Mean absolute error of two maps (Eq. 9).

    .. math:: \frac{1}{MN} \sum_{mn} |A_{mn} - B_{mn}|

    Gradients have no scale of their own and those of a few eigenvalues are smaller, so each map is first put on one. The
    paper does not say which; the size of its numbers fits images from 0 to 1.

    Args:
        a, b: (B, ...), of one shape.
        normalise: ``max`` divides each map by its largest absolute value: an absolute map goes from 0 to 1, a signed one
            keeps its zero. ``minmax`` stretches each map to [0, 1]. ``none`` compares the numbers as they are.

    Returns:
        float64 (B,); NaN where a map cannot be normalised: identically zero for ``max``, constant for ``minmax``.

    Raises:
        ValueError: for shapes that differ, or another normalisation.

    Example:
        >>> a = torch.tensor([[0.0, 1.0, 2.0]])
        >>> mae(a, 10 * a).item(), mae(a, 10 * a, normalise="none").item()
        (0.0, 9.0)
    """
    if normalise not in NORMALISATIONS:
        raise UnknownName("normalisation of maps", normalise, NORMALISATIONS)
    a, b = _pair(a, b)
    if normalise == "minmax":
        a, b = (m - m.amin(1, keepdim=True) for m in (a, b))
    if normalise != "none":
        a, b = (m / m.abs().amax(1, keepdim=True) for m in (a, b))  # 0/0 is NaN, as it should be
    return (a - b).abs().mean(1)


def norm_ratio(a: Tensor, b: Tensor) -> Tensor:
    r"""How strong a map is beside another, :math:`\|A\|_F / \|B\|_F`; NaN where B is identically zero or not finite.

    Args:
        a, b: (B, ...), of one shape.

    Returns:
        float64 (B,).

    Example:
        >>> norm_ratio(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 10.0]])).item()
        0.5
    """
    a, b = _pair(a, b)
    bottom = b.norm(dim=1)
    return torch.where((bottom > 0) & bottom.isfinite(), a.norm(dim=1) / bottom, torch.nan)


def energy_inside(maps: Tensor, mask: Tensor) -> Tensor:
    r"""Share of a map's absolute sum that lies in a mask.

    .. math:: E = \frac{\sum_{mn} M_{mn} |A_{mn}|}{\sum_{mn} |A_{mn}|}

    Args:
        maps: (B, H, W), or (B, C, H, W) whose channels are added.
        mask: boolean (B, H, W).

    Returns:
        float64 (B,); NaN where the map is identically zero or the mask empty.

    Raises:
        ValueError: if the shapes do not fit, or the mask is not boolean.

    Example:
        >>> energy_inside(torch.tensor([[[3.0, -1.0]]]), torch.tensor([[[True, False]]])).item()
        0.75
    """
    pixels, inside = _with_mask(maps, mask)
    share = pixels.sum(1).mul(inside).sum(1) / pixels.sum((1, 2))  # 0/0 is NaN
    return torch.where(inside.any(1), share, torch.nan)


def share_over_area(maps: Tensor, mask: Tensor) -> Tensor:
    r"""Energy inside a mask over the mask's share of the image: 1 is what a map without a place would have.

    .. math:: E \Big/ \frac{1}{MN} \sum_{mn} M_{mn}

    Args and undefined values are those of :func:`energy_inside`.

    Example:
        >>> share_over_area(torch.ones(1, 4, 4), torch.eye(4)[None] > 0).item()
        1.0
    """
    energy = energy_inside(maps, mask)
    return energy / _plain(mask).flatten(1).mean(1).to(energy.device)


def pointing_hit(maps: Tensor, mask: Tensor) -> Tensor:
    """Whether the largest absolute value of a map lies in a mask (the pointing game, without a margin).

    Where several pixels are equally large, the result is the share of them that lie inside: what drawing one of them would
    give on average, so that a constant map does no better than chance.

    Args:
        maps: (B, H, W), or (B, C, H, W) whose largest channel counts.
        mask: boolean (B, H, W).

    Returns:
        float64 (B,), 0 or 1 but for ties; NaN where the map is identically zero or the mask empty.

    Raises:
        ValueError: if the shapes do not fit, or the mask is not boolean.

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
    largest = pixels == peak  # nowhere for a map with NaN, and 0/0 is NaN
    hit = (largest & inside).sum(1) / largest.sum(1).double()
    return torch.where((peak[:, 0] > 0) & peak[:, 0].isfinite() & inside.any(1), hit, torch.nan)


def _plain(values: Tensor) -> Tensor:
    """Without its graph and in float64, which Apple's GPUs do not have."""
    values = values.detach()
    return (values.cpu() if values.device.type == "mps" else values).double()


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two maps as rows, (B, n)."""
    if a.shape != b.shape or a.ndim < 2 or a.shape[1:].numel() == 0:
        raise ValueError(f"two maps of one shape (B, ...) are expected, got {tuple(a.shape)} and {tuple(b.shape)}")
    return _plain(a).flatten(1), _plain(b).flatten(1)


def _unit(rows: Tensor) -> Tensor:
    """Rows without their mean and of norm 1; NaN for a constant row, which rounding would give a direction of its own."""
    constant = rows.amax(1, keepdim=True) == rows.amin(1, keepdim=True)
    centred = rows - rows.mean(1, keepdim=True)
    # divided twice, so that squares of tiny or huge gradients neither vanish nor overflow
    centred = centred / centred.abs().amax(1, keepdim=True)
    return torch.where(constant, torch.nan, centred / centred.norm(dim=1, keepdim=True))


def _ranks(rows: Tensor) -> Tensor:
    """Places of the values in ascending order, (B, n), equal values with the mean of their places."""
    ordered, order = rows.sort(dim=1)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = fresh.long().cumsum(1) - 1  # (B, n), which run of equal values each belongs to
    places = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device).expand_as(rows)
    sums = torch.zeros_like(rows).scatter_add_(1, group, places)
    counts = torch.zeros_like(rows).scatter_add_(1, group, torch.ones_like(rows))
    return torch.empty_like(rows).scatter_(1, order, (sums / counts.clamp_min(1)).gather(1, group))


def _with_mask(maps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Absolute values (B, C, n) and the mask (B, n)."""
    if maps.ndim == 3:
        maps = maps[:, None]
    if maps.ndim != 4 or mask.dtype != torch.bool or mask.shape != maps[:, 0].shape:
        raise ValueError(
            "maps (B, H, W) or (B, C, H, W) and a boolean mask (B, H, W) are expected, "
            f"got {tuple(maps.shape)} and {mask.dtype} {tuple(mask.shape)}"
        )
    pixels = _plain(maps).abs().flatten(2)
    return pixels, mask.to(pixels.device).flatten(1)
