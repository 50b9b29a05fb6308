"""The benchmark of growth: sweeps at full rank that end in time; and what ``auto`` takes, in every table that names it."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.config import Doctor, GrowthBench
from rich.console import Console

from benchmarks import doctor, growth
from benchmarks import functional as bench
from eigengrain import functional as F
from eigengrain.functional import autotune

CPU = torch.device("cpu")
TINY = {"batch": [1, 2], "channels": [4, 8], "at_batch": 2, "at_channels": 4, "positions": 9, "repeats": 1, "device": "cpu"}


def text_of(table):
    console = Console(width=100, record=True)
    console.print(table)
    return console.export_text()


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
    """Layers that are said to take 20 ms a sample, or nothing; returns the batches on which each was asked, in order."""
    asked = []

    def timed(case):
        asked.append((case.layer, len(case.x)))
        seconds = 0.02 * len(case.x) if case.layer == "slow" else 1e-5
        return seconds / 2, seconds

    monkeypatch.setattr(bench.Case, "timed", timed)
    monkeypatch.setattr(bench, "METHODS", {name: name for name in ("slow", "quick")})
    return asked


def test_a_method_leaves_a_sweep_once_it_takes_longer_than_the_limit(layers):
    config = GrowthBench(**TINY | {"batch": [1, 2, 4, 8], "methods": ["slow", "quick"], "limit": 0.07})
    rows = growth.measure(config, CPU)
    measured = {(row["sweep"], row["batch"], row["channels"], row["method"]) for row in rows}
    assert {key[1] for key in measured if key[0] == "batch" and key[3] == "slow"} == {1, 2, 4}  # 80 ms at 4
    assert {key[1] for key in measured if key[0] == "batch" and key[3] == "quick"} == {1, 2, 4, 8}
    assert {key[2] for key in measured if key[0] == "channels" and key[3] == "slow"} == {4, 8}  # it may start again
    assert ("slow", 8) not in layers
    slow = next(row for row in rows if row["method"] == "slow" and row["batch"] == 4)
    assert (slow["forward_ms"], slow["forward_backward_ms"], slow["repeats"]) == (40, 80, 1)
    assert layers.count(("slow", 4)) == 1
    table = text_of(growth.table(rows))
    assert [line.split()[5:] for line in table.splitlines() if line.startswith(" 8 ×")] == [["–", "0.01"]]


def test_a_point_takes_as_many_runs_in_turn_as_fit(layers):
    x = torch.ones(2, 3, 5, requires_grad=True)
    cases = {name: bench.Case(layer, x, torch.ones(2, 3, 3)) for name, layer in bench.METHODS.items()}
    found = growth.point(cases, repeats=3, warmup=1, limit=0.09)
    assert {name: len(runs) for name, runs in found.items()} == {"slow": 2, "quick": 3}  # 40 ms each
    assert [name for name, _ in layers] == ["slow", "quick"] * 3 + ["quick"]
    layers.clear()
    found = growth.point(cases, repeats=3, warmup=2, limit=0.03)
    assert [name for name, _ in layers] == ["slow", "quick"] * 2 + ["quick"] * 3
    assert found["slow"] == [(0.02, 0.04)]  # the last rehearsal is the result
    found = growth.point(cases, repeats=3, warmup=1, limit=float("inf"))
    assert [len(runs) for runs in found.values()] == [3, 3]


def test_what_does_not_fit_into_memory_has_no_row_and_ends_the_sweep(monkeypatch):
    asked = []

    def greedy(x):
        asked.append(len(x))
        if len(x) > 1:
            raise torch.OutOfMemoryError("too large")
        return x @ x.mT

    monkeypatch.setattr(bench, "METHODS", {"greedy": greedy})
    config = GrowthBench(**TINY | {"batch": [1, 2, 4], "at_batch": 1, "methods": ["greedy"]})
    rows = growth.measure(config, CPU)
    assert [row["batch"] for row in rows if row["sweep"] == "batch"] == [1]
    assert max(asked) == 2
    with pytest.raises(ValueError, match="use smaller sizes"):
        growth.run(GrowthBench(**TINY | {"batch": [2], "methods": ["greedy"]}))


def test_methods_are_checked(tmp_path):
    with pytest.raises(ValueError, match="unknown method 'egih': did you mean 'eigh'"):
        growth.run(GrowthBench(methods=["egih"], out=str(tmp_path / "made" / "a.csv")))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="add eigh"):
        growth.methods_of(GrowthBench(methods=["gram"]))
    for options, said in (
        ({"limit": 0.0}, "--limit must be"),
        ({"methods": []}, "--methods needs a name"),
        ({"at_batch": 0}, "--at_batch needs whole numbers"),
        ({"out": "a.PNG"}, "--out names the CSV file"),
    ):
        with pytest.raises(ValueError, match=said):
            GrowthBench(**options)


def test_the_command_writes_a_file_and_a_chart(tmp_path, capsys):
    out = tmp_path / "made" / "growth.csv"
    growth.run(GrowthBench(**TINY | {"methods": ["auto", "eigh", "products", "svd"], "out": str(out)}))
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 4
    for row in rows:
        assert 0 < float(row["forward_ms"]) < float(row["forward_backward_ms"])
        assert row["solver"] == ("eigh" if row["method"] == "auto" else row["method"])
        assert row["torch"] == torch.__version__
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "auto took" in capsys.readouterr().out


def test_a_single_size_is_drawn_too(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "find_spec", lambda name: None)
    config = GrowthBench(**TINY | {"batch": 1, "channels": 4, "out": str(tmp_path / "a.csv")})
    growth.run(config)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]  # no chart without matplotlib
    from benchmarks.chart import draw_growth

    rows = growth.measure(config, CPU)
    draw_growth([row for row in rows if row["sweep"] == "batch"], "a device", tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()
    with pytest.raises(ValueError, match="use smaller sizes"):
        draw_growth([], "a device", tmp_path / "b.png")


# --- drawn again from a file -------------------------------------------------------------------------------------

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "growth-h200.csv"


@pytest.fixture
def no_measurement(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(growth, "measure", refuse)


def test_the_chart_is_drawn_from_a_file_of_another_machine(tmp_path, capsys, monkeypatch, no_measurement):
    from benchmarks import chart

    seen = []
    draw = chart.draw_growth
    monkeypatch.setattr(chart, "draw_growth", lambda rows, *rest: seen.append((rows, *rest)) or draw(rows, *rest))
    copy = tmp_path / "growth.csv"
    copy.write_bytes(COMMITTED.read_bytes())
    growth.run(GrowthBench(out=str(copy), redraw=True, device="cpu"))
    assert copy.read_bytes() == COMMITTED.read_bytes()
    assert copy.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    ((rows, device, picture),) = seen
    assert (device, picture) == ("NVIDIA H200", copy.with_suffix(".png"))
    with COMMITTED.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(r["sweep"], r["method"], r["batch"], r["channels"], r["forward_backward_ms"]) for r in rows] == [
        (r["sweep"], r["method"], int(r["batch"]), int(r["channels"]), float(r["forward_backward_ms"])) for r in written
    ]
    assert "512 × 256 × 784" in capsys.readouterr().out


def test_the_chart_of_a_device_that_is_not_here(tmp_path, monkeypatch, no_measurement):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "growth-cuda.csv").write_bytes(COMMITTED.read_bytes())
    growth.run(GrowthBench(redraw=True, device="cuda:1"))
    assert (tmp_path / "benchmarks" / "growth-cuda.png").exists()


def test_what_is_measured_is_read_back(tmp_path):
    out = tmp_path / "growth.csv"
    growth.run(GrowthBench(**TINY | {"methods": ["auto", "mpa_sqrt"], "out": str(out)}))
    first = out.with_suffix(".png").read_bytes()
    out.with_suffix(".png").unlink()
    growth.run(GrowthBench(out=str(out), redraw=True))
    assert out.with_suffix(".png").read_bytes() == first


def test_files_that_cannot_be_drawn_are_named(tmp_path, no_measurement):
    def said(text: str | None) -> str:
        file = tmp_path / "a.csv"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        with pytest.raises(ValueError) as error:
            growth.run(GrowthBench(out=str(file), redraw=True))
        assert [path.name for path in tmp_path.iterdir()] in ([], ["a.csv"])  # no chart
        return str(error.value)

    assert "cannot read" in said(None)
    assert "without sweep, batch" in said("")
    head = "sweep,batch,channels,positions,method,solver,forward_ms,forward_backward_ms"
    assert said(f"{head}\nbatch,1,2,3,eigh,eigh,4,5\n").endswith("without device_name: name another file with --out")
    assert "cannot be read" in said(f"{head},device_name\nbatch,one,2,3,eigh,eigh,4,5,a GPU\n")
    assert "cannot be read" in said(f"{head},device_name\nbatch,1,2,3,eigh,eigh,4,5,a GPU\nbatch,1\n")


# --- what auto takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [5, 40])
def test_auto_and_the_newton_schulz_layer_compute_what_they_say(positions):
    x = torch.randn(2, 6, positions, generator=torch.Generator().manual_seed(0)).double()
    roots, iterated = bench.METHODS["auto"](x), bench.METHODS["isqrt_covariance"](x)
    for sample, root, steps in zip(x.numpy(), roots.numpy(), iterated.numpy(), strict=True):
        p = np.cov(sample, bias=True)
        values, vectors = np.linalg.eigh(p)
        values = values.clip(0)
        factor = 1 + np.sqrt((values * np.exp(-2 * values)).sum())
        np.testing.assert_allclose(root, factor * (vectors * np.sqrt(values)) @ vectors.T, atol=1e-7)
        y, z = p / np.trace(p), np.eye(6)
        for _ in range(5):  # the coupled iteration, written out
            t = (3 * np.eye(6) - z @ y) / 2
            y, z = y @ t, t @ z
        np.testing.assert_allclose(steps, np.sqrt(np.trace(p)) * y, atol=1e-10)


def test_the_functional_benchmark_names_the_solver_that_auto_took():
    wanted = ["auto", "eigh", "newton_schulz"]
    for shape, taken in (((2, 6, 20), "eigh"), ((2, 6, 5), "gram")):
        rows = bench.measure(shape, wanted, repeats=1, warmup=0, device=CPU, dtype=torch.float32)
        assert [row["solver"] for row in rows] == [taken, "eigh", None]
        assert f"auto ({taken})" in text_of(bench.table(rows))
    assert "auto" in bench.methods_for(6, 20)
    assert set(F.SOLVERS) < set(bench.METHODS)


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """A file of solver timings, as a machine with a GPU leaves it."""
    kinds = {
        "a GPU, batch 16, channels 256": {"eigh": 9.51, "products": 4.123},
        "a GPU, batch 2, channels 64": {"eigh": 0.5},
    }
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "_memory", {})
    (tmp_path / "solvers.json").write_text(json.dumps(kinds))
    return tmp_path / "solvers.json"


def test_the_doctor_shows_the_timings_that_auto_goes_by(remembered, capsys, monkeypatch):
    assert doctor.solver_rows() == [
        ("a GPU, batch 16, channels 256", "eigh 9.51, products 4.12", "products"),
        ("a GPU, batch 2, channels 64", "eigh 0.5", "eigh"),
    ]
    monkeypatch.setattr(doctor, "import_trouble", lambda module: "")
    doctor.run(Doctor())
    assert f"remembered in {remembered}" in capsys.readouterr().out
    remembered.unlink()
    monkeypatch.setattr(autotune, "_memory", {})
    doctor.run(Doctor())
    assert "no solver has been timed on CUDA yet" in capsys.readouterr().out
