"""What every model can be relied on for, over the layouts and families of backbones, and timm's own tools on them."""

import copy
import warnings

import numpy as np
import pytest
import timm
import torch
from timm.data import resolve_data_config
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from torch import nn

from eigengrain.models import CovarianceNet, create_model, parameter_groups

# backbone: image size, options; every map has more than 5 positions, so that 4 channels have a covariance of full rank
CASES = {
    "resnet18": ((64, 96), {"zero_init_last": False}),
    "tv:alexnet": ((96, 128), {}),
    "vgg11_bn": ((64, 96), {"mlp_ratio": 0.01}),
    "tf_efficientnet_lite0": ((64, 96), {}),
    "convnext_atto": ((64, 96), {}),
    "vit_small_patch16_224": ((64, 64), {"img_size": 64}),
    "vit_tiny_patch16_224": ((32, 48), {"dynamic_img_size": True}),
    "swin_tiny_patch4_window7_224": ((64, 96), {"img_size": (64, 96)}),
}


def make(name, head="mpncov", num_classes=3, **more):
    torch.manual_seed(0)
    return create_model(name, head=head, num_classes=num_classes, **{"reduce": 4, **CASES[name][1], **more})


def images(name, batch=2):
    return torch.randn(batch, 3, *CASES[name][0], generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    model, x = make(name), images(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(model, CovarianceNet)

        # sizes are what was announced
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
            again = make(name, num_classes=3)
            for parameter in again.parameters():
                parameter.add_(1.0)
            again.load_state_dict(model.state_dict())
            assert torch.equal(again.eval()(x), expected)
            assert torch.equal(copy.deepcopy(model)(x), expected)

            # one image alone, another memory layout, half precision around the head
            torch.testing.assert_close(model(x[:1]), expected[:1], rtol=1e-3, atol=1e-4)
            last = copy.deepcopy(model).to(memory_format=torch.channels_last)
            torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), expected, rtol=1e-3, atol=1e-4)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model.forward_head(model.forward_features(x), pre_logits=True).dtype == torch.float32
                half = model(x)
            assert half.dtype == torch.bfloat16
            assert half.isfinite().all()
            torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())

            # another classifier, none, another head
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
        model = make(name)
    names = {parameter: layer for layer, parameters in _layers(model).items() for parameter in parameters}
    assert set(names) == {n for n, _ in model.named_parameters()}
    backbone = [layer for n, layer in names.items() if n.startswith("backbone.")]
    head = {layer for n, layer in names.items() if n.startswith("head.")}
    classifier = {layer for n, layer in names.items() if n.startswith("classifier.")}
    assert len(set(backbone)) > 3
    assert names[next(iter(names))] == min(backbone) == 0
    assert head == {max(backbone) + 1}
    assert classifier == {max(backbone) + 2}
    # the backbone's layers are those that timm has for the network alone, but for what timm leaves over
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


def test_group_matcher_of_every_kind():
    with torch.device("meta"):
        by_function = create_model("inception_v3", head="mpncov", num_classes=2)
        without = create_model("resnet18", head="mpncov", num_classes=2, reduce=4)
    layers = group_parameters(by_function, by_function.group_matcher(), reverse=True)
    assert layers["backbone.Conv2d_1a_3x3.conv.weight"] == 0
    assert layers["backbone.Mixed_7c.branch1x1.conv.weight"] < layers["head.reduce.0.weight"] < layers["classifier.weight"]
    without.backbone.group_matcher = None
    assert set(_layers(without)) == {0, 1, 2}


def test_no_weight_decay_names_exist():
    model = make("vit_small_patch16_224")
    listed = model.no_weight_decay()
    assert {"backbone.pos_embed", "backbone.cls_token"} <= listed
    model.head.no_weight_decay = lambda: {"reduce.1.weight"}
    assert "head.reduce.1.weight" in model.no_weight_decay()
    assert make("resnet18").no_weight_decay() == set()


def test_parameter_groups():
    model = make("vit_small_patch16_224")
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
    spared = {id(p) for g in selective if g["weight_decay"] == 0 for p in g["params"]}
    assert id(model.backbone.pos_embed) in spared  # three dimensions, but the backbone lists it
    assert all(id(p) in spared for p in model.parameters() if p.ndim < 2)
    assert id(model.head.reduce[0].weight) not in spared
    torch.optim.SGD(selective, momentum=0.9)
    with pytest.raises(ValueError, match="is for models of create_model"):
        parameter_groups(nn.Linear(2, 2), lr=0.1)


def test_timm_reads_the_model():
    model = make("swin_tiny_patch4_window7_224")
    data = resolve_data_config({}, model=model)
    assert data["input_size"] == (3, 64, 96)
    assert data["mean"] == (0.485, 0.456, 0.406)
    lite = resolve_data_config({}, pretrained_cfg=make("tf_efficientnet_lite0").pretrained_cfg)
    assert (lite["mean"], lite["std"], lite["interpolation"]) == ((0.5,) * 3, (0.5,) * 3, "bicubic")
    alex = make("tv:alexnet").pretrained_cfg
    assert (alex["architecture"], alex["crop_pct"], alex["num_classes"]) == ("tv:alexnet", 0.875, 3)
    optimiser = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    assert sum(len(g["params"]) for g in optimiser.param_groups) == len(list(model.parameters()))
    ema = timm.utils.ModelEmaV3(model)
    ema.update(model)


@pytest.mark.parametrize("name", ["resnet18", "tv:alexnet", "vit_tiny_patch16_224"])
def test_grad_checkpointing_changes_no_gradient(name):
    gradients = []
    for enable in (False, True):
        model = make(name, head="gap").double()
        model.set_grad_checkpointing(enable)
        model(images(name).double()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_grad_checkpointing_that_there_is_not():
    with torch.device("meta"):
        model = make("vgg11_bn")
    model.set_grad_checkpointing(False)
    with pytest.raises(ValueError, match="'vgg11_bn' has no gradient checkpointing"):
        model.set_grad_checkpointing()


def test_dropout_is_between_vector_and_classifier():
    model = make("resnet18", head="gap", drop_rate=0.5, reduce=None).train()
    fmap = torch.ones(4, 512, 2, 2)
    dropped = model.forward_head(fmap, pre_logits=True)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(model.eval().forward_head(fmap, pre_logits=True), torch.ones(4, 512))
    for wrong in (1.5, 1.0, -0.1, "half"):
        with torch.device("meta"), pytest.raises(ValueError, match="drop_rate must be a number from 0 to below 1, got"):
            make("resnet18", head="gap", drop_rate=wrong)


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
    model.reset_classifier(np.int64(4))  # as labels.max() + 1 is
    assert type(model.config["num_classes"]) is int
    assert model.get_classifier().out_features == 4
    for wrong in (-1, 2.0, True, np.float64(2), torch.tensor(2.5)):
        with pytest.raises(ValueError, match="num_classes must be a whole number"):
            model.reset_classifier(wrong)


@pytest.mark.parametrize("head", ["mpncov+seb", "gap", "lrbp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_whole_model_in_half_precision(dtype, head):
    model = make("resnet18", head=head).eval()
    x = images("resnet18")
    single = model(x)
    half = model.to(dtype)(x.to(dtype))
    assert torch.allclose(half.float(), single, atol=0.05)
    assert model.forward_head(model.forward_features(x.to(dtype)), pre_logits=True).dtype == torch.float32
    half.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_export_takes_the_model_whole_and_in_silence():
    model = make("resnet18", head="gap", reduce=None).eval()
    model.head.rank_sensitive = True  # as a covariance head of 512 channels would be
    x = images("resnet18")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the covariance of")
        exported = torch.export.export(model, (x,), strict=False)
        torch.testing.assert_close(exported.module()(x), torch.compile(model, backend="eager", fullgraph=True)(x))
    with pytest.warns(UserWarning, match="the covariance of 512 channels from 2 × 3 = 6 positions"):
        eager = model(x)
    torch.testing.assert_close(exported.module()(x), eager)
