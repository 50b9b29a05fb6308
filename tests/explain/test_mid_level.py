"""Explanations of a model with a mid-level branch are those of its scores, to which the branch adds."""

import warnings

import pytest
import torch
from captum.attr import Deconvolution, GuidedBackprop
from PIL import Image
from torch.nn.functional import interpolate

from eigengrain.data import ImageSet
from eigengrain.explain import attribute_rules
from eigengrain.explain.sanity import stages_of
from eigengrain.explain.smooth import smooth_maps
from eigengrain.explorer.session import Session
from eigengrain.models import create_model
from eigengrain.training.run_folder import TrainedModel

SIZE = 64


def make(head="mpncov+seb", **options):
    torch.manual_seed(0)
    options = {"reduce": 3, "mid_level": 5, **options}
    model = create_model("resnet10t", head, num_classes=4, **options).double().eval()
    model.mid_level.classifier.weight.data *= 10  # so that the branch has a part in the maps
    return model


def images(batch=2):
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("head", ["mpncov+seb", "isqrt", "gap", "hcov+seb"])
def test_saliency_is_the_gradient_of_the_whole_model(head):
    model, x = make(head), images().requires_grad_()
    expected = torch.autograd.grad(model(x)[:, 2].sum(), x)[0]
    result = attribute_rules(model, x.detach(), ["all"], ["vanilla"], 2)["vanilla"].maps["all"]
    torch.testing.assert_close(result, expected)
    model.mid_level.classifier.weight.data.zero_()
    without = attribute_rules(model, x.detach(), ["all"], ["vanilla"], 2)["vanilla"].maps["all"]
    assert (without - expected).norm() > 0.1 * expected.norm()


def test_maps_of_subsets_have_the_gradient_of_the_branch():
    """A whole and its two parts, for which maps without a branch would add up."""
    model = make()
    maps = attribute_rules(model, images(), ["all", "top:2", "last:1"], ["vanilla"], 2)["vanilla"].maps
    for subset, result in maps.items():
        x = images().requires_grad_()
        with model.head.keeping(subset):
            torch.testing.assert_close(result, torch.autograd.grad(model(x)[:, 2].sum(), x)[0])


@pytest.mark.parametrize("head", ["mpncov+seb", "gap"])
@pytest.mark.parametrize(("rule", "peer"), [("deconv", Deconvolution), ("guided", GuidedBackprop)])
def test_rules_hold_at_the_relu_of_the_branch(rule, peer, head):
    model, x = make(head), images()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = peer(model).attribute(x, target=1)
    result = attribute_rules(model, x, ["all"], [rule], 1)[rule].maps["all"]
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


def test_smooth_maps_are_those_of_the_head():
    """The branch does not depend on the map that the head pools."""
    model, x = make(), images()
    reduced = model.head.reduce(model.split_features(model.forward_features(x))[0]).detach().requires_grad_()
    scores = model.forward_vector(model.head.pool(reduced))
    (gradient,) = torch.autograd.grad(scores[:, 1].sum(), reduced)
    expected = (gradient * reduced.detach()).sum(1, keepdim=True).clamp_min(0)
    expected = interpolate(expected, (SIZE, SIZE), mode="bilinear")[:, 0]
    torch.testing.assert_close(smooth_maps(model, x, 1), expected)


def test_the_branch_is_randomised_with_classifier_and_head():
    model = make()
    stages = {stage.name: stage.weights for stage in stages_of(model)}
    assert {"mid_level.classifier.weight", "mid_level.classifier.bias"} < set(stages["classifier"])
    assert {"mid_level.reduce.0.weight", "head.reduce.0.weight"} < set(stages["head"])
    assert sorted(name for names in stages.values() for name in names) == sorted(
        name for name, _ in model.named_parameters()
    )


def test_explorer_scores_are_those_of_the_whole_model(tmp_path):
    model = make().float()
    for number in range(2):
        Image.new("RGB", (SIZE, SIZE), (90 * number, 40, 200)).save(tmp_path / f"{number}.png")
    files = [tmp_path / f"{number}.png" for number in range(2)]
    examples = ImageSet("two", "test", ["a", "b", "c", "d"], [0, 1], files, TrainedModel(model).transform)
    session = Session("two", model, examples)
    analysis = session.analyse("example-1")
    assert analysis.bytes > analysis.inputs.nbytes + analysis.reduced.nbytes + analysis.beside.nbytes
    for prediction in session.predict(analysis, 2):
        with torch.no_grad(), model.head.keeping(prediction.subset):
            expected = model(analysis.inputs)[0].double().softmax(0)
        torch.testing.assert_close(prediction.probabilities, expected, rtol=1e-4, atol=1e-6)
