"""Measures of maps against NumPy, SciPy and loops over pixels."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain.measures import (
    collapse,
    correlation,
    energy_inside,
    mae,
    norm_ratio,
    pointing_hit,
    rank_correlation,
    share_over_area,
)


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 7, 9, generator=generator)
    return a, 0.6 * a + torch.randn(4, 7, 9, generator=generator) + 3


@pytest.fixture
def mask():
    return torch.rand(4, 7, 9, generator=torch.Generator().manual_seed(1)) < 0.3


def test_collapse_pixel_by_pixel():
    maps = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    one = maps[1, :, 2, 3].tolist()
    assert collapse(maps, "abs-max")[1, 2, 3].item() == max(abs(g) for g in one)
    assert collapse(maps, "abs-sum")[1, 2, 3].item() == pytest.approx(sum(abs(g) for g in one), rel=1e-6)
    assert collapse(maps, "signed-sum")[1, 2, 3].item() == pytest.approx(sum(one), rel=1e-5)
    assert collapse(maps, "none") is maps
    assert collapse(maps).shape == (2, 4, 5)
    with pytest.raises(UnknownName) as unknown:
        collapse(maps, "absmax")
    assert unknown.value.suggestions[0] == "abs-max"
    with pytest.raises(ArgumentError) as wrong:
        collapse(maps[0])
    assert wrong.value.value == (3, 4, 5)


def test_correlation_agrees_with_numpy(pair):
    a, b = pair
    expected = [np.corrcoef(x.double().ravel(), y.double().ravel())[0, 1] for x, y in zip(a, b, strict=True)]
    r = correlation(a, b)
    assert r.dtype == torch.float64
    assert torch.allclose(r, torch.tensor(expected), rtol=0, atol=1e-14)
    assert torch.allclose(correlation(a, b, to_unit=True), (1 + r) / 2)
    assert torch.allclose(correlation(a, -b), -r, rtol=0, atol=1e-14)
    # channels belong to the map
    assert correlation(a[None], b[None]).shape == (1,)


def test_correlation_of_a_map_with_itself_is_one_at_any_scale(pair):
    a = pair[0].double()
    for scale, shift in ((1e-200, 0), (1e200, 0), (-1e-30, 0), (1.0, 1e3)):
        sign = math.copysign(1, scale)
        assert torch.allclose(correlation(a, scale * a + shift), torch.full((4,), sign).double(), rtol=0, atol=1e-9)
    assert correlation(a, a).max() <= 1


@pytest.mark.parametrize("value", [0.0, 0.1, 1e20, math.pi])
def test_correlation_of_a_constant_map_is_undefined(pair, value):
    a = pair[0]
    constant = torch.full_like(a, value)
    # the mean of a constant can differ from it in the last bit: the correlation is still undefined
    for measure in (correlation, rank_correlation):
        assert measure(a, constant).isnan().all()
        assert measure(constant, a).isnan().all()
        assert measure(constant, constant).isnan().all()
    mixed = a.clone()
    mixed[2] = value
    assert correlation(a, mixed).isnan().tolist() == [False, False, True, False]
    assert correlation(a, mixed, to_unit=True).isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_measures_of_nonfinite_maps_are_undefined(pair, mask, bad):
    a, b = pair
    a = a.clone()
    a[1, 2, 3] = bad
    for measure in (correlation, rank_correlation):
        assert measure(a, b).isnan().tolist() == [False, True, False, False]
    for values in (mae(a, b), energy_inside(a, mask), pointing_hit(a, mask), norm_ratio(a, b)):
        assert values.isfinite().tolist() == [True, False, True, True]


def test_rank_correlation_agrees_with_scipy(pair):
    a, b = pair
    b = (2 * b).round() / 2  # many ties
    expected = [stats.spearmanr(x.ravel(), y.ravel()).statistic for x, y in zip(a, b, strict=True)]
    assert torch.allclose(rank_correlation(a, b), torch.tensor(expected), rtol=0, atol=1e-13)
    assert torch.allclose(rank_correlation(a, a.exp()), torch.ones(4).double(), rtol=0, atol=1e-14)


def test_mae_by_loops(pair):
    a, b = pair

    def slow(x, y, how):
        values = []
        for m in (x, y):
            low = min(v for row in m for v in row) if how == "minmax" else 0.0
            shifted = [[v - low for v in row] for row in m]
            top = 1.0 if how == "none" else max(abs(v) for row in shifted for v in row)
            values.append([[v / top for v in row] for row in shifted])
        total = sum(abs(p - q) for r, s in zip(*values, strict=True) for p, q in zip(r, s, strict=True))
        return total / (len(x) * len(x[0]))

    for how in ("max", "minmax", "none"):
        expected = [slow(x.tolist(), y.tolist(), how) for x, y in zip(a, b, strict=True)]
        assert torch.allclose(mae(a, b, how), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14), how
    assert torch.equal(mae(a, b), mae(a, b, "max"))
    assert mae(a, 5 * a).max() < 1e-7
    zero = torch.zeros_like(a)
    assert mae(a, zero).isnan().all()
    assert mae(a, zero + 1, "minmax").isnan().all()
    assert mae(a, zero, "none").isfinite().all()
    with pytest.raises(UnknownName):
        mae(a, b, "maximum")


def test_norm_ratio(pair):
    a, b = pair
    expected = [np.linalg.norm(x.double()) / np.linalg.norm(y.double()) for x, y in zip(a, b, strict=True)]
    assert torch.allclose(norm_ratio(a, b), torch.tensor(expected), rtol=1e-14, atol=0)
    assert norm_ratio(torch.zeros_like(a), b).tolist() == [0.0] * 4
    assert norm_ratio(a, torch.zeros_like(a)).isnan().all()
    b[1, 2, 3] = math.inf  # would otherwise give a ratio of 0, which is a valid value
    assert norm_ratio(a, b).isnan().tolist() == [False, True, False, False]


def test_energy_by_loops(pair, mask):
    a = pair[0]
    for i in range(4):
        inside = total = area = 0.0
        for y in range(7):
            for x in range(9):
                total += abs(a[i, y, x].item())
                inside += abs(a[i, y, x].item()) * mask[i, y, x].item()
                area += mask[i, y, x].item() / 63
        assert energy_inside(a, mask)[i].item() == pytest.approx(inside / total, abs=1e-12)
        assert share_over_area(a, mask)[i].item() == pytest.approx(inside / total / area, abs=1e-12)
    colours = torch.stack([a, -2 * a, 0 * a], 1)
    assert torch.allclose(energy_inside(colours, mask), energy_inside(a, mask))
    # a constant map scores at chance, whatever the mask
    assert torch.allclose(share_over_area(torch.full_like(a, -3.0), mask), torch.ones(4).double())


def test_pointing(pair, mask):
    a = pair[0]
    for i in range(4):
        _, y, x = max((abs(a[i, y, x].item()), y, x) for y in range(7) for x in range(9))
        assert pointing_hit(a, mask)[i].item() == float(mask[i, y, x])
    colours = torch.zeros(1, 3, 2, 2)
    colours[0, 1, 0, 1] = -5  # not in the first channel, and negative
    colours[0, :, 1, 1] = 2  # the largest sum is elsewhere
    inside = torch.tensor([[[False, True], [False, False]]])
    assert pointing_hit(colours, inside).item() == 1
    assert pointing_hit(colours, ~inside).item() == 0


def test_ties_of_pointing_count_by_their_share():
    maps = torch.tensor([[[2.0, -2.0], [2.0, 1.0]]])
    mask = torch.tensor([[[True, False], [True, True]]])
    assert pointing_hit(maps, mask).item() == pytest.approx(2 / 3)
    assert pointing_hit(torch.ones(1, 2, 2), mask).item() == pytest.approx(0.75)  # the mask's share: chance


def test_a_zero_map_or_an_empty_mask_is_undefined(pair, mask):
    a = pair[0].clone()
    a[0] = 0
    mask = mask.clone()
    mask[1] = False
    for measure in (energy_inside, pointing_hit, share_over_area):
        assert measure(a, mask).isnan().tolist() == [True, True, False, False]


def test_shapes_that_do_not_fit(pair, mask):
    a, b = pair
    for measure in (correlation, rank_correlation, mae, norm_ratio):
        for one, other in ((a, b[..., :8]), (torch.zeros(3), torch.zeros(3))):
            with pytest.raises(ArgumentError) as caught:
                measure(one, other)
            assert caught.value.value == (tuple(one.shape), tuple(other.shape))
    for measure in (energy_inside, pointing_hit, share_over_area):
        for wrong in (mask.float(), mask[:1]):
            with pytest.raises(ArgumentError) as caught:
                measure(a, wrong)
            assert caught.value.argument == "mask"


def test_no_graph_and_half_precision(pair, mask):
    a, b = (x.half().requires_grad_() for x in pair)
    for values in (correlation(a, b), mae(a, b), energy_inside(a, mask), pointing_hit(a, mask)):
        assert not values.requires_grad
        assert values.dtype == torch.float64


@pytest.mark.parametrize("pixels", [10, 49, 63])
def test_constants_in_double_precision_have_no_correlation(pixels):
    """The mean of equal numbers is rounded in float64, and the difference from it must not count as a pattern."""
    generator = torch.Generator().manual_seed(0)
    constants = torch.rand(200, 1, dtype=torch.float64, generator=generator).expand(-1, pixels)
    maps = torch.rand(200, pixels, dtype=torch.float64, generator=generator)
    assert correlation(constants, maps).isnan().all()
    assert correlation(maps, constants).isnan().all()
