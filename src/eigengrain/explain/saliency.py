r"""EigenSaliency: the gradient of a class score to the image, with a subset of the eigenvalues kept (Section 3.2).

.. math:: M_S = \frac{\partial}{\partial I}\, y_c\big(U f(\Lambda_S) U^T\big), \qquad
   \Lambda_S = \text{the eigenvalues in } S, \text{ zero elsewhere (Eq. 5)}

The class c is the same for every subset, and the gradient passes each ReLU by one of three rules
(:mod:`eigengrain.explain.relu_rules`). A dropped eigenvalue has no gradient of its own, but the kept subspace turns with
the image: ``cut="exact"`` follows it, ``cut="projector"`` holds it fixed.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError, MissingPackageError
from eigengrain.explain.relu_rules import ReLURules, check_rule
from eigengrain.explain.targets import Classes, read_classes
from eigengrain.functional import EigenSubset
from eigengrain.functional.spectral import check_cut
from eigengrain.heads import CovarianceHead, Head, SpectralHead
from eigengrain.heads.covariance import MatrixFactor
from eigengrain.models import CovarianceNet
from eigengrain.models.model import check_unwrapped

try:
    from captum.attr import GradientAttribution
    from captum.log import log_usage
except ImportError as error:
    raise MissingPackageError("saliency maps need captum: pip install 'eigengrain[explain]'") from error

_Method = TypeVar("_Method", bound=Callable[..., object])


def _logged(method: _Method) -> _Method:
    """captum's decorator, whose ``__wrapped__`` NoiseTunnel needs; it is untyped and would erase the type of the method."""
    logged: _Method = log_usage()(method)
    return logged


Subset = str | EigenSubset
Target = Classes | str | None

#: models for which a warning about training mode was given
_warned: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class SubsetMaps:
    r"""Signed gradient maps of one batch for several subsets, and the gaps at their cuts.

    The gap of a subset is :math:`(\lambda_k - \lambda_{k+1})/\lambda_k` at its narrowest cut. An exact map grows with its
    inverse. It is infinite if nothing is cut, and NaN if a cut lies between zeros.
    """

    maps: dict[str, Tensor]  #: subset → (B, 3, H, W)
    gaps: dict[str, Tensor]  #: subset → (B,)
    targets: Tensor  #: (B,) explained class, −1 for the norm
    rule: str
    cut: str


class EigenSaliency(GradientAttribution):
    """Gradient maps of eigenvalue subsets, as an attribution method of captum.

    It composes with captum: ``NoiseTunnel(EigenSaliency(model))`` smooths it, and a method that has a ``gradient_func``,
    such as ``IntegratedGradients``, uses subset and rule if that is set to :meth:`gradient_function`. The arguments are
    those of :func:`attribute_rules`, which computes many maps at less than their separate cost.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov+seb", num_classes=4, reduce=3).eval()
        >>> EigenSaliency(model, rule="guided").attribute(torch.ones(1, 3, 64, 64), subset="last:1").shape
        torch.Size([1, 3, 64, 64])
    """

    def __init__(self, model: CovarianceNet, rule: str = "vanilla"):
        check_unwrapped(model)
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
        """Compute the signed map of one subset, (B, 3, H, W), in a tuple if ``inputs`` is one.

        Pass a class as the target with ``NoiseTunnel``, because noise can change the predicted one.
        ``additional_forward_args``, which captum's methods pass, must be empty, because the model takes only images.
        """
        images = _only_images(inputs, additional_forward_args)
        (signed,) = self.attribute_subsets(images, [subset], target, cut).maps.values()
        return (signed,) if isinstance(inputs, tuple) else signed

    def attribute_subsets(
        self, inputs: Tensor, subsets: Sequence[Subset], target: Target = None, cut: str = "exact"
    ) -> SubsetMaps:
        """Compute signed maps of several subsets in one forward pass, and the gaps at their cuts."""
        return attribute_rules(self.model, inputs, subsets, [self.rule], target, cut)[self.rule]

    def gradient_function(self, subset: Subset = "all", cut: str = "exact") -> Callable[..., tuple[Tensor, ...]]:
        """Return a function that can be set as the ``gradient_func`` of captum's methods, such as IntegratedGradients."""

        def gradient(
            forward_fn: object, inputs: Any, target_ind: Target = None, additional_forward_args: object = None
        ) -> tuple[Tensor, ...]:
            signed = self.attribute(inputs, target_ind, subset, cut, additional_forward_args)
            return signed if isinstance(signed, tuple) else (signed,)

        return gradient


def attribute_rules(
    model: CovarianceNet,
    inputs: Tensor,
    subsets: Sequence[Subset],
    rules: Sequence[str],
    target: Target = None,
    cut: str = "exact",
) -> dict[str, SubsetMaps]:
    r"""Compute maps of several eigenvalue subsets under several rules, with one forward pass of the backbone.

    Each rule and subset takes one backward pass. One pass is saved if maps add up: under ``vanilla`` with ``cut="exact"``
    and a class as target, :math:`M_{all} = M_S + M_{\bar S}`, so only two of the three go through the backbone. The third
    is, for each image, the one with the largest gradient at the feature map, so that no digits cancel. This applies in eval
    mode to heads that are linear in the kept eigenvalues.

    The model is restored afterwards, also after an error: its mode, gradients, and its head's subset and cut. Because the
    head's subset is changed during the call, a model must not be used by several threads at once.

    Args:
        model: in eval mode. Subsets other than ``all`` need a :class:`eigengrain.heads.SpectralHead`.
        inputs: images (B, 3, H, W), normalised for the model; ``requires_grad`` is ignored and not changed.
        subsets: such as ``["all", "top:206", "last:50"]``.
        rules: some of ``vanilla``, ``deconv`` and ``guided``. The last two are defined for networks with ReLUs only.
        target: a class, or one class per image, in any form that captum takes (an integer, a list of integers or of tuples
            with one, a tensor (B,) or (B, 1)); None for the class that the model predicts from all eigenvalues; or
            ``"norm"`` for the norm of the vector before the classifier, with the subset kept. The class is the same for
            every subset.
        cut: ``exact`` or ``projector``, see :func:`eigengrain.functional.spectral_function`.

    Returns:
        rule → :class:`SubsetMaps`.

    Raises:
        ReLURuleError: for a rule that is not defined for the network.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3).eval()
        >>> results = attribute_rules(model, torch.ones(2, 3, 64, 64), ["all", "last:2"], ["vanilla", "deconv"], target=1)
        >>> results["deconv"].maps["last:2"].shape, results["vanilla"].targets
        (torch.Size([2, 3, 64, 64]), tensor([1, 1]))
    """
    check_unwrapped(model)
    _check_images(inputs, model)
    request = _Request(
        model=model,
        subsets={str(subset): subset for subset in map(EigenSubset.parse, _as_list("subsets", subsets))},
        rules=tuple(dict.fromkeys(_as_list("rules", rules))),
        classes=_read_target(target, inputs, model.num_classes),
        by_norm=isinstance(target, str),
        cut=cut,
        switch=ReLURules(model=model),
    )
    for rule in request.rules:
        check_rule(rule)
    check_cut(cut)
    _warn_about_training(model)
    with ExitStack() as restore, torch.inference_mode(False), torch.enable_grad():
        if isinstance(model.head, SpectralHead):
            restore.callback(setattr, model.head, "record_spectrum", model.head.record_spectrum)
            model.head.record_spectrum = False
        for subset in request.subsets.values():  # check all subsets before any work
            with _keeping(model.head, subset, cut):
                pass
        images = inputs.detach().requires_grad_()
        with request.watched():
            features = model.forward_features(images)
        if not features.requires_grad:
            raise ArgumentError("model", "must be differentiable: the feature map has no gradient to the images")
        gradients, gaps, targets = _feature_gradients(request, features)
        maps = _image_gradients(request, images, features, gradients)
    return {rule: SubsetMaps(maps[rule], gaps, targets, rule, cut) for rule in request.rules}


@dataclass(frozen=True)
class _Request:
    """Checked arguments, and the switch that sets the rule of the ReLUs."""

    model: CovarianceNet
    subsets: dict[str, EigenSubset]
    rules: tuple[str, ...]
    classes: Tensor | None
    by_norm: bool
    cut: str
    switch: ReLURules

    @property
    def special(self) -> str | None:
        """The first rule that is not plain backpropagation."""
        return next((rule for rule in self.rules if rule != "vanilla"), None)

    def watched(self) -> AbstractContextManager[Any]:
        """Context for a forward pass; plain backpropagation needs none."""
        return self.switch if self.special else nullcontext()


#: rule → subset → tensor
_Maps = dict[str, dict[str, Tensor]]


def _feature_gradients(request: _Request, features: Tensor) -> tuple[_Maps, dict[str, Tensor], Tensor]:
    """Pass through the head, forward and backward: gradients at the feature map, gaps by subset, and classes."""
    model, head, switch = request.model, request.model.head, request.switch
    leaf = features.detach().requires_grad_()
    targets = torch.full((len(leaf),), -1, device=leaf.device) if request.by_norm else request.classes
    # all eigenvalues first: this pass also predicts the class
    names = sorted(request.subsets, key=lambda name: not request.subsets[name].covers(head.channels))
    if targets is None and not request.subsets[names[0]].covers(head.channels):
        with torch.no_grad(), _keeping(head, EigenSubset.all(), request.cut):
            targets = model.forward_head(leaf).argmax(1)

    gradients: _Maps = {rule: {} for rule in request.rules}
    spectrum: list[Tensor] = []
    before = switch.relus
    for name, output in zip(names, _head_outputs(request, leaf, names, spectrum), strict=True):
        if request.special and name == names[0]:
            switch.require_relus(request.special, features, output)
        if targets is None:
            targets = output.argmax(1)
        scores = output.norm(dim=1) if request.by_norm else output.gather(1, targets[:, None]).squeeze(1)
        for rule in request.rules:
            # a head without ReLUs has one gradient for all rules
            if rule == request.rules[0] or switch.relus > before:
                switch.rule = rule
                (gradient,) = torch.autograd.grad(scores.sum(), leaf, retain_graph=True)
            gradients[rule][name] = gradient
    assert targets is not None
    uncut = torch.full((len(leaf),), float("inf"), device=leaf.device)
    gaps = {name: subset.relative_gap(*spectrum) if spectrum else uncut for name, subset in request.subsets.items()}
    return gradients, gaps, targets


def _head_outputs(request: _Request, leaf: Tensor, names: list[str], spectrum: list[Tensor]) -> Iterator[Tensor]:
    """The output for each subset; the eigenvalues, if there are any, are appended to ``spectrum``."""
    model, head = request.model, request.model.head
    # a subclass can do more than pool_subsets, and other factors have ReLUs of their own
    if type(head) is CovarianceHead and head.learned_factor is None:
        model.warn_of_short_rank(leaf)
        pooled, beside = model.split_features(leaf)
        with request.watched():
            reduced = head.reduce(pooled)
        vectors, eigenvalues = head.pool_subsets(reduced, [request.subsets[name] for name in names], request.cut)
        spectrum.append(eigenvalues)
        for vector in vectors:
            with request.watched():  # the mid-level branch has a ReLU
                output = model.forward_vector(vector, pre_logits=request.by_norm, beside=beside)
            yield output
        return
    if isinstance(head, SpectralHead):
        with torch.no_grad():
            spectrum.append(head.eigenvalues(head.reduce(model.split_features(leaf)[0])))
    for name in names:
        with _keeping(head, request.subsets[name], request.cut), request.watched():
            output = model.forward_head(leaf, pre_logits=request.by_norm)
        yield output


def _image_gradients(request: _Request, images: Tensor, features: Tensor, gradients: _Maps) -> _Maps:
    """Pass each gradient at the features back through the backbone."""
    partition = _find_partition(request) if "vanilla" in request.rules else None
    sent = gradients if partition is None else gradients | {"vanilla": partition.reduce(gradients["vanilla"])}
    maps: _Maps = {rule: {} for rule in request.rules}
    passes = [(rule, name) for rule in sent for name in sent[rule]]
    for rule, name in passes:
        request.switch.rule = rule
        retain = (rule, name) != passes[-1]
        (maps[rule][name],) = torch.autograd.grad(features, images, sent[rule][name], retain_graph=retain)
    if partition is not None:
        maps["vanilla"] = partition.restore(maps["vanilla"], gradients["vanilla"])
    return {rule: {name: maps[rule][name] for name in request.subsets} for rule in request.rules}


class _Partition(NamedTuple):
    """Three subsets of which the first is the disjoint union of the others, so that its map is the sum of theirs.

    Two of the three go through the backbone. The largest is left out for each image: as the sum or difference of two maps
    that are not larger, it keeps their digits.
    """

    whole: str
    part: str
    rest: str

    def _largest(self, gradients: dict[str, Tensor]) -> Tensor:
        norms = torch.stack([gradients[name].flatten(1).norm(dim=1) for name in self])  # (3, B)
        return norms.argmax(0)[:, None, None, None]

    def reduce(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients to send; ``part`` takes the place of ``whole`` or ``rest`` for images where that is left out."""
        left_out, part = self._largest(gradients), gradients[self.part]
        sent = {name: gradient for name, gradient in gradients.items() if name not in self}
        sent[self.whole] = torch.where(left_out == 0, part, gradients[self.whole])
        sent[self.rest] = torch.where(left_out == 2, part, gradients[self.rest])
        return sent

    def restore(self, maps: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """All maps, from the maps of the sent gradients."""
        left_out, first, second = self._largest(gradients), maps[self.whole], maps[self.rest]
        difference = first - second
        return maps | {
            self.whole: torch.where(left_out == 0, first + second, first),
            self.part: torch.where(left_out == 0, first, torch.where(left_out == 1, difference, second)),
            self.rest: torch.where(left_out == 2, difference, second),
        }


def _find_partition(request: _Request) -> _Partition | None:
    """Three of the subsets whose maps add up under plain backpropagation, or None."""
    model, head = request.model, request.model.head
    linear = (
        type(head) is CovarianceHead  # subclasses of these two can do anything
        and head.gradient.name == "exact"  # published gradient rules are not additive across a cut
        and not isinstance(head.learned_factor, MatrixFactor)  # a factor that depends on the subset
        and type(model.classifier) is nn.Linear
        and not model.beside_channels  # its gradient is a part of every subset's map
    )
    # a pass mixes gradients of different subsets in one batch, so batch statistics must not couple its images
    independent = not any(module.training for module in model.modules())
    if request.by_norm or request.cut != "exact" or not linear or not independent:
        return None
    kept = {name: subset.mask(head.channels) for name, subset in request.subsets.items()}
    wholes = (name for name, mask in kept.items() if mask.all())
    pairs = (pair for pair in combinations(kept, 2) if (kept[pair[0]] ^ kept[pair[1]]).all())
    return next((_Partition(whole, *pair) for whole in wholes for pair in pairs), None)


def _keeping(head: Head, subset: EigenSubset, cut: str) -> AbstractContextManager[None]:
    """Context in which the head keeps a subset."""
    if isinstance(head, SpectralHead):
        return head.keeping(subset, cut)
    if subset.kind != "all":
        problem = f"cannot be selected: {type(head).__name__} has no eigenvalues"
        raise ArgumentError("subset", problem, str(subset), "use 'all', or a model with the head 'mpncov'")
    return nullcontext()


def _check_images(inputs: object, model: nn.Module) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        kind = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ArgumentError("inputs", f"must be images (B, 3, H, W) as a floating-point tensor, not {kind}")
    for argument, tensors in (("inputs", [inputs]), ("model", model.parameters())):
        if any(tensor.is_inference() for tensor in tensors):
            problem = "cannot be differentiated, because it was created in torch.inference_mode()"
            raise ArgumentError(argument, problem, remedy="create it outside, or use torch.no_grad()")


def _only_images(inputs: Tensor | tuple[Tensor, ...], additional_forward_args: object) -> Tensor:
    if additional_forward_args is not None and additional_forward_args != ():
        raise ArgumentError("additional_forward_args", "must be empty: the model takes only images")
    if not isinstance(inputs, tuple):
        return inputs
    if len(inputs) != 1:
        raise ArgumentError("inputs", f"must be one tensor of images, not a tuple of {len(inputs)}")
    return inputs[0]


def _as_list(argument: str, items: Iterable[Any]) -> list[Any]:
    if isinstance(items, str | EigenSubset):
        raise ArgumentError(argument, "must be a list", str(items), f"write [{str(items)!r}]")
    listed = list(items)
    if not listed:
        raise ArgumentError(argument, "must not be empty")
    return listed


def _read_target(target: Target, inputs: Tensor, num_classes: int) -> Tensor | None:
    """Classes (B,); None for the predicted classes and for the norm."""
    if isinstance(target, str):
        if target != "norm":
            raise ArgumentError("target", "must be a class, one class per image, None (predicted class) or 'norm'", target)
        return None
    if not num_classes:
        raise ArgumentError("target", "cannot be a class: the model has no classifier", remedy="use 'norm'")
    if target is None:
        return None
    return read_classes(target, inputs, num_classes)


def _warn_about_training(model: nn.Module) -> None:
    if model.training and model not in _warned:
        _warned.add(model)
        effect = "maps depend on the other images of the batch and on dropout, and running statistics are updated"
        warn(f"the model is in training mode: {effect}. Call model.eval() first.", stacklevel=3)
