"""Sharpness-aware minimisation against an update written by hand in float64, and in a training."""

import copy
import csv
import math
import signal

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from eigengrain.errors import ArgumentError, Interrupted
from eigengrain.models import from_pretrained
from eigengrain.training import setup, train
from eigengrain.training.config import Model, Optimiser, Train
from eigengrain.training.sam import sharpen
from training.small_run import colours, small
from training.test_resume import assert_same_run, stop_at


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    net[0].bias.requires_grad_(False)
    return net


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 2])


@pytest.mark.parametrize("rho", [0.05, 2.0])
def test_gradients_are_those_at_the_moved_weights(rho):
    x, y = data()
    net, moved = network(), network()
    cross_entropy(net(x), y).backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in net.parameters() if p.grad is not None))
    for parameter, other in zip(net.parameters(), moved.parameters(), strict=True):
        if parameter.grad is not None:
            other.data += rho * parameter.grad / norm
    cross_entropy(moved(x), y).backward()
    after_one = copy.deepcopy(net.state_dict())
    sharpen(net, rho, lambda: cross_entropy(net(x), y).backward())
    for parameter, other in zip(net.parameters(), moved.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, other.grad)
    assert all(torch.equal(value, after_one[name]) for name, value in net.state_dict().items())  # also batch statistics
    assert net[1].num_batches_tracked == 1


def test_a_gradient_of_zero_moves_nothing():
    net = nn.Linear(2, 1, bias=False)
    net.weight.data.zero_()
    net.weight.square().sum().backward()
    sharpen(net, 0.5, lambda: net.weight.square().sum().backward())
    assert torch.equal(net.weight.grad, torch.zeros(1, 2))


def test_weights_are_restored_after_an_error():
    net = network()
    cross_entropy(net(data()[0]), data()[1]).backward()
    before = copy.deepcopy(net.state_dict())

    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        sharpen(net, 0.5, fail)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_two_steps_of_a_training(tmp_path):
    """SGD with momentum, decay and clipping, from gradients at moved weights, in float64."""
    rho, lr, momentum, decay, limit = 0.1, 0.02, 0.9, 1e-3, 0.5
    optimiser = Optimiser(lr=lr, momentum=momentum, weight_decay=decay, sam=rho)
    model = Model("test_resnet", "gap", last_stride=1)  # without dropout
    config = small(tmp_path, model=model, optimiser=optimiser, clip_grad=limit, epochs=1, batch_size=11)
    batches, models = [], []
    original = setup.Run.backward

    def spy(run, images, targets, *rest, **options):
        models.append(copy.deepcopy(run.model).double())
        batches.append((images.double(), targets))
        return original(run, images, targets, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.Run, "backward", spy)
        train(config, colours())
    assert len(batches) == 2

    net, buffers = models[0].train(), {}
    for x, y in batches:
        parameters = list(net.parameters())
        gradients = torch.autograd.grad(cross_entropy(net(x), y), parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        other = copy.deepcopy(net)
        for parameter, gradient in zip(other.parameters(), gradients, strict=True):
            parameter.data += rho * gradient / norm
        gradients = torch.autograd.grad(cross_entropy(other(x), y), list(other.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            step = gradient * min(1.0, limit / (norm + 1e-6)) + decay * parameter.data
            buffers[number] = momentum * buffers[number] + step if number in buffers else step
            parameter.data -= lr * buffers[number]
    trained = from_pretrained(tmp_path / "model").state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(trained[name].double(), value.double(), rtol=1e-3, atol=1e-5)


OPTIONS = {"optimiser": Optimiser(lr=0.02, sam=0.05), "clip_grad": 1.0, "ema": 0.9, "snapmix": 5.0}


@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_a_training_resumes_to_the_same_weights(tmp_path, amp):
    train(small(tmp_path / "whole", amp=amp, **OPTIONS), colours())
    with pytest.raises(Interrupted):
        train(small(tmp_path / "part", amp=amp, **OPTIONS), colours(), stop_at(1, 1, signal.SIGTERM))
    train(small(tmp_path / "part", amp=amp, resume=True, **OPTIONS), colours())
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    with (tmp_path / "whole" / "summary.csv").open() as file:
        assert all(math.isfinite(float(row["lambda_1"])) for row in csv.DictReader(file))


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"amp": "fp16"}, "amp"), ({"accumulate": 2}, "accumulate"), ({"cuda_graphs": True}, "cuda_graphs")],
)
def test_options_that_do_not_fit(options, argument):
    with pytest.raises(ArgumentError) as error:
        Train(optimiser=Optimiser(sam=0.05), **options)
    assert error.value.argument == argument
    with pytest.raises(ArgumentError) as error:
        Optimiser(sam=0.0)
    assert error.value.argument == "optimiser.sam"
