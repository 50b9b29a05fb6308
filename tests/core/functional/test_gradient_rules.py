"""Every published gradient rule against its own formula, written out with loops."""

import numpy as np
import pytest
import torch
from spectral_cases import F64, matrix, refused, relative

from eigengrain.functional import GRADIENTS, GradientRule, matrix_sqrt, newton_schulz, sqrt_covariance

VALUES = torch.tensor([2.0, 1.1, 1.0, 0.4, 0.05, 0.001], dtype=F64)
P = matrix(VALUES, seed=11)[0]
G = torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(4))
EPS = np.finfo(np.float64).eps


def ours(rule, p=P):
    p = p.clone().requires_grad_()
    return torch.autograd.grad(matrix_sqrt(p, gradient=rule), p, G[: len(p), : len(p)])[0]


def textbook(k, p=P, keep=None):
    """The usual derivation: ∂l/∂U and ∂l/∂Λ separately, combined with K_ij instead of 1/(λ_i − λ_j)."""
    lam, u = np.linalg.eigh(p.numpy())
    lam, u = np.maximum(lam[::-1], EPS), u[:, ::-1]
    g, d = G[: len(lam), : len(lam)].numpy(), len(lam)
    if keep is not None:
        lam[keep:] = EPS
    kt = np.zeros((d, d))
    for i in range(d):
        for j in range(d):
            if i != j:
                kt[j, i] = k(lam[i], lam[j])
    du = (g + g.T) @ u @ np.diag(lam**0.5)
    dlam = 0.5 * np.diag(np.diag(lam**-0.5) @ u.T @ g @ u)
    inner = kt * (u.T @ du) + np.diag(dlam)
    grad = u @ inner @ u.T
    return torch.from_numpy((grad + grad.T) / 2)


def taylor_k(degree):
    def k(a, b):
        hi, lo = max(a, b), min(a, b)
        return np.sign(a - b) / hi * sum((lo / hi) ** n for n in range(degree + 1))

    return k


@pytest.mark.parametrize(
    "rule, k",
    [
        (GradientRule("original"), lambda a, b: 1 / (a - b)),
        (GradientRule("trunc", threshold=5.0), lambda a, b: np.clip(1 / (a - b), -5, 5)),
        (GradientRule("taylor", degree=9), taylor_k(9)),
        (GradientRule("taylor", degree=0), taylor_k(0)),
        (GradientRule("pade"), lambda a, b: np.sign(a - b) / max(a, b) / (1 - min(a, b) / max(a, b))),
    ],
)
def test_against_the_formula(rule, k):
    assert relative(ours(rule), textbook(k)) < 1e-12


@pytest.mark.parametrize("keep", [1, 3, 6])
def test_topn_is_the_derivation_with_the_others_at_the_machine_epsilon(keep):
    def k(a, b):
        return 0.0 if a == b else 1 / (a - b)

    formula = textbook(k, keep=keep)
    assert relative(ours(GradientRule("topn", keep=keep)), formula) < 1e-12
    assert (formula.norm() > 1e6) == (keep < 6)
    if keep == 6:
        return
    p = P.clone().requires_grad_()
    root = matrix_sqrt(p, subset=f"top:{keep}", gradient="topn")
    assert relative(root, matrix_sqrt(P, subset=f"top:{keep}")) == 0
    assert relative(torch.autograd.grad(root, p, G)[0], formula) < 1e-12


def test_truncated_directions_dominate_the_gradient_of_topn():
    """Nearly all of the gradient to the features is in directions that the truncated root does not depend on."""
    x = torch.randn(6, 40, dtype=F64, generator=torch.Generator().manual_seed(5)) * VALUES[:, None].sqrt()
    released, exact = [], []
    for gradient, norms in (("topn", released), ("exact", exact)):
        features = x.clone().requires_grad_()
        centred = features - features.mean(1, keepdim=True)
        p = centred @ centred.T / 40
        (grad,) = torch.autograd.grad((G * matrix_sqrt(p, subset="top:4", gradient=gradient)).sum(), features)
        truncated = torch.linalg.eigh(p.detach())[1][:, :2]
        norms += [grad.norm(), (truncated.T @ grad).norm()]
    assert released[0] > 1e5 * exact[0]
    assert released[1] > 0.999 * released[0]


def test_topn_keeps_the_published_share_by_default():
    assert relative(ours("topn"), ours(GradientRule("topn", keep=round(6 * 206 / 256)))) == 0


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_power_iteration_is_the_derivative_of_power_iteration(steps):
    """Autograd through deflated power iterations that start at the converged eigenvectors."""
    p = P.clone().requires_grad_()
    starts = torch.linalg.eigh(P)[1].flip(-1)
    deflated, root = p, torch.zeros_like(P)
    for i in range(6):
        v = starts[:, i]
        for _ in range(steps):
            v = deflated @ v
            v = v / v.norm()
        value = v @ deflated @ v
        root = root + value.sqrt() * torch.outer(v, v)
        deflated = deflated - value * torch.outer(v, v)
    (grad,) = torch.autograd.grad(root, p, G)
    assert relative(ours(GradientRule("power-iteration", steps=steps)), (grad + grad.mT) / 2) < 1e-9


def test_power_iteration_at_short_rank():
    """One step from (4, 0): range and null direction are coupled by √4/4 alone, as the sum of no terms is 0."""
    p = torch.diag(torch.tensor([4.0, 0.0], dtype=F64)).requires_grad_()
    rule = GradientRule("power-iteration", steps=1)
    (grad,) = torch.autograd.grad(matrix_sqrt(p, gradient=rule), p, torch.ones(2, 2, dtype=F64))
    assert torch.allclose(grad, torch.tensor([[0.25, 0.5], [0.5, 0.5 * EPS**-0.5]], dtype=F64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps", [1, 5])
def test_newton_is_the_gradient_of_the_iteration_at_the_value_of_the_root(steps):
    rule = GradientRule("newton", steps_newton=steps)
    p = P.clone().requires_grad_()
    (grad,) = torch.autograd.grad(newton_schulz(p, steps), p, G)
    assert relative(ours(rule), grad) < 1e-13
    assert torch.equal(matrix_sqrt(P, gradient=rule), matrix_sqrt(P))


def test_lyapunov_is_eight_cubic_steps():
    norm = torch.linalg.matrix_norm(P).sqrt()
    eye = torch.eye(6, dtype=F64)
    b, c = matrix_sqrt(P) / norm, (G + G.mT) / 2 / norm
    for _ in range(8):
        b2 = b @ b
        b, c = 0.5 * b @ (3 * eye - b2), 0.5 * (c @ (3 * eye - b2) - b2 @ c + b @ c @ b)
    assert relative(ours("lyapunov"), c / 2) < 1e-12


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_lyapunov_scales(scale):
    assert relative(ours("lyapunov", P * scale) * scale**0.5, ours("lyapunov")) < 1e-12


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_value_is_exact_under_every_rule(name):
    assert relative(matrix_sqrt(P, gradient=name), matrix_sqrt(P)) < 1e-15


@pytest.mark.parametrize("name", [n for n in GRADIENTS if n not in ("topn", "newton", "lyapunov", "power-iteration")])
def test_accurate_if_eigenvalues_are_well_separated(name):
    apart = matrix(torch.tensor([1.0, 0.3, 0.09, 0.027], dtype=F64))[0]
    assert relative(ours(name, apart), ours("exact", apart)) < 1e-9


class TestWhereTheyBreak:
    def test_equal_eigenvalues(self):
        equal = 2 * torch.eye(4, dtype=F64)
        truth = (G[:4, :4] + G[:4, :4].mT) / 4 / 2**0.5
        assert relative(ours("exact", equal), truth) < 1e-15
        assert ours("original", equal).isnan().any()
        diagonal = torch.diag(truth.diagonal())
        for rule in ("trunc", "pade", "taylor"):  # finite, but the off-diagonal part is lost
            assert relative(ours(rule, equal), diagonal) < 1e-15

    def test_zero_eigenvalues(self):
        singular = torch.diag(torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=F64))
        assert ours("exact", singular).abs().max() < 10
        for rule in ("trunc", "taylor", "pade", "power-iteration"):
            assert ours(rule, singular).abs().max() > 1e6

    def test_samples_are_independent(self):
        """An infinite entry is replaced within its own sample."""
        equal = 2 * torch.eye(6, dtype=F64)
        pair = torch.stack([P, equal]).requires_grad_()
        (grad,) = torch.autograd.grad(matrix_sqrt(pair, gradient="pade"), pair, G.expand(2, 6, 6))
        assert torch.allclose(grad[0], ours("pade"), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "call, subject",
    [
        (lambda: GradientRule("pad"), "gradient rule"),
        (lambda: GradientRule("taylor", degree=-1), "degree"),
        (lambda: ours(GradientRule("topn", keep=7)), "keep"),
        (lambda: matrix_sqrt(P, gradient="topn", subset="last:2"), "subset"),
        (lambda: matrix_sqrt(P, gradient="newton", subset="top:2"), "subset"),
    ],
)
def test_errors(call, subject):
    assert refused(call) == subject


@pytest.mark.parametrize("rule", ["taylor", "newton", "topn"])
def test_a_published_rule_does_not_change_the_value_of_the_scaled_root(rule):
    x = torch.randn(2, 5, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sqrt_covariance(x, True, gradient=rule), sqrt_covariance(x, True), rtol=1e-12, atol=1e-12)
