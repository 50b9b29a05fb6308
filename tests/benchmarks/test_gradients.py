"""The tour of gradients: its reference is right, its numbers are those of the rules, its files say what was measured."""

import base64
import csv
import math

import numpy as np
import pandas as pd
import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.gradients import Factors, GradientsBench, equal_eigenvalues, with_spectrum

from benchmarks import gradients
from eigengrain.errors import ArgumentError
from eigengrain.functional import GRADIENTS, covariance, sqrt_covariance
from eigengrain.pages import Cell

TINY = GradientsBench(channels=8, positions=20, samples=3)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def symmetric(*shape: int) -> torch.Tensor:
    g = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (g + g.mT) / 2


# --- features with a known spectrum ------------------------------------------------------------------------------


def test_features_have_the_given_spectrum():
    sigma = torch.tensor([2.0, 1.0, 0.5, 0.01, 0.0], dtype=torch.float64)
    x = with_spectrum(sigma, 11, 3, generator()).features.numpy()
    for sample in x:
        np.testing.assert_allclose(
            np.linalg.eigvalsh(np.cov(sample, bias=True))[::-1], sigma.numpy() ** 2, rtol=0, atol=1e-14
        )
        np.testing.assert_allclose(sample.mean(1), 0, rtol=0, atol=1e-14)


def test_a_rank_that_the_positions_cannot_have_is_refused():
    with pytest.raises(ValueError):
        with_spectrum(torch.ones(5), 4, 1, generator())
    with pytest.raises(ValueError):
        equal_eigenvalues(5, 10, 1, generator())


def test_equal_eigenvalues_are_equal_to_the_last_bit():
    p = covariance(equal_eigenvalues(6, 17, 4, generator()).features)
    diagonal = p.diagonal(dim1=1, dim2=2)
    assert torch.equal(p, torch.diag_embed(diagonal))
    assert bool((diagonal == diagonal[0, 0]).all())
    assert float(diagonal[0, 0]) == pytest.approx(1, abs=1e-15)


def root_by_numpy(x: np.ndarray) -> np.ndarray:
    u, sigma, _ = np.linalg.svd((x - x.mean(1, keepdims=True)) / math.sqrt(x.shape[1]), full_matrices=False)
    return (u * sigma) @ u.T


@pytest.mark.parametrize("case", ["full rank", "short rank", "equal"])
def test_the_closed_form_is_the_derivative_of_the_root(case):
    d = 5
    factors: Factors = {
        "full rank": lambda: with_spectrum(torch.tensor([1.0, 0.7, 0.5, 0.3, 0.2]), 12, 1, generator()),
        "short rank": lambda: with_spectrum(torch.tensor([1.0, 0.7, 0.5, 0.0, 0.0]), 4, 1, generator()),
        "equal": lambda: equal_eigenvalues(d, 12, 1, generator()),
    }[case]()
    g = symmetric(1, d, d)
    gradient, x = factors.root_gradient(g)[0].numpy(), factors.features[0].numpy()
    random = np.random.default_rng(0)
    for _ in range(5):
        direction = random.standard_normal(x.shape)
        step = 1e-6
        rise = np.sum(g[0].numpy() * (root_by_numpy(x + step * direction) - root_by_numpy(x - step * direction)))
        assert np.sum(gradient * direction) == pytest.approx(rise / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("power", "tolerance"), [(2, 1e-13), (8, 1e-11), (16, 1e-7)])
def test_the_closed_form_agrees_with_the_gradient_by_svd(power, tolerance):
    factors = with_spectrum(torch.logspace(0, -power / 2, 12, dtype=torch.float64), 40, 4, generator())
    g = symmetric(4, 12, 12)
    x = factors.features.requires_grad_()
    (outcome,) = torch.autograd.grad(sqrt_covariance(x, solver="svd"), x, g)
    expected = factors.root_gradient(g)
    assert float((outcome - expected).norm() / expected.norm()) < tolerance


# --- the tour ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return gradients.measure_rules(TINY)


def test_every_rule_meets_every_case(rows):
    outcome = [(r["rule"], r["case"], r["loss"]) for r in rows]
    assert len(outcome) == len(set(outcome)) == (len(GRADIENTS) + 1) * 10 * 2
    assert {r["rule"] for r in rows} == {"exact, svd", *GRADIENTS}
    assert [r["case"] for r in rows[:: 2 * (len(GRADIENTS) + 1)]] == [
        *("1e2", "1e4", "1e6", "1e8", "1e10", "1e12", "1e14", "1e16"),
        *("N<d", "P=cI"),
    ]
    assert all(r["positions"] - 1 < r["channels"] for r in rows if r["case"] == "N<d")


def test_the_exact_gradient_keeps_its_bound_everywhere(rows):
    for r in rows:
        if r["rule"].startswith("exact"):
            assert r["not_finite"] == 0
            assert r["bound_ratio_worst"] <= 1 + 1e-9, r
        if r["rule"] == "exact, svd" and r["loss"] == "generic":
            assert r["error_worst"] < 1e-7, r


def test_the_rules_fail_where_their_formulas_predict(rows):
    errors, ratios = gradients.summary(rows)
    shown = {rule: {case: (errors.loc[rule, case], ratios.loc[rule, case]) for case in errors} for rule in errors.index}
    assert math.isinf(shown["original"]["P=cI"][0])  # 0/0 off the diagonal
    assert math.isinf(shown["original"]["P=cI"][1])
    assert shown["original"]["1e4"][0] < 1e-10  # right while eigenvalues are apart
    assert shown["exact"]["P=cI"][0] < 1e-14
    assert shown["taylor"]["P=cI"][0] > 0.5  # only the diagonal is left
    assert shown["topn"]["1e2"][0] > 0.05  # the dropped ones are missing at any condition
    assert shown["newton"]["1e8"][0] > 0.1  # 5 steps do not converge


def test_a_case_is_compared_by_the_formulas_of_the_report():
    factors = with_spectrum(torch.logspace(0, -2, 8, dtype=torch.float64), 20, 3, generator())
    g = symmetric(3, 8, 8)
    outcome = gradients.compare(factors, g, {"gradient": "newton"})
    x = factors.features.requires_grad_()
    (gradient,) = torch.autograd.grad(sqrt_covariance(x, gradient="newton"), x, g)
    exact, errors, ratios = factors.root_gradient(g), [], []
    for i in range(3):
        errors.append(np.linalg.norm(gradient[i] - exact[i]) / np.linalg.norm(exact[i]))
        ratios.append(np.linalg.norm(gradient[i]) / (math.sqrt(2 / 20) * np.linalg.norm(g[i])))
    assert outcome["error_median"] == pytest.approx(np.median(errors))
    assert outcome["error_worst"] == pytest.approx(max(errors))
    assert outcome["bound_ratio_median"] == pytest.approx(np.median(ratios))
    assert outcome["bound_ratio_worst"] == pytest.approx(max(ratios))
    assert outcome["not_finite"] == 0


def test_one_loss_sees_the_smallest_eigenvalues_alone():
    factors = with_spectrum(torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.0, 0.0]), 8, 2, generator())
    loss = gradients.losses(factors, generator())["smallest"]
    inside = factors.u.mT @ loss @ factors.u  # one of nine directions, the last that is not null
    expected = torch.zeros_like(inside)
    expected[:, 6, 6] = inside[:, 6, 6]
    torch.testing.assert_close(inside, expected)
    assert float(inside[:, 6, 6].abs().min()) > 1e-3


def test_tables_mark_what_leaves_the_bound():
    rules = ["exact", "bad", "worse"]
    frames = (pd.DataFrame({"1e2": v}, index=rules) for v in ([1e-15, math.inf, 0.5], [1 + 1e-12, 1.5, math.inf]))
    errors, ratios = gradients.tables(*frames)
    assert [row[1] for row in errors.rows] == [Cell("1e-15"), Cell("NaN", True), Cell("0.50")]
    assert [row[1] for row in ratios.rows] == [Cell("1.00"), Cell("1.50", True), Cell("NaN", True)]


def test_the_command_writes_its_files(tmp_path, capsys):
    out = tmp_path / "tour"
    sizes = ["--channels", "8", "--positions", "20", "--samples", "2"]
    assert main(["gradients", *sizes, "--out", str(out)]) == 0
    assert {p.name for p in out.iterdir()} == {"gradients.csv", "gradients.png", "report.html"}

    with (out / "gradients.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == (len(GRADIENTS) + 1) * 10 * 2
    assert table[0]["torch"] == torch.__version__

    png = (out / "gradients.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert base64.b64encode(png).decode() in page
    assert "http" not in page  # nothing is loaded from elsewhere
    assert all(f'<th scope="row">{rule}</th>' in page for rule in gradients.RULES)
    assert 'class="bad">NaN' in page

    assert str(out / "report.html") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"channels": 4}, "channels"), ({"channels": 64, "positions": 128}, "positions"), ({"samples": 0}, "samples")],
)
def test_invalid_sizes_are_refused(options, argument):
    with pytest.raises(ArgumentError) as error:
        GradientsBench(**options)
    assert error.value.argument == argument
