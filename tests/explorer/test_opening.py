"""Which models and example images the page opens."""

import json
import os

import pytest
from safetensors.torch import load_file

from eigengrain.errors import ArgumentError, FileError
from eigengrain.explorer import opening
from eigengrain.explorer.opening import find_demo, open_sessions, train_small
from eigengrain.models import save_pretrained
from explorer.hostile import pickled_weights
from explorer.small_model import bird_model


@pytest.fixture
def folder(tmp_path):
    save_pretrained(bird_model(), tmp_path / "model", ["a", "b", "c"])
    return tmp_path / "model"


def test_a_pickle_as_weights_is_refused_and_not_run(folder, tmp_path):
    pickled_weights(folder / "model.safetensors", tmp_path / "touched")
    with pytest.raises(ValueError):
        open_sessions([folder])
    assert not (tmp_path / "touched").exists()


def test_paths_without_a_model_are_refused(tmp_path):
    file = pickled_weights(tmp_path / "model.safetensors", tmp_path / "touched")
    for path in (tmp_path / "none", tmp_path, file):
        with pytest.raises(FileError) as caught:
            open_sessions([path])
        assert caught.value.path == path
    assert not (tmp_path / "touched").exists()


def test_a_head_without_eigenvalues_is_refused(tmp_path):
    save_pretrained(bird_model("gap"), tmp_path)
    with pytest.raises(ArgumentError) as caught:
        open_sessions([tmp_path])
    assert (caught.value.argument, caught.value.value) == ("model", "gap")


def test_models_of_the_demo_by_what_their_heads_declare(tmp_path, foreign_head):
    for head in ("gap", "mpncov", "mpncov+seb", "isqrt", foreign_head):
        save_pretrained(bird_model(head), tmp_path / f"run {head}" / "model")
    save_pretrained(bird_model("mpncov"), tmp_path / "broken" / "model")
    (tmp_path / "broken" / "model" / "model.safetensors").write_bytes(b"")
    heads = [trained.model.config["head"] for trained in find_demo(tmp_path)]
    assert heads == ["mpncov+seb", foreign_head, "mpncov"]


def test_a_bare_model_folder_is_shown_drawn_birds(folder):
    (session,) = open_sessions([folder], device="cpu").values()
    assert session.images.name == "plumage"
    assert not session.labelled  # its classes are others
    assert session.analyse("example-0").label is None


def test_a_data_set_with_other_classes_is_refused(folder):
    with pytest.raises(ArgumentError) as caught:
        open_sessions([folder], name="plumage")
    assert caught.value.argument == "name"


@pytest.mark.slow
def test_a_small_model_is_trained_if_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train_small(opening.OWN, "cpu")
    weights = load_file(folder / "model" / "model.safetensors")
    rows = json.loads((folder / "results.json").read_text())
    assert rows
    before = os.stat(folder / "model" / "model.safetensors").st_mtime_ns
    assert train_small(opening.OWN, "cpu") == folder  # not trained again
    assert os.stat(folder / "model" / "model.safetensors").st_mtime_ns == before
    (session,) = open_sessions(device="cpu").values()
    assert session.labelled
    assert set(session.model.state_dict()) == set(weights)
    analyses = [session.analyse(f"example-{number}") for number in range(100)]
    assert sum(analysis.predicted == analysis.label for analysis in analyses) > 25  # of ten classes
