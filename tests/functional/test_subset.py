import pytest
import torch

from eigengrain import EigenSubset
from eigengrain.cli.explain import split_point
from eigengrain.functional.subsets import small_part


def members(text, d):
    return EigenSubset.parse(text).mask(d).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "text, d, expected",
    [
        ("all", 4, [0, 1, 2, 3]),
        (None, 2, [0, 1]),
        ("top:1", 4, [0]),
        ("top:4", 4, [0, 1, 2, 3]),
        ("last:2", 5, [3, 4]),
        ("top:1+last:2", 6, [0, 4, 5]),
        (" top:1 + last:1 ", 3, [0, 2]),
        ("top:3+last:3", 4, [0, 1, 2, 3]),
        ("~(top:2)", 5, [2, 3, 4]),
        ("~(top:1+last:1)", 5, [1, 2, 3]),
    ],
)
def test_parse_and_mask(text, d, expected):
    assert members(text, d) == expected


@pytest.mark.parametrize(
    "text", ["all", "top:206", "last:50", "top:1+last:50", "~(top:206)", "~(top:3)+last:1", "last:9+~(~(top:8)+~(last:7))"]
)
def test_string_round_trip(text):
    subset = EigenSubset.parse(text)
    assert str(subset) == text
    assert EigenSubset.parse(str(subset)) == subset
    assert hash(EigenSubset.parse(text)) == hash(subset)


def test_algebra():
    top, last = EigenSubset.largest(3), EigenSubset.smallest(4)
    d = 6
    assert torch.equal((top | last).mask(d), top.mask(d) | last.mask(d))
    assert torch.equal((top & last).mask(d), top.mask(d) & last.mask(d))
    assert torch.equal(top.complement().mask(d), ~top.mask(d))
    assert top.complement().complement() == top
    assert (top | last).covers(d)
    assert not (top | last).covers(8)
    assert EigenSubset.parse(top) is top
    for subset in (top & last, top & last.complement(), EigenSubset.all() & last, (top & last) | EigenSubset.largest(1)):
        assert EigenSubset.parse(str(subset)) == subset


def test_relative_gap():
    values = torch.tensor([[4.0, 2.0, 1.9, 0.0], [1.0, 1.0, 0.5, 0.25]])
    assert torch.allclose(EigenSubset.parse("top:2").relative_gap(values), torch.tensor([0.05, 0.5]))
    assert torch.allclose(EigenSubset.parse("top:1+last:1").relative_gap(values), torch.tensor([0.5, 0.0]))
    assert EigenSubset.all().relative_gap(values).isinf().all()
    short = torch.tensor([[4.0, 2.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])  # a cut between zeros cuts nothing
    assert torch.equal(EigenSubset.parse("top:1+last:1").relative_gap(short), torch.tensor([0.5, 1.0]))
    assert EigenSubset.parse("last:1").relative_gap(short).isnan().all()
    rounded = torch.tensor([4.0, 2.0, -1e-18, -2e-18])  # as a solver leaves zeros
    assert EigenSubset.parse("top:1+last:1").relative_gap(rounded) == 0.5
    unknown = torch.tensor([4.0, 2.0, 1.0, float("nan")])
    assert EigenSubset.parse("top:1+last:1").relative_gap(unknown).isnan()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: EigenSubset.parse("top:300").mask(256), "'top:300' asks for 300 of 256 eigenvalues"),
        (lambda: EigenSubset.parse("last:5+top:1").mask(4), "5 of 4"),
        (lambda: EigenSubset.parse("~(all)").mask(4), "keeps none of 4"),
        (lambda: EigenSubset.parse("~(top:4)").mask(4), "keeps none of 4"),
        (lambda: EigenSubset.parse("top206"), "cannot read eigenvalue subset 'top206': expected 'all', 'top:k'"),
        (lambda: EigenSubset.parse("top:-1"), "cannot read"),
        (lambda: EigenSubset.parse("top:0"), "at least 1, got 0"),
        (lambda: EigenSubset.parse(""), "cannot read"),
        (lambda: EigenSubset.parse(206), "a string such as 'top:206', got int"),
        (lambda: EigenSubset.largest(2.5), "whole number"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_small_eigenvalues_are_the_papers_share_and_never_none_nor_all():
    for d in range(2, 2049):
        last = small_part(d)
        assert 1 <= last < d
        assert abs(256 * last - 50 * d) <= 128 or last == 1  # the whole number next to the share
        assert split_point(d, None) == d - last  # what explain calls large is the rest
    assert [small_part(d) for d in (1, 8, 64, 128, 256, 512, 2048)] == [1, 2, 12, 25, 50, 100, 400]
