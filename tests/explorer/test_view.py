from urllib.parse import parse_qsl

import gradio as gr
import pytest
import torch

from eigengrain.errors import ArgumentError
from eigengrain.explorer import render
from eigengrain.explorer.page import Page
from eigengrain.explorer.view import View
from explorer.small_model import bird_model, bird_session


def test_an_address_restores_the_view(session, plain_session):
    view = View("plain", "example-5", 17, ("deconv", "guided"), "top:1+last:12", "2", "projector", "each", "seb")
    assert View.from_query(dict(parse_qsl(view.query())), {"seb": session, "plain": plain_session}) == view


def test_the_first_view(session):
    rank = session.analyse("example-0").rank
    assert rank < 64
    assert View.from_query({}, {"seb": session}) == View("seb", "example-0", rank - round(rank * 50 / 256), ("smooth",))


@pytest.fixture(scope="module")
def truncated(birds):
    """A session on a model that keeps a subset of its eigenvalues."""
    model = bird_model("mpncov")
    model.head.subset = "top:52"
    return bird_session("truncated", model, birds)


def test_a_model_with_its_own_subset_is_shown_with_it(truncated):
    view = View.from_query({}, {"truncated": truncated})
    assert view.custom == "top:52"
    analysis = truncated.analyse(view.image)
    predictions = {each.role: each for each in truncated.predict(analysis, view.split, view.custom)}
    with torch.no_grad():
        expected = truncated.model(analysis.inputs)[0].double().softmax(0)
    torch.testing.assert_close(predictions["custom"].probabilities, expected)
    answer, _ = truncated.answer(analysis)
    torch.testing.assert_close(answer.probabilities, expected)
    assert "<b>top:52</b>" in render.answers([(truncated, analysis)])


def test_another_model_brings_its_own_subset_unless_the_visitor_wrote_one(session, truncated, tmp_path):
    page = Page({"seb": session, "truncated": truncated}, tmp_path)

    def custom(to, query):
        _image, _split, custom, *_ = page.change_model(to, "example-0", "", query)
        return custom

    assert custom("truncated", "model=seb") == "top:52"
    assert custom("seb", "model=truncated&custom=top:52") == ""
    assert custom("seb", "model=truncated&custom=top:3") == gr.skip()
    assert custom("seb", "model=truncated") == gr.skip()  # the box was emptied


def test_the_split_follows_the_image_and_the_model_until_the_visitor_moves_it(session, plain_session, tmp_path):
    page = Page({"seb": session, "plain": plain_session}, tmp_path)
    first, second = session.analyse("example-0"), session.analyse("example-5")
    assert first.rank != second.rank
    untouched = View("seb", "example-0", session.default_split(first)).query()

    def click(number, query):
        return page.choose("seb", session.images.labels[number], query, gr.SelectData(None, {"index": 1, "value": None}))

    key, split = click(5, untouched)
    analysis = session.analyse(key)
    assert split == session.default_split(analysis)
    assert click(5, View("seb", "example-0", 7).query()) == (key, 7)
    # a cut between zeros is never kept
    assert click(5, View("seb", "example-0", 63).query()) == (key, session.default_split(analysis))
    other = plain_session.default_split(plain_session.analyse("example-0"))
    for query, expected in ((untouched, other), (View("seb", "example-0", 7).query(), 7)):
        _image, slider, *_ = page.change_model("plain", "example-0", "", query)
        assert slider.value == expected


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
        {"maps": "exec,,"},
        {"custom": "__import__('os')"},
        {"target": "-1"},
        {"target": "99"},
        {"target": "³"},
        {"cut": "throat"},
        {"scale": "of fish"},
        {"other": "no such model"},
        {"other": "seb"},
    ],
)
def test_an_invalid_address_shows_the_first_view(session, words):
    assert View.from_query(words, {"seb": session}) == View.from_query({}, {"seb": session})


def test_numbers_are_moved_into_their_range(session):
    assert View.from_query({"split": "1000"}, {"seb": session}).split == 63
    assert View.from_controls(session, "example-0", -3, None, None, None, None, None) == View("seb", "example-0", 1)
    # an emptied box, and values that no control has
    assert View.from_controls(session, "example-0", None, 5, [], {}, ["exact"], 7) == View("seb", "example-0", 1)


def test_a_subset_that_cannot_be_read_is_refused(session):
    with pytest.raises(ArgumentError):
        View.from_controls(session, "example-0", 5, ["vanilla"], "largest", "predicted", "exact", "row")
