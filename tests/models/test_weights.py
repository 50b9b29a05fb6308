"""Files of every origin into models: what is matched, what is new, what is refused."""

import argparse
import copy
import functools
import json
import logging
import os
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from eigengrain.functional import EigenSubset
from eigengrain.models import create_model, from_pretrained, load_weights, save_pretrained

BIG = {
    "layers": (1, 1, 1, 1)
}  # a bottleneck ResNet with one block a stage: every name of the large ones, little to compute


@functools.cache
def built(num_classes):
    torch.manual_seed(0)
    return create_model("resnet26", head="mpncov", num_classes=num_classes, reduce=4, **BIG)


def tiny(num_classes=3):
    return copy.deepcopy(built(num_classes))


def other_values(model):
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(1)
    return model


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def write(tensors, path):
    """As safetensors or as a PyTorch file, by the name."""
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".pth.tar"])
def test_checkpoint_of_the_same_model(tmp_path, suffix):
    source, target = tiny(), other_values(tiny())
    report = load_weights(target, write(source.state_dict(), tmp_path / f"a{suffix}"), strict=True)
    assert equal(source.state_dict(), target.state_dict())
    assert set(report.matched) == set(source.state_dict())
    assert report.new == report.ignored == report.mismatched == ()


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "model.", "model._orig_mod."])
def test_wrappers_and_prefixes(tmp_path, wrapper, prefix):
    source, target = tiny(), other_values(tiny())
    state = {prefix + k: v for k, v in source.state_dict().items()}
    path = write({wrapper: state, "epoch": 3, "optimizer": {"lr": [0.1]}}, tmp_path / "a.pth")
    load_weights(target, path, strict=True)
    assert equal(source.state_dict(), target.state_dict())


def test_network_that_a_training_module_held_with_its_classifier(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("resnet26", num_classes=6, **BIG).eval()
    state = {f"model.{k}": v for k, v in net.state_dict().items()}
    model = create_model("resnet26", head="gap", num_classes=6, **BIG).eval()
    load_weights(model, write({"state_dict": state, "global_step": 3}, tmp_path / "last.ckpt"), strict=True)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x), net(x))


def test_half_precision_becomes_single(tmp_path):
    source = tiny()
    half = {k: v.half() if v.is_floating_point() else v for k, v in source.state_dict().items()}
    target = other_values(tiny())
    load_weights(target, write(half, tmp_path / "half.safetensors"), strict=True)
    for name, value in target.state_dict().items():
        assert value.dtype == source.state_dict()[name].dtype
        assert torch.equal(value, half[name].to(value.dtype))


def test_backbone_alone(tmp_path, caplog):
    torch.manual_seed(5)
    net = timm.create_model("resnet26", num_classes=1000, **BIG)
    path = write(net.state_dict(), tmp_path / "net.safetensors")
    with caplog.at_level(logging.INFO, logger="eigengrain"):
        model = create_model("resnet26", head="mpncov", num_classes=3, reduce=4, weights=path, **BIG)
    assert equal({k: v for k, v in net.state_dict().items() if not k.startswith("fc.")}, model.backbone.state_dict())
    assert [r.getMessage() for r in caplog.records] == [
        f"net.safetensors: {len(model.backbone.state_dict())} tensors loaded",
        "not in the file, or in another shape: 7 (head.reduce.0.weight, head.reduce.1.weight, head.reduce.1.bias, "
        "head.reduce.1.running_mean, …)",
        "left over in the file: 2 (fc.bias, fc.weight)",
    ]
    report = load_weights(model, path)
    assert report.ignored == ("fc.bias", "fc.weight")
    assert report.mismatched == ()
    assert set(report.new) == {n for n in model.state_dict() if not n.startswith("backbone.") and "num_batches" not in n}
    assert len(str(report).splitlines()) == 3
    with pytest.raises(
        ValueError, match=r"strict loading: net\.safetensors: .* tensors loaded; not in the file, or in another shape: 7"
    ):
        load_weights(model, path, strict=True)


def test_whole_network_with_its_classifier_for_average_pooling(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("resnet26", num_classes=6, **BIG).eval()
    path = write(net.state_dict(), tmp_path / "net.pth")
    model = create_model("resnet26", head="gap", num_classes=6, **BIG).eval()
    load_weights(model, path, strict=True)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x), net(x))
    report = load_weights(create_model("resnet26", head="gmp", num_classes=6, **BIG), path)
    assert report.ignored == ("fc.bias", "fc.weight")  # the classifier was trained on averages, not on maxima


@pytest.mark.parametrize("name", ["test_convnext", "edgenext_xx_small", "poolformer_s12"])
def test_a_classifier_behind_another_layer_is_not_taken_for_one_of_averages(tmp_path, name):
    """A normalisation between pooling and classifier is cut off with them: scores without it would be others."""
    net = timm.create_model(name, num_classes=6)
    model = create_model(name, head="gap", num_classes=6)
    own = model.classifier.weight.detach().clone()
    report = load_weights(model, write(net.state_dict(), tmp_path / "net.pth"))
    assert set(report.ignored) == {"head.fc.bias", "head.fc.weight", "head.norm.bias", "head.norm.weight"}
    assert torch.equal(model.classifier.weight, own)


@pytest.mark.parametrize("name", ["mobilenet_v2", "mnasnet0_5", "efficientnet_b0", "swin_t", "shufflenet_v2_x0_5"])
def test_torchvision_network_with_its_classifier_for_average_pooling(tmp_path, name):
    from torchvision.models import get_model

    torch.manual_seed(5)
    net = get_model(name, num_classes=6).eval()
    model = create_model(f"tv:{name}", head="gap", num_classes=6).eval()
    load_weights(model, write(net.state_dict(), tmp_path / "net.pth"), strict=True)
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(x), net(x))


def test_torchvision_file_into_both_libraries(tmp_path):
    from torchvision.models import resnet18

    torch.manual_seed(5)
    net = resnet18().eval()
    path = write(net.state_dict(), tmp_path / "tv.pth")
    x = torch.randn(1, 3, 64, 64)
    for name in ("resnet18", "tv:resnet18"):
        model = create_model(name, head="gap", weights=path).eval()
        torch.testing.assert_close(model(x), net(x), rtol=1e-5, atol=1e-5)


# Published MPN-COV networks, by the names in their files. Values come from one of our models, so that names are all that
# is tested: what loads must be that model again.


def rebuilt(model, representation=True):
    """features (a sequence), representation or a reduction at the end of the sequence, classifier."""
    names = {"conv1": "features.0", "bn1": "features.1", **{f"layer{i}": f"features.{i + 3}" for i in (1, 2, 3, 4)}}
    state = {}
    for name, value in model.state_dict().items():
        part, _, rest = name.partition(".")
        if part == "backbone":
            first, _, rest = rest.partition(".")
            state[f"{names[first]}.{rest}"] = value
        elif part == "head":
            number, _, rest = rest.removeprefix("reduce.").partition(".")
            lead = f"representation.conv_dr_block.{number}" if representation else f"features.{8 + int(number)}"
            state[f"{lead}.{rest}"] = value
        else:
            state[name] = value
    return state


def own_class(model):
    state = {}
    for name, value in model.state_dict().items():
        name = name.replace("head.reduce.0", "layer_reduce").replace("head.reduce.1", "layer_reduce_bn")
        state[name.replace("classifier.", "fc.").removeprefix("backbone.")] = value
    return state


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "rename", [rebuilt, lambda model: rebuilt(model, representation=False), own_class], ids=["rebuilt", "sequence", "class"]
)
def test_published_covariance_networks(tmp_path, rename, parallel):
    source, target = tiny(), other_values(tiny())
    state = rename(source)
    assert not any(name.startswith(("backbone.", "head.")) for name in state)
    if parallel:  # only the feature extractor was wrapped there
        state = {re.sub(r"^features\.", "features.module.", name): value for name, value in state.items()}
    path = write({"epoch": 1, "arch": "resnet", "state_dict": state}, tmp_path / "checkpoint.pth.tar")
    load_weights(target, path, strict=True)
    assert equal(source.state_dict(), target.state_dict())
    other = tiny(num_classes=5)
    report = load_weights(other, path)
    assert {m.split()[0] for m in report.mismatched} == {"classifier.weight", "classifier.bias"}
    assert report.mismatched[0] == "classifier.weight (3, 10) instead of (5, 10)"
    assert report.new == report.ignored == ()


def test_published_vgg_network(tmp_path):
    torch.manual_seed(0)
    source = create_model("vgg11_bn", head="mpncov", reduce=4, num_classes=3, mlp_ratio=0.01)
    state = {}
    for name, value in source.state_dict().items():
        name = name.replace("head.reduce.", "representation.conv_dr_block.")
        state[name.removeprefix("backbone.")] = value
    target = other_values(copy.deepcopy(source))
    load_weights(target, write(state, tmp_path / "a.pth"), strict=True)
    assert equal(source.state_dict(), target.state_dict())


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_positions_are_resized_to_the_model(tmp_path, name):
    torch.manual_seed(0)
    size = {"vit_tiny_patch16_224": 64, "swin_tiny_patch4_window7_224": 128}[name]
    net = timm.create_model(name, num_classes=0, img_size=size)
    path = write(net.state_dict(), tmp_path / "net.safetensors")
    model = create_model(name, head="gap", num_classes=2, img_size=96, weights=path)
    report = load_weights(model, path)
    assert report.mismatched == report.ignored == ()
    assert all(n.startswith("classifier.") for n in report.new)
    first = next(n for n in net.state_dict() if n.startswith("patch_embed"))
    assert torch.equal(model.backbone.state_dict()[first], net.state_dict()[first])
    if name.startswith("vit"):
        before, after = net.pos_embed, model.backbone.pos_embed
        assert (before.shape[1], after.shape[1]) == (1 + 16, 1 + 36)
        assert torch.equal(before[:, 0], after[:, 0])  # the class token has no place to be resized


def test_wrong_files_are_one_line(tmp_path):
    model = tiny()

    def refused(path, pattern):
        with pytest.raises(ValueError, match=pattern) as error:
            load_weights(model, path)
        assert "\n" not in str(error.value)

    good = write(model.state_dict(), tmp_path / "good.safetensors")
    pickled = write(model.state_dict(), tmp_path / "good.pth")
    for whole, kind in ((good, "safetensors file"), (pickled, "PyTorch checkpoint")):
        part = tmp_path / f"part{whole.suffix}"
        part.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
        refused(part, f"is not a {kind}, or only a part of one")
        for content in (b"", b"<html>not found</html>"):
            part.write_bytes(content)
            refused(part, f"is not a {kind}, or only a part of one")
    code = tmp_path / "code.pth"
    torch.save({"state_dict": model.state_dict(), "args": argparse.Namespace(lr=0.1)}, code)
    refused(code, "would have to run code, which is refused")
    refused(tmp_path / "missing.pth", "there is no weights file")
    refused(write({"a": torch.zeros(3)}, tmp_path / "other.pth"), "nothing in .* fits the backbone 'resnet26'")
    refused(write({"epoch": 3}, tmp_path / "empty.pth"), "holds no named tensors")
    (tmp_path / "weights.h5").write_bytes(b"x")
    refused(tmp_path / "weights.h5", "are read from .safetensors or .pth")


def test_nothing_in_a_file_runs(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"state_dict": {"a": torch.zeros(1)}, "trap": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match="refused"):
        load_weights(tiny(), tmp_path / "trap.pth")
    assert not (tmp_path / "trapped").exists()


def test_another_network_is_told(tmp_path, caplog):
    from torchvision.models import resnet18

    with caplog.at_level(logging.WARNING, logger="eigengrain"):
        load_weights(tiny(), write(resnet18().state_dict(), tmp_path / "resnet18.pth"))
    assert "is it of this network?" in caplog.text


def test_folder_of_timm_as_a_backbone(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("resnet26", num_classes=7, in_chans=1, **BIG)
    timm.models.save_for_hf(net, tmp_path / "net", model_args={**BIG, "in_chans": 1}, safe_serialization=True)
    model = create_model(f"local-dir:{tmp_path / 'net'}", head="gap", num_classes=2, pretrained=True)
    assert equal({k: v for k, v in net.state_dict().items() if not k.startswith("fc.")}, model.backbone.state_dict())
    assert model.config["backbone"] == "resnet26"
    assert model.pretrained_cfg["architecture"] == "resnet26"
    save_pretrained(model, tmp_path / "model")
    for file in (tmp_path / "net").iterdir():
        file.unlink()
    again = from_pretrained(tmp_path / "model")  # does not need the folder that the backbone came from
    assert equal(again.state_dict(), model.state_dict())
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        create_model(f"local-dir:{tmp_path / 'net'}", head="gap")
    with pytest.raises(ValueError, match="holds a whole model, not a backbone: open it with from_pretrained"):
        create_model(f"local-dir:{tmp_path / 'model'}", head="gap")


@pytest.mark.parametrize(
    "name, options, shape",
    [
        ("resnet26", {**BIG, "last_stride": 1, "stride_on": "1x1", "head": "mpncov+seb", "reduce": 4}, (64, 96)),
        ("resnet26", {**BIG, "head": "mpncov", "reduce": 4, "head_options": {"isometric": True}}, (96, 96)),
        ("vit_tiny_patch16_224", {"img_size": (32, 48), "head": "gmp", "reduce": None, "drop_rate": 0.1}, (32, 48)),
    ],
)
def test_whole_model_in_a_folder(tmp_path, name, options, shape):
    torch.manual_seed(0)
    model = create_model(name, num_classes=2, **options).eval()
    model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "crop_pct": 1.0}
    save_pretrained(model.to(memory_format=torch.channels_last), tmp_path / "m", class_names=["wren", "Zaunkönig"])
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    again = from_pretrained(tmp_path / "m")
    assert again.class_names == ["wren", "Zaunkönig"]
    assert again.pretrained_cfg == model.pretrained_cfg
    assert again.config == model.config
    assert not again.training
    x = torch.randn(2, 3, *shape)
    assert again.forward_features(x).shape == model.forward_features(x).shape
    torch.testing.assert_close(again(x), model(x))
    other = create_model(name, num_classes=2, **options, weights=tmp_path / "m")  # the folder serves as weights, too
    assert equal(other.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    "made_with, kept",
    [(None, "top:2"), ("top:2", "top:2"), ("top:2", "top:1+last:1"), ("top:2", "all"), (EigenSubset.largest(2), "top:2")],
)
def test_the_eigenvalues_that_are_kept_are_saved(tmp_path, made_with, kept):
    torch.manual_seed(0)
    options = {} if made_with is None else {"subset": made_with}
    model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4, head_options=options).eval()
    model.head.subset = kept  # may be set at any time
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert str(again.head.subset) == kept
    x = torch.randn(2, 3, 96, 96)
    assert torch.equal(again(x), model(x))
    assert model.config["head_options"] == options  # as the model was made


def test_folders_that_do_not_fit(tmp_path):
    model = tiny(num_classes=2)
    with pytest.raises(ValueError, match="class_names must be as many as the classes, 2, got 3"):
        save_pretrained(model, tmp_path / "m", class_names=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"config\.json is missing or not as expected"):
        from_pretrained(tmp_path / "m")
    save_pretrained(model, tmp_path / "run" / "model")
    with pytest.raises(ValueError, match=r"config\.json is missing .*did you mean '.*run.model'"):
        from_pretrained(tmp_path / "run")  # the folder of a training
    save_pretrained(model, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architecture"] == "resnet26"
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "label_names": ["a"]}))
    with pytest.raises(ValueError, match="class_names must be as many as the classes, 2, got 1"):
        from_pretrained(tmp_path / "m")
    config["model"]["num_classes"] = 5
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="strict loading"):
        from_pretrained(tmp_path / "m")
    model.config["head_options"] = {"steps": object()}
    with pytest.raises(ValueError, match="must be plain values to be saved"):
        save_pretrained(model, tmp_path / "n")
    assert not (tmp_path / "n").exists()


# Real files, where they are: a folder with resnet50.safetensors, vgg16.safetensors, tf_efficientnet_lite0's names.


def real(name):
    path = Path(os.environ.get("EIGENGRAIN_WEIGHTS", "no-such-folder")) / f"{name}.safetensors"
    return path if path.is_file() else pytest.skip("EIGENGRAIN_WEIGHTS names no folder with this file")


def test_resnet50_with_the_stride_on_the_1x1():
    path = real("resnet50")
    model = create_model("resnet50", head="gap", num_classes=200, weights=path, stride_on="1x1")
    report = load_weights(model, path)
    assert report.ignored == ("fc.bias", "fc.weight")
    assert set(report.new) == {"classifier.weight", "classifier.bias"}
    assert report.mismatched == ()
    load_weights(create_model("resnet50", head="gap", stride_on="1x1"), path, strict=True)


def test_vgg16_convolutions():
    report = load_weights(create_model("vgg16", head="mpncov", num_classes=2, reduce=4, mlp_ratio=0.01), real("vgg16"))
    assert report.ignored == report.mismatched == ()
    assert not any(name.startswith("backbone.") for name in report.new)


def test_efficientnet_lite0_whole():
    load_weights(create_model("tf_efficientnet_lite0", head="gap"), real("efficientnet_lite0"), strict=True)


@pytest.mark.parametrize("model", [{}, {"backbone": 7}, {"backbone": "resnet18", "no_such_option": 1}])
def test_a_config_that_describes_no_model_is_one_clear_line(tmp_path, model):
    (tmp_path / "config.json").write_text(json.dumps({"model": model, "pretrained_cfg": {}}))
    with pytest.raises(ValueError):
        from_pretrained(tmp_path)


def test_a_config_cannot_lead_to_other_files_or_a_hub(tmp_path):
    save_pretrained(create_model("resnet18", head="gap", num_classes=2), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"] |= {"weights": "/no/such/file", "pretrained": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert from_pretrained(tmp_path).num_classes == 2


@pytest.mark.parametrize(
    "around", [torch.nn.DataParallel, torch.compile, lambda m: torch.nn.DataParallel(torch.compile(m))]
)
def test_what_is_put_around_a_model_is_not_saved(tmp_path, around):
    model = other_values(tiny())
    save_pretrained(around(model), tmp_path)
    read = from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value)


def test_models_that_are_none_and_places_that_are_taken(tmp_path):
    with pytest.raises(ValueError, match=r"save_pretrained takes a model of create_model, got Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match="there is a file in its place: name another"):
            save_pretrained(tiny(), tmp_path / place)


def test_the_end_of_a_name_in_capitals(tmp_path):
    saved, model = other_values(tiny()).state_dict(), tiny()
    torch.save(saved, tmp_path / "MODEL.PTH")
    load_weights(model, tmp_path / "MODEL.PTH")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_file_of_a_deeper_network_is_said(tmp_path, caplog):
    deeper = create_model("resnet26", head="mpncov", num_classes=3, reduce=4, layers=(1, 2, 1, 3))
    save_pretrained(deeper, tmp_path)
    load_weights(tiny(), tmp_path)
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.endswith("has more blocks than resnet26, 3 (layer2.1, layer4.1, …): is it of a deeper network?")
    caplog.clear()
    save_pretrained(tiny(200), tmp_path)
    load_weights(tiny(), tmp_path)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
