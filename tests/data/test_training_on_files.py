"""Training, evaluating and resuming on a user's own images: drawn splits, validation images, unreadable files, balance."""

import csv
import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch

from data.drawing import draw
from eigengrain import open_run, output
from eigengrain.cli import main as cli
from eigengrain.data import Transforms
from eigengrain.errors import ArgumentError, Interrupted, UnreadableImages
from eigengrain.training import train
from eigengrain.training.config import Data
from eigengrain.training.distributed import Process
from eigengrain.training.setup import build
from training.small_run import small


def write_photos(root, cat=8, dog=7):
    for name, count in (("cat", cat), ("dog", dog)):
        for i in range(count):
            draw(root / name / f"{i}.png", size=(40, 36))
    return root


def config(out, root, data=None, **changes):
    images = Data("folder", str(root), transforms=Transforms("paper", img_size=32), **(data or {}))
    return small(out, data=images, **{"epochs": 1, **changes})


def read_split(run):
    with (run / "split.csv").open(newline="") as file:
        return {(row["path"], row["label"]): row["split"] for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a folder without a split, with validation images: (folder, run)."""
    folder = tmp_path_factory.mktemp("own")
    photos = write_photos(folder / "photos")
    before = sorted(folder.rglob("*"))
    train(config(folder / "run", photos, {"val_fraction": 0.2}))
    assert [path for path in sorted(folder.rglob("*")) if "run" not in path.parts[len(folder.parts)]] == before
    return folder


@pytest.fixture
def own(trained, tmp_path):
    """A copy of it, in which the run is the one of the copied folder."""
    shutil.copytree(trained, tmp_path / "own")
    arguments = tmp_path / "own/run/args.yaml"
    arguments.write_text(arguments.read_text().replace(str(trained), str(tmp_path / "own")))
    return tmp_path / "own"


def test_the_drawn_split_is_written_and_used_for_ever(own):
    rows = read_split(own / "run")
    assert len(rows) == 15
    assert rows.keys() == {(f"{name}/{i}.png", name) for name, n in (("cat", 8), ("dog", 7)) for i in range(n)}
    counts = {split: sum(value == split for value in rows.values()) for split in ("train", "val", "test")}
    assert counts == {"train": 10, "val": 2, "test": 3}
    write_photos(own / "photos", cat=12, dog=12)  # more images would change the split
    run = open_run(own / "run")
    for split in counts:
        opened = run.dataset(split)
        assert {("/".join(p.parts[-2:]), p.parent.name) for p in opened.paths} == {k for k, v in rows.items() if v == split}
        assert [run.classes[label] for label in opened.labels] == [path.parent.name for path in opened.paths]


def test_moved_images_and_other_images(own, tmp_path):
    run = open_run(own / "run")
    expected = [path.name for path in run.dataset("test").paths]
    (own / "photos").rename(own / "moved")
    assert [path.name for path in run.dataset("test", root=str(own / "moved")).paths] == expected
    write_photos(tmp_path / "new", cat=0, dog=5)
    with pytest.raises(ArgumentError) as error:
        run.dataset("test", root=str(tmp_path / "new"))
    assert error.value.argument == "root"
    dogs = run.dataset("test", name="folder", root=str(tmp_path / "new"))  # all of them, and some of the classes
    assert (dogs.labels, dogs.classes) == ([1] * 5, ["cat", "dog"])
    assert dogs[0][0].shape == (3, 32, 32)
    table = tmp_path / "new.csv"
    table.write_text("file;class\nnew/dog/1.png;dog\n")
    assert run.dataset("test", name="folder", root=str(table)).labels == [1]
    draw(tmp_path / "new/fox/1.png")
    with pytest.raises(ArgumentError) as error:
        run.dataset("test", name="folder", root=str(tmp_path / "new"))
    assert error.value.argument == "name"


def test_evaluation_of_some_classes_on_the_command_line(own, tmp_path, capsys):
    write_photos(tmp_path / "new", cat=0, dog=3)
    (tmp_path / "new/dog/broken.png").write_text("no image")
    words = ["evaluate", str(own / "run"), "--data", "folder", "--root", str(tmp_path / "new"), "--device", "cpu"]
    words += ["--workers", "0", "--per_class", str(tmp_path / "classes.csv"), "--json"]
    assert cli.main(words) == 2  # an image cannot be read
    capsys.readouterr()
    assert cli.main([*words, "--skip_unreadable"]) == 0
    [score] = json.loads(capsys.readouterr().out)["scores"]
    assert score["samples"] == 3
    with (tmp_path / "classes.csv").open(newline="") as file:
        assert [(row["class"], row["samples"]) for row in csv.DictReader(file)] == [("cat", "0"), ("dog", "3")]


def test_a_resumed_run_keeps_its_split(tmp_path):
    photos = write_photos(tmp_path / "photos")

    def stop(epoch, batch, loss):
        if (epoch, batch) == (1, 0):
            signal.raise_signal(signal.SIGTERM)

    train(config(tmp_path / "whole", photos, epochs=2))
    with pytest.raises(Interrupted):
        train(config(tmp_path / "parts", photos, epochs=2), on_step=stop)
    write_photos(photos, cat=10, dog=10)
    train(config(tmp_path / "parts", photos, epochs=2, resume=True))
    assert read_split(tmp_path / "parts") == read_split(tmp_path / "whole")
    weights = [open_run(tmp_path / name).model.state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_split_of_folders_with_blanks_or_bytes_that_are_not_text(tmp_path):
    for k, name in enumerate((" cat", "caf\udce9", "cafz", "dog ")):  # classes are in the order of their printed names
        for i in range(5):
            draw(tmp_path / "photos" / name / f"{i}.png", size=(40, 36), seed=5 * k + i)
    train(config(tmp_path / "run", tmp_path / "photos"))
    run = open_run(tmp_path / "run")
    assert run.classes == ["caf\\udce9", "cafz", "cat", "dog"]
    assert run.dataset("test").class_counts() == [1] * 4
    assert {path.parent.name for path in run.dataset("test").paths} == {" cat", "caf\udce9", "cafz", "dog "}
    train(config(tmp_path / "run", tmp_path / "photos", epochs=2, resume=True))


def test_a_run_on_a_table_keeps_its_split(tmp_path):
    write_photos(tmp_path / "photos")
    table = tmp_path / "lists/images.csv"
    table.parent.mkdir()
    rows = [f"../photos/cat/{i}.png,{'odd' if i % 2 else 'even'}" for i in range(8)]
    table.write_text("\n".join(["path,label", *rows]))
    train(config(tmp_path / "run", table))
    test = open_run(tmp_path / "run").dataset("test")
    assert test.class_counts() == [1, 1]
    table.write_text("\n".join(["path,label", *rows, "../photos/dog/1.png,odd", "../photos/dog/2.png,odd"]))
    assert open_run(tmp_path / "run").dataset("test").paths == test.paths


def test_a_published_split_is_not_written(folder, tmp_path):
    train(config(tmp_path / "run", folder, batch_size=2))
    assert not (tmp_path / "run/split.csv").exists()
    draw(folder / "test/dog/9.png")
    assert len(open_run(tmp_path / "run").dataset("test")) == 5  # new test images count


def test_validation_images_of_the_folder_select_the_weights(folder, tmp_path):
    options = config(tmp_path / "run", folder, batch_size=2, select="best-val")
    with pytest.raises(ArgumentError) as error:
        train(options)
    assert error.value.argument == "select"
    draw(folder / "valid/cat/0.png")
    result = train(options)
    assert result.select == "best-val"
    assert "val_top1" in result.scores
    assert len(open_run(tmp_path / "run").dataset("val")) == 1
    with pytest.raises(ArgumentError):  # before a data set is opened, if it cannot have validation images
        replace(options, data=Data("cub"))


@pytest.fixture
def broken(tmp_path):
    photos = write_photos(tmp_path / "photos")
    for name in ("cat/0.png", "cat/3.png", "dog/1.png"):
        (photos / name).write_text("no image")
    return photos


def test_a_dry_run_lists_all_unreadable_images(folder, tmp_path, capsys):
    for name in ("train/cat/0.png", "train/dog/1.png", "train/dog/2.png"):  # one of them is in every batch of four
        (folder / name).write_text("no image")
    with output.mode(json=True), pytest.raises(UnreadableImages) as error:
        train(config(tmp_path / "run", folder, dry_run=True))
    assert len(error.value.problems) == 3
    assert len((tmp_path / "run/unreadable.txt").read_text().splitlines()) == 3
    assert "plan" in json.loads(capsys.readouterr().out)
    with output.mode(json=True):
        assert train(config(tmp_path / "run", folder, {"skip_unreadable": True}, dry_run=True)) is None
    assert json.loads(capsys.readouterr().out)["plan"]["data"].startswith("folder: 3 training")


def test_unreadable_images_can_be_left_out(broken, tmp_path, capsys):
    with pytest.raises(UnreadableImages):
        train(config(tmp_path / "stopped", broken))
    train(config(tmp_path / "run", broken, {"skip_unreadable": True}))
    assert "3" in capsys.readouterr().err
    assert len(read_split(tmp_path / "run")) == 12
    for i in range(8):
        (broken / f"cat/{i}.png").write_text("no image")
    with pytest.raises(ArgumentError) as error:
        train(config(tmp_path / "none", broken, {"skip_unreadable": True}))
    assert error.value.argument == "data.skip_unreadable"


@pytest.mark.parametrize("split", ["test", "valid"])
def test_a_split_without_readable_images(folder, tmp_path, split):
    draw(folder / "valid/cat/0.png")
    for file in (folder / split).rglob("*.png"):
        file.write_text("no image")
    with pytest.raises(ArgumentError) as error:
        train(config(tmp_path / "run", folder, {"skip_unreadable": True}, batch_size=2))
    assert error.value.argument == "data.skip_unreadable"
    with pytest.raises(UnreadableImages):  # there is nothing to time
        train(config(tmp_path / "run", folder, batch_size=2, dry_run=True))


def test_an_evaluation_without_readable_images(own, tmp_path, capsys):
    write_photos(tmp_path / "new", cat=0, dog=1)
    (tmp_path / "new/dog/0.png").write_text("no image")
    words = ["evaluate", str(own / "run"), "--data", "folder", "--root", str(tmp_path / "new"), "--device", "cpu"]
    assert cli.main([*words, "--workers", "0", "--skip_unreadable"]) == 2
    assert "--skip_unreadable" in capsys.readouterr().err


def test_images_that_a_training_left_out_are_left_out_later(folder, tmp_path):
    (folder / "test/cat/0.png").write_text("no image")
    train(config(tmp_path / "run", folder, {"skip_unreadable": True}, batch_size=2))
    assert (tmp_path / "run/unreadable.txt").read_text().split("\t")[0] == "test/cat/0.png"
    assert len(open_run(tmp_path / "run").dataset("test")) == 3
    moved = shutil.move(folder, tmp_path / "moved")
    assert len(open_run(tmp_path / "run").dataset("test", root=str(moved))) == 3


def test_a_resumed_run_leaves_out_the_same_images(folder, tmp_path):
    """Also those that can be read by now, of a folder that has moved."""
    broken = folder / "train/cat/0.png"
    content = broken.read_bytes()
    broken.write_text("no image")
    options = {"skip_unreadable": True}
    train(config(tmp_path / "whole", folder, options, batch_size=2, epochs=2))
    train(config(tmp_path / "parts", folder, options, batch_size=2, epochs=1))
    broken.write_bytes(content)
    moved = shutil.move(folder, tmp_path / "moved")
    train(config(tmp_path / "parts", moved, options, batch_size=2, epochs=2, resume=True))
    weights = [open_run(tmp_path / name).model.state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_list_of_an_earlier_dry_run_is_not_kept(folder, tmp_path):
    content = (folder / "test/cat/0.png").read_bytes()
    (folder / "test/cat/0.png").write_text("no image")
    options = {"skip_unreadable": True}
    train(config(tmp_path / "run", folder, options, batch_size=2, dry_run=True))
    assert (tmp_path / "run/unreadable.txt").exists()
    (folder / "test/cat/0.png").write_bytes(content)
    train(config(tmp_path / "run", folder, options, batch_size=2))
    assert not (tmp_path / "run/unreadable.txt").exists()
    assert len(open_run(tmp_path / "run").dataset("test")) == 4


def test_balance_and_its_hint(tmp_path, capsys):
    photos = write_photos(tmp_path / "photos", cat=20, dog=3)
    samplers = {}
    for balance in ("none", "sampler", "weights"):
        run = build(config(tmp_path / "run", photos, {"balance": balance}), None, Process(torch.device("cpu")))
        samplers[balance] = run.loaders.train.sampler
        assert ("cat has 16 images and dog 2" in capsys.readouterr().err) == (balance == "none")
        assert run.loaders.test.sampler.labels is None
    assert samplers["none"].labels is samplers["weights"].labels is None
    labels = run.sources.train.labels
    drawn = [labels[number % len(labels)] for number in samplers["sampler"].indices()]
    assert drawn.count(0) == drawn.count(1) == 9


def test_a_folder_alone_is_enough(tmp_path, monkeypatch):
    """The split is that of the options, and the folder is not changed."""
    photos = write_photos(tmp_path / "photos")
    words = ["train", str(photos), "--recipe", "plumage-demo", "--data.options", "{}", "--data.test_fraction", "0.5"]
    request = cli.parse([*words, "--data.split_seed", "3"])
    run = build(request.config, None, Process(torch.device("cpu")))
    assert run.sources.test.class_counts() == [4, 4]
    assert not (photos / "split.csv").exists()
