"""Smooth maps against gradients that are written out."""

import pytest
import torch
from captum.attr import LayerGradCam
from torch.nn.functional import interpolate

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain.errors import ArgumentError
from eigengrain.explain.smooth import smooth_maps
from eigengrain.models import create_model

IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def model(head, num_classes=4, **options):
    torch.manual_seed(0)
    return create_model("test_resnet", head=head, num_classes=num_classes, last_stride=1, **options).eval()


@pytest.mark.parametrize("target", [None, 2, [1, 3], torch.tensor([1, 3])])
def test_average_pooling_has_the_class_activation_map(target):
    net = model("gap")
    with torch.no_grad():
        x, scores = net.forward_features(IMAGES), net(IMAGES)
    classes = scores.argmax(1) if target is None else torch.as_tensor(target).expand(2)
    weights = net.classifier.weight[classes] / (x.shape[2] * x.shape[3])
    expected = torch.einsum("bc,bchw->bhw", weights, x).clamp_min(0)
    expected = interpolate(expected[:, None], (64, 64), mode="bilinear")[:, 0]
    torch.testing.assert_close(smooth_maps(net, IMAGES, target), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reduce", [None, 5])
def test_a_covariance_has_the_product_of_gradient_and_map(reduce):
    net = model("mpncov", reduce=reduce)
    with torch.no_grad():
        leaf = net.head.reduce(net.forward_features(IMAGES))
    leaf.requires_grad_()
    scores = net.forward_vector(net.head.pool(leaf))
    (gradient,) = torch.autograd.grad(scores[:, 1].sum(), leaf)
    # the mean gradient, Grad-CAM's weight, is zero: adding a number to a channel does not change its covariances
    assert float(gradient.mean((2, 3)).abs().max()) < 1e-4 * float(gradient.abs().max())
    cam = LayerGradCam(net, net.head.reduce).attribute(IMAGES.clone(), target=1)
    expected = (gradient * leaf).sum(1, keepdim=True).clamp_min(0)
    assert float(cam.detach().abs().max()) < 1e-2 * float(expected.detach().max())
    expected = interpolate(expected, (64, 64), mode="bilinear")[:, 0]
    torch.testing.assert_close(smooth_maps(net, IMAGES, 1), expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


def test_the_model_and_the_images_are_restored():
    net, images = model("mpncov", reduce=5).train(), IMAGES.clone()
    with torch.inference_mode():
        maps = smooth_maps(net, images, 0)
    assert maps.shape == (2, 64, 64)
    assert float(maps.min()) >= 0
    assert not maps.requires_grad
    assert net.training
    assert not images.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())
    torch.testing.assert_close(smooth_maps(net, images[:1], 0)[0], maps[0], rtol=1e-3, atol=1e-5)  # images are independent


def test_a_model_without_classifier_is_refused():
    for target in (None, 0):
        with pytest.raises(ArgumentError) as caught:
            smooth_maps(model("mpncov", reduce=5, num_classes=0), IMAGES, target)
        assert caught.value.argument == "model"
