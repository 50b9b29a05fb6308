import pytest
import torch

from eigengrain import EigenSubset
from eigengrain.errors import ArgumentError
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
    rounded = torch.tensor([4.0, 2.0, -1e-18, -2e-18])  # zeros as a solver returns them
    assert EigenSubset.parse("top:1+last:1").relative_gap(rounded) == 0.5
    unknown = torch.tensor([4.0, 2.0, 1.0, float("nan")])
    assert EigenSubset.parse("top:1+last:1").relative_gap(unknown).isnan()


@pytest.mark.parametrize(
    "call, value",
    [
        (lambda: EigenSubset.parse("top:300").mask(256), "top:300"),
        (lambda: EigenSubset.parse("last:5+top:1").mask(4), "last:5"),
        (lambda: EigenSubset.parse("~(all)").mask(4), "~(all)"),
        (lambda: EigenSubset.parse("~(top:4)").mask(4), "~(top:4)"),
        (lambda: EigenSubset.parse("top206"), "top206"),
        (lambda: EigenSubset.parse("top:-1"), "top:-1"),
        (lambda: EigenSubset.parse("top:0"), "top:0"),
        (lambda: EigenSubset.parse(""), ""),
        (lambda: EigenSubset.parse(206), 206),
        (lambda: EigenSubset.largest(2.5), "top:2.5"),
    ],
)
def test_errors(call, value):
    with pytest.raises(ArgumentError) as error:
        call()
    assert (error.value.argument, error.value.value) == ("subset", value)


def test_number_of_small_eigenvalues_is_the_share_of_the_paper():
    from eigengrain.explain.survey import split_point

    for d in range(2, 2049):
        last = small_part(d)
        assert 1 <= last < d
        assert abs(256 * last - 50 * d) <= 128 or last == 1  # the integer closest to the share
        assert split_point(d, None) == d - last  # explanations call the rest large
    assert [small_part(d) for d in (1, 8, 64, 128, 256, 512, 2048)] == [1, 2, 12, 25, 50, 100, 400]
