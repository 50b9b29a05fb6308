"""Explanations of a ViT: what works, against gradients that are written out, and what is refused."""

import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from eigengrain.data import ImageSet
from eigengrain.errors import ReLURuleError
from eigengrain.explain import EigenPerturbation, attribute_rules
from eigengrain.explorer.session import Session
from eigengrain.functional import covariance
from eigengrain.models import create_model
from eigengrain.training.run_folder import TrainedModel

SIZE = 64


def vit(head="mpncov+seb", **options):
    torch.manual_seed(0)
    small = {"img_size": SIZE, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return create_model("vit_tiny_patch16_224", head=head, num_classes=4, reduce=6, **small, **options).eval()


def images(batch=2):
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("class_token", [None, "beside"])
@pytest.mark.parametrize("head", ["mpncov+seb", "svpn"])
@pytest.mark.parametrize("rule", ["deconv", "guided"])
def test_rules_of_relus_are_refused_in_one_line(rule, head, class_token):
    with pytest.raises(ReLURuleError) as caught:
        attribute_rules(vit(head, class_token=class_token), images(), ["all"], ["vanilla", rule])
    assert caught.value.calls["gelu"] == 2
    assert "\n" not in str(caught.value)
    assert "'vanilla'" in caught.value.remedy


@pytest.mark.parametrize("class_token", [None, "beside"])
@pytest.mark.parametrize("head", ["mpncov+seb", "svpn", "gap"])
def test_saliency_is_the_gradient_of_the_whole_model(head, class_token):
    model = vit(head, class_token=class_token).double()
    x = images().double().requires_grad_()
    expected = torch.autograd.grad(model(x)[:, 2].sum(), x)[0]
    result = attribute_rules(model, x.detach(), ["all"], ["vanilla"], 2)["vanilla"].maps["all"]
    torch.testing.assert_close(result, expected)


def test_maps_of_subsets_have_the_gradient_of_the_class_token():
    """A whole and its two parts, for which maps without a class token would add up."""
    model = vit(class_token="beside").double()
    maps = attribute_rules(model, images().double(), ["all", "top:2", "last:4"], ["vanilla"], 2)["vanilla"].maps
    for subset, found in maps.items():
        x = images().double().requires_grad_()
        with model.head.keeping(subset):
            torch.testing.assert_close(found, torch.autograd.grad(model(x)[:, 2].sum(), x)[0])


def test_perturbation_uses_the_covariance_of_the_patch_tokens():
    model, x = vit(class_token="beside"), images()
    with torch.no_grad():
        tokens = model.backbone.forward_features(x)[:, 1:].mT.unflatten(2, (4, 4))
        expected = covariance(model.head.reduce(tokens), dtype=torch.float64)
        torch.testing.assert_close(EigenPerturbation(model).covariance(x), expected)


def test_explorer_scores_are_those_of_the_whole_model(tmp_path):
    model = vit(class_token="beside")
    for number in range(2):
        Image.new("RGB", (SIZE, SIZE), (90 * number, 40, 200)).save(tmp_path / f"{number}.png")
    files = [tmp_path / f"{number}.png" for number in range(2)]
    examples = ImageSet("two", "test", ["a", "b", "c", "d"], [0, 1], files, TrainedModel(model).transform)
    session = Session("two", model, examples)
    analysis = session.analyse("example-1")
    for prediction in session.predict(analysis, 2):
        with torch.no_grad(), model.head.keeping(prediction.subset):
            expected = model(analysis.inputs)[0].double().softmax(0)
        torch.testing.assert_close(prediction.probabilities, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("class_token", [None, "beside"])
@pytest.mark.parametrize("head", ["mpncov+seb", "svpn"])
def test_smooth_maps(head, class_token):
    pytest.importorskip("captum")
    from eigengrain.explain.smooth import smooth_maps

    model, x = vit(head, class_token=class_token), images()
    pooled, token = model.split_features(model.forward_features(x).detach())
    leaf = model.head.reduce(pooled).detach().requires_grad_()
    scores = model.forward_vector(model.head.pool(leaf), beside=token)
    (gradient,) = torch.autograd.grad(scores[:, 1].sum(), leaf)
    expected = interpolate((gradient * leaf).sum(1, keepdim=True).clamp_min(0), (SIZE, SIZE), mode="bilinear")[:, 0]
    torch.testing.assert_close(smooth_maps(model, x, 1), expected.detach(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("class_token", [None, "beside"])
@pytest.mark.parametrize("head", ["mpncov+seb", "svpn"])
def test_methods_of_captum_that_need_no_rules(head, class_token):
    attr = pytest.importorskip("captum.attr")
    model, x = vit(head, class_token=class_token).double(), images().double()
    copy = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(copy)[:, 1].sum(), copy)[0].abs()
    torch.testing.assert_close(attr.Saliency(model).attribute(x.clone().requires_grad_(), target=1), expected)

    # integrated gradients add up to the difference of the scores
    baseline = x.flip(0)
    found = attr.IntegratedGradients(model).attribute(x, baseline, target=1, n_steps=400, internal_batch_size=100)
    with torch.no_grad():
        scores, base = model(x)[:, 1], model(baseline)[:, 1]
        torch.testing.assert_close(found.sum((1, 2, 3)), scores - base, rtol=2e-2, atol=1e-5)

        # occlusion of the upper left quarter is the change of the score
        half = SIZE // 2
        occluded = attr.Occlusion(model).attribute(x, (3, half, half), strides=(3, half, half), target=1)
        hidden = x.clone()
        hidden[:, :, :half, :half] = 0
        change = (scores - model(hidden)[:, 1])[:, None].expand(-1, half)
        torch.testing.assert_close(occluded[:, 0, 0, :half].double(), change, rtol=1e-4, atol=1e-6)
