"""ImageSet and the split into training and validation samples."""

from pathlib import Path

import numpy as np
import pytest

from eigengrain.data import ImageSet, split_validation
from eigengrain.data.image_set import hold_out
from eigengrain.errors import ArgumentError, ImageError


def with_counts(counts):
    """A data set with the given numbers of samples per class; its files do not exist."""
    labels = [k for k, n in enumerate(counts) for _ in range(n)]
    return ImageSet(
        "x", "train", [str(k) for k in range(len(counts))], labels, [Path(f"{i}.jpg") for i in range(len(labels))]
    )


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.33, 0.5, 0.9])
def test_validation_is_stratified(fraction):
    counts = [30, 29, 41, 7, 1, 12]
    whole = with_counts(counts)
    train, validation = split_validation(whole, fraction, seed=4)
    assert sorted(train.paths + validation.paths) == sorted(whole.paths)
    assert len(validation) == round(fraction * 120) or fraction == 0.9  # a class keeps one sample for training
    for n, kept, held in zip(counts, train.class_counts(), validation.class_counts(), strict=True):
        assert kept >= 1
        assert kept + held == n
        assert abs(held - fraction * n) < 1 or n == 1 or kept == 1
    again = split_validation(whole, fraction, seed=4)[1]
    assert again.paths == validation.paths
    assert split_validation(whole, fraction, seed=5)[1].paths != validation.paths
    assert (train.split, validation.split, whole.split) == ("train", "validation", "train")
    validation.transform = print
    assert train.transform is None


def test_validation_is_checked():
    for counts, fraction, seed, argument in (
        ([5], 1.5, 0, "fraction"),
        ([1, 1], 0.4, 0, "fraction"),
        ([5], 0.5, -1, "seed"),
    ):
        with pytest.raises(ArgumentError) as error:
            split_validation(with_counts(counts), fraction, seed)
        assert error.value.argument == argument


def test_arguments_are_checked():
    for call, argument, value in (
        (lambda: ImageSet("x", "train", ["a"], [0, 0], ["p.jpg"]), "paths", 1),
        (lambda: ImageSet("x", "train", ["a"], [0, 0], boxes=[(0, 0, 1, 1)]), "boxes", 1),
        (lambda: ImageSet("x", "train", ["a"], [0, 1], ["p.jpg", "q.jpg"]), "labels", 1),
        (lambda: with_counts([3]).subset([0, 9]), "indices", 9),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert (error.value.argument, error.value.value) == (argument, value)
    with pytest.raises(IndexError):
        with_counts([3])[3]
    with pytest.raises(ImageError) as missing:
        with_counts([3])[0]
    assert missing.value.path == Path("0.jpg")


def test_an_image_set_has_no_files_or_masks_by_default():
    dataset = ImageSet("x", "train", ["a"], [0])
    assert dataset.paths is dataset.path(0) is dataset.boxes(0) is dataset.masks(0) is dataset.parts(0) is None
    with pytest.raises(NotImplementedError):
        dataset.image(0)


def test_labels_are_found_by_the_names_of_other_classes():
    birds = ImageSet("birds", "test", ["lark", "owl", "wren"], [0, 2, 2], ["a.jpg", "b.jpg", "c.jpg"])
    other = birds.with_classes(["wren", "robin", "lark"])  # owl has no images
    assert (other.classes, other.labels) == (["wren", "robin", "lark"], [2, 0, 0])
    assert (birds.classes, birds.labels) == (["lark", "owl", "wren"], [0, 2, 2])
    with pytest.raises(ArgumentError) as error:
        birds.with_classes(["lark", "owl"])
    assert (error.value.argument, error.value.value) == ("name", "birds")


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_held_out_together(seed):
    labels = np.repeat([0, 1, 2], 10)
    groups = np.array([*range(6), *[6] * 4, *[10] * 10, *range(20, 29), 0])  # 0 has two classes
    held = hold_out(labels.tolist(), [4, 2, 3], seed, groups)
    assert held[6:10].all() or not held[6:10].any()
    assert held[:10].sum() in (3, 4)
    assert not held[10:20].any()  # a class of copies is not divided
    assert held[20:].sum() == 3
    assert not held[[0, 29]].any()
    alone = hold_out(labels.tolist(), [4, 2, 3], seed)
    assert [alone[labels == k].sum() for k in range(3)] == [4, 2, 3]
    assert hold_out([0] * 5, [1], seed, np.array([0, 0, 2, 2, 2])).tolist() == [True, True, False, False, False]


def test_validation_samples_keep_groups_together():
    whole = with_counts([6, 6])
    whole.groups = np.array([0, 0, 0, 3, 4, 5, 6, 7, 8, 9, 9, 9])
    for seed in range(5):
        train, validation = split_validation(whole, 0.5, seed)
        assert not {*train.groups.tolist()} & {*validation.groups.tolist()}
        assert validation.class_counts() == [3, 3]
