"""eigengrain train and evaluate from the command line, on synthetic birds."""

import contextlib
import csv
import json
import os
import shutil
import signal
import time

import pytest
import yaml
from PIL import Image

from eigengrain.cli import train as train_command
from eigengrain.cli.main import main
from eigengrain.errors import Interrupted
from eigengrain.models import from_pretrained
from eigengrain.training import loop
from eigengrain.training.config import Train
from training.small_run import PLUMAGE

BIRDS = yaml.safe_dump(PLUMAGE["data"]["options"], default_flow_style=True).strip()


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Words that set the options of the small run, by a file."""
    file = tmp_path_factory.mktemp("options") / "small.yaml"
    file.write_text(yaml.safe_dump(PLUMAGE))
    return ["--config", str(file)]


def evaluate(*words):
    return main(["evaluate", *words, "--device", "cpu", "--workers", "0"])


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_training_writes_its_files_and_args_repeat_it(plumage_run, tmp_path, capsys):
    assert {"args.yaml", "summary.csv", "results.json", "last.pt", "best.pt", "model"} <= set(os.listdir(plumage_run))
    again = tmp_path / "again"
    assert main(["train", "--config", str(plumage_run / "args.yaml"), "--out", str(again), "--json"]) == 0
    assert (plumage_run / "model/model.safetensors").read_bytes() == (again / "model/model.safetensors").read_bytes()
    assert json.loads(capsys.readouterr().out)["model"] == str(again / "model")
    [row] = table(plumage_run / "summary.csv")
    assert row["val_top1"]
    assert row["test_top1"]


def test_evaluate_gives_the_scores_of_the_training(plumage_run, tmp_path):
    scores = json.loads((plumage_run / "results.json").read_text())["scores"]
    for split in ("test", "val"):
        out = tmp_path / f"{split}.csv"
        assert evaluate("--checkpoint", str(plumage_run), "--split", split, "--out", str(out)) == 0
        [row] = table(out)
        assert float(row["top1"]) == pytest.approx(scores[f"{split}_top1"], abs=1e-3)
        assert float(row["loss"]) == pytest.approx(scores[f"{split}_loss"], abs=1e-4)
        assert (row["subset"], row["test_time_augmentation"], row["split"]) == ("as trained", "none", split)
        assert row["torch"]


def test_evaluate_uses_the_precision_of_the_training(options, tmp_path):
    run, scores = tmp_path / "run", {}
    words = ["--amp", "bf16", "--optimiser.lr", "0.02", "--optimiser.classifier_lr_scale", "200", "--out", str(run)]
    assert main(["train", *options, *words]) == 0
    trained = json.loads((run / "results.json").read_text())
    for name, words in {"own": [], "float32": ["--amp", "none"]}.items():
        assert evaluate("--checkpoint", str(run), "--out", str(tmp_path / "out.csv"), *words) == 0
        [scores[name]] = table(tmp_path / "out.csv")
    assert (trained["amp"], scores["own"]["amp"], scores["float32"]["amp"]) == ("bf16", "bf16", "none")
    assert float(scores["own"]["top1"]) == pytest.approx(trained["scores"]["test_top1"], abs=1e-4)
    assert float(scores["own"]["loss"]) == pytest.approx(trained["scores"]["test_loss"], abs=1e-6)
    assert abs(float(scores["float32"]["loss"]) - trained["scores"]["test_loss"]) > 1e-5  # the two can be told apart


def test_evaluate_writes_beside_a_weights_file(plumage_run, tmp_path):
    run = shutil.copytree(plumage_run, tmp_path / "run")
    assert evaluate(str(run / "model/model.safetensors")) == 0
    assert len(table(run / "model/evaluation.csv")) == 1


def test_evaluate_subsets_flips_and_classes_of_a_model_folder(plumage_run, tmp_path):
    out, classes = tmp_path / "out.csv", tmp_path / "classes.csv"
    words = ["--checkpoint", str(plumage_run / "model"), "--data", "plumage", "--data_options", BIRDS, "--flip"]
    words += ["--subset", "all", "--subset=top:1", "--subset", "top:1+last:1", "--out", str(out)]
    assert evaluate(*words, "--per_class", str(classes)) == 0
    rows = table(out)
    assert [row["subset"] for row in rows] == ["all", "top:1", "top:1+last:1"]
    assert {row["test_time_augmentation"] for row in rows} == {"flip"}
    by_class = table(classes)
    assert len(by_class) == 9
    assert [row["class"] for row in by_class[:3]] == from_pretrained(plumage_run / "model").class_names
    for row in rows:
        own = [r for r in by_class if r["subset"] == row["subset"]]
        assert sum(int(r["samples"]) for r in own) == int(row["samples"]) == 15
        assert 100 * sum(int(r["correct"]) for r in own) / 15 == pytest.approx(float(row["top1"]), abs=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "RUN", "--workers", "0"],
        ["predict", "photo.png", "--checkpoint", "RUN"],
        ["explain", "RUN", "--count", "2", "--out", "maps"],
        ["export", "RUN", "--format", "pt2", "--out", "model.pt2"],
    ],
    ids=lambda words: words[0],
)
def test_a_stopped_run_can_be_used(plumage_run, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plumage_run, "stopped", ignore=shutil.ignore_patterns("model", "results.json"))
    Image.new("RGB", (40, 40)).save("photo.png")
    assert main([word.replace("RUN", "stopped") for word in words] + ["--device", "cpu"] * (words[0] != "export")) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eigengrain: note: ")]
    assert "stopped/last.pt" in line
    assert "after epoch 1 of 1" in line


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "missing"],
        ["evaluate", "RUN/.."],
        ["evaluate"],
        ["evaluate", "RUN", "--split", "tset"],
        ["evaluate", "RUN", "--data_options", BIRDS],
        ["evaluate", "RUN", "--subset", "topp:3"],
        ["evaluate", "RUN", "--subset", "top:30"],
        ["evaluate", "RUN/model", "--data", "plumage", "--data_options", BIRDS.replace("classes: 3", "classes: 5")],
        ["evaluate", "RUN", "--per_class", "/proc"],
        ["evaluate", "RUN", "--img_size", "64"],
        ["train", "--optimiser.lrr", "1"],
        ["train", "--amp", "bf61"],
        ["train", "--out", "RUN"],
        ["train", "--out", "/proc/none"],
        ["train", "--data.options", "{clases: 3}"],
    ],
)
def test_mistakes_exit_with_2_and_one_line(plumage_run, options, capsys, words):
    command, *rest = (word.replace("RUN", str(plumage_run)) for word in words)
    assert main([command, *(options if command == "train" else []), *rest]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_messages_name_options(plumage_run, options, capsys):
    assert main(["train", *options, "--out", str(plumage_run)]) == 2
    problem = f"--out already contains a run, got '{plumage_run}': continue it with --resume or use another folder"
    assert capsys.readouterr().err == f"eigengrain: error: {problem}\n"


def test_options_of_another_version_are_reported_with_their_file(plumage_run, tmp_path, capsys):
    newer = shutil.copytree(plumage_run, tmp_path / "newer")
    with (newer / "args.yaml").open("a") as file:
        file.write("shine: 3\n")
    assert evaluate("--checkpoint", str(newer)) == 2
    assert str(newer / "args.yaml") in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_several_processes_reports_the_signal(rank, monkeypatch, capsys):
    def stopped(config):
        raise Interrupted(signal.SIGTERM, "after epoch 3")

    monkeypatch.setattr(loop, "train", stopped)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    assert train_command.run(Train()) == 143
    assert bool(capsys.readouterr().err) == (rank == 0)


def test_a_dry_run_prints_the_plan_and_writes_nothing(options, tmp_path, capsys):
    out = tmp_path / "run"
    recipe = ["--recipe", "birds-resnet50-modern", "--model.pretrained", "false", "--amp", "none", "--dry_run", "--json"]
    assert main(["train", *options, *recipe, "--out", str(out)]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["data"] == "plumage: 12 training, 3 validation, 15 test images, 3 classes"
    assert plan["rates"].startswith("backbone 0.006 ")
    assert plan["schedule"].startswith("cosine, 1 epoch of 3 updates, ")
    assert plan["model"].endswith("map (96, 2, 2) -> vector 6")
    assert not out.exists()


def test_print_config_shows_the_recipe_with_overrides(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--optimiser.lr", "0.5", "--recipe", "cars-vgg16-paper", "--print_config"])
    assert stop.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["optimiser"]["lr"], shown["recipe"], shown["epochs"]) == (0.5, "cars-vgg16-paper", 150)


def test_a_real_sigterm_exits_with_143_and_a_checkpoint(options, tmp_path):
    """A signal from another process in the middle of the training."""
    out, log = tmp_path / "run", tmp_path / "log"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log.open("w") as file, contextlib.redirect_stderr(file):
                code = main(["train", *options, "--epochs", "100000", "--save_every", "1", "--out", str(out)])
        finally:
            os._exit(code)
    deadline = time.time() + 100
    while not (out / "last.pt").exists() and time.time() < deadline:
        time.sleep(0.05)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143, log.read_text()
    assert log.read_text().splitlines()[-1].startswith("eigengrain: ")
    assert [p.name for p in out.iterdir() if p.name.endswith(".tmp")] == []
