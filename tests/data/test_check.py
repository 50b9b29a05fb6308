"""Damaged and duplicated images are reported by the functions of eigengrain.data.check."""

import os
import shutil
import signal

import pytest
from PIL import Image, ImageFile

from eigengrain.data import ImageSet, find_unreadable, open_dataset
from eigengrain.data.check import find_problems


def by_name(problems):
    return {(p.split, "/".join(p.path.split("/")[-2:])): p for p in problems}


@pytest.mark.parametrize("workers", [0, 2])
def test_problems_are_reported(damaged, workers):
    splits = [open_dataset("folder", damaged, split) for split in ("train", "test")]
    problems = by_name(find_problems(splits, workers))
    assert {key: p.kind for key, p in problems.items()} == {
        ("train", "cat/0.png"): "unreadable",
        ("train", "cat/1.png"): "truncated",
        ("train", "dog/1.png"): "duplicate",
        ("test", "cat/0.png"): "duplicate",
        ("test", "dog/0.png"): "unreadable",
    }
    # a duplicate names the original, and the classes if they differ
    assert problems["train", "dog/1.png"].reason == f"same pixels as {damaged / 'train/dog/0.png'}"
    assert str(damaged / "train/dog/2.png") in problems["test", "cat/0.png"].reason
    assert {"train", "cat", "dog"} <= set(problems["test", "cat/0.png"].reason.replace(",", "").split())
    unreadable = find_unreadable(splits[0], workers)
    assert [(p.index, p.kind) for p in unreadable] == [(0, "unreadable"), (1, "truncated")]
    assert [p.path for p in unreadable] == [str(splits[0].path(p.index)) for p in unreadable]
    assert not any(p.path in p.reason for p in unreadable)


class Signalled(ImageSet):
    """The process that opens the second image receives SIGTERM, as from ``timeout`` or a cluster that stops a job."""

    def image(self, index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().image(index)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not report who sends a signal")
def test_workers_ignore_a_signal_to_all_processes(damaged):
    opened = open_dataset("folder", damaged)
    signalled = Signalled(opened.name, opened.split, opened.classes, opened.labels, opened.paths)
    assert find_unreadable(signalled, workers=1) == find_unreadable(opened)


def test_truncated_jpegs_are_reported_even_if_pillow_would_fill_them(folder, monkeypatch):
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


def test_images_of_the_same_bytes_and_another_size_are_no_duplicates(folder):
    for name, size in (("0.png", (4, 6)), ("1.png", (6, 4))):
        Image.new("RGB", size, "red").save(folder / "train/cat" / name)
    shutil.copy(folder / "train/cat/0.png", folder / "train/cat/2.png")
    problems = find_problems([open_dataset("folder", folder)])
    assert [(p.index, p.kind) for p in problems] == [(2, "duplicate")]


def test_real_birds_are_readable(cub_mini):
    opened = open_dataset("cub", cub_mini, "test")
    assert find_unreadable(opened.subset(range(0, len(opened), 4))) == []
