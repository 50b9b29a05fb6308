"""First-order heads, the baselines of the covariance heads."""

from torch import Tensor

from eigengrain.functional.inputs import output_dtype
from eigengrain.heads.base import Head
from eigengrain.heads.registry import register_head


class _FirstOrder(Head):
    quadratic = False

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels


@register_head("gap")
class AveragePooling(_FirstOrder):
    r"""Global average pooling, :math:`v = \frac1N \sum_n x_n`; C numbers."""

    def pool(self, x: Tensor) -> Tensor:
        return x.to(output_dtype(x)).mean((2, 3))


@register_head("gmp")
class MaxPooling(_FirstOrder):
    r"""Global max pooling, :math:`v_c = \max_n x_{cn}`; C numbers."""

    def pool(self, x: Tensor) -> Tensor:
        return x.to(output_dtype(x)).amax((2, 3))
