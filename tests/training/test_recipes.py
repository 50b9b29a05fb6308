"""Recipes: each can be read, names its command in its header, and has the settings of the paper."""

import re
from pathlib import Path

import pytest
import torch

from eigengrain.data.datasets.registry import list_datasets
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.models import create_model
from eigengrain.recipes import list_recipes, load_recipe, recipe_path

FINE = ("birds", "aircrafts", "cars")


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_is_complete(name):
    text = Path(recipe_path(name)).read_text(encoding="utf-8")
    header = text.split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert re.search(rf"^# command:  eigengrain train --recipe {re.escape(name)} ", header, re.M)
    assert re.search(r"^# hardware: ", header, re.M)
    assert re.search(r"^# result:   ", header, re.M)
    assert max(map(len, text.splitlines())) <= 128
    config = load_recipe(name)
    assert config.recipe == name
    assert config.data.name in list_datasets()
    assert config.data.root is None  # the user sets the folder of the images


# channels of the covariance, and side of the map of an image of 128 pixels
@pytest.mark.parametrize(
    ("name", "channels", "side"),
    [
        ("birds-resnet50-paper", 256, 8),
        ("birds-resnet50-scripts", 256, 4),
        ("birds-vgg16-paper", 512, 8),
        ("dogs-efficientnet_b5-paper", 256, 8),
        ("imagenet-alexnet-paper", 256, 7),
    ],
)
def test_the_model_of_a_recipe_can_be_created(name, channels, side):
    config = load_recipe(name).model
    with torch.device("meta"):
        model = create_model(config.backbone, config.head, 7, config.reduce, config.last_stride)
        features = model.eval().forward_features(torch.empty(1, 3, 128, 128))
    assert (model.head.channels, features.shape[-1]) == (channels, side)


def test_there_is_a_recipe_for_each_pair_of_the_paper():
    expected = {f"{data}-{backbone}-paper" for data in FINE for backbone in ("resnet50", "vgg16")}
    expected |= {f"{data}-resnet50-scripts" for data in FINE} | {"birds-resnet50-modern"}
    expected |= {f"{data}-efficientnet_b5-paper" for data in ("dogs", "inats")}
    expected |= {f"imagenet-{b}-{flavour}" for b in ("alexnet", "resnet50") for flavour in ("paper", "scripts")}
    assert set(list_recipes()) == expected | {"plumage-demo"}


# batch, classifier ×, weight decay, epochs and drops of the text, epochs and drops of the scripts
@pytest.mark.parametrize(
    ("data", "batch", "scale", "decay", "text", "scripts"),
    [
        ("birds", 10, 20, 1e-4, (100, [50]), (200, [50, 100])),
        ("aircrafts", 8, 5, 1e-3, (50, [20]), (50, [21, 40])),
        ("cars", 10, 10, 1e-4, (100, [50]), (200, [50, 100])),
    ],
)
def test_the_settings_of_the_resnets(data, batch, scale, decay, text, scripts):
    for flavour, (epochs, drops) in (("paper", text), ("scripts", scripts)):
        config = load_recipe(f"{data}-resnet50-{flavour}")
        optimiser = config.optimiser
        assert (config.batch_size, optimiser.classifier_lr_scale, optimiser.weight_decay) == (batch, scale, decay)
        assert (optimiser.opt, optimiser.lr, optimiser.momentum) == ("sgd", 3e-3, 0.9)
        assert (config.epochs, config.schedule.drops, config.schedule.factor) == (epochs, drops, 0.1)
        assert (config.clip_grad, config.select) == ((5.0, "best-test") if flavour == "scripts" else (None, "last"))
        transforms = config.data.transforms
        squashed_512 = flavour == "paper" or data == "aircrafts"
        assert (transforms.kind, transforms.resized, transforms.img_size) == (
            ("paper", 512, 448) if squashed_512 else ("scripts", 448, 448)
        )
        if not squashed_512:
            assert transforms.keep_aspect == (data == "birds")


def test_the_settings_of_vgg_and_imagenet():
    cars = load_recipe("cars-vgg16-paper")
    assert cars.optimiser.lr == 1.2e-3
    assert cars.optimiser.lr * cars.optimiser.classifier_lr_scale == pytest.approx(6e-3)
    for data in FINE:
        config = load_recipe(f"{data}-vgg16-paper")
        assert (config.epochs, config.schedule.drops, config.model.reduce) == (150, [50, 100], None)
    alexnet, resnet = (load_recipe(f"imagenet-{b}-paper") for b in ("alexnet", "resnet50"))
    assert (alexnet.batch_size, alexnet.epochs, alexnet.schedule.drops) == (128, 30, [10, 20])
    assert (resnet.batch_size, resnet.epochs, resnet.schedule.drops) == (256, 60, [30, 45])
    assert (alexnet.optimiser.weight_decay, resnet.optimiser.weight_decay) == (5e-4, 1e-4)
    assert alexnet.optimiser.lr == resnet.optimiser.lr == pytest.approx(10**-1.1, rel=1e-3)


def test_overrides_and_unknown_options():
    config = load_recipe("birds-resnet50-modern", {"data.root": "x", "optimiser.lr": 0.5, "epochs": 1})
    assert (config.data.root, config.optimiser.lr, config.epochs, config.amp) == ("x", 0.5, 1, "bf16")
    with pytest.raises(UnknownName) as unknown:
        load_recipe("birds-resnet50-modern", {"optimiser.lrr": 1})
    assert unknown.value.suggestions[0] == "optimiser.lr"
    with pytest.raises(ArgumentError) as error:
        load_recipe("birds-resnet50-modern", {"epochs.lr": 1})
    assert error.value.argument == "epochs.lr"
