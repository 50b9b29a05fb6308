"""Low-rank bilinear pooling: few channels, and a classifier whose matrices have low rank."""

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError
from eigengrain.functional import triu_vector
from eigengrain.functional.inputs import check_integer, full_precision, output_dtype
from eigengrain.heads.base import Head
from eigengrain.heads.layers import TriangleClassifier, check_positive, second_moment, smooth_signed_sqrt
from eigengrain.heads.registry import register_head


def _check_rank(rank: int) -> None:
    check_integer(rank, "rank")
    if rank % 2:
        raise ArgumentError("rank", "must be even, for as many positive as negative factors", rank)


class LowRankBilinearClassifier(TriangleClassifier):
    r"""Class scores that are differences of squared norms of projected features.

    .. math:: f_k = \|U_{k+}^T \hat X\|_F^2 - \|U_{k-}^T \hat X\|_F^2 + b_k
       = \langle U_{k+} U_{k+}^T - U_{k-} U_{k-}^T,\; \hat X \hat X^T \rangle + b_k

    It is computed in the second form: a linear classifier of the second moment whose matrices have rank r, so that the cost
    does not depend on the number of positions.

    Args:
        channels: m, the size of the second moment.
        num_classes: number of scores.
        rank: r, even: r/2 columns in each :math:`U_{k+}` and in each :math:`U_{k-}`.

    Shape:
        the vector of :class:`LowRankBilinearPooling`, (..., m(m+1)/2) → (..., num_classes). ``factors`` is
        (num_classes, rank, m), positive ones first.
    """

    parameter = "factors"
    factors: nn.Parameter

    def __init__(self, channels: int, num_classes: int, rank: int = 8):
        _check_rank(rank)
        super().__init__(channels, num_classes, rank)

    def forms(self, dtype: torch.dtype) -> Tensor:
        positive, negative = self.factors.to(dtype).chunk(2, dim=1)  # (num_classes, rank/2, m) each
        # the two parts of a score can nearly cancel, so the difference is not computed in 16 bits
        return positive.mT @ positive - negative.mT @ negative


@register_head("lrbp")
class LowRankBilinearPooling(Head):
    r"""Low-rank bilinear pooling: the second moment of the features after a signed root and a projection to m channels.

    .. math:: \hat X = \frac{1}{\sqrt N}\, P\, \mathrm{sign}(X) \circ \sqrt{|X|}, \qquad v = \mathrm{triu}(\hat X \hat X^T)

    With a signed square root and ℓ2 norm of the bilinear vector the score would not be a quadratic form of the features, so
    the root is taken of the features themselves, smoothed by :func:`smooth_signed_sqrt`, before the learned projection P,
    which has neither batch normalisation nor ReLU. The triangle is isometric: off-diagonal entries have a factor
    :math:`\sqrt2`. :meth:`classifier` returns the classifier of the method, :class:`LowRankBilinearClassifier`.

    Args:
        in_channels, reduce: as in :class:`Head`; ``reduce`` is applied before the projection.
        project: m, channels after the projection; the vector has m(m+1)/2 numbers.
        rank: rank of the classifier's matrices, even.
        eps: ε of the root, whose slope is at most :math:`1/(2\sqrt\varepsilon)`.

    Example:
        >>> head = LowRankBilinearPooling(64, project=10)
        >>> vector = head(torch.rand(2, 64, 7, 7))
        >>> vector.shape, head.classifier(num_classes=5)(vector).shape
        (torch.Size([2, 55]), torch.Size([2, 5]))

    References:
        Kong and Fowlkes, Low-rank Bilinear Pooling for Fine-Grained Classification, CVPR 2017.
    """

    quadratic = False

    def __init__(self, in_channels: int, reduce: int | None = None, project: int = 100, rank: int = 8, eps: float = 1e-4):
        super().__init__(in_channels, reduce)
        check_integer(project, "project")
        _check_rank(rank)
        check_positive(eps)
        self.project, self.rank, self.eps = project, rank, eps
        self.out_features = project * (project + 1) // 2
        self.projection = nn.Linear(self.channels, project, bias=False)
        nn.init.orthogonal_(self.projection.weight)  # orthonormal rows, like the principal components of the paper

    def pool(self, x: Tensor) -> Tensor:
        x = smooth_signed_sqrt(x.to(output_dtype(x)), self.eps).flatten(2)  # (B, C, N)
        with full_precision(x):
            projected = self.projection.weight.to(x.dtype) @ x  # (B, m, N)
        return triu_vector(second_moment(projected), isometric=True)

    def classifier(self, num_classes: int) -> LowRankBilinearClassifier:
        return LowRankBilinearClassifier(self.project, num_classes, self.rank)
