"""Cuts at, before and inside the null space: one result for every solver and every basis of the null space."""

import pytest
import torch
from spectral_cases import F64, features, generator, orthonormal, relative

from eigengrain import EigenSubset
from eigengrain.functional import (
    covariance,
    matrix_power,
    matrix_sqrt,
    sqrt_covariance,
    sqrt_covariance_of_subsets,
)

D, RANK = 9, 4
SIGMA = torch.tensor([1.7, 1.1, 0.6, 0.2], dtype=F64)
#: rank 4 with many positions, and with fewer positions than channels
FEATURES = {n: features(D, n, SIGMA, seed=n, batch=2) for n in (6, 8, 20)}
SUBSETS = ["top:2", "top:4", "top:5", "top:8", "last:7", "last:5", "last:2", "top:1+last:3", "top:1+last:6", "top:4+last:1"]
ROUTES = {
    "eigh": lambda x, **options: sqrt_covariance(x, solver="eigh", **options),
    "gram": lambda x, **options: sqrt_covariance(x, solver="gram", **options),
    "svd": lambda x, **options: sqrt_covariance(x, solver="svd", **options),
    "float32": lambda x, **options: sqrt_covariance(x.float(), solver="svd", dtype=torch.float32, **options).double(),
    "rule": lambda x, seb, **options: matrix_sqrt(covariance(x), **options),
    "subsets": lambda x, subset, **options: sqrt_covariance_of_subsets(x, ["all", subset], **options)[0][1],
}


def both(route, x, g, **options):
    x = x.clone().requires_grad_()
    q = ROUTES[route](x, **options)
    return q.detach(), torch.autograd.grad(q, x, g)[0]


def by_definition(x, g, subset):
    """Root and gradient of sqrt(Π P Π) with a fixed Π: null directions are kept or dropped as the first of them is."""
    keep = EigenSubset.parse(subset).mask(D)
    keep = torch.where(torch.arange(D) < RANK, keep, keep[RANK])
    xc = (x - x.mean(-1, keepdim=True)) / x.shape[-1] ** 0.5
    u, sigma, vt = torch.linalg.svd(xc)
    sigma = torch.nn.functional.pad(sigma, (0, D))[:, :D]
    sigma[:, RANK:] = 0
    ratio = sigma[:, None, :] / (sigma[:, :, None] + sigma[:, None, :]).clamp_min(1e-300)
    ratio = ratio * (keep[:, None] & keep)
    inner = (u.mT @ ((g + g.mT) / 2) @ u * ratio)[..., :RANK]
    dx = 2 * u @ inner @ vt[:, :RANK] / x.shape[-1] ** 0.5
    return (u * (sigma * keep)[:, None]) @ u.mT, dx


@pytest.mark.parametrize("n", FEATURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_every_route_holds_the_same_subspace_fixed(subset, n):
    x = FEATURES[n]
    g = torch.randn(2, D, D, dtype=F64, generator=generator(n))
    q, dx = by_definition(x, g, subset)
    for route in ROUTES:
        tolerance = 2e-6 if route == "float32" else 1e-9 if route == "rule" else 1e-12
        value, gradient = both(route, x, g, subset=subset, cut="projector", seb=False)
        assert (value - q).abs().max() < tolerance
        assert (gradient - dx).abs().max() < tolerance


@pytest.mark.parametrize("cut", ["exact", "projector"])
@pytest.mark.parametrize("subset", SUBSETS)
def test_the_basis_of_the_null_space_has_no_effect(subset, cut):
    """f(OX) = O f(X) Oᵀ for an orthogonal O, which changes the basis that a solver returns for the null space."""
    o = orthonormal(D, D, generator(1))[0]
    for n, x in FEATURES.items():
        g = torch.randn(2, D, D, dtype=F64, generator=generator(n))
        for route in ("eigh", "gram", "svd", "subsets", "float32"):
            options = {"subset": subset, "cut": cut, "seb": True}
            tolerance = 3e-5 if route == "float32" else 1e-11
            q, dx = both(route, x, g, **options)
            turned_q, turned_dx = both(route, o @ x, o @ g @ o.mT, **options)
            assert (turned_q - o @ q @ o.mT).abs().max() < tolerance
            assert (turned_dx - o @ dx).abs().max() < tolerance


def test_a_cut_of_zeros_only_drops_nothing():
    """206 of 256 with rank 195: value and gradient are those of the full spectrum, and the rest is zero."""
    x = torch.randn(1, 16, 12, dtype=F64, generator=generator(0))
    g = torch.randn(1, 16, 16, dtype=F64, generator=generator(1))
    for route in ("eigh", "gram", "svd"):
        whole, part, rest = (both(route, x, g, subset=s, cut="projector", seb=False) for s in ("all", "top:13", "last:3"))
        for a, b, zero in zip(whole, part, rest, strict=True):
            assert relative(b, a) < 1e-13
            assert zero.abs().max() == 0


def test_each_sample_of_a_batch_has_its_own_rank():
    mixed = torch.cat([FEATURES[20][:1], torch.randn(1, D, 20, dtype=F64, generator=generator(5)), torch.zeros(1, D, 20)])
    g = torch.randn(3, D, D, dtype=F64, generator=generator(6))
    for route in ("eigh", "gram", "svd"):
        _, dx = both(route, mixed, g, subset="top:6", cut="projector", seb=False)
        for k in range(3):
            alone = both(route, mixed[k : k + 1], g[k : k + 1], subset="top:6", cut="projector", seb=False)[1]
            assert torch.allclose(dx[k], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", [matrix_sqrt, lambda p, **options: matrix_power(p, 0.3, **options)])
def test_functions_of_a_matrix(function):
    o = orthonormal(D, D, generator(1))[0]
    p = covariance(FEATURES[20])
    g = torch.randn(2, D, D, dtype=F64, generator=generator(3))

    def gradient(p, g, subset):
        p = p.clone().requires_grad_()
        return torch.autograd.grad(function(p, subset=subset, cut="projector"), p, g)[0]

    for subset in SUBSETS:
        turned = gradient(o @ p @ o.mT, o @ g @ o.mT, subset)
        assert torch.allclose(turned, o @ gradient(p, g, subset) @ o.mT, rtol=0, atol=1e-8)


@pytest.mark.parametrize("cut", ["exact", "projector"])
@pytest.mark.parametrize("solver", ["eigh", "gram", "svd"])
def test_a_cut_between_equal_eigenvalues_is_finite(solver, cut):
    """There is no derivative: the subspace is held fixed between equal eigenvalues."""
    x = torch.tensor(
        [[[1.0, -1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0, -1.0]]], dtype=F64
    )
    q, dx = both(solver, x, torch.ones(1, 3, 3, dtype=F64), subset="top:2", cut=cut, seb=False)
    assert q.isfinite().all()
    assert dx.isfinite().all()
    p = torch.eye(3, dtype=F64).requires_grad_()
    (dp,) = torch.autograd.grad(matrix_sqrt(p, subset="top:2", cut=cut).sum(), p)
    assert dp.isfinite().all()
