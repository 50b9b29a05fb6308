"""Gradcheck of every public differentiable function: generic features, equal eigenvalues, and too few positions."""

import pytest
import torch
from spectral_cases import F64, features, generator

from eigengrain import functional as F

INPUTS = {
    "generic": torch.randn(1, 4, 9, dtype=F64, generator=generator(0)),
    "equal eigenvalues": features(4, 9, torch.full((4,), 1.1, dtype=F64), seed=1),
    "short rank": torch.randn(1, 5, 4, dtype=F64, generator=generator(2)),
}
OF_COVARIANCE = {
    "matrix_sqrt": F.matrix_sqrt,
    "matrix_power": lambda p: F.matrix_power(p, 0.3),
    "matrix_log": lambda p: F.matrix_log(p + torch.eye(p.shape[-1], dtype=p.dtype)),
    "exp_inverse": F.exp_inverse,
    "spectral_function": lambda p: F.spectral_function(p, torch.tanh),
    "newton_schulz": F.newton_schulz,
    "scaling_factor": F.scaling_factor,
    "scaling_factor q": lambda p: F.scaling_factor(p, "q"),
    "scaling_factor s": lambda p: F.scaling_factor(p, "s"),
    "scaling_factor by products": lambda p: F.scaling_factor(p, solver="products"),
    "triu_vector": F.triu_vector,
    "eigenvalues, symmetric function": lambda p: F.eigh(p).values.exp().sum(-1),
}


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("name", OF_COVARIANCE)
def test_gradcheck_from_the_covariance(name, case):
    x = INPUTS[case].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: OF_COVARIANCE[name](F.covariance(t)), x)


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("function", [F.sqrt_covariance, F.isqrt_covariance, lambda t: F.sqrt_covariance(t, True)])
def test_gradcheck_from_features(function, case):
    assert torch.autograd.gradcheck(function, INPUTS[case].clone().requires_grad_())


@pytest.mark.parametrize("case", ["generic", "equal eigenvalues"])
@pytest.mark.parametrize("function", [F.mtp_sqrt, F.mpa_sqrt])
def test_published_approximants(function, case):
    """Their published gradient is that of the true root, so the degree is high enough for their value to be that root."""
    p = (F.covariance(INPUTS[case]) + torch.eye(4, dtype=F64)).requires_grad_()
    enough = {F.mtp_sqrt: 200, F.mpa_sqrt: 8}[function]
    assert torch.autograd.gradcheck(lambda m: function(m, enough), p)
