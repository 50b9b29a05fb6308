"""Every reader on a small folder as published, and what a folder gets that is not."""

import errno
import json
import os
import re
import shutil
import sys

import numpy as np
import pytest

from eigengrain.data import ImageSet, list_datasets, open_dataset
from eigengrain.data.datasets.catalogue import ENTRIES, find_entry
from eigengrain.data.datasets.tree import open_tree

READ = [entry.name for entry in ENTRIES if not entry.drawn]

# name: classes, labels of train and test
EXPECTED = {
    "cub": (["Black footed Albatross", "Laysan Albatross", "Red Wren"], [0, 0, 1, 1, 2, 2], [0, 1, 2]),
    "aircraft": (["707-320", "Cessna 172"], [1, 0, 1, 0], [1, 0, 1]),
    "cars": (["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], [0, 1, 0], [0, 1, 0]),
    "dogs": (["Chihuahua", "Japanese spaniel"], [0, 1, 0], [0, 1]),
    "inat2017": (["Apis mellifera", "Parus major"], [0, 1, 0, 1], [0, 1]),
    "flowers": (["flower 1", "flower 2"], [0, 1, 1, 0], [0, 1, 1, 0]),
    "imagenet": (["tench", "goldfish"], [0, 0, 0, 1, 1, 1], [0, 1]),
    "folder": (["cat", "dog"], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1]),
}


def test_every_reader_is_tested():
    assert set(EXPECTED) == set(READ)
    assert list_datasets() == [*READ, "plumage"]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("above", [False, True])
def test_reads_what_is_published(name, above, request):
    root = request.getfixturevalue(name)
    if above and not find_entry(name).folders:
        pytest.skip("it has no folder name of its own")
    classes, *labels = EXPECTED[name]
    files = []
    for split, expected in zip(("train", "test"), labels, strict=True):
        opened = open_dataset(name, root.parent if above else root, split)
        assert isinstance(opened, ImageSet)
        assert (opened.name, opened.split, len(opened)) == (name, split, len(expected))
        assert [found.split(",")[0] for found in opened.classes] == classes
        assert opened.labels == expected
        image, label = opened[len(opened) - 1]
        assert (image.mode, image.size, label) == ("RGB", (12, 10), expected[-1])
        files += opened.paths
    assert len(set(files)) == sum(map(len, labels))
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize("name", READ)
def test_wrong_folder_gets_the_layout(name, tmp_path):
    for i in range(12):
        (tmp_path / f"thing{i:02d}").mkdir()
    with pytest.raises(ValueError) as caught:
        open_dataset(name, tmp_path)
    message = str(caught.value)
    for what, _ in find_entry(name).layout:
        assert what in message
    assert "found: thing00/, thing01/" in message
    assert message.endswith("and 4 more")
    with pytest.raises(ValueError, match="no such folder"):
        open_dataset(name, tmp_path / "absent")
    with pytest.raises(ValueError, match=r"give the folder[\s\S]*expected"):
        open_dataset(name, None)


def test_archive_instead_of_its_folder(tmp_path):
    archive = tmp_path / "CUB.tgz"
    archive.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"it is a file[\s\S]*found: a file; name the folder that it unpacks to"):
        open_dataset("cub", archive)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cub", "train_test_split.txt"),
        ("aircraft", "data/variants.txt"),
        ("cars", "cars_test_annos_withlabels.mat"),
        ("cars", "devkit/cars_meta.mat"),
        ("dogs", "lists/test_list.mat"),
        ("inat2017", "val2017.json"),
        ("flowers", "setid.mat"),
    ],
)
def test_missing_list_is_named(name, file, request):
    root = request.getfixturevalue(name)
    (root / file).unlink()
    with pytest.raises(ValueError, match=rf"{file.split('/')[-1]} is missing[\s\S]*expected:[\s\S]*found: "):
        open_dataset(name, root, "test")


@pytest.mark.parametrize("name", ["cub", "aircraft", "cars", "dogs", "inat2017", "flowers"])
def test_missing_image_is_named(name, request):
    root = request.getfixturevalue(name)
    lost = open_dataset(name, root, "test").paths[1]
    lost.unlink()
    with pytest.raises(ValueError, match=rf"1 of them are missing: {re.escape(str(lost))}"):
        open_dataset(name, root, "test")


def test_boxes(cub, aircraft, cars, dogs):
    assert open_dataset("cub", cub, "test").boxes(2) == (1, 2, 6, 6)  # the file has width and height
    assert open_dataset("aircraft", aircraft, "test").boxes(1) == (5, 1, 30, 40)  # the file counts pixels from 1
    assert open_dataset("cars", cars, "test").boxes(2) == (1, 2, 5, 4)
    assert open_dataset("cars", cars).subset([2, 1]).boxes(1) == (1, 2, 4, 4)
    assert open_dataset("dogs", dogs).boxes(0) is None
    (cub / "bounding_boxes.txt").unlink()
    assert open_dataset("cub", cub).boxes(0) is None


def test_cub_lists_must_fit(cub):
    file = cub / "image_class_labels.txt"
    text = file.read_text()
    file.write_text(text.replace("9 10\n", ""))
    with pytest.raises(ValueError, match=r"1 images of .*images.txt are not in image_class_labels.txt.*number 9"):
        open_dataset("cub", cub)
    file.write_text(text.replace("9 10\n", "9 11\n"))
    with pytest.raises(ValueError, match=r"classes.txt has 3 classes, and class 11 of image 9"):
        open_dataset("cub", cub)
    file.write_text(text.replace("9 10\n", "9\n"))
    with pytest.raises(ValueError, match=r"line 9 of .*image_class_labels.txt needs 2 entries, it is '9'"):
        open_dataset("cub", cub)
    file.write_text(text)
    with (cub / "classes.txt").open("a") as classes:
        classes.write("11 011.Ghost\n")
    with pytest.raises(ValueError, match=r"1 of 4 classes have no training image \(Ghost\)"):
        open_dataset("cub", cub)
    assert len(open_dataset("cub", cub, "test").classes) == 4


def test_aircraft_levels_and_lists(aircraft):
    assert open_dataset("aircraft", aircraft, level="manufacturer").classes == ["Boeing", "Cessna"]
    assert len(open_dataset("aircraft", aircraft, with_validation=False)) == 2
    with pytest.raises(ValueError, match="did you mean 'family'"):
        open_dataset("aircraft", aircraft, level="famly")
    with pytest.raises(ValueError, match="unknown option of aircraft 'levl': did you mean 'level'"):
        open_dataset("aircraft", aircraft, levl="family")
    boxes = aircraft / "data/images_box.txt"
    boxes.write_text(boxes.read_text().replace("2 2 30 40", "2 2 thirty 40"))
    with pytest.raises(ValueError, match=r"images_box.txt has '2 2 thirty 40' for image 0002, where left, top, right"):
        open_dataset("aircraft", aircraft)
    (aircraft / "data/variants.txt").write_text("707-320\n")
    with pytest.raises(ValueError, match=r"has the class 'Cessna 172', which variants.txt does not have"):
        open_dataset("aircraft", aircraft)


def test_cars_in_one_file(cars_single):
    train, test = (open_dataset("cars", cars_single.parent, split) for split in ("train", "test"))
    assert (train.labels, test.labels, train.classes) == ([0, 1, 0], [1, 0], ["Hummer", "Sedan"])
    assert [path.name for path in test.paths] == ["000003.jpg", "000004.jpg"]


def test_cars_class_counts_must_fit(cars):
    from scipy.io import savemat

    savemat(cars / "devkit/cars_meta.mat", {"class_names": np.array(["Hummer"], dtype=object)[None]})
    with pytest.raises(ValueError, match=r"classes from 1 to 2, and cars_meta.mat names 1"):
        open_dataset("cars", cars)
    (cars / "devkit/cars_meta.mat").write_text("not MATLAB")
    with pytest.raises(ValueError, match=r"cannot read .*cars_meta.mat as a MATLAB file"):
        open_dataset("cars", cars)


def test_missing_scipy_names_the_extra(cars, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ValueError, match=r"pip install 'eigengrain\[data\]'"):
        open_dataset("cars", cars)


def test_dogs_lists_must_agree(dogs):
    from scipy.io import savemat

    files = np.array(["n02085782-Japanese_spaniel/test_1.jpg"], dtype=object)[:, None]
    savemat(dogs / "lists/test_list.mat", {"file_list": files, "labels": [[1]]})
    with pytest.raises(ValueError, match=r"class 1 is n02085620-Chihuahua and in test_list.mat also n02085782"):
        open_dataset("dogs", dogs)


def test_inat_annotations_must_fit(inat2017):
    file = inat2017 / "train2017.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content), encoding="utf-8-sig")  # as some editors save it
    assert open_dataset("inat2017", inat2017).labels == [0, 1, 0, 1]
    file.write_text(json.dumps({**content, "annotations": content["annotations"][1:]}))
    with pytest.raises(ValueError, match=r"1 images of .* have no annotation, the first has the id 3"):
        open_dataset("inat2017", inat2017)
    file.write_text(json.dumps({**content, "categories": content["categories"][:1]}))
    with pytest.raises(ValueError, match="has the category id 0"):
        open_dataset("inat2017", inat2017)
    file.write_text(json.dumps({"images": content["images"]}))
    with pytest.raises(ValueError, match="has no list 'annotations'"):
        open_dataset("inat2017", inat2017)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .* as JSON"):
        open_dataset("inat2017", inat2017)


def test_flowers_lists(flowers):
    from scipy.io import savemat

    assert open_dataset("flowers", flowers, with_validation=False).labels == [0, 1]
    savemat(flowers / "setid.mat", {"trnid": [[1, 44]], "valid": [[2]], "tstid": [[3]]})
    with pytest.raises(ValueError, match=r"image number 44, and imagelabels.mat labels 8 images"):
        open_dataset("flowers", flowers)
    savemat(flowers / "setid.mat", {"trnid": [[0, 1, 7]], "valid": [[2]], "tstid": [[3]]})
    with pytest.raises(ValueError, match=r"image number 0, and imagelabels.mat labels 8 images, from 1 on"):
        open_dataset("flowers", flowers)


def test_folder_with_an_empty_class(folder):
    (folder / "train/fox").mkdir()
    with pytest.raises(ValueError, match=r"3 for training, 2 for test; only .*train has fox"):
        open_dataset("folder", folder)
    (folder / "test/fox").mkdir()
    (folder / "train/fox/notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"1 of 3 class folders in .*train have no images: fox"):
        open_dataset("folder", folder)


def test_folder_names_of_the_test_images(folder):
    (folder / "test").rename(folder / "val")
    assert len(open_dataset("folder", folder, "test")) == 4
    shutil.rmtree(folder / "val")
    with pytest.raises(ValueError, match=r"test/ is missing, and there is no split.csv"):
        open_dataset("folder", folder)
    shutil.rmtree(folder / "train")
    with pytest.raises(ValueError, match=r"train/ and test/ are missing, and there is no split.csv"):
        open_dataset("folder", folder)
    with pytest.raises(ValueError, match=r"no folder was named for .*\('folder'\): give the folder.*\nexpected:"):
        open_dataset("folder")


def test_folder_with_a_split_file(folder):
    (folder / "split.csv").write_text("path,split\ntrain/cat/0.png,train\ntrain/dog/0.png,TRAIN\ntest/dog/1.png,val\n")
    train, test = (open_dataset("folder", folder, split) for split in ("train", "test"))
    assert (train.classes, train.labels, test.labels) == (["cat", "dog"], [0, 1], [1])
    other = folder / "other.csv"
    for text, message in (
        ("path,split\ncat/9.png,train\n", "names 1 images for this split and 1 of them are missing"),
        ("path,split\ntrain/cat/0.png,tain\n", "has the split 'tain'"),
        ("file,part\na,b\n", "needs the columns path and split, it has file, part"),
        ("path,split\n0.png,train\n", "lies in no class folder; write CLASS/IMAGE, with /"),
        ("path,split\ncat\\0.png,train\n", "lies in no class folder; write CLASS/IMAGE, with /"),
        ("path,split\na/0.png,train\n./a/0.png,test\n", "has the path 'a/0.png' more than once"),
        ("split,path\ntrain\n", "has a line that ends before its path and its split"),
        ("path,split\ntrain/cat/0.png\n", "has a line that ends before its path and its split"),
        (
            "path,split\na/0.png,train\na/0.png,test\n",
            "has the path 'a/0.png' more than once: an image belongs to one split",
        ),
        ("path,split\ntrain/cat/0.png,test\n", "names no image for this split"),
    ):
        other.write_text(text)
        with pytest.raises(ValueError, match=message):
            open_dataset("folder", folder, split_file=other)


@pytest.mark.parametrize("locked", ["train", "train/dog"])
def test_folders_that_may_not_be_read_are_named(folder, monkeypatch, locked):
    """Not by their modes, which do not stop everyone."""

    def refusing(look):
        def refuse(path="."):
            if os.fspath(path) == str(folder / locked):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return look(path)

        return refuse

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(folder / locked))} cannot be read \(Permission denied\)$"):
        open_dataset("folder", folder, "train")
    assert open_tree(folder).empty == [(str(folder / locked), "the folder cannot be read (Permission denied)")]
    with pytest.raises(ValueError, match=r"the folder cannot be read \(Permission denied\)"):
        open_tree(folder / locked)


def test_a_split_file_in_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "mine.csv").write_text("path,split\ntrain/cat/0.png,train\ntrain/dog/0.png,train\n")
    assert len(open_dataset("folder", folder, split_file="~/mine.csv")) == 2


def test_images_of_a_class_are_read_once_and_hidden_ones_not_at_all(folder):
    cats = folder / "train/cat"
    for name in (".ipynb_checkpoints/0-checkpoint.png", "young/9.png"):
        (cats / name).parent.mkdir()
        shutil.copy(cats / "0.png", cats / name)
    (cats / "again").symlink_to(".")
    found = open_dataset("folder", folder)
    assert found.class_counts() == [4, 3]
    assert found.paths[:4] == [cats / "0.png", cats / "1.png", cats / "2.png", cats / "young/9.png"]


def test_names_of_classes_that_are_no_text(folder):
    """As files and terminals can have them, so that no result is lost at its end."""
    for part in ("train", "test"):
        (folder / part / "cat").rename(os.fsdecode(bytes(folder / part) + b"/caf\xe9"))
    found = open_dataset("folder", folder)
    assert found.classes == ["caf\\udce9", "dog"]
    assert found.image(0).size == (12, 10)


def test_names_and_splits_are_checked(folder):
    with pytest.raises(ValueError, match="unknown data set 'folders': did you mean 'folder'"):
        open_dataset("folders", folder)
    with pytest.raises(ValueError, match=r"unknown split 'val'.*split_validation"):
        open_dataset("folder", folder, "val")
    with pytest.raises(ValueError, match="plumage is drawn"):
        open_dataset("plumage", folder)
    with pytest.raises(ValueError, match="imagenet has no options"):
        open_dataset("imagenet", folder, level=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("aircraft", {"with_validation": "maybe"}, "option with_validation of aircraft: expected true or false, got"),
        ("aircraft", {"level": 1}, "option level of aircraft: expected a text, got 1"),
        ("folder", {"split_file": ["a.csv"]}, "option split_file of folder: expected a text or null, got "),
        ("plumage", {"size": "big"}, "option size of plumage: expected a whole number, got 'big'"),
        ("plumage", {"size": 64.5}, "option size of plumage: expected a whole number, got 64.5"),
        ("plumage", {"per_class": True}, "option per_class of plumage: expected a whole number or null, got True"),
    ],
)
def test_values_of_options_are_checked(name, options, message, tmp_path):
    """They come from files and from command lines, where anything may stand."""
    with pytest.raises(ValueError, match=message):
        open_dataset(name, None if name == "plumage" else tmp_path, **options)


def test_whole_numbers_of_numpy_are_some():
    drawn = open_dataset("plumage", classes=np.int64(2), per_class=np.int32(1), size=32, cache=False)
    assert len(drawn) == 2


def test_real_birds(cub_mini):
    train, test = (open_dataset("cub", cub_mini, split) for split in ("train", "test"))
    assert (len(train) + len(test), len(train.classes)) == (467, 8)
    assert train.classes == test.classes
    assert train.classes[0] == "Baird Sparrow"
    for path, label in zip(train.paths, train.labels, strict=True):
        assert path.parent.name.endswith(train.classes[label].replace(" ", "_"))
    image, _ = test[0]
    assert image.size == (224, 224)
    for i in (0, len(train) // 2):
        left, top, right, bottom = train.boxes(i)
        assert left < right <= 225
        assert top < bottom <= 225


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("train_test_split.txt", None, "1 images of .*images.txt are not in train_test_split.txt, the first is number 3"),
        (
            "train_test_split.txt",
            "3 2",
            "has '2' for image 3, where 1 .training. or 0 .test. is expected",
        ),
        ("train_test_split.txt", "3 train", "has 'train' for image 3"),
        ("train_test_split.txt", "abc 1", "train_test_split.txt has 'abc' where a whole number is expected"),
        ("train_test_split.txt", "3 1\n99 1", "1 images that are not in images.txt, the first is number 99"),
        ("train_test_split.txt", "3 0\n1 0", "train_test_split.txt has the number 1 twice"),
        ("train_test_split.txt", "3", "line 3 of .*train_test_split.txt needs 2 entries, it is '3'"),
        ("image_class_labels.txt", "3 x", "classes.txt has 3 classes, and class x of image 3 is not one of them"),
        ("bounding_boxes.txt", "3 a b c d", "bounding_boxes.txt has 'a b c d' for image 3, where left, top"),
    ],
)
def test_lists_of_cub_that_are_wrong(cub, file, line, said):
    lines = (cub / file).read_text().splitlines()
    lines[2:3] = [] if line is None else [line]
    (cub / file).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=f"^cub: .*{said}|^cub: {said}") as error:
        open_dataset("cub", cub, "test")
    assert "\n" not in str(error.value)


def test_cub_without_an_image_for_a_split(cub):
    file = cub / "train_test_split.txt"
    file.write_text(file.read_text().replace(" 0\n", " 1\n"))
    with pytest.raises(ValueError, match="marks no image with 0, so the test split is empty"):
        open_dataset("cub", cub, "test")
