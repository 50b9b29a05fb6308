"""Heads of the first order: what the covariance heads are compared with."""

from torch import Tensor

from eigengrain.functional.inputs import output_dtype
from eigengrain.heads.base import Head
from eigengrain.heads.registry import register_head


@register_head("gap")
class AveragePooling(Head):
    r"""Global average pooling, :math:`v = \frac1N \sum_n x_n`; C numbers."""

    quadratic = False

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels

    def pool(self, x: Tensor) -> Tensor:
        return x.to(output_dtype(x)).mean((2, 3))


@register_head("gmp")
class MaxPooling(Head):
    r"""Global max pooling, :math:`v_c = \max_n x_{cn}`; C numbers."""

    quadratic = False

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels

    def pool(self, x: Tensor) -> Tensor:
        return x.to(output_dtype(x)).amax((2, 3))
