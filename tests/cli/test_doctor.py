"""The report on packages, extras, devices, data sets and caches."""

import errno
import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from eigengrain.cli import doctor
from eigengrain.cli import main as cli
from eigengrain.cli.doctor import find_data
from eigengrain.data import open_dataset
from eigengrain.data.datasets.registry import Entry, register_dataset
from eigengrain.errors import FileError


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """An empty cache, no folder of data sets, and no second process for an import."""
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EIGENGRAIN_DATA", raising=False)
    monkeypatch.setattr(doctor, "import_error", lambda modules: "")


IMPORT_ERROR = doctor.import_error


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(path)


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def make_cub(root):
    for number in (1, 2):
        draw(root / f"images/1.A/{number}.jpg")
    lines(root / "images.txt", "1 1.A/1.jpg", "2 1.A/2.jpg")
    lines(root / "image_class_labels.txt", "1 1", "2 1")
    lines(root / "train_test_split.txt", "1 1", "2 0")
    lines(root / "classes.txt", "1 1.A")


def make_aircraft(root):
    for name in ("1", "2"):
        draw(root / f"data/images/{name}.jpg")
    lines(root / "data/variants.txt", "A")
    lines(root / "data/images_variant_trainval.txt", "1 A")
    lines(root / "data/images_variant_test.txt", "2 A")


def make_imagenet(root):
    for split in ("train", "val"):
        draw(root / split / "n01440764" / "1.JPEG")


def make_folder(root):
    for split in ("train", "valid"):
        draw(root / split / "a" / "1.png")


def make_inat(root):
    draw(root / "train_val_images/Aves/wren/1.jpg")
    record = {
        "images": [{"id": 1, "file_name": "train_val_images/Aves/wren/1.jpg"}],
        "annotations": [{"image_id": 1, "category_id": 0}],
        "categories": [{"id": 0, "name": "wren", "supercategory": "Aves"}],
    }
    (root / "annotations").mkdir()
    for name in ("train2017.json", "val2017.json"):
        (root / "annotations" / name).write_text(json.dumps(record))


def make_mat(name, **values):
    scipy_io = pytest.importorskip("scipy.io")
    name.parent.mkdir(parents=True, exist_ok=True)
    scipy_io.savemat(name, values)


def make_flowers(root):
    for number in range(1, 103):
        draw(root / f"jpg/image_{number:05d}.jpg")
    draw(root / "jpg/image_00103.jpg")
    make_mat(root / "imagelabels.mat", labels=np.array([*range(1, 103), 1]))
    make_mat(root / "setid.mat", trnid=np.arange(1, 52), valid=np.arange(52, 103), tstid=np.array([103]))


def make_dogs(root):
    for name in ("1", "2"):
        draw(root / f"Images/n1-A/{name}.jpg")
    for split, name in (("train", "1"), ("test", "2")):
        files = np.array([[f"n1-A/{name}.jpg"]], dtype=object)
        make_mat(root / f"lists/{split}_list.mat", file_list=files, labels=np.array([[1]]))


MAKERS = {
    "cub": (make_cub, "CUB_200_2011"),
    "aircraft": (make_aircraft, "fgvc-aircraft-2013b"),
    "dogs": (make_dogs, "stanford_dogs"),
    "inat2017": (make_inat, "inat2017"),
    "flowers": (make_flowers, "flowers-102"),
    "imagenet": (make_imagenet, "imagenet"),
    "folder": (make_folder, ""),
}


def find(root, name):
    return next((seen for seen in find_data(root) if seen["name"] == name), None)


def report(capsys, *words, code=0):
    assert cli.main(["doctor", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", MAKERS)
def test_a_data_set_is_found_exactly_if_its_reader_opens_it(name, tmp_path):
    """Every file that is looked for is one without which the reader refuses the folder."""
    make, folder = MAKERS[name]
    root = tmp_path / "data"
    own = root / folder
    own.mkdir(parents=True)
    assert find(root, name) is None or find(root, name)["state"] != "found"
    make(own)
    for split in ("train", "test"):
        open_dataset(name, root, split)
    assert find(root, name)["state"] == find(own, name)["state"] == "found"
    assert [seen["name"] for seen in find_data(root) if seen["state"] == "found"] == [name]
    for part in sorted(own.iterdir()):
        hidden = part.rename(own / f"hidden-{part.name}")
        seen = find(root, name)
        try:
            for split in ("train", "test"):
                open_dataset(name, root, split)
            opens = True
        except ValueError:
            opens = False
        assert (seen is not None and seen["state"] == "found") == opens, part.name
        hidden.rename(part)


def test_cars_are_found_in_both_layouts(tmp_path):
    for folder in ("cars_train", "cars_test", "devkit"):
        (tmp_path / "cars" / folder).mkdir(parents=True)
    assert find(tmp_path, "cars")["missing"] == [
        "devkit/cars_meta.mat",
        "devkit/cars_train_annos.mat",
        "cars_test_annos_withlabels.mat",
    ]
    (tmp_path / "cars/car_ims").mkdir()
    (tmp_path / "cars/cars_annos.mat").touch()
    assert find(tmp_path, "cars")["state"] == "found"


def test_what_is_missing_and_where_to_get_it(tmp_path):
    (tmp_path / "CUB_200_2011/images").mkdir(parents=True)
    birds, dogs = find(tmp_path, "cub"), find(tmp_path, "dogs")
    assert (birds["state"], birds["folder"]) == ("incomplete", str(tmp_path / "CUB_200_2011"))
    assert birds["missing"] == ["images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"]
    assert (dogs["state"], dogs["folder"]) == ("not found", None)
    assert dogs["remedy"].endswith(str(tmp_path / "stanford_dogs"))


def test_a_data_set_of_a_user_is_reported(tmp_path, capsys):
    from eigengrain.data.datasets import registry

    entries = [
        Entry("colours", "Colours", (("red.png", "an image"),), lambda root, split: None),
        Entry("shapes", "Shapes", (("a.png", "an image"),), lambda root, split: None, ("shapes",), (("a.png",),)),
    ]
    try:
        for entry in entries:
            register_dataset(entry)
        states = {each["name"]: each["state"] for each in report(capsys, "--data", str(tmp_path))["data"]["sets"]}
        assert states["shapes"] == "not found"
        assert "colours" not in states  # it does not declare its files
        draw(tmp_path / "shapes" / "a.png")
        assert find(tmp_path, "shapes")["state"] == "found"
    finally:
        for entry in entries:
            registry._ENTRIES.pop(entry.name)


def test_the_folder_comes_from_the_option_or_the_environment(tmp_path, monkeypatch, capsys):
    make_cub(tmp_path / "CUB_200_2011")
    monkeypatch.setenv("EIGENGRAIN_DATA", str(tmp_path))
    for words in ((), ("--data", str(tmp_path / "CUB_200_2011"))):
        data = report(capsys, *words)["data"]
        assert data["folder"] == str(words[1] if words else tmp_path)
        assert [seen["name"] for seen in data["sets"] if seen["state"] == "found"] == ["cub"]
    with pytest.raises(FileError) as error:
        find_data(tmp_path / "none")
    assert error.value.path == tmp_path / "none"


def test_the_report_for_people(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(package in out for package in doctor.REQUIRED)


def test_missing_packages(monkeypatch, capsys):
    """A missing extra is not a problem; a missing requirement is."""
    real = doctor.installed
    missing = {"gradio", "onnx"}
    monkeypatch.setattr(doctor, "installed", lambda package: None if package in missing else real(package))
    extras = {extra["name"]: extra for extra in report(capsys)["missing_extras"]}
    assert extras["explorer"]["missing"] == ["gradio"]
    assert extras["export"]["install"] == "pip install 'eigengrain[export]'"
    assert "explain" not in extras
    missing.add("timm")
    [problem] = report(capsys, code=1)["problems"]
    assert "timm" in problem


@pytest.mark.parametrize("broken", ["torchvision", "timm"])
def test_packages_that_cannot_be_imported_are_a_problem(monkeypatch, capsys, broken):
    error = "OSError: undefined symbol"
    monkeypatch.setattr(doctor, "import_error", lambda modules: error if broken in modules.split(", ") else "")
    [problem] = report(capsys, code=1)["problems"]
    assert error in problem
    assert f"--force-reinstall {'torch torchvision' if broken == 'torchvision' else 'timm'}" in problem


def test_a_torchvision_for_another_torch_is_a_problem_although_this_package_repairs_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "torchvision.py").write_text(
        "import torch\n"
        "if not hasattr(torch.ops.torchvision, 'nms'):\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "import_error", import_error := cache(IMPORT_ERROR))
    [problem] = report(capsys, code=1)["problems"]
    assert import_error("eigengrain._torchvision") == ""
    assert "operator torchvision::nms does not exist" in problem
    assert problem.startswith(f"torch {doctor.installed('torch')} and torchvision {doctor.installed('torchvision')} ")


def test_caches_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "cache/plumage").mkdir(parents=True)
    (tmp_path / "cache/plumage/a.npz").write_bytes(b"x" * 300)
    (tmp_path / "hub/blobs").mkdir(parents=True)
    (tmp_path / "hub/blobs/1").write_bytes(b"x" * 10)
    (tmp_path / "hub/link").symlink_to(tmp_path / "hub/blobs/1")
    sizes = {cache["what"]: (cache["files"], cache["bytes"]) for cache in doctor.caches(tmp_path / "cache")}
    assert sizes["drawn birds"] == (1, 300)
    assert sizes["weights of timm"] == (1, 10)


def test_an_empty_cache_has_no_files(capsys):
    assert cli.main(["doctor"]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if "drawn birds" in line]
    assert row[-2:] == ["0", "0"]


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(folder))
    assert doctor.find_problems(tmp_path / "new" / "deep") == []
    assert cli.main(["doctor", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert str(folder) in out


@pytest.mark.parametrize(("variable", "code"), [("HF_HOME", 0), ("TORCH_HOME", 0), ("EIGENGRAIN_CACHE", 1)])
def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch, capsys, variable, code):
    (tmp_path / "locked").mkdir()
    stat, access = os.stat, os.access

    def refusing(path, *rest, **options):
        if str(path).startswith(f"{tmp_path}/locked/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *rest, **options)

    monkeypatch.setattr(os, "stat", refusing)  # as for another user: an administrator may read everything
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "locked" and access(path, mode))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "locked/cache"))
    assert len(report(capsys, code=code)["problems"]) == code


def test_the_system_is_described(capsys):
    document = report(capsys)
    assert document["environment"]["torch_version"].startswith(document["packages"][1]["version"].split("+")[0])
    assert document["devices"][0]["device"] == "cpu"
    assert document["devices"][0]["eigensolver"] == "torch"
