"""Every backbone ends with its feature map: channels, size, layout, and nothing after it."""

import functools
import math
import warnings

import pytest
import timm
import torch
from torch import nn

from eigengrain import _torchvision
from eigengrain.errors import ArgumentError, ShortRankWarning, UnknownName
from eigengrain.models import create_model, from_pretrained, list_backbones, save_pretrained
from eigengrain.models.backbone import FeatureLayout, token_grid
from eigengrain.models.create import create_backbone

# name: channels, map at the network's own image size, image size, layout of the network's own features
BACKBONES = {
    "tv:alexnet": (256, 6, 224, "NCHW"),
    "tv:vgg16": (512, 7, 224, "NCHW"),
    "tv:resnet50": (2048, 7, 224, "NCHW"),
    "tv:densenet121": (1024, 7, 224, "NCHW"),
    "tv:swin_t": (768, 7, 224, "NCHW"),
    "vgg16": (512, 7, 224, "NCHW"),
    "vgg16_bn": (512, 7, 224, "NCHW"),
    "resnet18": (512, 7, 224, "NCHW"),
    "resnet50": (2048, 7, 224, "NCHW"),
    "resnet101": (2048, 7, 224, "NCHW"),
    "resnet152": (2048, 7, 224, "NCHW"),
    "densenet169": (1664, 7, 224, "NCHW"),
    "inception_v3": (2048, 8, 299, "NCHW"),
    "efficientnet_b5": (2048, 14, 448, "NCHW"),
    "tf_efficientnet_lite0": (1280, 7, 224, "NCHW"),
    "mobilenetv3_small_100": (576, 7, 224, "NCHW"),
    "convnext_tiny": (768, 7, 224, "NCHW"),
    "vit_small_patch16_224": (384, 14, 224, "tokens"),
    "vit_base_patch16_224": (768, 14, 224, "tokens"),
    "beit_base_patch16_224": (768, 14, 224, "tokens"),
    "eva02_tiny_patch14_224": (192, 16, 224, "tokens"),
    "swin_tiny_patch4_window7_224": (768, 7, 224, "NHWC"),
}
# parameters after the map, counted by hand from the networks' definitions: (in + 1) · out for linear layers
REMOVED = {
    "tv:alexnet": 9217 * 4096 + 4097 * 4096 + 4097 * 1000,
    "vgg16": (512 * 49 + 1) * 4096 + 4097 * 4096 + 4097 * 1000,
    "resnet50": 2049 * 1000,
    "densenet169": 1665 * 1000,
    "tf_efficientnet_lite0": 1281 * 1000,
    "mobilenetv3_small_100": 577 * 1024 + 1025 * 1000,
    "convnext_tiny": 2 * 768 + 769 * 1000,
    "vit_small_patch16_224": 385 * 1000,
    "beit_base_patch16_224": 2 * 768 + 769 * 1000,
    "swin_tiny_patch4_window7_224": 769 * 1000,
}


def on_meta(name, **options):
    with torch.device("meta"):
        return create_model(name, **{"head": "gap", "num_classes": 3, **options})


cached_on_meta = functools.cache(on_meta)  # for tests that do not change the model


def refuse(function, *args, **options):
    """The ArgumentError of a call, whose message is one line."""
    with pytest.raises(ArgumentError) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize("name", BACKBONES)
def test_feature_map(name):
    channels, side, image, layout = BACKBONES[name]
    model = cached_on_meta(name)
    assert model.num_features == channels
    assert model.layout.kind == layout
    assert model.pretrained_cfg["input_size"] == (3, image, image)
    assert model.pretrained_cfg["pool_size"] == (side, side)
    model.eval()
    assert model.forward_features(torch.empty(2, 3, image, image, device="meta")).shape == (2, channels, side, side)


@pytest.mark.parametrize("name", REMOVED)
def test_nothing_is_left_after_the_map(name):
    if name.startswith("tv:"):
        from torchvision.models import get_model

        with torch.device("meta"):
            original = get_model(name.removeprefix("tv:"))
    else:
        with torch.device("meta"):
            original = timm.create_model(name)
    net = cached_on_meta(name).backbone
    count = {n: p.numel() for n, p in original.named_parameters()}
    left = {n: p.numel() for n, p in net.named_parameters()}
    assert left.items() <= count.items()  # the same names and sizes
    assert sum(count.values()) - sum(left.values()) == REMOVED[name]
    assert all(p.requires_grad for p in net.parameters())
    for removed in ("fc", "head", "classifier", "global_pool", "pre_logits", "avgpool", "head_drop"):
        assert isinstance(dict(net.named_children()).get(removed, nn.Identity()), nn.Identity)


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0", "tv:resnet18"])
def test_average_pooling_is_the_original_network(name):
    torch.manual_seed(0)
    if name.startswith("tv:"):
        from torchvision.models import get_model

        original = get_model(name.removeprefix("tv:"))
    else:
        original = timm.create_model(name)
    model = create_model(name, head="gap")
    model.backbone.load_state_dict({k: v for k, v in original.state_dict().items() if k in model.backbone.state_dict()})
    model.classifier.load_state_dict(original.get_submodule(model.backbone_classifier).state_dict())
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(model.eval()(x), original.eval()(x), rtol=1e-5, atol=1e-6)


def test_tokens_are_laid_out_row_by_row():
    net = create_model("vit_small_patch16_224", head="gap", img_size=(32, 48), num_classes=0).eval()
    x = torch.randn(1, 3, 32, 48)
    tokens, fmap = net.backbone.forward_features(x), net.forward_features(x)
    assert tokens.shape == (1, 1 + 6, 384)
    assert fmap.shape == (1, 384, 2, 3)
    for row in range(2):
        for column in range(3):
            assert torch.equal(fmap[0, :, row, column], tokens[0, 1 + 3 * row + column])


def test_swin_map_has_its_channels_first():
    net = create_model("swin_tiny_patch4_window7_224", head="gap", img_size=(64, 96), num_classes=0).eval()
    x = torch.randn(1, 3, 64, 96)
    own, fmap = net.backbone.forward_features(x), net.forward_features(x)
    assert own.shape == (1, 2, 3, 768)
    assert torch.equal(fmap[0, :, 1, 2], own[0, 1, 2])


def test_dynamic_size_of_a_vit():
    model = on_meta("vit_small_patch16_224", dynamic_img_size=True).eval()
    assert model.forward_features(torch.empty(1, 3, 96, 160, device="meta")).shape == (1, 384, 6, 10)
    error = refuse(model, torch.empty(1, 3, 96, 100, device="meta"))
    assert (error.argument, error.value) == ("x", (96, 100))


def test_class_token_per_stage_and_shared_modules(tmp_path):
    model = create_model("coat_lite_tiny", head="gap", num_classes=0, img_size=(64, 96)).eval()
    original = timm.create_model("coat_lite_tiny", img_size=(64, 96)).eval()
    model.backbone.load_state_dict({k: v for k, v in original.state_dict().items() if k in model.backbone.state_dict()})
    assert (model.layout, model.num_features) == (FeatureLayout("tokens", 1), 320)
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        features = model.forward_features(x)
        torch.testing.assert_close(features.flatten(2).mT, original.forward_features(x)[:, 1:])
    save_pretrained(model, tmp_path)
    torch.testing.assert_close(from_pretrained(tmp_path).forward_features(x), features)


def test_token_grid_without_a_patch_embedding():
    assert token_grid(24, (64, 96)) == token_grid(24, (64, 96), embedded=(5, 5)) == (4, 6)
    assert token_grid(24, (64, 96), embedded=(8, 3)) == (8, 3)
    assert token_grid(3, (10, 300)) == (1, 3)
    assert refuse(token_grid, 23, (64, 96)).value == (64, 96)
    x = torch.arange(2 * 7 * 5.0).reshape(2, 7, 5)
    fmap = FeatureLayout("tokens", 1).to_map(x, nn.Module(), (20, 30))
    assert torch.equal(fmap[:, :, 1, 0], x[:, 4])


def test_images_of_another_shape_are_refused():
    model = on_meta("vit_small_patch16_224")
    error = refuse(model, torch.empty(1, 3, 64, 96, device="meta"))
    assert (error.argument, error.value) == ("x", (64, 96))
    assert "img_size=(64, 96)" in error.remedy
    for shape in ((3, 224, 224), (1, 1, 224, 224)):
        assert refuse(model, torch.empty(shape, device="meta")).value == shape
    assert refuse(model, torch.empty(1, 3, 224, 224, device="meta", dtype=torch.uint8)).value == torch.uint8
    assert refuse(model, [[1.0]]).value == "list"
    assert on_meta("resnet18", in_chans=1)(torch.empty(2, 1, 64, 64, device="meta")).shape == (2, 3)


@pytest.mark.parametrize(
    "name", ["levit_128s", "mixer_s32_224", "coat_lite_tiny", "efficientformerv2_s0", "maxvit_pico_rw_256"]
)
def test_images_of_a_size_that_fails_inside_the_network_are_refused(name):
    error = refuse(on_meta(name).eval(), torch.empty(1, 3, 96, 128, device="meta"))
    assert (error.argument, error.value) == ("x", (96, 128))
    assert "img_size=(96, 128)" in error.remedy


def test_errors_for_other_reasons_than_the_size_are_not_changed():
    model = on_meta("vit_tiny_patch16_224", img_size=32).eval()
    with pytest.raises(RuntimeError, match="device"):
        model(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "tf_efficientnet_lite0", "tv:alexnet", "hrnet_w18_small"])
def test_img_size_is_for_networks_with_a_fixed_size(name):
    error = refuse(on_meta, name, img_size=64)
    assert (error.argument, error.value) == ("img_size", 64)


@pytest.mark.parametrize("wrong", ["64", 64.0, (64,), (64, 64, 64), (64, 0), -32, 0])
def test_invalid_image_sizes(wrong):
    error = refuse(on_meta, "test_vit", img_size=wrong)
    assert (error.argument, error.value) == ("img_size", wrong)


def test_image_size_as_a_list():
    assert on_meta("test_vit", img_size=[64, 96]).config["img_size"] == (64, 96)


def test_unknown_names():
    for name, suggestion in (
        ("resnet5o", "resnet50"),
        ("tv:alexnt", "tv:alexnet"),
        ("vit_small_patch16_225", "vit_small_"),
    ):
        with pytest.raises(UnknownName) as error:
            create_model(name)
        assert (error.value.kind, error.value.name) == ("backbone", name)
        assert any(suggested.startswith(suggestion) for suggested in error.value.suggestions)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 250  # without the list of all names
    with pytest.raises(UnknownName) as error:
        create_model("resnet18", head="mpncof")
    assert (error.value.kind, error.value.name) == ("head", "mpncof")
    with pytest.raises(UnknownName) as error:
        create_model("resnet18", head="gap", num_clases=3)
    assert error.value.suggestions[0] == "num_classes"
    for name in ("resnet18", "tv:alexnet"):
        assert refuse(create_model, name, head="gap", depth_of_field=3).argument == "depth_of_field"
    assert refuse(create_model, "resnet18.nosuchtag", head="gap").argument == "backbone"
    assert {"resnet50", "tv:alexnet"} <= set(list_backbones())
    assert list_backbones("tv:alex*") == ["tv:alexnet"]


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "tv:resnet18"])
def test_weights_that_cannot_be_downloaded(monkeypatch, name):
    def fails(*_, **__):
        raise FileNotFoundError("no such host. Please look\nelsewhere")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", fails)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fails)
    error = refuse(create_model, name, head="gap", pretrained=True)
    assert (error.argument, type(error.__cause__)) == ("backbone", FileNotFoundError)
    assert "{weights}" in error.remedy


def test_networks_without_a_map_are_refused():
    for name in ("crossvit_9_240", "pit_ti_224", "tv:vit_b_16"):  # a list, tokens of several grids, no trunk
        error = refuse(on_meta, name)
        assert (error.argument, error.value) == ("backbone", name)
    assert refuse(on_meta, "resnet18", features_only=True).argument == "backbone"


def test_none_is_the_default_and_options_reach_the_backbone():
    model = create_model(
        "resnet18", head="gap", num_classes=None, stride_on=None, pretrained=None, drop_rate=None, drop_path_rate=None
    )
    assert model.num_classes == 1000
    assert "drop_path_rate" not in model.config
    stochastic = create_model("resnet18", head="gap", num_classes=2, drop_path_rate=0.5)
    assert any(type(m).__name__ == "DropPath" for m in stochastic.backbone.modules())


def test_reduction():
    def channels(name, **options):
        head = on_meta(name, **options).head
        return head.in_channels, head.channels

    assert channels("resnet50", head="mpncov") == (2048, 256)
    assert channels("resnet50", head="gap") == (2048, 2048)
    assert channels("vgg16", head="mpncov") == (512, 512)
    assert channels("vgg16", head="mpncov", reduce=64) == (512, 64)
    assert channels("resnet50", head="mpncov", reduce=None) == (2048, 2048)
    assert on_meta("resnet50", head=None, num_classes=200).classifier.in_features == 256 * 257 // 2
    assert refuse(on_meta, "resnet18", reduce=0).argument == "reduce"


def test_probe_does_not_change_the_network():
    torch.manual_seed(0)
    plain = timm.create_model("resnet18", num_classes=0)
    torch.manual_seed(0)
    ours = create_backbone("resnet18", last_stride=1).net
    assert ours.training
    for (name, a), (other, b) in zip(plain.state_dict().items(), ours.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert not any(module._forward_hooks for module in ours.modules())


def test_state_that_a_network_keeps_from_its_first_pass_is_not_from_the_probe():
    """ConViT makes its table of relative positions in the first pass, on the device of the images."""
    model = create_model("convit_tiny", head="gap", num_classes=0, img_size=64).eval()
    original = timm.create_model("convit_tiny", img_size=64).eval()
    model.backbone.load_state_dict({k: v for k, v in original.state_dict().items() if k in model.backbone.state_dict()})
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        tokens = original.forward_features(x)[:, 1:]
        torch.testing.assert_close(model.forward_features(x).flatten(2).mT, tokens)


def test_rank_warning_once_with_the_remedy():
    def warned(model, size):
        with pytest.warns(ShortRankWarning) as caught:
            model(torch.randn(1, 3, size, size))
        [warning] = [entry.message for entry in caught]
        return warning

    strided = create_model("test_resnet", head="mpncov", num_classes=2, reduce=8).eval()
    warning = warned(strided, 64)
    assert (warning.channels, warning.positions) == (8, 4)
    assert str(warning) == (
        "the covariance of 8 channels from 2 × 2 = 4 positions has rank 3 at most, so its 5 smallest eigenvalues are 0 by "
        "construction: use last_stride=1, larger images, or reduce=3 or less"
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        strided(torch.randn(1, 3, 64, 64))
        enough = create_model("test_resnet", head="mpncov", num_classes=2, reduce=3).eval()
        assert math.prod(enough.forward_features(torch.randn(1, 3, 64, 64)).shape[2:]) - 1 == 3
        enough(torch.randn(1, 3, 64, 64))
        create_model("test_resnet", head="gap", num_classes=2).eval()(torch.randn(1, 3, 64, 64))
    # the remedies fit the network: patches of one size have no last stride, and no reduction helps for one position
    patches = create_model("test_vit", head="mpncov", num_classes=2, reduce=4, img_size=32).eval()
    assert str(warned(patches, 32)).endswith(
        "its smallest eigenvalue is 0 by construction: use larger images, or reduce=3 or less"
    )
    one = create_model("test_resnet", head="mpncov", num_classes=2, reduce=2).eval()
    assert warned(one, 32).positions == 1


def test_torchvision_guard_only_declares_what_is_missing():
    import torchvision

    if _torchvision._declared is None:
        assert torchvision.extension._has_ops()
    else:  # its operators are still missing, and calling them fails
        assert not torchvision.extension._has_ops()
        with pytest.raises(RuntimeError, match=r"custom C\+\+ ops"):
            torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)


def test_torchvision_guard_repairs_one_error_only(monkeypatch):
    declared, attempts = _torchvision._declared, []

    def fails(message):
        def attempt(name):
            attempts.append(name)
            if message:
                raise RuntimeError(message)

        monkeypatch.setattr(_torchvision, "import_module", attempt)
        _torchvision._import_torchvision()

    with pytest.raises(RuntimeError):
        fails("another error")
    fails("")
    assert attempts == ["torchvision", "torchvision"]
    assert _torchvision._declared is declared
