"""The names that different programs give to the same parameters, brought to the names of this one."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from eigengrain.models.model import CovarianceNet

BACKBONE = "backbone."

#: name in the file -> name in the model
Renaming = Callable[[str], str]

# MPN-COV networks rebuilt as features, representation, classifier: a ResNet is a plain sequence there, with the reduction
# at its end where the network was pretrained with it
_RESNET_SEQUENCE = {
    "0": "backbone.conv1",
    "1": "backbone.bn1",
    "8": "head.reduce.0",
    "9": "head.reduce.1",
    **{str(stage + 3): f"backbone.layer{stage}" for stage in (1, 2, 3, 4)},
}
_REBUILT = re.compile(r"representation\.conv_dr_block\.(\d+)\.")
# the same networks as a class of their own
_OWN_CLASS = {"layer_reduce": "head.reduce.0", "layer_reduce_bn": "head.reduce.1", "fc": "classifier"}


def _same(name: str) -> str:
    return name


def in_backbone(name: str) -> str:
    return BACKBONE + name


def _rebuilt_resnet(name: str) -> str:
    part, _, rest = name.partition(".")
    if part != "features":
        return _REBUILT.sub(r"head.reduce.\1.", name)
    number, _, rest = rest.partition(".")
    return f"{_RESNET_SEQUENCE[number]}.{rest}" if number in _RESNET_SEQUENCE else name


def _rebuilt_sequence(name: str) -> str:
    return BACKBONE + name if name.startswith("features.") else _REBUILT.sub(r"head.reduce.\1.", name)


def _own_class(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"{_OWN_CLASS[part]}.{rest}" if part in _OWN_CLASS else BACKBONE + name


def renamings(model: CovarianceNet, names: Iterable[str]) -> Iterator[Renaming]:
    """Ways to read a file with these names, the likelier ones first."""
    parts = {name.partition(".")[0] for name in names}
    yield from (_same, in_backbone)
    if "features" in parts:
        yield from (_rebuilt_resnet, _rebuilt_sequence)
    if "layer_reduce" in parts:
        yield _own_class
    if model.config["head"] == "gap" and model.layout.kind == "NCHW" and _classified_averages(model, names):
        yield _with_classifier(model.backbone_classifier)


def _classified_averages(model: CovarianceNet, names: Iterable[str]) -> bool:
    """Whether the classifier in a file stood on the map's averages: no layer of the file was cut off in between."""
    between = {name.partition(".")[0] for name in names if name.rpartition(".")[0] != model.backbone_classifier}
    behind = {name for name, child in model.backbone.named_children() if isinstance(child, nn.Identity)}
    return bool(model.backbone_classifier) and between.isdisjoint(behind)


def _with_classifier(original: str) -> Renaming:
    """For average pooling: the whole network as it was, whose classifier is then right for ours."""

    def rename(name: str) -> str:
        module, _, parameter = name.rpartition(".")
        return f"classifier.{parameter}" if module == original else BACKBONE + name

    return rename


def fitted_by_timm(tensors: dict[str, Tensor], net: nn.Module, classifier: str = "") -> dict[str, Tensor]:
    """Tensors of a backbone as timm's own filter for that network would load them.

    It resizes position embeddings and relative positions to the image size of the network, and knows the names of the
    network's first authors.

    Args:
        tensors: under the network's own names.
        net: a network of timm; for others nothing is done.
        classifier: name of the network's classifier, to say that names are timm's: it is by the classifier that some
            filters tell, and a backbone alone has none.
    """
    adapt = getattr(sys.modules.get(type(net).__module__), "checkpoint_filter_fn", None)
    if adapt is None:
        return tensors
    marker = f"{classifier}.weight"
    marked = {marker: torch.empty(0), **tensors} if classifier else dict(tensors)
    try:
        adapted = dict(adapt(marked, net))
        return {name: tensor for name, tensor in adapted.items() if name != marker or name in tensors}
    except (KeyError, AttributeError, IndexError, RuntimeError, ValueError, AssertionError):
        return tensors  # the file is not of this network, as the report will say
