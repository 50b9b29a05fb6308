"""``eigengrain explore`` on the command line."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from safetensors.torch import load_file

from eigengrain.cli import main as cli
from eigengrain.cli.explore import Explore
from eigengrain.explorer import opening
from eigengrain.explorer.opening import find_demo, open_lenses, train_small
from eigengrain.models import save_pretrained
from explorer.hostile import pickled_weights
from explorer.small_model import bird_model


@pytest.fixture
def folder(tmp_path):
    save_pretrained(bird_model(), tmp_path / "model", ["a", "b", "c"])
    return tmp_path / "model"


def one_line(capsys, *words):
    """What a refused command says."""
    assert cli.main(["explore", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    return said


def test_a_pickle_under_another_name_is_refused_and_not_run(folder, tmp_path, capsys):
    pickled_weights(folder / "model.safetensors", tmp_path / "touched")
    assert "not a safetensors file" in one_line(capsys, "--checkpoint", folder)
    assert not (tmp_path / "touched").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    assert "there is no folder" in one_line(capsys, "--checkpoint", tmp_path / "none")
    assert "not a folder of save_pretrained" in one_line(capsys, "--checkpoint", tmp_path)
    file = pickled_weights(tmp_path / "model.safetensors", tmp_path / "touched")
    assert "there is no folder" in one_line(capsys, "--checkpoint", file)
    assert not (tmp_path / "touched").exists()


def test_a_head_without_eigenvalues_is_refused(tmp_path, capsys):
    save_pretrained(bird_model("gap"), tmp_path)
    assert "explore a model with the head mpncov" in one_line(capsys, "--checkpoint", tmp_path)


def test_others_need_a_password_and_it_is_said_before_anything_is_opened(capsys, monkeypatch):
    monkeypatch.delenv("EIGENGRAIN_PASSWORD", raising=False)
    monkeypatch.setattr(opening, "open_lenses", lambda config: pytest.fail("opened"))
    assert "--password" in one_line(capsys, "--host", "0.0.0.0")


def test_options_out_of_range(capsys):
    assert "--port" in one_line(capsys, "--port", "0")
    assert "--split" in one_line(capsys, "--split", "tset")


def test_models_of_the_demo_are_found(tmp_path):
    for head in ("gap", "mpncov", "mpncov+seb", "isqrt"):
        save_pretrained(bird_model(head), tmp_path / head / "model")
    (tmp_path / "broken" / "model").mkdir(parents=True)
    (tmp_path / "broken" / "model" / "model.safetensors").touch()
    assert [run.name for run in find_demo(tmp_path)] == ["mpncov+seb", "mpncov"]


def test_a_bare_folder_is_shown_drawn_birds(folder):
    (lens,) = open_lenses(Explore([str(folder)], device="cpu")).values()
    assert lens.images.name == "plumage"
    assert not lens.labelled  # its classes are others
    assert lens.look("example-0").label is None


def test_images_that_do_not_fit_are_refused(folder, capsys):
    assert "do not fit" in one_line(capsys, "--checkpoint", folder, "--data", "plumage")


def test_the_page_is_served_until_ctrl_c(folder):
    command = [sys.executable, "-m", "eigengrain.cli.main", "explore", "--checkpoint", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            line = program.stdout.readline()
            assert "Ctrl-C" in line, program.stderr.read()
            assert httpx.get(line.split()[0], trust_env=False).status_code == 200
            program.send_signal(signal.SIGINT)
            assert program.wait(30) == 0
        finally:
            program.kill()


@pytest.mark.slow
def test_a_small_model_is_trained_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train_small(opening.OWN, "cpu")
    weights = load_file(folder / "model" / "model.safetensors")
    rows = json.loads((folder / "results.json").read_text())
    assert rows
    before = os.stat(folder / "model" / "model.safetensors").st_mtime_ns
    assert train_small(opening.OWN, "cpu") == folder  # once only
    assert os.stat(folder / "model" / "model.safetensors").st_mtime_ns == before
    (lens,) = open_lenses(Explore(device="cpu")).values()
    assert lens.labelled
    assert set(lens.model.state_dict()) == set(weights)
    looks = [lens.look(f"example-{number}") for number in range(100)]
    right = sum(int(look.scores["all"].argmax()) == look.label for look in looks)
    assert right > 25  # of ten classes
