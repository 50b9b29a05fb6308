"""The benchmark of growth: sweeps at full rank that end in time; and what ``auto`` takes, in every table that names it."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.functional import FunctionalBench, GrowthBench

from benchmarks import charts, measure
from benchmarks import functional as bench
from eigengrain import functional as F
from eigengrain.errors import ArgumentError, FileError, UnknownName

CPU = torch.device("cpu")
TINY = {"batch": [1, 2], "channels": [4, 8], "at_batch": 2, "at_channels": 4, "positions": 9, "repeats": 1, "device": "cpu"}


# --- sweeps ------------------------------------------------------------------------------------------------------


def test_every_covariance_of_a_sweep_has_full_rank():
    sweeps = GrowthBench().sweeps
    assert [shape[0] for shape in sweeps["batch"]] == [2**i for i in range(10)]
    assert [shape[1] for shape in sweeps["channels"]] == [64, 128, 256, 512, 1024]
    assert {shape[1:] for shape in sweeps["batch"]} == {(256, 784)}
    assert {shape[0] for shape in sweeps["channels"]} == {32}
    assert all(n - 1 >= d for shapes in sweeps.values() for _, d, n in shapes)
    assert sweeps["channels"][-1] == (32, 1024, 33 * 33)


@pytest.fixture
def layers(monkeypatch):
    """Layers with times of 20 ms per sample, or nothing; returns (layer, batch size) of each run in order."""
    requests = []

    def timed(case):
        requests.append((case.layer, len(case.x)))
        seconds = 0.02 * len(case.x) if case.layer == "slow" else 1e-5
        return seconds / 2, seconds

    monkeypatch.setattr(measure.Case, "timed", timed)
    monkeypatch.setattr(bench, "METHODS", {name: name for name in ("slow", "quick")})
    return requests


def test_a_method_leaves_a_sweep_once_it_takes_longer_than_the_limit(layers):
    config = GrowthBench(**TINY | {"batch": [1, 2, 4, 8], "methods": ["slow", "quick"], "limit": 0.07})
    rows = bench.measure_growth(config, CPU)
    measured = {(row["sweep"], row["batch"], row["channels"], row["method"]) for row in rows}
    assert {key[1] for key in measured if key[0] == "batch" and key[3] == "slow"} == {1, 2, 4}  # 80 ms at 4
    assert {key[1] for key in measured if key[0] == "batch" and key[3] == "quick"} == {1, 2, 4, 8}
    assert {key[2] for key in measured if key[0] == "channels" and key[3] == "slow"} == {4, 8}  # it may start again
    assert ("slow", 8) not in layers
    slow = next(row for row in rows if row["method"] == "slow" and row["batch"] == 4)
    assert (slow["forward_ms"], slow["forward_backward_ms"], slow["repeats"]) == (40, 80, 1)
    assert layers.count(("slow", 4)) == 1
    table = bench.growth_table(rows)
    assert [line.split()[4:6] for line in table.splitlines() if line.split()[:2] == ["batch", "8"]] == [["–", "0.01"]]


def test_a_point_takes_as_many_runs_in_turn_as_fit(layers):
    x = torch.ones(2, 3, 5, requires_grad=True)
    cases = {name: measure.Case(layer, x, torch.ones(2, 3, 3)) for name, layer in bench.METHODS.items()}
    outcome = bench.time_within(cases, repeats=3, warmup=1, limit=0.09)
    assert {name: len(runs) for name, runs in outcome.items()} == {"slow": 2, "quick": 3}  # 40 ms each
    assert [name for name, _ in layers] == ["slow", "quick"] * 3 + ["quick"]
    layers.clear()
    outcome = bench.time_within(cases, repeats=3, warmup=2, limit=0.03)
    assert [name for name, _ in layers] == ["slow", "quick"] * 2 + ["quick"] * 3
    assert outcome["slow"] == [(0.02, 0.04)]  # the last rehearsal is the result
    outcome = bench.time_within(cases, repeats=3, warmup=1, limit=float("inf"))
    assert [len(runs) for runs in outcome.values()] == [3, 3]


def test_what_does_not_fit_into_memory_has_no_row_and_ends_the_sweep(monkeypatch, tmp_path):
    requests = []

    def greedy(x):
        requests.append(len(x))
        if len(x) > 1:
            raise torch.OutOfMemoryError("too large")
        return x @ x.mT

    monkeypatch.setattr(bench, "METHODS", {"greedy": greedy})
    config = GrowthBench(**TINY | {"batch": [1, 2, 4], "at_batch": 1, "methods": ["greedy"]})
    rows = bench.measure_growth(config, CPU)
    assert [row["batch"] for row in rows if row["sweep"] == "batch"] == [1]
    assert max(requests) == 2
    with pytest.raises(ArgumentError) as error:
        bench.run_growth(GrowthBench(**TINY | {"batch": [2], "methods": ["greedy"], "out": str(tmp_path / "a.csv")}))
    assert error.value.argument == "batch"


def test_invalid_options_are_refused(tmp_path):
    with pytest.raises(UnknownName) as unknown:
        bench.run_growth(GrowthBench(methods=["egih"], out=str(tmp_path / "made" / "a.csv")))
    assert unknown.value.suggestions[0] == "eigh"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError):
        bench.growth_methods(["gram"])
    for options in ({"limit": 0.0}, {"methods": []}, {"at_batch": 0}, {"out": "a.PNG"}):
        with pytest.raises(ArgumentError) as error:
            GrowthBench(**options)
        assert [error.value.argument] == list(options)


def test_the_command_writes_a_file_and_a_chart(tmp_path, capsys):
    out = tmp_path / "made" / "growth.csv"
    bench.run_growth(GrowthBench(**TINY | {"methods": ["auto", "eigh", "products", "svd"], "out": str(out)}))
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 4
    for row in rows:
        assert 0 < float(row["forward_ms"]) < float(row["forward_backward_ms"])
        assert row["solver"] == ("eigh" if row["method"] == "auto" else row["method"])
        assert row["torch"] == torch.__version__
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "choice of auto" in capsys.readouterr().out


def test_a_single_size_is_drawn_too(tmp_path):
    config = GrowthBench(**TINY | {"batch": 1, "channels": 4, "out": str(tmp_path / "a.csv")})
    rows = bench.measure_growth(config, CPU)
    charts.draw_growth([row for row in rows if row["sweep"] == "batch"], "a device", tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


# --- drawn again from a file -------------------------------------------------------------------------------------

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "growth-h200.csv"


@pytest.fixture
def no_measurement(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(bench, "measure_growth", refuse)


def test_the_chart_is_drawn_from_a_file_of_another_machine(tmp_path, monkeypatch, no_measurement):
    seen = []
    draw = charts.draw_growth
    monkeypatch.setattr(charts, "draw_growth", lambda rows, *rest: seen.append((rows, *rest)) or draw(rows, *rest))
    copy = tmp_path / "growth.csv"
    copy.write_bytes(COMMITTED.read_bytes())
    bench.run_growth(GrowthBench(out=str(copy), redraw=True, device="cpu"))
    assert copy.read_bytes() == COMMITTED.read_bytes()
    assert copy.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    ((rows, device, picture),) = seen
    assert (device, picture) == ("NVIDIA H200", copy.with_suffix(".png"))
    with COMMITTED.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(r["sweep"], r["method"], r["batch"], r["channels"], r["forward_backward_ms"]) for r in rows] == [
        (r["sweep"], r["method"], int(r["batch"]), int(r["channels"]), float(r["forward_backward_ms"])) for r in written
    ]
    assert [r["batch"] for r in rows if r["sweep"] == "batch"][-1] == 512


def test_the_chart_of_a_device_that_is_not_here(tmp_path, monkeypatch, no_measurement):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "growth-cuda.csv").write_bytes(COMMITTED.read_bytes())
    bench.run_growth(GrowthBench(redraw=True, device="cuda:1"))
    assert (tmp_path / "benchmarks" / "growth-cuda.png").exists()


def test_what_is_measured_is_read_back(tmp_path):
    out = tmp_path / "growth.csv"
    bench.run_growth(GrowthBench(**TINY | {"methods": ["auto", "mpa_sqrt"], "out": str(out)}))
    first = out.with_suffix(".png").read_bytes()
    out.with_suffix(".png").unlink()
    bench.run_growth(GrowthBench(out=str(out), redraw=True))
    assert out.with_suffix(".png").read_bytes() == first


def test_files_that_cannot_be_drawn_are_refused(tmp_path, no_measurement):
    file = tmp_path / "a.csv"
    head = "sweep,batch,channels,positions,method,solver,forward_ms,forward_backward_ms"
    broken = f"{head},device_name\nbatch,1,2,3,eigh,eigh,4,5,a GPU\nbatch,1\n"
    wrong = f"{head},device_name\nbatch,one,2,3,eigh,eigh,4,5,a GPU\n"
    for text in (None, "", f"{head}\nbatch,1,2,3,eigh,eigh,4,5\n", wrong, broken):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        with pytest.raises(FileError) as error:
            bench.run_growth(GrowthBench(out=str(file), redraw=True))
        assert error.value.path == file
        assert not file.with_suffix(".png").exists()


# --- what auto takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [5, 40])
def test_auto_and_the_newton_schulz_layer_match_their_definitions(positions):
    x = torch.randn(2, 6, positions, generator=torch.Generator().manual_seed(0)).double()
    roots, iterated = bench.METHODS["auto"](x), bench.METHODS["isqrt_covariance"](x)
    for sample, root, steps in zip(x.numpy(), roots.numpy(), iterated.numpy(), strict=True):
        p = np.cov(sample, bias=True)
        values, vectors = np.linalg.eigh(p)
        values = values.clip(0)
        factor = 1 + np.sqrt((values * np.exp(-2 * values)).sum())
        np.testing.assert_allclose(root, factor * (vectors * np.sqrt(values)) @ vectors.T, rtol=0, atol=1e-7)
        y, z = p / np.trace(p), np.eye(6)
        for _ in range(5):  # the coupled iteration, written out
            t = (3 * np.eye(6) - z @ y) / 2
            y, z = y @ t, t @ z
        np.testing.assert_allclose(steps, np.sqrt(np.trace(p)) * y, rtol=0, atol=1e-10)


def test_the_functional_benchmark_names_the_solver_that_auto_took():
    requested = ["auto", "eigh", "newton_schulz"]
    for shape, taken in (((2, 6, 20), "eigh"), ((2, 6, 5), "gram")):
        rows = bench.measure_methods(shape, requested, FunctionalBench(repeats=1, warmup=0), CPU)
        assert [row["solver"] for row in rows] == [taken, "eigh", None]
    plain = bench.measure_methods((2, 6, 20), requested, FunctionalBench(repeats=1, warmup=0, seb=False), CPU)
    assert [row["seb"] for row in (*rows, *plain)] == ["yes", "yes", "no", "no", "no", "no"]
    assert "auto" in bench.methods_for(6, 20)
    assert set(F.SOLVERS) < set(bench.METHODS)
