"""ImageSet and the split into training and validation samples."""

from pathlib import Path

import pytest

from eigengrain.data import ImageSet, split_validation
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
