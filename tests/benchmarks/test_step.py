"""The benchmark of training steps: steps that train, the head's share of them, and their memory."""

import copy
import csv
import time

import pytest
import torch
from benchmarks.step import StepBench
from torch import nn

from benchmarks import measure
from benchmarks import step as bench
from eigengrain.errors import ArgumentError, UnknownName

CPU = torch.device("cpu")
SMALL = {
    "backbones": ["resnet10t"],
    "batch": 2,
    "img_size": 64,
    "reduce": 8,
    "num_classes": 5,
    "repeats": 1,
    "device": "cpu",
}


_build = bench.build


def filled(**options):
    return measure.fill(StepBench(**SMALL | options), bench.DEFAULTS, CPU)


def trainee(head="mpncov+seb", **options):
    return _build(filled(**options), "resnet10t", head, CPU)


# --- the clock ---------------------------------------------------------------------------------------------------


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_wait = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_wait)
        return grad, None, None


class Waiting(nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.waits = forward, backward

    def forward(self, x):
        return Wait.apply(x, *self.waits)


def test_the_clock_counts_its_module_forward_and_backward_and_nothing_else():
    before, head, behind = Waiting(0.2, 0.2), Waiting(0.02, 0.04), Waiting(0.2, 0.2)
    with bench.head_clock(head, CPU) as seconds:
        behind(head(before(torch.ones(3, requires_grad=True)))).sum().backward()
    assert 0.06 <= seconds() < 0.2


def test_a_vit_with_its_class_token():
    tokens = {"last_stride": 2, "class_token": "beside", "reduce": "auto", "heads": ["gap", "mpncov+seb"]}
    gap, seb = bench.measure_steps(filled(reference="gap", **tokens), "test_vit", CPU)
    assert (gap["positions"], gap["channels"], gap["vector"]) == (16, 64, 64 + 64)
    assert (seb["positions"], seb["channels"], seb["vector"]) == (16, 12, 78 + 64)
    assert seb["ratio_to_gap"] > 0


def test_heads_that_read_a_vit_have_its_overlapping_patches_and_their_loss():
    tokens = {"last_stride": 2, "class_token": "beside", "reduce": "auto", "patch_stride": 12, "reference": "token"}
    heads = ["token", "transfg", "aftrans", "svpn"]
    rows = {row["head"]: row for row in bench.measure_steps(filled(heads=heads, **tokens), "test_vit", CPU)}
    assert [row["class_token"] for row in rows.values()] == [None, None, None, "beside"]
    assert {name: row["positions"] for name, row in rows.items()} == {
        "token": 1,
        "transfg": 1 + 2,
        "aftrans": 2,
        "svpn": 25,
    }
    student = bench.build(filled(**tokens), "test_vit", "transfg", CPU)
    scores, added = student.model.forward_training(student.model.forward_features(student.images), student.targets)
    expected = nn.functional.cross_entropy(scores, student.targets) + added.terms["contrast"]
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in student.model.named_parameters() if p.grad is not None}
    student.step()
    for name, gradient in gradients.items():
        torch.testing.assert_close(student.model.get_parameter(name).grad, gradient, rtol=1e-5, atol=1e-7)


def test_cpu_time_does_not_count_waiting():
    """Nor other work on the machine."""
    clock = trainee("gap", cpu_time=True).clock
    assert measure.seconds(lambda: time.sleep(0.3), CPU, clock) < 0.1
    assert measure.seconds(lambda: sum(range(1_000_000)), CPU, clock) > 1e-3
    head = Waiting(0.3, 0.3)
    with bench.head_clock(head, CPU, clock) as seconds:
        head(torch.ones(3, requires_grad=True)).sum().backward()
    assert seconds() < 0.3


def test_cpu_time_is_for_the_cpu(monkeypatch):
    monkeypatch.setattr(bench, "pick_device", lambda name: torch.device("meta"))
    with pytest.raises(ArgumentError) as error:
        bench.run(StepBench(**SMALL, cpu_time=True))
    assert error.value.argument == "cpu_time"


def test_the_clock_leaves_no_hooks_behind_an_error():
    head = Waiting(0.0, 0.0)
    with pytest.raises(ValueError, match="of the test"), bench.head_clock(head, CPU):
        raise ValueError("of the test")
    assert not head._forward_hooks
    assert not head._forward_pre_hooks


# --- the step ----------------------------------------------------------------------------------------------------


def test_a_step_is_one_update_by_gradient_descent():
    student = trainee()
    twin = copy.deepcopy(student.model)
    loss = nn.functional.cross_entropy(twin(student.images), student.targets)
    parameters = dict(twin.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()))
    rate, decay = 1e-4, 1e-4  # the first step has no momentum yet
    expected = {n: p - rate * (g + decay * p) for (n, p), g in zip(parameters.items(), grads, strict=True)}
    student.step()
    for name, parameter in student.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("amp", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_reaches_the_head_as_it_comes_and_every_step_updates(amp, dtype):
    student = trainee(amp=amp, img_size=32, reduce=3)
    seen = []
    student.model.head.register_forward_hook(lambda module, args, out: seen.extend((args[0].dtype, out.dtype)))
    before = [parameter.clone() for parameter in student.model.head.parameters()]
    student.step()
    assert seen == [dtype, torch.float32]
    assert all(not torch.equal(a, b) for a, b in zip(before, student.model.head.parameters(), strict=True))


def test_the_reduction_is_for_heads_that_need_it():
    assert trainee("mpncov").model.head.channels == 8
    assert trainee("gap").model.head.channels == 512
    assert trainee("mpncov", reduce="auto").model.head.channels == 512


def test_options_reach_the_model():
    student = trainee("gap", channels_last=True, last_stride=2)
    assert student.images.is_contiguous(memory_format=torch.channels_last)
    assert student.model.forward_features(student.images).shape[-2:] == (2, 2)
    assert trainee("gap", last_stride=1).model.forward_features(student.images).shape[-2:] == (4, 4)


def test_a_backbone_that_is_built_for_one_size_is_built_for_this_one():
    config = filled(img_size=32, last_stride=2)
    student = bench.build(config, "test_vit", "gap", CPU)
    student.step()
    assert student.images.shape[-2:] == (32, 32)


# --- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_a_step_with_weights_and_momentum():
    student, (peak, held) = bench.with_memory(trainee, CPU)
    assert held is None  # nothing is taken from a device
    assert not student.optimiser.state  # it is reset
    assert all(parameter.grad is None for parameter in student.model.parameters())
    weights = sum(parameter.nbytes for parameter in student.model.parameters())
    student.step()
    lasting = student.lasting_bytes()
    assert lasting >= 2 * weights + student.images.nbytes  # momentum is as large as the weights
    assert peak > lasting + weights  # and so are the gradients


class Allocator:
    """Counts as a CUDA device does, for a trainee whose numbers are known."""

    def __init__(self):
        self.allocated, self.reserved, self.steps = 100, 200, 0
        self.reset_peaks()

    def reset_peaks(self, device=None):
        self.peaks = self.allocated, self.reserved

    def grow(self, allocated, reserved):
        self.allocated, self.reserved = self.allocated + allocated, self.reserved + reserved

    def make(self):
        self.grow(50, 60)  # weights
        return self

    def step(self):
        self.steps += 1
        if self.steps == 1:
            self.grow(7, 9)  # what tuning leaves behind
        if self.steps == 3:
            self.grow(3, 4)  # what a recorded graph keeps
        self.peaks = self.allocated + 1000, self.reserved + 1500

    def reset(self):
        pass


def test_memory_on_cuda_is_weights_activations_and_recordings_but_not_tuning(monkeypatch):
    counts = Allocator()
    replacements = {
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device: counts.allocated,
        "memory_reserved": lambda device: counts.reserved,
        "reset_peak_memory_stats": counts.reset_peaks,
        "max_memory_allocated": lambda device: counts.peaks[0],
        "max_memory_reserved": lambda device: counts.peaks[1],
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    _, memory = bench.with_memory(counts.make, torch.device("cuda"))
    assert memory == (50 + 3 + 1000, 60 + 4 + 1500)


# --- the benchmark -----------------------------------------------------------------------------------------------


@pytest.fixture
def known_times(monkeypatch):
    """Steps of known duration in place of real ones; returns the heads in the order of their steps."""
    order = []
    seconds = {"gap": (0.10, 0.01, 0.04, 0.01), "isqrt": (0.20, 0.08, 0.05, 0.02), "mpncov+seb": (0.25, 0.05, 0.06, 0.03)}

    def timed(self):
        order.append(self.model.config["head"])
        # warming up is slow, and one disturbance must not show in the median
        return (9.0,) * 4 if len(order) <= 3 or len(order) == 6 else seconds[order[-1]]

    monkeypatch.setattr(bench.Trainee, "timed", timed)
    monkeypatch.setattr(bench, "with_memory", lambda make, device: (make(), (3 * 2**20, 5 * 2**20)))
    return order


def test_rows_follow_from_the_times_of_steps_in_turn(known_times, monkeypatch):
    monkeypatch.setattr(bench, "PAPER_BACKBONE", "resnet10t")
    heads = ["gap", "isqrt", "mpncov+seb"]
    config = filled(heads=heads, repeats=3, warmup=1)
    rows = bench.measure_steps(config, "resnet10t", CPU)
    assert known_times == heads * 4
    gap, isqrt, seb = rows
    assert [row["step_seconds"] for row in rows] == [0.10, 0.20, 0.25]
    assert [row["ratio_to_isqrt"] for row in rows] == [0.5, 1.0, 1.25]
    assert [row["images_per_second"] for row in rows] == [20, 10, 8]
    assert [row["head_share"] for row in rows] == [0.1, 0.4, 0.2]
    assert [row["inference_seconds"] for row in rows] == [0.04, 0.05, 0.06]
    assert [row["inference_head_share"] for row in rows] == [0.25, 0.4, 0.5]
    assert [row["over_gap_seconds"] for row in rows] == pytest.approx([0, 0.10, 0.15])
    assert (seb["channels"], seb["vector"], gap["channels"]) == (8, 36, 512)
    assert (isqrt["peak_mib"], isqrt["held_mib"]) == (3, 5)
    assert [row["paper_seconds"] for row in rows] == [None, 0.28, 0.31]
    assert [row["paper_mib"] for row in rows] == [None, 4345, 4501]


def test_the_papers_numbers_are_in_rows_of_its_backbone_only(known_times):
    config = filled(heads=["isqrt"])
    (row,) = bench.measure_steps(config, "resnet10t", CPU)
    assert row["paper_seconds"] is row["paper_mib"] is None


def test_a_head_that_does_not_fit_into_memory_has_a_row_without_numbers(known_times, monkeypatch):
    def too_large(config, backbone, head, device):
        if head == "isqrt":
            raise torch.OutOfMemoryError("too large")
        return trainee(head)

    monkeypatch.setattr(bench, "build", too_large)
    config = filled(heads=["gap", "isqrt"])
    gap, isqrt = bench.measure_steps(config, "resnet10t", CPU)
    assert gap.keys() == isqrt.keys()
    assert isqrt["step_seconds"] is isqrt["peak_mib"] is gap["ratio_to_isqrt"] is None
    assert gap["step_seconds"] > 0


def test_the_command_measures_real_steps_and_writes_them(tmp_path):
    out = tmp_path / "made" / "step.csv"
    bench.run(StepBench(**SMALL | {"heads": ["gap", "mpncov+seb", "gap"], "warmup": 0, "out": str(out)}))
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["head"] for row in rows] == ["gap", "mpncov+seb"]
    for row in rows:
        step, head, share = (float(row[name]) for name in ("step_seconds", "head_seconds", "head_share"))
        assert 0 < head < step
        assert share == pytest.approx(head / step, abs=1e-3)
        assert 0 < float(row["inference_seconds"]) < step
        assert 0 < float(row["inference_head_share"]) < 1
        assert float(row["images_per_second"]) == pytest.approx(2 / step, rel=1e-2)
        assert row["ratio_to_isqrt"] == ""  # the reference is not among the heads
        assert row["torch"] == torch.__version__
        # weights, momentum and gradients of 4.9 million parameters at least
        assert float(row["peak_mib"]) > 3 * 4 * 4.9e6 / 2**20


def test_what_was_measured_is_kept_when_a_later_backbone_cannot_follow(known_times, tmp_path):
    out = tmp_path / "a.csv"
    with pytest.raises(ValueError):
        bench.run(StepBench(**SMALL | {"backbones": ["resnet10t", "test_vit"], "heads": ["gap"], "out": str(out)}))
    assert out.read_text().splitlines()[1].startswith("resnet10t,gap")


@pytest.mark.parametrize(
    "options", [{"heads": ["gapp"]}, {"reference": "gapp"}, {"backbones": ["resnet500"]}, {"device": "abacus"}]
)
def test_unknown_names_are_refused_before_a_file_is_made(tmp_path, options):
    with pytest.raises((UnknownName, ArgumentError)):
        bench.run(StepBench(**SMALL | {"out": str(tmp_path / "made" / "a.csv")} | options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["batch", "img_size", "num_classes", "reduce"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ArgumentError) as error:
        StepBench(**{name: 0})
    assert error.value.argument == name


def test_defaults_follow_the_device_and_given_options_stay():
    gpu = measure.fill(StepBench(img_size=224), bench.DEFAULTS, torch.device("cuda"))
    # the paper trains Cars in batches of 10 with 256 channels, at 448 pixels by default
    assert (gpu.backbones, gpu.batch, gpu.img_size, gpu.reduce) == (["resnet50"], 10, 224, "auto")
    assert gpu.runs(torch.device("cuda")) >= 4  # graphs are recorded by the third step
    assert measure.fill(StepBench(reduce="auto"), bench.DEFAULTS, CPU).reduce == "auto"
    with pytest.raises(ArgumentError):
        StepBench(backbones=[])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
def test_steps_on_cuda(tmp_path, amp):
    out = tmp_path / "step.csv"
    bench.run(StepBench(**SMALL | {"heads": ["gap", "isqrt", "mpncov+seb"], "device": "cuda", "amp": amp, "out": str(out)}))
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert 0 < float(row["head_seconds"]) < float(row["step_seconds"])
        assert float(row["peak_mib"]) > 3 * 4 * 4.9e6 / 2**20
        # a little less than the tensors is possible: what is left of a block of another trainee may be used
        assert float(row["held_mib"]) > 0.9 * float(row["peak_mib"])
