"""The contract of models over the layouts and families of backbones, and timm's own tools on them."""

import copy
import functools
import warnings

import numpy as np
import pytest
import timm
import torch
from timm.data import resolve_data_config
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from torch import nn

from eigengrain.errors import ArgumentError, ShortRankWarning
from eigengrain.models import CovarianceNet, create_model, parameter_groups
from eigengrain.models.backbone import on_meta

VIT, SWIN = "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"
SMALL_VIT = {"embed_dim": 48, "depth": 4, "num_heads": 3}
SMALL_SWIN = {"embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)}
# backbone: image size, options; every map has more than 5 positions, so that 4 channels have a covariance of full rank
CASES = {
    "resnet18": ((64, 96), {"zero_init_last": False}),
    "tv:alexnet": ((96, 128), {}),
    "vgg11_bn": ((64, 96), {"mlp_ratio": 0.01}),
    "test_efficientnet": ((64, 96), {}),
    "test_convnext": ((64, 96), {}),
    "vit_small_patch16_224": ((64, 64), {"img_size": 64, **SMALL_VIT}),
    VIT: ((32, 48), {"dynamic_img_size": True, **SMALL_VIT}),
    SWIN: ((64, 96), {"img_size": (64, 96), **SMALL_SWIN}),
}


def create(name, **options):
    torch.manual_seed(0)
    return create_model(name, **{"head": "mpncov", "num_classes": 3, "reduce": 4, **CASES[name][1], **options})


build_once = functools.cache(create)


def make(name, **options):
    """A copy of a model that is built once."""
    return copy.deepcopy(build_once(name, **options))


def images(name, batch=2):
    return torch.randn(batch, 3, *CASES[name][0], generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    model, x = make(name), images(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(model, CovarianceNet)

        # sizes are as declared
        model.train()
        fmap = model.forward_features(x)
        assert fmap.shape[:2] == (2, model.num_features)
        vector = model.forward_head(fmap, pre_logits=True)
        assert vector.shape == (2, model.head_hidden_size) == (2, 10)
        scores = model.forward_head(fmap)
        assert scores.shape == (2, model.num_classes) == (2, 3)

        # every parameter gets a gradient, and every matrix and kernel one that is not zero
        nn.functional.cross_entropy(model(x), torch.tensor([0, 2])).backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
            assert parameter.ndim < 2 or parameter.grad.abs().max() > 0, parameter_name

        # the same model from its state, and as a copy
        model.eval()
        with torch.no_grad():
            expected = model(x)
            again = create(name)
            for parameter in again.parameters():
                parameter.add_(1.0)
            again.load_state_dict(model.state_dict())
            assert torch.equal(again.eval()(x), expected)
            assert torch.equal(copy.deepcopy(model)(x), expected)

            # one image, another memory format, half precision except in the head
            torch.testing.assert_close(model(x[:1]), expected[:1], rtol=1e-3, atol=1e-4)
            last = copy.deepcopy(model).to(memory_format=torch.channels_last)
            torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), expected, rtol=1e-3, atol=1e-4)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model.forward_head(model.forward_features(x), pre_logits=True).dtype == torch.float32
                half = model(x)
            assert half.dtype == torch.bfloat16
            assert half.isfinite().all()
            torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())

            # another classifier, no classifier, another head
            model.reset_classifier(5)
            assert model(x).shape == (2, 5) == (2, model.num_classes)
            assert model.get_classifier() is model.classifier
            model.reset_classifier(0)
            assert isinstance(model.get_classifier(), nn.Identity)
            assert torch.equal(model(x), model.forward_head(model.forward_features(x), pre_logits=True))
            model.reset_classifier(7, global_pool="gmp")
            assert model(x).shape == (2, 7)
            assert model.head_hidden_size == 4


@pytest.mark.parametrize("name", CASES)
def test_layers_in_order_for_layer_decay(name):
    with torch.device("meta"):
        model = create(name)
    names = {parameter: layer for layer, parameters in _layers(model).items() for parameter in parameters}
    assert set(names) == {n for n, _ in model.named_parameters()}
    backbone = [layer for n, layer in names.items() if n.startswith("backbone.")]
    head = {layer for n, layer in names.items() if n.startswith("head.")}
    classifier = {layer for n, layer in names.items() if n.startswith("classifier.")}
    assert len(set(backbone)) > 3
    assert names[next(iter(names))] == min(backbone) == 0
    assert head == {max(backbone) + 1}
    assert classifier == {max(backbone) + 2}
    # timm has the same layers for the backbone alone, except for the parameters that it does not match
    net_layers = group_parameters(model.backbone, model.backbone.group_matcher(coarse=False), reverse=True)
    last = max(net_layers.values())
    assert all(layer == names["backbone." + n] for n, layer in net_layers.items() if layer < last)
    groups = param_groups_layer_decay(
        model, weight_decay=0.1, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    )
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    scale = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    assert scale[id(model.classifier.weight)] == 1.0
    assert scale[id(model.head.reduce[0].weight)] == 0.5
    coarse = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert max(coarse.values()) <= max(names.values())


def _layers(model):
    return group_parameters(model, model.group_matcher())


def test_group_matchers_by_function_by_pattern_and_missing():
    with torch.device("meta"):
        by_function = create_model("inception_v3", head="mpncov", num_classes=2)
        without = create_model("resnet18", head="mpncov", num_classes=2, reduce=4)
    layers = group_parameters(by_function, by_function.group_matcher(), reverse=True)
    assert layers["backbone.Conv2d_1a_3x3.conv.weight"] == 0
    assert layers["backbone.Mixed_7c.branch1x1.conv.weight"] < layers["head.reduce.0.weight"] < layers["classifier.weight"]
    without.backbone.group_matcher = None
    assert set(_layers(without)) == {0, 1, 2}


def test_no_weight_decay():
    model = make(VIT)
    listed = model.no_weight_decay()
    assert {"backbone.pos_embed", "backbone.cls_token"} <= listed
    model.head.no_weight_decay = lambda: {"reduce.1.weight"}
    assert "head.reduce.1.weight" in model.no_weight_decay()
    assert make("resnet18").no_weight_decay() == set()


def test_parameter_groups():
    model = make(VIT)
    groups = parameter_groups(model, lr=0.01, weight_decay=1e-4, head_lr_scale=2, classifier_lr_scale=20)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("backbone", 0.01, 1e-4),
        ("head", 0.02, 1e-4),
        ("classifier", 0.2, 1e-4),
    ]
    for group in groups:
        assert {id(p) for p in group["params"]} == {id(p) for p in getattr(model, group["name"]).parameters()}
    selective = parameter_groups(model, lr=0.01, weight_decay=1e-4, decay_norms_and_biases=False)
    by_id = [id(p) for g in selective for p in g["params"]]
    assert sorted(by_id) == sorted(id(p) for p in model.parameters())
    assert {g["name"]: g["weight_decay"] for g in selective} == {
        **dict.fromkeys(("backbone", "head", "classifier"), 1e-4),
        **{f"{part}/no_decay": 0.0 for part in ("backbone", "head", "classifier")},
    }
    exempt = {id(p) for g in selective if g["weight_decay"] == 0 for p in g["params"]}
    assert id(model.backbone.pos_embed) in exempt  # three dimensions, but the backbone lists it
    assert all(id(p) in exempt for p in model.parameters() if p.ndim < 2)
    assert id(model.head.reduce[0].weight) not in exempt
    torch.optim.SGD(selective, momentum=0.9)
    with pytest.raises(ArgumentError) as error:
        parameter_groups(nn.Linear(2, 2), lr=0.1)
    assert error.value.argument == "model"


def test_timm_reads_the_model():
    model = make(SWIN)
    data = resolve_data_config({}, model=model)
    assert data["input_size"] == (3, 64, 96)
    assert data["mean"] == (0.485, 0.456, 0.406)
    lite_model = on_meta(lambda: create_model("tf_efficientnet_lite0", head="gap"))
    lite = resolve_data_config({}, pretrained_cfg=lite_model.pretrained_cfg)
    assert (lite["mean"], lite["std"], lite["interpolation"]) == ((0.5,) * 3, (0.5,) * 3, "bicubic")
    alex = make("tv:alexnet").pretrained_cfg
    assert (alex["architecture"], alex["crop_pct"], alex["num_classes"]) == ("tv:alexnet", 0.875, 3)
    optimiser = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    assert sum(len(g["params"]) for g in optimiser.param_groups) == len(list(model.parameters()))
    ema = timm.utils.ModelEmaV3(model)
    ema.update(model)


@pytest.mark.parametrize("name", ["resnet18", "tv:alexnet", VIT])
def test_grad_checkpointing_changes_no_gradient(name):
    gradients = []
    for enable in (False, True):
        model = make(name, head="gap").double()
        model.set_grad_checkpointing(enable)
        model(images(name).double()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_backbone_without_grad_checkpointing():
    with torch.device("meta"):
        model = create("vgg11_bn")
    model.set_grad_checkpointing(False)
    with pytest.raises(ArgumentError) as error:
        model.set_grad_checkpointing()
    assert (error.value.argument, error.value.value) == ("backbone", "vgg11_bn")


def test_dropout_is_between_vector_and_classifier():
    model = make("resnet18", head="gap", drop_rate=0.5, reduce=None).train()
    fmap = torch.ones(4, 512, 2, 2)
    dropped = model.forward_head(fmap, pre_logits=True)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(model.eval().forward_head(fmap, pre_logits=True), torch.ones(4, 512))
    for wrong in (1.5, 1.0, -0.1, "half"):
        with torch.device("meta"), pytest.raises(ArgumentError) as error:
            create("test_convnext", head="gap", drop_rate=wrong)
        assert (error.value.argument, error.value.value) == ("drop_rate", wrong)


def test_reset_follows_device_dtype_and_mode():
    model = make("resnet18").double().eval()
    model.class_names = ["a", "b", "c"]
    model.reset_classifier(3, "mpncov+seb")
    assert model.class_names == ["a", "b", "c"]
    assert model.config["head"] == "mpncov+seb"
    assert not any(m.training for m in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    model.reset_classifier(2)
    assert model.class_names is None
    assert model.pretrained_cfg["num_classes"] == model.config["num_classes"] == 2
    model.reset_classifier(np.int64(4))  # such as labels.max() + 1
    assert type(model.config["num_classes"]) is int
    assert model.get_classifier().out_features == 4
    for wrong in (-1, 2.0, True, np.float64(2), torch.tensor(2.5)):
        with pytest.raises(ArgumentError) as error:
            model.reset_classifier(wrong)
        assert error.value.argument == "num_classes"


@pytest.mark.parametrize("head", ["mpncov+seb", "gap", "lrbp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_model_in_half_precision(dtype, head):
    model = make("test_efficientnet", head=head).eval()
    x = images("test_efficientnet")
    single = model(x)
    half = model.to(dtype)(x.to(dtype))
    assert torch.allclose(half.float(), single, rtol=0, atol=0.05)
    assert model.forward_head(model.forward_features(x.to(dtype)), pre_logits=True).dtype == torch.float32
    half.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_export_and_compile_do_not_warn():
    model = make("resnet18", head="gap", reduce=None).eval()
    model.head.rank_sensitive = True  # like a covariance head of 512 channels
    x = images("resnet18")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShortRankWarning)
        exported = torch.export.export(model, (x,), strict=False)
        torch.testing.assert_close(exported.module()(x), torch.compile(model, backend="eager", fullgraph=True)(x))
    with pytest.warns(ShortRankWarning) as caught:
        eager = model(x)
    assert (caught[0].message.channels, caught[0].message.positions) == (512, 6)
    torch.testing.assert_close(exported.module()(x), eager)
