"""Plumage: drawings are reproducible, and species differ exactly in their masks."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.data.plumage import SPECIES, Nuisance, cache_folder, draw, open_plumage
from eigengrain.data.plumage.render import capsule, circle, coverage, ellipse, polygon, render
from eigengrain.data.plumage.scene import draw_scene
from eigengrain.errors import ArgumentError, UnknownName


def small(split="train", **options):
    return open_plumage(split, **{"classes": 4, "per_class": 3, "size": 48, "cache": False, **options})


def pixels(dataset):
    return np.stack([np.asarray(dataset.image(k)) for k in range(len(dataset))])


def test_the_same_seed_draws_the_same_images():
    first, again, other = pixels(small(seed=3)), pixels(small(seed=3)), pixels(small(seed=4))
    np.testing.assert_array_equal(first, again)
    assert all((a != b).any() for a, b in zip(first, other, strict=True))


def test_an_image_does_not_depend_on_how_many_there_are():
    few, many = small(per_class=2), small(per_class=5)
    np.testing.assert_array_equal(pixels(few), pixels(many)[: len(few)])
    for k in range(len(few)):
        np.testing.assert_array_equal(few.parts(k), many.parts(k))


def test_train_and_test_have_no_scene_in_common():
    train, test = pixels(small("train", per_class=8)), pixels(small("test", per_class=8))
    every = [image.tobytes() for image in (*train, *test)]
    assert len(set(every)) == len(every)
    # not only by noise: even the most similar pair of a training and a test image differs much
    assert min(np.abs(test - image).mean((1, 2, 3)).min() for image in train.astype(np.int16)) > 5


def test_global_generators_are_not_used():
    np.random.seed(1)
    torch.manual_seed(1)
    random.seed(1)
    first = pixels(small())
    states = np.random.get_state()[1].copy(), torch.get_rng_state(), random.getstate()
    np.random.seed(2)
    np.testing.assert_array_equal(first, pixels(small()))
    np.random.seed(1)
    np.testing.assert_array_equal(states[0], np.random.get_state()[1])
    assert torch.equal(states[1], torch.get_rng_state())
    assert states[2] == random.getstate()
    fresh = np.random.RandomState(1).get_state()[1]
    np.testing.assert_array_equal(states[0], fresh)


def test_labels_are_balanced_and_names_are_unique():
    birds = small(classes=7, per_class=5)
    assert Counter(birds.labels) == dict.fromkeys(range(7), 5)
    assert len(birds.classes) == len(set(birds.classes)) == 7
    assert len({marks.name for marks in SPECIES}) == len(SPECIES) == 24


def test_any_two_species_differ_in_at_least_two_parts():
    for a, b in combinations(SPECIES, 2):
        assert sum(x != y for x, y in zip(vars(a).values(), vars(b).values(), strict=True)) >= 2


@pytest.mark.parametrize("index", range(6))
def test_species_differ_in_small_parts_of_the_bird_and_nowhere_else(index):
    first, *others = [draw(0, "test", index, species, 96, Nuisance()) for species in range(len(SPECIES))]
    assert first.parts.any()
    assert not (first.parts & ~first.bird).any()
    assert 0.08 < first.bird.mean() < 0.45
    assert first.parts.sum() < 0.45 * first.bird.sum()
    for other in others:
        np.testing.assert_array_equal(other.bird, first.bird)
        np.testing.assert_array_equal(other.parts, first.parts)
        np.testing.assert_array_equal(other.image[~first.parts], first.image[~first.parts])
    marks = [drawing.image[first.parts] for drawing in (first, *others)]
    for a, b in combinations(marks, 2):
        assert (a != b).any(-1).sum() >= 12
    # the mask is not too large: nearly every pixel of it is changed by some species
    assert np.any([(mark != marks[0]).any(-1) for mark in marks], 0).mean() > 0.9


def test_the_mask_covers_the_bird():
    # the same scene without the bird's own colours: another plumage changes pixels of the mask only
    scene = draw_scene(np.random.default_rng(5), Nuisance())
    red = replace(scene, back=np.array([1, 0, 0], np.float32), pale=np.array([0, 1, 0], np.float32))
    before, after = render(scene, SPECIES[0], 96), render(red, SPECIES[0], 96)
    changed = (before.image != after.image).any(-1)
    assert not (changed & ~before.bird).any()
    assert changed.sum() > 0.75 * before.bird.sum()


def test_it_is_an_image_set():
    birds = small(transform=lambda image: torch.rand(1))
    (value, label), (again, _) = birds[5], birds[5]
    assert torch.equal(value, again)
    assert label == birds.labels[5] == 1
    birds.set_epoch(1)
    assert not torch.equal(birds[5][0], value)
    birds.transform = None
    assert isinstance(birds[0][0], Image.Image)
    assert birds[0][0].mode == "RGB"
    assert birds.paths is None

    part = birds.subset([7, 2]).subset([0])
    assert part.labels == [birds.labels[7]]
    np.testing.assert_array_equal(np.asarray(part.image(0)), np.asarray(birds.image(7)))
    np.testing.assert_array_equal(part.parts(0), birds.parts(7))

    left, top, right, bottom = (int(value) for value in birds.boxes(4))
    mask = birds.mask(4)
    assert mask[top:bottom, left:right].sum() == mask.sum()
    assert mask[top].any()
    assert mask[bottom - 1].any()
    assert mask[:, left].any()
    assert mask[:, right - 1].any()
    np.testing.assert_array_equal(birds.masks(4).numpy(), mask)


def test_cache_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path))
    drawn = small(cache=True)
    (file,) = tmp_path.rglob("*.npz")
    with np.load(file, allow_pickle=False) as saved:
        assert sorted(saved) == ["images", "regions"]

    class DrawnAgain(Exception):
        pass

    def refuse(*_):
        raise DrawnAgain

    with monkeypatch.context() as patch:
        patch.setattr("eigengrain.data.plumage.draw", refuse)
        loaded = small(cache=True)
        # other settings are another file
        with pytest.raises(DrawnAgain):
            small(cache=True, nuisance=Nuisance(noise=0.5))
    np.testing.assert_array_equal(pixels(drawn), pixels(loaded))
    for k in range(len(drawn)):
        np.testing.assert_array_equal(drawn.mask(k), loaded.mask(k))
        np.testing.assert_array_equal(drawn.parts(k), loaded.parts(k))

    # a damaged file is drawn again and replaced
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[: whole // 2])
    np.testing.assert_array_equal(pixels(small(cache=True)), pixels(drawn))
    assert file.stat().st_size == whole
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_is_logged(tmp_path, monkeypatch, caplog):
    (tmp_path / "taken").write_text("a file where the folder should be")
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path / "taken"))
    assert len(small(cache=True)) == 12
    [record] = caplog.records
    assert (record.levelname, record.args[0]) == ("WARNING", tmp_path / "taken" / "plumage")


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("EIGENGRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "eigengrain"
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.parametrize(
    "options", [{"classes": 1}, {"classes": 25}, {"per_class": 0}, {"size": 16}, {"seed": -1}], ids=str
)
def test_arguments_are_checked(options):
    with pytest.raises(ArgumentError) as error:
        small(**options)
    assert error.value.argument == next(iter(options))
    with pytest.raises(UnknownName):
        small("val")


@pytest.mark.parametrize(
    "options", [{"length": (0.9, 0.8)}, {"length": (0.1, 0.8)}, {"contrast": (0.5, 1.1)}, {"noise": -0.1}], ids=str
)
def test_nuisance_is_checked(options):
    with pytest.raises(ArgumentError) as error:
        Nuisance(**options)
    assert error.value.argument == next(iter(options))


def segment_distance(p, a, b):
    t = min(max(np.dot(p - a, b - a) / np.dot(b - a, b - a), 0), 1)
    return np.linalg.norm(p - a - t * (b - a))


def test_distances_agree_with_elementary_geometry():
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, (40, 2))
    u, v = points.astype(np.float32).T
    a, b = np.array([-0.3, 0.1]), np.array([0.4, -0.2])
    np.testing.assert_allclose(
        capsule(u, v, tuple(a), tuple(b), 0.1), [segment_distance(p, a, b) - 0.1 for p in points], rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(circle(u, v, (0.2, 0.1), 0.3), np.hypot(*(points - [0.2, 0.1]).T) - 0.3, rtol=0, atol=1e-6)
    corners = [(-0.5, -0.4), (0.6, -0.3), (0.3, 0.5)]
    inside = polygon(u, v, corners) < 0
    for p, is_inside in zip(points, inside, strict=True):
        turns = [
            np.linalg.det([np.subtract(q, c), np.subtract(p, c)])
            for c, q in zip(corners, [*corners[1:], corners[0]], strict=True)
        ]
        assert is_inside == all(turn > 0 for turn in turns)
    # points on the edge of a turned ellipse
    t = rng.uniform(0, 2 * np.pi, 50)
    x, y = 0.5 * np.cos(t), 0.2 * np.sin(t)
    u, v = 0.1 + x * np.cos(0.7) - y * np.sin(0.7), -0.2 + x * np.sin(0.7) + y * np.cos(0.7)
    on_edge = ellipse(u.astype(np.float32), v.astype(np.float32), (0.1, -0.2), (0.5, 0.2), 0.7)
    np.testing.assert_allclose(on_edge, 0, rtol=0, atol=1e-6)


def test_coverage_adds_up_to_the_area():
    axis = ((np.arange(64) + 0.5) / 64).astype(np.float32)
    disc = coverage(circle(axis[None], axis[:, None], (0.5, 0.5), 0.3), 1 / 64)
    assert disc.sum() / 64**2 == pytest.approx(np.pi * 0.09, rel=2e-3)
    assert set(np.unique(disc[[0, 32], [0, 32]])) == {0.0, 1.0}
