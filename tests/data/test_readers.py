"""Every reader on a small folder in the published layout, and the errors for folders and lists that are wrong."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

from eigengrain.data import Entry, ImageSet, list_datasets, open_dataset, register_dataset
from eigengrain.data.datasets import registry
from eigengrain.data.datasets.layout import locate
from eigengrain.data.datasets.registry import check_names, find_entry, list_entries
from eigengrain.errors import AnnotationError, ArgumentError, LayoutError, MissingPackageError, UnknownName

FILES = [entry.name for entry in list_entries() if not entry.drawn]

# name: classes, labels of train and test
EXPECTED = {
    "aircraft": (["707-320", "Cessna 172"], [1, 0, 1, 0], [1, 0, 1]),
    "cars": (["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], [0, 1, 0], [0, 1, 0]),
    "cub": (["Black footed Albatross", "Laysan Albatross", "Red Wren"], [0, 0, 1, 1, 2, 2], [0, 1, 2]),
    "dogs": (["Chihuahua", "Japanese spaniel"], [0, 1, 0], [0, 1]),
    "flowers": (["flower 1", "flower 2"], [0, 1, 1, 0], [0, 1, 1, 0]),
    "folder": (["cat", "dog"], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1]),
    "imagenet": (["tench", "goldfish"], [0, 0, 0, 1, 1, 1], [0, 1]),
    "inat2017": (["Apis mellifera", "Parus major"], [0, 1, 0, 1], [0, 1]),
}


def fails(name, root, split="train", **options):
    """The AnnotationError of opening a data set; it must be one line."""
    with pytest.raises(AnnotationError) as error:
        open_dataset(name, root, split, **options)
    assert error.value.dataset == name
    assert "\n" not in str(error.value)
    return error.value


def test_every_reader_is_tested():
    assert set(EXPECTED) == set(FILES)
    assert list_datasets() == sorted([*FILES, "plumage"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("above", [False, True])
def test_the_published_layout_is_read(name, above, request):
    root = request.getfixturevalue(name)
    if above and not find_entry(name).folders:
        pytest.skip("it has no usual folder name")
    classes, *labels = EXPECTED[name]
    files = []
    for split, expected in zip(("train", "test"), labels, strict=True):
        opened = open_dataset(name, root.parent if above else root, split)
        assert isinstance(opened, ImageSet)
        assert (opened.name, opened.split, len(opened)) == (name, split, len(expected))
        assert [title.split(",")[0] for title in opened.classes] == classes
        assert opened.labels == expected
        image, label = opened[len(opened) - 1]
        assert (image.mode, image.size, label) == ("RGB", (12, 10), expected[-1])
        files += opened.paths
    assert len(set(files)) == sum(map(len, labels))
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize("name", FILES)
def test_a_published_folder_has_what_its_entry_requires(name, request):
    root, entry = request.getfixturevalue(name), find_entry(name)
    place = root.parent if entry.folders else root
    assert (root, []) in [locate(entry, place, names) for names in entry.required]
    (place / "elsewhere").mkdir()
    for names in entry.required:
        assert locate(entry, place / "elsewhere", names) == (place / "elsewhere", [name.split("|")[0] for name in names])


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_folder_gets_the_layout(name, tmp_path):
    for i in range(12):
        (tmp_path / f"thing{i:02d}").mkdir()
    with pytest.raises(LayoutError) as error:
        open_dataset(name, tmp_path)
    assert (error.value.dataset, error.value.root) == (name, tmp_path)
    assert error.value.missing
    message = str(error.value)
    assert all(path in message for path, _ in find_entry(name).layout)
    assert "thing00/, thing01/" in message
    assert "thing08" not in message  # the list is cut
    with pytest.raises(LayoutError) as error:
        open_dataset(name, tmp_path / "absent")
    assert error.value.root == tmp_path / "absent"
    with pytest.raises(ArgumentError) as missing:
        open_dataset(name, None)
    assert missing.value.argument == "root"


def test_an_archive_instead_of_its_folder(tmp_path):
    archive = tmp_path / "CUB.tgz"
    archive.write_bytes(b"x")
    with pytest.raises(LayoutError) as error:
        open_dataset("cub", archive)
    assert error.value.root == archive


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
def test_a_missing_list_is_named(name, file, request):
    root = request.getfixturevalue(name)
    (root / file).unlink()
    with pytest.raises(LayoutError) as error:
        open_dataset(name, root, "test")
    assert error.value.root == root
    assert error.value.missing in ((file,), (file.split("/")[-1],))


@pytest.mark.parametrize("name", ["cub", "aircraft", "cars", "dogs", "inat2017", "flowers"])
def test_a_missing_image_is_named(name, request):
    root = request.getfixturevalue(name)
    lost = open_dataset(name, root, "test").paths[1]
    lost.unlink()
    assert fails(name, root, "test").value == lost


def test_boxes(cub, aircraft, cars, dogs):
    assert open_dataset("cub", cub, "test").boxes(2) == (1, 2, 6, 6)  # the file has width and height
    assert open_dataset("aircraft", aircraft, "test").boxes(1) == (5, 1, 30, 40)  # the file counts pixels from 1
    assert open_dataset("cars", cars, "test").boxes(2) == (1, 2, 5, 4)
    assert open_dataset("cars", cars).subset([2, 1]).boxes(1) == (1, 2, 4, 4)
    assert open_dataset("dogs", dogs).boxes(0) is None
    (cub / "bounding_boxes.txt").unlink()
    assert open_dataset("cub", cub).boxes(0) is None


@pytest.mark.parametrize(
    ("file", "line", "wrong_file", "value"),
    [
        ("image_class_labels.txt", None, "image_class_labels.txt", "3"),
        ("image_class_labels.txt", "3 11", "image_class_labels.txt", "11"),
        ("image_class_labels.txt", "3 x", "image_class_labels.txt", "x"),
        ("image_class_labels.txt", "3", "image_class_labels.txt", "3"),
        ("train_test_split.txt", None, "train_test_split.txt", "3"),
        ("train_test_split.txt", "3 2", "train_test_split.txt", "2"),
        ("train_test_split.txt", "3 train", "train_test_split.txt", "train"),
        ("train_test_split.txt", "abc 1", "train_test_split.txt", "abc"),
        ("train_test_split.txt", "3 1\n99 1", "train_test_split.txt", "99"),
        ("train_test_split.txt", "3 0\n1 0", "train_test_split.txt", "1"),
        ("train_test_split.txt", "3", "train_test_split.txt", "3"),
        ("bounding_boxes.txt", "3 a b c d", "bounding_boxes.txt", "3"),
        ("bounding_boxes.txt", None, "bounding_boxes.txt", "3"),
        ("classes.txt", "2 002.Laysan_Albatross\n11 011.Ghost", None, None),
    ],
)
def test_wrong_lists_of_cub(cub, file, line, wrong_file, value):
    lines = (cub / file).read_text().splitlines()
    lines[2:3] = [] if line is None else [line]
    (cub / file).write_text("\n".join(lines) + "\n")
    if wrong_file is not None:
        error = fails("cub", cub, "test")
        assert (error.path, error.value) == (cub / wrong_file, value)
    else:  # a class without a training image
        assert len(open_dataset("cub", cub, "test").classes) == 4
        assert fails("cub", cub).value == "Ghost"


def test_cub_without_an_image_of_a_split(cub):
    file = cub / "train_test_split.txt"
    file.write_text(file.read_text().replace(" 0\n", " 1\n"))
    assert fails("cub", cub, "test").path == file


def test_aircraft_levels_and_lists(aircraft):
    assert open_dataset("aircraft", aircraft, level="manufacturer").classes == ["Boeing", "Cessna"]
    assert len(open_dataset("aircraft", aircraft, with_validation=False)) == 2
    for options, suggestion in (({"level": "famly"}, "family"), ({"levl": "family"}, "level")):
        with pytest.raises(UnknownName) as error:
            open_dataset("aircraft", aircraft, **options)
        assert error.value.suggestions == [suggestion]
    boxes = aircraft / "data/images_box.txt"
    boxes.write_text(boxes.read_text().replace("2 2 30 40", "2 2 thirty 40"))
    error = fails("aircraft", aircraft)
    assert (error.path, error.value) == (boxes, "0002")
    (aircraft / "data/variants.txt").write_text("707-320\n")
    error = fails("aircraft", aircraft)
    assert (error.path.name, error.value) == ("images_variant_trainval.txt", "Cessna 172")


def test_cars_in_one_file(cars_single):
    train, test = (open_dataset("cars", cars_single.parent, split) for split in ("train", "test"))
    assert (train.labels, test.labels, train.classes) == ([0, 1, 0], [1, 0], ["Hummer", "Sedan"])
    assert [path.name for path in test.paths] == ["000003.jpg", "000004.jpg"]
    assert test.boxes(1) == (1, 2, 3, 4)


def test_wrong_annotations_of_cars(cars):
    from scipy.io import savemat

    savemat(cars / "devkit/cars_meta.mat", {"class_names": np.array(["Hummer"], dtype=object)[None]})
    error = fails("cars", cars)
    assert (error.path, error.value) == (cars / "devkit/cars_train_annos.mat", 2)
    savemat(cars / "devkit/cars_meta.mat", {"names": ["Hummer"]})
    assert fails("cars", cars).value == "class_names"
    (cars / "devkit/cars_meta.mat").write_text("not MATLAB")
    assert fails("cars", cars).path == cars / "devkit/cars_meta.mat"
    # the published test annotations without classes
    records = np.zeros((1, 1), dtype=[("fname", object)])
    records[0, 0] = ("00001.jpg",)
    savemat(cars / "cars_test_annos_withlabels.mat", {"annotations": records})
    shutil.copy(cars / "devkit/cars_train_annos.mat", cars / "devkit/cars_meta.mat")
    savemat(cars / "devkit/cars_meta.mat", {"class_names": np.array(["Hummer"], dtype=object)[None]})
    assert fails("cars", cars, "test").value == "class"


def test_missing_scipy(cars, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(MissingPackageError):
        open_dataset("cars", cars)


def test_lists_of_dogs_must_agree(dogs):
    from scipy.io import savemat

    files = np.array(["n02085782-Japanese_spaniel/test_1.jpg"], dtype=object)[:, None]
    savemat(dogs / "lists/test_list.mat", {"file_list": files, "labels": [[1]]})
    error = fails("dogs", dogs)
    assert (error.path.name, error.value) == ("test_list.mat", "n02085782-Japanese_spaniel")
    savemat(dogs / "lists/test_list.mat", {"file_list": files, "labels": [[1, 2]]})
    assert fails("dogs", dogs).value == 2
    savemat(dogs / "lists/test_list.mat", {"file_list": files, "labels": [[4]]})
    assert fails("dogs", dogs).value == 4


def test_annotations_of_inat_must_fit(inat2017):
    file = inat2017 / "train2017.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content), encoding="utf-8-sig")  # as some editors save it
    assert open_dataset("inat2017", inat2017).labels == [0, 1, 0, 1]
    for change, value in (
        ({"annotations": content["annotations"][1:]}, 3),
        ({"categories": content["categories"][:1]}, 0),
        ({"annotations": None}, "annotations"),
        ({"images": [{"id": 1}]}, None),
    ):
        file.write_text(json.dumps({**content, **change}))
        error = fails("inat2017", inat2017)
        assert (error.path, error.value) == (file, value)
    file.write_text("{")
    assert fails("inat2017", inat2017).path == file


def test_lists_of_flowers(flowers):
    from scipy.io import savemat

    assert open_dataset("flowers", flowers, with_validation=False).labels == [0, 1]
    for numbers, value in (([1, 44], 44), ([0, 1, 7], 0)):
        savemat(flowers / "setid.mat", {"trnid": [numbers], "valid": [[2]], "tstid": [[3]]})
        error = fails("flowers", flowers)
        assert (error.path, error.value) == (flowers / "setid.mat", value)


def test_names_and_splits_are_checked(folder):
    for name, split, suggestion in (("folders", "train", "folder"), ("folder", "tran", "train")):
        with pytest.raises(UnknownName) as error:
            open_dataset(name, folder, split)
        assert error.value.suggestions[0] == suggestion
    cases = (("plumage", {}, "root"), ("imagenet", {"level": 1}, "options"), ("cub", {"split": "val"}, "split"))
    for name, options, argument in cases:
        with pytest.raises(ArgumentError) as wrong:
            open_dataset(name, folder, **options)
        assert wrong.value.argument == argument
    for option in ("name", "root", "split"):
        with pytest.raises(ArgumentError):
            check_names({"level": "family", option: "x"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("aircraft", {"with_validation": "maybe"}),
        ("aircraft", {"level": 1}),
        ("folder", {"split_file": ["a.csv"]}),
        ("plumage", {"size": "big"}),
        ("plumage", {"size": 64.5}),
        ("plumage", {"per_class": True}),
    ],
)
def test_types_of_options_are_checked(name, options, tmp_path):
    """Options may come from a file or a command line."""
    with pytest.raises(ArgumentError) as error:
        open_dataset(name, None if name == "plumage" else tmp_path, **options)
    [(option, value)] = options.items()
    assert (error.value.argument, error.value.value) == (f"options.{option}", value)


def test_numpy_integers_are_integers():
    drawn = open_dataset("plumage", classes=np.int64(2), per_class=np.int32(1), size=32, cache=False)
    assert len(drawn) == 2


@pytest.fixture
def colours(folder, monkeypatch):
    """A data set that a user registers, with one option."""

    def open_colours(root, split, level: int = 1):
        opened = open_dataset("folder", root, split)
        opened.name, opened.classes = "colours", [f"{name} {level}" for name in opened.classes]
        return opened

    monkeypatch.setattr(registry, "_ENTRIES", {entry.name: entry for entry in list_entries()})
    layout = (("train/CLASS/*.png", "images"),)
    return register_dataset(
        Entry("colours", "My colours", layout, open_colours, folders=("photos",), required=(("train",),))
    )


def test_a_registered_data_set_is_listed_and_opened(colours, folder):
    assert "colours" in list_datasets()
    assert find_entry("colours") is colours
    assert open_dataset("colours", folder, level=2).classes == ["cat 2", "dog 2"]
    with pytest.raises(ArgumentError):
        open_dataset("colours", folder, level="high")
    with pytest.raises(ArgumentError) as error:
        register_dataset(replace(colours, title="Another"))
    assert (error.value.argument, error.value.value) == ("name", "colours")
    with pytest.raises(ArgumentError):
        register_dataset(replace(colours, name="cub"))


def test_a_registered_data_set_reaches_the_commands(colours, folder, tmp_path, capsys):
    from eigengrain.cli import main as cli
    from eigengrain.cli.doctor import find_data

    assert cli.main(["datasets", "list", "colours", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert listed["title"] == "My colours"
    assert cli.main(["datasets", "check", "colours", str(folder), "--workers", "0"]) == 0
    (tmp_path / "empty").mkdir()
    for place, state in ((folder.parent, "found"), (tmp_path / "empty", "not found")):
        assert {each["name"]: each["state"] for each in find_data(place)}["colours"] == state


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
