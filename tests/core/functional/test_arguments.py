"""Arguments that are out of range are refused with the name of the argument, before any work is done."""

import math

import pytest
import torch
from spectral_cases import F64, refused

from eigengrain import EigenSubset
from eigengrain.functional import (
    GradientRule,
    covariance,
    eigh,
    isqrt_covariance,
    matrix_log,
    matrix_power,
    matrix_sqrt,
    mpa_sqrt,
    mtp_sqrt,
    newton_schulz,
    scaling_factor,
    sqrt_covariance,
    triu_vector,
)

P, X = torch.eye(3, dtype=F64), torch.randn(1, 3, 5)
NOT_INTEGERS = [0, -1, True, 2.0, math.nan, math.inf, "3", None, 10**9, 10**400]
NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None, 1j, 10**400]


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda value: mpa_sqrt(P, value), "degree"),
        (lambda value: mtp_sqrt(P, value), "degree"),
        (lambda value: newton_schulz(P, value), "steps"),
        (lambda value: isqrt_covariance(X, value), "steps"),
        (lambda value: GradientRule("power-iteration", steps=value), "steps"),
        (lambda value: GradientRule("newton", steps_newton=value), "steps_newton"),
    ],
)
def test_integers(call, argument):
    for value in NOT_INTEGERS:
        assert refused(lambda: call(value)) == argument  # noqa: B023


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda value: matrix_power(P, value), "p"),
        (lambda value: matrix_log(P, eps=value), "eps"),
        (lambda value: scaling_factor(P, "constant", constant=value), "constant"),
        (lambda value: GradientRule("trunc", threshold=value), "threshold"),
        (lambda value: sqrt_covariance(X, accuracy=value), "accuracy"),
    ],
)
def test_numbers(call, argument):
    for value in NOT_NUMBERS:
        assert refused(lambda: call(value)) == argument  # noqa: B023


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: mpa_sqrt(P, 30), "degree"),
        (lambda: mpa_sqrt(P, 13), "degree"),
        (lambda: mtp_sqrt(P, 1001), "degree"),
        (lambda: newton_schulz(P, 41), "steps"),
        (lambda: newton_schulz(P.float(), 21, dtype=torch.float32), "steps"),
        (lambda: matrix_power(P, 101), "p"),
        (lambda: matrix_log(P, eps=-1e-9), "eps"),
        (lambda: GradientRule("taylor", degree=1.5), "degree"),
        (lambda: GradientRule("topn", keep=True), "keep"),
        (lambda: sqrt_covariance(X, accuracy=-1.0), "accuracy"),
    ],
)
def test_limits(call, argument):
    assert refused(call) == argument


def test_the_largest_degrees_and_numbers_of_steps_work():
    p = covariance(torch.randn(2, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(0)))  # rank 3
    expected = matrix_sqrt(p)
    for root, tolerance in ((mpa_sqrt(p, 12), 0.1), (mtp_sqrt(p, 1000), 0.1), (newton_schulz(p, 40), 1e-6)):
        assert torch.allclose(root, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128])
def test_only_real_floating_point_tensors(dtype):
    matrix, features = P.to(dtype), X.to(dtype)
    for function in (matrix_sqrt, matrix_log, eigh, newton_schulz, mpa_sqrt, scaling_factor):
        assert refused(lambda: function(matrix)) == "P"  # noqa: B023
    assert refused(lambda: triu_vector(matrix)) == "matrix"
    for function in (sqrt_covariance, isqrt_covariance, covariance):
        assert refused(lambda: function(features)) == "x"  # noqa: B023


def nested(depth):
    subset = EigenSubset.largest(1)
    for _ in range(depth):
        subset = (subset | EigenSubset.smallest(1)).complement()
    return subset


def long_union(terms):
    subset = EigenSubset.largest(1)
    for _ in range(terms):
        subset |= EigenSubset.largest(1)
    return subset


@pytest.mark.parametrize(
    "call",
    [
        lambda: EigenSubset.parse("~(" * 2000 + "top:1" + ")" * 2000),
        lambda: EigenSubset.parse("~(" * 10**6),
        lambda: EigenSubset.parse("+".join(["top:1"] * 16_000)),
        lambda: EigenSubset.parse("~(" + "+".join(["top:1"] * 16_000) + ")"),
        lambda: EigenSubset.parse("x" * 10**7),
        lambda: EigenSubset.parse("top:" + "9" * 5000),
        lambda: nested(2000),
        lambda: long_union(16_000),
    ],
)
def test_subsets_without_end(call):
    with pytest.raises(ValueError) as error:
        call()
    assert error.value.argument == "subset"
    assert len(str(error.value)) < 300


def test_subsets_below_the_limits():
    deep = EigenSubset.parse("~(" * 48 + "top:1" + ")" * 48)
    assert deep.mask(3).tolist() == [True, False, False]
    assert EigenSubset.parse(str(nested(20))) == nested(20)
    assert hash(nested(49)) == hash(nested(49))
    wide = EigenSubset.parse("+".join(["top:1"] * 1000))
    assert wide.mask(2).tolist() == [True, False]
