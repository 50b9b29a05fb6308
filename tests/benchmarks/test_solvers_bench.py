"""The benchmark of solvers: the reference is right, errors and times are what was put in, both files are complete."""

import csv
import math
import subprocess
import sys
import time
from itertools import product

import numpy as np
import pytest
import torch
from benchmarks.config import SolversBench
from rich.console import Console

import eigengrain
from benchmarks import accuracy, solvers
from eigengrain import functional as F
from eigengrain.cli import main as cli
from eigengrain.functional._cuda import cusolver

CPU = torch.device("cpu")
TINY = {"batch": 2, "channels": 8, "at_channels": 6, "positions": [20, 4], "samples": 2, "repeats": 1, "device": "cpu"}


def text_of(table):
    console = Console(width=80, record=True)
    console.print(table)
    return console.export_text()


# --- the reference -----------------------------------------------------------------------------------------------


def scaled_root(x: np.ndarray, seb: bool) -> np.ndarray:
    """Q, or (1 + ‖QSᵀ‖) Q, from the definitions of Q and S = e^{−P}; by the SVD, which leaves null directions null."""
    vectors, few, _ = np.linalg.svd((x - x.mean(1, keepdims=True)) / math.sqrt(x.shape[1]))
    sigma = np.zeros(len(x))
    sigma[: len(few)] = few
    q, s = ((vectors * f) @ vectors.T for f in (sigma, np.exp(-(sigma**2))))
    return (1 + np.linalg.norm(q @ s.T)) * q if seb else q


@pytest.mark.parametrize("seb", [True, False])
@pytest.mark.parametrize(("channels", "positions"), [(5, 12), (5, 4), (4, 5), (5, 5)])
def test_the_reference_agrees_with_differences(channels, positions, seb):
    """Also where P is singular: its rank cannot rise, so that the root is smooth there."""
    generator = torch.Generator().manual_seed(1)
    factors = accuracy.known_features(30.0, channels, positions, 2, generator)
    g = torch.randn(2, channels, channels, generator=generator, dtype=torch.float64)
    g = (g + g.mT) / 2
    exact = accuracy.reference(factors, g, seb)
    step = 1e-4
    for sample in range(2):
        x = factors.features[sample].numpy()
        np.testing.assert_allclose(exact.output[sample], scaled_root(x, seb), atol=1e-13)
        for i, j in np.ndindex(x.shape):
            h = np.zeros_like(x)
            h[i, j] = step
            ahead, behind = (scaled_root(x + t * h, seb) for t in (1, -1))
            slope = (g[sample].numpy() * (ahead - behind)).sum() / (2 * step)
            assert exact.gradient[sample, i, j] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(("channels", "positions", "rank"), [(6, 30, 6), (6, 4, 3), (6, 6, 5)])
def test_the_features_have_the_condition_number_that_was_asked_for(channels, positions, rank):
    x = accuracy.known_features(1e6, channels, positions, 1, torch.Generator().manual_seed(0)).features
    singular = np.linalg.svd((x[0] - x[0].mean(-1, keepdim=True)).numpy() / math.sqrt(positions), compute_uv=False)
    assert singular[0] == pytest.approx(1, rel=1e-12)
    assert singular[rank - 1] == pytest.approx(1e-3, rel=1e-10)
    assert (singular[rank:] < 1e-14).all()


# --- errors ------------------------------------------------------------------------------------------------------


def measured(**options) -> dict[tuple[str, str], dict]:
    defaults = {"samples": 3, "svd_batch": 2, "device": CPU}
    rows = accuracy.measure(1e10, **{"channels": 24, "positions": 60} | defaults | options)
    return {(row["solver"], row["dtype"]): row for row in rows}


def test_every_converged_route_meets_its_bounds_and_the_iterations_do_not():
    rows = measured()
    exact = {(solver, "float64") for solver in F.SOLVERS if solver != "gram"} | {("auto", "float32"), ("svd", "float32")}
    peers = {("newton_schulz", "float64"), ("mpa_sqrt", "float64"), ("mtp_sqrt", "float64")}
    assert set(rows) == exact | peers
    assert {key for key, row in rows.items() if row["meets"] == "yes"} == exact
    for key in peers:
        assert rows[key]["note"].endswith("not a converged root")
        assert rows[key]["output"] == "Q"
        assert rows[key]["forward_error"] > 0.01
    # not all alike: each is measured in its own precision, and not against itself
    assert rows["svd", "float32"]["forward_error"] > 1e-8
    assert rows["svd", "float64"]["gradient_error"] < 1e-10 < rows["eigh", "float64"]["gradient_error"] < 1e-6
    assert rows["auto", "float32"]["taken"] == "svd"
    assert rows["auto", "float64"]["taken"] == "eigh"


def test_the_gram_matrix_comes_where_it_is_smaller():
    rows = measured(positions=12)
    assert rows["gram", "float64"]["meets"] == "yes"
    assert rows["auto", "float64"]["taken"] == "gram"
    assert rows["gram", "float64"]["rank"] == 11


def test_errors_are_those_of_the_layer(monkeypatch):
    def off(x):  # by 1 % forward, and by 50 % in the gradient
        root = F.sqrt_covariance(x, seb=True, solver="svd")
        return 1.01 * root.detach() + 1.5 * (root - root.detach())

    def one_bad_sample(x):
        root = F.sqrt_covariance(x, seb=True, solver="svd")
        return torch.cat([root[:-1], root[-1:] * torch.nan])

    routes = (
        accuracy.Route("off", "float32", off),
        accuracy.Route("bad", "float64", one_bad_sample),
        accuracy.Route("not so bad", "float64", lambda x: F.sqrt_covariance(x, solver="svd"), seb=False),
        accuracy.Route("without SEB", "float64", lambda x: F.sqrt_covariance(x, solver="svd")),
    )
    monkeypatch.setattr(accuracy, "ROUTES", routes)
    rows = {name: row for (name, _), row in measured().items()}
    assert rows["off"]["forward_error"] == pytest.approx(0.01, rel=1e-2)
    assert rows["off"]["gradient_error"] == pytest.approx(0.5, rel=1e-2)
    assert (rows["bad"]["forward_error"], rows["bad"]["gradient_error"]) == (math.inf, math.inf)
    assert rows["without SEB"]["forward_error"] > 0.1
    assert [row["meets"] for row in rows.values()] == ["no", "no", "yes", "no"]


@pytest.mark.parametrize(("forward", "gradient", "meets"), [(0.9, 0.9, "yes"), (1.1, 0.9, "no"), (0.9, 1.1, "no")])
def test_both_bounds_must_be_met(monkeypatch, forward, gradient, meets):
    monkeypatch.setattr(accuracy, "errors", lambda route, *rest: tuple(
        factor * bound for factor, bound in zip((forward, gradient), accuracy.BOUNDS[route.dtype], strict=True)
    ))  # fmt: skip
    assert {row["meets"] for row in measured().values()} == {meets}


def test_ways_by_the_svd_get_a_batch_of_their_own(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        accuracy, "errors", lambda route, factors, grad, device: asked.update({route: len(factors.u)}) or (0.0, 0.0)
    )
    for samples, svd_batch in ((5, 2), (1, 4)):
        rows = measured(samples=samples, svd_batch=svd_batch)
        sizes = {(route.solver, route.dtype): size for route, size in asked.items()}
        by_svd = {("svd", "float64"), ("svd", "float32"), ("auto", "float32")}
        assert sizes == {key: svd_batch if key in by_svd else samples for key in sizes}
        assert {key: row["samples"] for key, row in rows.items()} == sizes


# --- eigensolvers ------------------------------------------------------------------------------------------------


def test_backends_that_a_device_has(monkeypatch):
    cuda = torch.device("cuda")
    assert solvers.backends_on(CPU) == ["torch"]
    monkeypatch.setattr(cusolver, "available", lambda: True)
    assert solvers.backends_on(CPU) == ["torch"]
    assert solvers.backends_on(cuda) == ["torch", "cusolver-batched", "cpu"]
    monkeypatch.setattr(cusolver, "available", lambda: False)
    assert solvers.backends_on(cuda) == ["torch", "cpu"]
    assert list(solvers.eigensolvers_on(CPU)) == [solvers.REFERENCE, "torch"]


def test_eigensolvers_are_timed_in_turn_in_the_precision_of_the_matrices(monkeypatch):
    order = []

    def waits(p):
        order.append(("waits", p.dtype, tuple(p.shape)))
        time.sleep(0.05)
        return torch.linalg.eigh(p)

    def wrong(p):
        order.append(("wrong", p.dtype, tuple(p.shape)))
        values, vectors = torch.linalg.eigh(p)
        return 2 * values, vectors

    monkeypatch.setattr(solvers, "eigensolvers_on", lambda device: {solvers.REFERENCE: wrong, "torch": waits})
    quick, slow = solvers.measure(3, 8, repeats=3, warmup=1, device=CPU, dtype=torch.float32)
    assert order[:8] == [(name, torch.float32, (3, 8, 8)) for name in ("wrong", "waits")] * 4
    assert slow["ms"] >= 50 > quick["ms"]
    assert slow[f"ratio_to_{solvers.REFERENCE}"] == pytest.approx(slow["ms"] / quick["ms"], rel=1e-2)
    assert quick[f"ratio_to_{solvers.REFERENCE}"] == 1
    assert quick["residual"] == pytest.approx(1, rel=1e-5)
    assert 1e-10 < slow["residual"] < 1e-5
    assert (quick["of_auto"], slow["of_auto"]) == ("no", "yes")


def test_without_memory_there_is_no_time(monkeypatch):
    def greedy(p):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(solvers, "eigensolvers_on", lambda device: {solvers.REFERENCE: greedy, "torch": torch.linalg.eigh})
    none, some = solvers.measure(1, 4, repeats=1, warmup=0, device=CPU, dtype=torch.float64)
    assert (none["ms"], none["residual"]) == (None, None)
    assert some["ms"] > 0
    assert some[f"ratio_to_{solvers.REFERENCE}"] is None
    assert "–" in text_of(solvers.table([none, some]))


def test_covariances_have_full_rank(monkeypatch):
    monkeypatch.setattr(solvers, "POSITIONS", 9)
    p = solvers.random_covariances(2, 20, CPU, torch.float64, seed=0)
    assert p.shape == (2, 20, 20)
    assert float(torch.linalg.eigvalsh(p).min()) > 1e-6


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_both_files(tmp_path, capsys):
    argv = ["--batch", "2", "--channels", "[4,8]", "--at_channels", "6", "--positions", "[20,4]", "--samples", "2"]
    argv += ["--condition", "[1e4,1e10]", "--repeats", "1", "--device", "cpu"]
    assert cli.main(["bench", "solvers", *argv, "--out", str(tmp_path / "made"), "--label", "here"]) == 0
    files = {path.name: list(csv.DictReader(path.open(newline=""))) for path in (tmp_path / "made").iterdir()}
    assert set(files) == {"eigensolvers-here.csv", "accuracy-here.csv"}
    times, errors = files["eigensolvers-here.csv"], files["accuracy-here.csv"]
    columns = ("channels", "dtype", "matrices", "eigensolver")
    cases = product("48", ("float32", "float64"), ("covariance", "symmetric"), ("torch.linalg.eigh", "torch"))
    assert [tuple(row[name] for name in columns) for row in times] == list(cases)
    known = [(float(row["condition"]), int(row["positions"])) for row in errors]
    assert list(dict.fromkeys(known)) == [(1e4, 20), (1e4, 4), (1e10, 20), (1e10, 4)]
    assert len(errors) == 4 * len(accuracy.ROUTES) - 2  # no Gram matrix at 20 positions
    for row in (*times, *errors):
        assert (row["eigengrain"], row["torch"]) == (eigengrain.__version__, torch.__version__)
    shown = capsys.readouterr().out
    assert "auto (eigh)" in shown
    assert "1e10, 6 × 20" in shown


def test_tables_fit_a_terminal():
    large = {"channels": 1024, "positions": 1089, "taken": "products"}
    table = text_of(accuracy.table([row | large for row in measured(channels=4, positions=9).values()]))
    assert "…" not in table
    line = next(line for line in table.splitlines() if "newton_schulz" in line)
    assert line.split()[1] == "float64"
    assert line.split()[-1] == "no"
    assert "5e-6 and 1e-3 in float32" in " ".join(table.split())


def test_it_runs_from_python_without_the_command_line(tmp_path):
    code = f"""
import sys

from benchmarks.config import SolversBench
from benchmarks.solvers import run
run(SolversBench(**{TINY!r}, out={str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accuracy-cpu.csv", "eigensolvers-cpu.csv"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"condition": 0.5}, "--condition needs numbers of at least 1, got 0.5"),
        ({"condition": [1e4, math.nan]}, "--condition needs numbers"),
        ({"condition": []}, "--condition needs numbers"),
        ({"dtypes": []}, "--dtypes needs a name"),
        ({"samples": 0}, "--samples needs whole numbers"),
        ({"svd_batch": 0}, "--svd_batch needs whole numbers"),
        ({"at_channels": 1}, "needs two eigenvalues"),
        ({"positions": [20, 2]}, "needs two eigenvalues"),
        ({"label": "a/b"}, "choose the folder with --out"),
        ({"repeats": 0}, "--repeats must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SolversBench(**options)


def test_a_device_without_float64_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(solvers, "pick_device", lambda name: torch.device("mps"))
    with pytest.raises(ValueError, match="use --device cpu"):
        solvers.run(SolversBench(out=str(tmp_path / "made")))
    assert list(tmp_path.iterdir()) == []
