"""Small folders in the published layout of each data set, with generated images."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import eigengrain._torchvision  # noqa: F401  (before any test module imports timm or torchvision)
from data.drawing import draw


@pytest.fixture
def cub(tmp_path):
    """Three classes with two training images and one test image each, one of them a WebP."""
    root = tmp_path / "CUB_200_2011"
    names = ["001.Black_footed_Albatross", "002.Laysan_Albatross", "010.Red_Wren"]
    images, labels, splits, boxes = [], [], [], []
    for k, name in enumerate(names):
        for i in range(3):
            number, file = 3 * k + i + 1, f"{name}/{name}_{i}.{'webp' if i == 2 else 'jpg'}"
            draw(root / "images" / file)
            images.append(f"{number} {file}")
            labels.append(f"{number} {[1, 2, 10][k]}")
            splits.append(f"{number} {int(i < 2)}")
            boxes.append(f"{number} 1.0 2.0 {3 + k}.0 4.0")
    for file, lines in {
        "images.txt": images,
        "image_class_labels.txt": labels,
        "train_test_split.txt": splits,
        "bounding_boxes.txt": boxes,
        # numbers are sorted as numbers, not as text
        "classes.txt": [f"10 {names[2]}", f"1 {names[0]}", f"2 {names[1]}"],
    }.items():
        (root / file).write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def aircraft(tmp_path):
    root = tmp_path / "fgvc-aircraft-2013b"
    data = root / "data"
    members = {"train": ["0001", "0002"], "val": ["0003", "0004"], "test": ["0005", "0006", "0007"]}
    members["trainval"] = members["train"] + members["val"]
    levels = {
        "variant": ["707-320", "Cessna 172"],
        "family": ["Boeing 707", "Cessna 172"],
        "manufacturer": ["Boeing", "Cessna"],
    }
    plural = {"variant": "variants", "family": "families", "manufacturer": "manufacturers"}
    for name in (*members["trainval"], *members["test"]):
        draw(data / "images" / f"{name}.jpg")
    for level, names in levels.items():
        (data / f"{plural[level]}.txt").write_text("\n".join(names) + "\n")
        for part, numbers in members.items():
            lines = [f"{number} {names[int(number) % 2]}" for number in numbers]
            (data / f"images_{level}_{part}.txt").write_text("\n".join(lines) + "\n")
    (data / "images_box.txt").write_text("\n".join(f"000{i} {i} 2 30 40" for i in range(1, 8)) + "\n")
    return root


def _records(samples, fields):
    table = np.zeros((1, len(samples)), dtype=[(name, object) for name in fields])
    for i, sample in enumerate(samples):
        table[0, i] = sample
    return table


@pytest.fixture
def cars(tmp_path):
    """Two classes in the devkit's layout."""
    io = pytest.importorskip("scipy.io")
    root = tmp_path / "stanford_cars"
    (root / "devkit").mkdir(parents=True)
    box = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
    for part, file in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        samples = [(1, 2, 3 + i, 4, i % 2 + 1, f"0000{i + 1}.jpg") for i in range(3)]
        for *_, name in samples:
            draw(root / f"cars_{part}" / name)
        io.savemat(root / file, {"annotations": _records(samples, (*box, "class", "fname"))})
    names = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], dtype=object)[None]
    io.savemat(root / "devkit/cars_meta.mat", {"class_names": names})
    return root


@pytest.fixture
def cars_single(tmp_path):
    """Cars in the other published layout, with one annotation file."""
    io = pytest.importorskip("scipy.io")
    root = tmp_path / "cars"
    fields = ("relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test")
    samples = [(f"car_ims/00000{i}.jpg", 1, 2, 3, 4, i % 2 + 1, int(i > 2)) for i in range(5)]
    for name, *_ in samples:
        draw(root / name)
    names = np.array(["Hummer", "Sedan"], dtype=object)[None]
    io.savemat(root / "cars_annos.mat", {"annotations": _records(samples, fields), "class_names": names})
    return root


@pytest.fixture
def dogs(tmp_path):
    io = pytest.importorskip("scipy.io")
    root = tmp_path / "dogs"
    folders = ["n02085620-Chihuahua", "n02085782-Japanese_spaniel"]
    (root / "lists").mkdir(parents=True)
    for part, count in (("train", 3), ("test", 2)):
        files = [f"{folders[i % 2]}/{part}_{i}.jpg" for i in range(count)]
        for file in files:
            draw(root / "Images" / file)
        content = {
            "file_list": np.array(files, dtype=object)[:, None],
            "labels": np.array([[i % 2 + 1] for i in range(count)]),
        }
        io.savemat(root / "lists" / f"{part}_list.mat", content)
    return root


@pytest.fixture
def inat2017(tmp_path):
    root = tmp_path / "inat2017"
    categories = [{"id": 1, "name": "Parus major", "supercategory": "Aves"}, {"id": 0, "name": "Apis mellifera"}]
    for part, start, count in (("train", 0, 4), ("val", 100, 2)):
        images = [
            {"id": start + i, "file_name": f"train_val_images/{('Insecta', 'Aves')[i % 2]}/x/{start + i}.jpg"}
            for i in range(count)
        ]
        for image in images:
            draw(root / image["file_name"])
        annotations = [{"id": 7 * i, "image_id": start + i, "category_id": i % 2} for i in reversed(range(count))]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / f"{part}2017.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def flowers(tmp_path):
    io = pytest.importorskip("scipy.io")
    root = tmp_path / "flowers-102"
    for number in range(1, 9):
        draw(root / "jpg" / f"image_{number:05d}.jpg")
    io.savemat(root / "imagelabels.mat", {"labels": np.array([[1, 2, 1, 2, 1, 2, 2, 1]])})
    io.savemat(root / "setid.mat", {"trnid": [[1, 4]], "valid": [[2, 5]], "tstid": [[3, 6, 7, 8]]})
    return root


@pytest.fixture
def imagenet(tmp_path):
    root = tmp_path / "imagenet"
    for part, count in (("train", 3), ("val", 1)):
        for name in ("n01440764", "n01443537"):
            for i in range(count):
                draw(root / part / name / f"{name}_{i}.JPEG")
    return root


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "photos"
    for part, count in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                draw(root / part / name / f"{i}.png")
    return root


@pytest.fixture
def damaged(folder):
    """A text file, a truncated file and an empty one, and equal images within a split and across the splits."""
    (folder / "train/cat/0.png").write_text("no image")
    intact = folder / "train/cat/1.png"
    pixels = intact.read_bytes()
    intact.write_bytes(pixels[: len(pixels) * 2 // 3])
    (folder / "test/dog/0.png").write_bytes(b"")
    Image.open(folder / "train/dog/0.png").save(folder / "train/dog/1.png", compress_level=1)  # other bytes, same pixels
    shutil.copy(folder / "train/dog/2.png", folder / "test/cat/0.png")
    return folder


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Image files of many proportions."""
    from data.batches import write_images

    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def cub_mini(tmp_path_factory):
    """Eight real classes of CUB, if they are available."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    for folder in (os.environ.get("EIGENGRAIN_DATA"), beside):
        archive = Path(folder) / "cub-mini.zip" if folder else None
        if archive is not None and archive.is_file():
            out = tmp_path_factory.mktemp("cub-mini")
            with zipfile.ZipFile(archive) as file:
                file.extractall(out)
            return out
    pytest.skip("cub-mini.zip is neither in the folder EIGENGRAIN_DATA nor in ../shared/data")
