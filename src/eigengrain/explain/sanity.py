"""Two checks of maps: does the score follow the map (deletion, insertion), and does the map depend on the weights."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from eigengrain import _torchvision  # noqa: F401  isort: skip
from timm.models import group_parameters

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain.measures import collapse, correlation, rank_correlation
from eigengrain.explain.perturbation import gaussian_blur
from eigengrain.explain.targets import Classes, read_classes
from eigengrain.models import CovarianceNet
from eigengrain.models.param_groups import part_of

BASELINES = ("blur", "mean")

#: standard deviation of the blur, as a fraction of the shorter side: it removes the object and keeps the colours
BLUR = 1 / 16

SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"spearman": rank_correlation, "pearson": correlation}


@dataclass(frozen=True)
class Curve:
    """Probability of a class against the share of deleted or inserted pixels.

    The area is NaN for a map that defines no order. A better map has a smaller area for deletion, a larger one for
    insertion.
    """

    shares: Tensor  #: (k + 1,), from 0 to 1
    scores: Tensor  #: (B, k + 1), probability of the target class
    area: Tensor  #: (B,)


@torch.no_grad()
def deletion_curve(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    targets: Classes,
    *,
    steps: int = 20,
    baseline: str | Tensor = "blur",
    batch_size: int = 64,
) -> Curve:
    r"""Replace the pixels of an image by a baseline, those with the largest map values first, and record the score.

    .. math:: \text{area} = \frac1k \sum_{j=1}^{k} \frac{p_{j-1} + p_j}{2}

    with :math:`p_j` the probability of the target class after the share j/k of the pixels was replaced.

    Args:
        model: function from images to class scores. Its mode is not changed.
        images: (B, C, H, W).
        maps: (B, H, W), or signed gradients (B, C, H, W), which are collapsed by ``abs-max``. Pixels with equal values are
            ordered at random, in the same order for all images and maps.
        targets: one class, or one class per image, in the forms of captum as in :func:`attribute_rules`.
        steps: k, from 1 to the number of pixels.
        baseline: ``blur``, the blurred image; ``mean``, its mean colour; or a tensor that broadcasts to the images, such as
            0 for the mean colour of a normalised data set.
        batch_size: images per pass of the model, over all steps.

    Example:
        >>> model = lambda x: torch.stack([x[:, 0, 0, 0], torch.zeros(len(x))], 1)  # depends on one pixel
        >>> map = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
        >>> curve = deletion_curve(model, torch.full((1, 1, 2, 2), 9.0), map, 0, steps=4, baseline=torch.zeros(()))
        >>> [round(p, 3) for p in curve.scores[0].tolist()]
        [1.0, 0.5, 0.5, 0.5, 0.5]

    References:
        V. Petsiuk et al., RISE: Randomized Input Sampling for Explanation of Black-box Models, BMVC 2018, Section 4.
    """
    end = _baseline(images, baseline)
    order, defined = _pixel_order(maps, images)
    count, pixels = order.shape
    if not 1 <= steps <= pixels:
        raise ArgumentError("steps", f"must be from 1 to {pixels}, the number of pixels", steps)
    if batch_size < 1:
        raise ArgumentError("batch_size", "must be at least 1", batch_size)
    classes = read_classes(targets, images, argument="targets")
    # after step j the first `changed[j]` pixels of the order are replaced
    changed = torch.tensor([round(j * pixels / steps) for j in range(steps + 1)], device=images.device)
    # every image at every step, as one long list that is split into batches
    image = torch.arange(count, device=images.device).repeat_interleave(steps + 1)
    step = torch.arange(steps + 1, device=images.device).repeat(count)
    scores = []
    for which, when in zip(image.split(batch_size), step.split(batch_size), strict=True):
        replaced = (order[which] < changed[when, None]).view(-1, 1, *images.shape[2:])
        logits = model(torch.where(replaced, end[which], images[which])).detach()
        if logits.ndim != 2 or not 0 <= int(classes.min()) <= int(classes.max()) < logits.shape[1]:
            problem = f"must be columns of the scores (B, classes) of the model, {tuple(logits.shape)}"
            raise ArgumentError("targets", problem, classes.tolist())
        logits = (logits.cpu() if logits.device.type == "mps" else logits).double()
        scores.append(logits.softmax(1).gather(1, classes[which, None].to(logits.device))[:, 0])
    p = torch.cat(scores).view(count, steps + 1)
    area = (p[:, 1:] + p[:, :-1]).mean(1) / 2
    shares = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=p.device)
    return Curve(shares, p, torch.where(defined.to(p.device), area, torch.nan))


def insertion_curve(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    targets: Classes,
    *,
    baseline: str | Tensor = "blur",
    **options: Any,
) -> Curve:
    """Start from the baseline and insert the pixels of the image, those with the largest map values first.

    Arguments and result are those of :func:`deletion_curve`.
    """
    return deletion_curve(model, _baseline(images, baseline), maps, targets, baseline=images, **options)


def _pixel_order(maps: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of every pixel in descending order of the map (B, n), and whether the map is finite and not constant (B,)."""
    if images.ndim != 4 or len(images) == 0:
        raise ArgumentError("images", "must be (B, C, H, W)", tuple(images.shape))
    if maps.ndim == 4:
        maps = collapse(maps, "abs-max")
    if maps.shape != images[:, 0].shape:
        raise ArgumentError("maps", f"must have the size of the images, {tuple(images.shape)}", tuple(maps.shape))
    values = maps.detach().to(images.device).flatten(1)
    # shuffled before a stable sort: otherwise equal values would be ordered from top to bottom
    shuffle = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(0)).to(images.device)
    order = shuffle[values[:, shuffle].argsort(dim=1, descending=True, stable=True)]
    return order.argsort(dim=1), (values.amax(1) > values.amin(1)) & values.isfinite().all(1)


def _baseline(images: Tensor, baseline: str | Tensor) -> Tensor:
    """Replacement pixels, with the shape of the images."""
    if isinstance(baseline, Tensor):
        try:
            return baseline.to(images).expand_as(images)
        except RuntimeError as error:
            problem = f"must broadcast to the images {tuple(images.shape)}"
            raise ArgumentError("baseline", problem, tuple(baseline.shape)) from error
    if baseline not in BASELINES:
        raise UnknownName("baseline", baseline, BASELINES)
    if baseline == "mean":
        return images.mean((-2, -1), keepdim=True).expand_as(images)
    return gaussian_blur(images, BLUR * min(images.shape[-2:]))


@dataclass(frozen=True)
class Randomised:
    """Similarity of maps before and after the weights are randomised, stage by stage.

    Stages are in the order in which they are randomised: ``classifier``, ``head``, then the backbone from its end.
    """

    stages: tuple[str, ...]
    similarity: dict[tuple[str, str], Tensor]  #: (rule, subset) → (stages, B), NaN if it is undefined


def randomisation_check(
    model: CovarianceNet,
    images: Tensor,
    targets: Classes,
    subsets: Sequence[str] = ("all",),
    rules: Sequence[str] = ("vanilla",),
    *,
    cut: str = "exact",
    similarity: str = "spearman",
    how: str = "abs-max",
    seed: int = 0,
    attribute: Callable[..., Mapping[str, Any]] | None = None,
) -> Randomised:
    """Compare the maps of a network with its maps after its weights are randomised, from the classifier down.

    A method whose maps stay similar shows edges of the image, not what the network has learned.

    Args:
        model, images, subsets, rules, cut: as for :func:`eigengrain.explain.attribute_rules`; a copy of the model is
            randomised.
        targets: class to explain, one or one per image: fixed, because a random network predicts another one.
        similarity: ``spearman`` or ``pearson``, of the maps after :func:`eigengrain.explain.measures.collapse` by ``how``.
        seed: seed of the random weights.
        attribute: function that computes the maps; by default :func:`eigengrain.explain.attribute_rules`.

    References:
        J. Adebayo et al., Sanity Checks for Saliency Maps, NeurIPS 2018, Section 3.
    """
    if similarity not in SIMILARITIES:
        raise UnknownName("similarity", similarity, SIMILARITIES)
    if attribute is None:
        from eigengrain.explain.saliency import attribute_rules

        attribute = attribute_rules

    def maps(net: CovarianceNet) -> dict[tuple[str, str], Tensor]:
        results = attribute(net, images, subsets, rules, target=targets, cut=cut)
        return {(rule, str(name)): collapse(m, how) for rule in rules for name, m in results[rule].maps.items()}

    trained = maps(model)
    stages = []
    rows: dict[tuple[str, str], list[Tensor]] = {key: [] for key in trained}
    for stage, net in cascade(model, images, seed):
        stages.append(stage)
        for key, random_map in maps(net).items():
            rows[key].append(SIMILARITIES[similarity](trained[key], random_map))
    return Randomised(tuple(stages), {key: torch.stack(values) for key, values in rows.items()})


def cascade(model: CovarianceNet, images: Tensor, seed: int = 0) -> Iterator[tuple[str, CovarianceNet]]:
    """Yield a copy of the model with one more stage randomised each time: classifier, head, backbone from its end.

    The entries of each weight are permuted: this destroys what was learned and keeps their distribution, so that
    activations neither vanish nor overflow. For the same reason the randomised batch normalisations get the statistics of
    ``images`` under the new weights. Stages without weights are skipped.

    Yields:
        name of the stage, and the copy: always the same object, which the next stage changes further.
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
    """A part of the network that is randomised at once."""

    name: str
    weights: list[str]  #: their names


def stages_of(model: CovarianceNet) -> list[Stage]:
    """Classifier, head, and the stages of the backbone as timm groups them, from the last to the stem; only with weights.

    A backbone that is a single coarse group in timm, such as torchvision's VGG, is split into layers.

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
    names = [name for name, _ in model.named_parameters()]
    stages = [Stage(part, [name for name in names if part_of(name) == part]) for part in ("classifier", "head")]
    stages += [Stage(_group_name(group, backbone), group) for group in reversed(backbone)]
    return [stage for stage in stages if stage.weights]


def _group_name(names: Sequence[str], groups: Sequence[Sequence[str]]) -> str:
    """The shortest paths below the backbone that belong to this group only, joined by +."""
    others = [f"{name}." for group in groups if group is not names for name in group]

    def own_path(name: str) -> str:
        starts = accumulate(name.split(".")[1:], "{}.{}".format)
        return next(start for start in starts if not any(other.startswith(f"backbone.{start}.") for other in others))

    return "+".join(dict.fromkeys(map(own_path, names)))


def _refit(net: nn.Module, norms: Sequence[_BatchNorm], images: Tensor) -> None:
    """Set the running statistics of batch normalisations to those of the images."""
    if not norms:
        return
    before = [(norm.training, norm.momentum) for norm in norms]
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = None  # a plain mean, here over one batch
    with torch.no_grad():
        net(images)
    for norm, (training, momentum) in zip(norms, before, strict=True):
        norm.train(training).momentum = momentum
