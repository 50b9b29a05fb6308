"""Compact bilinear pooling: a random projection of the second moment to a few thousand numbers."""

from torch import Tensor

from eigengrain.errors import UnknownName
from eigengrain.heads.base import Head
from eigengrain.heads.layers import check_positive, check_whole_number, power_normalise
from eigengrain.heads.registry import register_head
from eigengrain.heads.sketch import RandomMaclaurin, TensorSketch

PROJECTIONS: dict[str, type[TensorSketch] | type[RandomMaclaurin]] = {
    "tensor-sketch": TensorSketch,
    "random-maclaurin": RandomMaclaurin,
}


@register_head("cbp")
class CompactBilinearPooling(Head):
    r"""Compact bilinear pooling: mean of a random projection over positions, signed square root, ℓ2 norm.

    .. math:: y = \frac1N \sum_n \phi(x_n), \qquad
       \langle y, y' \rangle \approx \frac{1}{N N'} \sum_{n, n'} \langle x_n, x'_{n'} \rangle^2

    so that inner products are, on average, those of the full second moments, at a length that does not depend on the
    channels. The paper sums over positions; the mean differs by a factor that the ℓ2 norm removes, and keeps the meaning
    of ``eps`` for maps of every size. The projection is pooled without forming it at each position.

    Args:
        in_channels, reduce: as in :class:`Head`.
        out_features: length of the vector.
        projection: ``tensor-sketch`` (:class:`TensorSketch`) or ``random-maclaurin`` (:class:`RandomMaclaurin`).
        seed: of the projection, which is saved with the state of the head.
        eps: under the square root, see :func:`signed_sqrt`.

    Raises:
        ValueError: for an unknown projection, with near matches, an ``out_features`` below 1, an ``eps`` that is not
            positive, or a feature map that does not fit.

    Example:
        >>> import torch
        >>> CompactBilinearPooling(64, out_features=512)(torch.rand(2, 64, 7, 7)).shape
        torch.Size([2, 512])

    References:
        Gao, Beijbom, Zhang and Darrell, Compact Bilinear Pooling, CVPR 2016.
    """

    quadratic = False

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        out_features: int = 8192,
        projection: str = "tensor-sketch",
        seed: int = 0,
        eps: float = 1e-5,
    ):
        super().__init__(in_channels, reduce)
        check_whole_number(type(self).__name__, "out_features", out_features)
        check_positive(type(self).__name__, "eps", eps, "the square root has an infinite slope at 0 without it")
        if projection not in PROJECTIONS:
            raise UnknownName("projection", projection, PROJECTIONS)
        self.out_features = out_features
        self.eps = eps
        self.projection = PROJECTIONS[projection](self.channels, out_features, order=2, seed=seed)

    def pool(self, x: Tensor) -> Tensor:
        positions = x.flatten(2).mT  # (B, N, C)
        return power_normalise(self.projection.pool(positions) / positions.shape[-2], self.eps)
