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
    view = View("plain", "example-5", 17, ("deconv", "guided"), "top:1+last:12", "2", "projector", "each")
    assert View.from_query(dict(parse_qsl(view.query())), {"seb": session, "plain": plain_session}) == view


def test_the_first_view(session):
    assert View.from_query({}, {"seb": session}) == View("seb", "example-0", 52, ("vanilla", "deconv"))


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
    assert "<b>top:52</b>" in render.picture(truncated, analysis)


def test_another_model_brings_its_own_subset_unless_the_visitor_wrote_one(session, truncated, tmp_path):
    page = Page({"seb": session, "truncated": truncated}, tmp_path)

    def custom(to, query):
        _image, _split, custom, *_ = page.change_model(to, "example-0", 8, query)
        return custom

    assert custom("truncated", "model=seb") == "top:52"
    assert custom("seb", "model=truncated&custom=top:52") == ""
    assert custom("seb", "model=truncated&custom=top:3") == gr.skip()
    assert custom("seb", "model=truncated") == gr.skip()  # the box was emptied


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
