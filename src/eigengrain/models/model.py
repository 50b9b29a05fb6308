"""The model: a backbone that makes a feature map, a head that pools it to a vector, and a classifier."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from eigengrain.errors import ArgumentError, ShortRankWarning
from eigengrain.heads import Head, LossTerms, Parts, TransformerHead, create_head
from eigengrain.models.attention import TimmTransformer
from eigengrain.models.backbone import Backbone, feature_parts, unfold
from eigengrain.models.mid_level import MidLevel
from eigengrain.models.param_groups import prefix_matcher
from eigengrain.text import counted

#: ``reduce="auto"``: maps with more channels than the first number are reduced to the second
AUTO_REDUCE_ABOVE, AUTO_REDUCE_TO = 512, 256
#: and, where a covariance would otherwise be singular, to the largest of these numbers below the number of positions
AUTO_REDUCE_SHORT = (192, 128, 96, 64, 48, 32, 24, 16, 12, 8)
#: ends of the names of the buffers that scale a vector before its classifier
VECTOR_FACTORS = ("vector_scale", "token_scale")

Reduction = int | Literal["auto"] | None


def build_head(
    name: str, channels: int | Sequence[int], reduce: Reduction = "auto", options: dict[str, Any] | None = None
) -> Head:
    """Create a head for a map with ``channels`` channels, or for the stacked maps of stages with these channels.

    ``auto`` reduces wide maps for heads with quadratic vectors.

    Example:
        >>> build_head("gap", 2048).channels, build_head("mpncov", 2048).channels
        (2048, 256)
    """
    options = options or {}
    if not name:
        if options:
            raise ArgumentError("head_options", "must be empty for a model without pooling", options)
        return Unpooled(channels)
    if reduce != "auto":
        return create_head(name, channels, reduce=reduce, **options)
    if (channels if isinstance(channels, int) else sum(channels)) <= AUTO_REDUCE_ABOVE:
        return create_head(name, channels, **options)
    head = create_head(name, channels, reduce=AUTO_REDUCE_TO, **options)
    return head if head.quadratic else create_head(name, channels, **options)


def full_rank_reduce(head: Head, positions: int) -> int | None:
    """Channels that ``reduce="auto"`` uses instead of those of a head, so that maps with few positions have full rank.

    None if the head has fewer channels than the map has positions, or does not depend on the rank.

    Example:
        >>> head = build_head("mpncov", 2048)
        >>> full_rank_reduce(head, 28 * 28), full_rank_reduce(head, 14 * 14), full_rank_reduce(head, 7 * 7)
        (None, 192, 48)
    """
    if not head.rank_sensitive or head.channels < positions:
        return None
    return next((channels for channels in AUTO_REDUCE_SHORT if channels < positions), None)


class Unpooled(Head):
    """The feature map itself, for a model without pooling and classifier (``global_pool=""`` in timm)."""

    quadratic = False

    def __init__(self, in_channels: int | Sequence[int]):
        super().__init__(in_channels)
        self.out_features = self.in_channels

    def pool(self, x: Tensor) -> Tensor:
        return x


class CovarianceNet(nn.Module):
    """Image to class scores: ``backbone`` → feature map → ``head`` → vector → ``classifier``.

    It follows timm's interface for models, so that timm's optimisers, layer decay, data configs, weight averaging and
    feature extraction work. ``torch.fx`` traces it if it traces the backbone, with the head as one node. Created by
    :func:`create_model`.

    Attributes:
        backbone: the network up to its feature map, with its library's own parameter names.
        head: from the feature map to a vector.
        classifier: from the vector to class scores; an identity for ``num_classes=0``.
        num_classes: number of classes.
        mid_level: the branch beside the head, a :class:`~eigengrain.models.mid_level.MidLevel`, or None.
        num_features: channels of the feature map, with ``beside_channels``.
        beside_channels: number of the last channels of the feature map, which go beside the head, see
            :meth:`split_features`: those of the class token or of the mid-level branch, or 0.
        class_token_channels: channels of the class token; 0 if the model does not join it with the head's vector.
        stage_channels: channels of the last stages whose maps are stacked to the feature map; one number for one stage.
        head_hidden_size: length of the vector, with the class token if the model joins it.
        pretrained_cfg: preprocessing (mean, std, input size, crop) and description, as in timm; also as ``default_cfg``.
        feature_info: channels, reduction and module of each map of :meth:`forward_intermediates`, as in timm.
        config: the arguments of :func:`create_model` that build this model again.
        class_names: names of the classes in the order of the scores, or None.
        calibration: values of :class:`eigengrain.models.calibration.Calibration`, or None for a model without calibration.
        vector_scale: factor of the head's vector, a buffer of the state; 1 unless the vectors are calibrated, see
            :func:`eigengrain.training.calibrate_vectors`. The class token, if the model joins it, has a ``token_scale``,
            and the mid-level branch has its own ``vector_scale``.
        trained_size: (height, width) of the last images in training mode, None before the first; not if compiled.
        described_size: ``input_size`` in ``pretrained_cfg`` when the model was created or loaded.
        backbone_frozen: whether :meth:`freeze_backbone` was called; it is not saved with the model.
        pruned: whether :meth:`prune_intermediate_layers` was called; such a model cannot be saved by ``save_pretrained``.
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
        mid_level: int | None = None,
    ):
        super().__init__()
        if not isinstance(drop_rate, int | float) or not 0 <= drop_rate < 1:
            raise ArgumentError("drop_rate", "must be a number from 0 to below 1", drop_rate)
        self.backbone = backbone.net
        self.stage_channels = backbone.channels
        self.head: Head = build_head(head, self.stage_channels, reduce, head_options)
        if reduce == "auto" and backbone.img_size is not None:
            smaller = full_rank_reduce(self.head, math.prod(backbone.description["pool_size"]))
            if smaller is not None:
                reduce, self.head = smaller, build_head(head, self.stage_channels, smaller, head_options)
        self.classifier: nn.Module = nn.Identity()
        self.vector_scale: Tensor
        self.register_buffer("vector_scale", torch.ones(()))
        self.class_token_channels = backbone.channels[-1] if backbone.layout.class_token else 0
        if self.class_token_channels:
            self.token_scale: Tensor
            self.register_buffer("token_scale", torch.ones(()))
        self.mid_level = None if mid_level is None else MidLevel(backbone.mid_level, mid_level)
        for name, value in (("class_token", self.class_token_channels), ("mid_level", self.mid_level)):
            if value and isinstance(self.head, Unpooled):
                raise ArgumentError(name, "must be None for a model without pooling", remedy="name a head")
        self.beside_channels = self.class_token_channels + backbone.mid_level * backbone.layout.mid_level**2
        self.num_features = sum(backbone.channels) + self.beside_channels
        self.drop_rate = drop_rate
        self.pretrained_cfg: dict[str, Any] = {**backbone.description, "classifier": "classifier"}
        if first := backbone.description.get("first_conv"):
            names = (f"backbone.{first}",) if isinstance(first, str) else tuple(f"backbone.{name}" for name in first)
            self.pretrained_cfg["first_conv"] = names if len(names) > 1 else names[0]
        self.class_names: list[str] | None = None
        self.calibration: dict[str, Any] | None = None
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
        self.trained_size: tuple[int, int] | None = None
        self.described_size: tuple[int, int, int] = backbone.description["input_size"]
        self.backbone_frozen = False
        self.pruned = False
        self._rank_warned = False
        self._attach(self.head)
        self.reset_classifier(num_classes)

    @property
    def num_classes(self) -> int:
        return int(self.config["num_classes"])

    @property
    def temperature(self) -> float:
        """T in the probabilities softmax(scores/T); 1 for a model without ``calibration``."""
        return float((self.calibration or {}).get("temperature", 1.0))

    @property
    def head_hidden_size(self) -> int:
        joined = 0 if isinstance(self.head, Unpooled) else self.class_token_channels
        return self.head.out_features + joined

    @property
    def default_cfg(self) -> dict[str, Any]:
        return self.pretrained_cfg

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        entries: Any = getattr(self.backbone, "feature_info", [])
        info = [{**entry, "module": f"backbone.{entry['module']}"} for entry in entries]
        if self.config.get("last_stride") == 1:
            largest = max((entry["reduction"] for entry in info), default=0)
            info = [entry | {"reduction": largest // 2} if entry["reduction"] == largest else entry for entry in info]
        return info

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → feature map (B, num_features, h, w).

        A :class:`~eigengrain.heads.TransformerHead` has its own: a map of one row, with the tokens that it pools.
        """
        self._check_images(x)
        if isinstance(self.head, TransformerHead):
            return self._run(partial(self.head.features, self._transformer), x)
        parts = self._run(partial(feature_parts, self.backbone, layout=self.layout, stages=len(self.stage_channels)), x)
        if self.mid_level is not None and self.training:
            parts[-1] = parts[-1].detach()  # not in eval mode, so that explanations are those of the scores
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def split_features(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Feature map → the map that the head pools, and what goes beside the head.

        That is the class token (B, C), the map of the mid-level branch (B, C, H, W), or None.
        """
        if not self.beside_channels:
            return features, None
        pooled, beside = features[:, : -self.beside_channels], features[:, -self.beside_channels :]
        if isinstance(self.head, Unpooled):
            return pooled, None
        return pooled, beside[:, :, 0, 0] if self.mid_level is None else unfold(beside, self.layout.mid_level)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Images → feature map and maps of earlier layers of the backbone, as in timm.

        Args:
            x: images (B, 3, H, W).
            indices: layers to return, as listed in ``feature_info``: None for all, n for the last n, or a list.
            norm: apply the backbone's last normalisation to the intermediate maps too, where it fits.
            stop_early: with ``intermediates_only``, do not run the layers after the last requested one.
            output_fmt: layout of the intermediate maps, ``NCHW``, or another one that the backbone has.
            intermediates_only: return only the list.

        Raises:
            ArgumentError: for a backbone without intermediate maps, or arguments that do not suit it.
        """
        self._check_images(x)
        method, count = self._timm_method("forward_intermediates"), len(self.feature_info)
        indices = int(indices) if isinstance(indices, Integral) else indices  # NumPy integers are accepted
        if isinstance(indices, int):
            valid = 1 <= indices <= count
        else:
            valid = indices is None or (len(indices) > 0 and all(-count <= index < count for index in indices))
        if not valid:
            problem = f"must be a number of last maps up to {count}, or indices from {-count} to {count - 1}"
            raise ArgumentError("indices", problem, indices)
        options: dict[str, Any] = {"indices": indices, "norm": norm, "output_fmt": output_fmt}
        only = intermediates_only
        try:
            result = self._run(method, x, stop_early=stop_early and only, intermediates_only=only, **options)
        except (AssertionError, ArgumentError) as error:  # an assertion is timm's way to refuse
            if output_fmt == "NCHW":
                raise
            raise ArgumentError("output_fmt", f"does not suit this backbone ({error})", output_fmt, "use 'NCHW'") from error
        if only:
            return list(result)
        own = isinstance(self.head, TransformerHead) or self.beside_channels or self.layout.norm is not None
        if len(self.stage_channels) > 1 or own:
            return self.forward_features(x), result[1]
        return self.layout.to_map(result[0], self.backbone, (x.shape[-2], x.shape[-1])), result[1]

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the layers after the last of ``indices``, and head and classifier with ``prune_head``, as in timm."""
        kept: list[int] = self._timm_method("prune_intermediate_layers")(indices, prune_norm=prune_norm, prune_head=False)
        self.pruned = True
        if prune_head:
            self.reset_classifier(0, "")
        return kept

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map → class scores (B, num_classes), or the vector (B, head_hidden_size) with ``pre_logits``."""
        self.warn_of_short_rank(x)
        pooled, beside = self.split_features(x)
        return self.forward_vector(self.head(pooled), pre_logits, beside)

    def forward_vector(self, vector: Tensor, pre_logits: bool = False, beside: Tensor | None = None) -> Tensor:
        """The head's vector → class scores; with ``pre_logits`` the vector times ``vector_scale``, after dropout.

        ``beside`` is that of :meth:`split_features`, for as many images or for one. A class token, times ``token_scale``,
        is appended to the vector. The scores of the mid-level branch are added to those of the vector.
        """
        vector = vector * self.vector_scale
        if beside is not None and self.class_token_channels:
            token = beside.to(vector.dtype) * self.token_scale
            vector = torch.cat([vector, token.expand(vector.shape[0], -1)], dim=1)
        if self.drop_rate:
            vector = nn.functional.dropout(vector, self.drop_rate, self.training)
        if pre_logits:
            return vector
        scores = self.classifier(self._for_classifier(vector))
        more = self._mid_level_scores(beside)
        return scores if more is None else scores + more

    def _mid_level_scores(self, beside: Tensor | None) -> Tensor | None:
        """Scores of the mid-level branch; None for a model without it, or without classifier."""
        if beside is None or self.mid_level is None or not self.num_classes:
            return None
        scores: Tensor = self.mid_level(beside)
        return scores

    def _for_classifier(self, vector: Tensor) -> Tensor:
        """The vector in half precision if the model is; otherwise it stays in float32."""
        return vector.to(self.classifier.weight.dtype) if isinstance(self.classifier, nn.Linear) else vector

    def forward_training(self, x: Tensor, targets: Tensor) -> tuple[Tensor, LossTerms | None]:
        """Feature map → scores (B, num_classes) of the classifier, and what is added to the loss.

        That is what the head adds, see :meth:`Head.loss_terms`, and the scores of the mid-level branch: both classifiers
        learn from a cross-entropy of their own. ``targets`` are labels (B,), or shares of the classes (B, num_classes).
        """
        self.warn_of_short_rank(x)
        pooled, beside = self.split_features(x)
        vector = self._for_classifier(self.forward_vector(self.head(pooled), pre_logits=True, beside=beside))
        added = self.head.loss_terms(vector, targets, self.classifier)
        if (more := self._mid_level_scores(beside)) is not None:
            added = added or LossTerms()
            added = added._replace(scores={**added.scores, "mid_level": more})
        return self.classifier(vector), added

    def selected_parts(self, x: Tensor) -> Parts:
        """Boxes in images (B, 3, H, W) that the head selects, and the numbers of the patches, without gradient.

        Raises:
            ArgumentError: if the head does not select parts.
        """
        if not isinstance(self.head, TransformerHead) or not self.head.selects_parts:
            raise ArgumentError(
                "head", "does not select parts of images", self.config["head"], "use 'transfg' or 'aftrans'"
            )
        self._check_images(x)
        with torch.no_grad(), eval_mode(self):
            return self.head.parts(self._transformer, x)

    @property
    def _transformer(self) -> TimmTransformer:
        return TimmTransformer(self.backbone, self.config["backbone"])

    def _attach(self, head: Head) -> None:
        if isinstance(head, TransformerHead):
            if len(self.stage_channels) > 1:
                problem = f"must be 1 for {type(head).__name__}, which reads the blocks itself"
                raise ArgumentError("stages", problem, len(self.stage_channels), "leave it out")
            if self.class_token_channels:
                problem = f"must be None for {type(head).__name__}, whose vector is the class token"
                raise ArgumentError("class_token", problem, "beside", "leave it out")
            head.attach(self._transformer)

    @property
    def feature_modules(self) -> tuple[nn.Module, ...]:
        """The modules that :meth:`forward_features` uses: the backbone, and the head if it reads the backbone itself."""
        return (self.backbone, self.head) if isinstance(self.head, TransformerHead) else (self.backbone,)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → class scores (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def freeze_backbone(self) -> None:
        """Keep the backbone as it is in training: it gets no gradient, and stays in eval mode, as do its batch statistics.

        Example:
            >>> from eigengrain.models import create_model
            >>> model = create_model("test_resnet", head="gap", num_classes=2)
            >>> model.freeze_backbone()
            >>> model.train().head.training, model.backbone.training, next(model.backbone.parameters()).requires_grad
            (True, False, False)
        """
        self.backbone_frozen = True
        self.backbone.requires_grad_(False)
        self.backbone.eval()

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, or to eval mode; a frozen backbone stays in eval mode."""
        super().train(mode)
        if self.backbone_frozen:
            self.backbone.eval()
        return self

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, and the head if ``global_pool`` names one.

        Args:
            num_classes: number of classes; 0 for an identity, so that the model returns the vector.
            global_pool: name of a head, created with its default options and the reduction and stages of this model; ``""``
                for none, so that the model returns the feature map, which needs ``num_classes=0``.
        """
        if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 0:
            raise ArgumentError("num_classes", "must be an integer of at least 0", num_classes)
        num_classes = int(num_classes)  # NumPy integers are accepted
        pooled = not isinstance(self.head, Unpooled) if global_pool is None else global_pool != ""
        if num_classes and not pooled:
            raise ArgumentError("num_classes", "must be 0 for a model without pooling", num_classes, "name a head")
        like = next(self.backbone.parameters())
        head, reduce = self.head, self.config["reduce"]
        if global_pool is not None:
            head = build_head(global_pool, self.stage_channels, reduce)
            if isinstance(head, TransformerHead):  # tokens are not reduced
                reduce, head = "auto", build_head(global_pool, self.stage_channels, "auto")
        classifier = self._create_classifier(head, num_classes) if num_classes else nn.Identity()
        if global_pool is not None:
            if isinstance(self.head, TransformerHead):
                self._transformer.train_last_block(not self.backbone_frozen)
            self._attach(head)
            self.head = head.to(like.device, like.dtype).train(self.training)
            self.vector_scale.fill_(1)
            self.config |= {"head": global_pool, "head_options": {}, "reduce": reduce, "stages": len(self.stage_channels)}
        self.classifier = classifier.to(like.device, like.dtype).train(self.training)
        if self.mid_level is not None:
            self.mid_level.reset_classifier(num_classes)
            self.mid_level.classifier.to(like.device, like.dtype).train(self.training)
        if num_classes != self.num_classes:
            self.class_names = None
        self.calibration = None
        self.config["num_classes"] = self.pretrained_cfg["num_classes"] = num_classes

    def _create_classifier(self, head: Head, num_classes: int) -> nn.Module:
        classifier = head.classifier(num_classes)
        if not self.class_token_channels:
            return classifier
        if type(classifier) is not nn.Linear:
            problem = f"cannot be 'beside' for head {type(head).__name__}, whose classifier is not a linear layer"
            raise ArgumentError("class_token", problem, remedy="leave it out, or use another head")
        return nn.Linear(head.out_features + self.class_token_channels, num_classes)

    def _timm_method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] | None = getattr(self.backbone, name, None)
        if method is None:
            remedy = "use create_feature_extractor of timm or torchvision, or a hook"
            raise ArgumentError("backbone", f"has no {name}", self.config["backbone"], remedy)
        return method

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # old files have no factor, and with other weights of the backbone the vectors have another length
        for name, _ in self.named_buffers():
            if name.endswith(VECTOR_FACTORS):
                state_dict.setdefault(f"{prefix}{name}", torch.ones(()))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _run(self, method: Callable[..., Any], x: Tensor, **options: Any) -> Any:
        """Call a method of the backbone; its errors name the size of the images if it was built for another one."""
        try:
            return method(x, **options)
        except (RuntimeError, AssertionError, IndexError) as error:
            built_for, size = self.config.get("img_size"), (x.shape[-2], x.shape[-1])
            if not built_for or size == tuple(built_for) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._size_error(built_for, size, f" ({error})") from error

    def _check_images(self, x: Tensor) -> None:
        if isinstance(x, Proxy):  # torch.fx traces without values
            return
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
        if self.training and not torch.compiler.is_compiling() and not torch.jit.is_tracing():  # type: ignore[attr-defined]
            self.trained_size = size

    def _size_error(self, built_for: tuple[int, int], size: tuple[int, int], reason: str = "") -> ArgumentError:
        problem = f"must be images of {built_for[0]} × {built_for[1]}, the size of backbone {self.config['backbone']!r}"
        return ArgumentError("x", problem + reason, size, f"create the model with img_size={size}")

    def warn_of_short_rank(self, x: Tensor) -> None:
        """Warn once if a map has too few positions for its channels, so that the covariance is singular for every image."""
        if self._rank_warned or isinstance(x, Proxy) or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
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
