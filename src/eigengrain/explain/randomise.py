"""A sanity check: maps of what a network has learned must change when what it has learned is destroyed, layer by layer."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from eigengrain import _torchvision  # noqa: F401  isort: skip
from timm.models import group_parameters

from eigengrain.errors import UnknownName
from eigengrain.explain.measures import collapse, correlation, rank_correlation
from eigengrain.models import CovarianceNet

SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"spearman": rank_correlation, "pearson": correlation}


@dataclass(frozen=True)
class Randomised:
    """What is left of the maps of a trained network after each stage.

    Args:
        stages: what was randomised in turn, and stays so: ``classifier``, ``head``, then the backbone from its end on.
        similarity: (rule, subset) → similarity to the trained network's maps, (stages, B); NaN where it is undefined.
    """

    stages: tuple[str, ...]
    similarity: dict[tuple[str, str], Tensor]


def randomisation_check(
    model: CovarianceNet,
    images: Tensor,
    targets: Tensor,
    subsets: Sequence[str] = ("all",),
    rules: Sequence[str] = ("vanilla",),
    *,
    cut: str = "exact",
    similarity: str = "spearman",
    how: str = "abs-max",
    seed: int = 0,
    attribute: Callable[..., Mapping[str, Any]] | None = None,
) -> Randomised:
    """How alike the maps of a network are to those it gives once its weights are random, from the classifier down.

    A method whose maps stay alike shows edges of the image, not what the network has learned.

    Args:
        model: whose copy is randomised; it is itself not changed. Evaluation mode is wanted.
        images: (B, 3, H, W), on the model's device.
        targets: class to explain of each image (B,): fixed, because a random network predicts another one.
        subsets: of the eigenvalues.
        rules: at the rectifiers.
        cut: see :class:`eigengrain.explain.saliency.EigenSaliency`.
        similarity: ``spearman`` or ``pearson``, of the collapsed maps.
        how: see :func:`eigengrain.explain.measures.collapse`.
        seed: of the random weights.
        attribute: makes the maps; by default :func:`eigengrain.explain.saliency.attribute_rules`.

    Raises:
        ValueError: for an unknown similarity, or what making the maps refuses.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3).eval()
        >>> found = randomisation_check(model, torch.randn(2, 3, 64, 64), torch.tensor([0, 3]), subsets=["all", "top:1"])
        >>> found.stages[:3], found.similarity["vanilla", "top:1"].shape
        (('classifier', 'head', 'layer4'), torch.Size([7, 2]))

    References:
        J. Adebayo et al., Sanity Checks for Saliency Maps, NeurIPS 2018, Section 3.
    """
    if similarity not in SIMILARITIES:
        raise UnknownName("similarity", similarity, SIMILARITIES)
    if attribute is None:
        from eigengrain.explain.saliency import attribute_rules

        attribute = attribute_rules

    def maps(net: CovarianceNet) -> dict[tuple[str, str], Tensor]:
        found = attribute(net, images, subsets, rules, target=targets, cut=cut)
        return {(rule, str(name)): collapse(m, how) for rule in rules for name, m in found[rule].maps.items()}

    trained = maps(model)
    stages = []
    rows: dict[tuple[str, str], list[Tensor]] = {key: [] for key in trained}
    for stage, net in cascade(model, images, seed):
        stages.append(stage)
        for key, random_map in maps(net).items():
            rows[key].append(SIMILARITIES[similarity](trained[key], random_map))
    return Randomised(tuple(stages), {key: torch.stack(values) for key, values in rows.items()})


def cascade(model: CovarianceNet, images: Tensor, seed: int = 0) -> Iterator[tuple[str, CovarianceNet]]:
    """A copy of the model with one more stage randomised each time: classifier, head, backbone from its end to its stem.

    The entries of each weight are put in a random order: what was learned is gone, while their distribution stays, so that
    no activation dies or overflows for its scale alone. For the same reason batch normalisations that were randomised get
    the statistics of ``images`` under the new weights. Stages without weights are passed over.

    Args:
        model: it is not changed.
        images: (B, 3, H, W) for those statistics.
        seed: of the order.

    Yields:
        name of the stage, and the copy: one and the same object, which the next stage changes further.
    """
    net = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    weights, modules = dict(net.named_parameters()), dict(net.named_modules())
    norms: list[_BatchNorm] = []
    for stage in stages_of(net):
        with torch.no_grad():
            for name in stage.weights:
                weight = weights[name]
                order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                weight.copy_(weight.flatten()[order].view_as(weight))
        owners = [modules[owner] for owner in dict.fromkeys(name.rpartition(".")[0] for name in stage.weights)]
        norms += [module for module in owners if isinstance(module, _BatchNorm) and module.track_running_stats]
        _refit(net, norms, images)
        yield stage.name, net


class Stage(NamedTuple):
    """A part of the network that is randomised at once: what it is called, and the names of its weights."""

    name: str
    weights: list[str]


def stages_of(model: CovarianceNet) -> list[Stage]:
    """Classifier, head, and the backbone's stages as timm counts them, from its end to its stem; only those with weights.

    A backbone that is one stage by timm's coarse count, such as torchvision's VGG, is taken layer by layer.

    Example:
        >>> from eigengrain.models import create_model
        >>> [stage.name for stage in stages_of(create_model("resnet18", head="gap", num_classes=2))]
        ['classifier', 'layer4', 'layer3', 'layer2', 'layer1', 'conv1+bn1']
    """
    for coarse in (True, False):
        groups = list(group_parameters(model, model.group_matcher(coarse=coarse)).values())
        backbone = [names for names in groups if names[0].startswith("backbone.")]
        if len(backbone) > 1:
            break
    stages = []
    for part in ("classifier", "head"):
        names = [name for name, _ in model.named_parameters() if name.startswith(f"{part}.")]
        stages += [Stage(part, names)] if names else []
    return stages + [Stage(_title(names, backbone), names) for names in reversed(backbone)]


def _title(names: Sequence[str], groups: Sequence[Sequence[str]]) -> str:
    """What a group is called: the shortest paths below the backbone that belong to it alone."""
    others = [f"{name}." for group in groups if group is not names for name in group]
    paths: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        starts = (".".join(parts[:k]) for k in range(2, len(parts) + 1))
        own = next(start for start in starts if not any(other.startswith(f"{start}.") for other in others))
        paths[own.removeprefix("backbone.")] = None
    return "+".join(paths)


def _refit(net: nn.Module, norms: Sequence[_BatchNorm], images: Tensor) -> None:
    """Set the running statistics of these batch normalisations to those of the images, each after the ones before it."""
    if not norms:
        return
    before = [(norm.training, norm.momentum) for norm in norms]
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over what is seen, which is one batch
    with torch.no_grad():
        net(images)
    for norm, (training, momentum) in zip(norms, before, strict=True):
        norm.train(training)
        norm.momentum = momentum
