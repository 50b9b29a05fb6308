"""Models whose head pools the maps of several stages."""

import pytest
import torch

from eigengrain import create_model, from_pretrained, save_pretrained
from eigengrain.errors import ArgumentError

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def maps_by_hooks(model, *layers):
    """Outputs of layers of the backbone in one forward pass."""
    maps = {}
    for layer in layers:
        model.backbone.get_submodule(layer).register_forward_hook(
            lambda _m, _i, out, layer=layer: maps.update({layer: out})
        )
    with torch.no_grad():
        features = model.forward_features(IMAGES)
    return features, [maps[layer] for layer in layers]


def test_the_map_stacks_the_last_two_stages():
    model = create_model("resnet10t", head="hcov+seb", num_classes=3, reduce=8, last_stride=1).eval()
    features, (third, fourth) = maps_by_hooks(model, "layer3", "layer4")
    assert model.stage_channels == (256, 512)
    assert model.num_features == 768
    torch.testing.assert_close(features, torch.cat([third, fourth], dim=1))


def test_a_larger_map_of_an_earlier_stage_is_averaged_to_the_size_of_the_last():
    model = create_model("resnet10t", head="hcov", num_classes=3, reduce=2).eval()
    features, (third, fourth) = maps_by_hooks(model, "layer3", "layer4")
    assert third.shape[-1] == 2 * fourth.shape[-1]
    torch.testing.assert_close(features[:, :256], torch.nn.functional.avg_pool2d(third, 2))
    torch.testing.assert_close(features[:, 256:], fourth)


def test_all_parameters_get_a_gradient():
    model = create_model("resnet10t", head="hcov+seb", num_classes=3, reduce=8, last_stride=1)
    model(IMAGES).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    ("backbone", "channels"),
    [
        ("vit_tiny_patch16_224", (192, 192)),
        ("convnext_atto", (160, 320)),
        ("regnetx_002", (152, 368)),
        ("mobilenetv2_035", (32, 1280)),
    ],
)
def test_other_families(backbone, channels):
    options = {"img_size": 64} if backbone.startswith("vit") else {}
    model = create_model(backbone, head="hcov", num_classes=3, reduce=2, **options).eval()
    assert model.stage_channels == channels
    assert model(IMAGES).shape == (2, 3)


def test_stages_of_any_head_are_kept_by_a_model_folder(tmp_path):
    model = create_model("resnet10t", head="gap", num_classes=3, reduce=None, stages=2).eval()
    assert model.head.out_features == 768
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(IMAGES), model(IMAGES))


@pytest.mark.parametrize(
    ("backbone", "stages"), [("vgg11", 2), ("tv:alexnet", 2), ("resnet10t", 9), ("resnet10t", 0), ("resnet10t", True)]
)
def test_stages_that_a_backbone_does_not_have_are_refused(backbone, stages):
    with pytest.raises(ArgumentError) as caught:
        create_model(backbone, head="hcov", num_classes=3, stages=stages)
    assert caught.value.argument == "stages"
