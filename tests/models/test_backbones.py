"""Every backbone ends with its feature map: channels, size, layout, and nothing behind it."""

import functools
import math
import warnings

import pytest
import timm
import torch
from torch import nn

from eigengrain import _torchvision
from eigengrain.models import create_model, from_pretrained, list_backbones, save_pretrained
from eigengrain.models.backbone import create_backbone
from eigengrain.models.layout import FeatureLayout, token_grid

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
# parameters behind the map, counted by hand from the networks' definitions: (in + 1) · out for linear layers
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


cached_on_meta = functools.cache(on_meta)  # for tests that only look at the model


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
def test_nothing_is_left_behind_the_map(name):
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
    for behind in ("fc", "head", "classifier", "global_pool", "pre_logits", "avgpool", "head_drop"):
        assert isinstance(dict(net.named_children()).get(behind, nn.Identity()), nn.Identity)


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
    with pytest.raises(ValueError, match="multiples of 16 × 16, got 96 × 100"):
        model(torch.empty(1, 3, 96, 100, device="meta"))


def test_a_class_token_for_each_stage_and_modules_that_blocks_share(tmp_path):
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
    assert token_grid(nn.Module(), 24, (64, 96)) == (4, 6)
    assert token_grid(nn.Module(), 3, (10, 300)) == (1, 3)
    with pytest.raises(ValueError, match="23 tokens do not form a grid"):
        token_grid(nn.Module(), 23, (64, 96))
    x = torch.arange(2 * 7 * 5.0).reshape(2, 7, 5)
    fmap = FeatureLayout("tokens", 1).to_map(x, nn.Module(), (20, 30))
    assert torch.equal(fmap[:, :, 1, 0], x[:, 4])


def test_images_of_another_shape_are_refused():
    model = on_meta("vit_small_patch16_224")
    with pytest.raises(ValueError, match=r"built for images of 224 × 224, got 64 × 96: .*img_size=\(64, 96\)"):
        model(torch.empty(1, 3, 64, 96, device="meta"))
    for shape in ((3, 224, 224), (1, 1, 224, 224)):
        with pytest.raises(ValueError, match=r"expects images \(B, 3, H, W\), got"):
            model(torch.empty(shape, device="meta"))
    with pytest.raises(ValueError, match=r"floating point, got torch.uint8: divide by 255"):
        model(torch.empty(1, 3, 224, 224, device="meta", dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a tensor of images \(B, 3, H, W\), got list"):
        model([[1.0]])
    assert on_meta("resnet18", in_chans=1)(torch.empty(2, 1, 64, 64, device="meta")).shape == (2, 3)


@pytest.mark.parametrize(
    "name", ["levit_128s", "mixer_s32_224", "coat_lite_tiny", "efficientformerv2_s0", "maxvit_pico_rw_256"]
)
def test_images_of_a_size_that_shows_inside_the_network_are_refused(name):
    model = on_meta(name).eval()
    side = model.pretrained_cfg["input_size"][1]
    said = rf"built for images of {side} × {side}, and does not run on 96 × 128 \(.+\): .*img_size=\(96, 128\)"
    with pytest.raises(ValueError, match=said):
        model(torch.empty(1, 3, 96, 128, device="meta"))


def test_errors_that_are_not_of_the_size_stay_as_they_are():
    model = on_meta("vit_tiny_patch16_224", img_size=32).eval()
    with pytest.raises(RuntimeError, match="device"):
        model(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "tf_efficientnet_lite0", "tv:alexnet", "hrnet_w18_small"])
def test_img_size_is_for_networks_that_have_one(name):
    with pytest.raises(ValueError, match="takes images of any size: leave img_size out"):
        on_meta(name, img_size=64)


@pytest.mark.parametrize("wrong", ["64", 64.0, (64,), (64, 64, 64), (64, 0), -32, 0])
def test_sizes_that_are_none(wrong):
    with pytest.raises(ValueError, match=r"img_size must be a side, or \(height, width\), in whole pixels, got"):
        on_meta("vit_tiny_patch16_224", img_size=wrong)
    assert on_meta("vit_tiny_patch16_224", img_size=[64, 96]).config["img_size"] == (64, 96)


def test_unknown_names_get_near_matches_in_one_line():
    for name, near in (("resnet5o", "'resnet50'"), ("tv:alexnt", "'tv:alexnet'"), ("vit_small_patch16_225", "'vit_small_")):
        with pytest.raises(ValueError, match=near) as error:
            create_model(name)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 250
    with pytest.raises(ValueError, match="unknown head 'mpncof'"):
        create_model("resnet18", head="mpncof")
    with pytest.raises(ValueError, match="unexpected keyword argument 'depth_of_field'"):
        create_model("resnet18", head="gap", depth_of_field=3)
    with pytest.raises(ValueError, match="unexpected keyword argument 'depth_of_field'"):
        create_model("tv:alexnet", head="gap", depth_of_field=3)
    with pytest.raises(ValueError, match="no argument 'num_clases': did you mean 'num_classes'"):
        create_model("resnet18", head="gap", num_clases=3)
    with pytest.raises(ValueError, match="nosuchtag"):
        create_model("resnet18.nosuchtag", head="gap")
    assert {"resnet50", "tv:alexnet"} <= set(list_backbones())
    assert list_backbones("tv:alex*") == ["tv:alexnet"]


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "tv:resnet18"])
def test_weights_out_of_reach_are_said_in_one_line(monkeypatch, name):
    def fails(*_, **__):
        raise FileNotFoundError("no such host. Please look\nelsewhere")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", fails)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fails)
    with pytest.raises(ValueError, match=r"downloaded or read \(no such host\): .*weights=FILE") as error:
        create_model(name, head="gap", pretrained=True)
    assert "\n" not in str(error.value)


def test_networks_without_a_map_are_refused():
    with pytest.raises(ValueError, match="gives list before its classifier"):
        on_meta("crossvit_9_240")
    with pytest.raises(ValueError, match="not one feature map"):
        on_meta("pit_ti_224")
    with pytest.raises(ValueError, match="no feature map that can be cut off"):
        on_meta("tv:vit_b_16")
    with pytest.raises(ValueError, match="no forward_features"):
        on_meta("resnet18", features_only=True)


def test_none_leaves_the_default_and_options_arrive():
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
    with pytest.raises(ValueError, match="reduce must be a whole number"):
        on_meta("resnet18", reduce=0)


def test_probe_leaves_the_network_as_it_was():
    torch.manual_seed(0)
    plain = timm.create_model("resnet18", num_classes=0)
    torch.manual_seed(0)
    ours = create_backbone("resnet18", last_stride=1).net
    assert ours.training
    for (name, a), (other, b) in zip(plain.state_dict().items(), ours.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert not any(module._forward_hooks for module in ours.modules())


def test_what_a_network_keeps_of_its_first_pass_is_not_of_the_probe():
    """ConViT makes its table of relative positions in the first pass, where the images then are."""
    model = create_model("convit_tiny", head="gap", num_classes=0, img_size=64).eval()
    original = timm.create_model("convit_tiny", img_size=64).eval()
    model.backbone.load_state_dict({k: v for k, v in original.state_dict().items() if k in model.backbone.state_dict()})
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        tokens = original.forward_features(x)[:, 1:]
        torch.testing.assert_close(model.forward_features(x).flatten(2).mT, tokens)


def test_rank_warning_once_with_the_remedy():
    model = create_model("resnet18", head="mpncov", num_classes=2, reduce=8).eval()
    with pytest.warns(
        UserWarning, match=r"8 channels from 2 × 2 = 4 positions has rank 3 at most.*5 smallest.*last_stride=1"
    ):
        model(torch.randn(1, 3, 64, 64))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(1, 3, 64, 64))
        enough = create_model("resnet18", head="mpncov", num_classes=2, reduce=3).eval()
        assert math.prod(enough.forward_features(torch.randn(1, 3, 64, 64)).shape[2:]) - 1 == 3
        enough(torch.randn(1, 3, 64, 64))
        create_model("resnet18", head="gap", num_classes=2).eval()(torch.randn(1, 3, 64, 64))
    # a remedy that the network has: patches of one size have no last stride
    patches = create_model("vit_tiny_patch16_224", head="mpncov", num_classes=2, reduce=4, img_size=32).eval()
    with pytest.warns(UserWarning, match=r"so its smallest eigenvalue is 0 by construction: use larger images, or") as said:
        patches(torch.randn(1, 3, 32, 32))
    assert "last_stride" not in str(said[0].message)
    one = create_model("resnet18", head="mpncov", num_classes=2, reduce=2).eval()  # no reduction helps
    with pytest.warns(UserWarning, match=r"1 × 1 = 1 position has rank 0 .*: use last_stride=1 or larger images$"):
        one(torch.randn(1, 3, 32, 32))


def test_torchvision_guard_only_declares_what_is_missing():
    import torchvision

    if _torchvision._declared is None:
        assert torchvision.extension._has_ops()
    else:  # its operators are missing still, and say so when called
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

    with pytest.raises(RuntimeError, match="another error"):
        fails("another error")
    fails("")
    assert attempts == ["torchvision", "torchvision"]
    assert _torchvision._declared is declared
