"""Opening a trained model: every kind of folder, its data set, and preprocessing that equals timm's."""

import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from timm.data import create_transform, resolve_data_config

import eigengrain as eg
from eigengrain.data import Transforms, build_transform
from eigengrain.errors import ArgumentError, CheckpointError, FileError, Interrupted, UnfinishedWarning, UnknownName
from eigengrain.models import create_model, from_pretrained, save_pretrained
from eigengrain.training import TrainedModel, evaluate, loop, open_weights, train
from eigengrain.training.checkpoint import read_checkpoint, write_checkpoint
from eigengrain.training.config import from_mapping
from eigengrain.training.sources import open_sources
from training.small_run import PLUMAGE, SIZE, colours, small

BIRDS = PLUMAGE["data"]["options"]
PIXELS = np.random.default_rng(0).integers(0, 256, (50, 71, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def plain_folder(plumage_run, tmp_path_factory):
    """A copy of the model folder, without the run around it."""
    return shutil.copytree(plumage_run / "model", tmp_path_factory.mktemp("plain") / "birds")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    Image.fromarray(PIXELS).save(folder / "a.png")
    return [folder / "a.png"]


@pytest.fixture
def model():
    return create_model("test_resnet", head="gap", num_classes=2)


def test_a_run_its_model_folder_and_a_copy_are_opened(plumage_run, plain_folder):
    expected = from_pretrained(plumage_run / "model").state_dict()
    for path in (plumage_run, plumage_run / "model", plumage_run / "model/model.safetensors", plain_folder):
        run = eg.open_run(str(path))
        assert str(run.path) == str(path)
        assert not run.model.training
        assert run.classes == run.model.class_names
        assert all(torch.equal(tensor, expected[name]) for name, tensor in run.model.state_dict().items())
        if path == plain_folder:
            assert (run.folder, run.config) == (plain_folder, None)
        elif path.name != "model.safetensors":
            assert run.folder == plumage_run
            assert run.config == from_mapping({**PLUMAGE, "out": str(plumage_run)})


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_data_set_of_a_training(plumage_run, split):
    run = eg.open_run(plumage_run)
    dataset = run.dataset(split)
    expected = getattr(open_sources(run.config.data, run.config.seed), split)
    assert [np.asarray(dataset.image(i)).sum() for i in range(len(dataset))] == [
        np.asarray(expected.image(i)).sum() for i in range(len(expected))
    ]
    image, label = dataset[0]
    cfg = run.model.pretrained_cfg
    torch.testing.assert_close(image, build_transform(Transforms("none"), False, cfg["mean"], cfg["std"])(dataset.image(0)))
    assert label == expected.labels[0]


def test_data_sets_that_do_not_fit_are_refused(plumage_run, plain_folder):
    run, plain = eg.open_run(plumage_run), eg.open_run(plain_folder)
    assert len(plain.dataset(name="plumage", options=BIRDS)) == 15
    renamed = TrainedModel(from_pretrained(plain_folder))
    renamed.model.class_names = ["a", "b", "c"]
    for trained, arguments, argument in (
        (plain, {}, "name"),
        (run, {"options": BIRDS}, "options"),
        (run, {"name": "plumage", "options": {**BIRDS, "classes": 5}}, "name"),
        (renamed, {"name": "plumage", "options": BIRDS}, "name"),
        (plain, {"split": "val", "name": "plumage", "options": BIRDS}, "split"),
    ):
        with pytest.raises(ArgumentError) as error:
            trained.dataset(**arguments)
        assert error.value.argument == argument
    with pytest.raises(UnknownName):
        run.dataset("tset")


def test_photographs_are_resized_even_if_the_training_images_were_not(plumage_run, photos):
    run = eg.open_run(plumage_run)
    images = run.images(photos)
    assert (len(images), images.classes) == (1, run.classes)
    theirs = create_transform(**resolve_data_config({}, pretrained_cfg=run.model.pretrained_cfg))
    torch.testing.assert_close(images[0][0], theirs(Image.fromarray(PIXELS)))
    assert run.with_transforms(img_size=48).images(photos)[0][0].shape == (3, 48, 48)
    with pytest.raises(ArgumentError) as error:  # the images of the data set keep their size
        run.with_transforms(img_size=48).dataset()
    assert error.value.argument == "img_size"
    assert run.with_transforms("paper", 48).dataset()[0][0].shape == (3, 48, 48)
    assert (run.image_size, run.with_transforms("paper", 48).image_size) == (SIZE, 48)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"kind": "timm", "crop_pct": 0.95, "img_size": 64}, {"crop_pct": 0.95}),
        ({"kind": "paper", "resize": 64, "img_size": 64}, {"resize": 32}),
        ({"kind": "scripts", "keep_aspect": False, "img_size": 64}, {"keep_aspect": False, "resize": None}),
    ],
)
def test_other_sizes_are_prepared_as_in_training(model, tmp_path, own, expected):
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({"data": {"transforms": own}}))
    run = TrainedModel(model, folder=tmp_path)
    assert run.transforms == Transforms(**own)
    assert run.with_transforms(img_size=32).transforms == Transforms(**{**own, "img_size": 32, **expected})
    assert run.with_transforms("imagenet", 32).transforms == Transforms("imagenet", 32)


@pytest.mark.parametrize("side", [32, 37, 448])
@pytest.mark.parametrize(
    "transforms",
    [
        {"kind": "paper"},
        {"kind": "paper", "resize": 500},
        {"kind": "scripts"},
        {"kind": "scripts", "keep_aspect": False},
        {"kind": "imagenet"},
        {"kind": "imagenet", "keep_aspect": False},
        {"kind": "timm", "crop_pct": 0.9},
    ],
    ids=lambda t: "-".join(map(str, t.values())),
)
def test_preprocessing_is_the_same_in_timm_and_back(model, transforms, side):
    config = Transforms(img_size=side, **transforms)
    model.pretrained_cfg |= config.to_pretrained_cfg()
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    image = Image.fromarray(PIXELS)
    expected = create_transform(**resolve_data_config({}, pretrained_cfg=model.pretrained_cfg))(image)
    torch.testing.assert_close(build_transform(config, False, mean, std)(image), expected)
    run = TrainedModel(model)
    assert run.transforms is not None
    torch.testing.assert_close(run.transform(image), expected)


def test_images_that_are_not_resized_have_their_own_size(model):
    model.pretrained_cfg |= Transforms("none").to_pretrained_cfg((71, 50))
    assert model.pretrained_cfg["input_size"] == (3, 50, 71)
    ours = build_transform(Transforms("none"), False, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    torch.testing.assert_close(TrainedModel(model).transform(Image.fromarray(PIXELS)), ours(Image.fromarray(PIXELS)))
    assert "input_size" not in Transforms("none").to_pretrained_cfg()


@pytest.mark.parametrize("change", [{"input_size": (3, 40, 64)}, {"crop_mode": "border"}])
def test_preprocessing_without_an_equivalent_is_left_to_timm(model, change):
    model.pretrained_cfg |= change
    run = TrainedModel(model)
    assert run.transforms is None
    theirs = create_transform(**resolve_data_config({}, pretrained_cfg=model.pretrained_cfg))
    torch.testing.assert_close(run.transform(Image.fromarray(PIXELS)), theirs(Image.fromarray(PIXELS)))
    assert run.with_transforms(img_size=48).transform(Image.fromarray(PIXELS)).shape == (3, 48, 48)


@pytest.mark.parametrize("change", [{"mean": (0.5,)}, {"interpolation": "much"}, {"input_size": (1, 32, 32)}])
def test_invalid_preprocessing_is_refused_when_it_is_used(model, tmp_path, change):
    model.pretrained_cfg |= change
    save_pretrained(model, tmp_path)
    run = eg.open_run(tmp_path)
    with pytest.raises(ValueError):
        run.transform  # noqa: B018


def test_folders_without_a_finished_model_are_refused(plumage_run, tmp_path):
    shutil.copytree(plumage_run, tmp_path / "unfinished", ignore=shutil.ignore_patterns("model", "*.pt"))
    damaged = shutil.copytree(plumage_run, tmp_path / "damaged", ignore=shutil.ignore_patterns("model", "best.pt"))
    write_checkpoint(damaged / "last.pt", {"config": {"select": "last"}})
    with pytest.raises(CheckpointError) as error:
        eg.open_run(damaged)
    assert error.value.path == damaged / "last.pt"
    shutil.rmtree(damaged)
    for path, part in (
        (tmp_path / "unfinishd", str(tmp_path / "unfinished")),  # a similar name
        (tmp_path, str(tmp_path / "unfinished")),  # a run inside
        (tmp_path / "unfinished", "--resume"),
        (tmp_path / "unfinished/summary.csv", "folder"),
    ):
        with pytest.raises(FileError) as error:
            eg.open_run(path)
        assert error.value.path == path
        assert part in error.value.problem


@pytest.mark.parametrize(
    ("changes", "stop", "file", "epoch", "batch"),
    [
        ({}, (1, 2), "last.pt", 1, 3),  # in the middle of the second epoch
        ({"select": "best-test"}, (1, 2), "best.pt", 1, 0),
        ({"select": "best-test", "ema": 0.5}, (2, 0), "best.pt", 1, 0),
        ({"ema": 0.5}, (0, 1), "last.pt", 0, 2),
    ],
)
def test_the_model_of_a_stopped_training(tmp_path, monkeypatch, changes, stop, file, epoch, batch):
    def stopping(e, b, loss):
        if (e, b) == stop:
            signal.raise_signal(signal.SIGTERM)

    answers = iter((2.0, 1.0, 1.0))  # the first epoch is the best
    monkeypatch.setattr(loop, "evaluate", lambda *a, **o: [replace(evaluate(*a, **o)[0], top1=next(answers))])
    with pytest.raises(Interrupted):
        train(small(tmp_path, epochs=3, **changes), colours(), stopping)
    with pytest.warns(UnfinishedWarning) as warned:
        run = eg.open_run(tmp_path)
    warning = warned[0].message
    assert (warning.checkpoint, warning.epoch, warning.batch, warning.epochs) == (tmp_path / file, epoch, batch, 3)
    state = read_checkpoint(tmp_path / file)
    weights = run.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state["ema" if "ema" in changes else "model"].items())
    assert not run.model.training
    assert (run.classes, run.config.epochs, run.image_size) == (["red", "green", "blue"], 3, SIZE)
    assert run.model.pretrained_cfg["input_size"] == (3, SIZE, SIZE)

    train(small(tmp_path, epochs=3, resume=True, **changes), colours())
    finished = eg.open_run(tmp_path).model.state_dict()
    assert all(torch.equal(t, finished[n]) for n, t in from_pretrained(tmp_path / "model").state_dict().items())


def test_the_model_of_another_version_can_be_used_without_its_options(plumage_run, photos, tmp_path):
    newer = shutil.copytree(plumage_run, tmp_path / "newer")
    with (newer / "args.yaml").open("a") as file:
        file.write("shine: 3\n")
    run = eg.open_run(newer)
    assert run.images(photos)[0][0].shape == (3, SIZE, SIZE)
    with pytest.raises(FileError) as error:
        run.dataset()
    assert error.value.path == newer / "args.yaml"


def test_a_weights_file_fills_a_model(plumage_run, tmp_path):
    trained = from_pretrained(plumage_run / "model")
    file = tmp_path / "weights.pth"
    torch.save(trained.state_dict(), file)
    names = {"backbone": "test_resnet", "head": "mpncov+seb", "num_classes": 3}
    model = open_weights(file, **names, reduce=3, last_stride=1, img_size=SIZE)
    assert not model.training
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in model.state_dict().items())
    for name in names:
        with pytest.raises(ArgumentError) as missing:
            open_weights(file, **{**names, name: None})
        assert missing.value.argument == name
    for path, changes in ((file, {"reduce": 4}), (tmp_path / "weight.pth", {"reduce": 3})):
        with pytest.raises(FileError) as error:
            open_weights(path, **names, **changes)
        assert error.value.path == path


def test_models_that_are_built_for_one_size(tmp_path):
    torch.save(create_model("test_vit", head="gap", num_classes=2, img_size=96).state_dict(), tmp_path / "vit.pth")
    trained = TrainedModel(open_weights(tmp_path / "vit.pth", "test_vit", "gap", 2, img_size=96))
    with pytest.raises(ArgumentError) as error:
        trained.with_transforms(img_size=64)
    assert error.value.argument == "img_size"
    assert trained.with_transforms(img_size=96).image_size == 96
