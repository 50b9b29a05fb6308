"""Pooling on the Grassmann manifold: the leading subspace of the features, without their magnitudes."""

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError
from eigengrain.functional.covariance import triu_vector
from eigengrain.functional.eigen import rounding_floor
from eigengrain.functional.inputs import check_integer, output_dtype, to_compute
from eigengrain.functional.scalar_functions import ScalarFunction
from eigengrain.functional.spectral import spectral_function
from eigengrain.heads.base import Head
from eigengrain.heads.layers import TriangleClassifier
from eigengrain.heads.registry import register_head


class LeadingSubspace(ScalarFunction):
    r"""1 for the k largest eigenvalues and 0 for the others; :math:`K_{ij} = 1/(\lambda_i - \lambda_j)` across the cut.

    It is the cut spectral function with f = 1, with two special cases. Null eigenvalues count as dropped, because their
    directions have no order. A pair of eigenvalues on both sides of the cut that are equal up to rounding contributes 0
    instead of an infinity: the subspace is not unique there, and no derivative exists.
    """

    semidefinite = True

    def __init__(self, k: int):
        self.k = k
        self.name = f"leading_subspace(k={k})"

    def __call__(self, x: Tensor) -> Tensor:
        return ((torch.arange(x.shape[-1], device=x.device) < self.k) & (x > 0)).to(x.dtype)

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        """``a`` (*, d, 1) and ``b`` (*, 1, d) are the same descending eigenvalues."""
        kept = self(b)
        rise = kept.mT - kept
        run = a - b
        across = (rise != 0) & (run.abs() > rounding_floor(b))
        return torch.where(across, rise / torch.where(across, run, 1.0), 0.0)


class SubspaceClassifier(TriangleClassifier):
    r"""Class scores that are projection kernels between the image's subspace and a subspace of each class.

    .. math:: f_c = \|W_c^T U_k\|_F^2 + b_c = \langle W_c W_c^T,\; U_k U_k^T \rangle + b_c, \qquad W_c \in R^{C \times r}

    It is computed in the second form: a linear classifier of the projector whose matrices have rank r, with C·r numbers per
    class instead of C(C+1)/2. Weights need not be orthonormal: their lengths are the scale of the scores.

    Args:
        channels: C, the size of the projector.
        num_classes: number of scores.
        rank: r.

    Shape:
        the vector of :class:`GrassmannPooling`, (..., C(C+1)/2) → (..., num_classes). ``basis`` is (num_classes, r, C).
    """

    parameter = "basis"
    basis: nn.Parameter

    def forms(self, dtype: torch.dtype) -> Tensor:
        basis = self.basis.to(dtype)
        return basis.mT @ basis


@register_head("gp")
class GrassmannPooling(Head):
    r"""Grassmann pooling: the projector onto the k leading left singular vectors of the features; C(C+1)/2 numbers.

    .. math:: X = U \Sigma V^T \in R^{C \times N}, \qquad v = \mathrm{triu}(U_k U_k^T)

    The features are not centred and their singular values are dropped, so v does not depend on their scale. Off-diagonal
    entries have a factor :math:`\sqrt2`, which makes the inner product of two vectors the projection kernel
    :math:`\|U_k^T U_k'\|_F^2`, the sum of squared cosines of the principal angles; :math:`\|v\|^2 = k`.

    **Gradient.** It is the exact gradient of the projector, a spectral function of :math:`X X^T` that is cut after k:
    :math:`1/(\lambda_i - \lambda_j)` for i kept and j dropped, and 0 otherwise. It is unbounded: it grows as one over
    :math:`\lambda_k - \lambda_{k+1}`, because the subspace turns faster the closer the two are, and is not unique where
    they are equal. Eigenvalues that differ by less than rounding, :math:`C\,\varepsilon\,\lambda_1`, count as equal, and
    their pair contributes 0. Clip gradients in training; :meth:`EigenSubset.relative_gap` measures how close a cut is.
    Features of rank below k (fewer than k positions, dead channels) give the projector onto their whole span.

    Args:
        in_channels, reduce: as in :class:`Head`.
        k: dimension of the subspace; 16, but at most half the channels, when None.
        class_rank: factorise the classifier, with a subspace of this dimension for each class, see
            :class:`SubspaceClassifier`; None gives a linear layer on v.

    Raises:
        SecondOrderError: in a second backward pass.

    Example:
        >>> head = GrassmannPooling(in_channels=3, k=1)
        >>> head(torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1) * torch.ones(1, 3, 2, 2))
        tensor([[1., 0., 0., 0., 0., 0.]])

    References:
        Wei, Zhang, Gong, Zhang and Zheng, Grassmann Pooling as Compact Homogeneous Bilinear Pooling for Fine-Grained
        Visual Classification, ECCV 2018.
    """

    def __init__(self, in_channels: int, reduce: int | None = None, k: int | None = None, class_rank: int | None = None):
        super().__init__(in_channels, reduce)
        self.k = max(1, min(16, self.channels // 2)) if k is None else k
        check_integer(self.k, "k")
        if self.k >= self.channels:
            problem = f"must be below the {self.channels} channels, where the projector is the identity"
            raise ArgumentError("k", problem, self.k)
        if class_rank is not None:
            check_integer(class_rank, "class_rank")
            if class_rank > self.channels:
                raise ArgumentError("class_rank", f"must be at most {self.channels}, the number of channels", class_rank)
        self.class_rank = class_rank
        self.out_features = self.channels * (self.channels + 1) // 2

    def projector(self, x: Tensor) -> Tensor:
        """(B, channels, …) → (B, channels, channels), symmetric and idempotent, of rank at most k."""
        features = to_compute(x.flatten(2))
        # beyond the number of positions every eigenvalue is null up to rounding
        leading = LeadingSubspace(min(self.k, features.shape[-1]))
        return spectral_function(features @ features.mT, leading).to(x.device, output_dtype(x))

    def use_products(self) -> None:
        raise ArgumentError("head", "needs eigenvectors, for which no runtime has a solver", "gp", "use another head")

    def pool(self, x: Tensor) -> Tensor:
        return triu_vector(self.projector(x), isometric=True)

    def classifier(self, num_classes: int) -> nn.Module:
        if self.class_rank is None:
            return super().classifier(num_classes)
        return SubspaceClassifier(self.channels, num_classes, self.class_rank)

    def extra_repr(self) -> str:
        return f"k={self.k}, class_rank={self.class_rank}"
