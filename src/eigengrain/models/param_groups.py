"""Parameter groups: by layer for timm's layer-wise decay, and by part of the model, each with its own learning rate."""

import math
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from eigengrain.errors import ArgumentError

#: modules of a model that are neither backbone, head nor classifier, and the part whose learning rate they have
_BRANCHES = {"mid_level.reduce": "head", "mid_level.classifier": "classifier"}

LayerOf = Callable[[str], float | tuple[float, ...]]

#: the last layers of a model
_ENDS = ("head", "classifier")

# timm's mark for "the same layer as the one before"
_SAME_AS_PREVIOUS = (99999,)


def prefix_matcher(matcher: dict[str, Any] | LayerOf | None) -> dict[str, Any] | Callable[[str], tuple[float, ...]]:
    """Convert the ``group_matcher`` of a backbone to one of a model, with head and classifier as the last layers.

    It consists of regular expressions by name, or is a function from a parameter's name to its layer. None makes the
    backbone a single layer.
    """
    if callable(matcher):
        layer_of = matcher

        def layer(parameter: str) -> tuple[float, ...]:
            part, name = part_of(parameter), parameter.partition(".")[2]
            if part != "backbone":
                return (math.inf, 1.0 if part == "classifier" else 0.0)
            own = layer_of(name)
            numbers = tuple(own) if isinstance(own, tuple | list) else (own,)
            # parameters that the backbone does not number come after its layers and before the head
            return (math.inf, -1.0) if math.inf in numbers else numbers

        return layer
    groups: dict[str, Any] = {f"backbone_{name}": _prefix(spec) for name, spec in (matcher or {}).items()}
    rest = {"backbone_rest": [(r"^backbone\.", _SAME_AS_PREVIOUS)]} if groups else {"backbone": r"^backbone\."}
    ends = {end: "|".join((end, *(re.escape(name) for name, part in _BRANCHES.items() if part == end))) for end in _ENDS}
    return {**groups, **rest, **{end: rf"^(?:{names})\." for end, names in ends.items()}}


def part_of(parameter: str) -> str:
    """The part of a model, ``backbone``, ``head`` or ``classifier``, that a parameter belongs to.

    Example:
        >>> part_of("backbone.conv1.weight"), part_of("mid_level.reduce.0.weight")
        ('backbone', 'head')
    """
    return _BRANCHES.get(".".join(parameter.split(".")[:2]), parameter.partition(".")[0])


def _prefix(spec: Any) -> Any:
    if isinstance(spec, tuple | list):
        return [(_prefix(pattern), order) for pattern, order in spec]
    if spec is None:
        return None
    unanchored = re.sub(r"(^|\||\()\^", r"\1", spec)  # an anchor after the prefix would never match
    return rf"^backbone\.(?:{unanchored})"


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    head_lr_scale: float = 1.0,
    classifier_lr_scale: float = 1.0,
    decay_norms_and_biases: bool = True,
) -> list[dict[str, Any]]:
    """Parameters for an optimiser in groups ``backbone``, ``head`` and ``classifier``, each parameter once.

    Args:
        model: from :func:`create_model`.
        lr: learning rate of the backbone.
        weight_decay: weight decay, for all parameters as in the paper.
        head_lr_scale: factor from ``lr`` to the learning rate of the head.
        classifier_lr_scale: factor from ``lr`` to the learning rate of the classifier.
        decay_norms_and_biases: False exempts vectors and scalars (normalisation, biases) and the parameters in
            ``model.no_weight_decay()`` from decay, in groups named ``.../no_decay``.

    Returns:
        Dictionaries with ``name``, ``params``, ``lr`` and ``weight_decay``; a part without parameters, or whose parameters
        are all frozen, has no group.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="gap", num_classes=5)
        >>> [(g["name"], g["lr"]) for g in parameter_groups(model, lr=0.1, classifier_lr_scale=10)]
        [('backbone', 0.1), ('classifier', 1.0)]
    """
    scales = {"backbone": 1.0, "head": head_lr_scale, "classifier": classifier_lr_scale}
    exempt = set() if decay_norms_and_biases else set(model.no_weight_decay())  # type: ignore[operator]
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        part = part_of(name)
        if part not in scales:
            raise ArgumentError("model", f"must come from create_model: parameter {name!r} is not in {', '.join(scales)}")
        decays = decay_norms_and_biases or (parameter.ndim > 1 and name not in exempt)
        key = part if decays else f"{part}/no_decay"
        empty = {"name": key, "params": [], "lr": lr * scales[part], "weight_decay": weight_decay if decays else 0.0}
        groups.setdefault(key, empty)["params"].append(parameter)
    return [group for group in groups.values() if any(parameter.requires_grad for parameter in group["params"])]
