"""Results of a session against the model itself."""

import math
import threading
import time
from dataclasses import replace

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
from eigengrain.explorer.session import Prediction, Session, spectrum_facts
from eigengrain.explorer.view import View
from eigengrain.models.calibration import encode_subspace
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
    subsets = ["all", "top:40", "last:24", "top:2"]
    explained = session.explain(analysis, subsets, ["vanilla", "guided"], target)
    number = target if target is not None else int(plain_scores(session.model, analysis.inputs, "all").argmax())
    assert explained.target == session.classes[number]
    assert list(explained.maps) == ["vanilla", "guided"]
    for subset, map in explained.maps["vanilla"].items():
        image = analysis.inputs.clone().requires_grad_()
        with session.head.keeping(subset):
            (gradient,) = torch.autograd.grad(session.model(image)[0, number], image)
        torch.testing.assert_close(map, gradient[0].abs().amax(0), rtol=2e-3, atol=2e-3 * float(map.max()))
    assert session.explain(analysis, subsets, ["vanilla", "guided"], target) is explained  # cached


def test_smooth_maps_are_features_times_gradient(session, analysis):
    maps = session.explain(analysis, ["all", "last:30"]).maps["smooth"]
    for subset, map in maps.items():
        reduced = analysis.reduced.clone().requires_grad_()
        with session.head.keeping(subset):
            score = session.model.forward_vector(session.head.pool(reduced))[0, analysis.predicted]
        (gradient,) = torch.autograd.grad(score, reduced)
        small = (analysis.reduced * gradient).sum(1, keepdim=True).clamp_min(0)
        expected = torch.nn.functional.interpolate(small, map.shape, mode="bilinear")[0, 0]
        torch.testing.assert_close(map, expected, rtol=1e-3, atol=1e-3 * float(expected.max()))


@pytest.fixture
def calibrated(birds):
    """A session on a model with a temperature, to which one of its examples is not familiar."""
    model = bird_model()
    with torch.no_grad():
        means = model.forward_features(bird_session("raw", model, birds).analyse("example-4").inputs).mean((-2, -1))
    subspace = torch.stack([means[0], torch.zeros_like(means[0])])
    model.calibration = {"temperature": 0.01, "familiarity_threshold": 0.999, "subspace": encode_subspace(subspace)}
    return bird_session("calibrated", model, birds)


def test_answers_use_the_temperature_and_the_threshold_of_the_model(calibrated, session):
    answers = {key: calibrated.answer(calibrated.analyse(key)) for key in ("example-4", "example-0")}
    for key, (prediction, _) in answers.items():
        scores = plain_scores(session.model, session.analyse(key).inputs, "all")
        torch.testing.assert_close(prediction.probabilities, (scores / 0.01).softmax(0), rtol=1e-3, atol=1e-6)
        assert calibrated.predict(calibrated.analyse(key), 20)[0].probabilities.equal(prediction.probabilities)
    assert [doubt for _, doubt in answers.values()] == ["", "none of these"]


def test_unsure_below_the_required_probability(session, calibrated):
    assert session.answer(session.analyse("example-1"))[1] == "unsure"  # near 1/3 for each of three classes
    strict = Session("strict", calibrated.model, session.images, min_probability=0.999999)
    assert strict.answer(strict.analyse("example-4"))[1] == "unsure"


@pytest.mark.parametrize(
    ("classes", "highest", "above_zero", "opinion"),
    [
        (2, 0.64, 5, False),
        (2, 0.66, 5, True),
        (10, 0.19, 5, False),
        (10, 0.21, 5, True),
        (200, 0.011, 5, True),
        (10, 0.9, 0, False),
    ],
)
def test_no_opinion_near_chance_or_without_eigenvalues(classes, highest, above_zero, opinion):
    rest = (1 - highest) / (classes - 1)
    probabilities = torch.tensor([highest, *[rest] * (classes - 1)])
    assert Prediction("small", "last:5", 5, above_zero, probabilities).has_opinion is opinion


def test_the_first_cut_is_at_four_fifths_of_the_rank(session):
    analysis = session.analyse("example-0")
    for rank, split in ((64, 52), (57, 46), (2, 1), (1, 1), (0, 1)):
        values = torch.arange(64, 0, -1).double() * (torch.arange(64) < rank)
        assert session.default_split(replace(analysis, eigenvalues=values)) == split


def test_mistakes_are_the_examples_that_the_model_gets_wrong(session):
    fresh = Session("fresh", session.model, session.images)
    for _ in fresh.find_mistakes(2, seconds=60):
        assert len(fresh.mistakes) <= 2
    assert fresh.searched < len(fresh.images)
    list(fresh.find_mistakes(100, seconds=60))
    assert fresh.searched == len(fresh.images)
    wrong = {}
    for number in range(len(fresh.images)):
        analysis = session.analyse(f"example-{number}")
        if analysis.predicted != analysis.label:
            wrong[number] = (analysis.label, analysis.predicted)
    assert {mistake.number: mistake[1:] for mistake in fresh.mistakes} == wrong
    unlabelled = Session("other classes", session.model, session.images, labelled=False)
    assert list(unlabelled.find_mistakes(2, seconds=60)) == unlabelled.mistakes == []


def test_another_model_analyses_the_same_image(session, birds):
    other = bird_session("other", bird_model("mpncov", seed=1), birds.subset([8, 4]))
    other.classes = [other.classes[number] for number in (2, 0, 1)]
    analysis = other.analyse_of(session, "example-4")
    assert analysis.pixels.equal(session.analyse("example-4").pixels)
    assert other.classes[analysis.label] == session.classes[session.analyse("example-4").label]
    assert other.analyse_of(session, "example-4") is analysis
    assert other.analyse_of(other, "example-1").pixels.equal(analysis.pixels)


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


def test_memory_is_bounded_with_the_pixels_of_maps_and_the_scores_of_further_subsets(birds, monkeypatch):
    model = bird_model()
    one = bird_session("seb", model, birds).analyse("example-0")
    height, width = one.pixels.shape[1:]
    monkeypatch.setattr(limits, "CACHE_BYTES", 2 * 2 * 4 * height * width)  # half of it for two maps, without their pixels
    session = bird_session("seb", model, birds)
    first = session.explain(one, ["all"])
    session.explain(one, ["top:3"])
    assert session.explain(one, ["all"]) is not first
    monkeypatch.setattr(limits, "CACHE_BYTES", 4 * one.bytes)  # room for two analyses
    session = bird_session("seb", model, birds)
    one, other = session.analyse("example-0"), session.analyse("example-4")
    assert session.analyse("example-0") is one
    session.predict(other, 3, "top:1+last:5")
    assert session.analyse("example-4") is other
    assert session.analyse("example-0") is not one


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
        results[split] = fresh.explain(analysis, [f"last:{64 - split}"], ["vanilla"]).maps["vanilla"][f"last:{64 - split}"]

    threads = [threading.Thread(target=explain, args=(split,)) for split in range(20, 26)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for split, map in results.items():
        expected = alone.explain(alone.analyse(f"example-{split % 3}"), [f"last:{64 - split}"], ["vanilla"])
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
    explained = session.explain(analysis, ["all", "top:10", "last:54"], ["smooth", "vanilla", "guided"])
    assert all(map.any() for maps in explained.maps.values() for map in maps.values())
    image = analysis.inputs.clone().requires_grad_()
    with session.head.keeping("top:10"):
        (gradient,) = torch.autograd.grad(session.model(image)[0, analysis.predicted], image)
    map = explained.maps["vanilla"]["top:10"]
    torch.testing.assert_close(map, gradient[0].abs().amax(0), rtol=2e-3, atol=2e-3 * float(map.max()))


def test_an_example_from_a_file_has_its_name(session, tmp_path):
    session.images.image(0).save(tmp_path / "my bird.png")
    images = ImageSet("mine", "test", session.classes, [0], [tmp_path / "my bird.png"], transform=session.transform)
    assert Session("files", session.model, images).analyse("example-0").title == "my bird.png"
