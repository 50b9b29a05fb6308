"""Bilinear pooling: the uncentred second moment of the features, and the improved form with a matrix square root."""

import torch
from torch import Tensor

from eigengrain.functional import matrix_sqrt, triu_vector
from eigengrain.functional.inputs import output_dtype, to_compute
from eigengrain.functional.newton_schulz import quintic_sqrt
from eigengrain.heads.base import Head
from eigengrain.heads.layers import check_positive, power_normalise, second_moment
from eigengrain.heads.registry import register_head


@register_head("bcnn")
class BilinearPooling(Head):
    r"""Bilinear pooling (B-CNN, both streams the same network): signed square root and ℓ2 norm of the second moment.

    .. math:: A = \frac1N X X^T, \qquad
       B = \mathrm{sign}(A) \circ \sqrt{|A| + \varepsilon}, \qquad v = \mathrm{vec}(B)/\|B\|_F

    The features are not centred. Every off-diagonal entry appears twice, as published.

    Args:
        in_channels, reduce: as in :class:`Head`.
        triangle: keep only the upper triangle, C(C+1)/2 numbers instead of C²; the norm is then that of the triangle.
        eps: ε under the square root, see :func:`signed_sqrt`.

    Example:
        >>> BilinearPooling(2)(torch.tensor([[[[3.0, 0.0]], [[0.0, 4.0]]]]))
        tensor([[0.6000, 0.0000, 0.0000, 0.8000]])

    References:
        Lin, RoyChowdhury and Maji, Bilinear CNN Models for Fine-grained Visual Recognition, ICCV 2015.
    """

    def __init__(self, in_channels: int, reduce: int | None = None, triangle: bool = False, eps: float = 1e-5):
        super().__init__(in_channels, reduce)
        check_positive(eps)
        self.triangle, self.eps = triangle, eps
        self.out_features = self.channels * (self.channels + 1) // 2 if triangle else self.channels**2

    def matrix(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, channels, channels), before the elementwise normalisation."""
        return second_moment(x.to(output_dtype(x)))

    def pool(self, x: Tensor) -> Tensor:
        matrix = self.matrix(x)
        vector = triu_vector(matrix) if self.triangle else matrix.flatten(1)
        return power_normalise(vector, self.eps)


@register_head("bcnn-improved")
class ImprovedBilinearPooling(BilinearPooling):
    r"""Improved B-CNN: a matrix square root before the signed square root and the ℓ2 norm.

    .. math:: A = \Big(\frac1N X X^T + \rho I\Big)^{1/2}, \qquad
       B = \mathrm{sign}(A) \circ \sqrt{|A| + \varepsilon}, \qquad v = \mathrm{vec}(B)/\|B\|_F

    The second moment and its root are computed in float64, with the exact gradient. ρ, a small positive number in the
    paper, bounds the slope of the root by :math:`1/(2\sqrt\rho)`; it has the unit of squared features, so networks with
    large features need a larger one.

    Args:
        in_channels, reduce, triangle, eps: as in :class:`BilinearPooling`.
        ridge: ρ.

    Raises:
        NonFiniteError: if the features contain NaN or infinity.

    Example:
        >>> head = ImprovedBilinearPooling(2, ridge=1e-12)
        >>> head(torch.tensor([[[[9.0, 0.0]], [[0.0, 16.0]]]]))
        tensor([[0.6000, 0.0000, 0.0000, 0.8000]])

    References:
        Lin and Maji, Improved Bilinear Pooling with CNNs, BMVC 2017.
    """

    def __init__(
        self, in_channels: int, reduce: int | None = None, triangle: bool = False, eps: float = 1e-5, ridge: float = 1e-3
    ):
        super().__init__(in_channels, reduce, triangle, eps)
        check_positive(ridge, "ridge")
        self.ridge = ridge
        self.solver = "eigh"

    def use_products(self) -> None:
        super().use_products()
        self.solver = "products"

    def matrix(self, x: Tensor) -> Tensor:
        moment = second_moment(to_compute(x))
        ridge = self.ridge * torch.eye(self.channels, dtype=moment.dtype, device=moment.device)
        root = quintic_sqrt(moment + ridge) if self.solver == "products" else matrix_sqrt(moment + ridge)
        # Next to a dead channel the root is zero up to rounding. It is set to zero, or the signed root would turn the
        # random signs of the rounding into steps of ±√eps.
        rounding = self.channels * torch.finfo(root.dtype).eps * root.detach().abs().amax((-2, -1), keepdim=True)
        root = torch.where(root.abs() > rounding, root, 0.0)
        return root.to(x.device, output_dtype(x))
