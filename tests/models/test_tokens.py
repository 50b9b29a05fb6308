"""Heads on tokens: which tokens make the map, the final norm, the class token beside the head, ranks of common grids."""

import functools
import math
import warnings

import pytest
import timm
import torch
from torch import nn

from eigengrain import create_model, from_pretrained, save_pretrained
from eigengrain.errors import ArgumentError, ShortRankWarning
from eigengrain.models.backbone import FeatureLayout
from eigengrain.models.export import export_program
from eigengrain.models.weights import load_weights
from eigengrain.training import calibrate_vectors, evaluate

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3}
SMALL_SWIN = {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
# image size, options, prefix tokens and positions; 0 prefix tokens for maps
BACKBONES = {
    "vit_tiny_patch16_224": (64, {"img_size": 64, **SMALL}, 1, 16),
    "deit_tiny_distilled_patch16_224": (64, {"img_size": 64, **SMALL}, 2, 16),
    "vit_small_patch14_reg4_dinov2": (56, {"img_size": 56, **SMALL}, 5, 16),
    "vit_tiny_r_s16_p8_224": (128, {"img_size": 128, **SMALL}, 1, 16),
    "swin_tiny_patch4_window7_224": (128, {"img_size": 128, "window_size": 4, **SMALL_SWIN}, 0, 16),
    "test_convnext": (128, {}, 0, 16),
}
TOKENS = [name for name in BACKBONES if BACKBONES[name][2]]
HEADS = ("svpn", "mpncov+seb", "isqrt", "mpncov", "bcnn", "cbp")
VIT = TOKENS[0]


def create(name, head="mpncov", **options):
    torch.manual_seed(0)
    return create_model(name, **{"head": head, "num_classes": 3, "reduce": 6, **BACKBONES[name][1], **options})


def images(name, batch=2, dtype=torch.float32):
    size = BACKBONES[name][0]
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)


@functools.cache
def network(name, beside):
    return create(name, class_token="beside" if beside else None)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("name", "beside"), [*((n, False) for n in BACKBONES), *((n, True) for n in TOKENS)])
def test_contract(name, beside, head, tmp_path):
    model, x = network(name, beside), images(name)
    model.reset_classifier(3, global_pool=head)
    model.train()
    features = model.forward_features(x)
    assert features.shape[1] == model.num_features == model.head.in_channels * (1 + beside)
    assert math.prod(features.shape[2:]) == BACKBONES[name][3]
    vector = model.forward_head(features, pre_logits=True)
    assert vector.shape == (2, model.head_hidden_size)
    assert model.head_hidden_size == model.head.out_features + beside * model.class_token_channels
    nn.functional.cross_entropy(model(x), torch.tensor([0, 2])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    model.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        save_pretrained(model, tmp_path)
        assert torch.equal(from_pretrained(tmp_path)(x), expected)
        torch.testing.assert_close(model(x[:1]), expected[:1], rtol=1e-3, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.forward_head(model.forward_features(x), pre_logits=True).dtype == torch.float32
        model.reset_classifier(5)
        assert model(x).shape == (2, 5)
        model.reset_classifier(0)
        torch.testing.assert_close(model(x), model.forward_head(model.forward_features(x), pre_logits=True))


@pytest.mark.parametrize(("name", "head"), zip(BACKBONES, HEADS, strict=True))
def test_export(name, head):
    model = create(name, head, class_token="beside" if name in TOKENS else None).eval()
    x = images(name, 3)
    with torch.no_grad():
        scores = export_program(model, img_size=x.shape[-1]).module()(x)
        torch.testing.assert_close(scores, model(x), rtol=1e-4, atol=1e-5)
        if name != "vit_tiny_r_s16_p8_224":  # its padding branches on sizes, which torch.fx cannot trace
            torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("name", TOKENS)
def test_class_and_register_tokens_are_left_out_of_the_map_and_the_class_token_is_the_first(name):
    original = timm.create_model(name, **BACKBONES[name][1]).eval()
    plain, beside = create(name).eval(), create(name, class_token="beside").eval()
    prefix = BACKBONES[name][2]
    with torch.no_grad():
        for model in (plain, beside):
            model.backbone.load_state_dict({k: v for k, v in original.state_dict().items() if not k.startswith("head")})
        tokens = original.forward_features(images(name))
        assert tokens.shape[1] == prefix + 16
        fmap, none = plain.split_features(plain.forward_features(images(name)))
        torch.testing.assert_close(fmap.flatten(2).mT, tokens[:, prefix:])
        assert none is None
        fmap, class_token = beside.split_features(beside.forward_features(images(name)))
        torch.testing.assert_close(fmap.flatten(2).mT, tokens[:, prefix:])
        torch.testing.assert_close(class_token, tokens[:, 0])


@pytest.mark.parametrize("head", ["gap", "mpncov+seb"])
def test_scores_are_the_sum_of_two_classifiers(head):
    """One linear layer of both vectors is a classifier of each, whose scores are added; also the gradients."""
    model, x = create(VIT, head, class_token="beside").double().eval(), images(VIT, dtype=torch.float64)
    model.vector_scale.fill_(3.0)
    model.token_scale.fill_(0.5)
    tokens = model.backbone.forward_features(x)
    fmap = tokens[:, 1:].mT.unflatten(2, (4, 4))
    of_head, of_token = model.classifier.weight.split((model.head.out_features, 24), dim=1)
    expected = 3 * model.head(fmap) @ of_head.T + 0.5 * tokens[:, 0] @ of_token.T + model.classifier.bias
    torch.testing.assert_close(model(x), expected)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(expected.square().sum(), parameters)
    for got, wanted in zip(torch.autograd.grad(model(x).square().sum(), parameters), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)


def blocks_by_hooks(model, x):
    """Patch tokens (B, C, 4, 4) of every block, without the final norm, and that norm."""
    outputs = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: outputs.append(out)) for block in model.backbone.blocks]
    features = model.forward_features(x)
    for hook in hooks:
        hook.remove()
    return features, outputs


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("token_norm", [None, True, False])
@pytest.mark.parametrize("name", [VIT, "vit_small_patch14_reg4_dinov2"])
def test_blocks_with_and_without_the_final_norm(name, token_norm, stages, beside):
    options = {"depth": 3, "stages": stages, "token_norm": token_norm, "class_token": "beside" if beside else None}
    model, x = create(name, **options).eval(), images(name)
    norm = nn.LayerNorm(24, eps=1e-6)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
        if not isinstance(model.backbone.norm, nn.Identity):
            model.backbone.norm.load_state_dict(norm.state_dict())
        features, blocks = blocks_by_hooks(model, x)
        last = len(blocks) - 1
        normed = {None: {last}, True: set(range(3)), False: set()}[token_norm]
        parts = [norm(tokens) if number in normed else tokens for number, tokens in enumerate(blocks)][-stages:]
        maps = [tokens[:, BACKBONES[name][2] :].mT.unflatten(2, (4, 4)) for tokens in parts]
        if beside:
            maps.append(norm(blocks[-1])[:, 0, :, None, None].expand(-1, -1, 4, 4))
        torch.testing.assert_close(features, torch.cat(maps, dim=1))
    assert model.stage_channels == (24,) * stages
    nn.functional.cross_entropy(model.train()(x), torch.tensor([0, 2])).backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert isinstance(model.backbone.norm, nn.Identity) == (token_norm is False and not beside)


@pytest.mark.parametrize(
    "options",
    [
        {"class_token": "beside", "token_norm": False},
        {"class_token": "beside", "stages": 2, "token_norm": True},
        {"token_norm": False},
    ],
)
def test_options_are_kept_by_a_model_folder(options, tmp_path):
    model, x = create(VIT, **options).eval(), images(VIT)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert again.layout == model.layout
    assert again.config == model.config


def test_other_weights_of_the_backbone_reset_the_lengths(tmp_path):
    model = create(VIT, class_token="beside")
    model.vector_scale.fill_(3.0)
    model.token_scale.fill_(5.0)
    torch.save(dict(model.backbone.state_dict()), tmp_path / "vit.pth")
    load_weights(model, tmp_path / "vit.pth")
    assert model.vector_scale == model.token_scale == 1


def test_class_token_of_timm_itself(tmp_path):
    """A bool is timm's own option, for a network without one it adds a class token."""
    options = {"head": "gap", "num_classes": 3, "img_size": 64, **SMALL}
    for class_token, prefix in ((None, 4), (False, 4), (True, 5)):
        model = create_model("vit_medium_patch16_reg4_gap_256", class_token=class_token, **options).eval()
        assert model.layout == FeatureLayout("tokens", prefix)
        save_pretrained(model, tmp_path)
        assert from_pretrained(tmp_path).layout == model.layout


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("test_convnext", {"class_token": "beside"}, "class_token"),
        ("swin_tiny_patch4_window7_224", {"class_token": "beside"}, "class_token"),
        ("vit_medium_patch16_reg4_gap_256", {"class_token": "beside"}, "class_token"),
        (VIT, {"class_token": "inside"}, "class_token"),
        (VIT, {"class_token": "beside", "head": "lrbp"}, "class_token"),
        (VIT, {"class_token": "beside", "head": "", "num_classes": 0}, "class_token"),
        ("test_convnext", {"token_norm": False}, "token_norm"),
        ("swin_tiny_patch4_window7_224", {"token_norm": True}, "token_norm"),
        ("vit_medium_patch16_reg4_gap_256", {"token_norm": True}, "token_norm"),
    ],
)
def test_options_that_do_not_fit_are_refused(name, options, argument):
    own = BACKBONES[name][1] if name in BACKBONES else {"img_size": 64, **SMALL}
    with pytest.raises(ArgumentError) as caught:
        create_model(name, **{"head": "mpncov", "num_classes": 3, **own, **options})
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_a_head_that_is_refused_leaves_the_model_as_it_was():
    model, x = create(VIT, class_token="beside").eval(), images(VIT)
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(ArgumentError):
            model.reset_classifier(3, "lrbp")
        assert torch.equal(model(x), expected)
        assert model.config["head"] == "mpncov"
        model.reset_classifier(0, "")  # the map alone
        assert model(x).shape == (2, 24, 4, 4)
        assert model.head_hidden_size == 24


@pytest.mark.parametrize(
    ("backbone", "side", "grid", "channels"),
    [
        ("vit_base_patch16_224", 224, 14, 192),
        ("vit_base_patch16_224", 448, 28, 256),
        ("vit_base_patch14_reg4_dinov2", 518, 37, 256),
        ("vit_small_patch16_224", 224, 14, 192),
        ("vit_small_patch16_224", 448, 28, 384),
        ("vit_tiny_patch16_224", 224, 14, 192),
    ],
)
@pytest.mark.parametrize("class_token", [None, "beside"])
def test_positions_of_common_grids_and_the_channels_that_reduce_chooses(backbone, side, grid, channels, class_token):
    options = {"img_size": side, "depth": 1, "class_token": class_token}
    with torch.device("meta"):
        model = create_model(backbone, "mpncov+seb", 3, **options).eval()
        x = torch.empty(1, 3, side, side)
    features = model.forward_features(x)
    assert features.shape[2:] == (grid, grid) == model.pretrained_cfg["pool_size"]
    assert model.head.channels == channels
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShortRankWarning)
        model.warn_of_short_rank(features)
        if channels < 256:
            with torch.device("meta"):
                short = create_model(backbone, "mpncov+seb", 3, reduce=grid**2, **options)
            with pytest.raises(ShortRankWarning) as caught:
                short.warn_of_short_rank(features)
            assert (caught.value.channels, caught.value.positions) == (grid**2, grid**2)


@pytest.mark.parametrize("head", ["gap", "mpncov+seb", "svpn"])
def test_calibration_gives_both_vectors_one_length(head):
    model = create(VIT, head, class_token="beside")
    x = images(VIT, 16)
    before = model(x).detach()
    calibrate_vectors(model, [(x, torch.zeros(16))])
    vectors = model.train().forward_head(model.forward_features(x), pre_logits=True)
    of_head, of_token = vectors.split((model.head.out_features, 24), dim=1)
    lengths = [float(part.detach().square().sum(1).mean()) for part in (of_head, of_token)]
    assert lengths == pytest.approx([32**2 / 2] * 2, rel=1e-4)
    if min(model.vector_scale, model.token_scale) > 1:
        torch.testing.assert_close(model(x).detach(), before, rtol=1e-4, atol=1e-4)


def test_evaluation_of_subsets_counts_the_class_token():
    model = create(VIT, "mpncov", class_token="beside").eval()
    x, labels = images(VIT, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    own, top = evaluate(model, [(x, labels)], subsets=("own", "top:2"))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(x), labels)
        with model.head.keeping("top:2"):
            cut = nn.functional.cross_entropy(model(x), labels)
    assert own.loss == pytest.approx(float(expected), rel=1e-5)
    assert top.loss == pytest.approx(float(cut), rel=1e-5)
    assert own.loss != top.loss
