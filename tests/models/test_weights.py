"""Loading files of several programs: what is matched, what is new, what is refused; and whole models in folders."""

import argparse
import copy
import functools
import json
import logging
import os
import re
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from eigengrain.errors import ArgumentError, FileError, WeightsError
from eigengrain.functional import EigenSubset
from eigengrain.models import create_model, from_pretrained, load_weights, pretrained, save_pretrained

# a bottleneck ResNet with one block per stage: all names of the large ones, little to compute
SHALLOW = {"layers": (1, 1, 1, 1)}


@functools.cache
def build(num_classes):
    torch.manual_seed(0)
    return create_model("resnet26", head="mpncov", num_classes=num_classes, reduce=4, **SHALLOW)


def tiny(num_classes=3):
    return copy.deepcopy(build(num_classes))


def other_values(model):
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(1)
    return model


def without_factor(model):
    """The state of a model as published files have it."""
    return {name: value for name, value in model.state_dict().items() if name != "vector_scale"}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def write(tensors, path):
    """Write a safetensors or PyTorch file, depending on the name."""
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


def test_network_inside_a_lightning_module_with_its_classifier(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("resnet26", num_classes=6, **SHALLOW).eval()
    state = {f"model.{k}": v for k, v in net.state_dict().items()}
    model = create_model("resnet26", head="gap", num_classes=6, **SHALLOW).eval()
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
    net = timm.create_model("resnet26", num_classes=1000, **SHALLOW)
    path = write(net.state_dict(), tmp_path / "net.safetensors")
    with caplog.at_level(logging.INFO, logger="eigengrain"):
        model = create_model("resnet26", head="mpncov", num_classes=3, reduce=4, weights=path, **SHALLOW)
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
    assert set(report.new) == {n for n in model.state_dict() if n.startswith(("head.", "classifier.")) and "num_b" not in n}
    assert len(str(report).splitlines()) == 3
    with pytest.raises(WeightsError) as error:
        load_weights(model, path, strict=True)
    assert (error.value.path, error.value.report) == (path, report)


def test_whole_network_with_its_classifier_for_average_pooling(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("resnet26", num_classes=6, **SHALLOW).eval()
    path = write(net.state_dict(), tmp_path / "net.pth")
    model = create_model("resnet26", head="gap", num_classes=6, **SHALLOW).eval()
    load_weights(model, path, strict=True)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x), net(x))
    report = load_weights(create_model("resnet26", head="gmp", num_classes=6, **SHALLOW), path)
    assert report.ignored == ("fc.bias", "fc.weight")  # the classifier was trained on averages, not on maxima


def test_the_factor_of_a_vector_comes_with_its_classifier(tmp_path):
    model = create_model("test_resnet", head="gap", num_classes=3, mid_level=2)
    model.vector_scale.fill_(4.0)
    model.mid_level.vector_scale.fill_(5.0)
    save_pretrained(model, tmp_path)
    for head, factors in {"gap": (4, 5), "bcnn": (1, 5)}.items():
        other = create_model("test_resnet", head=head, num_classes=3, mid_level=2)
        load_weights(other, tmp_path)
        assert (float(other.vector_scale), float(other.mid_level.vector_scale)) == factors


@pytest.mark.parametrize("name", ["test_convnext", "edgenext_xx_small", "poolformer_s12"])
def test_classifier_after_a_normalisation_is_not_loaded(tmp_path, name):
    """A normalisation between pooling and classifier is cut off with them, and the scores would differ without it."""
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


# Published MPN-COV networks, by the names in their files. The values come from one of our models, so that only the names
# are tested: loading must give that model again.


def split_network(model, representation=True):
    """Names of features (a sequence), representation or a reduction at the end of the sequence, and classifier."""
    names = {"conv1": "features.0", "bn1": "features.1", **{f"layer{i}": f"features.{i + 3}" for i in (1, 2, 3, 4)}}
    state = {}
    for name, value in without_factor(model).items():
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
    for name, value in without_factor(model).items():
        name = name.replace("head.reduce.0", "layer_reduce").replace("head.reduce.1", "layer_reduce_bn")
        state[name.replace("classifier.", "fc.").removeprefix("backbone.")] = value
    return state


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "rename",
    [split_network, lambda model: split_network(model, representation=False), own_class],
    ids=["split_network", "sequence", "class"],
)
def test_published_covariance_networks(tmp_path, rename, parallel):
    source, target = tiny(), other_values(tiny())
    state = rename(source)
    assert not any(name.startswith(("backbone.", "head.")) for name in state)
    if parallel:  # only the feature extractor was wrapped
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
    for name, value in without_factor(source).items():
        name = name.replace("head.reduce.", "representation.conv_dr_block.")
        state[name.removeprefix("backbone.")] = value
    target = other_values(copy.deepcopy(source))
    load_weights(target, write(state, tmp_path / "a.pth"), strict=True)
    assert equal(source.state_dict(), target.state_dict())


@pytest.mark.parametrize(
    "name, size, options",
    [
        ("vit_tiny_patch16_224", 64, {"depth": 2}),
        ("swin_tiny_patch4_window7_224", 128, {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}),
    ],
)
def test_positions_are_resized_to_the_model(tmp_path, name, size, options):
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=0, img_size=size, **options)
    path = write(net.state_dict(), tmp_path / "net.safetensors")
    model = create_model(name, head="gap", num_classes=2, img_size=96, weights=path, **options)
    report = load_weights(model, path)
    assert report.mismatched == report.ignored == ()
    assert all(n.startswith("classifier.") for n in report.new)
    first = next(n for n in net.state_dict() if n.startswith("patch_embed"))
    assert torch.equal(model.backbone.state_dict()[first], net.state_dict()[first])
    if name.startswith("vit"):
        before, after = net.pos_embed, model.backbone.pos_embed
        assert (before.shape[1], after.shape[1]) == (1 + 16, 1 + 36)
        assert torch.equal(before[:, 0], after[:, 0])  # the class token has no position


def refuse(path, model):
    """The FileError of loading a file, whose message is one line and names the file."""
    with pytest.raises(FileError) as error:
        load_weights(model, path)
    assert error.value.path == path
    assert "\n" not in str(error.value)
    return error.value


def test_damaged_and_other_files_are_refused(tmp_path):
    model = tiny()
    for whole in (
        write(model.state_dict(), tmp_path / "good.safetensors"),
        write(model.state_dict(), tmp_path / "good.pth"),
    ):
        damaged = tmp_path / f"damaged{whole.suffix}"
        for content in (whole.read_bytes()[: whole.stat().st_size // 2], b"", b"<html>not found</html>"):
            damaged.write_bytes(content)
            assert refuse(damaged, model).__cause__ is not None  # the reader's own error
    refuse(tmp_path / "missing.pth", model)
    refuse(write({"epoch": 3}, tmp_path / "empty.pth"), model)
    (tmp_path / "weights.h5").write_bytes(b"x")
    refuse(tmp_path / "weights.h5", model)
    error = refuse(write({"a": torch.zeros(3)}, tmp_path / "other.pth"), model)
    assert isinstance(error, WeightsError)
    assert error.report is None


def test_code_in_a_file_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    for content in (Trap(), argparse.Namespace(lr=0.1)):
        for new in (True, False):
            state = {"state_dict": {"a": torch.zeros(1)}, "args": content}
            torch.save(state, tmp_path / "code.pth", _use_new_zipfile_serialization=new)
            refuse(tmp_path / "code.pth", tiny())
    assert not (tmp_path / "trapped").exists()


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def test_less_than_half_of_a_network_is_refused(tmp_path):
    from torchvision.models import resnet18

    path, model = write(resnet18().state_dict(), tmp_path / "resnet18.pth"), tiny()
    before = copy.deepcopy(model.state_dict())
    error = refuse(path, model)
    matched = [name for name in error.report.matched if name.startswith("backbone.") and "num_batches" not in name]
    needed = [name for name in model.backbone.state_dict() if "num_batches" not in name]
    assert 0 < len(matched) < len(needed) / 2
    assert {str(len(matched)), str(len(needed))} <= set(error.problem.split())
    assert equal(before, model.state_dict())
    # one tensor that fits by chance
    one = next(iter(model.backbone.state_dict().items()))
    assert len(refuse(write(dict([one]), tmp_path / "one.safetensors"), model).report.matched) == 1


def test_files_of_other_networks_log_a_warning(tmp_path, caplog):
    most = {k: v for k, v in tiny().state_dict().items() if not k.startswith("backbone.layer4")}
    load_weights(tiny(), write(most, tmp_path / "most.pth"))
    [warning] = warnings_of(caplog)
    assert warning.args[1] == "resnet26"
    caplog.clear()
    deeper = create_model("resnet26", head="mpncov", num_classes=3, reduce=4, layers=(1, 2, 1, 3))
    load_weights(tiny(), write(deeper.state_dict(), tmp_path / "deeper.pth"))
    [warning] = warnings_of(caplog)
    assert warning.args[2] == "3 (layer2.1, layer4.1, …)"
    caplog.clear()
    load_weights(tiny(), write(tiny(200).state_dict(), tmp_path / "classes.pth"))
    assert not warnings_of(caplog)


def test_folder_of_timm_as_a_backbone(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("resnet26", num_classes=7, in_chans=1, **SHALLOW)
    timm.models.save_for_hf(net, tmp_path / "net", model_args={**SHALLOW, "in_chans": 1}, safe_serialization=True)
    model = create_model(f"local-dir:{tmp_path / 'net'}", head="gap", num_classes=2, pretrained=True)
    assert equal({k: v for k, v in net.state_dict().items() if not k.startswith("fc.")}, model.backbone.state_dict())
    assert model.config["backbone"] == "resnet26"
    assert model.pretrained_cfg["architecture"] == "resnet26"
    save_pretrained(model, tmp_path / "model")
    for file in (tmp_path / "net").iterdir():
        file.unlink()
    again = from_pretrained(tmp_path / "model")  # does not need the folder of the backbone
    assert equal(again.state_dict(), model.state_dict())
    for folder, path in (("net", tmp_path / "net" / "config.json"), ("model", tmp_path / "model")):  # empty; a whole model
        with pytest.raises(FileError) as error:
            create_model(f"local-dir:{tmp_path / folder}", head="gap")
        assert error.value.path == path


@pytest.mark.parametrize(
    "name, options, shape",
    [
        ("resnet26", {**SHALLOW, "last_stride": 1, "stride_on": "1x1", "head": "mpncov+seb", "reduce": 4}, (64, 96)),
        ("resnet26", {**SHALLOW, "head": "mpncov", "reduce": 4, "head_options": {"isometric": True}}, (96, 96)),
        ("test_vit", {"img_size": (32, 48), "head": "gmp", "reduce": None, "drop_rate": 0.1}, (32, 48)),
    ],
)
def test_whole_model_in_a_folder(tmp_path, name, options, shape):
    torch.manual_seed(0)
    model = create_model(name, num_classes=2, **options).eval()
    model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "crop_pct": 1.0}
    save_pretrained(model.to(memory_format=torch.channels_last), tmp_path / "m", class_names=["wren", "Zaunkönig"])
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = from_pretrained(tmp_path / "m")
    assert again.class_names == ["wren", "Zaunkönig"]
    assert again.pretrained_cfg == model.pretrained_cfg
    assert again.config == model.config
    assert not again.training
    x = torch.randn(2, 3, *shape)
    assert again.forward_features(x).shape == model.forward_features(x).shape
    torch.testing.assert_close(again(x), model(x))
    other = create_model(name, num_classes=2, **options, weights=tmp_path / "m")  # the folder also serves as weights
    assert equal(other.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    "made_with, kept",
    [(None, "top:2"), ("top:2", "top:2"), ("top:2", "top:1+last:1"), ("top:2", "all"), (EigenSubset.largest(2), "top:2")],
)
def test_subset_of_the_head_is_saved(tmp_path, made_with, kept):
    torch.manual_seed(0)
    options = {} if made_with is None else {"subset": made_with}
    model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4, head_options=options).eval()
    model.head.subset = kept  # may be set at any time
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert str(again.head.subset) == kept
    x = torch.randn(2, 3, 96, 96)
    assert torch.equal(again(x), model(x))
    assert model.config["head_options"] == options  # not changed


def test_subset_of_a_head_without_such_an_option(tmp_path, monkeypatch):
    """A foreign head needs only the contract: its subset is set after it is created."""
    from eigengrain.heads import SpectralHead, register_head, registry

    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))

    @register_head("foreign")
    class Foreign(SpectralHead):
        def __init__(self, in_channels, reduce=None):
            super().__init__(in_channels, reduce)
            self.out_features = self.channels

        def eigenvalues(self, reduced):
            x = reduced.flatten(2)
            return torch.linalg.eigvalsh(torch.cov(x[0])).flip(-1)[None].detach()

        def pool(self, x):
            return self.eigenvalues(x) * self.subset.mask(self.channels)

    model = create_model("test_resnet", head="foreign", num_classes=2, reduce=4)
    model.head.subset = "top:2"
    save_pretrained(model, tmp_path)
    assert str(from_pretrained(tmp_path).head.subset) == "top:2"
    config = json.loads((tmp_path / "config.json").read_text())
    for head, subset in (("gap", "top:2"), ("foreign", "top:9"), ("foreign", 7)):
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "subset": subset, "model": {**config["model"], "head": head}})
        )
        with pytest.raises(ValueError):
            from_pretrained(tmp_path)


def change_config(folder, **entries):
    """Change entries of ``config.json``; mappings are merged with those in the file."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in entries.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and isinstance(config.get(key), dict) else value
    path.write_text(json.dumps(config))


def test_folders_that_do_not_fit(tmp_path):
    def refuse_folder(name, kind):
        with pytest.raises(kind) as error:
            from_pretrained(tmp_path / name)
        return error.value

    model = tiny(num_classes=2)
    with pytest.raises(ArgumentError) as caught:
        save_pretrained(model, tmp_path / "m", class_names=["a", "b", "c"])
    assert (caught.value.argument, caught.value.value) == ("class_names", 3)
    assert refuse_folder("m", FileError).path == tmp_path / "m"
    save_pretrained(model, tmp_path / "run" / "model")
    assert str(tmp_path / "run" / "model") in refuse_folder("run", FileError).problem  # the folder of a training
    save_pretrained(model, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architecture"] == "resnet26"
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "label_names": ["a"]}))
    assert refuse_folder("m", ArgumentError).argument == "class_names"
    config["model"]["num_classes"] = 5
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert refuse_folder("m", WeightsError).path == tmp_path / "m" / "config.json"  # before it is built
    save_pretrained(create_model("test_resnet", head="gap", num_classes=2), tmp_path / "plain")
    change_config(tmp_path / "plain", model={"num_classes": 5})
    assert refuse_folder("plain", WeightsError).report.mismatched
    model.config["head_options"] = {"steps": object()}
    with pytest.raises(ArgumentError) as caught:
        save_pretrained(model, tmp_path / "n")
    assert caught.value.argument == "model"
    assert not (tmp_path / "n").exists()


# Real files, if EIGENGRAIN_WEIGHTS names a folder with resnet50, vgg16 and efficientnet_lite0 as .safetensors.


def real(name):
    path = Path(os.environ.get("EIGENGRAIN_WEIGHTS", "no-such-folder")) / f"{name}.safetensors"
    return path if path.is_file() else pytest.skip("EIGENGRAIN_WEIGHTS is not a folder with this file")


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
def test_config_that_does_not_describe_a_model(tmp_path, model):
    (tmp_path / "config.json").write_text(json.dumps({"model": model, "pretrained_cfg": {}}))
    with pytest.raises(ValueError):
        from_pretrained(tmp_path)


@functools.cache
def plain():
    return create_model("test_resnet", head="mpncov", reduce=4, num_classes=2)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "other.safetensors"},
        {"pretrained": True},
        {"checkpoint_path": "other.pth"},
        {"pretrained_cfg": {"file": "other.pth"}},
        {"layers": [{"deeper": [{"url": "https://x"}]}]},
        {"backbone": "hf-hub:timm/test_resnet"},
        {"backbone": "local-dir:/tmp"},
    ],
)
def test_config_cannot_lead_to_other_files_or_a_hub(tmp_path, change):
    save_pretrained(plain(), tmp_path)
    change_config(tmp_path, model=change)
    with pytest.raises(FileError) as error:
        from_pretrained(tmp_path)
    assert error.value.path == tmp_path / "config.json"


@pytest.mark.parametrize(
    "change",
    [
        *({"model": {"num_classes": value}} for value in (2_000_000_000, -1, 2.5, "2", True, None)),
        *({"model": {"reduce": value}} for value in (10_000_000, 0, "automatic")),
        *({"model": {"layers": value}} for value in ([10**5] * 4, [10**12] * 4, "many")),
        {"model": {"img_size": [100_000, 100_000]}},
        {"model": {"head_options": {"solver": "no"}}},
        {"model": {"head": "mpncov", "head_options": {"subset": 10**400}}},
        {"model": {"in_chans": 10**6, "head": "gap"}},
        *(
            {"pretrained_cfg": {"input_size": value}}
            for value in ([3, -5, 0], [3, 10**5, 10**5], [3, 64], "big", [3, 1.5, 2])
        ),
        *({"pretrained_cfg": {"std": value}} for value in ([0, 1, 1], [float("nan")] * 3, ["a"])),
        {"pretrained_cfg": {"file": "other.pth"}},
        *({"pretrained_cfg": {"crop_pct": value}} for value in (float("inf"), 1e-9)),
        {"label_names": [1, 2]},
        {"label_names": "ab"},
        {"calibration": {"temperature": 0}},
        *({"calibration": {"temperature": value}} for value in (float("nan"), 1e-300, 1e300)),
        {"calibration": {"accepted": 1.5}},
        {"calibration": {"code": "x"}},
        {"unknown": 1},
        {"subset": 7},
    ],
    ids=str,
)
def test_config_with_other_types_and_sizes_is_refused_before_the_model_is_built(tmp_path, change, monkeypatch):
    save_pretrained(plain(), tmp_path)
    change_config(tmp_path, **change)
    monkeypatch.setattr(pretrained, "load_weights", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(FileError) as error:
        from_pretrained(tmp_path)
    assert error.value.path == tmp_path / "config.json"
    assert "\n" not in str(error.value)


def test_calibration_is_kept(tmp_path):
    model = copy.copy(plain())
    model.calibration = {"temperature": 1.5, "familiarity_threshold": None, "accepted": 1.0}
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path).calibration
    assert {**loaded, **model.calibration} == loaded
    change_config(tmp_path, calibration=None)
    assert from_pretrained(tmp_path).calibration is None


def test_deep_and_large_config_is_refused(tmp_path):
    save_pretrained(plain(), tmp_path)
    for text in (
        "[" * 20_000 + "]" * 20_000,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        " " * (1 << 24) + "{}",
        "\xff",
        "[]",
        "{",
    ):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(FileError) as error:
            from_pretrained(tmp_path)
        assert error.value.path in (tmp_path, tmp_path / "config.json")


@pytest.mark.parametrize(
    "options",
    [
        {"act_layer": "nope"},
        {"layers": "abc"},
        {"layers": [1, 1]},
        {"stem_type": 3},
        {"output_stride": 7},
        {"layers": [1e9, 1, 1, 1]},
        {"in_chans": -1},
    ],
    ids=str,
)
def test_options_that_a_backbone_refuses(options):
    with pytest.raises(ArgumentError) as error:
        create_model("resnet18", head="gap", **options)
    [(name, value)] = options.items()
    assert (error.value.argument, error.value.value) in ((name, value), (name, 1e9))
    with pytest.raises(ArgumentError) as error:
        create_model("resnet18", head="gap", **options, drop_path_rate=0.1)
    assert error.value.argument in (name, "backbone_options")


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"])
def test_options_of_timm_that_lead_to_files_are_refused(option):
    with pytest.raises(ArgumentError) as error:
        create_model("test_resnet", head="gap", **{option: "file.pth"})
    assert error.value.argument == option


def test_models_larger_than_the_memory_are_refused():
    for options in ({"num_classes": 10**14}, {"reduce": 10**9}, {"layers": [10**6] * 4}):
        with pytest.raises(ArgumentError):
            create_model("test_resnet", **{"head": "gap", **options})
    create_model("test_resnet", head="gap")  # the limit is gone


def test_image_size_of_a_loop_of_ones_own_is_saved(tmp_path):
    def saved(model, **options):
        save_pretrained(model, tmp_path, **options)
        return from_pretrained(tmp_path).pretrained_cfg["input_size"]

    model = create_model("test_resnet", head="gap", num_classes=2)
    default = model.pretrained_cfg["input_size"]
    model.eval()(torch.zeros(1, 3, 40, 40))
    assert saved(model) == default  # an image that the model only classified
    model.train()(torch.zeros(2, 3, 64, 48))
    model.eval()(torch.zeros(1, 3, 40, 40))
    assert saved(model) == (3, 64, 48)
    assert saved(model, img_size=80) == (3, 80, 80)
    again = from_pretrained(tmp_path).train()
    assert saved(again) == (3, 80, 80)
    again(torch.zeros(2, 3, 96, 96))
    assert saved(again) == (3, 96, 96)
    again.pretrained_cfg["input_size"] = (3, 32, 32)  # set by hand
    assert saved(again) == (3, 32, 32)


# files that are larger than they look, or are not what they look like


def reaching_itself():
    state = {}
    state["state_dict"] = state
    return state


def nested(depth):
    state = {"a": torch.zeros(1)}
    for _ in range(depth):
        state = {"state_dict": state}
    return state


def with_attributes():
    state = OrderedDict(a=torch.zeros(1))
    state.get = state.keys = 3
    return state


def expanded():
    """A few numbers that claim to be a large tensor of each name."""
    return {name: torch.zeros(1, dtype=torch.half).expand(50_000, 50_000) for name in tiny().state_dict()}


def packed(tensor):
    """Numbers of which two are in a byte, under the shape of the tensor."""
    return torch.zeros(tensor.shape or (1,), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


HOSTILE = {
    "refers to itself": reaching_itself,
    "refers to itself further down": lambda: {"model": {"model": reaching_itself()}},
    "nested": lambda: nested(200),
    "attributes": with_attributes,
    "expanded": expanded,
    "meta": lambda: {"a": torch.empty(3, device="meta")},
    "sparse": lambda: {"a": torch.eye(3).to_sparse()},
    "quantised": lambda: {"a": torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)},
    "complex": lambda: {k: v.to(torch.complex64) for k, v in tiny().state_dict().items()},
    "integer": lambda: {k: v.int() for k, v in tiny().state_dict().items()},
    "bool": lambda: {k: v.bool() for k, v in tiny().state_dict().items()},
    "packed": lambda: {k: packed(v) for k, v in tiny().state_dict().items()},
    "bytes": lambda: {"a": torch.zeros(1), "b": bytearray(3)},
    "no names": lambda: {1: torch.zeros(3)},
    "a list": lambda: [torch.zeros(3)],
    "a tensor": lambda: torch.zeros(3),
    "names": lambda: {"a\x1b[2J\n" + "b" * 10**6: torch.zeros(3)},
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("new", [True, False], ids=["archive", "legacy"])
def test_hostile_checkpoints_are_refused(tmp_path, name, new):
    try:
        torch.save(HOSTILE[name](), tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    except (RuntimeError, NotImplementedError):
        pytest.skip("the old format cannot store it")
    error = refuse(tmp_path / "a.pt", tiny())
    assert len(str(error)) < 2000
    assert "\x1b" not in str(error)


def archive(path, tensor, **changes):
    """A checkpoint whose entries are written again, compressed or with another size of its storage."""
    torch.save({"a": tensor}, path)
    with zipfile.ZipFile(path) as whole:
        entries = {entry.filename: whole.read(entry) for entry in whole.infolist()}
    with zipfile.ZipFile(path, "w", **changes) as again:
        for name, content in entries.items():
            again.writestr(name, content)
    return path


def test_compressed_archives_are_refused(tmp_path):
    """A small file of zeros that would need any amount of memory."""
    error = refuse(archive(tmp_path / "a.pt", torch.zeros(10**6), compression=zipfile.ZIP_DEFLATED), tiny())
    assert not isinstance(error, WeightsError)  # refused before its tensors are read
    assert (tmp_path / "a.pt").stat().st_size < 10**5


def header(entries, data=b"\0" * 64, length=None):
    text = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "content",
    [
        header({}, length=1 << 62),
        header({}, length=1 << 25),
        header({"a": {**F32, "shape": [10**10, 10**10]}}),
        header({"a": {**F32, "shape": [-2, -2]}}),
        header({"a": {**F32, "shape": [2.0, 2.0]}}),
        header({"a": {**F32, "data_offsets": [0, 10**12]}}),
        header({"a": {**F32, "data_offsets": [1 << 62, (1 << 62) + 16]}}),
        header({"a": {**F32, "data_offsets": "ab"}}),
        header({"a": {**F32, "dtype": "F33"}}),
        header({"a": 3}),
        header({"a": F32, "b": F32}),  # the same bytes twice
        header(b"[" * 20_000),
        header(b"[]"),
        header(b"\xff{}"),
    ],
)
def test_hostile_headers_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    refuse(tmp_path / "model.safetensors", tiny())


def test_special_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    for name in ("pipe.pt", "zero.safetensors"):
        refuse(tmp_path / name, tiny())


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile, lambda m: torch.nn.DataParallel(torch.compile(m))])
def test_wrappers_of_a_model_are_not_saved(tmp_path, wrap):
    model = other_values(tiny())
    save_pretrained(wrap(model), tmp_path)
    read = from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value)


def test_a_pruned_model_is_refused(tmp_path):
    model = create_model("test_resnet", head="gap", num_classes=2)
    model.prune_intermediate_layers([0])
    with pytest.raises(ArgumentError) as error:
        save_pretrained(model, tmp_path)
    assert error.value.argument == "model"
    assert not list(tmp_path.iterdir())


def test_other_modules_and_existing_files_are_refused(tmp_path):
    with pytest.raises(ArgumentError) as error:
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    assert (error.value.argument, error.value.value) == ("model", "Linear")
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(FileError) as error:
            save_pretrained(tiny(), tmp_path / place)
        assert error.value.path == tmp_path / place


def test_suffix_in_capitals(tmp_path):
    saved, model = other_values(tiny()).state_dict(), tiny()
    torch.save(saved, tmp_path / "MODEL.PTH")
    load_weights(model, tmp_path / "MODEL.PTH")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
