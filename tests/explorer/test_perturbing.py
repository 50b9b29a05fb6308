import pytest
import torch

from eigengrain.explain.perturbation import EigenPerturbation
from eigengrain.explorer.perturbing import Perturbation


@pytest.fixture
def look(lens):
    return lens.look("example-3")


def test_it_does_what_the_method_does(lens, look):
    *_, last = Perturbation(lens, look, "small", 40, 6, 0.02).updates(0.05)
    expected = EigenPerturbation(lens.model, lr=0.02).perturb(look.inputs, "small", 40, 6, progress=False)
    assert last.ended == "done"
    assert last.step == 6
    assert last.losses == pytest.approx(expected.losses[:, 0].tolist(), rel=1e-5)
    assert not torch.equal(last.pixels, look.pixels)


def test_it_is_stopped(lens, look):
    run = Perturbation(lens, look, "large", 40, 1000, 0.02)
    for progress in run.updates(0.05):
        if progress.step >= 2:
            run.stop()
        last = progress
    assert last.ended == "stopped"
    assert 2 <= last.step < 1000
    assert len(last.losses) == last.step


def test_it_ends_when_nobody_looks(lens, look):
    run = Perturbation(lens, look, "large", 40, 1000, 0.02)
    updates = run.updates(0.01)
    next(updates)
    updates.close()
    assert run.wait(10)


def test_it_ends_in_time(lens, look):
    *_, last = Perturbation(lens, look, "large", 40, 1000, 0.02, seconds=0.2).updates(0.05)
    assert "limit" in last.ended
    assert last.step < 1000


@pytest.mark.parametrize(
    ("toward", "split", "steps", "rate", "said"),
    [
        ("up", 5, 5, 0.1, "large or small"),
        ("large", 0, 5, 0.1, "split"),
        ("large", 5, 0, 0.1, "steps"),
        ("large", 5, 10**6, 0.1, "steps"),
        ("large", 5, 5, 0.0, "rate"),
        ("large", 5, 5, float("nan"), "rate"),
    ],
)
def test_numbers_out_of_range(lens, look, toward, split, steps, rate, said):
    with pytest.raises(ValueError, match=said):
        Perturbation(lens, look, toward, split, steps, rate)


def test_others_are_answered_meanwhile(lens, look):
    run = Perturbation(lens, look, "small", 40, 1000, 0.02)
    updates = run.updates(0.05)
    next(updates)
    before = run._now().step
    lens.explain(look, 33, ["deconv"])
    fresh = lens.explain(look, 33, ["vanilla"])
    assert fresh.maps["vanilla"]["all"].any()
    while run._now().step < before + 2:
        next(updates)
    updates.close()
    assert run.wait(10)
