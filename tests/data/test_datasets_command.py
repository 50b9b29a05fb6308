"""``eigengrain datasets``: the list, and the check of a folder. Its result is read as JSON and CSV."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.drawing import draw
from eigengrain import output
from eigengrain.cli import main as cli
from eigengrain.cli.datasets import Datasets, describe, run
from eigengrain.data.datasets.registry import list_datasets, list_entries
from eigengrain.errors import AnnotationError, FileError, UnknownName


@pytest.fixture
def check(capsys):
    """Run a check; returns the exit code and the JSON document."""

    def run_check(*words, **options):
        with output.mode(json=True):
            code = run(Datasets("check", *map(str, words), workers=0, **options))
        return code, json.loads(capsys.readouterr().out)

    return run_check


def read_csv(file):
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_check_writes_the_problems_and_returns_1(damaged, tmp_path, check):
    out = tmp_path / "out" / "problems.csv"
    code, document = check("folder", damaged, out=str(out))
    assert code == 1
    assert document["images"] == {"train": 6, "test": 4}
    kinds = sorted(problem["kind"] for problem in document["problems"])
    assert kinds == ["duplicate", "duplicate", "truncated", "unreadable", "unreadable"]
    rows = read_csv(out)
    assert set(rows[0]) == {"split", "index", "path", "kind", "reason", "original_split"}
    assert sorted(row["kind"] for row in rows) == kinds


def test_a_check_of_an_intact_data_set_returns_0(cub, tmp_path, check):
    out = tmp_path / "problems.csv"
    assert check("cub", cub, out=str(out)) == (0, {"images": {"train": 6, "test": 3}, "problems": []})
    assert out.read_text().strip() == "split,index,path,kind,reason,original_split"
    assert check("cub", cub, split="test") == (0, {"images": {"test": 3}, "problems": []})


def test_duplicates_alone_return_0(folder, check):
    shutil.copy(folder / "train/dog/2.png", folder / "train/dog/1.png")
    code, document = check("folder", folder)
    assert code == 0
    assert [problem["kind"] for problem in document["problems"]] == ["duplicate"]


def test_a_folder_of_any_layout(damaged, tmp_path, check):
    """With folders train and test, and one of them alone: only the folder is named."""
    (damaged / "train/bird").mkdir()
    (damaged / "train/fish").mkdir()
    (damaged / "train/fish/a.pdf").touch()
    (damaged / "notes/deep").mkdir(parents=True)
    (damaged / "notes/deep/readme.txt").touch()  # not among folders of images, so no images are expected there
    out = tmp_path / "problems.csv"
    code, document = check(damaged, out=str(out))
    assert (code, document["images"]) == (1, {"train": 6, "test": 4})
    assert {str(Path(row["path"]).relative_to(damaged)): row["kind"] for row in read_csv(out)} == {
        "train/bird": "empty",
        "train/fish": "empty",
        "train/cat/0.png": "unreadable",
        "train/cat/1.png": "truncated",
        "train/dog/1.png": "duplicate",
        "test/cat/0.png": "duplicate",
        "test/dog/0.png": "unreadable",
    }
    code, document = check(damaged / "test")
    assert (code, document["images"]) == (1, {"all": 4})
    assert [problem["kind"] for problem in document["problems"]] == ["unreadable"]
    assert check(damaged / "test/cat")[0] == 0


def test_images_outside_the_splits_are_checked_too(damaged, check):
    (damaged / "cover.jpg").touch()
    assert check(damaged)[1]["images"] == {"train": 6, "test": 4, "other": 1}
    assert check(damaged, split="test")[1]["images"] == {"test": 4}


def test_a_class_is_the_same_in_all_splits(folder, check):
    """Also with validation images and nested folders: only cat/1.png, a copy of a dog, is in another class."""
    draw(folder / "train/cat/young/9.png")
    for copy in ("valid/cat/0.png", "test/cat/old/0.png", "valid/cat/1.png"):
        (folder / copy).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "train/cat/0.png", folder / "valid/cat/0.png")
    shutil.copy(folder / "train/cat/young/9.png", folder / "test/cat/old/0.png")
    shutil.copy(folder / "train/dog/0.png", folder / "valid/cat/1.png")
    document = check(folder)[1]
    assert document["images"] == {"train": 7, "val": 2, "test": 5}
    assert {problem["kind"] for problem in document["problems"]} == {"duplicate"}
    reasons = {"/".join(Path(p["path"]).parts[-3:]): p["reason"] for p in document["problems"]}
    assert {path: "another class" in reason for path, reason in reasons.items()} == {
        "valid/cat/0.png": False,
        "cat/old/0.png": False,
        "valid/cat/1.png": True,
    }
    assert check("folder", folder)[1]["images"] == {"train": 7, "validation": 2, "test": 5}
    assert check(folder, split="val")[1]["images"] == {"val": 2}


def test_reencoded_copies_are_duplicates(folder, check):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((96, 96), 3)
    photo.save(folder / "train/cat/9.png")
    photo.save(folder / "test/cat/9.jpg", quality=70)
    photo.resize((64, 64), 2).save(folder / "test/cat/8.webp")
    problems = check(folder)[1]["problems"]
    assert sorted(Path(problem["path"]).name for problem in problems) == ["8.webp", "9.jpg"]
    assert all(problem["kind"] == "duplicate" and "train/cat/9.png" in problem["reason"] for problem in problems)


def test_a_check_of_a_folder_without_a_split(tmp_path, check, capsys):
    for name, count in (("cat", 12), ("dog", 2)):
        for i in range(count):
            draw(tmp_path / "photos" / name / f"{i}.png")
    (tmp_path / "photos/cat/Thumbs.db").touch()
    (tmp_path / "photos/cat/notes.txt").touch()
    assert check(tmp_path / "photos")[1]["images"] == {"all": 14}
    assert check("folder", tmp_path / "photos")[1]["images"] == {"train": 11, "test": 3}
    assert run(Datasets("check", str(tmp_path / "photos"), workers=0)) == 0
    text = capsys.readouterr().out
    assert "1 .txt" in text
    assert ".db" not in text
    assert "cat has 12 images and dog 2" in text


def test_a_table_is_checked(damaged, check):
    (damaged / "images.csv").write_text(
        "path,label\ntrain/cat/0.png,a\ntrain/cat/2.png,a\ntrain/dog/0.png,b\ntest/dog/1.png,b\n"
    )
    code, document = check(damaged / "images.csv")
    assert (code, sum(document["images"].values())) == (1, 4)
    assert [problem["kind"] for problem in document["problems"]] == ["unreadable"]


def test_options_reach_the_reader(aircraft, check):
    options = {"level": "manufacturer", "with_validation": False}
    assert check("aircraft", aircraft, options=options)[1]["images"]["train"] == 2
    with pytest.raises(UnknownName) as error:
        check("aircraft", aircraft, options={"levl": "family"})
    assert error.value.suggestions == ["level"]


def test_names_that_are_not_text_are_printed_and_written(folder, tmp_path, capsys):
    for name in (b"two\nlines.png", b"latin \xe9.png"):
        with open(bytes(folder / "train/cat") + b"/" + name, "wb"):
            pass
    out = tmp_path / "problems.csv"
    assert run(Datasets("check", str(folder), workers=0, out=str(out))) == 1
    for text in (capsys.readouterr().out, out.read_text()):
        assert "cat/two\\nlines.png" in text
        assert "cat/latin \\udce9.png" in text


def test_the_list_shows_every_layout(capsys):
    assert run(Datasets()) == 0
    text = capsys.readouterr().out
    for entry in list_entries():
        assert describe(entry) in text
    with output.mode(json=True):
        assert run(Datasets("list", "cub")) == 0
        [entry] = json.loads(capsys.readouterr().out)
        assert (entry["name"], entry["reader"]) == ("cub", "eigengrain.data.datasets.cub:open_cub")
        assert run(Datasets()) == 0
        assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == list_datasets()


@pytest.mark.parametrize(
    "options",
    [
        {"action": "chek"},
        {"action": "cub"},
        {"action": "check"},
        {"action": "check", "name": "cub"},
        {"action": "check", "name": "photos", "options": {"a": 1}},
        {"action": "check", "name": "cub", "root": "x", "options": {"split": "test"}},
        {"action": "check", "name": "plumage"},
        {"name": "cub", "root": "x"},
        {"name": "cub", "options": {"a": 1}},
        {"workers": -1},
    ],
    ids=str,
)
def test_options_are_checked(options):
    with pytest.raises(ValueError):
        Datasets(**options)


def test_names_and_folders_are_checked(tmp_path):
    with pytest.raises(UnknownName) as error:
        run(Datasets("list", "cubs"))
    assert error.value.suggestions[0] == "cub"
    with pytest.raises(UnknownName) as error:
        run(Datasets("check", "imagenat"))
    assert error.value.suggestions[0] == "imagenet"
    with pytest.raises(ValueError):
        run(Datasets("check", "plumage", str(tmp_path)))
    with pytest.raises(ValueError):
        run(Datasets("check", "photos", "cub"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.pdf").touch()
    for folder in (tmp_path / "none", tmp_path / "other", tmp_path / "other/a.pdf"):
        with pytest.raises(FileError) as wrong:
            run(Datasets("check", str(folder)))
        assert wrong.value.path == folder


def test_on_the_command_line(damaged, tmp_path, capsys):
    assert cli.main(["datasets"]) == 0
    assert "Stanford Cars" in capsys.readouterr().out
    assert cli.main(["datasets", "check", "folder", str(damaged), "--workers", "0"]) == 1
    assert cli.main(["datasets", "check", str(damaged), "--workers", "0"]) == 1
    capsys.readouterr()
    missing = tmp_path / "none.csv"
    assert cli.main(["datasets", "check", "folder", str(damaged), "--options", f"{{split_file: {missing}}}"]) == 2
    assert str(missing) in capsys.readouterr().err
    assert cli.main(["datasets", "check", "cub", str(damaged), "--workers=0"]) == 2
    assert "images/CLASS/*.jpg" in capsys.readouterr().err


def test_a_wrong_split_file_is_an_annotation_error(damaged):
    with pytest.raises(AnnotationError) as error:
        run(Datasets("check", "folder", str(damaged), {"split_file": "none.csv"}))
    assert error.value.path == Path("none.csv")


def test_the_list_needs_no_torch():
    code = (
        "import sys; from eigengrain.cli.datasets import Datasets, run; run(Datasets());"
        "import eigengrain.data.preprocessing; from eigengrain.data import Transforms, Entry, list_datasets;"
        "assert list_datasets(); assert not {'torch', 'numpy', 'PIL'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
