"""last_stride=1 doubles the sides of the map and changes nothing else; stride_on moves the strides of ResNets."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from eigengrain.errors import ArgumentError
from eigengrain.models.backbone import on_meta
from eigengrain.models.create import create_backbone
from eigengrain.models.stride import EvenConv2d

TWICE = [
    "resnet18",
    "resnet50",
    "resnet26d",
    "resnetblur18",
    "vgg16",
    "vgg11_bn",
    "densenet121",
    "efficientnet_b0",
    "tf_efficientnet_lite0",
    "convnext_atto",
    "regnety_002",
    "resnetv2_50",
]


def meta_net(name, **options):
    return on_meta(lambda: create_backbone(name, **options).net.eval().to("meta"))


def test_networks_that_read_values_while_they_are_built_are_built_on_the_cpu():
    def build():
        layer = nn.Linear(2, 2)
        layer.weight.sum().item()
        return layer

    assert on_meta(build).weight.device.type == "cpu"
    assert on_meta(lambda: nn.Linear(2, 2)).weight.is_meta


def pair(name, submodule=None, **options):
    """A network without and with last_stride=1, with the same weights; or one module of each."""
    nets = []
    for last_stride in (None, 1):
        torch.manual_seed(0)
        nets.append(create_backbone(name, last_stride=last_stride, **options).net.eval())
    for a, b in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    return nets if submodule is None else [net.get_submodule(submodule) for net in nets]


@pytest.mark.parametrize("name", TWICE)
def test_map_is_twice_as_large_in_each_direction(name):
    # all of them divide by 32, so their own map is 2 × 4
    finer = meta_net(name, last_stride=1)
    assert finer.forward_features(torch.empty(1, 3, 64, 128, device="meta")).shape[2:] == (4, 8)
    assert all(m.dilation == (1, 1) for m in finer.modules() if isinstance(m, nn.Conv2d))


def test_stride_of_two_changes_nothing():
    x = torch.empty(1, 3, 64, 128, device="meta")
    for last_stride in (None, 2):
        assert meta_net("resnet18", last_stride=last_stride).forward_features(x).shape[2:] == (2, 4)


# Positions: the output of a strided module is every second position of its output at stride 1.


@pytest.mark.parametrize("stride_on", ["3x3", "1x1"])
def test_resnet_bottleneck_keeps_its_positions(stride_on):
    plain, finer = pair("resnet26", "layer4.0", stride_on=stride_on, layers=(1, 1, 1, 1))
    x = torch.randn(1, 1024, 6, 4)
    out = finer(x)
    assert out.shape == (1, 2048, 6, 4)
    torch.testing.assert_close(finer.downsample(x)[..., ::2, ::2], plain.downsample(x), rtol=1e-5, atol=1e-5)
    if stride_on == "3x3":  # only 1 × 1 convolutions follow it
        torch.testing.assert_close(out[..., ::2, ::2], plain(x), rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(finer.conv1(x)[..., ::2, ::2], plain.conv1(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, start", [("efficientnet_b0", 0), ("tf_efficientnet_lite0", 1)])
def test_depthwise_convolution_keeps_its_positions(name, start):
    # "same" padding puts the odd pixel at the far edge, so the strided convolution is centred on odd positions
    plain, finer = pair(name, "blocks.5.0.conv_dw")
    x = torch.randn(1, plain.in_channels, 8, 6)
    torch.testing.assert_close(finer(x)[..., start::2, start::2], plain(x), rtol=1e-5, atol=1e-5)


def test_convnext_downsampling_keeps_its_positions():
    plain, finer = pair("convnext_atto", "stages.3.downsample.1")
    assert isinstance(finer, EvenConv2d)
    x = torch.randn(1, plain.in_channels, 6, 8)
    assert finer(x).shape == (1, plain.out_channels, 6, 8)
    torch.testing.assert_close(finer(x)[..., ::2, ::2], plain(x), rtol=1e-5, atol=1e-5)


def test_pooling_is_removed():
    x = torch.randn(1, 3, 64, 64)
    plain, finer = pair("vgg11_bn", mlp_ratio=0.01)  # a small classifier, which is built before it is cut off
    torch.testing.assert_close(F.max_pool2d(finer.forward_features(x), 2), plain.forward_features(x))
    plain, finer = pair("densenet121", "features.transition3", growth_rate=8, block_config=(2, 2, 2, 2))
    y = torch.randn(1, plain.norm.num_features, 4, 6)
    torch.testing.assert_close(F.avg_pool2d(finer(y), 2), plain(y))
    plain, finer = pair("resnet26d", "layer4.0.downsample.0", layers=(1, 1, 1, 1))
    assert isinstance(plain, nn.AvgPool2d)
    assert isinstance(finer, nn.Identity)


def test_alexnet_ends_before_its_last_pooling():
    # 3 × 3 pooling at stride 2 without padding: 13 positions become 6, so "twice" is 13
    plain, finer = pair("tv:alexnet")
    x = torch.randn(1, 3, 224, 160)
    maps = plain.forward_features(x), finer.forward_features(x)
    assert maps[0].shape == (1, 256, 6, 4)
    assert maps[1].shape == (1, 256, 13, 9)
    torch.testing.assert_close(F.max_pool2d(maps[1], 3, 2), maps[0])


def test_stride_on_the_first_1x1():
    torch.manual_seed(0)
    by_hand = timm.create_model("resnet26", num_classes=0, global_pool="").eval()
    for stage in (by_hand.layer2, by_hand.layer3, by_hand.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    torch.manual_seed(0)
    ours = create_backbone("resnet26", stride_on="1x1").net.eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(ours.forward_features(x), by_hand.forward_features(x))
    finer = meta_net("tv:resnet50", stride_on="1x1", last_stride=1)
    strides = [
        (stage[0].conv1.stride[0], stage[0].conv2.stride[0], stage[0].downsample[0].stride[0])
        for stage in (finer.layer2, finer.layer3, finer.layer4)
    ]
    assert strides == [(2, 1, 2), (2, 1, 2), (1, 1, 1)]


@pytest.mark.parametrize(
    "name, fixed_size",
    [
        ("inception_v3", False),
        ("vit_small_patch16_224", True),
        ("swin_tiny_patch4_window7_224", True),
        ("dla34", False),
        # built for one size, without a patch_embed that has it
        ("mixer_s32_224", True),
        ("hiera_tiny_224", True),
        # its tables of relative positions end with the map; without data no index reaches beyond them
        ("mvitv2_tiny", True),
    ],
)
def test_networks_without_a_removable_stride(name, fixed_size):
    with pytest.raises(ArgumentError) as error:
        meta_net(name, last_stride=1)
    assert error.value.argument == "last_stride"
    assert ("{img_size}" in error.value.remedy) == fixed_size
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, options",
    [
        ("resnet18", {"last_stride": 4}),
        ("resnet18", {"stride_on": "5x5"}),
        *((name, {"stride_on": "1x1"}) for name in ("resnet18", "vgg11", "resnetblur50")),  # without strided bottlenecks
    ],
)
def test_wrong_values(name, options):
    with pytest.raises(ArgumentError) as error:
        meta_net(name, **options)
    assert {error.value.argument: error.value.value} == options
