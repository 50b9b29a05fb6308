"""A frozen backbone: with features that are kept the numbers are those without, and the backbone does not change."""

import csv
import json
import signal
from dataclasses import replace

import pytest
import torch

from eigengrain import output
from eigengrain.data import Transforms
from eigengrain.errors import ArgumentError, Interrupted, UnknownName
from eigengrain.models import create_model, from_pretrained, save_pretrained
from eigengrain.models.param_groups import parameter_groups
from eigengrain.training import evaluate, features, open_run, setup, train
from eigengrain.training.checkpoint import read_checkpoint
from eigengrain.training.config import Data, Model, Optimiser, from_mapping
from eigengrain.training.distributed import Process
from eigengrain.training.features import FeatureBatches, TrainingFeatures
from eigengrain.training.setup import build
from eigengrain.yaml_files import read_mapping
from training.small_run import SIZE, colours, small
from training.test_resume import assert_same_run, stop_at

VIT = Model("test_vit", head="mpncov", reduce=3, drop_rate=0.2, img_size=SIZE)
#: with dropout and batch statistics in the backbone, which must have no effect
DROPPED = {"drop_path_rate": 0.5}
CNN = Model("test_efficientnet", "mpncov+seb", reduce=3, last_stride=1, drop_rate=0.2, backbone_options=DROPPED)


def frozen(out, **changes):
    return small(out, **{"freeze": "backbone", "model": CNN, **changes})


def steps(config, sources=None):
    """Losses of all steps of a run."""
    losses = []
    train(config, sources or colours(val=5), lambda epoch, batch, loss: losses.append(loss))
    return losses


def rows(folder):
    return list(csv.DictReader((folder / "summary.csv").open()))


CHANGES = {
    "plain": {},
    "vit": {"model": VIT},
    "bf16": {"amp": "bf16"},
    "accumulated": {"accumulate": 2, "clip_grad": 1.0},
    "calibrated": {"model": replace(CNN, calibrate=True)},
    "averaged": {"ema": 0.9, "select": "best-test"},
    "channels last": {"channels_last": True},
    "balanced": {"data": Data("colours", balance="sampler", transforms=Transforms("none", img_size=SIZE))},
    "no flips": {"data": Data("colours", transforms=Transforms("none", img_size=SIZE, flip=False))},
    "cropped": {"data": Data("colours", transforms=Transforms("paper", img_size=SIZE))},
    "stages": {"model": Model("test_resnet", head="gap", stages=2)},
    "mid level": {"model": Model("test_resnet", head="gap", mid_level=4, calibrate=True)},
    "decoded on the device": {"cache": "device"},
    "weights": {"data": Data("colours", balance="weights", transforms=Transforms("none", img_size=SIZE))},
    "adamw": {"optimiser": Optimiser("adamw", lr=1e-3, weight_decay=0.1)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_kept_features_give_the_numbers_of_the_images(tmp_path, name):
    changes = CHANGES[name]
    losses = {kept: steps(frozen(tmp_path / str(kept), cache_features=kept, **changes)) for kept in (True, False)}
    assert len(losses[True]) == 10
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) <= 1e-6
    models = {kept: from_pretrained(tmp_path / str(kept) / "model") for kept in losses}
    initial = from_pretrained(initial_model(tmp_path, **changes))
    for parameter, value in models[False].state_dict().items():
        assert (models[True].state_dict()[parameter] - value).abs().max() <= 1e-5, parameter
    for kept, model in models.items():  # bit for bit, also batch statistics
        for parameter, value in model.backbone.state_dict().items():
            assert torch.equal(value, initial.backbone.state_dict()[parameter]), (kept, parameter)
        assert not torch.equal(model.classifier.weight, initial.classifier.weight)
    for one, other in zip(*(rows(tmp_path / str(kept)) for kept in losses), strict=True):
        for column in ("train_top1", "val_top1", "test_top1"):
            assert one[column] == other[column], column
        for column in ("train_loss", "val_loss", "test_loss", "gradient_norm"):
            assert float(one[column]) == pytest.approx(float(other[column]), abs=1e-5), column
    assert models[True].calibration["temperature"] == pytest.approx(models[False].calibration["temperature"], abs=1e-4)
    assert models[True].pretrained_cfg == models[False].pretrained_cfg
    images = torch.randn(4, 3, SIZE, SIZE)
    assert torch.equal(*(model(images).argmax(1) for model in models.values()))


def initial_model(folder, **changes):
    """A folder with the model of a run before its first step."""
    torch.manual_seed(0)
    process = Process(torch.device("cpu"))
    save_pretrained(build(frozen(folder / "initial", **changes), colours(val=5), process).model, folder / "start")
    return folder / "start"


def test_images_are_read_once(tmp_path, monkeypatch):
    read = []
    sources = colours(val=5)
    for split in sources[:3]:
        image = split.image
        monkeypatch.setattr(split, "image", lambda index, own=image, name=split.split: read.append(name) or own(index))
    monkeypatch.setattr("eigengrain.training.loop.calibrate", lambda run: None)
    config = frozen(tmp_path, epochs=5, check_images=False)
    passes = 0
    forward = type(create_model("test_efficientnet", head="gap")).forward_features

    def counted(model, x):
        nonlocal passes
        passes += 1
        return forward(model, x)

    monkeypatch.setattr("eigengrain.models.CovarianceNet.forward_features", counted)
    losses = steps(config, sources)
    assert len(losses) == 25
    # 6 batches of training images and of their mirror images, 3 of test and 2 of validation images, and one for the size
    assert passes == 2 * 6 + 3 + 2 + 1


@pytest.mark.parametrize("first", [(0, 2), (0, 4), (1, 1)])
def test_a_resumed_run_gives_the_same_bits(tmp_path, first):
    options = {"ema": 0.9, "save_every": 2, "select": "best-test", "model": replace(CNN, calibrate=True)}
    train(frozen(tmp_path / "whole", **options), colours())
    with pytest.raises(Interrupted):
        train(frozen(tmp_path / "part", **options), colours(), stop_at(*first))
    train(frozen(tmp_path / "part", resume=True, **options), colours())
    assert_same_run(tmp_path / "whole", tmp_path / "part")


@pytest.mark.parametrize("changes", [{}, CHANGES["calibrated"]], ids=["plain", "calibrated"])
def test_a_signal_while_features_are_computed(tmp_path, monkeypatch, changes):
    compute = setup.MixedPrecision.raw_features

    def stopping(net, images):
        if net.model.training:
            signal.raise_signal(signal.SIGTERM)
        return compute(net, images)

    monkeypatch.setattr(setup.MixedPrecision, "raw_features", stopping)
    with pytest.raises(Interrupted) as stop:
        train(frozen(tmp_path, **changes), colours())
    assert stop.value.exit_code == 143
    monkeypatch.undo()
    assert not (tmp_path / "last.pt").exists()
    again = from_mapping(read_mapping(tmp_path / "args.yaml"))
    train(replace(again, resume=True), colours())
    train(frozen(tmp_path / "other", **changes), colours())
    assert_same_run(tmp_path, tmp_path / "other")


@pytest.mark.parametrize(
    "changes",
    [
        {"data": Data("colours", transforms=Transforms("imagenet", img_size=SIZE))},
        {"data": Data("colours", transforms=Transforms("timm", img_size=SIZE))},
        {"mixup": 0.2},
        {"cutmix": 1.0},
    ],
)
def test_random_images_are_not_kept(tmp_path, monkeypatch, changes):
    notes = []
    monkeypatch.setattr(output, "note", notes.append)
    run = build(frozen(tmp_path, **changes), colours(), Process(torch.device("cpu")))
    assert not run.from_features
    assert not any(isinstance(loader, FeatureBatches) for loader in run.loaders if loader is not None)
    assert len(notes) == 1
    assert "\n" not in notes[0]
    train(frozen(tmp_path, epochs=1, **changes), colours())
    start = from_pretrained(initial_model(tmp_path, **changes)).backbone.state_dict()
    trained = from_pretrained(tmp_path / "model").backbone.state_dict()
    assert all(torch.equal(value, start[name]) for name, value in trained.items())


def test_features_that_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "free_memory", lambda: 1000)
    with pytest.raises(ArgumentError) as error:
        train(frozen(tmp_path), colours())
    assert error.value.argument == "cache_features"
    assert "\n" not in str(error.value)
    assert not tmp_path.exists() or not (tmp_path / "last.pt").exists()
    train(frozen(tmp_path, cache_features=False, epochs=1), colours())


def test_where_features_are_kept(monkeypatch):
    monkeypatch.setattr(features, "free_memory", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 500))
    gpu, cpu = Process(torch.device("cuda", 0)), Process(torch.device("cpu"))
    assert features.choose_store(200, 7, gpu) == gpu.device  # half of the free memory of a device
    assert features.choose_store(201, 7, gpu) == cpu.device
    assert features.choose_store(800, 7, cpu) == cpu.device
    for process in (gpu, cpu):
        with pytest.raises(ArgumentError):
            features.choose_store(801, 7, process)


def test_a_dry_run_computes_some_features_only(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TrainingFeatures, "fill", lambda self: pytest.fail("all features were computed"))
    printed = []
    monkeypatch.setattr(output, "result", lambda document, lines: printed.append(document))
    assert train(frozen(tmp_path, dry_run=True, model=VIT), colours(val=5)) is None
    [document] = printed
    assert document["estimate"]["seconds"] > 0
    assert torch.is_grad_enabled()
    assert "features" in document["plan"]
    assert not (tmp_path / "last.pt").exists()


def test_the_options(tmp_path):
    assert from_mapping({"freeze": "backbone"}).cache_features
    with pytest.raises(UnknownName):
        from_mapping({"freeze": "head"})
    with pytest.raises(ArgumentError) as error:
        from_mapping({"freeze": "backbone", "cuda_graphs": True})
    assert error.value.argument == "cuda_graphs"
    train(frozen(tmp_path, epochs=1), colours())
    with pytest.raises(ArgumentError) as error:  # a resumed run stays frozen
        train(frozen(tmp_path, epochs=1, freeze=None, resume=True), colours())
    assert error.value.argument == "out"


def test_the_folder_of_a_run_is_that_of_every_run(tmp_path):
    result = train(frozen(tmp_path, model=VIT), colours())
    run = open_run(tmp_path)
    assert not run.model.backbone_frozen
    assert run.config.freeze == "backbone"
    batches = [
        (torch.stack([run.transform(test.image(i)) for i in range(10)]), torch.tensor(test.labels))
        for test in [colours().test]
    ]
    [score] = evaluate(run.model, batches, **run.precision)
    assert score.top1 == result.scores["test_top1"]
    assert score.loss == pytest.approx(result.scores["test_loss"], abs=1e-6)
    assert json.loads((tmp_path / "results.json").read_text())["epoch"] == 2
    state = read_checkpoint(tmp_path / "last.pt")
    assert any(name.startswith("backbone.") for name in state["model"])
    assert [row["lr_backbone"] for row in rows(tmp_path)] == ["", ""]


def test_a_frozen_backbone_has_no_group_and_stays_in_eval_mode():
    model = create_model("test_efficientnet", head="mpncov", reduce=3, num_classes=2)
    assert [group["name"] for group in parameter_groups(model, lr=1.0)] == ["backbone", "head", "classifier"]
    model.freeze_backbone()
    assert [group["name"] for group in parameter_groups(model, lr=1.0)] == ["head", "classifier"]
    model.train()
    assert model.training
    assert model.head.training
    assert not any(module.training for module in model.backbone.modules())
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_process_keeps_a_share(world_size, tmp_path):
    """The sum of what the processes give to a batch, which the test adds instead of them, is the batch of one process."""
    config = frozen(tmp_path, model=VIT)
    run = build(config, colours(), Process(torch.device("cpu")))
    alone = run.loaders.train
    shares = []
    for rank in range(world_size):
        process = Process(torch.device("cpu"), rank, world_size)
        images = setup.make_loaders(colours(), run.model, config, process).train
        shares.append(TrainingFeatures(images, alone.compute, torch.device("cpu"), process))
        shares[-1].fill()
    assert [len(share._features) for share in shares] == [len(range(rank, 22, world_size)) for rank in range(world_size)]
    for epoch in (0, 3):
        for loader in (alone, *shares):
            loader.set_epoch(epoch, start_batch=1)
        orders = [list(share.sampler) for share in shares]
        for number, (maps, labels) in enumerate(alone):
            indices = [index for order in orders for index in order[number]]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Process, "sum", lambda self, values: values)
                whole = sum(share._gather(indices, epoch) for share in shares)
            torch.testing.assert_close(whole, maps, atol=1e-6, rtol=0)
            assert labels.tolist() == [alone.dataset.labels[index] for index in indices]


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_second_run_starts_from_everything_of_the_first(tmp_path, calibrate):
    """B-CNN in two stages: head and classifier on a frozen backbone, then all of it."""
    model, optimiser = replace(CNN, calibrate=calibrate), Optimiser(lr=1e-3)
    first, second = tmp_path / "first", tmp_path / "second"
    train(frozen(first, model=model, optimiser=optimiser), colours())
    trained = open_run(first).model

    config = small(second, model=replace(model, weights=str(first)), optimiser=optimiser)
    start = build(config, colours(), Process(torch.device("cpu")))
    start.calibrate()
    state = start.model.state_dict()
    assert (float(state["vector_scale"]) != 1) is calibrate
    assert state.keys() == trained.state_dict().keys()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(state[name], tensor), name

    train(config, colours())
    both = [dict(net.named_parameters()) for net in (trained, open_run(second).model)]
    for part in ("backbone.", "head.", "classifier."):
        assert any(not torch.equal(value, both[1][name]) for name, value in both[0].items() if name.startswith(part))
