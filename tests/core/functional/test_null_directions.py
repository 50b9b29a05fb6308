"""Null directions of a covariance, from copied channels or too few positions, do not contribute, whatever the solver."""

import pytest
import torch
from spectral_cases import F64, features, generator, relative

from eigengrain.functional import matrix_sqrt, sqrt_covariance


def copied_channels(positions, scale=1.0):
    """Features (2, 8, positions) of rank 4: the last four channels are mixtures of the first four."""
    x = torch.randn(2, 4, positions, dtype=F64, generator=generator(0)) * scale
    mix = torch.randn(4, 4, dtype=F64, generator=generator(1))
    return torch.cat([x, mix @ x], 1)


def gradient(x, g, **options):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(sqrt_covariance(x, **options), x, g)[0]


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("positions", [6, 8, 40])
@pytest.mark.parametrize("solver", ["eigh", "gram", "svd"])
def test_singular_covariances_have_one_gradient(solver, positions, scale):
    """∂l/∂X_c = 2U[(UᵀGU) ∘ R]Vᵀ with only the four directions of V that exist, and R_ij = σ_j/(σ_i + σ_j)."""
    x = copied_channels(positions, scale)
    g = torch.randn(2, 8, 8, dtype=F64, generator=generator(2))
    root, eigenvalues = sqrt_covariance(x, solver=solver, return_eigenvalues=True)
    assert ((eigenvalues > 0).sum(-1) == 4).all()
    xc = (x - x.mean(-1, keepdim=True)) / positions**0.5
    u, sigma, vt = torch.linalg.svd(xc)
    sigma = torch.cat([sigma[..., :4], torch.zeros(2, 4, dtype=F64)], -1)
    inner = u.mT @ (g + g.mT) / 2 @ u
    ratio = sigma[:, None, :4] / (sigma[:, :, None] + sigma[:, None, :4])
    expected = 2 * u @ (inner[..., :4] * ratio) @ vt[:, :4] / positions**0.5
    assert relative(root, (u * sigma[:, None]) @ u.mT) < 1e-12
    assert relative(gradient(x, g, solver=solver), expected) < 1e-10


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_the_root_of_a_singular_matrix_has_no_slope_between_null_directions(scale):
    """K_ij = 1/(σ_i + σ_j), and 0 where both are zero up to rounding, whose own roots would give 1e7."""
    x = copied_channels(40, scale)
    p = (x @ x.mT).requires_grad_()
    g = torch.randn(2, 8, 8, dtype=F64, generator=generator(2))
    values, u = torch.linalg.eigh(p.detach())
    sigma = torch.cat([torch.zeros(2, 4, dtype=F64), values[:, 4:].sqrt()], -1)
    total = sigma[:, :, None] + sigma[:, None]
    k = torch.where(total > 0, 1 / total, 0.0)
    expected = u @ ((u.mT @ (g + g.mT) / 2 @ u) * k) @ u.mT
    root = matrix_sqrt(p)
    assert relative(root, (u * sigma[:, None]) @ u.mT) < 1e-13
    assert relative(torch.autograd.grad(root, p, g)[0], expected) < 1e-11


@pytest.mark.parametrize("solver", ["eigh", "gram"])
def test_the_rounding_level_is_that_of_the_channels_for_both_matrices(solver):
    """d ε λ₁ with d = 200 channels, also if the 4 × 4 Gram matrix is decomposed: 1e-14 is below it, and 1e-13 above."""
    sigma = torch.tensor([1.0, 1e-13**0.5, 1e-14**0.5], dtype=F64)
    _, eigenvalues = sqrt_covariance(features(200, 4, sigma, seed=3), solver=solver, return_eigenvalues=True)
    assert (eigenvalues[0] > 0).tolist() == [True, True] + [False] * 198
    assert eigenvalues[0, 1].item() == pytest.approx(1e-13, rel=1e-3)
