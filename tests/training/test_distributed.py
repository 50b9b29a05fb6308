"""Two processes give the results of one: a real run of torchrun over gloo."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eigengrain.training import train
from training.small_run import colours, without_batch_statistics
from training.two_processes import CHANGES, part_gradients, sharp, snapmix_gradients


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Folder of two processes of :mod:`training.two_processes`; that they exit is part of the test."""
    out = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folders = (str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "-m", "training.two_processes", str(out)], env=environment, **pipes) as process:
        try:
            _, error = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends the two processes, which a kill would leave behind
            _, error = process.communicate(timeout=60)
            pytest.fail(f"the two processes hang: {error}")
    assert process.returncode == 0, error
    assert error.count("epoch 4/4") == 1  # one process prints
    return out


@pytest.fixture(scope="module")
def seen(two):
    return [json.loads((two / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    losses = []
    train(without_batch_statistics(out, **CHANGES), colours(), lambda e, b, loss: losses.append(loss))
    return out, losses


def test_the_losses_of_20_steps_are_those_of_one_process(one, seen):
    shares = [each["losses"] for each in seen]
    together = [(a + b) / 2 for a, b in zip(*shares, strict=True)]
    assert len(together) == len(one[1]) == 20
    assert max(abs(a - b) for a, b in zip(together, one[1], strict=True)) <= 1e-5
    assert max(abs(a - b) for a, b in zip(*shares, strict=True)) > 1e-3  # each process had its own images


def test_accuracy_counts_every_image_once(one, two):
    rows = [list(csv.DictReader((folder / "summary.csv").open())) for folder in (one[0], two / "run")]
    assert len(rows[0]) == 4
    for alone, shared in zip(*rows, strict=True):
        assert (alone["test_top1"], alone["test_top5"]) == (shared["test_top1"], shared["test_top5"])
        for column in ("train_loss", "test_loss", "gradient_norm"):
            assert float(alone[column]) == pytest.approx(float(shared[column]), abs=1e-4), column


def test_the_model_is_the_same(one, two):
    alone, shared = (load_file(folder / "model/model.safetensors") for folder in (one[0], two / "run"))
    assert alone.keys() == shared.keys()
    assert max((alone[name] - shared[name]).abs().max().item() for name in alone) <= 1e-4


def test_a_frozen_backbone_whose_features_are_shared(seen, two, tmp_path):
    losses = []
    config = without_batch_statistics(tmp_path, epochs=2, freeze="backbone", accumulate=2)
    train(config, colours(), lambda e, b, loss: losses.append(loss))
    together = [(a + b) / 2 for a, b in zip(*(each["frozen"] for each in seen), strict=True)]
    assert len(together) == len(losses) == 10
    assert max(abs(a - b) for a, b in zip(together, losses, strict=True)) <= 1e-5
    alone, shared = (load_file(folder / "model/model.safetensors") for folder in (tmp_path, two / "frozen"))
    assert max((alone[name] - shared[name]).abs().max().item() for name in alone) <= 1e-4


def test_mixed_images_and_class_weights(seen):
    assert seen[0]["mixed"] == seen[1]["mixed"]  # one model
    assert math.isfinite(seen[0]["mixed"]["test_loss"])


def test_sharpness_aware_steps(seen, two, tmp_path):
    losses = sharp(tmp_path)
    together = [(a + b) / 2 for a, b in zip(*(each["sharp"] for each in seen), strict=True)]
    assert len(together) == len(losses) == 10
    assert max(abs(a - b) for a, b in zip(together, losses, strict=True)) <= 1e-5
    alone, shared = (load_file(folder / "model/model.safetensors") for folder in (tmp_path, two / "sharp"))
    assert max((alone[name] - shared[name]).abs().max().item() for name in alone) <= 1e-4


def test_snapmix_with_batch_statistics_resumes_in_both_processes(seen):
    assert seen[0]["snapmixed"] == seen[1]["snapmixed"]  # one model
    assert math.isfinite(seen[0]["snapmixed"]["test_loss"])


def test_gradients_of_batches_that_snapmix_mixed_are_averaged(seen):
    assert seen[0]["snapmix"] == seen[1]["snapmix"]
    assert seen[0]["snapmix"] == pytest.approx(snapmix_gradients(0, 1), rel=1e-9)


def test_no_process_exits_before_the_checkpoint_is_written(seen):
    assert [each["saved"] for each in seen] == [True, True]


def test_processes_join_repeatedly_in_any_order(seen):
    assert [each["sums"] for each in seen] == [[3] * 8] * 2


@pytest.mark.parametrize("head", ["transfg", "aftrans"])
def test_gradients_of_loss_terms_are_averaged(seen, head):
    assert seen[0]["parts"][head] == seen[1]["parts"][head]
    assert seen[0]["parts"][head] == pytest.approx(part_gradients(head, 0, 1), rel=1e-9)
