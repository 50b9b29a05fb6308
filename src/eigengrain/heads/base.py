"""The contract of a head: a feature map in, a vector out, and the classifier that suits it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from eigengrain.errors import ArgumentError
from eigengrain.functional.inputs import check_features, check_integer
from eigengrain.functional.subsets import EigenSubset
from eigengrain.heads.layers import record_call


class Reduce(nn.Sequential):
    """1 × 1 convolution, batch normalisation and ReLU: fewer channels before a matrix whose size is their square.

    The batch normalisation cancels the length of a filter, so the length only decides how far a step of the optimiser
    turns the filter: the learning rate over the squared length. torch's default initialisation has length 0.6 for any
    number of channels. The one that preserves the variance of gradients (``fan_out``) has length 4 for 2048 → 256, and such
    filters hardly turn at the learning rate of a pretrained backbone.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
        )


class StageReduce(nn.Module):
    """One :class:`Reduce` per stage for the stacked maps of several stages, so that each stage keeps its own channels.

    Args:
        in_channels: channels of each stage.
        out_channels: channels in all, divided evenly; the last stages get one more if a remainder is left.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int):
        super().__init__()
        self.in_channels = list(in_channels)
        count = len(self.in_channels)
        if out_channels < count:
            raise ArgumentError("reduce", f"must be at least {count}, one channel per stage", out_channels)
        self.stages = nn.ModuleList(
            Reduce(channels, (out_channels + k) // count) for k, channels in enumerate(self.in_channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.in_channels, dim=1)
        return torch.cat([reduce(part) for reduce, part in zip(self.stages, parts, strict=True)], dim=1)


class ProductForm:
    """Mixin for modules that can be switched to a form made of matrix products alone, which exports."""

    def use_products(self) -> None:
        """Switch to the form made of matrix products, as in :meth:`Head.use_products`."""
        raise NotImplementedError


class LossTerms(NamedTuple):
    """What a head adds to the cross-entropy of the scores, see :meth:`Head.loss_terms`.

    ``scores`` are further scores (B, classes) by name: each gets a cross-entropy of its own, with the label smoothing, the
    class weights and the mixed labels of the training. ``terms`` are finished losses by name, one number each. All of them
    are added to the loss with weight 1.
    """

    scores: Mapping[str, Tensor] = {}
    terms: Mapping[str, Tensor] = {}


class Head(nn.Module, ProductForm):
    """Base class of all heads: ``(B, C, H, W) → (B, out_features)``.

    A subclass sets ``out_features`` in its constructor and implements :meth:`pool`, which receives a map with
    ``self.channels`` channels. Its output is float32 (float64 for float64 features), also under autocast.

    Args:
        in_channels: channels of the feature map; for the stacked maps of several stages the channels of each.
        reduce: number of channels after a 1 × 1 convolution before pooling, in equal parts for several stages; None pools
            the map as it is.
    """

    #: whether the vector grows with the square of the channels, so that ``reduce="auto"`` should reduce wide maps
    quadratic: ClassVar[bool] = True
    #: whether a map with fewer positions than channels makes the pooled matrix singular
    rank_sensitive: ClassVar[bool] = False
    #: whether :meth:`loss_terms` is defined for the mixed labels (B, classes) of mixup, cutmix and snapmix
    mixes_labels: bool = True

    out_features: int

    def __init__(self, in_channels: int | Sequence[int], reduce: int | None = None):
        super().__init__()
        stages: list[Any] = list(in_channels) if isinstance(in_channels, list | tuple) else [in_channels]
        for channels in stages or [0]:
            check_integer(channels, "in_channels")
        if reduce is not None:
            check_integer(reduce, "reduce")
        self.in_channels: int = sum(stages)
        self.channels = reduce or self.in_channels
        self.reduce: nn.Module = nn.Identity()
        if reduce:
            self.reduce = StageReduce(stages, reduce) if len(stages) > 1 else Reduce(self.in_channels, reduce)

    @property
    def summary(self) -> str:
        """One phrase for listings; the first sentence of the class docstring unless a subclass overrides it."""
        paragraph = " ".join((type(self).__doc__ or "").strip().split("\n\n")[0].split())
        sentence = re.split(r"\.(?:\s|$)|;", paragraph, maxsplit=1)[0]
        return re.sub(r",?\s*:math:`[^`]*`", "", sentence).strip() or type(self).__name__

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Proxy):
            return record_call(self, x)
        return self.pool(self._reduced(x))

    def _reduced(self, x: Tensor) -> Tensor:
        check_features(x)
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            problem = f"must be a feature map (B, {self.in_channels}, H, W) for this {type(self).__name__}"
            raise ArgumentError("x", problem, tuple(x.shape), "create the head with in_channels set to the channels of x")
        return self.reduce(x)

    def pool(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, out_features)."""
        raise NotImplementedError

    def use_products(self) -> None:
        """Compute with matrix products alone from now on, so that the head can run outside PyTorch. There is no way back.

        Most heads need nothing else. A head with a decomposition overrides this method to replace or refuse it.

        Raises:
            ValueError: if the head, or one of its settings, has no such form.
        """
        for part in self.modules():
            if part is not self and isinstance(part, ProductForm):
                part.use_products()

    def no_weight_decay(self) -> set[str]:
        """Names of the head's parameters that should not decay; none unless a subclass overrides it."""
        return set()

    def classifier(self, num_classes: int) -> nn.Module:
        """The layer from this head's vector to class scores; linear unless a subclass overrides it."""
        return nn.Linear(self.out_features, num_classes)

    def loss_terms(self, vector: Tensor, targets: Tensor, classifier: nn.Module) -> LossTerms | None:
        """What the head adds to the loss of a training batch; None unless a subclass overrides it.

        It is called in the forward pass of a training, once per batch of each process, so that gradients of several
        processes are averaged as usual. Evaluation does not call it.

        Args:
            vector: the vectors (B, out_features) as the classifier gets them, in its precision.
            targets: labels (B,), or with mixup, cutmix and snapmix the shares of the classes (B, classes), which with
                snapmix need not add up to 1.
            classifier: the layer of :meth:`classifier`.
        """
        return None


class Transformer(Protocol):
    """What a :class:`TransformerHead` reads of a vision transformer.

    Tokens are (B, T, C): the class token, other prefix tokens such as register tokens, then the patches row by row.
    """

    depth: int  # number of blocks
    prefix_tokens: int  # tokens before the patches

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) → tokens before the first block."""

    def run(self, block: int, tokens: Tensor) -> Tensor:
        """Tokens before a block → tokens after it."""

    def attention(self, block: int, tokens: Tensor) -> Tensor:
        """Tokens before a block → its attention (B, heads, T, T) after the softmax, at least in float32; rows sum to 1."""

    def normalise(self, tokens: Tensor) -> Tensor:
        """Apply the final normalisation."""

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches."""

    def boxes(self, images: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Boxes (..., 4) in pixels, x0, y0, x1, y1, from the top left of one cell (..., 2) to the bottom right of another.

        A cell is the row and the column of a patch.
        """

    def new_block(self) -> nn.Module:
        """A block like the last one, with new random weights."""

    def train_last_block(self, train: bool) -> None:
        """Freeze the last block for a head that does not run it, or train it again."""


class Parts(NamedTuple):
    """Parts of images that a :class:`TransformerHead` selects.

    ``boxes`` (B, n, 4) are x0, y0, x1, y1 in pixels of the input; ``indices`` (B, n) are the numbers of the patches, row by
    row, or None for parts that are not single patches.
    """

    boxes: Tensor
    indices: Tensor | None


class TransformerHead(Head):
    """Base class of heads that read the blocks and the attention of a vision transformer, not only its feature map.

    A subclass implements :meth:`features`, whose result takes the place of the feature map of the model:
    ``forward_features`` returns it, and :meth:`pool` receives it. It is a map of one row, with one token per position.
    """

    quadratic = False
    #: whether :meth:`parts` is implemented
    selects_parts: ClassVar[bool] = True

    def attach(self, network: Transformer) -> None:
        """Prepare for a network; called once, when the model is built."""
        if not isinstance(self.reduce, nn.Identity):
            problem = f"must be None or 'auto' for {type(self).__name__}, which reads tokens"
            raise ArgumentError("reduce", problem, self.channels, "leave it out")

    def features(self, network: Transformer, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) → tokens as a map (B, C, 1, n)."""
        raise NotImplementedError

    def parts(self, network: Transformer, images: Tensor) -> Parts:
        """The parts of images (B, 3, H, W) that the head selects; not for a head without ``selects_parts``."""
        raise NotImplementedError


class Spectrum(NamedTuple):
    """Eigenvalues of a batch (B, d), descending, and the scaling factor s (B,) if the head has one."""

    eigenvalues: Tensor
    factor: Tensor | None


class SpectralHead(Head):
    """Base class of heads that pool by a function of the eigenvalues of a matrix of the map.

    A subclass sets ``out_features`` in its constructor and implements :meth:`pool`, which keeps only the eigenvalues in
    ``self.subset``, and :meth:`eigenvalues`. Training telemetry, evaluation of subsets, explanations and the explorer use
    the members of this class and nothing else.

    Attributes:
        cut: how a cut spectrum is differentiated, see :func:`eigengrain.functional.spectral_function`.
        record_spectrum: fill ``last_spectrum`` at each forward pass; see :meth:`recording`.
        last_spectrum: :class:`Spectrum` of the last recorded forward pass; not part of the state.
    """

    rank_sensitive = True

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self._subset = EigenSubset.all()
        self.cut = "exact"
        self.record_spectrum = False
        self.last_spectrum: Spectrum | None = None

    @property
    def selectable(self) -> bool:
        """Whether a subset of the eigenvalues can be selected with the present settings."""
        return True

    @property
    def subset(self) -> EigenSubset:
        """Eigenvalues that are kept, such as ``"top:206"``; can be set between forward passes.

        Raises:
            ArgumentError: when set to a subset that does not fit, or on a head that is not :attr:`selectable`.
        """
        return self._subset

    @subset.setter
    def subset(self, value: EigenSubset | str | None) -> None:
        subset = EigenSubset.parse(value)
        if not subset.covers(self.channels):
            subset.mask(self.channels)  # refuses a subset that does not fit
            if not self.selectable:
                problem = f"must be 'all' for a head without eigenvalues to select ({self.summary})"
                raise ArgumentError("subset", problem, str(subset), "use 'mpncov' with solver='auto'")
        self._subset = subset

    @property
    def own_subset(self) -> str | None:
        """The subset as text, or None if it covers all eigenvalues."""
        return None if self.subset.covers(self.channels) else str(self.subset)

    def eigenvalues(self, reduced: Tensor) -> Tensor:
        """Eigenvalues (B, channels) of the reduced map: descending, 0 where they are rounding, without gradient."""
        raise NotImplementedError

    def pool_subsets(
        self, reduced: Tensor, subsets: Sequence[EigenSubset | str], cut: str | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Pool the reduced map (B, channels, H, W) with each of several subsets, such as ``["all", "top:206"]``.

        ``cut`` is the head's own by default. Returns one vector (B, out_features) per subset, and the eigenvalues as
        :meth:`eigenvalues` returns them. A subset that does not fit raises ArgumentError.
        """
        vectors = []
        for subset in subsets:
            with self.keeping(subset, cut):
                vectors.append(self.pool(reduced))
        return vectors, self.eigenvalues(reduced)

    def pool_with_spectrum(self, reduced: Tensor) -> tuple[Tensor, Spectrum]:
        """Pool, and return the spectrum too; a subclass can override it to decompose only once."""
        return self.pool(reduced), Spectrum(self.eigenvalues(reduced), None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.record_spectrum or isinstance(x, Proxy):
            return super().forward(x)
        vector, self.last_spectrum = self.pool_with_spectrum(self._reduced(x))
        return vector

    @contextmanager
    def keeping(self, subset: EigenSubset | str | None, cut: str | None = None) -> Iterator[None]:
        """Keep another subset of the eigenvalues inside a ``with`` block; ``cut=None`` leaves the cut as it is."""
        before = self._subset, self.cut
        self.subset = EigenSubset.parse(subset)
        self.cut = self.cut if cut is None else cut
        try:
            yield
        finally:
            self._subset, self.cut = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the spectrum of forward passes inside a ``with`` block, which costs up to one decomposition each."""
        before, self.record_spectrum = self.record_spectrum, True
        try:
            yield
        finally:
            self.record_spectrum = before
