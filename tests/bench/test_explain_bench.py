"""The cost of explaining: a run on a small network, and options out of range."""

import csv

import pytest

from eigengrain.bench.explain import run
from eigengrain.bench.explain_config import ExplainBench


def test_a_run_writes_the_ratio_to_the_passes(tmp_path, capsys):
    out = tmp_path / "explain.csv"
    sizes = {"batch": [2, 1], "img_size": 96, "repeats": 1, "perturbation_steps": 2}
    run(ExplainBench(backbone="test_resnet", subsets=["all", "top:2"], out=str(out), **sizes))
    row, single = csv.DictReader(out.open())
    assert (row["batch"], single["batch"]) == ("2", "1")
    assert float(row["ratio"]) == pytest.approx(float(row["saliency_seconds"]) / float(row["passes_seconds"]), rel=0.02)
    assert (row["one_forward_and_backward_passes"], row["perturbation_steps"]) == ("4", "2")
    assert "4 backward passes" in " ".join(capsys.readouterr().out.split())


def test_options_out_of_range():
    with pytest.raises(ValueError, match="--batch must be at least 1"):
        ExplainBench(batch=0)
