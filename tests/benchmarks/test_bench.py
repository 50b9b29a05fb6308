"""The benchmark measures what it says: bytes on known cases, times in turn, files with the environment in them."""

import csv
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from benchmarks.memory import LiveStorages, peak_bytes, saved_bytes
from torch.profiler import ProfilerActivity, profile

import eigengrain
from benchmarks import doctor
from benchmarks import functional as bench
from eigengrain.cli import main as cli
from eigengrain.environment import describe, pick_device
from eigengrain.files import writable
from eigengrain.functional import covariance
from eigengrain.functional.eigen import decompose

KILO = 1000  # elements; 4,000 bytes in float32


# --- peak memory -------------------------------------------------------------------------------------------------


def test_peak_of_a_sequence_of_known_allocations():
    with LiveStorages() as memory:
        a = torch.zeros(KILO)
        b = torch.zeros(2 * KILO)
        assert memory.live == 12_000
        del a
        assert memory.live == 8_000
        c = torch.zeros(4 * KILO)
        assert memory.live == 24_000
        del b, c
        d = torch.zeros(KILO)
    assert (memory.live, memory.peak) == (4_000, 24_000)
    del d
    assert memory.live == 0


def test_views_and_work_in_place_take_nothing():
    with LiveStorages() as memory:
        a = torch.zeros(KILO)
        view = a.view(10, 100).mT[3:].add_(1)
        del a
        assert (memory.live, memory.peak) == (4_000, 4_000)
        del view
    assert memory.live == 0


def test_what_existed_before_does_not_count():
    x = torch.zeros(KILO)
    with LiveStorages(x) as memory:
        y = x.view(10, 100) * 2
    assert (memory.live, memory.peak) == (4_000, 4_000)
    del y


def test_tensors_of_other_threads_count_once_they_are_used():
    made = []
    with LiveStorages() as memory:
        worker = threading.Thread(target=lambda: made.append(torch.zeros(KILO)))
        worker.start()
        worker.join()
        made[0].add_(1)
        assert memory.live == 4_000
        made.clear()
        assert memory.live == 0


def test_peak_covers_the_backward_pass():
    x = torch.ones(KILO, requires_grad=True)

    def work():
        torch.autograd.grad(x.exp().sum(), x)

    # forward holds e^x; backward holds it, and the gradient, beside a scalar or two
    assert 8_000 <= peak_bytes(work, x) <= 8_100


def test_peak_sees_inside_our_own_operators():
    p = covariance(torch.randn(2, 40, 90, generator=torch.Generator().manual_seed(0)), dtype=torch.float64)
    matrix = p.nbytes
    # eigenvectors in the solver's order and in ours at the same time, of which only the second leaves the operator
    assert peak_bytes(lambda: decompose(p), p) >= 2 * matrix


@pytest.mark.parametrize("name", ["eigh", "svd", "products", "newton_schulz"])
def test_peak_agrees_with_the_profilers_account_of_the_allocator(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 48, 100, generator=generator).requires_grad_()
    grad = torch.randn(2, 48, 48, generator=generator)

    def work():
        torch.autograd.grad(bench.METHODS[name](x), x, grad)

    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak_bytes(work, x, grad) == pytest.approx(peak, rel=0.02)


# --- memory between the passes -----------------------------------------------------------------------------------


def test_saved_bytes_of_known_operations():
    x = torch.zeros(KILO, requires_grad=True)
    assert saved_bytes(lambda: x.exp(), x) == 4_000
    assert saved_bytes(lambda: x.exp().exp(), x) == 8_000
    assert saved_bytes(lambda: x.sin(), x) == 0  # the input itself
    assert saved_bytes(lambda: x + 1, x) == 0


def test_a_storage_that_is_saved_twice_counts_once():
    x = torch.zeros(KILO, requires_grad=True)

    def work():
        y = x.exp()
        return y * y.view(10, 100).flatten()

    assert saved_bytes(work, x) == 4_000


def test_nothing_is_saved_without_a_graph():
    x = torch.zeros(KILO)
    assert saved_bytes(lambda: x.exp(), x) == 0


# --- the benchmark -----------------------------------------------------------------------------------------------


def test_all_ways_compute_roots_of_the_same_covariance():
    x = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0)).relu().double()
    p = covariance(x)
    values = torch.linalg.eigvalsh(p)
    factor = 1 + (values * torch.exp(-2 * values)).sum(-1).sqrt()[:, None, None]
    for name, layer in bench.METHODS.items():
        root = layer(x)
        if name in ("auto", "eigh", "gram", "svd", "products"):
            torch.testing.assert_close(root @ root, factor**2 * p, rtol=1e-8, atol=1e-10)
        else:  # approximate by design
            torch.testing.assert_close(root @ root, p, rtol=0.1, atol=0.02)


def test_the_gram_matrix_is_measured_only_where_it_is_smaller():
    assert "gram" in bench.methods_for(64, 49)
    assert "gram" not in bench.methods_for(64, 64)
    assert set(bench.methods_for(64, 49)) == set(bench.METHODS)


def test_the_reference_is_always_measured_and_an_unknown_method_refused():
    assert bench.methods_for(8, 20, ["svd"]) == ["svd", "newton_schulz"]
    with pytest.raises(ValueError, match=r"unknown method 'egih': did you mean 'eigh'"):
        bench.methods_for(8, 20, ["egih"])


def test_measure_on_layers_of_known_cost(monkeypatch):
    order = []

    def slow(x):
        order.append("slow")
        time.sleep(0.05)
        return x @ x.mT

    class WaitsBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.05)
            return grad

    def slow_backward(x):
        order.append("newton_schulz")
        return WaitsBackward.apply(x)[..., :8]

    monkeypatch.setattr(bench, "METHODS", {"slow": slow, "newton_schulz": slow_backward})
    rows = bench.measure(
        (2, 8, 25), ["slow", "newton_schulz"], repeats=2, warmup=1, device=torch.device("cpu"), dtype=torch.float32
    )
    forward_slow, backward_slow = rows
    assert forward_slow["forward_ms"] >= 50
    assert backward_slow["forward_backward_ms"] - backward_slow["forward_ms"] >= 50
    assert backward_slow["ratio_to_newton_schulz"] == 1
    ratio = forward_slow["forward_backward_ms"] / backward_slow["forward_backward_ms"]
    assert forward_slow["ratio_to_newton_schulz"] == pytest.approx(ratio, rel=1e-2)
    assert forward_slow["saved_mib"] == 0  # the product keeps its input alone
    # the exponential, and the gradient of its slice, 400 numbers each
    assert backward_slow["peak_mib"] == pytest.approx(2 * 400 * 4 / 2**20, abs=1e-4)
    assert order[:6] == ["slow", "newton_schulz"] * 3  # in turn


def test_the_command_writes_every_measurement_with_its_environment(tmp_path, capsys):
    out = tmp_path / "made" / "bench.csv"
    argv = ["bench", "functional", "--batch", "2", "--channels", "8", "--positions", "[5,20]", "--repeats", "2"]
    assert cli.main([*argv, "--device", "cpu", "--out", str(out)]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [(row["positions"], row["method"]) for row in rows]
    assert len(names) == len(set(names)) == 2 * len(bench.METHODS) - 1  # no Gram matrix at 20 positions
    for row in rows:
        assert float(row["forward_backward_ms"]) > float(row["forward_ms"]) > 0
        assert float(row["peak_mib"]) > 0
        assert row["eigengrain"] == eigengrain.__version__
        assert row["torch"] == torch.__version__
        assert row["device"] == "cpu"
        assert int(row["threads"]) == torch.get_num_threads()
        assert row["date"]
        assert row["device_name"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in bench.METHODS)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--channels", "[]"], "--channels needs whole numbers of at least 1, got []"),
        (["--positions", "[4,0]"], "--positions needs whole numbers of at least 1"),
        (["--methods", "[qr]"], "unknown method 'qr'"),
        (["--methods", "[]"], "--methods needs a name at least, got an empty list"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--device", "cuda:99"], "device 'cuda:99' is not here"),
        (["--device", "meta"], "device 'meta' is not supported"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(capsys, argv, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "functional", *argv]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot make the folder"):
        writable(tmp_path / "file" / "bench.csv")
    with pytest.raises(ValueError, match="cannot write the file"):
        writable(tmp_path)
    assert writable(tmp_path / "new" / "bench.csv").parent.is_dir()


def test_the_device_is_picked_by_name():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert describe(pick_device("cpu"))["torch"] == torch.__version__


# --- the doctor --------------------------------------------------------------------------------------------------


def test_the_doctor_names_versions_and_remedies(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "captum" else "1.2")
    monkeypatch.setattr(doctor, "import_trouble", lambda module: "OSError: no such library")
    rows = doctor.package_rows()
    assert ("eigengrain", eigengrain.__version__) in rows
    assert ("torch", "1.2") in rows
    assert ("captum", "missing: pip install 'eigengrain[explain]'") in rows
    assert ("", "import torchvision fails: OSError: no such library") in rows
    assert "ruff" not in dict(rows)  # for developers


def test_the_doctor_tries_imports_in_another_process():
    assert doctor.import_trouble("json") == ""
    assert "No module named 'not_there'" in doctor.import_trouble("not_there")


def test_the_doctor_asks_the_eigensolver_itself(monkeypatch):
    assert doctor.backend_on(torch.device("cpu")) == "torch"
    asked = []
    monkeypatch.setattr(doctor, "_choose", lambda backend, p: asked.append((backend, p.shape[0])) or "a solver")
    assert doctor.backend_on(torch.device("cpu")) == "a solver"
    assert asked == [("auto", 2)]
    assert doctor.device_rows()[0][0] == "cpu"


def test_the_doctor_prints_its_tables(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "import_trouble", lambda module: "")
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    assert cli.main(["doctor"]) == 1  # torch is missing
    shown = capsys.readouterr().out
    assert "pip install 'eigengrain[explain]'" in shown
    assert "eigensolver of backend='auto'" in shown


# --- the comparison with released code ---------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_released.py"

STAND_IN = """
import time, torch

def CovpoolLayer(x):
    x = x.flatten(2)
    return x @ x.mT

def SqrtmLayer(p, steps):
    assert steps == 5
    time.sleep(0.05)
    return p

def TriuvecLayer(q):
    return q.flatten(1)
"""


def test_released_code_is_measured_from_its_checkout(tmp_path):
    folder = tmp_path / "checkout" / "src" / "representation"
    folder.mkdir(parents=True)
    (folder / "MPNCOV.py").write_text(STAND_IN)
    out = tmp_path / "released.csv"
    size = ["--batch", "2", "--channels", "6", "--side", "4", "--repeats", "3", "--device", "cpu", "--out", str(out)]
    checkout = str(tmp_path / "checkout")
    options = ["--fast-mpn-cov", checkout, "--differentiable-svd", checkout]
    done = subprocess.run([sys.executable, str(SCRIPT), *options, *size], capture_output=True, text=True, check=True)
    assert "skipped on the CPU" in done.stderr
    with out.open(newline="") as file:
        rows = {row["layer"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"ours", "ours-mpncov", "ours-isqrt", "newton-schulz"}
    ours, theirs = (float(rows[name]["forward_backward_ms"]) for name in ("ours", "newton-schulz"))
    assert theirs >= 50
    assert float(rows["newton-schulz"]["ours_over_this"]) == pytest.approx(ours / theirs, abs=1e-3)
    assert rows["ours"]["positions"] == "16"


def test_a_wrong_checkout_is_named(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), "--fast-mpn-cov", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "MPNCOV.py is not there" in done.stderr
    assert "Traceback" not in done.stderr
