"""Low-rank bilinear pooling: few channels, and a classifier whose matrices have low rank."""

import torch
from torch import Tensor, nn

from eigengrain.functional import triu_vector
from eigengrain.functional.inputs import full_precision, output_dtype
from eigengrain.heads.base import Head
from eigengrain.heads.layers import (
    TriangleClassifier,
    check_positive,
    check_whole_number,
    second_moment,
    smooth_signed_sqrt,
)
from eigengrain.heads.registry import register_head


def _check_rank(who: str, rank: int) -> None:
    check_whole_number(who, "rank", rank)
    if rank % 2:
        raise ValueError(f"{who}: rank must be even, got {rank}: half of the factors are positive, half are negative")


class LowRankBilinearClassifier(TriangleClassifier):
    r"""Class scores that are differences of squared norms of projected features.

    .. math:: f_k = \|U_{k+}^T \hat X\|_F^2 - \|U_{k-}^T \hat X\|_F^2 + b_k
       = \langle U_{k+} U_{k+}^T - U_{k-} U_{k-}^T,\; \hat X \hat X^T \rangle + b_k

    The second form is how it is computed: a linear classifier of the second moment whose matrices have rank r, so that
    the cost does not depend on the number of positions.

    Args:
        channels: m, the size of the second moment.
        num_classes: number of scores.
        rank: r, even: r/2 columns in each :math:`U_{k+}` and in each :math:`U_{k-}`.

    Shape:
        the vector of :class:`LowRankBilinearPooling`, (..., m(m+1)/2) → (..., num_classes). ``factors`` is
        (num_classes, rank, m), positive ones first.

    Raises:
        ValueError: for sizes below 1, an odd rank, or a vector that does not fit.

    Example:
        >>> classifier = LowRankBilinearClassifier(channels=10, num_classes=3, rank=4)
        >>> classifier(torch.rand(2, 55)).shape
        torch.Size([2, 3])
    """

    def __init__(self, channels: int, num_classes: int, rank: int = 8):
        super().__init__(channels, num_classes, rank)
        _check_rank(type(self).__name__, rank)
        self.factors = nn.Parameter(torch.empty(num_classes, rank, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # factors of unit length on average, so that a score is of the size of the second moment's eigenvalues
        nn.init.normal_(self.factors, std=self.channels**-0.5)
        nn.init.zeros_(self.bias)

    def forms(self, dtype: torch.dtype) -> Tensor:
        positive, negative = self.factors.to(dtype).chunk(2, dim=1)  # (num_classes, rank/2, m) each
        # the two parts of a score nearly cancel at times, so the difference is not for 16 bits
        return positive.mT @ positive - negative.mT @ negative


@register_head("lrbp")
class LowRankBilinearPooling(Head):
    r"""Low-rank bilinear pooling: the second moment of features that are rooted, then projected to m channels.

    .. math:: \hat X = \frac{1}{\sqrt N}\, P\, \mathrm{sign}(X) \circ \sqrt{|X|}, \qquad v = \mathrm{triu}(\hat X \hat X^T)

    Signed square root and ℓ2 norm of the bilinear vector would not leave the score a quadratic form of the features, so
    the root is taken of the features themselves, smoothed by :func:`smooth_signed_sqrt`, before the learned projection P,
    which has neither batch normalisation nor ReLU. The triangle is isometric: entries off the diagonal carry
    :math:`\sqrt2`. :meth:`classifier` gives the classifier of the method, :class:`LowRankBilinearClassifier`.

    Args:
        in_channels, reduce: as in :class:`Head`; ``reduce`` would come in addition to the projection.
        project: m, channels after the projection; m(m+1)/2 numbers leave the head.
        rank: of the classifier's matrices, even.
        eps: of the root; its slope is at most :math:`1/(2\sqrt\varepsilon)`.

    Raises:
        ValueError: for sizes below 1, an odd rank, an ``eps`` that is not positive, or a feature map that does not fit.

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
        who = type(self).__name__
        check_whole_number(who, "project", project)
        _check_rank(who, rank)
        check_positive(who, "eps", eps, "the square root has an infinite slope at 0 without it")
        self.project = project
        self.rank = rank
        self.eps = eps
        self.out_features = project * (project + 1) // 2
        self.projection = nn.Linear(self.channels, project, bias=False)
        nn.init.orthogonal_(self.projection.weight)  # the paper starts from principal components, orthonormal rows too

    def pool(self, x: Tensor) -> Tensor:
        x = smooth_signed_sqrt(x.to(output_dtype(x)), self.eps).flatten(2)  # (B, C, N)
        with full_precision(x):
            projected = self.projection.weight.to(x.dtype) @ x  # (B, m, N)
        return triu_vector(second_moment(projected), isometric=True)

    def classifier(self, num_classes: int) -> LowRankBilinearClassifier:
        return LowRankBilinearClassifier(self.project, num_classes, self.rank)
