"""A user's own images: folders with and without a split, tables, real folders with other files, and drawn splits."""

import csv
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.drawing import draw
from eigengrain.data import open_dataset, open_splits, split_validation
from eigengrain.data.datasets import layout
from eigengrain.data.datasets.folder import open_tree
from eigengrain.errors import AnnotationError, ArgumentError, FileError, LayoutError


def fails(root, split="train", **options):
    """The AnnotationError of opening a folder; it must be one line."""
    with pytest.raises(AnnotationError) as error:
        open_dataset("folder", root, split, **options)
    assert "\n" not in str(error.value)
    return error.value


def names(dataset):
    return ["/".join(path.parts[-2:]) for path in dataset.paths]


@pytest.fixture
def flat(tmp_path):
    """Ten cats, five dogs, two foxes and an elk, without a split."""
    root = tmp_path / "photos"
    for name, count in (("cat", 10), ("dog", 5), ("elk", 1), ("fox", 2)):
        for i in range(count):
            draw(root / name / f"{i}.png")
    return root


@pytest.fixture
def without_heic(monkeypatch):
    monkeypatch.setattr(layout, "has_heic", lambda: False)


def test_a_folder_without_a_split(flat):
    train, test = (open_dataset("folder", flat, split) for split in ("train", "test"))
    assert train.classes == test.classes == ["cat", "dog", "elk", "fox"]
    assert test.class_counts() == [2, 1, 0, 1]  # at least one of each class that has two
    assert train.class_counts() == [8, 4, 1, 1]
    assert not {*names(train)} & {*names(test)}
    assert any("elk" in note for note in test.notes)
    assert names(open_dataset("folder", flat, "test")) == names(test)
    assert names(open_dataset("folder", flat, "test", split_seed=1)) != names(test)
    assert open_dataset("folder", flat, "test", test_fraction=0.5).class_counts() == [5, 2, 0, 1]
    assert not (flat / "split.csv").exists()  # nothing is written into the folder
    everything = open_dataset("folder", flat, "test", test_fraction=1.0)
    assert (len(everything), everything.classes) == (18, train.classes)
    assert len(open_dataset("folder", flat, "val")) == 0
    for fraction in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ArgumentError) as error:
            open_dataset("folder", flat, test_fraction=fraction)
        assert error.value.argument == "test_fraction"


@pytest.mark.parametrize("seed", range(4))
def test_copies_stay_on_one_side(flat, seed):
    """Exact copies, other formats and sizes of one photograph, also for validation."""
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((96, 96), 3)
    for k, (name, options) in enumerate({"a.png": {}, "a.jpg": {"quality": 80}, "b.jpg": {"quality": 95}}.items()):
        photo.resize((96 - 16 * k,) * 2, 2).save(flat / "cat" / name, **options)
    shutil.copy(flat / "dog/0.png", flat / "dog/copy.png")
    shutil.copy(flat / "dog/0.png", flat / "cat/dog.png")  # in two classes
    splits = open_splits("folder", flat, val_fraction=0.3, seed=seed, split_seed=seed)
    side = {name: split for split, dataset in splits.items() for name in names(dataset)}
    assert len(side) == 18 + 5
    assert len({side[f"cat/{name}"] for name in ("a.png", "a.jpg", "b.jpg")}) == 1
    assert [side[name] for name in ("dog/0.png", "dog/copy.png", "cat/dog.png")] == ["train"] * 3
    assert splits["test"].class_counts()[1] == 1
    assert any("3 images" in note or "4 images" in note for note in splits["train"].notes)


def test_a_class_of_copies_is_not_divided(flat):
    for i in range(5):
        shutil.copy(flat / "cat/0.png", flat / "dog" / f"{i}.png")
    for i in range(10):
        shutil.copy(flat / "fox/0.png", flat / "cat" / f"{i}.png")
    assert open_dataset("folder", flat, "test").class_counts() == [0, 0, 0, 1]
    shutil.rmtree(flat / "fox")
    for i in range(10):
        shutil.copy(flat / "elk/0.png", flat / "cat" / f"{i}.png")
    with pytest.raises(ArgumentError) as error:
        open_dataset("folder", flat)
    assert error.value.argument == "test_fraction"


def test_unreadable_images_do_not_stop_the_split(flat):
    (flat / "cat/0.png").write_text("no image")
    (flat / "cat/1.png").unlink()
    (flat / "cat/1.png").symlink_to("nowhere.png")
    assert len(open_dataset("folder", flat)) + len(open_dataset("folder", flat, "test")) == 18


@pytest.mark.parametrize("name", ["valid", "val", "Validation"])
def test_validation_images_are_used(folder, name):
    draw(folder / name / "dog/7.png")
    splits = open_splits("folder", folder, val_fraction=0.5)
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 6, "val": 1, "test": 4}
    assert (splits["val"].labels, splits["val"].split) == ([1], "validation")
    assert "val" not in open_splits("folder", folder, ["train", "test"])
    shutil.rmtree(folder / "test")  # then they are the test images
    splits = open_splits("folder", folder)
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 6, "test": 1}


def test_validation_images_of_a_table_without_test_images_are_used_for_test(flat):
    rows = [f"cat/{i}.png,{'train' if i < 7 else 'valid'}" for i in range(10)]
    (flat / "split.csv").write_text("\n".join(["path,split", *rows]))
    splits = open_splits("folder", flat)
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 7, "test": 3}


def test_a_fraction_that_leaves_no_validation_images(flat):
    with pytest.raises(ArgumentError) as error:
        open_splits("folder", flat, val_fraction=0.01)
    assert (error.value.argument, error.value.value) == ("val_fraction", 0.01)


def test_empty_lines_of_a_table(flat):
    (flat / "split.csv").write_text("path;split\ncat/1.png;train\n;\n  \ncat/2.png;test\n;\n")
    assert {split: len(dataset) for split, dataset in open_splits("folder", flat).items()} == {"train": 1, "test": 1}
    for text in ("path;label\n", "path;label\n;\n"):
        (flat / "split.csv").write_text(text)
        fails(flat)


def test_blanks_around_the_name_of_a_class(tmp_path):
    for name in (" cat", "cat ", " dog "):
        draw(tmp_path / name / f"{len(name)}.png"), draw(tmp_path / name / "9.png")
    opened = open_dataset("folder", tmp_path, "test", test_fraction=1.0)
    assert (opened.classes, opened.class_counts()) == (["cat", "dog"], [4, 2])
    table = tmp_path / "images.csv"
    table.write_text("path,split\n./ cat/4.png,train\n./ dog /9.png,train\n./ dog /5.png,test\n")
    opened = open_dataset("folder", table)
    assert (opened.classes, names(opened)) == (["cat", "dog"], [" cat/4.png", " dog /9.png"])


def test_a_fraction_replaces_missing_validation_images(folder):
    splits = open_splits("folder", folder, val_fraction=0.3, seed=5)
    expected = split_validation(open_dataset("folder", folder), 0.3, seed=5)
    assert [names(splits[split]) for split in ("train", "val")] == [names(part) for part in expected]
    assert names(open_splits("folder", folder, ["val"], val_fraction=0.3, seed=5)["val"]) == names(expected[1])
    with pytest.raises(ArgumentError) as error:
        open_dataset("folder", folder, test_fraction=0.3)
    assert error.value.argument == "test_fraction"


def test_nested_folders_belong_to_their_outermost_class(folder):
    draw(folder / "train/cat/young/tabby/9.png")
    assert open_dataset("folder", folder).class_counts() == [4, 3]
    flat = folder / "train"
    assert open_dataset("folder", flat, "test", test_fraction=1.0).class_counts() == [4, 3]
    (folder / "split.csv").write_text("path,split\ntrain/cat/young/tabby/9.png,train\ntrain/dog/0.png,train\n")
    assert open_dataset("folder", folder).classes == ["cat", "dog"]
    (flat / "split.csv").write_text("path,split\ncat/young/tabby/9.png,train\ndog/0.png,train\ncat/0.png,test\n")
    assert open_dataset("folder", flat, "test").classes == ["cat", "dog"]


def test_folders_around_the_classes_are_entered(flat, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    flat.rename(tmp_path / "a/b/photos")
    (tmp_path / "a/readme.txt").touch()
    assert open_dataset("folder", tmp_path / "a").classes == ["cat", "dog", "elk", "fox"]
    (tmp_path / "a/b/photos").rename(tmp_path / "a/b/train")  # training images alone
    assert open_dataset("folder", tmp_path / "a").classes == ["cat", "dog", "elk", "fox"]
    draw(tmp_path / "a/b/more/1.png")
    with pytest.raises(LayoutError) as error:
        open_dataset("folder", tmp_path / "a/b")
    assert error.value.missing == ("test/",)


def test_a_class_may_be_called_train(flat):
    (flat / "elk").rename(flat / "train")
    assert open_dataset("folder", flat).classes == ["cat", "dog", "fox", "train"]


def test_classes_without_test_images(folder):
    """Labels are those of the training classes; a class without training images is an error."""
    shutil.rmtree(folder / "test/cat")
    test = open_dataset("folder", folder, "test")
    assert (test.classes, test.labels) == (["cat", "dog"], [1, 1])
    draw(folder / "test/fox/1.png")
    error = fails(folder, "test")
    assert (error.path, error.value) == (folder, "fox")


def test_other_files_are_ignored_and_counted(flat):
    for name in ("cat/Thumbs.db", "cat/.hidden.png", ".trash/cat/1.png", "__MACOSX/cat/._0.png", "cat/desktop.ini"):
        (flat / name).parent.mkdir(parents=True, exist_ok=True)
        (flat / name).touch()
    assert open_dataset("folder", flat, test_fraction=0.3).notes[0].startswith("no split")
    for name in ("cat/a.txt", "cat/b.TXT", "dog/c.pdf", "notes/d.txt", "cover.png"):
        (flat / name).parent.mkdir(exist_ok=True)
        (flat / name).touch()
    (flat / "empty").mkdir()
    opened = open_dataset("folder", flat, "test", test_fraction=1.0)
    assert len(opened) == 18
    suffixes, loose, empty = opened.notes
    assert "3 .txt, 1 .pdf" in suffixes
    assert "cover.png" in loose
    assert {str(flat / name) for name in ("notes", "empty")} <= {*empty.replace(",", "").split()}


def test_heic_images(flat):
    pytest.importorskip("pillow_heif").register_heif_opener()
    Image.open(flat / "cat/0.png").save(flat / "cat/0.heic")
    opened = open_dataset("folder", flat, "test", test_fraction=1.0)
    assert "cat/0.heic" in names(opened)
    assert opened.image(names(opened).index("cat/0.heic")).size == (12, 10)


def test_skipped_heic_images_are_counted_with_the_remedy(flat, without_heic):
    for i in range(12):
        (flat / "cat" / f"IMG_{i}.HEIC").touch()
    opened = open_dataset("folder", flat)
    assert opened.notes[0] == "12 .heic files were skipped: pip install 'eigengrain[heic]'"
    (flat / "new").mkdir()
    (flat / "new/1.heic").touch()  # a class that would be missing
    error = fails(flat)
    assert error.value == str(flat / "new")
    assert "eigengrain[heic]" in error.problem


def test_a_published_data_set_is_recognised(cub, folder):
    assert any("'cub'" in note for note in open_dataset("folder", cub).notes)
    assert open_dataset("folder", folder).notes == []


def test_images_without_classes(tmp_path):
    draw(tmp_path / "a.png")
    for split in ("train", "test"):
        with pytest.raises(LayoutError) as error:
            open_dataset("folder", tmp_path, split)
        assert error.value.missing == ("CLASS/",)
    for i in range(3):
        draw(tmp_path / "cat" / f"{i}.png")
    with pytest.raises(LayoutError) as error:  # there is nothing to learn from one class
        open_dataset("folder", tmp_path)
    assert error.value.missing == ("CLASS/",)
    assert len(open_dataset("folder", tmp_path, "test", test_fraction=1.0)) == 3


def write_table(path, rows, header=("path", "label"), **options):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([header, *rows])
    return path


@pytest.mark.parametrize(
    ("header", "delimiter"),
    [
        (("path", "label", "split"), ","),
        (("File", "Class", "Split"), ";"),
        (("filename", "category", "split"), "\t"),
        ((" Image ", "LABEL", "note", "split"), ","),
    ],
)
def test_a_table_as_root(flat, header, delimiter):
    rows = [("cat/0.png", "wild", "train"), ("./dog/0.png", "tame", "training"), ("fox/0.png", "wild", "valid")]
    rows += [("fox\\1.png", "wild", "TEST")]
    rows = [(*row[:2], "x", row[2]) for row in rows] if len(header) == 4 else rows
    table = write_table(flat / "images.csv", rows, header, delimiter=delimiter)
    splits = open_splits("folder", table)
    assert splits["train"].classes == ["tame", "wild"]
    assert [(names(each), each.labels) for each in splits.values()] == [
        (["cat/0.png", "dog/0.png"], [1, 0]),
        (["fox/0.png"], [1]),
        (["fox/1.png"], [1]),
    ]


def test_a_table_without_a_split_is_divided(flat):
    table = write_table(flat / "images.csv", [(f"cat/{i}.png", "odd" if i % 2 else "even") for i in range(10)])
    train, test = (open_dataset("folder", table, split) for split in ("train", "test"))
    assert (train.class_counts(), test.class_counts()) == ([4, 4], [1, 1])
    missing = write_table(flat / "missing.csv", [("cat/0.png", "a"), ("cat/99.png", "b")])
    assert fails(missing).value == flat / "cat/99.png"
    for name in ("a" * 300 + "/1.png", "a\0/1.png"):
        assert fails(write_table(flat / "odd.csv", [("cat/0.png", "a"), (name, "b")])).value == flat / name
    elsewhere = write_table(flat.parent / "elsewhere.csv", [(flat / "cat/0.png", "a"), (flat / "cat/1.png", "b")])
    assert len(open_dataset("folder", elsewhere, "test", test_fraction=1.0)) == 2
    (flat.parent / "escaped").mkdir()
    own = write_table(flat / "split.csv", [("../elsewhere.png", "a"), ("cat/0.png", "b")])
    assert fails(flat).value == "../elsewhere.png"
    own.write_text(f"path,label\n{flat / 'cat/0.png'},a\n")
    assert fails(flat).value == str(flat / "cat/0.png")


def test_a_table_of_test_images_alone(flat):
    table = write_table(flat / "images.csv", [("cat/0.png", "cat", "test")], ("path", "label", "split"))
    assert open_dataset("folder", table, "test").classes == ["cat"]
    assert fails(table, "train").path == table


def test_folder_with_a_split_file(folder):
    (folder / "split.csv").write_text("path,split\ntrain/cat/0.png,train\ntrain/dog/0.png,TRAIN\ntest/dog/1.png,test\n")
    train, test = (open_dataset("folder", folder, split) for split in ("train", "test"))
    assert (train.classes, train.labels, test.labels) == (["cat", "dog"], [0, 1], [1])
    other = folder / "other.csv"
    for text, value in (
        ("path,split\ncat/9.png,train\n", folder / "cat/9.png"),
        ("path,split\ntrain/cat/0.png,tain\n", "tain"),
        ("file,part\na,b\n", ("file", "part")),
        ("label,split\na,b\n", ("label", "split")),
        ("path,file,label\na,b,c\n", ("path", "file", "label")),
        ("path,split\n0.png,train\n", "0.png"),
        ("path,split\na/0.png,train\n./a/0.png,test\n", "a/0.png"),
        ("path,split\na/0.png,train\na/0.png,test\n", "a/0.png"),
        ("split,path\ntrain\n", "train"),
        ("path,split\ntrain/cat/0.png\n", "train/cat/0.png"),
        ("path,label,split\ntrain/cat/0.png,,train\n", "train/cat/0.png"),
        ("path,split\ntrain/cat/0.png,test\n", None),
    ):
        other.write_text(text)
        error = fails(folder, split_file=other)
        assert (error.path, error.value) == (other, value)
    other.unlink()
    assert fails(folder, split_file=other).path == other


def test_a_split_file_in_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "mine.csv").write_text("path,split\ntrain/cat/0.png,train\ntrain/dog/0.png,train\n")
    assert len(open_dataset("folder", folder, split_file="~/mine.csv")) == 2


@pytest.mark.parametrize("locked", ["train", "train/dog"])
def test_folders_without_permission_are_named(folder, monkeypatch, locked):
    """By replacing the functions of os, because file modes do not stop every user."""

    def refusing(function):
        def refuse(path="."):
            if os.fspath(path) == str(folder / locked):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path)

        return refuse

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(FileError) as error:
        open_dataset("folder", folder, "train")
    denied = os.strerror(errno.EACCES)
    assert (error.value.path, error.value.problem) == (folder / locked, denied)
    [empty] = open_tree(folder)[1].empty
    assert empty.path == str(folder / locked)
    assert denied in empty.reason
    with pytest.raises(FileError) as error:
        open_tree(folder / locked)
    assert denied in error.value.problem


def test_images_of_a_class_are_read_once_and_hidden_ones_are_skipped(folder):
    cats = folder / "train/cat"
    for name in (".ipynb_checkpoints/0-checkpoint.png", "young/9.png"):
        (cats / name).parent.mkdir()
        shutil.copy(cats / "0.png", cats / name)
    (cats / "again").symlink_to(".")
    opened = open_dataset("folder", folder)
    assert opened.class_counts() == [4, 3]
    assert opened.paths[:4] == [cats / "0.png", cats / "1.png", cats / "2.png", cats / "young/9.png"]


def test_class_names_that_are_not_text(folder):
    """They are escaped, so that files and terminals accept them."""
    for part in ("train", "test"):
        (folder / part / "cat").rename(os.fsdecode(bytes(folder / part) + b"/caf\xe9"))
    opened = open_dataset("folder", folder)
    assert opened.classes == ["caf\\udce9", "dog"]
    assert opened.image(0).size == (12, 10)
    table = write_table(folder / "some.csv", [("train/caf\\udce9/0.png", "train")], ("path", "split"))  # as a run writes it
    assert open_dataset("folder", table).image(0).size == (12, 10)


def test_real_birds_are_not_copies_of_each_other(cub_mini):
    images = Path(next(cub_mini.rglob("images")))
    opened = open_dataset("folder", images)
    assert len({*opened.groups.tolist()}) == len(opened)
