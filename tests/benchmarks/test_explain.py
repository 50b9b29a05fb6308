"""The cost of explaining: a run on a small network, and options out of range."""

import csv

import pytest
import torch
from benchmarks.explain import ExplainBench, run

from benchmarks import explain
from eigengrain.errors import ArgumentError
from eigengrain.explain import EigenPerturbation


def test_a_run_writes_the_ratio_to_the_passes(tmp_path, capsys):
    out = tmp_path / "explain.csv"
    sizes = {"batch": [2, 1], "img_size": 96, "repeats": 1, "perturbation_steps": 2}
    before = torch.get_rng_state()
    run(ExplainBench(backbone="test_resnet", subsets=["all", "top:2"], out=str(out), **sizes))
    assert torch.equal(torch.get_rng_state(), before)  # random weights and images are drawn apart
    row, single = csv.DictReader(out.open())
    assert (row["batch"], single["batch"]) == ("2", "1")
    assert float(row["ratio"]) == pytest.approx(float(row["saliency_seconds"]) / float(row["passes_seconds"]), rel=0.02)
    assert (row["one_forward_and_backward_passes"], row["perturbation_steps"]) == ("4", "2")


def test_what_does_not_fit_into_memory_has_a_row_without_numbers(tmp_path, capsys, monkeypatch):
    def for_one_image(work):
        def limited(what, images, *rest, **options):
            if len(images) > 1:
                raise torch.OutOfMemoryError
            return work(what, images, *rest, **options)

        return limited

    monkeypatch.setattr(explain, "attribute_rules", for_one_image(explain.attribute_rules))
    monkeypatch.setattr(EigenPerturbation, "perturb", for_one_image(EigenPerturbation.perturb))
    out = tmp_path / "explain.csv"
    sizes = {"batch": [1, 2], "img_size": 96, "repeats": 1, "perturbation_steps": 1}
    run(ExplainBench(backbone="test_resnet", subsets=["all"], rules=["vanilla"], out=str(out), **sizes))
    first, second = csv.DictReader(out.open())
    assert float(first["ratio"]) > 0
    assert float(second["passes_seconds"]) > 0
    assert {second[name] for name in ("saliency_seconds", "ratio", "perturbation_seconds")} == {""}
    assert "–" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": []}, {"img_size": 16}, {"repeats": 0}])
def test_options_out_of_range(options):
    with pytest.raises(ArgumentError) as error:
        ExplainBench(**options)
    assert [error.value.argument] == list(options)
