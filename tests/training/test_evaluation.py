"""Accuracy against an independent calculation, for subsets, flips and batches of any size."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from eigengrain.errors import ArgumentError, NonFiniteError
from eigengrain.functional import EigenSubset
from eigengrain.heads import Head
from eigengrain.models import create_model
from eigengrain.training.distributed import Process
from eigengrain.training.evaluation import MixedPrecision, evaluate
from eigengrain.training.telemetry import spectrum_row

CLASSES = 7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = create_model("test_resnet", head="mpncov+seb", num_classes=CLASSES, reduce=6, last_stride=1)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 96, 96))
        model.classifier.weight.mul_(30)
    return model.train()


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(1)
    return torch.randn(11, 3, 96, 96), torch.randint(0, CLASSES, (11,))


def batches(images, size):
    return list(zip(*(x.split(size) for x in images), strict=True))


def by_hand(model, images, labels, subset="all", flip=False):
    """One image after the other: (top-1 hit, top-5 hit, loss), with the head computed in NumPy."""
    model.eval()
    answers = []
    for image, label in zip(images, labels.tolist(), strict=True):
        probability = np.zeros(CLASSES)
        views = [image, torch.flip(image, [2])] if flip else [image]
        for view in views:
            with torch.no_grad():
                x = model.head.reduce(model.forward_features(view[None]))[0].double().flatten(1).numpy()
            centred = x - x.mean(1, keepdims=True)
            values, vectors = np.linalg.eigh(centred @ centred.T / x.shape[1])
            values, vectors = values[::-1].clip(0), vectors[:, ::-1]
            keep = EigenSubset.parse(subset).mask(6).numpy()
            s = math.sqrt((values * np.exp(-2 * values)).sum())
            matrix = (1 + s) * (vectors * (np.sqrt(values) * keep)) @ vectors.T
            vector = matrix[np.triu_indices(6)]
            weight, bias = (p.detach().double().numpy() for p in (model.classifier.weight, model.classifier.bias))
            scores = weight @ vector + bias
            exponential = np.exp(scores - scores.max())
            probability += exponential / exponential.sum() / len(views)
        order = np.argsort(-probability)
        answers.append((order[0] == label, label in order[:5], -math.log(probability[label])))
    model.train()
    return np.array(answers, dtype=float)


@pytest.mark.parametrize("flip", [False, True])
def test_subsets_and_flips_against_an_independent_calculation(model, images, flip):
    subsets = ("all", "top:2", "top:1+last:2")
    scores = evaluate(model, batches(images, 4), subsets=subsets, flip=flip)
    assert [score.subset for score in scores] == list(subsets)
    assert len({score.loss for score in scores}) == 3
    for score in scores:
        expected = by_hand(model, *images, score.subset, flip)
        assert score.samples == 11
        assert score.top1 == pytest.approx(100 * expected[:, 0].mean())
        assert score.top5 == pytest.approx(100 * expected[:, 1].mean())
        assert score.loss == pytest.approx(expected[:, 2].mean(), rel=2e-4)
        for label in range(CLASSES):
            of_class = images[1].numpy() == label
            assert (score.correct[label], score.count[label]) == (expected[of_class, 0].sum(), of_class.sum())


def test_the_mean_over_both_views_is_exact(images):
    model = create_model("test_resnet", head="gap", num_classes=CLASSES).eval()
    with torch.no_grad():
        both = [model(view).double().softmax(-1).numpy() for view in (images[0], images[0].flip(-1))]
    expected = -np.log(np.mean(both, 0)[range(11), images[1].numpy()]).mean()
    [score] = evaluate(model, [images], flip=True)
    assert score.loss == pytest.approx(expected, rel=1e-13)


class OnMps(torch.Tensor):
    """A tensor that claims to be on MPS and refuses float64 as that device does; it is computed on the CPU."""

    @property
    def device(self):
        return torch.device("mps")

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is torch.Tensor.device.__get__:
            return torch.device("mps")
        here = tree_map_only(torch.Tensor, lambda t: t.as_subclass(torch.Tensor), (arguments, options or {}))
        if function is torch.Tensor.cpu or (function is torch.Tensor.to and torch.device("cpu") in here[0]):
            return here[0][0]
        return tree_map_only(torch.Tensor, on_mps, function(*here[0], **here[1]))


def on_mps(tensor):
    if tensor.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
    return tensor.as_subclass(OnMps)


class MpsHere(TorchFunctionMode):
    """Lets the CPU act as the MPS device."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        if function is torch.Tensor.to and torch.device("mps") in arguments:
            return on_mps(function(*("cpu" if a == torch.device("mps") else a for a in arguments), **options))
        if options.get("device") == torch.device("mps"):
            return on_mps(function(*arguments, **{**options, "device": "cpu"}))
        return function(*arguments, **options)


def test_a_device_without_float64(model, images):
    [expected] = evaluate(model, [images], flip=True)
    with MpsHere():
        [score] = evaluate(model, [images], Process(torch.device("mps")), flip=True)
        with pytest.raises(TypeError):
            torch.zeros(1, device=torch.device("mps")).double()
        spectrum = spectrum_row(torch.rand(3, 4).to(torch.device("mps")), torch.rand(3).to(torch.device("mps")))
    assert (score.correct, score.count, score.loss) == (expected.correct, expected.count, pytest.approx(expected.loss))
    assert 0 < spectrum["s"] < 1


def test_the_backbone_runs_once_for_all_subsets(model, images, monkeypatch):
    calls = []
    original = model.backbone.forward_features
    monkeypatch.setattr(model.backbone, "forward_features", lambda x: calls.append(len(x)) or original(x))
    evaluate(model, batches(images, 11), subsets=("all", "top:3", "last:2"))
    assert calls == [11]


def test_frozen_layers_of_a_model_in_training_mode_stay_frozen(model, images):
    model = copy.deepcopy(model)
    model.backbone.bn1.eval()
    before = [module.training for module in model.modules()]
    evaluate(model, batches(images, 11))
    assert [module.training for module in model.modules()] == before


def test_scores_that_are_not_finite_are_refused(model, images):
    diverged = copy.deepcopy(model)
    diverged.classifier.weight.data[0] = math.nan
    with pytest.raises(NonFiniteError):
        evaluate(diverged, batches(images, 4))


def test_the_batch_size_does_not_matter_and_the_model_is_unchanged(model, images):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one, many = (evaluate(model, batches(images, size), subsets=("top:2",))[0] for size in (11, 2))
    assert one.correct == many.correct
    assert one.loss == pytest.approx(many.loss, rel=1e-5)
    assert model.training
    assert str(model.head.subset) == "all"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_subsets_that_do_not_exist_and_empty_splits_are_refused(model, images):
    gap = create_model("test_resnet", head="gap", num_classes=CLASSES)
    with pytest.raises(ArgumentError) as error:
        evaluate(gap, batches(images, 4), subsets=("top:1",))
    assert (error.value.argument, error.value.value) == ("subset", "top:1")
    with pytest.raises(ValueError):
        evaluate(model, batches(images, 4), subsets=("top:9",))
    with pytest.raises(ValueError):
        evaluate(model, [])
    assert evaluate(gap, batches(images, 4))[0].samples == 11


class Probe(Head):
    """A head that records the precision of its input."""

    def pool(self, x):
        self.seen = x.dtype, torch.is_autocast_enabled("cpu")
        return x.mean((2, 3))


@pytest.mark.parametrize(("amp", "inside"), [("none", torch.float32), ("bf16", torch.bfloat16)])
def test_half_precision_ends_with_the_backbone(images, amp, inside):
    model = create_model("test_resnet", head="gap", num_classes=CLASSES).eval()
    seen = []
    model.backbone.layer4.register_forward_hook(lambda module, x, y: seen.append(y.dtype))
    model.head = Probe(model.num_features)
    scores = MixedPrecision(model, amp)(images[0])
    assert seen == [inside]
    assert model.head.seen == (torch.float32, False)
    assert scores.dtype == torch.float32
