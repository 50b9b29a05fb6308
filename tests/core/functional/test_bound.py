"""The bound on the gradient of sqrt_covariance on random input of every kind, and the published rules compared with it."""

import math
import random

import pytest
import torch
from spectral_cases import F64, features, generator, log_spectrum

from eigengrain.functional import GRADIENTS, sqrt_covariance


def draw(pick: random.Random, d: int, n: int) -> torch.Tensor:
    """Features (d, n): any rank, condition numbers to 1e16, scales from 1e-6 to 1e6, dead and constant channels."""
    seed, rank = pick.randrange(2**31), pick.randint(0, min(d, n - 1))
    kind = pick.choice(["logarithmic", "repeated", "clusters", "two scales", "gaussian"])
    if kind == "gaussian":
        x = torch.randn(d, n, dtype=F64, generator=generator(seed))
    else:
        kappa = 10 ** pick.uniform(0, 16)
        sigma = log_spectrum(rank, kappa)
        if kind == "repeated":
            sigma = torch.ones(rank, dtype=F64)
        elif kind == "clusters":
            sigma = 10 ** (sigma.log10() * 2).round().div(2)
        elif kind == "two scales":
            sigma = torch.where(torch.arange(rank) % 2 == 0, 1.0, kappa**-0.5).double().sort(descending=True)[0]
        x = features(d, n, sigma, seed)[0]
    for channel in range(d):
        if pick.random() < 0.1:
            x[channel] = pick.choice([0.0, 1.0, -3.7])
    if pick.random() < 0.3:
        x = x + pick.uniform(-10, 10)
    if pick.random() < 0.3:
        x = x.relu()
    return x * 10 ** pick.uniform(-6, 6)


def ratios_to_bound(x: torch.Tensor, pick: random.Random, seb: bool, solver: str) -> torch.Tensor:
    """Norm of the gradient of each sample for a random upstream gradient, divided by its bound."""
    d, n = x.shape[1:]
    x = x.clone().requires_grad_()
    a, values = sqrt_covariance(x, seb, solver=solver, return_eigenvalues=True)
    g = torch.randn(a.shape, dtype=F64, generator=generator(pick.randrange(2**31)))
    u = torch.linalg.eigh(a.detach())[1]
    for sample in range(0, len(x), 2):  # directions in which the bound is nearly reached: between two eigenvectors
        i, j = pick.randrange(d), pick.randrange(d)
        g[sample] = torch.outer(u[sample, :, i], u[sample, :, j])
        g[sample] += g[sample].mT.clone()
    (grad,) = torch.autograd.grad(a, x, g)
    assert a.isfinite().all()
    assert grad.isfinite().all()
    bound = math.sqrt(2 / n)
    if seb:
        s = (values * torch.exp(-2 * values)).sum(-1).sqrt()
        bound = (math.sqrt(2) * (1 + s) + values.sum(-1).sqrt()) / math.sqrt(n)
    return grad.norm(dim=(1, 2)) / g.norm(dim=(1, 2)) / bound


#: the smallest shapes, the largest ones, and 88 random ones
SHAPES = [(d, n) for d in (1, 2) for n in (1, 2, 3)] + [(24, 1), (24, 2), (24, 24), (24, 25), (1, 40), (24, 40)]


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    """2000 samples, 20 of each shape."""
    pick = random.Random(0)
    shapes = SHAPES + [(pick.randint(1, 24), pick.randint(1, 40)) for _ in range(88)]
    return [torch.stack([draw(pick, d, n) for _ in range(20)]) for d, n in shapes]


@pytest.mark.parametrize("solver", ["eigh", "gram", "svd"])
def test_the_gradient_is_bounded(solver, batches):
    for number, x in enumerate(batches):
        for seb in (False, True):
            assert (ratios_to_bound(x, random.Random(number), seb, solver) <= 1 + 1e-6).all(), (number, seb)


def test_the_bound_is_sharp():
    """Between an eigenvector and a null direction the ratio is 1: the constant cannot be improved."""
    x = features(4, 9, torch.tensor([1.0], dtype=F64), seed=0).requires_grad_()
    q = sqrt_covariance(x)
    u = torch.linalg.eigh(q.detach())[1]
    g = u[:, :, 3, None] * u[:, None, :, 0]
    (grad,) = torch.autograd.grad(q, x, g + g.mT)
    assert float(grad.norm() / (g + g.mT).norm()) / math.sqrt(2 / 9) == pytest.approx(1, rel=1e-9)


EXAMPLES = {
    "short rank": torch.randn(1, 12, 8, dtype=F64, generator=generator(3)),
    "condition number 1e15": features(12, 40, log_spectrum(12, 1e15), seed=3),
    "equal eigenvalues": features(8, 30, torch.ones(8, dtype=F64), seed=2),
    "tiny": torch.randn(1, 12, 8, dtype=F64, generator=generator(3)) * 1e-9,
}


def gradients(rule: str, x: torch.Tensor) -> torch.Tensor:
    y = x.expand(5, *x.shape[1:]).clone().requires_grad_()
    q = sqrt_covariance(y, gradient=rule)
    return torch.autograd.grad(q, y, torch.randn(q.shape, dtype=F64, generator=generator(0)))[0]


def test_published_rules_break_the_bound():
    """At equal eigenvalues they are NaN or exceed the bound, and elsewhere they lose gradient."""
    verdicts = {}
    for rule in GRADIENTS:
        for case, x in EXAMPLES.items():
            ours, exact = gradients(rule, x), gradients("exact", x)
            if not ours.isfinite().all():
                verdicts[rule, case] = "NaN"
            elif (ours.norm(dim=(1, 2)) > 1.05 * exact.norm(dim=(1, 2))).any():
                verdicts[rule, case] = "too large"
            elif (ours.norm(dim=(1, 2)) < 0.6 * exact.norm(dim=(1, 2))).any():
                verdicts[rule, case] = "lost"
    assert not any(rule == "exact" for rule, _ in verdicts)
    assert verdicts["original", "short rank"] == "NaN"
    assert verdicts["power-iteration", "equal eigenvalues"] == verdicts["topn", "equal eigenvalues"] == "too large"
    for rule in ("trunc", "taylor"):
        assert verdicts[rule, "equal eigenvalues"] == "lost"
    for rule in ("trunc", "taylor", "pade", "power-iteration"):
        assert verdicts[rule, "tiny"] == "lost"
    assert verdicts["lyapunov", "condition number 1e15"] == "lost"
