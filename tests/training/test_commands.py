"""eigengrain train and evaluate from the command line, on drawn birds."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from eigengrain.cli import evaluate as evaluate_command
from eigengrain.cli import main as cli
from eigengrain.cli import train as train_command
from eigengrain.cli.evaluate import Evaluate
from eigengrain.data.transforms_config import Transforms
from eigengrain.models import from_pretrained
from eigengrain.recipes import expand
from eigengrain.training import loop
from eigengrain.training.config import Train, from_mapping
from eigengrain.training.signals import Interrupted
from training.small_run import SIZE

BIRDS = f"{{classes: 3, per_class: 5, size: {SIZE}, cache: false}}"
SMALL = {
    "data.name": "plumage",
    "data.options": BIRDS,
    "data.transforms.kind": "none",
    "data.transforms.img_size": str(SIZE),
    "data.val_fraction": "0.2",
    "model.backbone": "test_resnet",
    "model.reduce": "3",
    "model.last_stride": "1",
    "epochs": "1",
    "batch_size": "4",
    "workers": "0",
    "device": "cpu",
}


@pytest.fixture(autouse=True, scope="module")
def commands():
    entries = (
        cli.Command("train", "train a model", Train, "eigengrain.cli.train:run"),
        cli.Command("evaluate", "accuracy of a model", Evaluate, "eigengrain.cli.evaluate:run"),
    )
    names = [entry.name for entry in entries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "COMMANDS", (*(c for c in cli.COMMANDS if c.name not in names), *entries))
        yield


def words(options):
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def train(*more, **changes):
    return cli.main(["train", *expand([*words({**SMALL, **changes}), *more])])


def evaluate(*more):
    return cli.main(["evaluate", *evaluate_command.expand(["--device", "cpu", "--workers", "0", *more])])


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert train(out=str(out)) == 0
    return out


def test_training_leaves_its_files_and_args_repeat_it(trained, tmp_path, capsys):
    assert {"args.yaml", "summary.csv", "results.json", "last.pt", "best.pt", "model"} == set(os.listdir(trained))
    config = from_mapping(yaml.safe_load((trained / "args.yaml").read_text()))
    assert (config.data.name, config.model.reduce, config.data.options["classes"]) == ("plumage", 3, 3)
    again = tmp_path / "again"
    assert cli.main(["train", "--config", str(trained / "args.yaml"), "--out", str(again)]) == 0
    assert (trained / "model/model.safetensors").read_bytes() == (again / "model/model.safetensors").read_bytes()
    assert "epoch 1 (select: last): val_top1" in capsys.readouterr().out
    [row] = table(trained / "summary.csv")
    assert row["val_top1"]
    assert row["test_top1"]


def test_evaluate_says_what_training_said(trained, tmp_path, capsys):
    reached = json.loads((trained / "results.json").read_text())["scores"]
    for split in ("test", "val"):
        out = tmp_path / f"{split}.csv"
        assert evaluate("--checkpoint", str(trained), "--split", split, "--out", str(out)) == 0
        [row] = table(out)
        assert float(row["top1"]) == pytest.approx(reached[f"{split}_top1"], abs=1e-3)
        assert float(row["loss"]) == pytest.approx(reached[f"{split}_loss"], abs=1e-4)
        assert (row["subset"], row["test_time_augmentation"], row["split"]) == ("as trained", "none", split)
        assert row["torch"]
    assert "as trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"kind": "timm", "crop_pct": 0.95, "img_size": 64}, {"crop_pct": 0.95}),
        ({"kind": "paper", "resize": 64, "img_size": 64}, {"resize": 32}),
        ({"kind": "scripts", "keep_aspect": False, "img_size": 64}, {"keep_aspect": False, "resize": None}),
    ],
)
def test_other_sizes_are_prepared_as_in_training(own, expected):
    training = from_mapping({"data": {"transforms": own}})
    found = evaluate_command._transforms(Evaluate("x", img_size=32), None, training)
    assert found == Transforms(**{**own, "img_size": 32, **expected})


def test_evaluate_subsets_flips_and_classes_of_a_plain_model(trained, tmp_path, capsys):
    out, classes = tmp_path / "out.csv", tmp_path / "classes.csv"
    options = ["--checkpoint", str(trained / "model"), "--data", "plumage", "--data_options", BIRDS, "--flip"]
    options += ["--subset", "all", "--subset=top:1", "--subset", "top:1+last:1", "--out", str(out)]
    assert evaluate(*options, "--per_class", str(classes)) == 0
    rows = table(out)
    assert [row["subset"] for row in rows] == ["all", "top:1", "top:1+last:1"]
    assert {row["test_time_augmentation"] for row in rows} == {"flip"}
    by_class = table(classes)
    assert len(by_class) == 9
    names = from_pretrained(trained / "model").class_names
    assert [row["class"] for row in by_class[:3]] == names
    for row in rows:
        mine = [r for r in by_class if r["subset"] == row["subset"]]
        assert sum(int(r["samples"]) for r in mine) == int(row["samples"]) == 15
        assert 100 * sum(int(r["correct"]) for r in mine) / 15 == pytest.approx(float(row["top1"]), abs=1e-3)
    assert "top:1+last:1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--checkpoint", "none"], "there is no folder 'none'"),
        (["--checkpoint", "RUN/.."], "is no folder of 'eigengrain train' or of save_pretrained: did you mean "),
        ([], "name the model: eigengrain evaluate CHECKPOINT"),
        (["--checkpoint", "RUN", "--split", "tset"], "unknown --split 'tset': did you mean 'test'"),
        (["--checkpoint", "RUN", "--data_options", BIRDS], "--data_options are for the data set that --data names"),
        (["--checkpoint", "RUN", "--subset", "topp:3"], "cannot read eigenvalue subset 'topp:3'"),
        (["--checkpoint", "RUN", "--subset", "top:30"], "asks for 30 of 3 eigenvalues"),
        (
            ["--checkpoint", "RUN/model", "--data", "plumage", "--data_options", BIRDS.replace("classes: 3", "classes: 5")],
            "3 classes and plumage has 5",
        ),
        (
            ["--checkpoint", "RUN", "--per_class", "/proc"],
            "cannot write the file /proc: choose another place with --per_class",
        ),
        (["--checkpoint", "RUN", "--img_size", "64"], "--img_size has no effect on images that --kind none leaves as they"),
        (["--checkpoint", "RUN", "--subsett", "top:3"], "unknown option '--subsett': did you mean '--subset'"),
    ],
)
def test_evaluate_refuses_in_one_line(trained, capsys, more, said):
    assert evaluate(*(word.replace("RUN", str(trained)) for word in more)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_train_refuses_in_one_line(trained, tmp_path, capsys):
    for more, said in (
        (["--optimiser.lrr", "1"], "unknown option '--optimiser.lrr': did you mean '--optimiser.lr'"),
        (["--amp", "bf61"], "unknown --amp 'bf61': did you mean 'bf16'"),
        (["--out", str(trained)], "holds a run already"),
        (["--out", "/proc/none"], "cannot make the folder"),
        (["--data.options", "{clases: 3}"], "did you mean 'classes'"),
    ):
        assert train(*more, out=str(tmp_path / "x")) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_options_of_another_version_are_said_to_be_in_the_file(trained, tmp_path, capsys):
    newer = tmp_path / "newer"
    shutil.copytree(trained, newer)
    with (newer / "args.yaml").open("a") as file:
        file.write("shine: 3\n")
    assert evaluate("--checkpoint", str(newer)) == 2
    assert f"the options in {newer / 'args.yaml'} cannot be read: unknown option 'shine'" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_one_says_that_they_were_stopped(rank, monkeypatch, capsys):
    def stopped(config):
        raise Interrupted(signal.SIGTERM, "here")

    monkeypatch.setattr(loop, "train", stopped)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    assert train_command.run(Train()) == 143
    assert capsys.readouterr().err.count("stopped by SIGTERM") == (1 if rank == 0 else 0)


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    recipe = ["--recipe", "birds-resnet50-modern", "--model.pretrained", "false", "--amp", "none", "--dry_run"]
    assert train(*recipe, out=str(out)) == 0
    plan = capsys.readouterr().out
    assert "12 training, 3 validation, 15 test images, 3 classes" in plan
    assert "backbone 0.006" in plan
    assert "classifier 0.006" in plan
    assert "cosine, 1 epoch of 3 updates" in plan
    assert "map (96, 2, 2) -> vector 6" in plan
    assert "an epoch" in plan
    assert not out.exists()


def test_print_config_shows_the_recipe_with_overrides(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *expand(["--optimiser.lr", "0.5", "--recipe", "cars-vgg16-paper", "--print_config"])])
    assert stop.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["optimiser"]["lr"], shown["recipe"], shown["epochs"]) == (0.5, "cars-vgg16-paper", 150)


def test_a_real_sigterm_ends_with_143_and_a_checkpoint(tmp_path):
    """From outside, on a process that is in the middle of its work."""
    code = (
        "import sys; from eigengrain.cli import main as cli; from eigengrain.training.config import Train; "
        "entry = cli.Command('train', 'x', Train, 'eigengrain.cli.train:run'); "
        "cli.COMMANDS = (*(c for c in cli.COMMANDS if c.name != 'train'), entry); sys.exit(cli.main(sys.argv[1:]))"
    )
    options = {**SMALL, "epochs": "100000", "save_every": "1", "out": str(tmp_path / "run")}
    process = subprocess.Popen([sys.executable, "-c", code, "train", *words(options)], stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 100
    while not (tmp_path / "run/last.pt").exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 143, error
    assert "stopped by SIGTERM" in error
    assert "--resume" in error
    assert "Traceback" not in error
    assert [p.name for p in Path(tmp_path / "run").iterdir() if p.name.endswith(".tmp")] == []
