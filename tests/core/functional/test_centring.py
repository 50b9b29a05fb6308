"""Centring: constant channels become exact zeros, and gradients have mean zero over the positions."""

import pytest
import torch
from spectral_cases import F64, features, generator, log_spectrum

from eigengrain.functional import covariance, sqrt_covariance


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("positions", [10, 49, 196])
def test_channels_of_any_constant_are_exactly_zero(positions, dtype):
    """The mean of equal numbers is rounded, so subtracting it alone would leave a covariance of about 1e-33."""
    constants = torch.rand(1, 200, 1, dtype=dtype, generator=generator(0))
    x = constants.expand(-1, -1, positions)
    assert covariance(x, dtype=dtype).abs().max() == 0
    assert sqrt_covariance(x.double()).abs().max() == 0


@pytest.mark.parametrize("seb", [False, True])
@pytest.mark.parametrize("solver", ["eigh", "gram", "svd", "products"])
def test_gradients_have_mean_zero_next_to_the_null_space(solver, seb):
    """Constants added to channels change nothing. Rows of Vᵀ of small σ are centred only up to rounding."""
    x = features(6, 40, log_spectrum(6, 1e13), seed=1, batch=2) + 1.0
    x.requires_grad_()
    g = torch.randn(2, 6, 6, dtype=F64, generator=generator(2))
    (gradient,) = torch.autograd.grad(sqrt_covariance(x, seb, solver=solver), x, g)
    assert gradient.norm() > 0.1
    assert gradient.sum(-1).abs().max() < 1e-14 * gradient.norm()
