r"""Names of tensors in the files of several programs, and how they become those of a model.

A :class:`Layout` recognises a file by the names in it and converts them. A layout of transformers is a list of rules from a
pattern to a name in timm's network:

===================== ============================================ ===============================
program               in the file                                  in the model
===================== ============================================ ===============================
timm, torch hub       ``blocks.0.attn.qkv.weight``                 ``backbone.blocks.0.attn.qkv.weight``
Hugging Face          ``vit.encoder.layer.0.attention.attention.`` the same; query, key and value
                      ``query.weight``                             are joined
Google, flax          ``Transformer/encoderblock_0/MultiHead…_1/`` the same; joined and transposed
                      ``query/kernel``
===================== ============================================ ===============================
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eigengrain.models.model import CovarianceNet

BACKBONE = "backbone."

#: name in the file -> tensor
Tensors = dict[str, Tensor]
#: name in the file -> name in the model
Renaming = Callable[[str], str]
#: name in the model -> name in the file, tensor
Reading = dict[str, tuple[str, Tensor]]

#: largest number of blocks in a tensor that stacks those of a network
_MAX_BLOCKS = 1000


@dataclass(frozen=True)
class Layout:
    """A naming of tensors.

    Args:
        title: programs that write such files.
        recognises: whether a file with these names may have the layout, for a model.
        convert: the tensors by their names in the model; those that it does not know get a name that no model has.
    """

    title: str
    recognises: Callable[[Collection[str], CovarianceNet], bool]
    convert: Callable[[Tensors, CovarianceNet], Reading]


@dataclass(frozen=True)
class Rule:
    """The name of a tensor in timm's network for names in a file that match a pattern.

    The tensors of several rules with the same ``name`` are joined along their first dimension in the order of the rules.

    Args:
        pattern: regular expression of the whole name in the file, without ``prefix``.
        name: template of the name in the network, with the groups of the pattern.
        form: conversion of the tensor.
    """

    pattern: str
    name: str
    form: Callable[[Tensor], Tensor] = lambda tensor: tensor


def rename(tensors: Tensors, renaming: Renaming) -> Reading:
    """The tensors of a file under other names."""
    return {renaming(name): (name, tensor) for name, tensor in tensors.items()}


def apply_rules(tensors: Tensors, rules: Collection[Rule], prefix: str = "") -> Reading:
    """The tensors of a file under the names of timm's network; ``prefix`` is a pattern before the names in the file.

    Tensors that no rule knows get names that no model has, and so do parts of which another one is missing.

    Example:
        >>> rules = [Rule(rf"{k}\\.(\\w+)", r"qkv.\\1") for k in ("query", "key")]
        >>> reading = apply_rules({"vit.key.bias": torch.ones(1), "vit.query.bias": torch.zeros(1)}, rules, r"vit\\.")
        >>> reading["backbone.qkv.bias"]
        ('vit.query.bias, vit.key.bias', tensor([0., 1.]))
    """
    matchers = _compile(rules, prefix)
    parts: dict[str, list[tuple[int, str, Tensor]]] = {}
    needed: dict[str, int] = {}
    reading: Reading = {}

    def leave(name: str, tensor: Tensor) -> None:
        reading[f"left over: {name}"] = name, tensor

    for name, tensor in tensors.items():
        matches = ((place, rule, match) for place, (p, rule) in enumerate(matchers) if (match := p.fullmatch(name)))
        place, rule, match = next(matches, (0, None, None))
        if rule is None or match is None:
            leave(name, tensor)
            continue
        target = BACKBONE + match.expand(rule.name)
        parts.setdefault(target, []).append((place, name, tensor))
        needed[target] = sum(other.name == rule.name for other in rules)
    for target, group in parts.items():
        group.sort(key=lambda part: part[0])
        try:
            forms = [matchers[place][1].form(tensor) for place, _, tensor in group]
            whole = forms[0] if len(forms) == 1 else torch.cat(forms)
        except (RuntimeError, IndexError):  # parts that do not fit together, or a tensor of another rank
            whole = None
        if whole is None or len(group) != needed[target]:
            for _, name, tensor in group:
                leave(name, tensor)
        else:
            reading[target] = ", ".join(name for _, name, _ in group), whole
    return reading


def _compile(rules: Collection[Rule], prefix: str) -> list[tuple[re.Pattern[str], Rule]]:
    return [(re.compile(f"(?:{prefix})?{rule.pattern}"), rule) for rule in rules]


def with_part(part: str) -> Callable[[Collection[str], CovarianceNet], bool]:
    """Recognises files in which a name begins with ``part`` and a dot."""
    return lambda names, _: any(name.partition(".")[0] == part for name in names)


def with_name(pattern: str) -> Callable[[Collection[str], CovarianceNet], bool]:
    """Recognises files with a name that matches a pattern."""
    return lambda names, _: any(re.fullmatch(pattern, name) for name in names)


def _anything(names: Collection[str], model: CovarianceNet) -> bool:
    return True


def _renamed(renaming: Renaming) -> Callable[[Tensors, CovarianceNet], Reading]:
    return lambda tensors, _: rename(tensors, renaming)


# MPN-COV networks split into features, representation and classifier: a ResNet is a plain sequence there, with the
# reduction at its end if the network was pretrained with it
_RESNET_SEQUENCE = {
    "0": "backbone.conv1",
    "1": "backbone.bn1",
    "8": "head.reduce.0",
    "9": "head.reduce.1",
    **{str(stage + 3): f"backbone.layer{stage}" for stage in (1, 2, 3, 4)},
}
_REDUCTION = re.compile(r"representation\.conv_dr_block\.(\d+)\.")
# the same networks as a class of their own
_OWN_CLASS = {"layer_reduce": "head.reduce.0", "layer_reduce_bn": "head.reduce.1", "fc": "classifier"}


def into_backbone(name: str) -> str:
    return BACKBONE + name


def _from_sequence(name: str) -> str:
    return BACKBONE + name if name.startswith("features.") else _REDUCTION.sub(r"head.reduce.\1.", name)


def _from_resnet_sequence(name: str) -> str:
    part, number, rest = (*name.split(".", 2), "", "")[:3]
    if part == "features":
        return f"{_RESNET_SEQUENCE[number]}.{rest}" if number in _RESNET_SEQUENCE else name
    return _from_sequence(name)


def _from_own_class(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"{_OWN_CLASS[part]}.{rest}" if part in _OWN_CLASS else BACKBONE + name


def _fits_own_classifier(names: Collection[str], model: CovarianceNet) -> bool:
    """Whether the file's own classifier fits ours: after average pooling, if no layer between the two was cut off."""
    original = model.backbone_classifier
    others = {name.partition(".")[0] for name in names if name.rpartition(".")[0] != original}
    removed = {name for name, child in model.backbone.named_children() if isinstance(child, nn.Identity)}
    averages = model.config["head"] == "gap" and model.layout.kind == "NCHW"
    return bool(averages and original) and others.isdisjoint(removed)


def _with_classifier(tensors: Tensors, model: CovarianceNet) -> Reading:
    def renaming(name: str) -> str:
        module, _, parameter = name.rpartition(".")
        return f"classifier.{parameter}" if module == model.backbone_classifier else BACKBONE + name

    return rename(tensors, renaming)


# Hugging Face transformers: ViT and DeiT name the layers of a block differently from DINOv2
_BLOCK = r"encoder\.layer\.(\d+)\."
_HUGGING_FACE = (
    Rule(r"embeddings\.cls_token", "cls_token"),
    Rule(r"embeddings\.distillation_token", "dist_token"),
    Rule(r"embeddings\.mask_token", "mask_token"),
    Rule(r"embeddings\.register_tokens", "register_tokens"),
    Rule(r"embeddings\.position_embeddings", "pos_embed"),
    Rule(r"embeddings\.patch_embeddings\.projection\.(\w+)", r"patch_embed.proj.\1"),
    *(
        Rule(rf"{_BLOCK}attention\.attention\.{part}\.(\w+)", r"blocks.\1.attn.qkv.\2")
        for part in ("query", "key", "value")
    ),
    Rule(_BLOCK + r"attention\.output\.dense\.(\w+)", r"blocks.\1.attn.proj.\2"),
    Rule(_BLOCK + r"layernorm_before\.(\w+)", r"blocks.\1.norm1.\2"),
    Rule(_BLOCK + r"layernorm_after\.(\w+)", r"blocks.\1.norm2.\2"),
    Rule(_BLOCK + r"(?:intermediate\.dense|mlp\.weights_in)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
    Rule(_BLOCK + r"(?:output\.dense|mlp\.weights_out)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
    Rule(_BLOCK + r"(norm[12]|mlp\.fc[12])\.(\w+)", r"blocks.\1.\2.\3"),
    Rule(_BLOCK + r"layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    Rule(r"layernorm\.(\w+)", r"norm.\1"),
)


# Google's files: kernels have their outputs last, and heads are a dimension of their own
def _dense(kernel: Tensor) -> Tensor:
    return kernel.mT


def _from_heads(kernel: Tensor) -> Tensor:
    return kernel.flatten(1).T


def _into_heads(kernel: Tensor) -> Tensor:
    return kernel.flatten(0, -2).T


def _convolution(kernel: Tensor) -> Tensor:
    return kernel.permute(3, 2, 0, 1)


def _google_rules(attention: int, norm2: int, mlp: int) -> Iterator[Rule]:
    """Rules for the layers of a block, which are counted in the order of their creation."""
    block, heads = r"Transformer/encoderblock_(\d+)/", f"MultiHeadDotProductAttention_{attention}/"
    for number, norm in ((1, 0), (2, norm2)):
        yield Rule(f"{block}LayerNorm_{norm}/scale", rf"blocks.\1.norm{number}.weight")
        yield Rule(f"{block}LayerNorm_{norm}/bias", rf"blocks.\1.norm{number}.bias")
    for part in ("query", "key", "value"):
        yield Rule(f"{block}{heads}{part}/kernel", r"blocks.\1.attn.qkv.weight", _from_heads)
        yield Rule(f"{block}{heads}{part}/bias", r"blocks.\1.attn.qkv.bias", torch.flatten)
    yield Rule(f"{block}{heads}out/kernel", r"blocks.\1.attn.proj.weight", _into_heads)
    yield Rule(f"{block}{heads}out/bias", r"blocks.\1.attn.proj.bias")
    for number in (0, 1):
        yield Rule(f"{block}MlpBlock_{mlp}/Dense_{number}/kernel", rf"blocks.\1.mlp.fc{number + 1}.weight", _dense)
        yield Rule(f"{block}MlpBlock_{mlp}/Dense_{number}/bias", rf"blocks.\1.mlp.fc{number + 1}.bias")


_GOOGLE = (
    Rule("cls", "cls_token"),
    Rule("(?:Transformer/posembed_input/)?pos_embedding", "pos_embed"),
    Rule("embedding/kernel", "patch_embed.proj.weight", _convolution),
    Rule("embedding/bias", "patch_embed.proj.bias"),
    Rule("Transformer/encoder_norm/scale", "norm.weight"),
    Rule("Transformer/encoder_norm/bias", "norm.bias"),
)
_VISION_TRANSFORMER = (*_GOOGLE, *_google_rules(attention=1, norm2=2, mlp=3))
_BIG_VISION = (*_GOOGLE, *_google_rules(attention=0, norm2=1, mlp=0))
_STACKED = re.compile(r"(.*Transformer/encoderblock)(/.+)")
_GOOGLE_PREFIX = "opt/target/|params/img/|params/"
_FIRST = rf"(?:{_GOOGLE_PREFIX})?Transformer/encoderblock(?:_0)?/"


def _unstack(tensors: Tensors, rules: Collection[Rule], prefix: str) -> Tensors:
    """Split the tensors that stack all blocks, and whose blocks have a rule, into one tensor per block."""
    matchers = _compile(rules, prefix)
    single: Tensors = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        # a tensor without a rule stays whole: a small file can have any number of them
        known = match is not None and any(p.fullmatch(f"{match[1]}_0{match[2]}") for p, _ in matchers)
        if match is None or not known or tensor.ndim == 0 or len(tensor) > _MAX_BLOCKS:
            single[name] = tensor
        else:
            single |= {f"{match[1]}_{number}{match[2]}": part for number, part in enumerate(tensor.unbind())}
    return single


def _by_rules(rules: Collection[Rule], prefix: str) -> Callable[[Tensors, CovarianceNet], Reading]:
    return lambda tensors, _: apply_rules(_unstack(tensors, rules, prefix), rules, prefix)


#: all layouts, the likeliest first
LAYOUTS = (
    Layout("eigengrain", _anything, _renamed(str)),
    Layout("timm, torchvision and torch hub: a backbone", _anything, _renamed(into_backbone)),
    Layout("fast-MPN-COV: a ResNet as a sequence", with_part("features"), _renamed(_from_resnet_sequence)),
    Layout("fast-MPN-COV: a VGG", with_part("features"), _renamed(_from_sequence)),
    Layout("DifferentiableSVD", with_part("layer_reduce"), _renamed(_from_own_class)),
    Layout("timm and torchvision: a network with its classifier", _fits_own_classifier, _with_classifier),
    Layout(
        "DeiT III",
        with_name(r"blocks\.0\.gamma_1"),
        _renamed(lambda name: BACKBONE + re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name)),
    ),
    Layout(
        "Hugging Face transformers: ViT, DeiT, DINOv2",
        with_name(r"(?:\w+\.)?embeddings\.patch_embeddings\.projection\.weight"),
        _by_rules(_HUGGING_FACE, r"(?!embeddings\.|encoder\.|layernorm\.)\w+\."),
    ),
    Layout(
        "Google: vision_transformer",
        with_name(_FIRST + "MultiHeadDotProductAttention_1/query/kernel"),
        _by_rules(_VISION_TRANSFORMER, _GOOGLE_PREFIX),
    ),
    Layout(
        "Google: big_vision",
        with_name(_FIRST + "MultiHeadDotProductAttention_0/query/kernel"),
        _by_rules(_BIG_VISION, _GOOGLE_PREFIX),
    ),
)


def readings(tensors: Tensors, model: CovarianceNet) -> Iterator[Reading]:
    """The tensors of a file, read in each of the layouts that it may have."""
    return (layout.convert(tensors, model) for layout in LAYOUTS if layout.recognises(tensors.keys(), model))
