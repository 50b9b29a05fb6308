import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.data.plumage import SPECIES, Nuisance, contact_sheet, open_plumage
from eigengrain.data.plumage import cache as disk
from eigengrain.data.plumage.dataset import draw
from eigengrain.data.plumage.render import render
from eigengrain.data.plumage.scene import draw_scene
from eigengrain.data.plumage.shapes import capsule, circle, coverage, ellipse, polygon


def small(split="train", **options):
    return open_plumage(split, **{"classes": 4, "per_class": 3, "size": 48, "cache": False, **options})


def pixels(dataset):
    return np.stack([np.asarray(dataset.image(k)) for k in range(len(dataset))])


def test_the_same_seed_draws_the_same_bits_and_another_seed_others():
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
    # not just other noise: even the nearest pair of a training and a test image differs much
    apart = np.abs(train[:, None].astype(int) - test[None].astype(int)).mean((2, 3, 4))
    assert apart.min() > 5


def test_global_generators_are_neither_read_nor_moved():
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


def test_any_two_species_differ_in_two_parts_or_more():
    for a, b in combinations(SPECIES, 2):
        assert sum(x != y for x, y in zip(vars(a).values(), vars(b).values(), strict=True)) >= 2


def test_the_parts_of_every_species_are_small_and_on_the_bird():
    for species in range(len(SPECIES)):
        for index in range(3):
            drawing = draw(0, "train", index, species, 96, Nuisance())
            assert drawing.parts.any()
            assert not (drawing.parts & ~drawing.bird).any()
            assert 0.08 < drawing.bird.mean() < 0.45
            assert drawing.parts.sum() < 0.45 * drawing.bird.sum()


def test_species_differ_in_their_parts_only_and_do_differ_there():
    for index in range(6):
        drawings = [draw(0, "test", index, species, 96, Nuisance()) for species in range(len(SPECIES))]
        for a, b in combinations(drawings, 2):
            changed = (a.image != b.image).any(-1)
            np.testing.assert_array_equal(a.bird, b.bird)
            np.testing.assert_array_equal(a.parts, b.parts)
            assert not (changed & ~a.parts).any()
            assert changed.sum() >= 12
        # and the mask is not larger than it must be: nearly every pixel of it is changed by some species
        ever = np.any([(a.image != drawings[0].image).any(-1) for a in drawings], 0)
        assert ever.sum() > 0.9 * drawings[0].parts.sum()


def test_the_bird_is_where_its_mask_says():
    # the same scene without the bird's own colours: another plumage changes pixels of the mask only
    scene = draw_scene(np.random.default_rng(5), Nuisance())
    red = replace(scene, back=np.array([1, 0, 0], np.float32), pale=np.array([0, 1, 0], np.float32))
    before, after = render(scene, SPECIES[0], 96), render(red, SPECIES[0], 96)
    changed = (before.image != after.image).any(-1)
    assert not (changed & ~before.bird).any()
    assert changed.sum() > 0.75 * before.bird.sum()


def test_it_behaves_as_an_image_set():
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

    def refuse(*_):
        raise AssertionError("it was drawn again")

    with monkeypatch.context() as patch:
        patch.setattr("eigengrain.data.plumage.dataset.draw", refuse)
        loaded = small(cache=True)
        # other settings are another file
        with pytest.raises(AssertionError, match="drawn again"):
            small(cache=True, nuisance=Nuisance(noise=0.5))
    np.testing.assert_array_equal(pixels(drawn), pixels(loaded))
    for k in range(len(drawn)):
        np.testing.assert_array_equal(drawn.mask(k), loaded.mask(k))
        np.testing.assert_array_equal(drawn.parts(k), loaded.parts(k))

    # a damaged file is drawn anew and replaced
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[: whole // 2])
    np.testing.assert_array_equal(pixels(small(cache=True)), pixels(drawn))
    assert file.stat().st_size == whole
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_is_said_and_survived(tmp_path, monkeypatch, caplog):
    (tmp_path / "taken").write_text("a file where the folder should be")
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path / "taken"))
    assert len(small(cache=True)) == 12
    assert "drawn again next time" in caplog.text


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("EIGENGRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.cache_folder() == tmp_path / "eigengrain"
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path / "own"))
    assert disk.cache_folder() == tmp_path / "own"


def test_contact_sheet_shows_the_images_and_outlines_the_parts():
    birds = small()
    plain, outlined = contact_sheet(birds, 2, 3, 1, outline=False), contact_sheet(birds, 2, 3, 1)
    assert plain.size == outlined.size == (144, 124)
    np.testing.assert_array_equal(np.asarray(plain)[14:62, :48], np.asarray(birds.image(0)))
    changed = (np.asarray(plain) != np.asarray(outlined)).any(-1)[14:62, :48]
    assert changed.any()
    assert not (changed & birds.parts(0)).any()
    with pytest.raises(ValueError, match="at least 1"):
        contact_sheet(birds, samples=0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": "val"}, "train and test, got 'val'"),
        ({"classes": 1}, "2 to 24"),
        ({"classes": 25}, "2 to 24"),
        ({"per_class": 0}, "at least 1"),
        ({"size": 16}, "32 pixels"),
        ({"seed": -1}, "negative"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize(
    "options", [{"length": (0.9, 0.8)}, {"length": (0.1, 0.8)}, {"contrast": (0.5, 1.1)}, {"noise": -0.1}]
)
def test_scenes_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Nuisance(**options)


def segment_distance(p, a, b):
    t = min(max(np.dot(p - a, b - a) / np.dot(b - a, b - a), 0), 1)
    return np.linalg.norm(p - a - t * (b - a))


def test_distances_agree_with_slow_geometry():
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, (40, 2))
    u, v = points.astype(np.float32).T
    a, b = np.array([-0.3, 0.1]), np.array([0.4, -0.2])
    np.testing.assert_allclose(
        capsule(u, v, tuple(a), tuple(b), 0.1), [segment_distance(p, a, b) - 0.1 for p in points], atol=1e-6
    )
    np.testing.assert_allclose(circle(u, v, (0.2, 0.1), 0.3), np.hypot(*(points - [0.2, 0.1]).T) - 0.3, atol=1e-6)
    corners = [(-0.5, -0.4), (0.6, -0.3), (0.3, 0.5)]
    inside = polygon(u, v, corners) < 0
    for p, found in zip(points, inside, strict=True):
        turns = [
            np.linalg.det([np.subtract(q, c), np.subtract(p, c)])
            for c, q in zip(corners, [*corners[1:], corners[0]], strict=True)
        ]
        assert found == all(turn > 0 for turn in turns)
    # points on the edge of a turned ellipse
    t = rng.uniform(0, 2 * np.pi, 50)
    x, y = 0.5 * np.cos(t), 0.2 * np.sin(t)
    u, v = 0.1 + x * np.cos(0.7) - y * np.sin(0.7), -0.2 + x * np.sin(0.7) + y * np.cos(0.7)
    on_edge = ellipse(u.astype(np.float32), v.astype(np.float32), (0.1, -0.2), (0.5, 0.2), 0.7)
    np.testing.assert_allclose(on_edge, 0, atol=1e-6)


def test_coverage_adds_up_to_the_area():
    axis = ((np.arange(64) + 0.5) / 64).astype(np.float32)
    disc = coverage(circle(axis[None], axis[:, None], (0.5, 0.5), 0.3), 1 / 64)
    assert disc.sum() / 64**2 == pytest.approx(np.pi * 0.09, rel=2e-3)
    assert set(np.unique(disc[[0, 32], [0, 32]])) == {0.0, 1.0}
