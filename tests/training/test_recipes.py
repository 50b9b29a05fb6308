"""Recipes: each can be read, names its command in its header, and has the settings of the paper."""

import math
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest
import torch
from PIL import Image

from eigengrain.cli import train as command
from eigengrain.cli.main import parse
from eigengrain.data.datasets.registry import list_datasets
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.models import create_model
from eigengrain.recipes import list_recipes, load_recipe, recipe_path
from eigengrain.training import train

FINE = ("birds", "aircrafts", "cars")
MODERN = ("birds", "cars", "dogs")
PHOTOS = ("photos", "photos-small", "photos-scratch")


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
        ("photos-small", 128, 8),
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
    expected |= {f"{data}-resnet50-scripts" for data in FINE}
    expected |= {f"{data}-resnet50-modern" for data in MODERN}
    expected |= {f"{data}-efficientnet_b5-paper" for data in ("dogs", "inats")}
    expected |= {f"imagenet-{b}-{flavour}" for b in ("alexnet", "resnet50") for flavour in ("paper", "scripts")}
    assert set(list_recipes()) == expected | {"plumage-demo", "birds-vit_base-transfg", *PHOTOS}


def test_the_steps_of_transfg():
    config = load_recipe("birds-vit_base-transfg")
    steps = 5994 // config.batch_size
    assert 10_000 <= config.epochs * steps < 10_000 + steps
    assert math.ceil(config.schedule.warmup_epochs * steps) in (500, 501)
    with torch.device("meta"):
        options = config.model.backbone_options
        model = create_model(config.model.backbone, config.model.head, 200, img_size=config.model.img_size, **options)
        features = model.eval().forward_features(torch.empty(1, 3, 448, 448))
    assert model._transformer.grid(torch.empty(1, 3, 448, 448)) == (37, 37)
    assert features.shape == (1, 768, 1, 13)


def test_recipes_that_calibrate_and_that_skip_unreadable_images():
    assert {name for name in list_recipes() if load_recipe(name).data.skip_unreadable} == set(PHOTOS)
    assert {name for name in list_recipes() if load_recipe(name).model.calibrate} == {
        *("photos", "photos-small", "cars-resnet50-modern", "dogs-resnet50-modern")
    }


@pytest.mark.parametrize("data", ["cars", "dogs"])
def test_the_modern_settings_for_whole_images(data):
    config, birds = load_recipe(f"{data}-resnet50-modern"), load_recipe("birds-resnet50-modern")
    transforms = config.data.transforms
    assert (transforms.resized, transforms.img_size, transforms.warped) == (512, 448, True)
    assert (config.label_smoothing, config.optimiser.weight_decay) == (0.1, 5e-4)
    assert (config.optimiser.head_lr_scale, config.optimiser.classifier_lr_scale) == (1, 1)
    whole = replace(birds.data, name=data, transforms=replace(transforms))
    changed = replace(birds, recipe=config.recipe, data=whole, epochs=config.epochs)
    changed = replace(changed, model=replace(birds.model, calibrate=True))
    assert config == replace(changed, optimiser=replace(birds.optimiser, weight_decay=5e-4))


def test_the_modern_recipes_train_on_folders(tmp_path):
    for split in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (40, 30), (90 * number, 80, 40)).save(tmp_path / split / label / f"{number}.png")
    changes = {"data.name": "folder", "data.root": str(tmp_path), "out": str(tmp_path / "run"), "epochs": 1}
    changes |= {"model.backbone": "test_resnet", "model.pretrained": False, "model.reduce": 3, "batch_size": 2}
    changes |= {"data.transforms.img_size": 64, "data.transforms.resize": 72, "device": "cpu", "workers": 0}
    changes |= {"model.mid_level": 4, "snapmix": 5.0, "mix_probability": 0.5, "optimiser.sam": 0.05}
    result = train(load_recipe("cars-resnet50-modern", changes))
    assert result.epoch == 1
    assert math.isfinite(result.scores["test_loss"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with three images; no GPU, and the weights can be downloaded."""
    (tmp_path / "wren").mkdir()
    for number in range(3):
        (tmp_path / "wren" / f"{number}.jpg").touch()
    monkeypatch.setattr(command, "_weights_available", lambda backbone: True)
    monkeypatch.setattr("eigengrain.environment.pick_device", lambda name: torch.device("cpu"))
    return tmp_path


def chosen(folder, *words):
    request = parse(["train", str(folder), "--out", str(folder / "run"), *words])
    assert request.config.data.name == "folder"
    assert "\n" not in request.note
    return request


@pytest.mark.parametrize(
    ("device", "many", "recipe"),
    [("cpu", 500, "photos-small"), ("cpu", 3, "photos-small"), ("cuda", 4, "photos-small"), ("cuda", 3, "photos")],
)
def test_a_recipe_is_chosen_by_device_and_number_of_images(folder, monkeypatch, device, many, recipe):
    monkeypatch.setattr("eigengrain.environment.pick_device", lambda name: torch.device(device))
    monkeypatch.setattr(command, "MANY_IMAGES", many)
    request = chosen(folder, "--epochs", "3", "--optimiser.lr", "0.5")
    assert request.config == load_recipe(
        recipe, {"data.root": str(folder), "out": str(folder / "run"), "epochs": 3, "optimiser.lr": 0.5}
    )
    assert "3 images" in request.note
    crops = chosen(folder, "--data.transforms.scale", "0.3,1")  # fits the transforms of the recipe, not those by default
    assert crops.config.data.transforms.scale == (0.3, 1)


def test_a_table_is_counted_and_what_is_missing_is_not(folder):
    (folder / "list.csv").write_text("path,label\nwren/0.jpg,wren\n")
    assert "1 image," in chosen(folder / "list.csv").note
    assert chosen(folder / "missing").note == chosen(folder / "wren" / "0.jpg").note == ""


def test_named_recipes_and_files_are_not_replaced(folder):
    assert chosen(folder, "--recipe", "plumage-demo").config.model.backbone == "plumage_net"
    (folder / "mine.yaml").write_text("epochs: 7\n")
    request = chosen(folder, "--config", str(folder / "mine.yaml"))
    assert (request.config.recipe, request.config.epochs, request.note) == (None, 7, "")
    assert parse(["train", "--data.root", str(folder)]).config.recipe is None  # as without a folder


def test_without_weights_a_small_network_is_trained_from_scratch(folder, monkeypatch):
    monkeypatch.setattr(command, "_weights_available", lambda backbone: False)
    request = chosen(folder)
    assert request.config.recipe == "photos-scratch"
    assert not request.config.model.pretrained
    assert all(word in request.note for word in ("--recipe photos-small", "--model.weights FILE"))
    assert chosen(folder, "--model.weights", "net.pth").config.recipe == "photos-small"
    # a run that was started with the network keeps its recipe without it
    (folder / "run").mkdir()
    (folder / "run" / "args.yaml").write_text("recipe: photos-small\n")
    assert chosen(folder, "--resume").config.recipe == "photos-small"


def test_weights_are_available_in_the_cache_or_from_a_server(monkeypatch):
    name, answers = "tf_efficientnet_lite0.in1k", []

    def urlopen(url, timeout):
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return BytesIO()

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, file: None)
    for answer, expected in ((None, True), (URLError("no network"), False), (HTTPError("", 403, "", None, None), True)):
        answers.append(answer)
        assert command._weights_available(name) is expected
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    answers.append(None)
    assert not command._weights_available(name)
    files = {("timm/tf_efficientnet_lite0.in1k", "model.safetensors"): "/cache/model.safetensors"}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *key: files.get(key))
    assert command._weights_available(name)


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
