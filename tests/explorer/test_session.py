"""Results of a session against the model itself."""

import math
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.data import ImageSet
from eigengrain.errors import ArgumentError
from eigengrain.explorer import limits
from eigengrain.explorer import session as session_module
from eigengrain.explorer.limits import BusyError
from eigengrain.explorer.page import Page
from eigengrain.explorer.session import Session, spectrum_facts
from eigengrain.explorer.view import View
from explorer.small_model import bird_model, bird_session


@pytest.fixture
def analysis(session):
    return session.analyse("example-4")


def plain_scores(model, inputs, subset):
    """One pass of the whole network with a subset."""
    with model.head.keeping(subset), torch.no_grad():
        return model(inputs)[0].double()


@pytest.mark.parametrize("split", [1, 20, 63])
def test_predictions_are_those_of_the_whole_network(session, analysis, split):
    predictions = session.predict(analysis, split, "top:1+last:5")
    assert [prediction.role for prediction in predictions] == ["all", "large", "small", "custom"]
    assert [prediction.kept for prediction in predictions] == [64, split, 64 - split, 6]
    for prediction in predictions:
        expected = plain_scores(session.model, analysis.inputs, prediction.subset).softmax(0)
        torch.testing.assert_close(prediction.probabilities, expected, rtol=1e-4, atol=1e-6)


def test_the_backbone_runs_once_per_image(session, monkeypatch):
    fresh = Session("fresh", session.model, session.images)
    calls = []
    original = fresh.model.forward_features
    monkeypatch.setattr(fresh.model, "forward_features", lambda x: calls.append(1) or original(x))
    pooled = []
    pool_subsets = fresh.head.pool_subsets
    monkeypatch.setattr(fresh.head, "pool_subsets", lambda *a, **k: pooled.append(1) or pool_subsets(*a, **k))
    analysis = fresh.analyse("example-0")
    after_first = len(pooled)
    for split in (3, 30, 60):
        fresh.predict(fresh.analyse("example-0"), split)
        fresh.profile(analysis)
    assert calls == [1]
    assert len(pooled) == after_first  # every split was scored at the first analysis


def test_the_profile_equals_the_predictions_of_its_splits(session, analysis):
    profile = session.profile(analysis)
    assert session.splits == list(range(1, 64))
    predicted = session.predict(analysis, 1)[0].predicted
    for place in (0, 31, 62):
        _, large, small = session.predict(analysis, session.splits[place])
        assert profile["large"][place] == pytest.approx(float(large.probabilities[predicted]))
        assert profile["small"][place] == pytest.approx(float(small.probabilities[predicted]))


@pytest.mark.parametrize("target", [None, 2])
def test_maps_are_gradients_of_the_score(session, analysis, target):
    explained = session.explain(analysis, 40, ["vanilla", "guided"], "top:2", target)
    number = target if target is not None else int(plain_scores(session.model, analysis.inputs, "all").argmax())
    assert explained.target == session.classes[number]
    assert list(explained.maps) == ["vanilla", "guided"]
    for subset, map in explained.maps["vanilla"].items():
        image = analysis.inputs.clone().requires_grad_()
        with session.head.keeping(subset):
            (gradient,) = torch.autograd.grad(session.model(image)[0, number], image)
        torch.testing.assert_close(map, gradient[0].abs().amax(0), rtol=2e-3, atol=2e-3 * float(map.max()))
    assert session.explain(analysis, 40, ["vanilla", "guided"], "top:2", target) is explained  # cached


def test_facts_against_numpy():
    values = np.sort(np.random.default_rng(0).exponential(size=20))[::-1].copy()
    facts = spectrum_facts(torch.from_numpy(values), 15)
    shares = values / values.sum()
    assert facts.s == pytest.approx(math.sqrt((values * np.exp(-2 * values)).sum()))
    assert facts.condition == pytest.approx(values[0] / values[-1])
    assert facts.effective_rank == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))
    assert facts.energy == pytest.approx(shares[15:].sum())
    assert facts.gap == pytest.approx((values[14] - values[15]) / values[14])
    assert facts.rank == 20


def test_facts_of_a_spectrum_of_zeros():
    facts = spectrum_facts(torch.zeros(4).double(), 2)
    assert (facts.s, facts.rank, facts.energy) == (0.0, 0, 0.0)
    assert math.isnan(facts.gap)
    assert math.isinf(facts.condition)


def test_an_upload_is_prepared_like_the_examples_and_has_a_secret_key(session):
    pixels = session.images.image(4)
    first, second = session.upload(pixels, "mine.png"), session.upload(pixels, "mine.png")
    assert first.key != second.key
    assert len(first.key) > 20
    torch.testing.assert_close(first.inputs, session.analyse("example-4").inputs)
    assert first.label is None
    assert session.analyse(first.key) is first


def test_an_upload_is_shared_by_the_models_of_the_page(session, plain_session, tmp_path):
    mine = session.upload(session.images.image(4), "mine.png")
    there = plain_session.analyse(mine.key)
    assert (there.key, there.title, there.label) == (mine.key, "mine.png", None)
    torch.testing.assert_close(there.inputs, mine.inputs)
    assert not torch.equal(there.eigenvalues, mine.eigenvalues)
    page = Page({"seb": session, "plain": plain_session}, tmp_path)
    assert page.change_model("plain", mine.key, 8, "model=seb")[0] == mine.key


def test_an_upload_that_is_no_longer_in_memory(session):
    with pytest.raises(ArgumentError) as caught:
        session.analyse("upload-abc")
    assert caught.value.value == "upload-abc"


@pytest.mark.parametrize(
    "key", ["example-9", "example--1", "example-", "example-99999999999999", "/etc/passwd", "", "example-²"]
)
def test_examples_that_do_not_exist(session, key):
    with pytest.raises(ArgumentError) as caught:
        session.analyse(key)
    assert (caught.value.argument, caught.value.value) == ("image", key)


@pytest.mark.parametrize(("split", "custom", "argument"), [(0, "", "split"), (64, "", "split"), (3, "x" * 300, "custom")])
def test_arguments_out_of_range(session, split, custom, argument):
    with pytest.raises(ArgumentError) as caught:
        session.subsets(split, custom)
    assert caught.value.argument == argument


@pytest.mark.parametrize("custom", ["top", "top:65"])
def test_subsets_that_do_not_fit(session, custom):
    with pytest.raises(ArgumentError) as caught:
        session.subsets(3, custom)
    assert (caught.value.argument, caught.value.value) == ("subset", custom)


def test_a_head_without_eigenvalues_to_choose_from_is_refused(birds):
    for head in ("gap", "isqrt"):
        with pytest.raises(ArgumentError) as caught:
            bird_session(head, bird_model(head), birds)
        assert (caught.value.argument, caught.value.value) == ("model", head)


def test_examples_without_a_transform_are_refused(session, birds):
    with pytest.raises(ArgumentError) as caught:
        Session("raw", session.model, birds)
    assert caught.value.argument == "images"


def test_examples_that_cannot_be_read_are_left_out(session, tmp_path, caplog):
    """Otherwise one bad file would leave the page empty."""
    files = [tmp_path / f"{number}.png" for number in range(6)]
    for number, file in enumerate(files):
        session.images.image(number).save(file)
    for number in (0, 4):
        files[number].write_bytes(b"not an image")
    images = ImageSet("own", "test", session.classes, [0, 0, 0, 1, 1, 1], files, session.images.transform)
    fresh = Session("fresh", session.model, images)
    assert fresh.first == "example-1"
    assert View.from_query({"image": "example-0"}, {"fresh": fresh}).image == "example-1"
    assert fresh.examples(0, 12) == [1, 2]
    assert fresh.examples(1, 2) == [3, 5]
    fresh.examples(1, 12)
    assert [record.args[0].path for record in caplog.records] == [files[0], files[4]]
    assert len(Page({"fresh": fresh}, tmp_path).gallery("fresh", 1)) == 2
    with pytest.raises(ArgumentError) as caught:
        Session("fresh", session.model, images.subset([0, 4]))
    assert caught.value.argument == "images"


def test_a_busy_model(session, monkeypatch):
    monkeypatch.setattr(limits, "MAX_WAIT", 0.05)
    with session.exclusive(), pytest.raises(BusyError):
        session.upload(Image.new("RGB", (96, 96)), "black")


def test_threads_do_not_disturb_each_other(session, monkeypatch):
    """This head pools with the subset that is set in it, so without the lock threads would use each other's subset."""
    monkeypatch.setattr(session_module, "PROFILE_POINTS", 3)
    fresh = Session("fresh", bird_model("logcov"), session.images)
    alone = Session("alone", bird_model("logcov"), session.images)
    for number in range(3):
        fresh.analyse(f"example-{number}")
    pool = fresh.head.pool

    def slow_pool(reduced):
        time.sleep(0.003)  # lets other threads run between setting the subset and using it
        return pool(reduced)

    monkeypatch.setattr(fresh.head, "pool", slow_pool)
    results: dict[int, torch.Tensor] = {}

    def explain(split: int) -> None:
        analysis = fresh.analyse(f"example-{split % 3}")
        results[split] = fresh.explain(analysis, split, ["vanilla"]).maps["vanilla"][f"last:{64 - split}"]

    threads = [threading.Thread(target=explain, args=(split,)) for split in range(20, 26)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for split, map in results.items():
        expected = alone.explain(alone.analyse(f"example-{split % 3}"), split, ["vanilla"])
        torch.testing.assert_close(map, expected.maps["vanilla"][f"last:{64 - split}"])


def test_a_registered_head_from_outside_the_package(foreign_head, birds):
    session = bird_session("foreign", bird_model(foreign_head), birds)
    analysis = session.analyse("example-2")

    vectors = analysis.reduced[0].flatten(1).double()
    expected = np.linalg.eigvalsh(np.cov(vectors.numpy(), bias=True))[::-1]
    np.testing.assert_allclose(analysis.eigenvalues, expected, rtol=1e-6, atol=1e-12 * expected[0])

    for prediction in session.predict(analysis, 10, "top:1+last:5"):
        scores = plain_scores(session.model, analysis.inputs, prediction.subset)
        torch.testing.assert_close(prediction.probabilities, scores.softmax(0), rtol=1e-4, atol=1e-6)
    explained = session.explain(analysis, 10, ["vanilla", "guided"])
    assert all(map.any() for maps in explained.maps.values() for map in maps.values())
    image = analysis.inputs.clone().requires_grad_()
    with session.head.keeping("top:10"):
        (gradient,) = torch.autograd.grad(session.model(image)[0, analysis.predicted], image)
    map = explained.maps["vanilla"]["top:10"]
    torch.testing.assert_close(map, gradient[0].abs().amax(0), rtol=2e-3, atol=2e-3 * float(map.max()))
