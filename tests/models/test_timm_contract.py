"""What timm's own tests require of a model, for backbones of 31 families and every head."""

import contextlib
import copy
import warnings
from itertools import pairwise

import numpy as np
import pytest
import timm
import torch
from timm.layers import create_feature_extractor, get_graph_node_names
from timm.models._features import FeatureGetterNet
from torch import nn

from eigengrain.errors import ArgumentError, ShortRankWarning
from eigengrain.heads import SpectralHead, create_head, list_heads
from eigengrain.models import create_model, from_pretrained, save_pretrained

pytestmark = pytest.mark.filterwarnings(f"ignore::{ShortRankWarning.__module__}.ShortRankWarning")

LAYERS = {"layers": (1, 1, 1, 1)}
DEPTHS = {"depths": (1, 1, 1, 1)}
VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}
SWIN = {"img_size": 64, "embed_dim": 24, "num_heads": (1, 2, 4, 8), **DEPTHS}
# the smallest network of each family, and options that make it smaller
BACKBONES = {
    "resnet18": LAYERS,
    "resnext50_32x4d": LAYERS,
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "vgg11_bn": {"mlp_ratio": 0.01},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_035": {},
    "test_efficientnet": {},
    "regnetx_002": {},
    "convnextv2_atto": DEPTHS,
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "beit_base_patch16_224": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "vit_tiny_r_s16_p8_224": VIT,
    "mixer_s32_224": {"img_size": 64},
    "coatnet_pico_rw_224": {"img_size": 64},
    "poolformer_s12": {},
    "test_nfnet": {},
    "dla46_c": {},
    "hrnet_w18_small": {},
    "ghostnet_050": {},
    "repvgg_a0": {},
    "levit_128s": {"img_size": 64},
    "edgenext_xx_small": {},
    "mobilevit_xxs": {},
    "xcit_nano_12_p16_224": {"depth": 2},
    "pvt_v2_b0": DEPTHS,
    "mambaout_femto": DEPTHS,
    "inception_next_atto": DEPTHS,
}
# timm cannot return their intermediate maps
WITHOUT_INTERMEDIATES = {"densenet121", "vgg11_bn", "test_nfnet", "dla46_c", "hrnet_w18_small"}
# they branch on sizes in functions that only timm's own tracer records as one node
NEED_TIMMS_TRACER = {"vit_tiny_r_s16_p8_224", "mobilevit_xxs"}
HEADS = ("gap", "mpncov+seb")
CLASSES = 5


def create(name, **options):
    torch.manual_seed(0)
    return create_model(name, **{"head": "gap", "num_classes": CLASSES, "reduce": 4, **BACKBONES.get(name, {}), **options})


@pytest.fixture(scope="module", params=BACKBONES)
def backbone(request):
    return request.param


@pytest.fixture(scope="module")
def shared(backbone):
    """One model per backbone, of which each test resets the head and may change nothing else."""
    return create(backbone)


@pytest.fixture(params=HEADS)
def model(request, shared):
    shared.reset_classifier(CLASSES, request.param)
    shared.zero_grad(set_to_none=True)
    return shared.eval()


@pytest.fixture(scope="module")
def x():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def check_gradients(module, inputs):
    """All parameters that are not frozen get a gradient from the mean of the scores."""
    module.train()
    scores = module(inputs)
    assert scores.shape == (2, CLASSES)
    assert scores.isfinite().all()
    scores.mean().backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def traced(model):
    """The model as a torch.fx graph, and its operations."""
    if model.config["backbone"] not in NEED_TIMMS_TRACER:
        graph_module = torch.fx.symbolic_trace(model)
        return graph_module, graph_module.graph
    (last,) = get_graph_node_names(model)[1][-1:]
    extractor = create_feature_extractor(model, [last])
    return lambda inputs: extractor(inputs)[last], extractor.graph


# ---------------------------------------------------------------- every backbone, two heads


def test_forward(model, x):
    with torch.no_grad():
        expected = model(x)
        assert expected.shape == (2, CLASSES)
        assert expected.isfinite().all()
        with contextlib.suppress(ArgumentError):  # not every backbone can
            model.set_grad_checkpointing()
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        model.set_grad_checkpointing(False)


def test_backward(model, x):
    check_gradients(model, x)


def test_reset(model, x):
    with torch.no_grad():
        fmap = model.forward_features(x)
        vector = model.forward_head(fmap, pre_logits=True)
        assert vector.shape == (2, model.head_hidden_size)
        model.reset_classifier(0)
        assert (model.num_classes, model.get_classifier().__class__) == (0, nn.Identity)
        assert torch.equal(model(x), vector)
        model.reset_classifier(0, "")
        assert torch.equal(model(x), fmap)
        assert torch.equal(model.forward_head(fmap, pre_logits=True), fmap)
        assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"backbone"}
        assert model.head_hidden_size == model.num_features


# ---------------------------------------------------------------- every backbone, one head


def test_cfg(shared):
    shared.reset_classifier(CLASSES, "mpncov")
    model = shared.eval()
    cfg, state = model.default_cfg, model.state_dict()
    assert cfg is model.pretrained_cfg
    assert timm.data.resolve_model_data_config(model)["input_size"] == cfg["input_size"]
    assert (model.num_classes, cfg["num_classes"]) == (CLASSES, CLASSES)
    first = cfg["first_conv"]
    for name in (cfg["classifier"], *((first,) if isinstance(first, str) else first)):
        assert name + ".weight" in state
    # the described sizes are those of the described images
    with torch.no_grad():
        fmap = copy.deepcopy(model).to("meta").forward_features(torch.empty(1, *cfg["input_size"], device="meta"))
    assert fmap.shape == (1, model.num_features, *cfg["pool_size"])
    assert model.head_hidden_size == model.get_classifier().in_features
    assert model.drop_rate == 0.0


def test_fx(shared, backbone, x):
    shared.reset_classifier(CLASSES, "gap")
    with torch.no_grad():
        graph_module, graph = traced(shared.eval())
        assert torch.equal(graph_module(x), shared(x))
    assert [node.target for node in graph.nodes if node.op == "call_module" and node.target.startswith("head")] == ["head"]
    shared.reset_classifier(CLASSES, "mpncov+seb")
    if backbone not in NEED_TIMMS_TRACER:
        shared.zero_grad(set_to_none=True)
        check_gradients(torch.fx.symbolic_trace(shared.train()), x)


def test_intermediates(shared, backbone, x):
    shared.reset_classifier(CLASSES, "gap")
    model = shared.eval()
    if backbone in WITHOUT_INTERMEDIATES:
        for method in (model.forward_intermediates, model.prune_intermediate_layers):
            with pytest.raises(ArgumentError) as caught:
                method(x)
            assert (caught.value.argument, caught.value.value) == ("backbone", backbone)
        return
    info = model.feature_info
    with torch.no_grad():
        features, maps = model.forward_intermediates(x)
        (last,) = model.forward_intermediates(x, indices=np.int64(1), intermediates_only=True)
        assert torch.equal(last, maps[-1])
        assert torch.equal(features, model.forward_features(x))
        assert [m.shape[1] for m in maps] == [entry["num_chs"] for entry in info]
        for fmap, entry in zip(maps, info, strict=True):
            assert all(side <= -(-64 // entry["reduction"]) + 1 for side in fmap.shape[2:])
            assert model.get_submodule(entry["module"]) is not None
        assert all(early.shape[2] >= late.shape[2] for early, late in pairwise(maps))
        only = model.forward_intermediates(x, indices=[0, -1], intermediates_only=True)
        assert all(map(torch.equal, only, (maps[0], maps[-1])))
        (first,) = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
        whole, (again,) = model.forward_intermediates(x, indices=[0], stop_early=True)  # the feature map needs all layers
        assert torch.equal(first, maps[0])
        assert torch.equal(again, maps[0])
        assert torch.equal(whole, features)
    for argument, value in (("indices", [len(info)]), ("indices", []), ("indices", 0), ("output_fmt", "XYZ")):
        with pytest.raises(ArgumentError) as caught:
            model.forward_intermediates(x, **{argument: value})
        assert (caught.value.argument, caught.value.value) == (argument, value)


@pytest.mark.slow
def test_export_and_feature_extraction(model, x):
    with torch.no_grad():
        expected, fmap = model(x), model.forward_features(x)
        torch.testing.assert_close(torch.export.export(model, (x,), strict=False).module()(x), expected)
        names = get_graph_node_names(model)[1]
        outputs = create_feature_extractor(model, ["head", names[-1]])(x)
        assert torch.equal(outputs["head"], model.head(fmap))
        assert torch.equal(outputs[names[-1]], expected)


# ---------------------------------------------------------------- every head on one network


@pytest.fixture(scope="module")
def small():
    return create("plumage_net")


@pytest.mark.parametrize("head", list_heads(any_backbone=True))
def test_every_head(small, head, x):
    small.reset_classifier(CLASSES, head)
    model = small.eval()
    assert model.default_cfg["num_classes"] == CLASSES
    with torch.no_grad():
        expected = model(x)
        graph_module = torch.fx.symbolic_trace(model)
        assert torch.equal(graph_module(x), expected)
        assert torch.equal(copy.deepcopy(graph_module)(x), expected)
        assert torch.equal(model.forward_intermediates(x)[0], model.forward_features(x))
        assert torch.equal(torch.export.export(model, (x,), strict=False).module()(x), expected)
    if isinstance(model.head, SpectralHead):
        with model.head.recording():  # a setting of the head, not of the graph
            assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)
        assert model.head.last_spectrum.eigenvalues.shape == (2, 4)
    small.zero_grad(set_to_none=True)
    check_gradients(torch.fx.symbolic_trace(model.train()), x)
    model.reset_classifier(0)
    assert model(x).shape == (2, model.head_hidden_size)
    model.reset_classifier(0, "")
    assert model(x).shape == (2, model.num_features, 8, 8)


def test_heads_are_traced_in_other_modules():
    """A head, and a classifier that is not linear, are leaves of any traced module."""
    head = create_head("gp", 6, class_rank=2)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), head, head.classifier(4))
    images = torch.randn(2, 3, 8, 8)
    graph_module = torch.fx.symbolic_trace(net)
    assert [node.target for node in graph_module.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    assert torch.equal(graph_module(images), net(images))


# ---------------------------------------------------------------- without pooling, intermediate maps, features of timm


@pytest.mark.parametrize("name", ["plumage_net", "vit_tiny_patch16_224", "tv:squeezenet1_1"])
def test_created_without_pooling(name, x, tmp_path):
    model = create(name, num_classes=0, global_pool="").eval()
    with torch.no_grad():
        fmap = model(x)
        assert torch.equal(fmap, model.forward_features(x))
        assert fmap.shape[:2] == (2, model.num_features)
        same = create(name, num_classes=0, head="").eval()
        assert torch.equal(same(x), fmap)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), fmap)
        assert torch.equal(torch.export.export(model, (x,), strict=False).module()(x), fmap)
        save_pretrained(model, tmp_path)
        again = from_pretrained(tmp_path)
        assert torch.equal(again(x), fmap)
    assert again.default_cfg["first_conv"] == model.default_cfg["first_conv"]
    for reset in ({"num_classes": 3}, {"num_classes": 3, "global_pool": ""}):
        with pytest.raises(ArgumentError) as caught:
            model.reset_classifier(**reset)
        assert (caught.value.argument, caught.value.value) == ("num_classes", 3)
    model.reset_classifier(3, "mpncov")
    assert model.eval()(x).shape == (2, 3)
    assert model.config["head"] == "mpncov"


@pytest.mark.parametrize(
    ("name", "options", "classes", "head"),
    [
        ("test_resnet", {"head": "mpncov"}, 3, "hcov"),  # of a single stage, which is not its default
        ("test_resnet", {"head": "hcov"}, 3, "mpncov"),  # of two stages
        ("test_resnet", {"head": "gap", "mid_level": 4}, 0, ""),
        ("vit_tiny_patch16_224", {"head": "mpncov", "class_token": "beside"}, 0, ""),
        ("vit_tiny_patch16_224", {"head": "mpncov"}, 3, "token"),  # without the reduction of the former head
        ("vit_tiny_patch16_224", {"head": "transfg", "reduce": None}, 3, "mpncov"),
    ],
)
def test_a_model_with_another_head_is_loaded_again(name, options, classes, head, x, tmp_path):
    model = create(name, **{"reduce": 6, **options}).eval()
    model.reset_classifier(classes, head)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert again.config["head"] == head
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    again.reset_classifier(5, "gap")
    assert again(x).shape == (2, 5)


def test_global_pool_names_a_head():
    with torch.device("meta"):
        assert create("test_resnet", head="gap", global_pool="mpncov").config["head"] == "mpncov"
        for options, argument in (
            ({"global_pool": ""}, "num_classes"),
            ({"global_pool": "", "num_classes": 0, "head_options": {"eps": 1}}, "head_options"),
        ):
            with pytest.raises(ArgumentError) as caught:
                create("test_resnet", **options)
            assert caught.value.argument == argument


@pytest.mark.parametrize("name", ["resnet18", "test_efficientnet"])
def test_feature_info_without_the_last_stride(name, x):
    reductions = [2, 4, 8, 16, 16]
    model = create(name, last_stride=1).eval()
    assert [entry["reduction"] for entry in model.feature_info] == reductions
    with torch.no_grad():
        maps = model.forward_intermediates(x, intermediates_only=True)
    assert [64 // fmap.shape[2] for fmap in maps] == reductions
    assert [entry["reduction"] for entry in model.backbone.feature_info] == [2, 4, 8, 16, 32]  # timm's own list is kept


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_features_of_timm(name, x):
    model = create(name, head="mpncov", **({"depth": 3} if name.startswith("vit") else {})).eval()
    last = len(model.feature_info) - 1
    with torch.no_grad():
        expected = model.forward_intermediates(x, indices=[0, last - 1], intermediates_only=True)
        parameters = sum(p.numel() for p in model.parameters())
        features = FeatureGetterNet(model, out_indices=(0, last - 1))
        assert all(map(torch.equal, features(x), expected))
    assert features.feature_info.channels() == [fmap.shape[1] for fmap in expected]
    assert sum(p.numel() for p in features.parameters()) < parameters  # what follows the last of them is removed


def test_output_formats_and_final_normalisation(x):
    model = create("vit_tiny_patch16_224").eval()
    with torch.no_grad():
        features, (normalised,) = model.forward_intermediates(x, indices=1, norm=True)
        assert torch.equal(normalised, features)
        (tokens,) = model.forward_intermediates(x, indices=1, norm=True, output_fmt="NLC", intermediates_only=True)
        assert torch.equal(tokens.transpose(1, 2).unflatten(2, (4, 4)), features)
    with pytest.raises(ArgumentError) as caught:
        model.forward_intermediates(torch.randn(1, 3, 32, 32))
    assert (caught.value.argument, caught.value.value) == ("x", (32, 32))


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_stacked_stages(name, x):
    model = create(name, head="hcov", stages=2, reduce=8).eval()
    with torch.no_grad():
        features, maps = model.forward_intermediates(x)
        assert torch.equal(features, model.forward_features(x))
        assert features.shape[1] == model.num_features == maps[-2].shape[1] + maps[-1].shape[1]
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_backbones_of_torchvision(x):
    model = create("tv:alexnet").eval()
    assert model.feature_info == []
    assert model.default_cfg["first_conv"] == "backbone.features.0"
    with torch.no_grad():
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
    with pytest.raises(ArgumentError) as caught:
        model.forward_intermediates(x)
    assert (caught.value.argument, caught.value.value) == ("backbone", "tv:alexnet")


@pytest.mark.parametrize("name", ["test_resnet", "vit_tiny_patch16_224"])
def test_checks_remain_outside_of_traces(name, x):
    model = create(name, head="mpncov").eval()
    torch.fx.symbolic_trace(model)
    with pytest.raises(ArgumentError):
        model(x[:, :2])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShortRankWarning)  # a trace has no positions to count
        model._rank_warned = False
        torch.fx.symbolic_trace(model)
    assert not model._rank_warned
