"""Parameters in groups: by layer, as timm's layer-wise decay wants them, and by part, each with a rate of its own."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

LayerOf = Callable[[str], float | tuple[float, ...]]

# timm's mark for "the same layer as the one before"
_SAME_AS_PREVIOUS = (99999,)


def prefixed_matcher(matcher: dict[str, Any] | LayerOf | None) -> dict[str, Any] | Callable[[str], tuple[float, ...]]:
    """A backbone's ``group_matcher`` for a model that holds it as ``backbone``, with head and classifier as last layers.

    Args:
        matcher: what the backbone's ``group_matcher()`` returned: regular expressions by name, a function from a
            parameter's name to its layer, or None for a backbone without one, which is then a single layer.
    """
    if callable(matcher):
        return _LayerOfParameter(matcher)
    groups: dict[str, Any] = {f"backbone_{name}": _prefixed(spec) for name, spec in (matcher or {}).items()}
    if groups:
        groups["backbone_rest"] = [(r"^backbone\.", _SAME_AS_PREVIOUS)]
    else:
        groups["backbone"] = r"^backbone\."
    return {**groups, "head": r"^head\.", "classifier": r"^classifier\."}


def _prefixed(spec: Any) -> Any:
    if isinstance(spec, tuple | list):
        return [(_prefixed(pattern), order) for pattern, order in spec]
    if spec is None:
        return None
    unanchored = re.sub(r"(^|\||\()\^", r"\1", spec)  # an anchor behind the prefix would never match
    return rf"^backbone\.(?:{unanchored})"


class _LayerOfParameter:
    """A backbone's function from names to layers, for a model around it."""

    def __init__(self, backbone: LayerOf):
        self.backbone = backbone

    def __call__(self, parameter: str) -> tuple[float, ...]:
        part, _, name = parameter.partition(".")
        if part != "backbone":
            return (math.inf, 1.0 if part == "classifier" else 0.0)
        layer = self.backbone(name)
        numbers = tuple(layer) if isinstance(layer, tuple | list) else (layer,)
        # what the backbone did not count comes after all that it did, and before the head
        return (math.inf, -1.0) if math.inf in numbers else numbers


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
        weight_decay: of all parameters, as in the paper.
        head_lr_scale: the head's rate is this many times ``lr``.
        classifier_lr_scale: the classifier's rate is this many times ``lr``.
        decay_norms_and_biases: False leaves vectors and scalars (normalisation, biases) and what the model lists in
            ``no_weight_decay`` without decay, in groups named ``.../no_decay``.

    Returns:
        Dictionaries with ``name``, ``params``, ``lr`` and ``weight_decay``; a part without parameters has no group.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="gap", num_classes=5)
        >>> [(g["name"], g["lr"]) for g in parameter_groups(model, lr=0.1, classifier_lr_scale=10)]
        [('backbone', 0.1), ('classifier', 1.0)]
    """
    scales = {"backbone": 1.0, "head": head_lr_scale, "classifier": classifier_lr_scale}
    spared = set() if decay_norms_and_biases else set(model.no_weight_decay())  # type: ignore[operator]
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in _by_part(model, scales):
        part = name.partition(".")[0]
        decays = decay_norms_and_biases or (parameter.ndim > 1 and name not in spared)
        key = part if decays else f"{part}/no_decay"
        empty = {"name": key, "params": [], "lr": lr * scales[part], "weight_decay": weight_decay if decays else 0.0}
        groups.setdefault(key, empty)["params"].append(parameter)
    return list(groups.values())


def _by_part(model: nn.Module, parts: dict[str, float]) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters, each once: a model of other parts than ours has no rate for them."""
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] not in parts:
            raise ValueError(
                f"parameter {name!r} belongs to none of {', '.join(parts)}: parameter_groups is for models of create_model"
            )
        yield name, parameter
