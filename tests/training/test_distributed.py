"""Two processes are as good as one: a real run of torchrun over gloo."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eigengrain.training import train
from training.small_run import colours, without_batch_statistics

CHANGES = {"epochs": 4, "save_every": 2, "ema": 0.9}


def run_two(module: str, *arguments: str) -> tuple[str, str]:
    """What two processes of a module print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *arguments], env=environment, **pipes) as process:
        try:
            out, error = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends the two, which a kill would leave behind
            out, error = process.communicate(timeout=60)
            pytest.fail(f"two processes of {module} hang; they said {out}\n{error}")
    assert process.returncode == 0, error
    return out, error


def said(out: str) -> list[str]:
    """The lines that begin with this word, of programs that write them at once: gloo of torch 2.9 speaks between them."""
    return re.findall(r"said (.*)\n", out)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run of two processes; every third image less would leave a last batch of two."""
    out = tmp_path_factory.mktemp("two")
    _, error = run_two("training.small_run", str(out / "run"), json.dumps(CHANGES), "", str(out / "losses"))
    assert error.count("epoch 4/4") == 1  # one process speaks
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    losses = []
    train(without_batch_statistics(out, **CHANGES), colours(), lambda e, b, loss: losses.append(loss))
    return out, losses


def test_the_losses_of_20_steps_are_those_of_one_process(one, two):
    shares = [[float(line) for line in (two / f"losses.{rank}").read_text().split()] for rank in (0, 1)]
    together = [(a + b) / 2 for a, b in zip(*shares, strict=True)]
    assert len(together) == len(one[1]) == 20
    assert max(abs(a - b) for a, b in zip(together, one[1], strict=True)) <= 1e-5
    assert max(abs(a - b) for a, b in zip(*shares, strict=True)) > 1e-3  # each process did have images of its own


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


def test_no_process_leaves_before_the_checkpoint_is_written(tmp_path):
    out, _ = run_two("training.slow_save", str(tmp_path))  # torchrun would end the one that still writes
    assert said(out) == ["True", "True"]


def test_a_network_that_outlives_its_processes_keeps_nobody_waiting():
    out, _ = run_two("training.late_net")
    assert said(out) == ["over", "over"]


def test_processes_join_again_and_again_whoever_comes_first():
    out, _ = run_two("training.many_groups")
    assert said(out) == [str([3] * 8)] * 2
