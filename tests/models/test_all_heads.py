"""The contract of every head on small backbones of six kinds: residual, plain, mobile, modern, tokens, windows."""

import functools

import pytest
import torch

from eigengrain.errors import ShortRankWarning
from eigengrain.heads import create_head, list_heads
from eigengrain.models import create_model

SMALL_SWIN = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
BACKBONES = {
    "test_resnet": {"last_stride": 1},
    "tv:squeezenet1_1": {},
    "test_efficientnet": {"last_stride": 1},
    "test_convnext": {"last_stride": 1},
    "test_vit": {"img_size": 96, "dynamic_img_size": True},
    "swin_tiny_patch4_window7_224": {"img_size": (96, 128), "window_size": 4, **SMALL_SWIN},
}
CLASSES = 3


@functools.cache
def network(backbone):
    torch.manual_seed(0)
    return create_model(backbone, head="gap", num_classes=CLASSES, reduce=24, **BACKBONES[backbone])


def with_head(backbone, head):
    """Replace the head of a backbone that is built once; replacing it is part of the contract."""
    torch.manual_seed(0)
    model = network(backbone)
    model.reset_classifier(CLASSES, global_pool=head)
    return model.train()


def images(backbone, batch):
    torch.manual_seed(1)
    return torch.randn(batch, 3, 96, 128 if backbone.startswith("swin") else 96)


@pytest.mark.filterwarnings(f"ignore::{ShortRankWarning.__module__}.ShortRankWarning")
@pytest.mark.parametrize("head", list_heads(any_backbone=True))
@pytest.mark.parametrize("backbone", BACKBONES)
def test_contract(backbone, head):
    model, x = with_head(backbone, head), images(backbone, 2)

    # the declared sizes are the real ones, and every parameter gets a finite gradient
    features = model.forward_features(x)
    vector = model.forward_head(features, pre_logits=True)
    assert features.shape[1] == model.num_features
    assert vector.shape == (2, model.head_hidden_size) == (2, model.head.out_features)
    scores = model.forward_head(features)
    assert scores.shape == (2, CLASSES)
    assert scores.dtype == torch.float32
    (scores * torch.randn(scores.shape)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    model.zero_grad(set_to_none=True)

    # evaluation: a batch of one, the backbone in half precision, channels last
    model.eval()
    with torch.no_grad():
        one = model(x[:1])
        assert one.isfinite().all()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            vector = model.forward_head(model.forward_features(x[:1]), pre_logits=True)
            assert vector.dtype == torch.float32
            assert model(x[:1]).isfinite().all()
        assert torch.allclose(model(x[:1].to(memory_format=torch.channels_last)), one, rtol=1e-2, atol=1e-3)

    # the state of head and classifier can be loaded into new ones
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("backbone.")}
    new = create_head(head, model.num_features, reduce=24)
    new.load_state_dict({k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")})
    classifier = new.classifier(CLASSES)
    classifier.load_state_dict({k.removeprefix("classifier."): v for k, v in state.items() if k.startswith("classifier.")})
    with torch.no_grad():
        assert torch.equal(classifier(new.eval()(model.forward_features(x[:1]))), one)

    # the classifier can be removed and replaced
    model.reset_classifier(0)
    assert model(x[:1]).shape == (1, model.head_hidden_size)
    model.reset_classifier(7)
    assert model.get_classifier()(vector.float()).shape == (1, 7)


@pytest.mark.parametrize("head", list_heads())
def test_few_positions_and_odd_shapes(head):
    torch.manual_seed(0)
    for shape in ((2, 12, 1, 5), (1, 12, 3, 2), (2, 12, 1, 1), (2, 12, 4, 7)):
        x = torch.rand(shape, requires_grad=True)
        layer = create_head(head, 12)
        y = layer(x)
        assert y.shape == (shape[0], layer.out_features)
        (y * torch.randn(y.shape)).sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("head", list_heads())
def test_features_that_are_all_zero(head):
    x = torch.zeros(2, 8, 4, 4, requires_grad=True)
    y = create_head(head, 8)(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_the_branch_adds_no_parameters():
    """With the paper's ResNet-50 and 200 classes."""
    counts = {}
    with torch.device("meta"):
        for head in ("mpncov", "mpncov+seb", "isqrt", "gap"):
            model = create_model("resnet50", head=head, num_classes=200)
            counts[head] = sum(p.numel() for p in model.parameters())
    trunk = counts["gap"] - 200 * 2049
    assert counts["mpncov"] == counts["mpncov+seb"] == counts["isqrt"]
    assert counts["mpncov"] == trunk + 2048 * 256 + 2 * 256 + 200 * (256 * 257 // 2 + 1)
