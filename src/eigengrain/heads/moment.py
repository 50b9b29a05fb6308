"""Moment embedding: mean and second moment in one matrix, its square root, and a sketch of that root."""

import torch
from torch import Tensor
from torch.nn import functional as F

from eigengrain.errors import ArgumentError
from eigengrain.functional.covariance import triu_vector
from eigengrain.functional.inputs import output_dtype, to_compute
from eigengrain.functional.spectral import matrix_power
from eigengrain.functional.sqrt_covariance import sqrt_covariance
from eigengrain.heads.base import Head
from eigengrain.heads.compact import TensorSketch
from eigengrain.heads.layers import check_positive, second_moment, smooth_signed_sqrt
from eigengrain.heads.registry import register_head


def homogeneous(x: Tensor) -> Tensor:
    r"""Features with a 1 in front, :math:`Z = (1, x_n^T)^T`: (B, C, …) → (B, C + 1, N) in float64."""
    return F.pad(to_compute(x.flatten(2)), (0, 0, 1, 0), value=1.0)


def moment_root(x: Tensor, solver: str = "auto") -> Tensor:
    r"""Square root of the moment matrix, :math:`(Z Z^T/N)^{1/2}`: features (B, C, …) → (B, C + 1, C + 1).

    Z is not centred, but the mean of Z and −Z together is zero and their covariance is the moment matrix, so that the root
    comes from :func:`sqrt_covariance`, whose gradient is bounded at every rank.
    """
    z = homogeneous(x)
    return sqrt_covariance(torch.cat([z, -z], -1), solver=solver).to(x.device, output_dtype(x))


def moment_fourth_root(x: Tensor) -> Tensor:
    r"""Fourth root of the moment matrix, :math:`(Z Z^T/N)^{1/4}`: features (B, C, …) → (B, C + 1, C + 1).

    Its rows r are features for a sketch: the sum of :math:`r r^T` is the square root.
    """
    return matrix_power(second_moment(homogeneous(x)), 0.25).to(x.device, output_dtype(x))


@register_head("monet")
class MomentEmbedding(Head):
    r"""MoNet: square root of the moment matrix of the features, sketched or whole, then signed square root and ℓ2 norm.

    .. math:: M = \frac1N \sum_n \begin{pmatrix} 1 \\ x_n \end{pmatrix} \begin{pmatrix} 1 & x_n^T \end{pmatrix}
       = \begin{pmatrix} 1 & \mu^T \\ \mu & \frac1N X X^T \end{pmatrix}, \qquad
       y = \phi(M^{1/2}) \;\text{ or }\; \mathrm{triu}(M^{1/2})

    The paper takes the root of the features, :math:`Z = U \Sigma V^T` to :math:`U \Sigma^{1/2} V^T`, before pooling, so
    that compact pooling can follow. The separate derivatives of U and V are infinite at equal singular values. Functions of
    the matrix have finite ones, and give the same vector: a tensor sketch φ is linear in the sum of outer products that it
    pools, so the rows of :math:`M^{1/4}`, whose sum of outer products is :math:`M^{1/2}`, have the same sketch as the
    paper's features. The spectral part is in float64.

    Args:
        in_channels, reduce: as in :class:`Head`.
        compact: sketch the root; otherwise take its upper triangle, (C+1)(C+2)/2 numbers, with off-diagonal entries times
            :math:`\sqrt2`, so that inner products are those of the whole matrix.
        out_features: length of the sketch, 10,000 when None; only with ``compact``.
        seed: seed of the sketch, which is saved with the state of the head.
        eps: ε of the elementwise root, see :func:`smooth_signed_sqrt`.

    Raises:
        NonFiniteError: if the features contain NaN or infinity.
        SecondOrderError: in a second backward pass.

    Example:
        >>> MomentEmbedding(16, compact=False)(torch.rand(2, 16, 7, 7)).shape
        torch.Size([2, 153])

    References:
        Gou, Xiong, Camps and Sznaier, MoNet: Moments Embedding Network, CVPR 2018.
    """

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        compact: bool = True,
        out_features: int | None = None,
        seed: int = 0,
        eps: float = 1e-6,
    ):
        super().__init__(in_channels, reduce)
        check_positive(eps)
        if out_features is not None and not compact:
            raise ArgumentError("out_features", "is the length of the sketch and needs {compact}=True", out_features)
        self.eps = eps
        self.sketch: TensorSketch | None = None
        self.out_features = (self.channels + 1) * (self.channels + 2) // 2
        if compact:
            self.out_features = 10_000 if out_features is None else out_features
            self.sketch = TensorSketch(self.channels + 1, self.out_features, seed=seed)
        self.solver = "auto"

    def use_products(self) -> None:
        super().use_products()
        self.solver = "products"

    def pool(self, x: Tensor) -> Tensor:
        if self.sketch is None:
            vector = triu_vector(smooth_signed_sqrt(moment_root(x, self.solver), self.eps), isometric=True)
        elif self.solver == "products":
            vector = smooth_signed_sqrt(self.sketch.of_moment(moment_root(x, self.solver)), self.eps)
        else:
            vector = smooth_signed_sqrt(self.sketch.pool(moment_fourth_root(x)), self.eps)
        return F.normalize(vector, dim=-1)
