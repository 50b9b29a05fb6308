"""What a head is: a feature map in, a vector out, and the classifier that suits it."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from eigengrain.functional.inputs import check_features


class Reduce(nn.Sequential):
    """1 × 1 convolution, batch normalisation and ReLU: fewer channels before a matrix whose size is their square.

    Behind a batch normalisation the length of a filter does not change what comes out, only how far a step of the
    optimiser turns it: lr over the squared length. torch's own first weights have length 0.6 whatever the channels are.
    Those that keep the variance of gradients (``fan_out``) have length 4 for 2048 → 256 and hardly turn at the rate of a
    pretrained backbone.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
        )


class Head(nn.Module):
    """Base of all heads: ``(B, C, H, W) → (B, out_features)``.

    A subclass sets ``out_features`` in its constructor and writes :meth:`pool`, which sees ``self.channels`` channels.
    Its output is float32 (float64 for float64 features), whatever autocast says.

    Args:
        in_channels: channels of the feature map.
        reduce: channels that a 1 × 1 convolution leaves before pooling; None leaves the map as it is.
    """

    #: whether the vector grows with the square of the channels, so that ``reduce="auto"`` should reduce wide maps
    quadratic: ClassVar[bool] = True

    out_features: int

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__()
        for name, value in (("in_channels", in_channels), ("reduce", reduce)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.in_channels = in_channels
        self.channels = reduce or in_channels
        self.reduce = Reduce(in_channels, reduce) if reduce else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, type(self).__name__)
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__} expects a feature map (B, {self.in_channels}, H, W), got {tuple(x.shape)}: "
                "create the head with in_channels set to the channels of your map"
            )
        return self.pool(self.reduce(x))

    def pool(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, out_features)."""
        raise NotImplementedError

    def use_products(self) -> None:
        """Compute by matrix products alone from now on, so that inference can leave PyTorch; there is no way back.

        Most heads do nothing else anyway. One with a decomposition replaces it here, or says why it cannot.

        Raises:
            ValueError: with the reason and the remedy, for a head or a setting of it that has no such form.
        """
        for part in self.modules():
            switch: Callable[[], None] | None = getattr(part, "use_products", None)
            if part is not self and switch is not None:
                switch()

    def classifier(self, num_classes: int) -> nn.Module:
        """The layer from this head's vector to class scores; linear unless the method has its own."""
        return nn.Linear(self.out_features, num_classes)
