"""Precision matrix and iSICE against NumPy, entry by entry, and their bounds."""

import numpy as np
import pytest
import torch
from spectral_cases import F64, features, generator, log_spectrum, matrix, refused, relative

from eigengrain.functional import covariance
from eigengrain.heads import create_head
from eigengrain.heads.inverse_covariance import InverseCovariance, sparse_inverse

D = 6
#: η and λ that move small matrices by a lot
STRONG = {"eta": 2.0, "penalty": 0.2}


def maps(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=generator(seed))


def naive(p, iterations, eta=5.0, penalty=0.01, ridge=0.01, floor=True):
    """The definition for one matrix, with the parts of every entry apart; ``floor=False`` has no safeguard."""
    d = len(p)
    c = p / np.trace(p) if np.trace(p) else p
    lowest = 1 / (1 + ridge + penalty * d) if floor else -np.inf
    inverse = np.linalg.inv(c + ridge * np.eye(d))
    for i in range(iterations):
        rate = eta * (1 - i / (iterations - 1)) if iterations > 1 else eta
        values, vectors = np.linalg.eigh(inverse)
        g = c - sum(np.outer(u, u) / max(v, lowest) for v, u in zip(values, vectors.T, strict=True))
        new = np.empty((d, d))
        for j in range(d):
            for k in range(d):
                positive, negative = max(inverse[j, k], 0.0), max(-inverse[j, k], 0.0)
                positive = max(positive - rate * (g[j, k] + penalty), 0.0)
                negative = max(negative - rate * (-g[j, k] + penalty), 0.0)
                new[j, k] = positive - negative
        inverse = (new + new.T) / 2
    return inverse / np.sqrt(max(np.trace(inverse), d * lowest))


CASES = {
    "generic": lambda: features(D, 24, log_spectrum(D, 30.0), batch=2),
    "repeated": lambda: features(D, 24, torch.tensor([2.0, 2, 2, 1, 1, 0.5], dtype=F64), batch=2),
    "equal": lambda: features(D, 24, torch.ones(D, dtype=F64), batch=2),
    "deficient": lambda: features(D, 4, log_spectrum(3, 4.0), batch=2),
    "dead": lambda: features(D, 24, log_spectrum(D, 30.0), batch=2) * torch.tensor([1.0, 1, 0, 1, 0, 1])[:, None],
    "ill-conditioned": lambda: features(D, 24, log_spectrum(D, 1e10), batch=2),
    "rank one": lambda: features(D, 24, torch.ones(1, dtype=F64), batch=2),
}
OPTIONS = [
    {"iterations": 0},
    {"iterations": 1, **STRONG},
    {"iterations": 2, "eta": 1.0, "penalty": 0.0, "ridge": 0.05},
    {"iterations": 5},
    {"iterations": 5, **STRONG},
    {"iterations": 4, **STRONG, "ridge": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("products", [False, True])
def test_matches_the_definition(case, options, products):
    x = CASES[case]()
    expected = np.stack([naive(np.cov(item, bias=True), **options) for item in x.numpy()])
    out = sparse_inverse(covariance(x), products=products, **options)
    assert relative(out, torch.tensor(expected)) < 1e-9
    head = InverseCovariance(D, **options)
    if products:
        head.use_products()
    rows, columns = np.triu_indices(D)
    torch.testing.assert_close(head(x.unsqueeze(-1)), torch.tensor(expected[:, rows, columns]), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", ["generic", "repeated", "deficient", "dead"])
def test_usual_matrices_never_reach_the_floor(case):
    for item in CASES[case]().numpy():
        p = np.cov(item, bias=True)
        np.testing.assert_allclose(naive(p, 5), naive(p, 5, floor=False), rtol=1e-9)


#: steps that are too long for covariances with one dominant eigenvalue: they make Λ indefinite
LONG = {"iterations": 4, "eta": 20.0, "penalty": 0.01}


def dominated(d=8):
    return matrix(torch.tensor([1.0] + [0.02] * (d - 1), dtype=F64), seed=3, batch=2)


def test_the_floor_where_a_step_makes_the_matrix_indefinite():
    p = dominated()
    expected = torch.tensor(np.stack([naive(item, **LONG) for item in p.numpy()]))
    assert (torch.linalg.eigvalsh(expected)[:, 0] < 0).all()
    for products in (False, True):
        assert relative(sparse_inverse(p, products=products, **LONG), expected) < 1e-9
    without = torch.tensor(np.stack([naive(item, **LONG, floor=False) for item in p.numpy()]))
    assert relative(without, expected) > 1e-3


def test_the_minimum_of_the_penalised_likelihood_is_a_fixed_point_above_the_floor():
    """Many small steps end at the graphical lasso, whose conditions of optimality are checked."""
    p = covariance(features(5, 40, log_spectrum(5, 20.0)))
    penalty, d = 0.05, 5
    c = p[0] / p[0].trace()
    out = sparse_inverse(p, iterations=4000, eta=0.5, penalty=penalty)[0]
    precision = out * out.trace()  # Q = Λ/√tr Λ has the trace √tr Λ
    g = c - torch.linalg.inv(precision)
    assert (g.abs() <= penalty + 1e-4).all()
    assert 0 < (precision == 0).sum() < d * d
    signed = torch.where(precision == 0, 0.0, g + penalty * precision.sign())
    assert signed.abs().max() < 1e-4
    assert torch.linalg.eigvalsh(precision)[0] > 1 / (1 + penalty * d)


def test_the_last_step_changes_nothing_and_one_step_has_the_full_length():
    p = covariance(maps(2, D, 30))
    assert torch.equal(sparse_inverse(p, 2, **STRONG), sparse_inverse(p, 1, **STRONG))
    assert relative(sparse_inverse(p, 3, **STRONG), sparse_inverse(p, 2, **STRONG)) > 1e-3
    assert torch.equal(sparse_inverse(p, 5, eta=0.0), sparse_inverse(p, 0))


@pytest.mark.parametrize("options", [{"iterations": 0}, {"iterations": 3, **STRONG}, {"iterations": 5}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case, options):
    x = CASES[case]()[:1].unsqueeze(-1)
    direction = maps(1, D * (D + 1) // 2, seed=9)
    head = InverseCovariance(D, **options)

    def function(z):
        return (head(z) * direction).sum()

    assert torch.autograd.gradcheck(function, x.requires_grad_(), atol=1e-6, rtol=1e-5)


def test_a_trace_that_is_not_positive():
    """Λ without a positive trace has no root of it: that of the smallest matrix above the floor takes its place."""
    p = matrix(torch.tensor([1.0, 0.1, 0.1], dtype=F64), seed=3, batch=2)
    options = {"iterations": 3, "eta": 100.0, "penalty": 0.01}
    expected = torch.tensor(np.stack([naive(item, **options) for item in p.numpy()]))
    assert (expected.diagonal(dim1=1, dim2=2).sum(1) < 0).all()
    for products in (False, True):
        assert relative(sparse_inverse(p, products=products, **options), expected) < 1e-9


def test_gradient_where_the_floor_is_active():
    direction = maps(2, 5, 5, seed=2)

    def function(p):
        return (sparse_inverse(p, **LONG) * direction).sum()

    p = dominated(5) + 0.01 * covariance(maps(2, 5, 20))
    for item in p.numpy():
        assert np.abs(naive(item, **LONG) - naive(item, **LONG, floor=False)).max() > 1e-3
    assert torch.autograd.gradcheck(function, p.requires_grad_(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("positions", [3, 8, 40])
@pytest.mark.parametrize("ridge", [1e-4, 0.01, 0.1])
def test_bound_of_the_gradient_of_the_precision_matrix(positions, ridge):
    """‖dQ‖ ≤ 3/(2ρ) ‖dX_c‖/‖X_c‖, for spectra about the ridge where it is nearly reached."""
    d, bound, largest = 8, 3 / (2 * ridge), 0.0
    for seed, kappa in enumerate(np.logspace(0, 12, 13)):
        x = features(d, positions, log_spectrum(min(d, positions - 1), kappa), seed)[0].requires_grad_()
        centred = x - x.mean(1, keepdim=True)
        jacobian = torch.autograd.functional.jacobian(lambda z: sparse_inverse(covariance(z[None]), 0, ridge=ridge), x)
        norm = torch.linalg.matrix_norm(jacobian.reshape(d * d, -1), 2) * centred.norm()
        largest = max(largest, float(norm.detach()) / bound)
    assert 0.05 < largest <= 1


@pytest.mark.parametrize("name", ["isice", "precision"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_finite_for_singular_maps(name, dtype):
    head = create_head(name, 12)
    ones = torch.ones(2, 12, 4, 4, dtype=dtype)
    dead = maps(2, 12, 4, 4).to(dtype)
    dead[:, ::2] = 3.0
    for x in (
        0 * ones,
        1e5 * ones,
        maps(2, 12, 1, 1).to(dtype),
        maps(2, 12, 2, 2).to(dtype),
        dead,
        (maps(2, 1, 4, 4) * ones).to(dtype),
    ):
        x = x.clone().requires_grad_()
        out = head(x)
        (out * maps(*out.shape, seed=1)).sum().backward()
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert x.grad.isfinite().all()


def test_a_constant_map_has_a_multiple_of_the_identity_and_no_gradient():
    x = torch.full((1, D, 3, 3), 7.0, dtype=F64, requires_grad=True)
    head = InverseCovariance(D, iterations=0, ridge=0.5)
    (head.matrix(x) * maps(D, D)).sum().backward()
    # Λ = I/ρ, with the trace d/ρ
    torch.testing.assert_close(head.matrix(x)[0], (1 / 0.5 / D) ** 0.5 * torch.eye(D, dtype=F64))
    assert not x.grad.any()


@pytest.mark.parametrize("name", ["isice", "precision"])
def test_the_vector_does_not_depend_on_the_scale(name):
    head, x = create_head(name, D), maps(2, D, 4, 5)
    expected = head(x)
    for factor in (1e-30, 1e-6, 1e6, 1e30):
        torch.testing.assert_close(head(factor * x), expected, rtol=1e-9, atol=1e-9)
    single = head(1e-12 * x.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_partial_correlations():
    """Of the precision matrix: the correlations of residuals after a regression on all other channels."""
    x = maps(1, 4, 200)
    x[:, 1] += 0.8 * x[:, 0]
    x[:, 2] += 0.5 * x[:, 1]
    q = sparse_inverse(covariance(x), 0, ridge=1e-12)[0]
    centred = (x - x.mean(-1, keepdim=True))[0].numpy()
    others = [2, 3]
    residuals = []
    for channel in (0, 1):
        weights = np.linalg.lstsq(centred[others].T, centred[channel], rcond=None)[0]
        residuals.append(centred[channel] - weights @ centred[others])
    expected = np.corrcoef(residuals)[0, 1]
    assert float(-q[0, 1] / (q[0, 0] * q[1, 1]).sqrt()) == pytest.approx(expected, abs=1e-9)


def test_precision_matrix_and_covariance_are_inverse():
    x = maps(3, D, 30)
    q = create_head("precision", D, ridge=1e-12).matrix(x)
    product = q @ covariance(x)
    scale = product.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    torch.testing.assert_close(product / scale, torch.eye(D, dtype=F64).expand(3, D, D), rtol=0, atol=1e-9)


def test_summaries_and_declarations():
    head, precision = create_head("isice", D), create_head("precision", D)
    assert (head.iterations, precision.iterations) == (5, 0)
    assert head.summary != precision.summary
    assert head.rank_sensitive
    assert head.quadratic
    assert not list(head.parameters())


@pytest.mark.parametrize(
    "options, subject",
    [
        ({"iterations": -1}, "iterations"),
        ({"iterations": 2.0}, "iterations"),
        ({"eta": -1.0}, "eta"),
        ({"eta": float("nan")}, "eta"),
        ({"penalty": -0.1}, "penalty"),
        ({"ridge": 0.0}, "ridge"),
        ({"ridge": float("inf")}, "ridge"),
        ({"lam": 0.1}, "option of head 'isice'"),
    ],
)
def test_errors(options, subject):
    assert refused(lambda: create_head("isice", 4, **options)) == subject
