"""Divided differences against 60-digit arithmetic."""

import mpmath
import pytest
import torch
from spectral_cases import F64

from eigengrain.functional.scalar_functions import (
    ExpInverse,
    FlooredInverse,
    Generic,
    Logarithm,
    Power,
    SquareRoot,
    geometric_ratio,
)

# close and distant pairs over twelve decades, and ratios at which the difference loses all digits of the smaller one
BASES = [1e-9, 3e-6, 1e-3, 0.7, 2.0, 40.0]
GAPS = [0.0, 1e-16, 1e-15, 1e-12, 1e-9, 1e-7, 3e-6, 1e-5, 1e-3, 0.3, 1.0, 50.0, 1e6, 1e10, 1e14, 1e17]
PAIRS = [(b * (1 + g), b) for b in BASES for g in GAPS]
A = torch.tensor([p[0] for p in PAIRS], dtype=F64)
B = torch.tensor([p[1] for p in PAIRS], dtype=F64)


def reference(f, derivative):
    out = []
    for a, b in zip(A.tolist(), B.tolist(), strict=True):
        a, b = mpmath.mpf(a), mpmath.mpf(b)
        out.append(derivative(a) if a == b else (f(a) - f(b)) / (a - b))
    return out


def worst(ours, exact):
    return max(float(abs(mpmath.mpf(o) - e) / abs(e)) for o, e in zip(ours.tolist(), exact, strict=True))


BUILT_IN = {
    "sqrt": (SquareRoot(), mpmath.sqrt, lambda x: 1 / (2 * mpmath.sqrt(x))),
    "log": (Logarithm(), mpmath.log, lambda x: 1 / x),
    "inverse": (FlooredInverse(1e-10), lambda x: 1 / x, lambda x: -1 / x**2),
    "exp": (ExpInverse(), lambda x: mpmath.exp(-x), lambda x: -mpmath.exp(-x)),
    **{
        f"power {p}": (Power(p), lambda x, p=p: x ** mpmath.mpf(p), lambda x, p=p: p * x ** (mpmath.mpf(p) - 1))
        for p in (0.1, 0.3, 0.5, 1.0, 1.7, 2.0, -1.0, -0.5)
    },
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_to_1e_13(name):
    function, f, derivative = BUILT_IN[name]
    exact = reference(f, derivative)
    assert worst(function.divided_difference(A, B), exact) <= 1e-13
    assert worst(function.divided_difference(B, A), exact) <= 1e-13


@pytest.mark.parametrize("floor", [1e-4, 0.7, 1e3])
def test_floored_inverse(floor):
    """Above the floor, below it, and across it; at the floor the slope is that from below."""
    function, lowest = FlooredInverse(floor), mpmath.mpf(floor)
    exact = reference(lambda x: 1 / max(x, lowest), lambda x: -1 / x**2 if x > lowest else mpmath.mpf(0))
    for ours in (function.divided_difference(A, B), function.divided_difference(B, A)):
        for got, wanted, high in zip(ours.tolist(), exact, A.tolist(), strict=True):
            assert abs(got - wanted) <= 1e-13 * abs(wanted), high
    at = torch.tensor([floor / 2, floor, 2 * floor], dtype=F64)
    assert torch.equal(function(at), torch.tensor([1 / floor, 1 / floor, 1 / (2 * floor)], dtype=F64))


GENERIC = {
    "sin": (torch.sin, mpmath.sin, mpmath.cos),
    "exp(-x)": (lambda x: torch.exp(-x), lambda x: mpmath.exp(-x), lambda x: -mpmath.exp(-x)),
    "sqrt": (torch.sqrt, mpmath.sqrt, lambda x: 1 / (2 * mpmath.sqrt(x))),
    "log": (torch.log, mpmath.log, lambda x: 1 / x),
    "x^3": (lambda x: x**3, lambda x: x**3, lambda x: 3 * x**2),
    "x/(1+x)": (lambda x: x / (1 + x), lambda x: x / (1 + x), lambda x: 1 / (1 + x) ** 2),
    "1+x": (lambda x: 1 + x, lambda x: 1 + x, lambda x: mpmath.mpf(1)),
}


@pytest.mark.parametrize("name", GENERIC)
def test_generic_to_1e_10(name):
    f, mf, md = GENERIC[name]
    exact = reference(mf, md)
    assert worst(Generic(f).divided_difference(A, B), exact) <= 1e-10


def test_generic_handles_equal_values_far_apart():
    a, b = torch.tensor(0.3, dtype=F64), torch.tensor(0.3 + 2 * torch.pi, dtype=F64)
    assert abs(Generic(torch.cos).divided_difference(a, b)) < 1e-15


def test_generic_uses_a_given_derivative():
    function = Generic(torch.sin, torch.cos)
    assert torch.equal(function.divided_difference(A, A), torch.cos(A))


def test_zero_is_as_documented():
    zero, two = torch.tensor(0.0, dtype=F64), torch.tensor(2.0, dtype=F64)
    assert SquareRoot().divided_difference(zero, zero) == 0
    assert torch.isclose(SquareRoot().divided_difference(zero, two), two**-0.5, rtol=1e-15, atol=0)
    assert Power(0.3).divided_difference(zero, zero) == 0
    assert Power(1).divided_difference(zero, zero) == 1
    assert Power(2).divided_difference(zero, zero) == 0
    assert torch.isclose(Power(0.3).divided_difference(two, zero), two ** (0.3 - 1))
    assert ExpInverse().divided_difference(zero, zero) == -1


@pytest.mark.parametrize("n", [0, 1, 2, 19, 101])
def test_geometric_ratio_is_the_geometric_sum(n):
    low = torch.tensor([1.0, 1 - 1e-12, 0.999, 0.5, 0.1, 1e-3, 1e-17, 0.0], dtype=F64)
    naive = sum((low**k for k in range(n)), torch.zeros_like(low))
    assert torch.allclose(geometric_ratio(torch.ones_like(low), low, n), naive, rtol=1e-12, atol=0)
