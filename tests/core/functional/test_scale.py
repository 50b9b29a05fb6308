"""Square roots at every scale: Q(cP) = √c Q(P), and the gradient is divided by √c, down to traces of 1e-200."""

import pytest
import torch
from spectral_cases import F64, features, generator, log_spectrum, matrix, refused, relative

from eigengrain.functional import (
    isqrt_covariance,
    matrix_power,
    matrix_sqrt,
    mpa_sqrt,
    mtp_sqrt,
    newton_schulz,
    quintic_sqrt,
    sqrt_covariance,
)
from eigengrain.functional.newton_schulz import log_products

ROOTS = [matrix_sqrt, newton_schulz, quintic_sqrt, mtp_sqrt, mpa_sqrt]


@pytest.mark.parametrize("scale", [1e-200, 1e-15, 1e15, 1e200])
@pytest.mark.parametrize("function", ROOTS)
def test_roots_of_matrices(function, scale):
    p = matrix(torch.tensor([1.0, 0.6, 0.3, 0.1], dtype=F64), batch=2)
    g = torch.randn(2, 4, 4, dtype=F64, generator=generator(0))

    def value_and_gradient(factor):
        scaled = (factor * p).requires_grad_()
        root = function(scaled)
        return root, torch.autograd.grad(root, scaled, g)[0]

    (root, slope), (expected, expected_slope) = value_and_gradient(scale), value_and_gradient(1.0)
    assert relative(root / scale**0.5, expected) < 1e-12
    assert relative(slope * scale**0.5, expected_slope) < 1e-11


@pytest.mark.parametrize("scale", [1e-15, 1e-8, 1e8, 1e15])
@pytest.mark.parametrize("solver", ["isqrt", "eigh", "products"])
def test_roots_of_features(solver, scale):
    def root(x):
        return isqrt_covariance(x) if solver == "isqrt" else sqrt_covariance(x, solver=solver)

    x = features(5, 20, log_spectrum(5, 1e3), seed=1)
    assert relative(root(scale * x) / scale, root(x)) < 1e-12


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_logarithm_by_products_is_shifted_by_the_logarithm_of_the_scale(scale):
    p = matrix(torch.tensor([1.0, 0.5, 0.01], dtype=F64))
    shift = torch.tensor(scale, dtype=F64).log() * torch.eye(3, dtype=F64)
    assert relative(log_products(scale * p), log_products(p) + shift) < 1e-9


def test_the_power_zero_needs_a_definite_matrix():
    assert refused(lambda: matrix_power(torch.diag(torch.tensor([1.0, 0.0])), 0)) == "P"
    torch.testing.assert_close(matrix_power(torch.diag(torch.tensor([1.0, 2.0])), 0), torch.eye(2))
