from urllib.parse import parse_qsl

import gradio as gr
import pytest
import torch

from eigengrain.cli.checkpoint import plain_transform
from eigengrain.explorer import views
from eigengrain.explorer.page import Page
from eigengrain.explorer.session import Lens
from eigengrain.explorer.view import View, make_view, read_view
from eigengrain.functional import EigenSubset
from explorer.small_model import bird_model


def test_an_address_restores_the_view(lens, plain_lens):
    view = View("plain", "example-5", 17, ("deconv", "guided"), "top:1+last:12", "2", "projector", "each")
    assert read_view(dict(parse_qsl(view.query())), {"seb": lens, "plain": plain_lens}) == view


def test_the_first_view(lens):
    assert read_view({}, {"seb": lens}) == View("seb", "example-0", 52, ("vanilla", "deconv"))


@pytest.fixture
def cut(birds):
    """A model that keeps a part of its eigenvalues."""
    model = bird_model("mpncov")
    model.head.subset = EigenSubset.parse("top:52")
    part = birds.subset(range(3))
    part.transform = plain_transform(model)
    return Lens("cut", model, part)


def test_a_model_that_keeps_a_part_of_its_eigenvalues_is_shown_with_that_part(cut):
    view = read_view({}, {"cut": cut})
    assert view.custom == "top:52"
    look = cut.look(view.image)
    answers = {answer.role: answer for answer in cut.answers(look, view.split, view.custom)}
    with torch.no_grad():
        torch.testing.assert_close(answers["custom"].probabilities, cut.model(look.inputs)[0].double().softmax(0))
    assert "The model itself keeps <b>top:52</b>" in views.picture(cut, look)


def test_another_model_brings_its_own_part_unless_the_visitor_wrote_one(lens, cut, tmp_path):
    page = Page({"seb": lens, "cut": cut}, tmp_path)

    def custom(to, query):
        _image, _split, custom, *_ = page.other_model(to, "example-0", 8, query)
        return custom

    assert custom("cut", "model=seb") == "top:52"
    assert custom("seb", "model=cut&custom=top:52") == ""
    assert custom("seb", "model=cut&custom=top:3") == gr.skip()
    assert custom("seb", "model=cut") == gr.skip()  # the box was emptied


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
