"""Building blocks of several heads: the second moment, elementwise roots, unit vectors, and a factorised classifier."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy, Tracer
from torch.nn import functional as F

from eigengrain.errors import ArgumentError
from eigengrain.functional import triu_vector
from eigengrain.functional.inputs import check_floating, check_integer, full_precision, output_dtype


def record_call(module: nn.Module, x: Proxy) -> Any:
    """Record a call of a module in a ``torch.fx`` trace, as one node: its code branches on shapes and values."""
    assert isinstance(x.tracer, Tracer)
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x,), {})


def check_positive(value: float, argument: str = "eps") -> None:
    """Check a number under a square root, which has an infinite slope at 0."""
    if not value > 0:
        raise ArgumentError(argument, "must be above 0, where the square root has an infinite slope", value)


def second_moment(x: Tensor) -> Tensor:
    r"""Uncentred second moment of features, :math:`\frac1N X X^T`: (B, C, H, W) or (B, C, N) → (B, C, C), dtype kept."""
    x = x.flatten(2)
    with full_precision(x):
        return x @ x.mT / x.shape[-1]


def signed_sqrt(x: Tensor, eps: float = 1e-5) -> Tensor:
    r"""Elementwise signed square root, :math:`\mathrm{sign}(x)\sqrt{|x| + \varepsilon}`.

    The plain root has an infinite slope at 0. With ε, as in common use, the slope is at most
    :math:`1/(2\sqrt\varepsilon)`, at the price of a step of :math:`\pm\sqrt\varepsilon` at 0, where value and slope are 0.

    Example:
        >>> signed_sqrt(torch.tensor([-4.0, 0.0, 9.0]), eps=0.0)
        tensor([-2.,  0.,  3.])
    """
    return x.sign() * (x.abs() + eps).sqrt()


def smooth_signed_sqrt(x: Tensor, eps: float = 1e-4) -> Tensor:
    r"""Elementwise signed square root without a step at 0.

    .. math:: \mathrm{sign}(x)\big(\sqrt{|x| + \varepsilon} - \sqrt\varepsilon\big)
       = \frac{x}{\sqrt{|x| + \varepsilon} + \sqrt\varepsilon}

    Its slope, :math:`1/(2\sqrt{|x| + \varepsilon})`, is continuous and largest at 0. The second form is evaluated, because
    nothing cancels in it.

    Example:
        >>> smooth_signed_sqrt(torch.tensor([-3.0, 0.0, 8.0]), eps=1.0)
        tensor([-1.,  0.,  2.])
    """
    return x / ((x.abs() + eps).sqrt() + eps**0.5)


def unit(v: Tensor) -> Tensor:
    """Normalise vectors (..., C) to length 1; a zero vector stays zero with zero gradient, NaN stays NaN."""
    # a constant factor changes nothing, but the squares of entries like 1e20 or 1e-25 leave the range of float32
    largest = v.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0  # NaN does not count as zero, or diverged features would end in a finite loss
    v = v / torch.where(zero, 1.0, largest)
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return torch.where(zero, 0.0, v / torch.where(zero, 1.0, length))


def power_normalise(vector: Tensor, eps: float = 1e-5) -> Tensor:
    """Signed square root, then division by the ℓ2 norm; a zero vector stays zero and gets a zero gradient.

    Example:
        >>> power_normalise(torch.tensor([9.0, -16.0]), eps=0.0)
        tensor([ 0.6000, -0.8000])
    """
    return F.normalize(signed_sqrt(vector, eps), dim=-1)


class TriangleClassifier(nn.Module):
    """Base class of classifiers that score a symmetric matrix with one quadratic form per class.

    The input is the isometric upper triangle. A subclass names its parameter, (num_classes, rank, channels), and computes
    the forms from it.
    """

    parameter: ClassVar[str]

    def __init__(self, channels: int, num_classes: int, rank: int):
        super().__init__()
        for name, value in (("channels", channels), ("num_classes", num_classes), ("rank", rank)):
            check_integer(value, name)
        self.channels, self.rank = channels, rank
        self.in_features, self.out_features = channels * (channels + 1) // 2, num_classes
        self.bias = nn.Parameter(torch.zeros(num_classes))
        self.register_parameter(self.parameter, nn.Parameter(torch.empty(num_classes, rank, channels)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # vectors of unit length on average, so that scores are as large as the eigenvalues of the matrix
        nn.init.normal_(self.get_parameter(self.parameter), std=self.channels**-0.5)
        nn.init.zeros_(self.bias)

    def forms(self, dtype: torch.dtype) -> Tensor:
        """One symmetric matrix per class, (num_classes, C, C)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"channels={self.channels}, num_classes={self.out_features}, rank={self.rank}"

    def forward(self, vector: Tensor) -> Tensor:
        if isinstance(vector, Proxy):
            return record_call(self, vector)
        check_floating(vector, "vector")
        if vector.ndim == 0 or vector.shape[-1] != self.in_features:
            triangle = f"the upper triangle of a {self.channels} × {self.channels} matrix"
            raise ArgumentError("vector", f"must have shape (..., {self.in_features}), {triangle}", tuple(vector.shape))
        vector = vector.to(output_dtype(vector))
        with full_precision(vector):
            return F.linear(vector, triu_vector(self.forms(vector.dtype), isometric=True), self.bias.to(vector.dtype))
