import mpmath
import pytest
import torch
from spectral_cases import F64, features, generator, matrix, refused, relative

from eigengrain.errors import SecondOrderError
from eigengrain.functional import exp_inverse, matrix_sqrt, scaling_factor, sqrt_covariance
from eigengrain.functional.scaling_eigen_branch import qs_and_slope

P = matrix(torch.tensor([2.0, 0.9, 0.3, 0.01], dtype=F64), seed=6, batch=3)


def test_is_the_norm_of_the_paper():
    product = matrix_sqrt(P) @ exp_inverse(P).mT
    assert torch.allclose(scaling_factor(P), torch.linalg.matrix_norm(product), rtol=1e-13, atol=0)
    assert torch.allclose(scaling_factor(P, "q"), torch.linalg.matrix_norm(matrix_sqrt(P)), rtol=1e-13, atol=0)
    assert torch.allclose(scaling_factor(P, "s"), torch.linalg.matrix_norm(exp_inverse(P)), rtol=1e-13, atol=0)
    assert torch.equal(scaling_factor(P, "constant", constant=7.0), torch.full((3,), 7.0, dtype=F64))
    assert torch.allclose(scaling_factor(P, solver="products"), scaling_factor(P), rtol=1e-13, atol=0)


@pytest.mark.parametrize("options", [{}, {"kind": "q"}, {"kind": "s"}, {"solver": "products"}])
def test_gradcheck(options):
    for p in (P, 2 * torch.eye(3, dtype=F64)[None]):
        assert torch.autograd.gradcheck(lambda m: scaling_factor(m, **options), p.clone().requires_grad_())


@pytest.mark.parametrize("solver", ["eigh", "products"])
def test_gradient_is_the_closed_form(solver):
    p = P.clone().requires_grad_()
    (grad,) = torch.autograd.grad(scaling_factor(p, solver=solver).sum(), p)
    eye = torch.eye(4, dtype=F64)
    decay = exp_inverse(2 * P)
    assert relative(grad, (eye - 2 * P) @ decay / (2 * scaling_factor(P)[:, None, None])) < 1e-12


def test_no_underflow_where_the_exponential_is_zero():
    """e^−2λ is 0 in float64 beyond 373; the norm is not."""
    for spectrum in ([400.0, 390.0], [700.0, 500.0, 380.0], [300.0, 1e-3, 1e-9], [0.0, 400.0]):
        s, slope = qs_and_slope(torch.tensor(spectrum, dtype=F64))
        exact = [mpmath.mpf(x) for x in spectrum]
        norm = mpmath.sqrt(sum(x * mpmath.exp(-2 * x) for x in exact))
        assert float(s) == pytest.approx(float(norm), rel=1e-12)
        for x, ours in zip(exact, slope.tolist(), strict=True):
            expected = (1 - 2 * x) * mpmath.sqrt(x) * mpmath.exp(-2 * x) / norm
            assert ours == pytest.approx(float(expected), rel=1e-11)


def test_slope_is_bounded_and_finite_everywhere():
    for largest in (1e-300, 1e-6, 1.0, 372.0, 690.0, 708.0, 720.0, 745.0, 1e4, 1e300):
        s, slope = qs_and_slope(torch.tensor([largest, largest / 2, 0.0], dtype=F64))
        assert s.isfinite()
        assert slope.norm() <= 1 + 1e-12


@pytest.mark.parametrize("solver", ["eigh", "products"])
@pytest.mark.parametrize("value", [0.0, 1e4])
def test_where_it_is_zero_so_is_its_gradient(solver, value):
    p = (value * torch.eye(3, dtype=F64))[None].requires_grad_()
    s = scaling_factor(p, solver=solver)
    (grad,) = torch.autograd.grad(s.sum(), p)
    assert float(s.detach()) == 0
    assert grad.abs().max() == 0


def test_nan_input_gives_a_nan_gradient():
    p = torch.stack([torch.eye(3, dtype=F64), torch.full((3, 3), float("nan"), dtype=F64)]).requires_grad_()
    s = scaling_factor(p, solver="products")
    (grad,) = torch.autograd.grad(s.sum(), p)
    assert s.isnan().tolist() == [False, True]
    assert grad[0].isfinite().all()
    assert grad[1].isnan().all()


def test_second_order_raises():
    p = P.clone().requires_grad_()
    for options in ({}, {"solver": "products"}):
        (grad,) = torch.autograd.grad(scaling_factor(p, **options).square().sum(), p, create_graph=True)
        with pytest.raises(SecondOrderError):
            grad.sum().backward()


def test_vmap():
    for options in ({}, {"kind": "q"}, {"kind": "s"}, {"solver": "products"}):
        ours = torch.func.vmap(lambda m: scaling_factor(m, **options))(P)  # noqa: B023
        assert torch.allclose(ours, scaling_factor(P, **options), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "call, subject",
    [
        (lambda: scaling_factor(P, "sq"), "scaling factor"),
        (lambda: scaling_factor(P, solver="product"), "solver"),
        (lambda: scaling_factor(P, "s", solver="products"), "solver"),
        (lambda: scaling_factor(torch.randn(3)), "P"),
    ],
)
def test_errors(call, subject):
    assert refused(call) == subject


def singular_features(kind, channels, positions, scale, seed):
    """Features whose covariance is singular up to rounding: copies, a sum of channels, dead channels, few positions."""
    x = torch.randn(1, channels, positions, dtype=F64, generator=generator(seed)) * scale
    if kind == "copies":
        x[:, channels // 2 : 2 * (channels // 2)] = x[:, : channels // 2]
    elif kind == "sum":
        x[:, -1] = x[:, :-1].sum(1)
    elif kind == "dead":
        x[:, ::3] = 0
    return x


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 120.0])
@pytest.mark.parametrize("kind", ["copies", "sum", "dead", "few"])
@pytest.mark.parametrize("channels", [8, 31])
def test_products_keep_the_bound_for_singular_covariances(channels, kind, scale):
    """s is 0 for large features without small eigenvalues; a rounding residue must not become its slope."""
    positions = channels - 2 if kind == "few" else 3 * channels
    for seed in range(4):
        x = singular_features(kind, channels, positions, scale, seed)
        grad = torch.randn(1, channels, channels, dtype=F64, generator=generator(seed + 100))
        results = {}
        for solver in ("products", "eigh"):
            features = x.clone().requires_grad_()
            a = sqrt_covariance(features, True, solver=solver)
            results[solver] = a.detach(), torch.autograd.grad(a, features, grad)[0]
        q = sqrt_covariance(x, solver="eigh")
        s = results["eigh"][0].norm() / q.norm() - 1
        bound = (2**0.5 * (1 + s) + q.norm()) / positions**0.5 * grad.norm()
        assert results["products"][1].norm() <= bound * (1 + 1e-9)
        assert relative(results["products"][0], results["eigh"][0]) < 1e-5
        assert relative(results["products"][1], results["eigh"][1]) < 1e-3


@pytest.mark.parametrize("kind, value", [("qs", 0.0), ("q", 0.0), ("s", 5**0.5), ("constant", 100.0)])
def test_factors_of_a_zero_covariance(kind, value):
    p = torch.zeros(2, 5, 5, dtype=F64, requires_grad=True)
    factor = scaling_factor(p, kind)
    assert factor.tolist() == pytest.approx([value] * 2, rel=1e-15)
    if value == 0:
        assert torch.autograd.grad(factor.sum(), p)[0].abs().max() == 0


@pytest.mark.parametrize("largest", [1e5, 1e7, 1e8, 1e14, 1e20, 1e60])
def test_products_for_large_features(largest):
    """s is that of small eigenvalues next to large ones, and 0 where the rounding of P is larger than them."""
    sigma = torch.tensor([largest, largest / 3, 0.7, 0.1], dtype=F64).sqrt()
    x = features(6, 12, sigma, seed=1).requires_grad_()
    q = sqrt_covariance(x.detach(), solver="svd")
    for grad in (torch.randn(1, 6, 6, dtype=F64, generator=generator(1)), q / q.norm()):
        results = [sqrt_covariance(x, True, solver=solver) for solver in ("products", "svd")]
        (a, expected), (da, dx) = results, [torch.autograd.grad(r, x, grad)[0] for r in results]
        s = expected.norm() / q.norm() - 1
        assert da.norm() <= (2**0.5 * (1 + s) + q.norm()) / 12**0.5 * grad.norm()
        if largest <= 1e8:
            assert s > 0.1
            assert relative(a, expected) < 1e-14 * largest
            assert relative(da, dx) < 1e-3
        else:
            assert a.isfinite().all()


@pytest.mark.parametrize("solver", ["eigh", "products"])
def test_the_factor_may_be_changed_in_place(solver):
    p = P.clone().requires_grad_()
    factor = scaling_factor(p, solver=solver)
    expected = torch.autograd.grad(3 * scaling_factor(p, solver=solver).sum(), p)[0]
    assert torch.equal(torch.autograd.grad(factor.mul_(3).sum(), p)[0], expected)
