from functools import partial

import mpmath
import pytest
import scipy.linalg
import torch
from spectral_cases import F64, log_spectrum, matrix, refused, relative

from eigengrain.errors import SecondOrderError
from eigengrain.functional import isqrt_covariance, matrix_sqrt, mpa_sqrt, mtp_sqrt, newton_schulz, quintic_sqrt
from eigengrain.functional.newton_schulz import pade_coefficients, taylor_coefficients

P = matrix(torch.tensor([2.0, 1.0, 0.7, 0.2], dtype=F64), seed=3, batch=2)
G = torch.randn(2, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


def gradient(f, p, g):
    p = p.clone().requires_grad_()
    return torch.autograd.grad(f(p), p, g)[0]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_newton_schulz_is_the_published_iteration(steps):
    eye = torch.eye(4, dtype=F64)
    for p, ours in zip(P, newton_schulz(P, steps), strict=True):
        trace = p.trace()
        y, z = p / trace, eye
        for _ in range(steps):
            t = (3 * eye - z @ y) / 2
            y, z = y @ t, t @ z
        assert torch.allclose(ours, y * trace.sqrt(), rtol=0, atol=1e-14)


def test_newton_schulz_gradients_of_any_order():
    p = P[:1].clone().requires_grad_()
    assert torch.autograd.gradcheck(newton_schulz, p)
    assert torch.autograd.gradgradcheck(newton_schulz, p)
    hessian = torch.func.hessian(lambda m: newton_schulz(m).square().sum())(P[0])
    assert hessian.shape == (4, 4, 4, 4)
    assert hessian.abs().max() > 0


@pytest.mark.parametrize("f", [newton_schulz, mpa_sqrt, mtp_sqrt, quintic_sqrt])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_matrices_give_nan(f, bad):
    p = P.clone()
    p[1, 2, 2] = bad
    assert f(p)[1].isnan().all()
    assert torch.equal(f(p)[0], f(P)[0])


def test_five_steps_are_not_a_square_root():
    p = torch.diag(torch.tensor([1 - 1e-4, 1e-4], dtype=F64))
    share = newton_schulz(p, 5)[1, 1] / 1e-2
    assert 0.07 < share < 0.08


def test_zero_matrices_stay_zero():
    zero = torch.zeros(1, 3, 3, dtype=F64)
    for f in (newton_schulz, quintic_sqrt, mtp_sqrt, mpa_sqrt):
        assert f(zero).abs().max() == 0
        assert gradient(f, zero, torch.ones(1, 3, 3, dtype=F64)).isfinite().all()


@pytest.mark.parametrize("kappa", [1e2, 1e8, 1e12])
def test_quintic_is_converged(kappa):
    p = matrix(log_spectrum(24, kappa), seed=1, batch=2) * 3
    g = torch.randn(2, 24, 24, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert relative(quintic_sqrt(p), matrix_sqrt(p)) <= max(1e-13, 1e-17 * kappa)
    exact = torch.stack(
        [
            torch.from_numpy(scipy.linalg.solve_continuous_lyapunov(q.numpy(), ((h + h.mT) / 2).numpy()))
            for q, h in zip(matrix_sqrt(p), g, strict=True)
        ]
    )
    assert relative(gradient(quintic_sqrt, p, g), exact) <= max(1e-11, 1e-18 * kappa)


def test_quintic_gradient_at_short_rank_follows_the_exact_one():
    p = torch.diag(torch.tensor([4.0, 1.0, 0.0, 0.0], dtype=F64))[None]
    g = torch.ones(1, 4, 4, dtype=F64)
    ours, exact = gradient(quintic_sqrt, p, g), gradient(matrix_sqrt, p, g)
    assert torch.allclose(ours[:, :2], exact[:, :2], rtol=1e-6, atol=0)
    assert (ours[:, 2:, 2:] > 1e6).all()  # between null directions, as documented


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e12])
def test_quintic_scales(scale):
    assert relative(quintic_sqrt(P * scale), matrix_sqrt(P) * scale**0.5) < 1e-12
    assert relative(gradient(quintic_sqrt, P * scale, G), gradient(matrix_sqrt, P, G) / scale**0.5) < 1e-11


@pytest.mark.parametrize("f", [mtp_sqrt, mpa_sqrt])
@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_approximants_scale(f, scale):
    assert relative(f(P * scale) / scale**0.5, f(P)) < 1e-12
    assert relative(gradient(f, P * scale, G) * scale**0.5, gradient(f, P, G)) < 1e-11


def test_taylor_and_pade_coefficients():
    series = mpmath.taylor(lambda z: mpmath.sqrt(1 - z), 0, 10)
    assert max(abs(a - b) for a, b in zip(taylor_coefficients(10), series, strict=True)) < 1e-15
    numerator, denominator = mpmath.pade(series, 5, 5)
    ours = pade_coefficients(5)
    for mine, theirs in zip(ours, (numerator, denominator), strict=True):
        assert max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 1e-13


@pytest.mark.parametrize("f, degree", [(mtp_sqrt, 10), (mpa_sqrt, 5)])
def test_approximants_against_their_series_in_the_eigenbasis(f, degree):
    values, u = torch.linalg.eigh(P)
    norm = torch.linalg.matrix_norm(P)[:, None]
    z = 1 - values / norm
    if f is mtp_sqrt:
        root = sum(c * z**k for k, c in enumerate(taylor_coefficients(degree)))
    else:
        top, bottom = (sum(c * z**k for k, c in enumerate(cs)) for cs in pade_coefficients(degree))
        root = top / bottom
    expected = (u * (root * norm.sqrt()).unsqueeze(-2)) @ u.mT
    assert relative(f(P, degree), expected) < 1e-12


@pytest.mark.parametrize("f", [mtp_sqrt, mpa_sqrt])
def test_approximants_have_the_lyapunov_gradient(f):
    """The gradient of the approximate root, to the accuracy of eight cubic steps at this conditioning."""
    p = matrix(torch.tensor([1.0, 0.8, 0.6, 0.5], dtype=F64), batch=1)
    q = f(p)[0]
    exact = scipy.linalg.solve_continuous_lyapunov(q.numpy(), ((G[0] + G[0].mT) / 2).numpy())
    assert relative(gradient(f, p, G[:1])[0], torch.from_numpy(exact)) < 1e-6


@pytest.mark.parametrize("f", [quintic_sqrt, mtp_sqrt, mpa_sqrt])
def test_second_order_raises(f):
    p = P[:1].clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(p).square().sum(), p, create_graph=True)
    with pytest.raises(SecondOrderError):
        grad.sum().backward()


@pytest.mark.parametrize("f", [quintic_sqrt, mtp_sqrt])
def test_gradcheck(f):
    well = matrix(torch.tensor([1.0, 0.9, 0.8], dtype=F64)).requires_grad_()
    repeated = (2 * torch.eye(3, dtype=F64))[None].requires_grad_()
    loose = {} if f is quintic_sqrt else {"atol": 1e-3, "rtol": 1e-3}  # the published gradient is that of the true root
    assert torch.autograd.gradcheck(f, well, **loose)
    assert torch.autograd.gradcheck(f, repeated, **loose)


# few steps and terms: the compiler traces each of them in the same way
@pytest.mark.parametrize(
    "f",
    [partial(newton_schulz, steps=2), quintic_sqrt, partial(mtp_sqrt, degree=2), partial(mpa_sqrt, degree=1)],
    ids=["newton_schulz", "quintic_sqrt", "mtp_sqrt", "mpa_sqrt"],
)
def test_one_graph_under_compile_and_vmap(f):
    p = P.clone().requires_grad_()
    compiled = torch.compile(lambda m: f(m).sin().sum(), fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(p), p)
    (eager,) = torch.autograd.grad(f(p).sin().sum(), p)
    assert torch.allclose(ours, eager, rtol=0, atol=1e-12)
    assert torch.allclose(torch.func.vmap(f)(P), f(P), rtol=0, atol=1e-14)


def test_autocast_has_no_effect():
    p = P.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for f in (newton_schulz, lambda m: newton_schulz(m, dtype=torch.float32)):
            assert f(p).dtype == torch.float32
            assert relative(f(p), newton_schulz(P)) < 1e-5
        assert relative(quintic_sqrt(p), matrix_sqrt(P)) < 1e-6


@pytest.mark.parametrize(
    "call, subject",
    [
        (lambda: newton_schulz(torch.randn(2, 3)), "P"),
        (lambda: newton_schulz(torch.eye(2), 0), "steps"),
        (lambda: newton_schulz(torch.eye(2), dtype=torch.bfloat16), "dtype"),
        (lambda: mtp_sqrt(torch.eye(2), 0), "degree"),
        (lambda: mpa_sqrt(torch.eye(2), 2.5), "degree"),
        (lambda: isqrt_covariance(torch.randn(1, 2, 3), 0), "steps"),
    ],
)
def test_errors(call, subject):
    assert refused(call) == subject


def test_a_float64_matrix_is_iterated_in_float64():
    """``dtype=torch.float32`` is for float32 input; it does not take digits from a float64 matrix."""
    p = matrix(log_spectrum(6, 1e4) ** 2, batch=2)
    exact = newton_schulz(p)
    assert relative(newton_schulz(p, dtype=torch.float32), exact) < 1e-14
    in_float32 = relative(newton_schulz(p.float(), dtype=torch.float32), exact)
    assert 1e-9 < in_float32 < 1e-5


@pytest.mark.parametrize("degree", [2, 5, 8])
def test_pade_approximant_of_small_eigenvalues(degree):
    """At eigenvalue 0 the denominator has its smallest value, (2m+1)/4^m, which takes the most steps to invert."""
    values = torch.tensor([1.0, 1e-2, 1e-4, 0.0], dtype=F64)
    numerator, denominator = pade_coefficients(degree)
    z = 1 - values / values.norm()
    rational = [sum(c * z**k for k, c in enumerate(coefficients)) for coefficients in (numerator, denominator)]
    expected = values.norm().sqrt() * rational[0] / rational[1]
    actual = mpa_sqrt(torch.diag(values), degree=degree)
    assert torch.allclose(actual, torch.diag(expected), rtol=0, atol=1e-11)


def test_documented_defaults():
    assert torch.equal(newton_schulz(P), newton_schulz(P, steps=5, dtype=F64))
    assert torch.equal(mtp_sqrt(P), mtp_sqrt(P, degree=10))
    assert torch.equal(mpa_sqrt(P), mpa_sqrt(P, degree=5))
    x = torch.randn(1, 3, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(isqrt_covariance(x), isqrt_covariance(x, steps=5))
