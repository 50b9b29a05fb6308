"""A short run of the fuzz program, and a check that it notices what it is for."""

import sys

import torch
from tests import fuzz


def test_no_failures():
    tallies = fuzz.fuzz(300, seed=1)
    assert set(tallies) == set(fuzz.ROUTES)
    assert sum(tally.samples for tally in tallies.values()) >= 300
    assert sum(tally.compared for tally in tallies.values()) > 20
    assert [failure for tally in tallies.values() for failure in tally.failures] == []


def test_wrong_results_are_noticed(monkeypatch):
    """A gradient above the bound, NaN, an error, and a result that depends on the batch."""
    right = fuzz.sqrt_covariance
    wrong = {
        "times its bound": lambda x, *a, **k: right(x, *a, **k) * 3,
        "not finite": lambda x, *a, **k: right(x, *a, **k) * torch.nan,
        "KeyError": lambda x, *a, **k: {}[0],
        "alone it differs": lambda x, *a, **k: right(x, *a, **k) * (1 - 1e-9 * len(x)),
    }
    for problem, function in wrong.items():
        monkeypatch.setattr(fuzz, "sqrt_covariance", function)
        failures = [failure for tally in fuzz.fuzz(300, seed=1).values() for failure in tally.failures]
        assert any(problem in failure for failure in failures)


def test_the_program_reports_and_repeats_one_batch(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seed", "3", "--only", "5"])
    assert fuzz.main() == 0
    rows = capsys.readouterr().out.splitlines()[1 : 1 + len(fuzz.ROUTES)]
    assert [row.split()[0] for row in rows] == list(fuzz.ROUTES)
    monkeypatch.setattr(fuzz, "run_case", lambda number, seed, device, tallies: tallies["svd"].failures.append("it") or 1)
    assert fuzz.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "it"


def test_a_single_tiny_singular_value_in_float32(monkeypatch):
    """It must be made orthogonal to the others too: otherwise a gradient exceeded its bound by 9e-5."""
    monkeypatch.setattr(fuzz, "ROUTES", fuzz.LOW[:2])
    tally = fuzz.fuzz(1, seed=11, only=622)["gram-float32"]
    assert tally.samples == 12
    assert tally.failures == []
