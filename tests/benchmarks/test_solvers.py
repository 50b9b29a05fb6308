"""The benchmark of solvers: the reference is right, errors and times are what was put in, both files are complete."""

import csv
import math
import time
from itertools import product

import numpy as np
import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.solvers import SolversBench

import eigengrain
from benchmarks import measure, solvers
from eigengrain import functional as F
from eigengrain.errors import ArgumentError
from eigengrain.functional._cuda import cusolver

CPU = torch.device("cpu")


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
    factors = solvers.conditioned_features(30.0, channels, positions, 2, generator)
    g = torch.randn(2, channels, channels, generator=generator, dtype=torch.float64)
    g = (g + g.mT) / 2
    output, gradient = solvers.reference(factors, g, seb)
    step = 1e-4
    for sample in range(2):
        x = factors.features[sample].numpy()
        np.testing.assert_allclose(output[sample], scaled_root(x, seb), rtol=0, atol=1e-13)
        for i, j in np.ndindex(x.shape):
            h = np.zeros_like(x)
            h[i, j] = step
            ahead, behind = (scaled_root(x + t * h, seb) for t in (1, -1))
            slope = (g[sample].numpy() * (ahead - behind)).sum() / (2 * step)
            assert gradient[sample, i, j] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(("channels", "positions", "rank"), [(6, 30, 6), (6, 4, 3), (6, 6, 5)])
def test_the_features_have_the_given_condition_number(channels, positions, rank):
    x = solvers.conditioned_features(1e6, channels, positions, 1, torch.Generator().manual_seed(0)).features
    singular = np.linalg.svd((x[0] - x[0].mean(-1, keepdim=True)).numpy() / math.sqrt(positions), compute_uv=False)
    assert singular[0] == pytest.approx(1, rel=1e-12)
    assert singular[rank - 1] == pytest.approx(1e-3, rel=1e-10)
    assert (singular[rank:] < 1e-14).all()


# --- errors ------------------------------------------------------------------------------------------------------


def measured(channels=24, positions=60, samples=3, svd_batch=2) -> dict[tuple[str, str], dict]:
    config = SolversBench(samples=samples, svd_batch=svd_batch)
    rows = solvers.measure_errors(1e10, channels, positions, config, CPU)
    return {(row["solver"], row["dtype"]): row for row in rows}


def test_every_converged_route_meets_its_bounds_and_the_iterations_do_not():
    rows = measured()
    exact = {(solver, "float64") for solver in F.SOLVERS if solver != "gram"}
    exact |= {(solver, "float32") for solver in ("auto", "eigh", "svd", "products")}
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
    assert rows["auto", "float32"]["taken"] == "eigh"
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
        solvers.Route("off", "float32", off),
        solvers.Route("bad", "float64", one_bad_sample),
        solvers.Route("not so bad", "float64", lambda x: F.sqrt_covariance(x, solver="svd"), seb=False),
        solvers.Route("without SEB", "float64", lambda x: F.sqrt_covariance(x, solver="svd")),
    )
    monkeypatch.setattr(solvers, "ROUTES", routes)
    rows = {name: row for (name, _), row in measured().items()}
    assert rows["off"]["forward_error"] == pytest.approx(0.01, rel=1e-2)
    assert rows["off"]["gradient_error"] == pytest.approx(0.5, rel=1e-2)
    assert (rows["bad"]["forward_error"], rows["bad"]["gradient_error"]) == (math.inf, math.inf)
    assert rows["without SEB"]["forward_error"] > 0.1
    assert [row["meets"] for row in rows.values()] == ["no", "no", "yes", "no"]


@pytest.mark.parametrize(("forward", "gradient", "meets"), [(0.9, 0.9, "yes"), (1.1, 0.9, "no"), (0.9, 1.1, "no")])
def test_both_bounds_must_be_met(monkeypatch, forward, gradient, meets):
    monkeypatch.setattr(solvers, "errors", lambda route, *rest: tuple(
        factor * bound for factor, bound in zip((forward, gradient), solvers.BOUNDS[route.dtype], strict=True)
    ))  # fmt: skip
    assert {row["meets"] for row in measured().values()} == {meets}


def test_ways_by_the_svd_get_a_batch_of_their_own(monkeypatch):
    requests = {}
    monkeypatch.setattr(
        solvers, "errors", lambda route, factors, grad, device: requests.update({route: len(factors.u)}) or (0.0, 0.0)
    )
    for samples, svd_batch in ((5, 2), (1, 4)):
        rows = measured(samples=samples, svd_batch=svd_batch)
        sizes = {(route.solver, route.dtype): size for route, size in requests.items()}
        by_svd = {("svd", "float64"), ("svd", "float32")}
        assert sizes == {key: svd_batch if key in by_svd else samples for key in sizes}
        assert {key: row["samples"] for key, row in rows.items()} == sizes


# --- eigensolvers ------------------------------------------------------------------------------------------------


def test_backends_that_a_device_has(monkeypatch):
    def backends(device):
        first, *others = solvers.eigensolvers_on(torch.device(device))
        assert first == solvers.REFERENCE
        return others

    assert backends("cpu") == ["torch"]
    monkeypatch.setattr(cusolver, "available", lambda: True)
    assert backends("cpu") == ["torch"]
    assert backends("cuda") == ["torch", "cusolver-batched", "cpu"]
    monkeypatch.setattr(cusolver, "available", lambda: False)
    assert backends("cuda") == ["torch", "cpu"]


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
    quick, slow = solvers.measure_eigensolvers(3, 8, "float32", "covariance", SolversBench(repeats=3, warmup=1), CPU)
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
    none, some = solvers.measure_eigensolvers(1, 4, "float64", "covariance", SolversBench(repeats=1, warmup=0), CPU)
    assert (none["ms"], none["residual"]) == (None, None)
    assert some["ms"] > 0
    assert some[f"ratio_to_{solvers.REFERENCE}"] is None
    assert "–" in measure.format_table([none, some], ["ms", "residual"])


def test_covariances_have_full_rank(monkeypatch):
    monkeypatch.setattr(solvers, "POSITIONS", 9)
    p = solvers.random_matrices("covariance", 2, 20, CPU, torch.float64, seed=0)
    assert p.shape == (2, 20, 20)
    assert float(torch.linalg.eigvalsh(p).min()) > 1e-6


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_both_files(tmp_path):
    argv = ["--batch", "2", "--channels", "[4,8]", "--at_channels", "6", "--positions", "[20,4]", "--samples", "2"]
    argv += ["--condition", "[1e4,1e10]", "--repeats", "1", "--device", "cpu"]
    assert main(["solvers", *argv, "--out", str(tmp_path / "made"), "--label", "here"]) == 0
    made = list((tmp_path / "made").iterdir())
    files = {path.name: list(csv.DictReader(path.open(newline=""))) for path in made if path.suffix == ".csv"}
    assert [path.name for path in made if path.suffix != ".csv"] == ["accuracy-here.png"]
    assert set(files) == {"eigensolvers-here.csv", "accuracy-here.csv", "flops.csv"}
    times, errors = files["eigensolvers-here.csv"], files["accuracy-here.csv"]
    columns = ("channels", "dtype", "matrices", "eigensolver")
    cases = product("48", ("float32", "float64"), ("covariance", "symmetric"), ("torch.linalg.eigh", "torch"))
    assert [tuple(row[name] for name in columns) for row in times] == list(cases)
    known = [(float(row["condition"]), int(row["positions"])) for row in errors]
    assert list(dict.fromkeys(known)) == [(1e4, 20), (1e4, 4), (1e10, 20), (1e10, 4)]
    assert len(errors) == 4 * len(solvers.ROUTES) - 4  # no Gram matrix at 20 positions, in float64 and float32
    for row in (*times, *errors):
        assert (row["eigengrain"], row["torch"]) == (eigengrain.__version__, torch.__version__)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"condition": 0.5}, "condition"),
        ({"condition": [1e4, math.nan]}, "condition"),
        ({"condition": []}, "condition"),
        ({"dtypes": []}, "dtypes"),
        ({"samples": 0}, "samples"),
        ({"svd_batch": 0}, "svd_batch"),
        ({"at_channels": 1}, "at_channels"),
        ({"positions": [20, 2]}, "positions"),
        ({"label": "a/b"}, "label"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_invalid_options_are_refused(options, argument):
    with pytest.raises(ArgumentError) as error:
        SolversBench(**options)
    assert error.value.argument == argument


def test_a_device_without_float64_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(solvers, "pick_device", lambda name: torch.device("mps"))
    with pytest.raises(ArgumentError) as error:
        solvers.run(SolversBench(out=str(tmp_path / "made")))
    assert error.value.argument == "device"
    assert list(tmp_path.iterdir()) == []


def test_flops_of_the_routes():
    """By hand for the d × d covariance in float64: six products of d²N, four of d³, and 9 d³ for the eigenvalues."""
    d, n = 200, 500
    rows = {(row["solver"], row["dtype"]): row for row in solvers.count_flops(d, n)}
    exact = rows["eigh", "float64"]
    assert exact["eigen_mflop"] == round(9 * d**3 / 1e6)
    low = rows["eigh", "float32"]
    assert low["eigen_mflop"] == round(18 * d**3 / 1e6)
    assert low["product_mflop"] > exact["product_mflop"] > 6 * d * d * n / 1e6
    assert rows["products", "float64"]["eigen_mflop"] == 0
    assert exact["m3max_ms"] is None
    assert 0 < low["rtx4090_ms"] < exact["rtx4090_ms"]
