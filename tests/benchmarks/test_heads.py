"""The benchmark of heads measures what it says: parameters have gradients, memory is the heads' own, files are complete."""

import csv
import importlib
import time

import matplotlib
import pytest
import torch
from benchmarks.heads import HeadsBench
from torch import nn

import eigengrain
from benchmarks import heads, measure
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional._cuda import graphs as _graphs
from eigengrain.heads import Head, list_heads

CPU = torch.device("cpu")


def measure_on(shape, names, reference, repeats=1, warmup=0, **options):
    batch, channels, side = shape
    sizes = {"batch": batch, "channels": channels, "side": side, "repeats": repeats, "warmup": warmup}
    return heads.measure_heads(names, HeadsBench(reference=reference, **sizes, **options), CPU)


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


# --- how layers are measured -------------------------------------------------------------------------------------


def test_parameters_get_their_gradients_and_the_state_takes_no_memory():
    head = Weighted(1000)
    x = torch.ones(2, 1000, 1, 1, requires_grad=True)
    requests = []
    x.register_hook(lambda grad: requests.append("x"))
    head.weight.register_hook(lambda grad: requests.append("weight"))
    case = measure.Case(head, x, torch.ones(2, 1000), [*head.parameters(), *head.buffers()])
    case.work()
    assert sorted(requests) == ["weight", "x"]
    forward, both = case.timed()
    assert 0 < forward < both
    peak, saved = case.memory()
    assert saved == 8_000  # the exponential; weight and table are kept too, and were there before
    strange_weight = measure.Case(head, x, torch.ones(2, 1000), list(head.buffers()))
    assert strange_weight.memory()[1] == 12_000  # what is not known to be state is taken for the layer's own
    strange_weight.sources = case.sources  # the same work
    assert strange_weight.memory()[0] == peak  # what exists before is not allocated


def test_memory_is_measured_without_recorded_graphs(monkeypatch):
    monkeypatch.setattr(_graphs, "_recordable", lambda tensor: True)
    before, seen = _graphs._recordable, []

    def layer(x):
        seen.append(_graphs._recordable(x))
        return x.exp()

    measure.Case(layer, torch.ones(3, requires_grad=True), torch.ones(3)).memory()
    assert seen == [False, False]
    assert _graphs._recordable is before


def test_what_does_not_fit_into_memory_is_left_out_and_the_others_go_on():
    calls = []

    def greedy(x):
        calls.append("greedy")
        if len(calls) > 1:
            raise torch.OutOfMemoryError("too large")
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    cases = {"greedy": measure.Case(greedy, x, torch.ones(3)), "modest": measure.Case(torch.exp, x, torch.ones(3))}
    outcome = measure.time_and_memory(cases, "modest", repeats=3, warmup=0)
    assert calls == ["greedy"] * 2
    assert set(outcome["greedy"].values()) == {None}
    assert outcome["modest"]["ratio_to_modest"] == 1
    without_reference = measure.time_and_memory({"greedy": cases["greedy"]}, "greedy", repeats=1, warmup=0)
    assert without_reference["greedy"]["ratio_to_greedy"] is None


# --- the heads ---------------------------------------------------------------------------------------------------


def test_every_registered_head_is_measured():
    rows = measure_on((2, 16, 5), list_heads(), "isqrt")
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
    assert {name for name, row in by_name.items() if row["solver"]} == {"hcov", "hcov+seb", "mpncov", "mpncov+seb"}
    assert by_name["mpncov"]["solver"] == "eigh"  # 25 positions for 16 channels
    assert by_name["lrbp"]["parameters"] > by_name["gap"]["parameters"] == 0


def test_the_gram_matrix_is_named_where_it_is_the_solver():
    (row,) = measure_on((1, 16, 3), ["mpncov"], "mpncov")
    assert row["solver"] == "gram"


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_features_of_other_precisions(dtype):
    names = ["gap", "lrbp", "kp", "mpncov+seb"]
    rows = measure_on((2, 8, 4), names, "gap", dtype=dtype)
    assert {row["features"] for row in rows} == {dtype}


def test_waiting_shows_in_the_times(two_heads):
    rows = measure_on((2, 4, 3), ["slow", "quick"], "slow", repeats=2, warmup=1)
    slow, quick = rows
    assert slow["forward_ms"] >= 50
    assert slow["forward_backward_ms"] > quick["forward_backward_ms"]
    assert quick["ratio_to_slow"] == pytest.approx(quick["forward_backward_ms"] / slow["forward_backward_ms"], abs=1e-3)


def test_random_heads_are_the_same_for_the_same_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (heads.build_heads(["lrbp"], 16, CPU, torch.float32, seed=1)["lrbp"].state_dict() for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file(tmp_path, capsys):
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
    assert "mpncov+seb" in capsys.readouterr().out


def test_paths_are_printed_without_markup(tmp_path, capsys):
    out = tmp_path / "[final] run" / "a.csv"  # no markup
    heads.run(HeadsBench(heads=["gap"], batch=1, channels=8, side=4, repeats=1, device="cpu", out=str(out)))
    printed = capsys.readouterr().out
    assert f"written to {out}\n" in printed


def test_charts_leave_a_notebook_its_own_way_of_drawing():
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        importlib.reload(importlib.import_module("benchmarks.charts"))
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)


@pytest.mark.parametrize("options", [{"heads": []}, {"side": 0}, {"repeats": 0}, {"warmup": -1}, {"out": "chart.png"}])
def test_invalid_options_are_refused(options):
    with pytest.raises(ArgumentError) as error:
        HeadsBench(**options)
    assert [error.value.argument] == list(options)


def test_an_unknown_head_is_refused_before_a_file_is_made(tmp_path):
    for options in ({"heads": ["mpncof"]}, {"reference": "mpncof"}):
        with pytest.raises(UnknownName) as error:
            heads.run(HeadsBench(device="cpu", out=str(tmp_path / "made" / "a.csv"), **options))
        assert "mpncov" in error.value.suggestions
    assert list(tmp_path.iterdir()) == []
