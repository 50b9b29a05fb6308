from urllib.parse import parse_qsl

import pytest

from eigengrain.explorer.view import View, make_view, read_view


def test_an_address_restores_the_view(lens, plain_lens):
    view = View("plain", "example-5", 17, ("deconv", "guided"), "top:1+last:12", "2", "projector", "each")
    assert read_view(dict(parse_qsl(view.query())), {"seb": lens, "plain": plain_lens}) == view


def test_the_first_view(lens):
    assert read_view({}, {"seb": lens}) == View("seb", "example-0", 52, ("vanilla", "deconv"))


@pytest.mark.parametrize(
    "words",
    [
        {"model": "../../etc/passwd"},
        {"image": "example-99999"},
        {"image": "upload-gone"},
        {"image": "file:///etc/passwd"},
        {"split": "NaN"},
        {"split": "1e999"},
        {"split": "<script>"},
        {"rules": "exec,,"},
        {"custom": "__import__('os')"},
        {"target": "-1"},
        {"target": "99"},
        {"target": "³"},
        {"cut": "throat"},
        {"scale": "of fish"},
    ],
)
def test_a_senseless_address_shows_the_first_view(lens, words):
    assert read_view(words, {"seb": lens}) == read_view({}, {"seb": lens})


def test_numbers_are_brought_into_range(lens):
    assert read_view({"split": "1000"}, {"seb": lens}).split == 63
    assert make_view(lens, "example-0", -3, None, None, None, None, None) == View("seb", "example-0", 1)
    # what a box holds that was emptied, and what no box holds
    assert make_view(lens, "example-0", None, 5, [], {}, ["exact"], 7) == View("seb", "example-0", 1)


def test_a_subset_that_cannot_be_read_is_said(lens):
    with pytest.raises(ValueError, match="cannot read"):
        make_view(lens, "example-0", 5, ["vanilla"], "largest", "predicted", "exact", "row")
