"""Vectors of one length for all heads: the factor, its place in files, and runs that start with it."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

from eigengrain.errors import Interrupted
from eigengrain.heads import list_heads
from eigengrain.models import create_model, from_pretrained, save_pretrained
from eigengrain.training import calibrate_vectors, evaluate, train
from eigengrain.training.checkpoint import read_checkpoint
from eigengrain.training.config import Model, Optimiser
from eigengrain.training.vector_length import IMAGES, LENGTH
from training.small_run import SIZE, colours, small
from training.test_resume import assert_same_run, stop_at


def make(head="mpncov+seb", **options):
    torch.manual_seed(0)
    return create_model("test_resnet", head, num_classes=3, reduce=4, last_stride=1, **options)


def batches(count=5, size=16):
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(size, 3, 32, 32, generator=generator), torch.arange(size) % 3) for _ in range(count)]


def length(vectors):
    return vectors.double().square().sum(1).mean().sqrt().item()


@pytest.mark.parametrize("head", list_heads(any_backbone=True))
def test_vectors_get_one_length(head):
    model, data = make(head), batches()
    model.head.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    factor = calibrate_vectors(model, data)
    assert factor == float(model.vector_scale) != 1
    assert (model.head.training, model.training) == (False, True)
    after = model.state_dict()
    if isinstance(model.classifier, nn.Linear):  # initial scores do not grow
        torch.testing.assert_close(after["classifier.weight"], before.pop("classifier.weight") / max(1, factor))
    assert all(torch.equal(after[name], value) for name, value in before.items() if name != "vector_scale")

    used = data[: IMAGES // 16]  # the batches after them have no part in it
    model.train()
    vectors = [model.forward_head(model.forward_features(images), pre_logits=True) for images, _ in used]
    assert length(torch.cat(vectors)) == pytest.approx(LENGTH, rel=1e-4)
    assert calibrate_vectors(model, data[4:]) == factor  # a calibrated model stays as it is


def test_the_factor_multiplies_the_vector_everywhere():
    model, (images, labels) = make().eval(), batches()[0]
    plain = model.forward_head(model.forward_features(images), pre_logits=True)
    model.vector_scale.fill_(3)
    assert torch.equal(model.forward_head(model.forward_features(images), pre_logits=True), 3 * plain)
    torch.testing.assert_close(model(images), model.classifier(3 * plain))
    own, whole = evaluate(model, [(images, labels)], subsets=("own", "all"))
    assert own.loss == pytest.approx(cross_entropy(model.classifier(3 * plain), labels).item(), rel=1e-5)
    assert whole.loss == pytest.approx(own.loss, rel=1e-6)
    model.reset_classifier(3, global_pool="gap")
    assert model.vector_scale == 1  # a new head is not calibrated


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_vectors_without_a_length_are_left_alone(value):
    model = make("gap")
    with torch.no_grad():
        model.head.reduce[1].weight.fill_(0), model.head.reduce[1].bias.fill_(value)
    assert calibrate_vectors(model, batches(1)) == 1


def test_model_folders_with_and_without_a_factor(tmp_path):
    model = make()
    model.vector_scale.fill_(2.5)
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).vector_scale == 2.5
    state = load_file(tmp_path / "model.safetensors")
    del state["vector_scale"]  # as in a folder of an older version
    save_file(state, tmp_path / "model.safetensors")
    assert from_pretrained(tmp_path).vector_scale == 1
    model.load_state_dict(state)
    assert model.vector_scale == 1
    assert "vector_scale" not in state


def calibrated(out, **changes):
    config = small(out, ema=0.9, optimiser=Optimiser(lr=1e-3), **changes)
    return replace(config, model=replace(config.model, calibrate=True))


VIT = Model("test_vit", "svpn", head_options={"rows": 3, "heads": 2}, img_size=SIZE, class_token="beside")


@pytest.mark.parametrize(
    ("model", "names"), [(None, ["vector_scale"]), (VIT, ["vector_scale", "token_scale"])], ids=["map", "tokens"]
)
def test_a_calibrated_run_resumes_to_the_same_weights(tmp_path, model, names):
    changes = {} if model is None else {"model": model}
    train(calibrated(tmp_path / "whole", **changes), colours())
    with pytest.raises(Interrupted):
        train(calibrated(tmp_path / "parts", workers=2, **changes), colours(), stop_at(0, 2))
    stopped = read_checkpoint(tmp_path / "parts/last.pt")
    train(calibrated(tmp_path / "parts", resume=True, **changes), colours())
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    last, saved = read_checkpoint(tmp_path / "parts/last.pt"), from_pretrained(tmp_path / "parts/model")
    for name in names:
        factor = stopped["model"][name]
        assert factor != 1
        assert factor == stopped["ema"][name] == last["model"][name] == last["ema"][name] == saved.get_buffer(name)


def test_the_same_batches_are_trained_on_after_calibration(tmp_path):
    """Measuring the length leaves no trace in the order of the images, their augmentation or the random numbers."""
    states = []
    for calibrate in (False, True):
        model = Model("test_resnet", "gap", last_stride=1, drop_rate=0.2, calibrate=calibrate)
        out = tmp_path / str(calibrate)
        train(small(out, model=model, optimiser=Optimiser(lr=1e-12), epochs=1), colours())
        states.append(read_checkpoint(out / "last.pt"))
    without, with_factor = states
    name = "backbone.bn1.running_mean"
    assert torch.equal(without["model"][name], with_factor["model"][name])
    assert str(without["generators"]) == str(with_factor["generators"])
