"""What the page says, against the model asked in the plain way."""

import math
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.data import ImageSet
from eigengrain.explorer import session
from eigengrain.explorer.limits import BusyError
from eigengrain.explorer.memory import Memory
from eigengrain.explorer.page import Page
from eigengrain.explorer.session import Lens, facts
from eigengrain.explorer.view import read_view
from explorer.small_model import bird_model


@pytest.fixture
def look(lens):
    return lens.look("example-4")


def plain_scores(model, inputs, subset):
    """One pass of the whole network with a subset kept."""
    before = model.head.subset
    model.head.subset = subset
    try:
        with torch.no_grad():
            return model(inputs)[0].double()
    finally:
        model.head.subset = before


@pytest.mark.parametrize("split", [1, 20, 63])
def test_predictions_are_those_of_the_whole_network(lens, look, split):
    answers = lens.answers(look, split, "top:1+last:5")
    assert [answer.role for answer in answers] == ["all", "large", "small", "custom"]
    assert [answer.kept for answer in answers] == [64, split, 64 - split, 6]
    for answer in answers:
        expected = plain_scores(lens.model, look.inputs, answer.subset).softmax(0)
        torch.testing.assert_close(answer.probabilities, expected, rtol=1e-4, atol=1e-6)


def test_the_backbone_runs_once_for_an_image(lens, monkeypatch):
    fresh = Lens("fresh", lens.model, lens.images)
    calls = []
    original = fresh.model.forward_features
    monkeypatch.setattr(fresh.model, "forward_features", lambda x: calls.append(1) or original(x))
    decomposed = []
    pooled = fresh.head.pool_subsets
    monkeypatch.setattr(fresh.head, "pool_subsets", lambda *a, **k: decomposed.append(1) or pooled(*a, **k))
    seen = fresh.look("example-0")
    after_first = len(decomposed)
    for split in (3, 30, 60):
        fresh.answers(fresh.look("example-0"), split)
        fresh.profile(seen)
    assert calls == [1]
    assert len(decomposed) == after_first  # every split was scored when the image was first seen


def test_the_profile_is_that_of_each_split(lens, look):
    found = lens.profile(look)
    assert found.splits == list(range(1, 64))
    predicted = lens.answers(look, 1)[0].predicted
    for place in (0, 31, 62):
        _, large, small = lens.answers(look, found.splits[place])
        assert found.large[place] == pytest.approx(float(large.probabilities[predicted]))
        assert found.small[place] == pytest.approx(float(small.probabilities[predicted]))


@pytest.mark.parametrize("target", [None, 2])
def test_maps_are_gradients_of_the_score(lens, look, target):
    explained = lens.explain(look, 40, ["vanilla", "guided"], "top:2", target)
    wanted = target if target is not None else int(plain_scores(lens.model, look.inputs, "all").argmax())
    assert explained.target == lens.classes[wanted]
    assert list(explained.maps) == ["vanilla", "guided"]
    for subset, found in explained.maps["vanilla"].items():
        image = look.inputs.clone().requires_grad_()
        lens.model.head.subset = subset
        try:
            (gradient,) = torch.autograd.grad(lens.model(image)[0, wanted], image)
        finally:
            lens.model.head.subset = "all"
        torch.testing.assert_close(found, gradient[0].abs().amax(0), rtol=2e-3, atol=2e-3 * float(found.max()))
    assert lens.explain(look, 40, ["vanilla", "guided"], "top:2", target) is explained  # kept


def test_facts_against_numpy():
    values = np.sort(np.random.default_rng(0).exponential(size=20))[::-1].copy()
    found = facts(torch.from_numpy(values), 15)
    shares = values / values.sum()
    assert found.s == pytest.approx(math.sqrt((values * np.exp(-2 * values)).sum()))
    assert found.condition == pytest.approx(values[0] / values[-1])
    assert found.effective_rank == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))
    assert found.energy == pytest.approx(shares[15:].sum())
    assert found.gap == pytest.approx((values[14] - values[15]) / values[14])
    assert found.rank == 20


def test_facts_of_nothing_are_numbers():
    found = facts(torch.zeros(4).double(), 2)
    assert (found.s, found.rank, found.energy) == (0.0, 0, 0.0)
    assert math.isnan(found.gap)
    assert math.isinf(found.condition)


def test_an_upload_is_prepared_as_the_examples_are_and_has_a_secret_name(lens):
    pixels = lens.images.image(4)
    first, second = lens.upload(pixels, "mine.png"), lens.upload(pixels, "mine.png")
    assert first.key != second.key
    assert len(first.key) > 20
    torch.testing.assert_close(first.inputs, lens.look("example-4").inputs)
    assert first.label is None
    assert lens.look(first.key) is first


def test_an_upload_is_for_all_models_of_the_page(lens, plain_lens, tmp_path):
    mine = lens.upload(lens.images.image(4), "mine.png")
    there = plain_lens.look(mine.key)
    assert (there.key, there.title, there.label) == (mine.key, "mine.png", None)
    torch.testing.assert_close(there.inputs, mine.inputs)
    assert not torch.equal(there.eigenvalues, mine.eigenvalues)
    page = Page({"seb": lens, "plain": plain_lens}, tmp_path)
    assert page.other_model("plain", mine.key, 8, "model=seb")[0] == mine.key


def test_a_forgotten_upload_is_said(lens):
    with pytest.raises(ValueError, match="upload it again"):
        lens.look("upload-abc")


@pytest.mark.parametrize(
    "key", ["example-9", "example--1", "example-", "example-99999999999999", "/etc/passwd", "", "example-²"]
)
def test_images_that_are_not_there(lens, key):
    with pytest.raises(ValueError, match="there is no image"):
        lens.look(key)


@pytest.mark.parametrize(
    ("split", "custom", "said"),
    [
        (0, "", "from 1 to 63"),
        (64, "", "from 1 to 63"),
        (3, "top", "cannot read"),
        (3, "top:65", "at most 64"),
        (3, "x" * 300, "letters"),
    ],
)
def test_subsets_that_make_no_sense(lens, split, custom, said):
    with pytest.raises(ValueError, match=said):
        lens.subsets(split, custom)


def test_a_head_without_eigenvalues_is_refused(birds):
    with pytest.raises(ValueError, match="no eigenvalues to choose from"):
        Lens("gap", bird_model("gap"), birds)


def test_examples_that_cannot_be_read_are_passed_over(lens, tmp_path, caplog):
    """One bad file among the user's own would else leave the page empty."""
    files = [tmp_path / f"{number}.png" for number in range(6)]
    for number, file in enumerate(files):
        lens.images.image(number).save(file)
    for number in (0, 4):
        files[number].write_bytes(b"no image")
    images = ImageSet("own", "test", lens.classes, [0, 0, 0, 1, 1, 1], files, lens.images.transform)
    fresh = Lens("fresh", lens.model, images)
    assert fresh.first == "example-1"
    assert read_view({"image": "example-0"}, {"fresh": fresh}).image == "example-1"
    assert fresh.of_class(0, 12) == [1, 2]
    assert fresh.of_class(1, 2) == [3, 5]
    fresh.of_class(1, 12)
    assert [str(file) in record.message for record, file in zip(caplog.records, (files[0], files[4]), strict=True)] == [
        True
    ] * 2
    assert len(Page({"fresh": fresh}, tmp_path).gallery("fresh", 1)) == 2
    with pytest.raises(ValueError, match="none of the 2 images of own"):
        Lens("fresh", lens.model, images.subset([0, 4]))


def test_a_model_that_is_busy_says_so(lens, monkeypatch):
    monkeypatch.setattr(session, "MAX_WAIT", 0.05)
    with lens.alone():
        with pytest.raises(BusyError, match="busy"):
            lens.upload(Image.new("RGB", (96, 96)), "black")


def test_threads_get_the_answers_that_one_would(lens, monkeypatch):
    """This head pools by a subset that is set in it for a while: without the lock threads would see each other's."""
    fresh = Lens("fresh", bird_model("logcov"), lens.images)
    alone = Lens("alone", bird_model("logcov"), lens.images)
    for number in range(3):
        fresh.look(f"example-{number}")
    pool = fresh.head.pool

    def slow_pool(reduced):
        time.sleep(0.003)  # others get their chance between setting the subset and using it
        return pool(reduced)

    monkeypatch.setattr(fresh.head, "pool", slow_pool)
    found: dict[int, torch.Tensor] = {}

    def ask(split: int) -> None:
        seen = fresh.look(f"example-{split % 3}")
        found[split] = fresh.explain(seen, split, ["vanilla"]).maps["vanilla"][f"last:{64 - split}"]

    threads = [threading.Thread(target=ask, args=(split,)) for split in range(20, 26)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for split, map in found.items():
        expected = alone.explain(alone.look(f"example-{split % 3}"), split, ["vanilla"])
        torch.testing.assert_close(map, expected.maps["vanilla"][f"last:{64 - split}"])


def test_memory_keeps_what_was_used_last():
    memory = Memory[bytes](10, len)
    memory.put("a", bytes(4))
    memory.put("b", bytes(4))
    memory.get("a")
    memory.put("c", bytes(4))
    assert memory.get("b") is None
    assert memory.get("a") == bytes(4)
    memory.put("a", bytes(1))  # replaced, not counted twice
    memory.put("d", bytes(5))
    assert memory.get("a") == bytes(1)
    assert memory.get("c") == bytes(4)
