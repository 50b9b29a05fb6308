"""Damaged and repeated images are found, by the function and by the command."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageFile

from eigengrain import output
from eigengrain.cli import main as cli
from eigengrain.cli.datasets import Datasets, describe, run
from eigengrain.data import ImageSet, find_unreadable, open_dataset
from eigengrain.data.check import find_problems
from eigengrain.data.datasets.catalogue import ENTRIES


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


class Signalled(ImageSet):
    """Whoever opens the second image gets SIGTERM, as from ``timeout`` or a cluster that stops all processes of a job."""

    def image(self, index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().image(index)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not say who sends a signal")
def test_a_signal_that_reaches_all_processes_leaves_the_workers_to_their_parent(damaged):
    there = open_dataset("folder", damaged)
    signalled = Signalled(there.name, there.split, there.classes, there.labels, there.paths)
    assert find_unreadable(signalled, workers=1) == find_unreadable(there)


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


def test_check_writes_and_returns_1(damaged, tmp_path, capsys):
    out = tmp_path / "out" / "problems.csv"
    assert run(Datasets("check", "folder", str(damaged), workers=0, out=str(out))) == 1
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
    with output.mode(json=True):
        assert run(Datasets("check", "cub", str(cub), split="test", workers=0)) == 0
    assert json.loads(capsys.readouterr().out) == {"images": {"test": 3}, "problems": []}


def test_duplicates_alone_are_no_failure(folder, capsys):
    shutil.copy(folder / "train/dog/2.png", folder / "train/dog/1.png")
    assert run(Datasets("check", "folder", str(folder), workers=0)) == 0
    assert "0 unreadable, 0 truncated, 1 duplicate" in capsys.readouterr().out


def test_a_folder_of_any_layout(damaged, tmp_path, capsys):
    """As published with train and test, and one of them alone: nothing is asked but the folder."""
    (damaged / "train/bird").mkdir()
    (damaged / "train/fish").mkdir()
    (damaged / "train/fish/a.HEIC").touch()
    (damaged / "notes/deep").mkdir(parents=True)
    (damaged / "notes/deep/readme.txt").touch()  # not among folders of images: nobody misses images there
    out = tmp_path / "problems.csv"
    assert run(Datasets("check", str(damaged), workers=0, out=str(out))) == 1
    text = capsys.readouterr().out
    assert "train: 6 images in 2 folders\ntest: 4 images in 2 folders\n" in text
    assert "left out, as not named as images: 2 (.heic, .txt)" in text
    assert "2 unreadable, 1 truncated, 2 duplicate, 2 folders without images to read" in text
    with out.open(newline="") as file:
        kinds = {str(Path(row["path"]).relative_to(damaged)): row["kind"] for row in csv.DictReader(file)}
    assert kinds == {
        "train/bird": "empty",
        "train/fish": "empty",
        "train/cat/0.png": "unreadable",
        "train/cat/1.png": "truncated",
        "train/dog/1.png": "duplicate",
        "test/cat/0.png": "duplicate",
        "test/dog/0.png": "unreadable",
    }
    assert "of the split train, but of another class: cat here, dog there" in out.read_text()
    with output.mode(json=True):
        assert run(Datasets("check", str(damaged / "test"), workers=0)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == {"all": 4}
    assert [p["kind"] for p in found["problems"]] == ["unreadable"]
    assert run(Datasets("check", str(damaged / "test/cat"), workers=0)) == 0


def test_images_beside_the_splits_are_looked_at_too(damaged, capsys):
    (damaged / "cover.jpg").touch()
    assert run(Datasets("check", str(damaged), workers=0)) == 1
    assert "other: 1 image in 1 folder" in capsys.readouterr().out
    assert run(Datasets("check", str(damaged), split="test", workers=0)) == 1
    text = capsys.readouterr().out
    assert "test: 4 images" in text
    assert "train" not in text


def test_options_reach_the_reader(aircraft, capsys):
    options = {"level": "manufacturer", "with_validation": False}
    assert run(Datasets("check", "aircraft", str(aircraft), options, workers=0)) == 0
    assert "train: 2 images (published: 6,667) of 2 classes" in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown option of aircraft 'levl': did you mean 'level'"):
        run(Datasets("check", "aircraft", str(aircraft), {"levl": "family"}))


def test_names_that_are_no_letters_are_printed_and_written(folder, tmp_path, capsys):
    for name in (b"two\nlines.png", b"latin \xe9.png"):
        with open(bytes(folder / "train/cat") + b"/" + name, "wb"):
            pass
    out = tmp_path / "problems.csv"
    assert run(Datasets("check", str(folder), workers=0, out=str(out))) == 1
    for text in (capsys.readouterr().out, out.read_text()):
        assert "cat/two\\nlines.png" in text
        assert "cat/latin \\udce9.png" in text


def test_real_birds_are_whole(cub_mini):
    opened = open_dataset("cub", cub_mini, "test")
    assert find_unreadable(opened.subset(range(0, len(opened), 4))) == []


def test_list_says_every_layout(capsys):
    assert run(Datasets()) == 0
    text = capsys.readouterr().out
    for entry in ENTRIES:
        assert describe(entry) in text
    with output.mode(json=True):
        assert run(Datasets("list", "cub")) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["cub"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "chek"}, "unknown datasets command 'chek': did you mean 'check'"),
        ({"action": "cub"}, "eigengrain datasets list cub"),
        ({"action": "check"}, "name the folder: eigengrain datasets check photos, or as a data set: .* check cub /data"),
        ({"action": "check", "name": "cub"}, r"name the folder of cub too: .* check cub FOLDER; .* check \./cub"),
        ({"action": "check", "name": "photos", "options": {"a": 1}}, "--options are those of a data set"),
        ({"action": "check", "name": "cub", "root": "x", "options": {"split": "test"}}, "split is no option of a data set"),
        ({"action": "check", "name": "plumage"}, "plumage is drawn"),
        ({"name": "cub", "root": "x"}, "are for 'eigengrain datasets check'"),
        ({"name": "cub", "options": {"a": 1}}, "are for 'eigengrain datasets check'"),
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
    with pytest.raises(ValueError, match="unknown folder or data set 'imagenat': did you mean 'imagenet'"):
        run(Datasets("check", "imagenat"))
    with pytest.raises(ValueError, match=r"there is no folder '.*none'"):
        run(Datasets("check", str(tmp_path / "none")))
    with pytest.raises(ValueError, match=r"there are no images below .*: it is empty"):
        run(Datasets("check", str(tmp_path)))
    (tmp_path / "a.heic").touch()
    with pytest.raises(ValueError, match=r"there are no images below .*: only files that end in \.heic"):
        run(Datasets("check", str(tmp_path)))
    with pytest.raises(ValueError, match=r"is a file: name a folder"):
        run(Datasets("check", str(tmp_path / "a.heic")))
    with pytest.raises(ValueError, match="named before its folder: eigengrain datasets check cub photos"):
        run(Datasets("check", "photos", "cub"))


def test_on_the_command_line(damaged, monkeypatch, capsys):
    command = cli.Command(
        "datasets",
        "the data sets, their layouts, and a check of a folder's images",
        Datasets,
        "eigengrain.cli.datasets:run",
        positional={"action": "?", "name": "?", "root": "?"},
    )
    monkeypatch.setattr(cli, "COMMANDS", (*(c for c in cli.COMMANDS if c.name != "datasets"), command))
    assert cli.main(["datasets"]) == 0
    assert "Stanford Cars" in capsys.readouterr().out
    assert cli.main(["datasets", "check", "folder", str(damaged), "--workers", "0"]) == 1
    assert "1 truncated" in capsys.readouterr().out
    assert cli.main(["datasets", "check", str(damaged), "--workers", "0"]) == 1
    assert "1 truncated" in capsys.readouterr().out
    assert cli.main(["datasets", "check", "folder", str(damaged), "--options", "{split_file: none.csv}"]) == 2
    assert "cannot read the split file none.csv" in capsys.readouterr().err
    assert cli.main(["datasets", "check", "cub", str(damaged), "--workers=0"]) == 2
    assert "expected: images/CLASS" in " ".join(capsys.readouterr().err.split())


def test_lists_without_torch():
    code = "import sys; from eigengrain.cli.datasets import *; run(Datasets()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    code = "import sys; import eigengrain.data.transforms_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
