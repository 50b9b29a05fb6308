"""Matrix products against 60-digit arithmetic, SciPy and the eigenbasis."""

import math

import mpmath
import pytest
import scipy.linalg
import torch
from spectral_cases import F64, log_spectrum, matrix, relative

from eigengrain.errors import ArgumentError
from eigengrain.functional import (
    covariance,
    isqrt_covariance,
    matrix_log,
    matrix_products,
    matrix_sqrt,
    sqrt_covariance,
)
from eigengrain.functional.newton_schulz import _isqrt_forward, _IsqrtRoot, log_products


@pytest.mark.parametrize(
    "coefficients, start",
    [
        (matrix_products._FIRST, mpmath.mpf("3.25e-4")),
        (matrix_products._REST, mpmath.mpf("0.0235")),
    ],
)
def test_coefficients_are_minimax(coefficients, start):
    """Remez exchange in 60 digits: max |1 − x h(x²)| is equal at both ends and both inner extrema."""
    low, high = start, mpmath.mpf(1)
    for c0, c1, c2 in coefficients[:-2]:
        inner = [low + (high - low) * mpmath.mpf("0.3"), low + (high - low) * mpmath.mpf("0.75")]
        for _ in range(100):
            points = [low, *inner, high]
            rows = mpmath.matrix([[x, x**3, x**5, (-1) ** i] for i, x in enumerate(points)])
            a, b, c, error = mpmath.lu_solve(rows, mpmath.matrix([1, 1, 1, 1]))
            root = mpmath.sqrt(9 * b * b - 20 * a * c)
            moved = sorted(mpmath.sqrt((-3 * b + s * root) / (10 * c)) for s in (-1, 1))
            done = sum(abs(x - y) for x, y in zip(inner, moved, strict=True)) < 1e-25
            inner = moved
            if done:
                break
        for ours, exact in zip((c0, c1, c2), (a, b, c), strict=True):
            assert abs(ours - exact) <= 1e-12 * abs(exact)
        low, high = 1 - abs(error), 1 + abs(error)
    assert abs(error) < 2e-4  # from here two steps of the third order reach rounding: 2e-4 → 1e-12 → 0


def converge(x, rows):
    for c0, c1, c2 in rows:
        x = x * (c0 + c1 * x**2 + c2 * x**4)
    return x


def test_both_parts_of_the_steps():
    """The first part suffices for σ from 2.4e-4 on, as a distance of 1e-4 before its last step shows; both for 1e-6."""
    x = torch.logspace(-6, 0, 100001, dtype=F64)
    assert (converge(x, matrix_products.QUINTIC) - 1).abs().max() < 1e-10
    before = converge(x, matrix_products._FIRST[:-1])
    near = (1 - before**2).abs() <= 1e-4
    assert near[x >= 2.4e-4].all()
    assert (converge(x, matrix_products._FIRST)[near] - 1).abs().max() < 1e-12
    smallest = x[~near].max()  # each larger value is near
    assert smallest > 2e-4


@pytest.mark.parametrize("step, smallest, rows", [("_FAR", None, "_FIRST"), ("_NEAR", 2e-4, "_REST")])
def test_a_newton_step_leaves_the_range_of_the_steps_after_it(step, smallest, rows):
    step, rows = getattr(matrix_products, step), getattr(matrix_products, rows)
    x = torch.logspace(math.log10(smallest or 1 / matrix_products._NULL_INVERSE), 0, 100001, dtype=F64)
    of_x, of_inverse = step.weights
    after = of_x * x + of_inverse / x
    assert after.max() <= 1 / (2.0 if smallest is None else 1.02) + 1e-12
    assert after.min() >= (3.25e-4 if smallest is None else 0.0235)
    used = rows if smallest is None else rows[: matrix_products._NEAR_STEPS]
    assert (converge(after, used) - 1).abs().max() < (1e-12 if smallest is None else 3e-11)


@pytest.mark.parametrize("seed", range(12))
def test_features_with_few_active_positions_keep_the_bound(seed):
    """Rounding makes null eigenvalues negative, which the inverse root enlarges: the margin above 1 must suffice."""
    generator = torch.Generator().manual_seed(seed)
    d, n = 64, 196
    x = torch.randn(16, d, n, generator=generator) * (torch.rand(16, 1, n, generator=generator) < 0.02 * (1 + seed))
    x = x.requires_grad_()
    g = torch.randn(16, d, d, generator=generator)
    (dx,) = torch.autograd.grad(sqrt_covariance(x, solver="products"), x, g)
    ratio = dx.flatten(1).norm(dim=1) / g.flatten(1).norm(dim=1) / (2 / n) ** 0.5
    assert ratio.max() <= 1 + 1e-5


@pytest.mark.parametrize("kappa", [1e2, 1e8, 1e12])
def test_lyapunov_against_scipy(kappa):
    p = matrix(log_spectrum(16, kappa), seed=1, batch=2) * 3
    g = torch.randn(2, 16, 16, dtype=F64, generator=torch.Generator().manual_seed(1))
    g = g + g.mT
    q = matrix_sqrt(p)
    exact = torch.stack(
        [torch.from_numpy(scipy.linalg.solve_continuous_lyapunov(a, b)) for a, b in zip(q.numpy(), g.numpy(), strict=True)]
    )
    assert relative(matrix_products.lyapunov(matrix_products.roots(p), g)[0], exact) <= max(1e-11, 1e-18 * kappa)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 300.0, 1e5, 1e6])
def test_exponential_by_products(scale):
    p = matrix(log_spectrum(6, 1e12), seed=2, batch=2) * scale
    expected = torch.stack([torch.from_numpy(scipy.linalg.expm(-2 * a.numpy())) for a in p])
    # scaling by 2^m costs SciPy m binary digits as well: the eigenbasis is the tighter reference
    values, u = torch.linalg.eigh(p)
    exact = (u * torch.exp(-2 * values).unsqueeze(-2)) @ u.mT
    bound = max(1e-13, 4e-16 * scale)
    assert relative(matrix_products.exp_minus_twice(p), exact) <= bound
    assert relative(matrix_products.exp_minus_twice(p), expected) <= 10 * bound


def test_exponential_of_any_size_is_finite():
    p = torch.diag_embed(torch.tensor([[1e9, 0.5], [1e14, 0.5], [1e60, 0.0], [1e-60, 0.0]], dtype=F64))
    expected = torch.exp(-2 * p.diagonal(dim1=1, dim2=2))
    assert torch.allclose(matrix_products.exp_minus_twice(p), torch.diag_embed(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("d, kappa, bound", [(12, 1e1, 1e-9), (12, 1e3, 1e-9), (12, 1e6, 1e-9), (128, 1e10, 2e-8)])
def test_logarithm_by_products(d, kappa, bound, scale):
    p = matrix(log_spectrum(d, kappa).square(), seed=4, batch=2) * scale
    assert relative(log_products(p), matrix_log(p)) < bound
    with pytest.raises(ArgumentError) as error:
        log_products(p.requires_grad_())
    assert error.value.argument == "P"


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("case", ["generic", "short rank", "constant"])
def test_newton_schulz_from_features_is_the_composition(case, steps):
    """The layer that CUDA replays, called directly, against covariance and iteration by autograd."""
    x = {"generic": torch.randn(2, 5, 3, 4), "short rank": torch.randn(2, 5, 4), "constant": torch.ones(2, 5, 4)}[case]
    x = x.double().requires_grad_()
    g = torch.randn(2, 5, 5, dtype=F64)
    q = isqrt_covariance(x, steps)
    (expected,) = torch.autograd.grad(q, x, g)
    y = x.detach().requires_grad_()
    p = covariance(y, dtype=F64)
    q2, *saved = _isqrt_forward(p.detach(), steps=steps)
    assert torch.allclose(q2, q, rtol=0, atol=1e-14)
    attached = _IsqrtRoot.apply(p, q2, *saved)
    assert torch.allclose(torch.autograd.grad(attached, y, g)[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("distance", [1e-9, 1e-6, 1e-3])
def test_eigenvalues_below_a_floor_are_raised_to_it(distance):
    """Also those that are close to the floor beside the largest."""
    floor, largest = 0.3, 40.0
    values = torch.tensor([largest, 1.0, floor + distance * largest, floor - distance * largest, 0.0, -30.0], dtype=F64)
    p = matrix(values, batch=3)
    lam, u = torch.linalg.eigh(p)
    expected = (u * lam.clamp_min(floor).unsqueeze(-2)) @ u.mT
    assert relative(matrix_products.floored(p, floor), expected) < 1e-12
    assert relative(matrix_products.floored(-p, -floor), -(u * lam.clamp_max(floor).unsqueeze(-2)) @ u.mT) < 1e-12


def test_matrices_above_and_at_the_floor():
    above = matrix(log_spectrum(6, 1e8), batch=2)
    assert relative(matrix_products.floored(above, 1e-5), above) < 1e-12
    identity = 2 * torch.eye(4, dtype=F64).expand(2, 4, 4)
    torch.testing.assert_close(matrix_products.floored(identity, 2.0), identity, rtol=0, atol=0)


@pytest.mark.parametrize("smallest", [0.5, 1e-3, 1e-8])
def test_inverse_by_newton_steps(smallest):
    values = torch.logspace(0, math.log10(smallest), 6, dtype=F64)
    p = matrix(values, batch=2)
    lam, u = torch.linalg.eigh(p)
    assert relative(matrix_products.inverse(p, smallest), (u / lam.unsqueeze(-2)) @ u.mT) < 1e-15 / smallest + 1e-13
