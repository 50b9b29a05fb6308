"""Transforms give the same numbers as those of torchvision and timm."""

import random
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision import transforms as T

from eigengrain.data import ImageSet, Transforms, build_transform
from eigengrain.data.preprocessing import Interpolation, Kind
from eigengrain.data.sampler import seeded
from eigengrain.data.transforms import Pipeline
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.names import INTERPOLATIONS, TRANSFORMS

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 83, 3), dtype=np.uint8))


# config, and torchvision's steps before the tensor in training and in tests
CASES = {
    "paper": (
        Transforms("paper", 42),
        [T.Resize((48, 48)), T.CenterCrop(42), T.RandomHorizontalFlip()],
        [T.Resize((48, 48)), T.CenterCrop(42)],
    ),
    "scripts-birds": (
        Transforms.of_scripts("cub", 42),
        [T.Resize(42), T.CenterCrop(42), T.RandomHorizontalFlip()],
        [T.Resize(42), T.CenterCrop(42)],
    ),
    "scripts-cars": (
        Transforms.of_scripts("cars", 42),
        [T.Resize((42, 42)), T.RandomHorizontalFlip()],
        [T.Resize((42, 42))],
    ),
    "imagenet": (
        Transforms("imagenet", 28),
        [T.Resize(32), T.RandomCrop(28), T.RandomHorizontalFlip()],
        [T.Resize(32), T.CenterCrop(28)],
    ),
    "imagenet-warped": (
        Transforms("imagenet", 28, keep_aspect=False),
        [T.Resize((32, 32)), T.RandomCrop(28), T.RandomHorizontalFlip()],
        [T.Resize((32, 32)), T.CenterCrop(28)],
    ),
    "imagenet-scale": (
        Transforms("imagenet", 28, scale=(0.1, 0.8)),
        [T.Resize(32), T.RandomResizedCrop(28, (0.1, 0.8)), T.RandomHorizontalFlip()],
        [T.Resize(32), T.CenterCrop(28)],
    ),
    "imagenet-ratio": (
        Transforms("imagenet", 28, keep_aspect=False, scale=(0.3, 1.0), ratio=(0.5, 2.0), interpolation="bicubic"),
        [
            T.Resize((32, 32), T.InterpolationMode.BICUBIC),
            T.RandomResizedCrop(28, (0.3, 1.0), (0.5, 2.0), T.InterpolationMode.BICUBIC),
            T.RandomHorizontalFlip(),
        ],
        [T.Resize((32, 32), T.InterpolationMode.BICUBIC), T.CenterCrop(28)],
    ),
    "none": (Transforms("none"), [T.RandomHorizontalFlip()], []),
    "no-flip": (Transforms("paper", 28, resize=40, flip=False), [T.Resize((40, 40)), T.CenterCrop(28)], None),
    "bicubic": (
        Transforms("paper", 28, interpolation="bicubic"),
        [T.Resize((32, 32), T.InterpolationMode.BICUBIC), T.CenterCrop(28), T.RandomHorizontalFlip()],
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_torchvision(case, image):
    config, *steps = CASES[case]
    for train, reference in zip((True, False), steps, strict=True):
        ours = build_transform(config, train, MEAN, STD)
        theirs = T.Compose([*(steps[0] if reference is None else reference), T.ToTensor(), T.Normalize(MEAN, STD)])
        if reference is None:
            theirs = T.Compose([t for t in theirs.transforms if not isinstance(t, T.RandomHorizontalFlip)])
        results = []
        for seed in range(6):
            with seeded(seed):
                expected = theirs(image)
            with seeded(seed):
                results.append(ours(image))
            assert torch.equal(results[-1], expected)
            assert results[-1].is_contiguous()
        augmented = train and config.flip
        assert all(torch.equal(results[0], other) for other in results[1:]) != augmented


def test_sizes_of_the_paper():
    assert Transforms().kind == "paper"
    assert (Transforms().img_size, Transforms().resized) == (448, 512)
    assert Transforms("imagenet", 224).resized == 256
    assert Transforms("scripts").resized == 448
    assert Transforms.of_scripts("aircraft") == Transforms("paper")


@pytest.mark.parametrize("crop_pct", [None, 0.95, 1.0])
def test_timm_evaluation_equals_timm(image, crop_pct):
    ours = build_transform(Transforms("timm", 28, crop_pct=crop_pct, interpolation="bicubic"), False, MEAN, STD)
    theirs = create_transform(28, crop_pct=crop_pct, interpolation="bicubic", mean=MEAN, std=STD)
    torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1e-6)


def test_timm_training_equals_timm(image):
    options = {"auto_augment": "rand-m9-mstd0.5", "scale": (0.4, 1.0), "ratio": (0.8, 1.25), "interpolation": "bicubic"}
    ours = build_transform(Transforms("timm", 28, reprob=0.5, **options), True, MEAN, STD)
    theirs = create_transform(
        28, is_training=True, color_jitter=None, re_prob=0.5, re_mode="pixel", mean=MEAN, std=STD, **options
    )
    results = []
    for seed in range(8):
        with seeded(seed):
            results.append(ours(image))
        with seeded(seed):
            assert torch.equal(theirs(image), results[-1])
    assert len({tuple(r.flatten().tolist()) for r in results}) == 8


def test_generators_are_restored():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)

    def fail():
        with seeded(3, 4):
            torch.rand(5), random.random(), np.random.rand()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("kind", ["imagenet", "timm"])
def test_augmentation_depends_on_seed_epoch_and_index(kind, image, tmp_path):
    image.save(tmp_path / "x.png")
    config = Transforms(kind, 28, **({"auto_augment": "rand-m9", "reprob": 0.5} if kind == "timm" else {}))
    opened = ImageSet("x", "train", ["a"], [0] * 4, [tmp_path / "x.png"] * 4, build_transform(config, True, MEAN, STD))
    first = [opened[i][0] for i in range(4)]
    torch.rand(3), random.random(), np.random.rand()
    assert all(torch.equal(a, opened[i][0]) for i, a in reversed(list(enumerate(first))))
    assert torch.equal(opened[-1][0], first[3])
    assert len({tuple(a.flatten().tolist()) for a in first}) == 4
    opened.set_epoch(1)
    assert not torch.equal(opened[0][0], first[0])
    opened.set_epoch(0)
    opened.seed = 1
    assert not torch.equal(opened[0][0], first[0])


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"img_size": 0}, "img_size"),
        ({"resize": 300}, "resize"),
        ({"kind": "timm", "resize": 512}, "resize"),
        ({"auto_augment": "rand-m9"}, "auto_augment"),
        ({"keep_aspect": False}, "keep_aspect"),
        ({"kind": "timm", "keep_aspect": False}, "keep_aspect"),
        ({"scale": (0.3, 1.0)}, "scale"),
        ({"kind": "imagenet", "reprob": 0.5}, "reprob"),
        ({"kind": "imagenet", "ratio": (0.5, 2.0)}, "ratio"),
        ({"kind": "imagenet", "scale": (0.0, 0.5)}, "scale"),
        ({"kind": "timm", "reprob": 2.0}, "reprob"),
        ({"kind": "timm", "crop_pct": 0.0}, "crop_pct"),
        ({"kind": "timm", "scale": (1.0, 0.5)}, "scale"),
    ],
)
def test_config_is_checked(options, argument):
    with pytest.raises(ArgumentError) as error:
        Transforms(**options)
    assert error.value.argument == argument


def test_names_of_kinds():
    assert get_args(Kind) == TRANSFORMS
    assert get_args(Interpolation) == INTERPOLATIONS
    with pytest.raises(UnknownName) as error:
        Transforms("papper")
    assert error.value.suggestions == ["paper"]


def test_transform_is_checked():
    for config, mean, std, argument in (
        (Transforms(), (0.5,), STD, "mean"),
        (Transforms(), MEAN, (0.5, 0.5, 0.0), "std"),
        (Transforms("timm", auto_augment="nonsense"), MEAN, STD, "auto_augment"),
    ):
        with pytest.raises(ArgumentError) as error:
            build_transform(config, True, mean, std)
        assert error.value.argument == argument
    assert isinstance(build_transform(Transforms(), True, MEAN, STD), Pipeline)
