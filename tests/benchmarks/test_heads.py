"""The benchmark of heads measures what it says: parameters have gradients, memory is the heads' own, files are complete."""

import csv
import importlib
import subprocess
import sys
import time

import matplotlib
import pytest
import torch
from benchmarks.config import HeadsBench
from rich.console import Console
from torch import nn

import eigengrain
from benchmarks import functional as bench
from benchmarks import heads
from eigengrain.functional._cuda import graphs as _graphs
from eigengrain.heads import Head, list_heads

CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"


class Weighted(Head):
    """The first position, through an exponential, a weight and a table; its forward pass waits."""

    def __init__(self, in_channels, wait=0.0):
        super().__init__(in_channels)
        self.out_features = in_channels
        self.weight = nn.Parameter(torch.ones(in_channels))
        self.register_buffer("table", torch.ones(in_channels))
        self.wait = wait

    def pool(self, x):
        time.sleep(self.wait)
        return x[:, :, 0, 0].exp() * self.weight * self.table


@pytest.fixture
def two_heads(monkeypatch):
    """``quick`` and ``slow`` in place of the registered heads."""
    waits = {"quick": 0.0, "slow": 0.05}
    monkeypatch.setattr(heads, "list_heads", lambda: sorted(waits))
    monkeypatch.setattr(heads, "create_head", lambda name, channels: Weighted(channels, waits[name]))


def shown(table):
    console = Console(width=100, record=True)
    console.print(table)
    return console.export_text()


# --- how layers are measured -------------------------------------------------------------------------------------


def test_parameters_get_their_gradients_and_the_state_takes_no_memory():
    head = Weighted(1000)
    x = torch.ones(2, 1000, 1, 1, requires_grad=True)
    asked = []
    x.register_hook(lambda grad: asked.append("x"))
    head.weight.register_hook(lambda grad: asked.append("weight"))
    case = bench.Case(head, x, torch.ones(2, 1000), [*head.parameters(), *head.buffers()])
    case.work()
    assert sorted(asked) == ["weight", "x"]
    forward, both = case.timed()
    assert 0 < forward < both
    peak, saved = case.memory()
    assert saved == 8_000  # the exponential; weight and table are kept too, and were there before
    strange_weight = bench.Case(head, x, torch.ones(2, 1000), list(head.buffers()))
    assert strange_weight.memory()[1] == 12_000  # what is not known to be state is taken for the layer's own
    strange_weight.sources = case.sources  # the same work
    assert strange_weight.memory()[0] == peak + 4_000


def test_memory_is_measured_without_recorded_graphs(monkeypatch):
    monkeypatch.setattr(_graphs, "_recordable", lambda tensor: True)
    before, seen = _graphs._recordable, []

    def layer(x):
        seen.append(_graphs._recordable(x))
        return x.exp()

    bench.Case(layer, torch.ones(3, requires_grad=True), torch.ones(3)).memory()
    assert seen == [False, False]
    with pytest.raises(RuntimeError, match="of the test"), bench.unrecorded():
        raise RuntimeError("of the test")
    assert _graphs._recordable is before


def test_what_does_not_fit_into_memory_is_left_out_and_the_others_go_on():
    calls = []

    def greedy(x):
        calls.append("greedy")
        if len(calls) > 1:
            raise torch.OutOfMemoryError("too large")
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    cases = {"greedy": bench.Case(greedy, x, torch.ones(3)), "modest": bench.Case(torch.exp, x, torch.ones(3))}
    found = bench.figures(cases, "modest", repeats=3, warmup=0)
    assert calls == ["greedy"] * 2
    assert set(found["greedy"].values()) == {None}
    assert found["modest"]["ratio_to_modest"] == 1
    without_reference = bench.figures({"greedy": cases["greedy"]}, "greedy", repeats=1, warmup=0)
    assert without_reference["greedy"]["ratio_to_greedy"] is None


# --- the heads ---------------------------------------------------------------------------------------------------


def test_every_registered_head_is_measured():
    rows = heads.measure((2, 16, 5, 5), list_heads(), "isqrt", repeats=1, warmup=0, device=CPU)
    assert [row["head"] for row in rows] == list_heads()
    for row in rows:
        assert 0 < row["forward_ms"] < row["forward_backward_ms"]
        assert row["peak_mib"] > 0
    by_name = {row["head"]: row for row in rows}
    isqrt = by_name["isqrt"]
    assert isqrt["ratio_to_isqrt"] == 1
    ratio = by_name["gap"]["forward_backward_ms"] / isqrt["forward_backward_ms"]
    assert by_name["gap"]["ratio_to_isqrt"] == pytest.approx(ratio, abs=1e-3)
    assert (isqrt["vector"], by_name["gap"]["vector"], by_name["bcnn"]["vector"]) == (16 * 17 // 2, 16, 256)
    assert {name for name, row in by_name.items() if row["solver"]} == {"mpncov", "mpncov+seb"}
    assert by_name["mpncov"]["solver"] == "eigh"  # 25 positions for 16 channels
    assert by_name["lrbp"]["parameters"] > by_name["gap"]["parameters"] == 0


def test_the_gram_matrix_is_named_where_it_is_the_solver():
    (row,) = heads.measure((1, 16, 3, 3), ["mpncov"], "mpncov", repeats=1, warmup=0, device=CPU)
    assert heads.label(row) == "mpncov (gram)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_features_of_other_precisions(dtype):
    names = ["gap", "lrbp", "kp", "mpncov+seb"]
    rows = heads.measure((2, 8, 4, 4), names, "gap", repeats=1, warmup=0, device=CPU, dtype=dtype)
    assert {row["features"] for row in rows} == {str(dtype).removeprefix("torch.")}


def test_waiting_shows_in_the_times(two_heads):
    rows = heads.measure((2, 4, 3, 3), ["slow", "quick"], "slow", repeats=2, warmup=1, device=CPU)
    slow, quick = rows
    assert slow["forward_ms"] >= 50
    assert slow["forward_backward_ms"] > quick["forward_backward_ms"]
    assert quick["ratio_to_slow"] == pytest.approx(quick["forward_backward_ms"] / slow["forward_backward_ms"], abs=1e-3)
    text = shown(heads.table(rows, "slow"))
    assert text.index("quick") < text.index("slow  ")  # fastest first


def test_random_heads_are_the_same_for_the_same_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (heads.build(["lrbp"], 16, CPU, torch.float32, seed=1)["lrbp"].state_dict() for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_and_a_chart(tmp_path, capsys):
    out = tmp_path / "made" / "heads.csv"
    sizes = {"batch": 2, "channels": 8, "side": 4, "repeats": 1, "device": "cpu"}
    heads.run(HeadsBench(heads=["gap", "mpncov+seb", "gap"], out=str(out), **sizes))
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["head"] for row in rows] == ["gap", "mpncov+seb", "isqrt"]
    for row in rows:
        assert (row["batch"], row["channels"], row["height"], row["width"]) == ("2", "8", "4", "4")
        assert row["eigengrain"] == eigengrain.__version__
        assert row["torch"] == torch.__version__
        assert row["device_name"]
    assert (tmp_path / "made" / "heads.png").read_bytes().startswith(PNG)
    assert "mpncov+seb (eigh)" in capsys.readouterr().out


def test_places_are_said_as_they_are(tmp_path, capsys):
    out = tmp_path / "[final] run" / "a.csv"  # no markup
    heads.run(HeadsBench(heads=["gap"], batch=1, channels=8, side=4, repeats=1, device="cpu", out=str(out)))
    said = capsys.readouterr().out
    assert f"written to {out}\n" in said
    assert f"drawn to {out.with_suffix('.png')}\n" in said


def test_the_chart_is_said_to_be_missing_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(heads, "find_spec", lambda name: None)
    heads.run(HeadsBench(heads=["gap"], batch=1, channels=8, side=4, repeats=1, device="cpu", out=str(tmp_path / "a.csv")))
    assert "pip install 'eigengrain[explain]'" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_charts_leave_a_notebook_its_own_way_of_drawing():
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        importlib.reload(importlib.import_module("benchmarks.chart"))
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)


def test_the_chart_leaves_out_heads_without_a_time(tmp_path):
    from benchmarks.chart import draw_heads

    rows = heads.measure((1, 8, 4, 4), ["gap", "gmp"], "gap", repeats=1, warmup=0, device=CPU)
    lost = rows[0] | {"head": "lost", "forward_ms": None, "forward_backward_ms": None, "peak_mib": None}
    draw_heads([*rows, lost], "gap", "a device", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert "–" in shown(heads.table([*rows, lost], "gap"))
    no_memory = [row | {"peak_mib": None} for row in rows]  # as on devices that do not count
    draw_heads(no_memory, "gap", "a device", tmp_path / "b.png")
    with pytest.raises(ValueError, match="use a smaller batch"):
        draw_heads([lost], "gap", "a device", tmp_path / "c.png")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": []}, "--heads needs a name"),
        ({"side": 0}, "--side needs whole numbers of at least 1, got 0"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"warmup": -1}, "--warmup at least 0"),
        ({"out": "chart.png"}, "--out names the CSV file"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        HeadsBench(**options)


def test_an_unknown_head_is_refused_before_a_file_is_made(tmp_path):
    for options in ({"heads": ["mpncof"]}, {"reference": "mpncof"}):
        with pytest.raises(ValueError, match="unknown head 'mpncof': did you mean 'mpncov'"):
            heads.run(HeadsBench(device="cpu", out=str(tmp_path / "made" / "a.csv"), **options))
    assert list(tmp_path.iterdir()) == []


def test_benchmarks_run_as_functions_without_the_command_lines_packages(tmp_path):
    code = f"""
import sys
sys.modules["captum"] = None  # any import of them fails
from benchmarks.config import GrowthBench, HeadsBench, StepBench
assert "torch" not in sys.modules
from benchmarks import growth, heads, step
heads.find_spec = lambda name: None  # the chart takes its time
heads.run(HeadsBench(heads=["gap"], batch=1, channels=8, side=4, repeats=1, device="cpu", out={str(tmp_path / "a.csv")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.csv").exists()
