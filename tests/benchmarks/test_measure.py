"""Measuring: bytes of known computations, times in turn, files with the environment, and every command."""

import csv
import json
import time
import weakref
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import COMMANDS, main
from benchmarks.measure import peak_bytes, saved_bytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eigengrain
from benchmarks import compare_released
from benchmarks import functional as bench
from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.functional import covariance
from eigengrain.functional.eigen import decompose

CPU = torch.device("cpu")
KILO = 1000  # elements; 4,000 bytes in float32


# --- peak memory -------------------------------------------------------------------------------------------------


def test_peak_of_a_sequence_of_known_allocations():
    def work():
        a = torch.zeros(KILO)
        b = torch.zeros(2 * KILO)
        del a
        c = torch.zeros(4 * KILO)
        assert c.view(10, 400).add_(1).sum() > 0  # views and work in place take nothing
        del b, c
        return torch.zeros(KILO)

    assert 24_000 <= peak_bytes(work, CPU) <= 24_100


def test_peak_covers_the_backward_pass():
    x = torch.ones(KILO, requires_grad=True)

    def work():
        torch.autograd.grad(x.exp().sum(), x)

    # forward holds e^x; backward holds it, and the gradient, beside a scalar or two
    assert 8_000 <= peak_bytes(work, CPU) <= 8_100


def test_peak_sees_inside_our_own_operators():
    p = covariance(torch.randn(2, 40, 90, generator=torch.Generator().manual_seed(0)), dtype=torch.float64)
    matrix = p.nbytes
    # eigenvectors in the solver's order and in ours at the same time, of which only the second leaves the operator
    assert peak_bytes(lambda: decompose(p), CPU) >= 2 * matrix


class LiveStorages(TorchDispatchMode):
    """An account of memory without the profiler: the storages of the outputs of operators, while they exist."""

    live = peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        output = function(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tree_leaves(output) if torch.is_tensor(tensor)):
            if storage.data_ptr() not in before:
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        return output

    def free(self, count):
        self.live -= count


@pytest.mark.parametrize("name", ["newton_schulz", "mpa_sqrt"])
def test_peak_agrees_with_another_account(name):
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 48, 100, generator=generator).requires_grad_(), torch.randn(2, 48, 48, generator=generator)

    def work():
        torch.autograd.grad(bench.METHODS[name](x), x, grad)

    with LiveStorages() as account:
        work()
    assert peak_bytes(work, CPU) == pytest.approx(account.peak, rel=0.02)


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
    with pytest.raises(UnknownName) as error:
        bench.methods_for(8, 20, ["egih"])
    assert "eigh" in error.value.suggestions


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
    rows = bench.measure_methods((2, 8, 25), ["slow", "newton_schulz"], bench.FunctionalBench(repeats=2, warmup=1), CPU)
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
    argv = ["functional", "--batch", "2", "--channels", "8", "--positions", "[5,20]", "--repeats", "2"]
    assert main([*argv, "--device", "cpu", "--out", str(out)]) == 0
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
    ("options", "argument"),
    [
        ({"repeats": 0}, "repeats"),
        ({"warmup": -1}, "warmup"),
        ({"channels": []}, "channels"),
        ({"positions": [4, 0]}, "positions"),
        ({"methods": []}, "methods"),
    ],
)
def test_invalid_options_are_refused(options, argument):
    with pytest.raises(ArgumentError) as error:
        bench.FunctionalBench(**options)
    assert error.value.argument == argument


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--methods", "[qr]"], ["--device", "abacus"], ["--device", "meta"]])
def test_a_mistake_ends_with_code_2_before_anything_is_written(capsys, argv, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["functional", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- the comparison with released code ---------------------------------------------------------------------------

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


def test_released_code_is_measured_from_its_checkout(tmp_path, capsys):
    folder = tmp_path / "checkout" / "src" / "representation"
    folder.mkdir(parents=True)
    (folder / "MPNCOV.py").write_text(STAND_IN)
    out = tmp_path / "released.csv"
    size = ["--batch", "2", "--channels", "6", "--side", "4", "--repeats", "3", "--device", "cpu", "--out", str(out)]
    checkout = str(tmp_path / "checkout")
    options = ["--fast-mpn-cov", checkout, "--differentiable-svd", checkout]
    assert main(["compare_released", *options, *size]) == 0
    assert "skipped on the CPU" in capsys.readouterr().err
    with out.open(newline="") as file:
        rows = {row["layer"]: row for row in csv.DictReader(file)}
    ours = {"ours", "ours-float64", "ours-float32", "ours-mpncov", "ours-isqrt", "ours-inference"}
    assert set(rows) == ours | {"plain-newton-schulz", "newton-schulz"}
    ours, theirs = (float(rows[name]["forward_backward_ms"]) for name in ("ours", "newton-schulz"))
    assert theirs >= 50
    assert float(rows["newton-schulz"]["ours_over_this"]) == pytest.approx(ours / theirs, abs=1e-3)
    assert rows["ours"]["positions"] == "16"


def test_a_wrong_checkout_is_refused(tmp_path):
    with pytest.raises(FileError) as error:
        compare_released.run(compare_released.CompareReleased(fast_mpn_cov=str(tmp_path), device="cpu"))
    assert error.value.path.name == "MPNCOV.py"


def test_the_plain_iteration_is_the_published_one():
    x = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(0))
    p = eigengrain.functional.covariance(x)
    expected = eigengrain.functional.triu_vector(eigengrain.functional.newton_schulz(p, 5))
    assert torch.allclose(compare_released.plain_newton_schulz(x), expected, rtol=0, atol=1e-5)


# --- every command -----------------------------------------------------------------------------------------------

SMALL = {
    "functional": "--batch 1 --channels 4 --positions 9 --methods eigh --repeats 1 --device cpu --out {}/b.csv",
    "growth": "--batch 1 --channels 4 --at_batch 1 --at_channels 4 --positions 9 --methods eigh --repeats 1 --device cpu "
    "--out {}/b.csv",
    "heads": "--heads gap --batch 1 --channels 4 --side 3 --repeats 1 --device cpu --out {}/b.csv",
    "step": "--backbones test_resnet --heads gap --batch 1 --img_size 32 --repeats 1 --device cpu --out {}/b.csv",
    "solvers": "--batch 1 --channels 4 --at_channels 4 --positions 9 --samples 1 --repeats 1 --device cpu --out {}",
    "explain": "--backbone test_resnet --batch 1 --img_size 64 --subsets all --rules vanilla --repeats 1 --device cpu "
    "--out {}/b.csv",
    "gradients": "--channels 8 --positions 20 --samples 1 --out {}",
    "loader": "--images 4 --size 16 --batch_size 2 --repeats 1 --out {}/b.csv",
}


def test_every_benchmark_is_tested():
    assert {*SMALL, "compare_released", "explorer_load", "rank", "unfamiliar"} == {command.name for command in COMMANDS}


@pytest.mark.parametrize("name", SMALL)
def test_the_json_result_names_the_files(name, tmp_path, capsys):
    assert main([name, *SMALL[name].format(tmp_path).split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(Path(file).is_file() for file in document["files"])
    assert document.get("rows") or document["eigensolvers"]


def test_a_quiet_benchmark_prints_its_file_alone(tmp_path, capsys):
    assert main(["functional", *SMALL["functional"].format(tmp_path).split(), "--quiet"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/b.csv\n"
