"""The model: a backbone's feature map, a head that makes a vector of it, a classifier."""

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eigengrain.heads import Head, create_head
from eigengrain.models.backbone import Backbone
from eigengrain.models.param_groups import prefixed_matcher
from eigengrain.text import counted

#: ``reduce="auto"``: maps with more channels than the first number are reduced to the second
AUTO_REDUCE_ABOVE, AUTO_REDUCE_TO = 512, 256

Reduction = int | Literal["auto"] | None


def fitting_head(name: str, channels: int, reduce: Reduction = "auto", options: dict[str, Any] | None = None) -> Head:
    """A head for a map of so many channels, reduced where a vector of their squares would be too long.

    Example:
        >>> fitting_head("gap", 2048).channels
        2048
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

    It keeps timm's contract for models, so that timm's optimisers, layer decay, data configs and averaged weights work.
    Made by :func:`create_model`.

    Attributes:
        backbone: the network up to its feature map, with its library's own parameter names.
        head: from the feature map to a vector.
        classifier: from the vector to class scores; an identity for ``num_classes=0``.
        num_classes: of the classifier.
        num_features: channels of the feature map.
        head_hidden_size: length of the vector.
        pretrained_cfg: preprocessing (mean, std, input size, crop) and description, as timm has it.
        config: the arguments of :func:`create_model` that make this model again.
        class_names: of the classes, in the order of the scores, or None.
        layout: of the backbone's own features, before they become a map.
        backbone_classifier: what the backbone's own classifier was called before it was removed.
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
            raise ValueError(f"drop_rate must be a number from 0 to below 1, got {drop_rate!r}")
        self.backbone = backbone.net
        self.head: Head = fitting_head(head, backbone.channels, reduce, head_options)
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
            raise ValueError(
                f"backbone {self.config['backbone']!r} was built for images of {built_for[0]} × {built_for[1]}, and does "
                f"not run on {size[0]} × {size[1]} ({error}): create the model with img_size={size}"
            ) from error
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
        if isinstance(self.classifier, nn.Linear):  # in half precision if the model is, where the vector stays in single
            vector = vector.to(self.classifier.weight.dtype)
        return self.classifier(vector)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → class scores (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, and another head if ``global_pool`` names one, with that head's own default options.

        Args:
            num_classes: 0 for an identity, so that the model returns the vector.
            global_pool: name of a head; the reduction stays as it was asked for when the model was made.
        """
        if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 0:
            raise ValueError(f"num_classes must be a whole number of at least 0, got {num_classes!r}")
        num_classes = int(num_classes)  # a count of labels may be one of NumPy's
        like = next(self.backbone.parameters())
        if global_pool is not None:
            head = fitting_head(global_pool, self.num_features, self.config["reduce"])
            self.head = head.to(like.device, like.dtype).train(self.training)
            self.config |= {"head": global_pool, "head_options": {}}
        classifier = self.head.classifier(num_classes) if num_classes else nn.Identity()
        self.classifier = classifier.to(like.device, like.dtype).train(self.training)
        if num_classes != self.num_classes:
            self.class_names = None
        self.config["num_classes"] = self.pretrained_cfg["num_classes"] = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass instead of keeping them."""
        set_checkpointing = getattr(self.backbone, "set_grad_checkpointing", None)
        try:
            if set_checkpointing is None:
                raise AssertionError
            set_checkpointing(enable)
        except AssertionError as error:
            if enable:
                name = self.config["backbone"]
                raise ValueError(f"backbone {name!r} has no gradient checkpointing: use smaller batches") from error

    def group_matcher(self, coarse: bool = False) -> dict[str, Any] | Callable[[str], tuple[float, ...]]:
        """Layers of the backbone in order, then head, then classifier, for timm's layer-wise decay."""
        matcher = getattr(self.backbone, "group_matcher", None)
        return prefixed_matcher(matcher(coarse=coarse) if matcher else None)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that should not decay, as backbone and head list them."""
        names: set[str] = set()
        for part in ("backbone", "head"):
            listed = getattr(getattr(self, part), "no_weight_decay", set)
            names |= {f"{part}.{name}" for name in listed()}
        return names

    def _check_images(self, x: Tensor) -> None:
        channels = self.pretrained_cfg["input_size"][0]
        if not isinstance(x, Tensor):
            raise ValueError(f"the model expects a tensor of images (B, {channels}, H, W), got {type(x).__name__}")
        if not x.is_floating_point():
            raise ValueError(
                f"the model expects normalised images in floating point, got {x.dtype}: divide by 255, subtract the mean "
                "and divide by the deviation in model.pretrained_cfg"
            )
        if x.ndim != 4 or x.shape[1] != channels:
            raise ValueError(f"the model expects images (B, {channels}, H, W), got {tuple(x.shape)}")
        embedding = getattr(self.backbone, "patch_embed", None)
        size, built_for = (x.shape[-2], x.shape[-1]), getattr(embedding, "img_size", None)
        if built_for and getattr(embedding, "strict_img_size", False) and size != tuple(built_for):
            raise ValueError(
                f"backbone {self.config['backbone']!r} was built for images of {built_for[0]} × {built_for[1]}, got "
                f"{size[0]} × {size[1]}: create the model with img_size={size}"
            )
        patch = getattr(embedding, "patch_size", None)
        if patch and not getattr(embedding, "dynamic_img_pad", True) and (size[0] % patch[0] or size[1] % patch[1]):
            raise ValueError(
                f"backbone {self.config['backbone']!r} takes sizes that are multiples of {patch[0]} × {patch[1]}, got "
                f"{size[0]} × {size[1]}: resize or crop the images"
            )

    def warn_of_short_rank(self, x: Tensor) -> None:
        """Say once that fewer positions than channels make a singular covariance, whatever the images show."""
        if self._rank_warned or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return
        positions, d = x.shape[-2] * x.shape[-1], self.head.channels
        if getattr(self.head, "rank_sensitive", False) and positions - 1 < d:
            self._rank_warned = True
            zero = d - positions + 1
            which = f"{zero} smallest eigenvalues are" if zero > 1 else "smallest eigenvalue is"
            # patches of one size, as in a ViT, have no last stride
            strided = self.config.get("last_stride") != 1 and self.layout.kind != "tokens"
            remedies = ["last_stride=1", "larger images"] if strided else ["larger images"]
            # of one position nothing is left however few the channels are
            fewer = f", or reduce={positions - 1} or less" if positions > 1 else ""
            use = (", " if fewer else " or ").join(remedies) + fewer
            warnings.warn(
                f"the covariance of {d} channels from {x.shape[-2]} × {x.shape[-1]} = {counted(positions, 'position')} has "
                f"rank {positions - 1} at most, so its {which} 0 by construction: use {use}",
                stacklevel=2,
            )


def check_bare(model: object, taker: str) -> None:
    """See that a model is one of :func:`create_model`, with nothing around it.

    Args:
        model: what was given.
        taker: who takes it, for the message.

    Raises:
        ValueError: for anything else, such as a model in ``DistributedDataParallel``.
    """
    if not isinstance(model, CovarianceNet):
        raise ValueError(
            f"{taker} takes a model of create_model, got {type(model).__name__}: take it out of what was put around it "
            "(model.module of DistributedDataParallel, model._orig_mod of torch.compile)"
        )
