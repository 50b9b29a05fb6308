r"""EigenSaliency: the gradient of a network's answer to the image, with a subset of the eigenvalues kept (Section 3.2).

.. math:: M_S = \frac{\partial}{\partial I}\, y_c\big(U f(\Lambda_S) U^T\big), \qquad
   \Lambda_S = \text{the eigenvalues in } S, \text{ zero elsewhere (Eq. 5)}

with c one class for every subset, and the gradient at each rectifier by one of three rules
(:mod:`eigengrain.explain.relu_rules`). A dropped eigenvalue has no gradient of its own, yet the kept subspace turns
with the image: ``cut="exact"`` follows it, ``cut="projector"`` holds it fixed.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn

from eigengrain.errors import MissingPackageError
from eigengrain.explain.relu_rules import RectifierRules, check_rule
from eigengrain.functional import EigenSubset
from eigengrain.functional.spectral import check_cut
from eigengrain.heads import CovarianceHead, Head
from eigengrain.heads.scaling import MatrixFactor
from eigengrain.models import CovarianceNet
from eigengrain.models.model import check_bare

try:
    from captum.attr import GradientAttribution
    from captum.log import log_usage
except ImportError as error:
    raise MissingPackageError("saliency maps need captum: pip install 'eigengrain[explain]'") from error

_Method = TypeVar("_Method", bound=Callable[..., object])


def _logged(method: _Method) -> _Method:
    """What captum logs of its methods; the decorator itself has no types, and would take away the method's."""
    logged: _Method = log_usage()(method)
    return logged


Subset = str | EigenSubset
Target = int | str | Tensor | list[int] | None

#: models that were said to be in training mode
_told: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class SubsetMaps:
    r"""Signed gradient maps of one batch, of several subsets.

    Args:
        maps: subset as text → (B, 3, H, W), signed gradients.
        gaps: subset as text → the relative gap :math:`(\lambda_k - \lambda_{k+1})/\lambda_k` at its narrowest cut (B,), as
            whose inverse an exact map grows. Infinite where nothing is cut, nan where a cut lies between zeros.
        targets: (B,) class that was explained, −1 for the norm.
        rule: at the rectifiers.
        cut: how the cut spectrum was differentiated.
    """

    maps: dict[str, Tensor]
    gaps: dict[str, Tensor]
    targets: Tensor
    rule: str
    cut: str


class EigenSaliency(GradientAttribution):
    r"""Gradient maps of eigenvalue subsets, as an attribution method of captum.

    .. math:: M_S = \partial y_c(U f(\Lambda_S) U^T) / \partial I

    It composes with captum: ``NoiseTunnel(EigenSaliency(model))`` smooths it, and any method that has a ``gradient_func``,
    such as ``IntegratedGradients``, follows subset and rule with that of :meth:`gradient_function`. Everything else is said
    at :func:`attribute_rules`, which makes many maps for the price of fewer.

    Args:
        model: from :func:`create_model`, in eval mode.
        rule: ``vanilla``, ``deconv`` or ``guided``.

    Raises:
        ValueError: for another kind of model, or an unknown rule.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov+seb", num_classes=4, reduce=3).eval()
        >>> EigenSaliency(model, rule="guided").attribute(torch.ones(1, 3, 64, 64), subset="last:1").shape
        torch.Size([1, 3, 64, 64])
    """

    def __init__(self, model: CovarianceNet, rule: str = "vanilla"):
        check_bare(model, "saliency")
        check_rule(rule)
        super().__init__(model)
        self.model, self.rule = model, rule
        self.gradient_func = self.gradient_function()

    @_logged
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Target = None,
        subset: Subset = "all",
        cut: str = "exact",
        additional_forward_args: object = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Signed map of one subset.

        Args:
            inputs: images (B, 3, H, W), or a tuple of them alone.
            target: a class, one class for each image, None for the predicted class, or ``"norm"``. Noise may change the
                predicted class: name one for ``NoiseTunnel``.
            subset: eigenvalues that are kept, such as ``"last:50"``.
            cut: ``exact`` or ``projector``.
            additional_forward_args: what captum's methods pass on; the model takes images alone, so None or empty.

        Returns:
            (B, 3, H, W), in a tuple if ``inputs`` was one.

        Raises:
            ValueError: as :func:`attribute_rules`.
        """
        images = _only_images(inputs, additional_forward_args)
        maps = self.attribute_subsets(images, [subset], target, cut).maps
        (found,) = maps.values()
        return (found,) if isinstance(inputs, tuple) else found

    def attribute_subsets(
        self, inputs: Tensor, subsets: Sequence[Subset], target: Target = None, cut: str = "exact"
    ) -> SubsetMaps:
        """Signed maps of several subsets from one forward pass, and the gaps at their cuts; see :func:`attribute_rules`."""
        return attribute_rules(self.model, inputs, subsets, [self.rule], target, cut)[self.rule]

    def gradient_function(self, subset: Subset = "all", cut: str = "exact") -> Callable[..., tuple[Tensor, ...]]:
        """The gradient as captum's methods call it, to be set as their ``gradient_func``.

        Example:
            >>> from captum.attr import IntegratedGradients
            >>> from eigengrain.models import create_model
            >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3).eval()
            >>> method = IntegratedGradients(model)
            >>> method.gradient_func = EigenSaliency(model).gradient_function(subset="last:2")
            >>> method.attribute(torch.ones(1, 3, 64, 64), target=0, n_steps=2).shape
            torch.Size([1, 3, 64, 64])
        """

        def gradient(
            forward_fn: object,
            inputs: Tensor | tuple[Tensor, ...],
            target_ind: Target = None,
            additional_forward_args: object = None,
        ) -> tuple[Tensor, ...]:
            images = _only_images(inputs, additional_forward_args)
            return tuple(self.attribute_subsets(images, [subset], target_ind, cut).maps.values())

        return gradient


def attribute_rules(
    model: CovarianceNet,
    inputs: Tensor,
    subsets: Sequence[Subset],
    rules: Sequence[str],
    target: Target = None,
    cut: str = "exact",
) -> dict[str, SubsetMaps]:
    r"""Maps of several eigenvalue subsets under several rules, from one forward pass of the backbone.

    Each rule and subset takes a backward pass. One is spared where maps add up: under ``vanilla`` with ``cut="exact"`` and
    a class as target, :math:`M_{all} = M_S + M_{\bar S}`, so of such three in ``subsets`` two go through the backbone. For
    each image the third is the one with the largest gradient at the feature map, so that nothing cancels. This is done in
    eval mode, for heads that are linear in the kept eigenvalues.

    The model is left as it was, whatever happens: its mode, its head's subset and cut, its gradients. As the head's subset
    is set for a while, a model is not for several threads at once.

    Args:
        model: from :func:`create_model`, in eval mode. Subsets other than ``all`` need a head with eigenvalues.
        inputs: images (B, 3, H, W), as the model takes them; with or without ``requires_grad``, which is left alone.
        subsets: such as ``["all", "top:206", "last:50"]``.
        rules: of ``vanilla``, ``deconv``, ``guided``. The last two are defined for networks of ReLUs.
        target: a class, one class for each image, None for the class that the model predicts from all eigenvalues, or
            ``"norm"`` for the norm of the vector before the classifier, with the subset kept. The class is the same for
            every subset.
        cut: ``exact`` or ``projector``, see :func:`eigengrain.functional.spectral_function`.

    Returns:
        rule → :class:`SubsetMaps`.

    Raises:
        ValueError: for an option that does not fit, a subset that the head cannot keep, or a rule that the network is not
            made for, with its non-linearities.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3).eval()
        >>> found = attribute_rules(model, torch.ones(2, 3, 64, 64), ["all", "last:2"], ["vanilla", "deconv"], target=1)
        >>> found["deconv"].maps["last:2"].shape, found["vanilla"].targets
        (torch.Size([2, 3, 64, 64]), tensor([1, 1]))
    """
    check_bare(model, "saliency")
    _check_images(inputs, model)
    request = _Request(
        model=model,
        subsets={str(subset): subset for subset in map(EigenSubset.parse, _several("subsets", subsets))},
        rules=tuple(dict.fromkeys(_several("rules", rules))),
        classes=_read_target(target, inputs, model.num_classes),
        by_norm=isinstance(target, str),
        cut=cut,
        switch=RectifierRules(model=model),
    )
    for rule in request.rules:
        check_rule(rule)
    check_cut(cut)
    _warn_of_training(model)
    with _settings_restored(model.head), torch.inference_mode(False), torch.enable_grad():
        for subset in request.subsets.values():  # what the head refuses is known before any work
            _keep(model.head, subset, cut)
        images = inputs.detach().requires_grad_()
        with request.watched():
            features = model.forward_features(images)
        if not features.requires_grad:
            raise ValueError("the feature map has no gradient to the images: something in the backbone cuts the graph")
        gradients, gaps, targets = _at_features(request, features)
        maps = _at_images(request, images, features, gradients)
    return {rule: SubsetMaps(maps[rule], gaps, targets, rule, cut) for rule in request.rules}


@dataclass(frozen=True)
class _Request:
    """What was asked for, checked; and the switch by which the rectifiers are told their rule."""

    model: CovarianceNet
    subsets: dict[str, EigenSubset]
    rules: tuple[str, ...]
    classes: Tensor | None
    by_norm: bool
    cut: str
    switch: RectifierRules

    @property
    def special(self) -> str | None:
        """The first rule that is not plain backpropagation."""
        return next((rule for rule in self.rules if rule != "vanilla"), None)

    def watched(self) -> AbstractContextManager[Any]:
        """Around each forward pass; plain backpropagation needs nothing."""
        return self.switch if self.special else nullcontext()


#: by rule and by subset
_Maps = dict[str, dict[str, Tensor]]


def _at_features(request: _Request, features: Tensor) -> tuple[_Maps, dict[str, Tensor], Tensor]:
    """Gradients at the feature map, gaps by subset, and the classes: the head's part, forward and backward."""
    model, head = request.model, request.model.head
    leaf = features.detach().requires_grad_()
    targets = torch.full((len(leaf),), -1, device=leaf.device) if request.by_norm else request.classes
    # all eigenvalues first: their pass also predicts the class
    names = sorted(request.subsets, key=lambda name: not request.subsets[name].covers(head.channels))
    if targets is None and not request.subsets[names[0]].covers(head.channels):
        _keep(head, EigenSubset.all(), request.cut)
        with torch.no_grad():
            targets = model.forward_head(leaf).argmax(1)

    gradients: _Maps = {rule: {} for rule in request.rules}
    eigenvalues: Tensor | None = None
    if type(head) is CovarianceHead and head.learned_factor is None:
        model.warn_of_short_rank(leaf)
        targets, eigenvalues = _through_one_decomposition(request, features, leaf, names, targets, gradients)
    else:
        targets = _through_each_head(request, features, leaf, names, targets, gradients)
        if isinstance(head, CovarianceHead):
            with torch.no_grad():
                eigenvalues = head.eigenvalues(head.reduce(leaf))
    uncut = torch.full((len(leaf),), float("inf"), device=leaf.device)
    gaps = {
        name: uncut if eigenvalues is None else subset.relative_gap(eigenvalues) for name, subset in request.subsets.items()
    }
    return gradients, gaps, targets


def _through_one_decomposition(
    request: _Request, features: Tensor, leaf: Tensor, names: list[str], targets: Tensor | None, gradients: _Maps
) -> tuple[Tensor, Tensor]:
    """Gradients for a head whose rectifiers are in its reduction alone; its covariance is decomposed once for all.

    Returns:
        the classes, and the eigenvalues.
    """
    model, switch = request.model, request.switch
    head = model.head
    assert isinstance(head, CovarianceHead)
    seen = switch.rectifiers
    with request.watched():
        reduced = head.reduce(leaf)
    rules = request.rules if switch.rectifiers > seen else request.rules[:1]
    pooled = reduced.detach().requires_grad_()
    vectors, eigenvalues = head.pool_subsets(pooled, [request.subsets[name] for name in names], request.cut)
    for vector, (name, last_subset) in zip(vectors, _marked(names), strict=True):
        output = model.forward_vector(vector, pre_logits=request.by_norm)
        if request.special and name == names[0]:
            switch.require_rectifiers(request.special, features, reduced, output)
        if targets is None:
            targets = output.argmax(1)
        (at_reduced,) = torch.autograd.grad(_scores(request, output, targets).sum(), pooled)
        for rule, last_rule in _marked(rules):
            switch.rule = rule
            if reduced.grad_fn is None:  # no reduction: the leaf itself
                gradients[rule][name] = at_reduced
            else:
                retain = not (last_subset and last_rule)
                (gradients[rule][name],) = torch.autograd.grad(reduced, leaf, at_reduced, retain_graph=retain)
        for rule in request.rules[len(rules) :]:
            gradients[rule][name] = gradients[rules[0]][name]
    assert targets is not None
    return targets, eigenvalues


def _through_each_head(
    request: _Request, features: Tensor, leaf: Tensor, names: list[str], targets: Tensor | None, gradients: _Maps
) -> Tensor:
    """Gradients for any other head, by a pass of the whole head a subset. Returns the classes."""
    model, switch = request.model, request.switch
    for name in names:
        seen = switch.rectifiers
        _keep(model.head, request.subsets[name], request.cut)
        with request.watched():
            output = model.forward_head(leaf, pre_logits=request.by_norm)
        if request.special and name == names[0]:
            switch.require_rectifiers(request.special, features, output)
        if targets is None:
            targets = output.argmax(1)
        scores = _scores(request, output, targets).sum()
        # a head without rectifiers has one gradient for all rules
        rules = request.rules if switch.rectifiers > seen else request.rules[:1]
        for rule, last in _marked(rules):
            switch.rule = rule
            (gradients[rule][name],) = torch.autograd.grad(scores, leaf, retain_graph=not last)
        for rule in request.rules[len(rules) :]:
            gradients[rule][name] = gradients[rules[0]][name]
    assert targets is not None
    return targets


def _scores(request: _Request, output: Tensor, targets: Tensor) -> Tensor:
    """What is differentiated, (B,)."""
    return output.norm(dim=1) if request.by_norm else output.gather(1, targets[:, None]).squeeze(1)


def _at_images(request: _Request, images: Tensor, features: Tensor, gradients: _Maps) -> _Maps:
    """Maps, from the gradients at the features: the backbone's part, one backward pass a gradient."""
    partition = _partition(request) if "vanilla" in request.rules else None
    sent = gradients
    if partition is not None:
        sent = gradients | {"vanilla": partition.reduce(gradients["vanilla"])}
    maps: _Maps = {rule: {} for rule in request.rules}
    passes = [(rule, name) for rule in sent for name in sent[rule]]
    for (rule, name), last in _marked(passes):
        request.switch.rule = rule
        (maps[rule][name],) = torch.autograd.grad(features, images, sent[rule][name], retain_graph=not last)
    if partition is not None:
        maps["vanilla"] = partition.restore(maps["vanilla"], gradients["vanilla"])
    return {rule: {name: maps[rule][name] for name in request.subsets} for rule in request.rules}


class _Partition(NamedTuple):
    """Three subsets of which the first is the disjoint union of the others, so that its map is the sum of theirs.

    Two of the three go through the backbone. Left out for each image is the largest: as the sum or difference of two that
    are no larger than itself, it keeps their digits.
    """

    whole: str
    part: str
    rest: str

    def _largest(self, gradients: dict[str, Tensor]) -> Tensor:
        norms = torch.stack([gradients[name].flatten(1).norm(dim=1) for name in self])  # (3, B)
        return norms.argmax(0)[:, None, None, None]

    def reduce(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients to send; in the places of ``whole`` and ``rest``, ``part`` stands in for what is left out there."""
        left_out, part = self._largest(gradients), gradients[self.part]
        sent = {name: gradient for name, gradient in gradients.items() if name not in self}
        sent[self.whole] = torch.where(left_out == 0, part, gradients[self.whole])
        sent[self.rest] = torch.where(left_out == 2, part, gradients[self.rest])
        return sent

    def restore(self, maps: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """All maps, from those of what was sent."""
        left_out, first, second = self._largest(gradients), maps[self.whole], maps[self.rest]
        difference = first - second
        found = {
            self.whole: torch.where(left_out == 0, first + second, first),
            self.part: torch.where(left_out == 0, first, torch.where(left_out == 1, difference, second)),
            self.rest: torch.where(left_out == 2, difference, second),
        }
        return maps | found


def _partition(request: _Request) -> _Partition | None:
    """Three subsets asked for whose maps add up under plain backpropagation, if there are."""
    model, head = request.model, request.model.head
    linear = (
        type(head) is CovarianceHead  # classes made from these two may do anything else
        and head.gradient.name == "exact"  # published rules are not additive across a cut
        and not isinstance(head.learned_factor, MatrixFactor)  # a factor from what is kept
        and type(model.classifier) is nn.Linear
    )
    # images are mixed within a pass, so each must go its own way: no batch statistics
    alone = not any(module.training for module in model.modules())
    if request.by_norm or request.cut != "exact" or not linear or not alone:
        return None
    kept = {name: subset.mask(head.channels) for name, subset in request.subsets.items()}
    whole = next((name for name, mask in kept.items() if mask.all()), None)
    for part, rest in combinations(kept, 2):
        if whole is not None and bool((kept[part] ^ kept[rest]).all()):
            return _Partition(whole, part, rest)
    return None


def _marked(items: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last."""
    for number, item in enumerate(items, start=1):
        yield item, number == len(items)


@contextmanager
def _settings_restored(head: Head) -> Iterator[None]:
    if not isinstance(head, CovarianceHead):
        yield
        return
    subset, cut, record, spectrum = head.subset, head.cut, head.record_spectrum, head.last_spectrum
    try:
        yield
    finally:
        head.subset, head.cut, head.record_spectrum, head.last_spectrum = subset, cut, record, spectrum


def _keep(head: Head, subset: EigenSubset, cut: str) -> None:
    """Keep a subset of a head's eigenvalues from now on, or say that it has none."""
    if isinstance(head, CovarianceHead):
        head.subset, head.cut = subset, cut
    elif subset.kind != "all":
        raise ValueError(
            f"{type(head).__name__} has no eigenvalues, so no subset '{subset}' of them: use subset='all', or a model with "
            "the head 'mpncov'"
        )


def _check_images(inputs: object, model: nn.Module) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        came = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"saliency takes images (B, 3, H, W) as a floating-point tensor, got {came}")
    for what, tensors in (("the images", [inputs]), ("the model", model.parameters())):
        if any(tensor.is_inference() for tensor in tensors):
            raise ValueError(
                f"{what} came out of torch.inference_mode(), where nothing can be differentiated: make them outside of it "
                "(torch.no_grad() will do), or clone them there"
            )


def _only_images(inputs: Tensor | tuple[Tensor, ...], additional_forward_args: object) -> Tensor:
    if additional_forward_args is not None and additional_forward_args != ():
        raise ValueError("the model takes images alone: leave additional_forward_args out")
    if not isinstance(inputs, tuple):
        return inputs
    if len(inputs) != 1:
        raise ValueError(f"the model takes one tensor of images, got a tuple of {len(inputs)}")
    return inputs[0]


def _several(what: str, items: Iterable[Any]) -> list[Any]:
    if isinstance(items, str | EigenSubset):
        raise ValueError(f"{what} is a list, got {str(items)!r}: write [{str(items)!r}]")
    found = list(items)
    if not found:
        raise ValueError(f"{what} is empty: name at least one")
    return found


def _read_target(target: Target, inputs: Tensor, num_classes: int) -> Tensor | None:
    """Classes (B,); None for those that will be predicted, and for the norm."""
    if isinstance(target, str):
        if target != "norm":
            raise ValueError(
                f"target is a class, one class for each image, None for the predicted, or 'norm', got {target!r}"
            )
        return None
    if not num_classes:
        raise ValueError("the model has no classifier (num_classes=0), so no class to explain: use target='norm'")
    if target is None:
        return None
    classes = torch.as_tensor(target, device=inputs.device)
    if classes.is_floating_point() or classes.dtype == torch.bool:
        raise ValueError(f"classes are whole numbers, got {classes.dtype}")
    if classes.numel() != 1 and classes.shape != inputs.shape[:1]:
        raise ValueError(f"expected one class, or {len(inputs)} for as many images, got shape {tuple(classes.shape)}")
    classes = classes.long().flatten().expand(len(inputs))
    if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        low, high = int(classes.min()), int(classes.max())
        raise ValueError(f"classes go from 0 to {num_classes - 1}, got {low if low < 0 else high}")
    return classes


def _warn_of_training(model: nn.Module) -> None:
    if model.training and model not in _told:
        _told.add(model)
        warn(
            "the model is in training mode: its maps depend on the rest of the batch and on chance (dropout), and running "
            "statistics are updated: call model.eval() first",
            stacklevel=3,
        )
