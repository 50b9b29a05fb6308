import pytest
import torch

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain.perturbation import EigenPerturbation
from eigengrain.explorer import limits
from eigengrain.explorer.perturbation import PerturbationRun, State


@pytest.fixture
def analysis(session):
    return session.analyse("example-3")


def test_it_equals_the_method_itself(session, analysis):
    *_, last = PerturbationRun(session, analysis, "small", 40, 6, 0.02).updates(0.05)
    expected = EigenPerturbation(session.model, lr=0.02).perturb(analysis.inputs, "small", 40, 6, progress=False)
    assert last.state is State.DONE
    assert last.step == 6
    assert last.losses == pytest.approx(expected.losses[:, 0].tolist(), rel=1e-5)
    assert not torch.equal(last.pixels, analysis.pixels)


def test_it_can_be_stopped(session, analysis):
    run = PerturbationRun(session, analysis, "large", 40, 1000, 0.02)
    for progress in run.updates(0.05):
        if progress.step >= 2:
            run.stop()
        last = progress
    assert last.state is State.STOPPED
    assert 2 <= last.step < 1000
    assert len(last.losses) == last.step


def test_it_stops_when_the_updates_are_closed(session, analysis):
    run = PerturbationRun(session, analysis, "large", 40, 1000, 0.02)
    updates = run.updates(0.01)
    next(updates)
    updates.close()
    assert run.finished.wait(10)


def test_it_stops_at_the_time_limit(session, analysis, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.2)
    *_, last = PerturbationRun(session, analysis, "large", 40, 1000, 0.02).updates(0.05)
    assert last.state is State.OUT_OF_TIME
    assert last.step < 1000


@pytest.mark.parametrize(
    ("split", "steps", "lr", "argument"),
    [
        (0, 5, 0.1, "split"),
        (5, 0, 0.1, "steps"),
        (5, 10**6, 0.1, "steps"),
        (5, 5, 0.0, "lr"),
        (5, 5, float("nan"), "lr"),
    ],
)
def test_arguments_out_of_range(session, analysis, split, steps, lr, argument):
    with pytest.raises(ArgumentError) as caught:
        PerturbationRun(session, analysis, "large", split, steps, lr)
    assert caught.value.argument == argument


def test_an_unknown_direction(session, analysis):
    with pytest.raises(UnknownName) as caught:
        PerturbationRun(session, analysis, "up", 5, 5, 0.1)
    assert caught.value.choices == ("large", "small")


def test_other_requests_are_answered_meanwhile(session, analysis):
    run = PerturbationRun(session, analysis, "small", 40, 1000, 0.02)
    updates = run.updates(0.05)
    next(updates)
    before = run.progress().step
    session.explain(analysis, ["top:33"], ["deconv"])
    fresh = session.explain(analysis, ["all"], ["vanilla"])
    assert fresh.maps["vanilla"]["all"].any()
    while run.progress().step < before + 2:
        next(updates)
    updates.close()
    assert run.finished.wait(10)
