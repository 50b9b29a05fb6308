r"""Scalar functions of eigenvalues with their divided differences.

The derivative of :math:`f(P) = U f(\Lambda) U^T` needs only the divided differences
:math:`K_{ij} = (f(\lambda_i) - f(\lambda_j))/(\lambda_i - \lambda_j)`, with :math:`K_{ii} = f'(\lambda_i)`
(Daleckii–Krein). The quotient cancels at close eigenvalues; each function here has a form that does not.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from eigengrain.functional.inputs import check_number


def geometric_ratio(high: Tensor, low: Tensor, p: float) -> Tensor:
    r""":math:`(1 - x^p)/(1 - x)` at :math:`x = \mathrm{low}/\mathrm{high}` in [0, 1], to full relative accuracy.

    For an integer p it is the geometric sum :math:`1 + x + \dots + x^{p-1}`.
    """
    if p == 0:
        return torch.zeros_like(high - low)
    gap = (high - low) / high
    # a gap near 1 has lost the digits of x, and an x near 1 those of the gap
    log_x = torch.where(gap > 0.5, (low / high).log(), torch.log1p(-gap))
    return torch.where(gap == 0, p, -torch.expm1(p * log_x) / gap)


class ScalarFunction:
    """A function of one real variable, applied to eigenvalues."""

    #: the function is defined for positive semi-definite matrices: eigenvalues at rounding level count as zero
    semidefinite: ClassVar[bool] = False
    #: the function requires every eigenvalue to be positive
    definite: bool = False
    name: str = "f"

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        """(f(a) − f(b))/(a − b), f′(a) at a = b; elementwise with broadcasting."""
        raise NotImplementedError


class SquareRoot(ScalarFunction):
    r""":math:`\sqrt x`, with :math:`K = 1/(\sqrt a + \sqrt b)`, and 0 at a = b = 0, where no derivative exists."""

    semidefinite = True
    name = "matrix_sqrt"

    def __call__(self, x: Tensor) -> Tensor:
        return x.clamp_min(0).sqrt()

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        total = self(a) + self(b)
        return torch.where(total > 0, 1 / torch.where(total > 0, total, 1.0), 0.0)


class Power(ScalarFunction):
    r""":math:`x^p`, with :math:`K = a^{p-1}\,(1 - r^p)/(1 - r)` for :math:`r = b/a \le 1`.

    At a = b = 0 it is 0 for p < 1, where no derivative exists.
    """

    semidefinite = True

    def __init__(self, p: float):
        check_number(p, "p", -100, 100)
        self.p = float(p)
        self.definite = self.p <= 0
        self.name = f"matrix_power(p={p:g})"

    def __call__(self, x: Tensor) -> Tensor:
        return x.clamp_min(0) ** self.p

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        high, low = torch.maximum(a, b).clamp_min(0), torch.minimum(a, b).clamp_min(0)
        safe = torch.where(high > 0, high, 1.0)
        quotient = safe ** (self.p - 1) * geometric_ratio(safe, low, self.p)
        return torch.where(high > 0, quotient, 1.0 if self.p == 1 else 0.0)


class Logarithm(ScalarFunction):
    r""":math:`\log x`, with :math:`K = \log(1+u)/(u\,b)` for :math:`u = (a-b)/b`."""

    semidefinite = True
    definite = True
    name = "matrix_log"

    def __call__(self, x: Tensor) -> Tensor:
        return x.log()

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        high, low = torch.maximum(a, b), torch.minimum(a, b)
        u = (high - low) / low
        safe = torch.where(u > 0, u, 1.0)
        return torch.where(u > 0, torch.log1p(safe) / safe, 1.0) / low


class ExpInverse(ScalarFunction):
    r""":math:`e^{-x}`, with :math:`K = e^{-b}\,(e^{-\delta} - 1)/\delta` for :math:`\delta = a - b \ge 0`."""

    name = "exp_inverse"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.exp(-x)

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        low = torch.minimum(a, b)
        delta = torch.maximum(a, b) - low
        safe = torch.where(delta > 0, delta, 1.0)
        return torch.exp(-low) * torch.where(delta > 0, torch.expm1(-safe) / safe, -1.0)


class FlooredInverse(ScalarFunction):
    r""":math:`1/\max(x, \delta)`, with :math:`K = -\frac{A - B}{a - b}\,\frac1{AB}` for :math:`A = \max(a, \delta)`.

    :math:`|K|` is at most :math:`1/\delta^2`, and K is 0 where both arguments are at most δ.
    """

    name = "floored_inverse"

    def __init__(self, floor: float):
        check_number(floor, "floor", math.ulp(0.0))
        self.floor = floor

    def __call__(self, x: Tensor) -> Tensor:
        return 1 / x.clamp_min(self.floor)

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        run, rise = a - b, a.clamp_min(self.floor) - b.clamp_min(self.floor)
        slope = torch.where(run == 0, (a > self.floor).to(run.dtype), rise / torch.where(run == 0, 1.0, run))
        return -slope * self(a) * self(b)


class Generic(ScalarFunction):
    """Any smooth f: the difference quotient, or the mean of f′ between the arguments where the quotient cancels.

    The mean, ∫ f′(b + t(a − b)) dt over t in [0, 1], is computed by Gauss's rule with two points. The quotient cancels if
    the arguments are close, or if f is almost equal at distant arguments (e^−x near 0). The second case differs from a
    coincidence f(a) = f(b), as with cosines, in that rounding explains the difference between quotient and mean.
    """

    #: with a relative gap h the quotient errs by about eps/h and Gauss's rule by h⁴/4320: both are below 1e-11 here
    CLOSE = 1e-4

    def __init__(self, f: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor] | None = None):
        self.f = f
        self._derivative = derivative
        self.name = f"spectral_function({getattr(f, '__name__', type(f).__name__)})"

    def __call__(self, x: Tensor) -> Tensor:
        return self.f(x)

    def derivative(self, x: Tensor) -> Tensor:
        if self._derivative is not None:
            return self._derivative(x)
        value, pullback = torch.func.vjp(self.f, x)[:2]
        return pullback(torch.ones_like(value))[0]

    def divided_difference(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(a, b)
        fa, fb = self.f(a), self.f(b)
        run, rise = a - b, fa - fb
        quotient = rise / torch.where(run == 0, 1.0, run)
        middle, offset = (a + b) / 2, run / math.sqrt(12)
        mean = (self.derivative(middle - offset) + self.derivative(middle + offset)) / 2
        size = torch.maximum(fa.abs(), fb.abs())
        arguments_close = run.abs() <= self.CLOSE * torch.maximum(a.abs(), b.abs())
        cancelled = rise.abs() <= self.CLOSE * size
        rounding = 64 * torch.finfo(a.dtype).eps * size
        explained = ((quotient - mean) * run).abs() <= rounding
        return torch.where(arguments_close | (cancelled & explained), mean, quotient)
