"""What the doctor sees of folders, caches and extras."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import caches, doctor
from eigengrain.cli import main as cli
from eigengrain.cli.doctor_data import look
from eigengrain.data import open_dataset


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A cache of its own, no folder of data sets, and no second process for an import."""
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EIGENGRAIN_DATA", raising=False)
    monkeypatch.setattr(doctor, "import_trouble", lambda module: "")


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


def state(root, name):
    found = [seen for seen in look(root) if seen.name == name]
    return found[0] if found else None


@pytest.mark.parametrize("name", MAKERS)
def test_a_data_set_is_found_where_its_reader_opens_it_and_missed_where_it_does_not(name, tmp_path):
    """Every file that the glance asks for is one without which the reader refuses the folder."""
    make, folder = MAKERS[name]
    root = tmp_path / "data"
    own = root / folder
    own.mkdir(parents=True)
    assert state(root, name) is None or state(root, name).state != "found"
    make(own)
    for split in ("train", "test"):
        open_dataset(name, root, split)
    assert state(root, name).state == state(own, name).state == "found"
    assert [seen.name for seen in look(root) if seen.state == "found"] == [name]
    first = sorted(own.iterdir())
    for part in first:
        hidden = part.rename(own / f"hidden-{part.name}")
        seen = state(root, name)
        try:
            for split in ("train", "test"):
                open_dataset(name, root, split)
            opens = True
        except ValueError:
            opens = False
        assert (seen is not None and seen.state == "found") == opens, part.name
        hidden.rename(part)


def test_cars_are_found_in_both_forms(tmp_path):
    for folder in ("cars_train", "cars_test", "devkit"):
        (tmp_path / "cars" / folder).mkdir(parents=True)
    assert state(tmp_path, "cars").missing == (
        "devkit/cars_meta.mat",
        "devkit/cars_train_annos.mat",
        "cars_test_annos_withlabels.mat",
    )
    (tmp_path / "cars/car_ims").mkdir()
    (tmp_path / "cars/cars_annos.mat").touch()
    assert state(tmp_path, "cars").state == "found"


def test_what_is_missing_and_where_to_get_it(tmp_path):
    (tmp_path / "CUB_200_2011/images").mkdir(parents=True)
    birds, dogs = state(tmp_path, "cub"), state(tmp_path, "dogs")
    assert birds.state == "incomplete"
    assert birds.missing == ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
    assert birds.remedy == "see 'eigengrain datasets list cub'"
    assert dogs.state == "not found"
    assert "ImageNetDogs" in dogs.remedy
    assert dogs.remedy.endswith(str(tmp_path / "stanford_dogs"))


def test_the_folder_comes_from_the_option_or_the_environment(tmp_path, monkeypatch, capsys):
    make_cub(tmp_path / "CUB_200_2011")
    monkeypatch.setenv("COLUMNS", "400")
    assert cli.main(["doctor", "--data", str(tmp_path)]) == 0
    assert f"found in {tmp_path}/CUB_200_2011" in capsys.readouterr().out
    monkeypatch.setenv("EIGENGRAIN_DATA", str(tmp_path))
    assert cli.main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["data"]["folder"] == str(tmp_path)
    assert [seen["name"] for seen in document["data"]["sets"] if seen["state"] == "found"] == ["cub"]
    assert cli.main(["doctor", "--data", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_missing_extras_come_with_the_line_that_brings_them(monkeypatch, capsys):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda package: None if package in ("gradio", "onnx") else real(package))
    found = {extra.name: extra for extra in doctor.missing_extras()}
    assert found["explorer"].missing == ("gradio",)
    assert found["export"].install == "pip install 'eigengrain[export]'"
    assert "explain" not in found
    assert cli.main(["doctor"]) == 0  # an extra is no problem
    assert "pip install 'eigengrain[export]'" in capsys.readouterr().out


def test_caches_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "cache/plumage").mkdir(parents=True)
    (tmp_path / "cache/plumage/a.npz").write_bytes(b"x" * 3 * 2**20)
    (tmp_path / "hub/blobs").mkdir(parents=True)
    (tmp_path / "hub/blobs/1").write_bytes(b"x" * 10)
    (tmp_path / "hub/link").symlink_to(tmp_path / "hub/blobs/1")
    found = {cache.what: cache for cache in caches.caches()}
    assert str(found["drawn birds"]) == "1 file, 3.0 MiB"
    assert (found["weights of timm"].files, found["weights of timm"].bytes) == (1, 10)
    assert str(found["solver timings"]) == "empty"
    assert found["solver timings"].path == str(tmp_path / "cache/solvers.json")


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path / "file" / "cache"))
    assert not caches.is_writable(tmp_path / "file" / "cache")
    assert caches.is_writable(tmp_path / "new" / "deep")
    assert cli.main(["doctor", "--quiet"]) == 1
    assert capsys.readouterr().out == (
        f"the cache folder {tmp_path}/file/cache cannot be written to: set EIGENGRAIN_CACHE to another\n"
    )


@pytest.mark.parametrize(("variable", "code"), [("HF_HOME", 0), ("TORCH_HOME", 0), ("EIGENGRAIN_CACHE", 1)])
def test_a_folder_that_may_not_be_looked_into(tmp_path, monkeypatch, capsys, variable, code):
    (tmp_path / "locked").mkdir()
    stat, access = os.stat, os.access

    def refusing(path, *rest, **options):
        if str(path).startswith(f"{tmp_path}/locked/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *rest, **options)

    monkeypatch.setattr(os, "stat", refusing)  # as for another user: an administrator may look anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "locked" and access(path, mode))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "locked/cache"))
    assert cli.main(["doctor", "--quiet"]) == code
    said = capsys.readouterr().out
    assert said == (
        f"the cache folder {tmp_path}/locked/cache cannot be written to: set EIGENGRAIN_CACHE to another\n" * code
    )


def test_threads_are_told(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = doctor.thread_facts()
    assert facts["OMP_NUM_THREADS"] == "3"
    assert 1 <= facts["cores"] <= os.cpu_count()


def test_a_package_of_several_extras_is_listed_once():
    names = [name for name, _ in doctor.package_rows()]
    assert "captum" in names
    assert len(names) == len(set(names))
