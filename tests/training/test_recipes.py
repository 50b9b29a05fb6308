"""Recipes: every one can be read, says how it is run, and has the numbers of the paper."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from eigengrain.cli import main as cli
from eigengrain.data.datasets.catalogue import list_datasets
from eigengrain.models import create_model
from eigengrain.recipes import expand, list_recipes, load_recipe, recipe_path

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
    assert config.data.root is None  # where the images are is the user's


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
def test_the_model_of_a_recipe_can_be_made(name, channels, side):
    config = load_recipe(name).model
    with torch.device("meta"):
        model = create_model(config.backbone, config.head, 7, config.reduce, config.last_stride)
        features = model.eval().forward_features(torch.empty(1, 3, 128, 128))
    assert (model.head.channels, features.shape[-1]) == (channels, side)


def test_there_is_one_for_each_pair_of_the_paper():
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
def test_the_numbers_of_the_resnets(data, batch, scale, decay, text, scripts):
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


def test_the_numbers_of_vgg_and_imagenet():
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


def test_overrides_and_misspelt_ones():
    config = load_recipe("birds-resnet50-modern", {"data.root": "x", "optimiser.lr": 0.5, "epochs": 1})
    assert (config.data.root, config.optimiser.lr, config.epochs, config.amp) == ("x", 0.5, 1, "bf16")
    with pytest.raises(ValueError, match=r"did you mean 'optimiser\.lr'"):
        load_recipe("birds-resnet50-modern", {"optimiser.lrr": 1})
    with pytest.raises(ValueError, match=r"no option 'epochs\.lr': 'epochs' has no options of its own"):
        load_recipe("birds-resnet50-modern", {"epochs.lr": 1})


def test_a_recipe_on_the_command_line_goes_in_front_so_that_options_win():
    path = recipe_path("birds-vgg16-paper")
    assert yaml.safe_load(Path(path).read_text())["recipe"] == "birds-vgg16-paper"
    assert expand(["--epochs", "3", "--recipe=birds-vgg16-paper"]) == ["--config", path, "--epochs", "3"]
    assert expand(["--epochs", "3"]) == ["--epochs", "3"]
    for words, said in (
        (["--recipe", "bird-vgg16-paper"], "unknown recipe 'bird-vgg16-paper': did you mean 'birds-vgg16-paper'"),
        (["--recipe"], "--recipe needs a name. Choose from: aircrafts-"),
        (["--recipe", "--epochs"], "--recipe needs a name"),
        (["--recipe", "birds-vgg16-paper", "--recipe", "cars-vgg16-paper"], "was given 2 times"),
    ):
        with pytest.raises(ValueError) as error:
            expand(words)
        assert said in str(error.value)


def test_a_file_of_options_starts_from_the_recipe_that_it_names(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: plumage-demo\nepochs: 3\n")
    recipe = recipe_path("plumage-demo")
    for words in (["--config", str(file)], [f"--config={file}"], ["--config", str(file), "--recipe", "plumage-demo"]):
        assert expand([*words, "--seed", "1"]) == ["--config", recipe, "--config", str(file), "--seed", "1"]
    config = cli.parse(["train", "--config", str(file), "--seed", "1"]).config
    assert config == load_recipe("plumage-demo", {"epochs": 3, "seed": 1})
    with pytest.raises(ValueError, match=r"2 times \(birds-vgg16-paper, plumage-demo\)"):
        expand(["--config", str(file), "--recipe", "birds-vgg16-paper"])
    file.write_text("recipe: plumage-dmo\n")
    with pytest.raises(ValueError, match="did you mean 'plumage-demo'"):
        expand(["--config", str(file)])
    for words in (["--config"], ["--config="], ["--config", "none.yaml"], ["--config", str(tmp_path)]):
        assert expand(words) == words  # the parser speaks of these
