"""Damaged and repeated images are found, by the function and by the command."""

import csv
import json
import shutil
import subprocess
import sys

import pytest
from PIL import Image, ImageFile

from eigengrain import cli
from eigengrain.commands.datasets import Datasets, describe, run
from eigengrain.data import find_unreadable, open_dataset
from eigengrain.data.catalogue import ENTRIES
from eigengrain.data.check import find_problems


@pytest.fixture
def damaged(folder):
    """One file that is no image, one that is cut short, an empty one, and equal images within and across the splits."""
    (folder / "train/cat/0.png").write_text("no image")
    whole = folder / "train/cat/1.png"
    pixels = whole.read_bytes()
    whole.write_bytes(pixels[: len(pixels) * 2 // 3])
    (folder / "test/dog/0.png").write_bytes(b"")
    Image.open(folder / "train/dog/0.png").save(folder / "train/dog/1.png", compress_level=1)  # other bytes, same pixels
    shutil.copy(folder / "train/dog/2.png", folder / "test/cat/0.png")
    return folder


def by_name(problems):
    return {(p.split, "/".join(p.path.split("/")[-2:])): p for p in problems}


@pytest.mark.parametrize("workers", [0, 2])
def test_problems_are_found(damaged, workers):
    splits = [open_dataset("folder", damaged, split) for split in ("train", "test")]
    found = by_name(find_problems(splits, workers))
    assert {key: p.kind for key, p in found.items()} == {
        ("train", "cat/0.png"): "unreadable",
        ("train", "cat/1.png"): "truncated",
        ("train", "dog/1.png"): "duplicate",
        ("test", "cat/0.png"): "duplicate",
        ("test", "dog/0.png"): "unreadable",
    }
    assert found["train", "cat/0.png"].reason.startswith("not an image")
    assert "dog/0.png" in found["train", "dog/1.png"].reason
    assert "another class" not in found["train", "dog/1.png"].reason
    leaked = found["test", "cat/0.png"].reason
    assert leaked.endswith("of the split train, but of another class: cat here, dog there")
    unreadable = find_unreadable(splits[0], workers)
    assert [(p.index, p.kind) for p in unreadable] == [(0, "unreadable"), (1, "truncated")]
    assert all(splits[0].path(p.index).name in p.path for p in unreadable)


def test_cut_jpegs_are_found_where_pillow_would_fill_them(folder, monkeypatch):
    file = folder / "train/cat/0.png"
    picture = folder / "train/cat/0.jpg"
    Image.open(file).resize((64, 64)).save(picture)
    file.unlink()
    picture.write_bytes(picture.read_bytes()[:-300])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    opened = open_dataset("folder", folder)
    opened.image(0)  # Pillow fills it with grey
    assert [p.kind for p in find_unreadable(opened)] == ["truncated"]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_check_writes_and_returns_2(damaged, tmp_path, capsys):
    out = tmp_path / "out" / "problems.csv"
    assert run(Datasets("check", "folder", str(damaged), workers=0, out=str(out))) == 2
    text = capsys.readouterr().out
    assert "train: 6 images of 2 classes" in text
    assert "2 unreadable, 1 truncated, 2 duplicate" in text
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert set(rows[0]) == {"split", "index", "path", "kind", "reason"}


def test_check_of_a_whole_folder_returns_0(cub, tmp_path, capsys):
    out = tmp_path / "problems.csv"
    assert run(Datasets("check", "cub", str(cub), workers=0, out=str(out))) == 0
    assert "train: 6 images (published: 5,994) of 3 classes" in capsys.readouterr().out
    assert out.read_text().strip() == "split,index,path,kind,reason"
    assert run(Datasets("check", "cub", str(cub), split="test", workers=0, json=True)) == 0
    assert json.loads(capsys.readouterr().out) == {"images": {"test": 3}, "problems": []}


def test_duplicates_alone_are_no_failure(folder, capsys):
    shutil.copy(folder / "train/dog/2.png", folder / "train/dog/1.png")
    assert run(Datasets("check", "folder", str(folder), workers=0)) == 0
    assert "0 unreadable, 0 truncated, 1 duplicate" in capsys.readouterr().out


def test_real_birds_are_whole(cub_mini):
    opened = open_dataset("cub", cub_mini, "test")
    assert find_unreadable(opened.subset(range(0, len(opened), 4))) == []


def test_list_says_every_layout(capsys):
    assert run(Datasets()) == 0
    text = capsys.readouterr().out
    for entry in ENTRIES:
        assert describe(entry) in text
    assert run(Datasets("list", "cub", json=True)) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["cub"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "chek"}, "unknown datasets command 'chek': did you mean 'check'"),
        ({"action": "cub"}, "eigengrain datasets list cub"),
        ({"action": "check", "name": "cub"}, "name the data set and its folder"),
        ({"name": "cub", "root": "x"}, "are for 'eigengrain datasets check'"),
        ({"workers": -1}, "at least 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Datasets(**options)


def test_unknown_and_drawn_names(tmp_path):
    with pytest.raises(ValueError, match="unknown data set 'cubs': did you mean 'cub'"):
        run(Datasets("list", "cubs"))
    with pytest.raises(ValueError, match="plumage is drawn"):
        run(Datasets("check", "plumage", str(tmp_path)))


def test_on_the_command_line(damaged, monkeypatch, capsys):
    command = cli.Command(
        "datasets",
        "the data sets, their layouts, and a check of a folder's images",
        Datasets,
        "eigengrain.commands.datasets:run",
        positional={"action": "?", "name": "?", "root": "?"},
    )
    monkeypatch.setattr(cli, "COMMANDS", (*(c for c in cli.COMMANDS if c.name != "datasets"), command))
    assert cli.main(["datasets"]) == 0
    assert "Stanford Cars" in capsys.readouterr().out
    assert cli.main(["datasets", "check", "folder", str(damaged), "--workers", "0"]) == 2
    assert "1 truncated" in capsys.readouterr().out
    assert cli.main(["datasets", "check", "cub", str(damaged), "--workers=0"]) == 2
    assert "expected: images/CLASS" in " ".join(capsys.readouterr().err.split())


def test_lists_without_torch():
    code = "import sys; from eigengrain.commands.datasets import *; run(Datasets()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    code = "import sys; import eigengrain.data.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
