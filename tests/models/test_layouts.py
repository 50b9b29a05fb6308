"""Checkpoints in the layouts of other programs, written here from a small ViT of timm: the map is that of the ViT."""

import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from eigengrain.errors import FileError, WeightsError
from eigengrain.models import create_model, load_weights

#: a ViT with 16 patches
SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
VIT, DISTILLED = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
DINOV2, REGISTERS, GIANT = "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "vit_giant_patch14_dinov2"


def random_net(name, **changes):
    torch.manual_seed(3)
    net = timm.create_model(name, num_classes=5, **SMALL | changes).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.3)
    return net


def map_of(net, side):
    """The feature map of a ViT of timm for a fixed image, in float64."""
    net = net.double()
    x = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = net.forward_features(x)[:, net.num_prefix_tokens :]
    return tokens.transpose(1, 2).unflatten(2, (side // 16, side // 16))


def loaded_map(path, name, side=64, **changes):
    """The feature map of a model after loading, in float64."""
    model = create_model(name, head="gap", num_classes=2, **SMALL | {"img_size": side} | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    load_weights(model, path)
    x = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.double().eval().forward_features(x)


def hugging_face(net, prefix="", dinov2=False):
    """A state dict with the names of transformers; the classifier is left out."""
    named = {"cls_token": "cls_token", "dist_token": "distillation_token", "pos_embed": "position_embeddings"}
    named |= {"register_tokens": "register_tokens", "mask_token": "mask_token"}
    blocks = {"attn.proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}
    blocks |= {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    if dinov2:
        blocks = {"attn.proj": "attention.output.dense", "ls1.gamma": "layer_scale1.lambda1"}
        blocks |= {"ls2.gamma": "layer_scale2.lambda1", "mlp.w12": "mlp.weights_in", "mlp.w3": "mlp.weights_out"}
    state = {}
    for name, value in (net if isinstance(net, dict) else net.state_dict()).items():
        if name in named:
            state[f"{prefix}embeddings.{named[name]}"] = value
        elif name.startswith("patch_embed.proj."):
            state[f"{prefix}embeddings.patch_embeddings.projection.{name.rpartition('.')[2]}"] = value
        elif name.startswith("norm."):
            state[f"{prefix}layernorm.{name.rpartition('.')[2]}"] = value
        elif match := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(\w+)", name):
            for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                state[f"{prefix}encoder.layer.{match[1]}.attention.attention.{part}.{match[2]}"] = third
        elif match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
            rest = next((match[2].replace(k, v, 1) for k, v in blocks.items() if match[2].startswith(k)), match[2])
            state[f"{prefix}encoder.layer.{match[1]}.{rest}"] = value
    return state


def dinov2_hub(net):
    """A state dict with the names of the DINOv2 repository; the tokens are embedded with a position there."""
    state = {name: value for name, value in net.state_dict().items() if not name.startswith("head")}
    if "reg_token" in state:
        state["register_tokens"] = state.pop("reg_token")
        own = torch.randn_like(state["cls_token"])
        state["cls_token"] = state["cls_token"] - own
        state["pos_embed"] = torch.cat([own, state["pos_embed"]], dim=1)
    gated = isinstance(net.blocks[0].mlp, timm.layers.GluMlp)
    names = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"} if gated else {}
    for old, new in names.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    return {**state, "mask_token": torch.randn(1, 32)}


def google(net, big_vision=False, stacked=False, prefix=""):
    """Arrays with the names of Google's files."""
    state = {name: value.double().numpy() for name, value in net.state_dict().items()}
    heads, width = 2, 32
    attention, norm2, mlp = (0, 1, 0) if big_vision else (1, 2, 3)
    arrays = {
        "cls": state["cls_token"],
        "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    blocks = []
    for number in range(SMALL["depth"]):
        own = {
            name: state[f"blocks.{number}.{name}"] for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
        }
        block = {
            "LayerNorm_0/scale": own["norm1.weight"],
            "LayerNorm_0/bias": own["norm1.bias"],
            f"LayerNorm_{norm2}/scale": own["norm2.weight"],
            f"LayerNorm_{norm2}/bias": own["norm2.bias"],
        }
        here = f"MultiHeadDotProductAttention_{attention}"
        weights = np.split(state[f"blocks.{number}.attn.qkv.weight"], 3)
        biases = np.split(state[f"blocks.{number}.attn.qkv.bias"], 3)
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            block[f"{here}/{part}/kernel"] = weight.T.reshape(width, heads, width // heads)
            block[f"{here}/{part}/bias"] = bias.reshape(heads, width // heads)
        projection = state[f"blocks.{number}.attn.proj.weight"].T
        block[f"{here}/out/kernel"] = projection.reshape(heads, width // heads, width)
        block[f"{here}/out/bias"] = state[f"blocks.{number}.attn.proj.bias"]
        for layer in (0, 1):
            block[f"MlpBlock_{mlp}/Dense_{layer}/kernel"] = state[f"blocks.{number}.mlp.fc{layer + 1}.weight"].T
            block[f"MlpBlock_{mlp}/Dense_{layer}/bias"] = state[f"blocks.{number}.mlp.fc{layer + 1}.bias"]
        blocks.append(block)
    if stacked:
        arrays |= {f"Transformer/encoderblock/{name}": np.stack([block[name] for block in blocks]) for name in blocks[0]}
    else:
        for number, block in enumerate(blocks):
            arrays |= {f"Transformer/encoderblock_{number}/{name}": value for name, value in block.items()}
    return {prefix + name: value.astype(np.float32) for name, value in arrays.items()}


def save(tensors, path):
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    elif path.suffix == ".safetensors":
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path


def teacher(net):
    """A checkpoint of a training of DINO: a student and a teacher with other weights, which is the better one."""
    state = {f"module.backbone.{k}": v for k, v in net.state_dict().items() if not k.startswith("head")}
    head = {"module.head.mlp.0.weight": torch.randn(7, 32)}
    return {"student": {k: v + 1 for k, v in state.items()} | head, "teacher": {**state, **head}, "epoch": 3}


def deit3(net):
    return {"model": {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", k): v for k, v in net.state_dict().items()}}


#: layout -> network, options, suffix of the file, its content
LAYOUTS = {
    "timm": (VIT, {}, ".safetensors", lambda net: net.state_dict()),
    "hugging face vit": (VIT, {}, ".safetensors", lambda net: hugging_face(net, "vit.")),
    "hugging face vit, alone": (VIT, {}, ".bin", hugging_face),
    "hugging face deit": (DISTILLED, {}, ".safetensors", lambda net: hugging_face(net, "deit.")),
    "hugging face dinov2": (
        *(DINOV2, {}, ".safetensors"),
        lambda net: hugging_face(dinov2_hub(net), "dinov2.", dinov2=True),
    ),
    "hugging face dinov2 with registers": (
        *(REGISTERS, {}, ".safetensors"),
        lambda net: hugging_face(dinov2_hub(net), "dinov2_with_registers.", dinov2=True),
    ),
    "hugging face dinov2 giant": (GIANT, {}, ".safetensors", lambda net: hugging_face(dinov2_hub(net), dinov2=True)),
    "google": (VIT, {}, ".npz", google),
    "google, with the optimiser": (VIT, {}, ".npz", lambda net: google(net, prefix="opt/target/")),
    "google big vision": (VIT, {}, ".npz", lambda net: google(net, big_vision=True, prefix="params/")),
    "google big vision, stacked": (
        *(VIT, {}, ".npz"),
        lambda net: google(net, big_vision=True, stacked=True, prefix="params/img/"),
    ),
    "torch hub deit": (VIT, {}, ".pth", lambda net: {"model": net.state_dict()}),
    "torch hub deit, distilled": (DISTILLED, {}, ".pth", lambda net: {"model": net.state_dict()}),
    "torch hub deit 3": ("deit3_small_patch16_224", {}, ".pth", deit3),
    "torch hub dino": (VIT, {}, ".pth", lambda net: {k: v for k, v in net.state_dict().items() if "head" not in k}),
    "training of dino": (VIT, {}, ".pth", teacher),
    "torch hub dinov2": (DINOV2, {}, ".pth", dinov2_hub),
    "torch hub dinov2 with registers": (REGISTERS, {}, ".pth", dinov2_hub),
    "torch hub dinov2 giant": (GIANT, {}, ".pth", dinov2_hub),
}


@pytest.mark.parametrize("side", [64, 96])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_map_is_that_of_the_network(tmp_path, layout, side):
    name, options, suffix, written = LAYOUTS[layout]
    net = random_net(name, **options)
    path = save(written(net), tmp_path / f"weights{suffix}")
    if side != SMALL["img_size"]:
        net.set_input_size(img_size=(side, side))  # timm's own resampling of the positions
    difference = (loaded_map(path, name, side, **options) - map_of(net, side)).abs().max()
    assert difference <= 1e-6


@pytest.mark.parametrize("options", [{}, {"big_vision": True, "prefix": "params/"}, {"big_vision": True, "stacked": True}])
def test_the_files_of_google_are_those_that_timm_reads(tmp_path, options):
    net, other = random_net(VIT), timm.create_model(VIT, num_classes=5, **SMALL)
    path = save(google(net, **options), tmp_path / "a.npz")
    with torch.no_grad():
        other.load_pretrained(str(path))
    for name, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        (DISTILLED, VIT, {}),  # a distillation token that the network does not have
        (VIT, DISTILLED, {}),
        (REGISTERS, DINOV2, {}),
        (DINOV2, REGISTERS, {}),
        (REGISTERS, REGISTERS, {"reg_tokens": 2}),
    ],
)
@pytest.mark.parametrize("written", [lambda net: net.state_dict(), dinov2_hub], ids=["timm", "hub"])
def test_a_network_with_other_tokens_is_refused(tmp_path, source, target, options, written):
    path = save(written(random_net(source)), tmp_path / "a.pth")
    model = create_model(target, head="gap", num_classes=2, **SMALL, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError) as error:
        load_weights(model, path)
    assert error.value.report is not None
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_classifier_for_the_class_token_is_not_loaded(tmp_path):
    state = hugging_face(random_net(VIT), "vit.")
    state |= {"classifier.weight": torch.ones(2, 32), "classifier.bias": torch.ones(2)}
    model = create_model(VIT, head="gap", num_classes=2, **SMALL)
    own = model.classifier.weight.detach().clone()
    report = load_weights(model, save(state, tmp_path / "a.safetensors"))
    assert report.ignored == ("classifier.bias", "classifier.weight")
    assert torch.equal(model.classifier.weight, own)
    assert set(report.new) == {"classifier.weight", "classifier.bias"}


def test_parts_of_attention_that_are_missing_or_do_not_fit(tmp_path):
    state = hugging_face(random_net(VIT), "vit.")
    key = "vit.encoder.layer.1.attention.attention.key.weight"
    for change in (None, torch.zeros(32, 31), torch.zeros(3)):
        changed = {name: value for name, value in state.items() if name != key} | ({} if change is None else {key: change})
        model = create_model(VIT, head="gap", num_classes=2, **SMALL)
        report = load_weights(model, save(changed, tmp_path / "a.safetensors"))
        assert "backbone.blocks.1.attn.qkv.weight" in (*report.new, *(m.split()[0] for m in report.mismatched))
        assert "backbone.blocks.0.attn.qkv.weight" in report.matched


def test_only_known_tensors_are_split_into_blocks(tmp_path):
    strange = {"Transformer/encoderblock/strange": np.zeros((1000, 1))}
    arrays = google(random_net(VIT), big_vision=True, stacked=True) | strange
    report = load_weights(create_model(VIT, head="gap", num_classes=2, **SMALL), save(arrays, tmp_path / "a.npz"))
    assert [name for name in report.ignored if "strange" in name] == list(strange)


@pytest.mark.parametrize("layout", ["hugging face vit", "google", "torch hub dinov2"])
def test_less_than_half_of_a_network_is_refused(tmp_path, layout):
    name, options, suffix, written = LAYOUTS[layout]
    net = random_net(name, **options)
    content = written(net)
    few = dict(list(content.items())[: len(content) // 3])
    with pytest.raises(WeightsError):
        load_weights(create_model(name, head="gap", num_classes=2, **SMALL), save(few, tmp_path / f"a{suffix}"))
    deep = create_model(name, head="gap", num_classes=2, **SMALL | {"depth": 9})
    with pytest.raises(WeightsError):
        load_weights(deep, save(content, tmp_path / f"b{suffix}"))


class Trap:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def npz(path, header, values=b"\0" * 64):
    """An .npz file with one array that has any header."""
    text = header.encode()
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + values
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embedding/kernel.npy", content)
    return path


def test_hostile_arrays_are_refused(tmp_path):
    files = [tmp_path / f"{number}.npz" for number in range(20)]
    np.savez(files[0], a=np.array([Trap(str(tmp_path / "trapped"))], dtype=object))
    np.savez_compressed(files[1], a=np.zeros(10**7))
    np.savez(files[2], a=np.zeros(3, complex))
    np.savez(files[3], a=np.array(["text"]))
    np.savez(files[4], **google(random_net(VIT)))
    files[4].write_bytes(files[4].read_bytes()[:20_000])
    files[5].write_bytes(b"<html>not found</html>")
    files[6].write_bytes(b"")
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "single.npy").rename(files[7])
    shapes = ["(10**9,)", "(1000000000, 1000000000)", "(-1, -16)", "(4.0, 4)", "(16, 2)", "(__import__('os').mkdir('x'),)"]
    for file, shape in zip(files[8:], shapes, strict=False):
        npz(file, f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}")
    npz(files[14], "{'descr': '|O', 'fortran_order': False, 'shape': (8,)}")
    npz(files[15], "[" * 5000)
    model = create_model(VIT, head="gap", num_classes=2, **SMALL)
    for file in files[:16]:
        with pytest.raises(FileError) as error:
            load_weights(model, file)
        assert error.value.path == file
        assert "\n" not in str(error.value)
    assert not (tmp_path / "trapped").exists()


def test_arrays_in_other_byte_orders_and_layouts(tmp_path):
    net = random_net(VIT)
    arrays = {name: np.asfortranarray(value).astype(">f4") for name, value in google(net).items()}
    assert (loaded_map(save(arrays, tmp_path / "a.npz"), VIT) - map_of(net, 64)).abs().max() <= 1e-6


@pytest.mark.parametrize("side", [224, 448])
def test_deit_tiny(side):
    """The published weights of DeiT-Tiny, if EIGENGRAIN_WEIGHTS names a folder with them."""
    path = Path(os.environ.get("EIGENGRAIN_WEIGHTS", "no-such-folder")) / "deit_tiny_patch16_224.safetensors"
    if not path.is_file():
        pytest.skip("EIGENGRAIN_WEIGHTS is not a folder with this file")
    net = timm.create_model("deit_tiny_patch16_224").eval()
    net.load_state_dict(load_file(path))
    if side != 224:
        net.set_input_size(img_size=(side, side))
    model = create_model("deit_tiny_patch16_224", head="gap", num_classes=2, weights=path, img_size=side).double().eval()
    x = torch.randn(1, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        tokens = net.double().forward_features(x)[:, 1:]
        assert (model.forward_features(x).flatten(2).mT - tokens).abs().max() <= 1e-6
