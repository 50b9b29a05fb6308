"""The model: a backbone that makes a feature map, a head that pools it to a vector, and a classifier."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError, ShortRankWarning
from eigengrain.heads import Head, create_head
from eigengrain.models.backbone import Backbone
from eigengrain.models.param_groups import prefix_matcher
from eigengrain.text import counted

#: ``reduce="auto"``: maps with more channels than the first number are reduced to the second
AUTO_REDUCE_ABOVE, AUTO_REDUCE_TO = 512, 256

Reduction = int | Literal["auto"] | None


def build_head(name: str, channels: int, reduce: Reduction = "auto", options: dict[str, Any] | None = None) -> Head:
    """Create a head for a map with ``channels`` channels; ``auto`` reduces wide maps for heads with quadratic vectors.

    Example:
        >>> build_head("gap", 2048).channels, build_head("mpncov", 2048).channels
        (2048, 256)
    """
    options = options or {}
    if reduce != "auto":
        return create_head(name, channels, reduce=reduce, **options)
    if channels <= AUTO_REDUCE_ABOVE:
        return create_head(name, channels, **options)
    head = create_head(name, channels, reduce=AUTO_REDUCE_TO, **options)
    return head if head.quadratic else create_head(name, channels, **options)


class CovarianceNet(nn.Module):
    """Image to class scores: ``backbone`` → feature map → ``head`` → vector → ``classifier``.

    It follows timm's interface for models, so that timm's optimisers, layer decay, data configs and weight averaging work.
    Created by :func:`create_model`.

    Attributes:
        backbone: the network up to its feature map, with its library's own parameter names.
        head: from the feature map to a vector.
        classifier: from the vector to class scores; an identity for ``num_classes=0``.
        num_classes: number of classes.
        num_features: channels of the feature map.
        head_hidden_size: length of the vector.
        pretrained_cfg: preprocessing (mean, std, input size, crop) and description, as in timm.
        config: the arguments of :func:`create_model` that build this model again.
        class_names: names of the classes in the order of the scores, or None.
        layout: layout of the backbone's own features, before they become a map.
        backbone_classifier: name of the backbone's own classifier, which was removed.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: str,
        num_classes: int,
        reduce: Reduction = "auto",
        head_options: dict[str, Any] | None = None,
        drop_rate: float = 0.0,
    ):
        super().__init__()
        if not isinstance(drop_rate, int | float) or not 0 <= drop_rate < 1:
            raise ArgumentError("drop_rate", "must be a number from 0 to below 1", drop_rate)
        self.backbone = backbone.net
        self.head: Head = build_head(head, backbone.channels, reduce, head_options)
        self.classifier: nn.Module = nn.Identity()
        self.num_features = backbone.channels
        self.drop_rate = drop_rate
        self.pretrained_cfg: dict[str, Any] = {**backbone.description, "classifier": "classifier"}
        self.class_names: list[str] | None = None
        self.config: dict[str, Any] = {
            "backbone": backbone.name,
            "head": head,
            "num_classes": num_classes,
            "reduce": reduce,
            "head_options": dict(head_options or {}),
            "drop_rate": drop_rate,
            **backbone.options,
        }
        self.layout = backbone.layout
        self.backbone_classifier = backbone.classifier
        self._rank_warned = False
        self.reset_classifier(num_classes)

    @property
    def num_classes(self) -> int:
        return int(self.config["num_classes"])

    @property
    def head_hidden_size(self) -> int:
        return self.head.out_features

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → feature map (B, num_features, h, w)."""
        self._check_images(x)
        size = (x.shape[-2], x.shape[-1])
        try:
            features = self.backbone.forward_features(x)  # type: ignore[operator]
        except (RuntimeError, AssertionError, IndexError) as error:
            built_for = self.config.get("img_size")
            if not built_for or size == tuple(built_for) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._size_error(built_for, size, f" ({error})") from error
        return self.layout.to_map(features, self.backbone, size)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map → class scores (B, num_classes), or the vector (B, head_hidden_size) with ``pre_logits``."""
        self.warn_of_short_rank(x)
        return self.forward_vector(self.head(x), pre_logits)

    def forward_vector(self, vector: Tensor, pre_logits: bool = False) -> Tensor:
        """The head's vector → class scores; with ``pre_logits`` the vector after dropout."""
        if self.drop_rate:
            vector = nn.functional.dropout(vector, self.drop_rate, self.training)
        if pre_logits:
            return vector
        if isinstance(self.classifier, nn.Linear):  # in half precision if the model is; the vector stays in float32
            vector = vector.to(self.classifier.weight.dtype)
        return self.classifier(vector)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → class scores (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, and the head if ``global_pool`` names one.

        Args:
            num_classes: number of classes; 0 for an identity, so that the model returns the vector.
            global_pool: name of a head, created with its default options and the reduction of this model.
        """
        if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 0:
            raise ArgumentError("num_classes", "must be an integer of at least 0", num_classes)
        num_classes = int(num_classes)  # NumPy integers are accepted
        like = next(self.backbone.parameters())
        if global_pool is not None:
            head = build_head(global_pool, self.num_features, self.config["reduce"])
            self.head = head.to(like.device, like.dtype).train(self.training)
            self.config |= {"head": global_pool, "head_options": {}}
        classifier = self.head.classifier(num_classes) if num_classes else nn.Identity()
        self.classifier = classifier.to(like.device, like.dtype).train(self.training)
        if num_classes != self.num_classes:
            self.class_names = None
        self.config["num_classes"] = self.pretrained_cfg["num_classes"] = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass instead of keeping them."""
        try:
            self.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]
        except (AttributeError, AssertionError) as error:  # timm's way to refuse is an assertion
            if enable:
                name, remedy = self.config["backbone"], "use smaller batches"
                raise ArgumentError("backbone", "has no gradient checkpointing", name, remedy) from error

    def group_matcher(self, coarse: bool = False) -> dict[str, Any] | Callable[[str], tuple[float, ...]]:
        """Layers of the backbone in order, then head, then classifier, for timm's layer-wise decay."""
        matcher = getattr(self.backbone, "group_matcher", None)
        return prefix_matcher(matcher(coarse=coarse) if matcher else None)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that should not decay, as listed by backbone and head."""
        of_backbone: set[str] = getattr(self.backbone, "no_weight_decay", set)()
        return {f"backbone.{name}" for name in of_backbone} | {f"head.{name}" for name in self.head.no_weight_decay()}

    def _check_images(self, x: Tensor) -> None:
        channels = self.pretrained_cfg["input_size"][0]
        problem = f"must be a tensor of images (B, {channels}, H, W)"
        if not isinstance(x, Tensor):
            raise ArgumentError("x", problem, type(x).__name__)
        if not x.is_floating_point():
            remedy = "divide by 255, subtract the mean and divide by the std of model.pretrained_cfg"
            raise ArgumentError("x", "must be normalised images in floating point", x.dtype, remedy)
        if x.ndim != 4 or x.shape[1] != channels:
            raise ArgumentError("x", problem, tuple(x.shape))
        embedding = getattr(self.backbone, "patch_embed", None)
        size, built_for = (x.shape[-2], x.shape[-1]), getattr(embedding, "img_size", None)
        if built_for and getattr(embedding, "strict_img_size", False) and size != tuple(built_for):
            raise self._size_error(built_for, size)
        patch = getattr(embedding, "patch_size", None)
        if patch and not getattr(embedding, "dynamic_img_pad", True) and (size[0] % patch[0] or size[1] % patch[1]):
            problem = f"must have sides that are multiples of {patch[0]} × {patch[1]} for this backbone"
            raise ArgumentError("x", problem, size, "resize or crop the images")

    def _size_error(self, built_for: tuple[int, int], size: tuple[int, int], reason: str = "") -> ArgumentError:
        problem = f"must be images of {built_for[0]} × {built_for[1]}, the size of backbone {self.config['backbone']!r}"
        return ArgumentError("x", problem + reason, size, f"create the model with img_size={size}")

    def warn_of_short_rank(self, x: Tensor) -> None:
        """Warn once if a map has too few positions for its channels, so that the covariance is singular for every image."""
        if self._rank_warned or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return
        positions, d = x.shape[-2] * x.shape[-1], self.head.channels
        if self.head.rank_sensitive and positions - 1 < d:
            self._rank_warned = True
            zero = d - positions + 1
            which = f"{zero} smallest eigenvalues are" if zero > 1 else "smallest eigenvalue is"
            # a ViT has patches of one size, so no last stride
            strided = self.config.get("last_stride") != 1 and self.layout.kind != "tokens"
            remedies = ["last_stride=1", "larger images"] if strided else ["larger images"]
            # a single position gives a zero matrix for any number of channels
            fewer = f", or reduce={positions - 1} or less" if positions > 1 else ""
            use = (", " if fewer else " or ").join(remedies) + fewer
            message = (
                f"the covariance of {d} channels from {x.shape[-2]} × {x.shape[-1]} = {counted(positions, 'position')} has "
                f"rank {positions - 1} at most, so its {which} 0 by construction: use {use}"
            )
            warnings.warn(ShortRankWarning(message, d, positions), stacklevel=2)


def check_unwrapped(model: object) -> None:
    """Raise unless a model is a :class:`CovarianceNet`, not one inside ``DistributedDataParallel`` or the like."""
    if not isinstance(model, CovarianceNet):
        remedy = "pass model.module (of DistributedDataParallel) or model._orig_mod (of torch.compile)"
        raise ArgumentError("model", "must be an unwrapped CovarianceNet", type(model).__name__, remedy)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Temporarily switch a model to eval mode; afterwards each module has its own mode again.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(3).eval(), nn.Dropout())
        >>> with eval_mode(model):
        ...     model.training
        False
        >>> [module.training for module in model]
        [False, True]
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
