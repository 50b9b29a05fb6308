import mpmath
import pytest
import torch

from eigengrain.errors import SecondOrderError
from eigengrain.functional import exp_inverse, matrix_sqrt, scaling_factor
from eigengrain.functional.scaling_eigen_branch import qs_and_slope
from spectral_cases import F64, matrix, relative

P = matrix(torch.tensor([2.0, 0.9, 0.3, 0.01], dtype=F64), seed=6, batch=3)


def test_is_the_norm_of_the_paper():
    product = matrix_sqrt(P) @ exp_inverse(P).mT
    assert torch.allclose(scaling_factor(P), torch.linalg.matrix_norm(product), rtol=1e-13)
    assert torch.allclose(scaling_factor(P, "q"), torch.linalg.matrix_norm(matrix_sqrt(P)), rtol=1e-13)
    assert torch.allclose(scaling_factor(P, "s"), torch.linalg.matrix_norm(exp_inverse(P)), rtol=1e-13)
    assert torch.equal(scaling_factor(P, "constant", constant=7.0), torch.full((3,), 7.0, dtype=F64))
    assert torch.allclose(scaling_factor(P, solver="products"), scaling_factor(P), rtol=1e-13)


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


def test_where_it_is_no_number_neither_is_its_gradient():
    p = torch.stack([torch.eye(3, dtype=F64), 1e7 * torch.eye(3, dtype=F64)]).requires_grad_()
    s = scaling_factor(p, solver="products")  # the second trace is beyond what products serve
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
        assert torch.allclose(ours, scaling_factor(P, **options), rtol=1e-14)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: scaling_factor(P, "sq"), "unknown scaling factor 'sq': did you mean"),
        (lambda: scaling_factor(P, solver="product"), "unknown solver 'product': did you mean 'products'"),
        (
            lambda: scaling_factor(P, "s", solver="products"),
            "computes the factors 'qs' and 'q', got 's': use solver='eigh'",
        ),
        (lambda: scaling_factor(torch.randn(3)), "square matrices"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
