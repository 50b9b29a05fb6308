"""What several heads are made of: the second moment, elementwise roots, unit vectors, and checks of their options."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigengrain.functional import triu_vector
from eigengrain.functional.inputs import check_floating, full_precision, output_dtype


def check_whole_number(who: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{who}: {name} must be a whole number of at least 1, got {value!r}")


def check_positive(who: str, name: str, value: float, why: str) -> None:
    if not value > 0:
        raise ValueError(f"{who}: {name} must be above 0, got {value!r}: {why}")


def second_moment(x: Tensor) -> Tensor:
    r"""Uncentred second moment of features, :math:`\frac1N X X^T`: (B, C, H, W) or (B, C, N) → (B, C, C), dtype kept."""
    x = x.flatten(2)
    with full_precision(x):
        return x @ x.mT / x.shape[-1]


def signed_sqrt(x: Tensor, eps: float = 1e-5) -> Tensor:
    r"""Elementwise signed square root, :math:`\mathrm{sign}(x)\sqrt{|x| + \varepsilon}`.

    The plain root has an infinite slope at 0. With ε, as it is in common use, the slope is at most
    :math:`1/(2\sqrt\varepsilon)`; the price is a step of :math:`\pm\sqrt\varepsilon` at 0, where value and slope are 0.

    Example:
        >>> signed_sqrt(torch.tensor([-4.0, 0.0, 9.0]), eps=0.0)
        tensor([-2.,  0.,  3.])
    """
    return x.sign() * (x.abs() + eps).sqrt()


def smooth_signed_sqrt(x: Tensor, eps: float = 1e-4) -> Tensor:
    r"""Elementwise signed square root without a step at 0.

    .. math:: \mathrm{sign}(x)\big(\sqrt{|x| + \varepsilon} - \sqrt\varepsilon\big)
       = \frac{x}{\sqrt{|x| + \varepsilon} + \sqrt\varepsilon}

    Its slope, :math:`1/(2\sqrt{|x| + \varepsilon})`, is continuous and largest at 0. The second form is the one that is
    evaluated, because nothing cancels in it.

    Example:
        >>> smooth_signed_sqrt(torch.tensor([-3.0, 0.0, 8.0]), eps=1.0)
        tensor([-1.,  0.,  2.])
    """
    return x / ((x.abs() + eps).sqrt() + eps**0.5)


def unit(v: Tensor) -> Tensor:
    """Vectors (..., C) at length 1, differentiably; a zero vector stays zero and gets a zero gradient, NaN stays NaN."""
    # a constant factor changes nothing, but the squares of a vector of 1e20 or 1e-25 are beyond float32
    largest = v.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0  # NaN is not: counted as zero, features that diverged would end in a finite loss
    v = v / torch.where(zero, 1.0, largest)
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return torch.where(zero, 0.0, v / torch.where(zero, 1.0, length))


def power_normalise(vector: Tensor, eps: float = 1e-5) -> Tensor:
    r"""Signed square root, then division by the ℓ2 norm: what bilinear vectors go through before the classifier.

    A zero vector stays zero and gets a zero gradient.

    Example:
        >>> power_normalise(torch.tensor([9.0, -16.0]), eps=0.0)
        tensor([ 0.6000, -0.8000])
    """
    return F.normalize(signed_sqrt(vector, eps), dim=-1)


class TriangleClassifier(nn.Module):
    """Scores of symmetric matrices by a quadratic form a class, from the isometric upper triangle; the base of two.

    A subclass makes its parameters before :meth:`reset_parameters` is called and says in :meth:`forms` what they mean.
    """

    #: what the triangle is of, for the error
    of = "matrix"

    def __init__(self, channels: int, num_classes: int, rank: int):
        super().__init__()
        for name, value in (("channels", channels), ("num_classes", num_classes), ("rank", rank)):
            check_whole_number(type(self).__name__, name, value)
        self.channels = channels
        self.rank = rank
        self.in_features = channels * (channels + 1) // 2
        self.out_features = num_classes
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forms(self, dtype: torch.dtype) -> Tensor:
        """One symmetric matrix a class, (num_classes, C, C)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"channels={self.channels}, num_classes={self.out_features}, rank={self.rank}"

    def forward(self, vector: Tensor) -> Tensor:
        check_floating(vector, type(self).__name__)
        if vector.ndim == 0 or vector.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} expects vectors of {self.in_features} numbers, the upper triangle of a "
                f"{self.channels} × {self.channels} {self.of}, got shape {tuple(vector.shape)}"
            )
        vector = vector.to(output_dtype(vector))
        with full_precision(vector):
            return F.linear(vector, triu_vector(self.forms(vector.dtype), isometric=True), self.bias.to(vector.dtype))
