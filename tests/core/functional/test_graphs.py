"""CUDA helpers with CUDA itself replaced; test_cuda.py tests them on a device."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from eigengrain.functional import eigen, sqrt_covariance
from eigengrain.functional._cuda import cusolver, graphs
from eigengrain.functional.graded_factors import resolve_fixed


class Recording:
    made = 0

    def __init__(self, function, tensors, options):
        type(self).made += 1
        self.function, self.options = function, options

    def replay(self, tensors):
        return self.function(*tensors, **self.options)


@pytest.fixture
def recorder(monkeypatch):
    Recording.made = 0
    monkeypatch.setattr(graphs, "_Recording", Recording)
    monkeypatch.setattr(graphs, "_recordable", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))
    calls = []

    @graphs.replayed
    def double(x, *, times=2):
        calls.append(len(x))
        return times * x

    return double


def test_a_shape_is_recorded_at_its_third_call(recorder):
    for turn in range(5):
        assert torch.equal(recorder(torch.ones(3)), torch.full((3,), 2.0))
        assert Recording.made == (turn >= 2)


def test_each_shape_and_option_has_its_own_recording(recorder):
    for _ in range(4):
        assert torch.equal(recorder(torch.ones(3), times=5), torch.full((3,), 5.0))
        assert torch.equal(recorder(torch.ones(3), times=7), torch.full((3,), 7.0))
        assert torch.equal(recorder(torch.ones(4), times=5), torch.full((4,), 5.0))
    assert Recording.made == 3


def test_the_oldest_shapes_are_forgotten(recorder):
    for size in range(1, 8):
        for _ in range(3):
            recorder(torch.ones(size))
    assert Recording.made == 7
    recorder(torch.ones(7))
    assert Recording.made == 7
    for _ in range(3):
        recorder(torch.ones(1))
    assert Recording.made == 8


def test_failed_recordings_warn_and_call_the_function(recorder, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphs._Recording, "__init__", fail)
    recorder(torch.ones(2))
    recorder(torch.ones(2))
    with pytest.warns(UserWarning, match=r"not recorded, kernels are launched one by one \(out of memory\)"):
        assert torch.equal(recorder(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(recorder(torch.ones(2)), torch.full((2,), 2.0))


def test_a_pool_that_the_allocator_has_freed_is_replaced(recorder, monkeypatch):
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    graphs._pool.cache_clear()

    class Refused(Recording):
        def __init__(self, *arguments):
            if graphs._pool(torch.device("cpu"), 0) == 0:
                raise RuntimeError("use_count > 0")
            super().__init__(*arguments)

    monkeypatch.setattr(graphs, "_Recording", Refused)
    for _ in range(4):
        assert torch.equal(recorder(torch.ones(2)), torch.full((2,), 2.0))
    assert Refused.made == 1
    graphs._pool.cache_clear()


def test_on_the_cpu_the_function_is_called():
    plain = graphs.replayed(lambda x: x + 1)
    assert torch.equal(plain(torch.zeros(2)), torch.ones(2))


def test_the_device_of_the_tensors_is_used(monkeypatch):
    """Tensors on cuda:1 are captured on a stream of cuda:1 although the current device is another."""
    second = torch.device("cuda", 1)
    entered, captured = [], {}

    class Stream:
        cuda_stream = 0

        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            assert other.device == self.device

    def capture(graph, **options):
        captured.update(options)
        return nullcontext()

    for name, fake in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "device": lambda device: entered.append(device) or nullcontext(),
        "CUDAGraph": object,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: entered[-1] == second,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    tensor = SimpleNamespace(device=second)
    tensor.clone = lambda: tensor
    graphs._Recording(lambda x: x, (tensor,), {})
    assert captured["stream"].device == second
    assert entered == [second]
    assert graphs.capturing(second)
    assert not graphs.capturing(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", ["eigh", "gram"])
def test_bad_samples_become_zero(monkeypatch, solver, dtype):
    """On CUDA nothing waits for a check: a bad sample gets a matrix and a gradient of zero, and is counted."""

    def solve(p):
        return *torch.linalg.eigh(p), torch.zeros(len(p), dtype=torch.int32)

    counts = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(cusolver, "available", lambda: True)
    monkeypatch.setattr(cusolver, "syev_batched_unchecked", solve)
    monkeypatch.setattr(eigen, "capturing", lambda device: False)
    monkeypatch.setattr(eigen._REPAIRED, "add_later", lambda count: counts.append(int(count)))
    monkeypatch.setitem(sqrt_covariance.__globals__, "resolve", resolve_fixed)
    x = torch.randn(4, 16, 50 if solver == "eigh" else 9)
    x[1, 0, 0], x[3, 2, 7] = torch.nan, torch.inf
    q, values = sqrt_covariance(x.requires_grad_(), True, solver=solver, dtype=dtype, return_eigenvalues=True)
    q.sum().backward()
    assert counts[0] == 2
    for result in (q, values, x.grad):
        size = result.flatten(1).abs().amax(1)
        assert size[[1, 3]].tolist() == [0, 0]
        assert (size[[0, 2]] > 0).all()


def test_threads_do_not_change_the_stream_of_a_handle_that_is_in_use(monkeypatch):
    """Each thread has its own stream; between the choice of the stream and the work no other thread chooses another."""
    stream, started = threading.local(), threading.Barrier(2)
    current, pairs = [], []

    class Library(dict):
        def __missing__(self, name):
            return self.set_stream if name == "cusolverDnSetStream" else self.work

        def set_stream(self, handle, number):
            current[:] = [number.value]
            time.sleep(0.01)  # other threads run during a call
            return 0

        def work(self, *arguments):
            pairs.append((current[0], stream.number))
            return 0

    monkeypatch.setattr(cusolver, "_library", Library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=stream.number))

    def run(number):
        stream.number = number
        started.wait()
        for _ in range(5):
            cusolver.syev_batched_unchecked(torch.eye(2).repeat(3, 1, 1))

    monkeypatch.setattr(cusolver, "_handle", lambda index: (None, None))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (1, 2)))
    assert {own for _, own in pairs} == {1, 2}
    assert all(chosen == own for chosen, own in pairs)


def test_cusolver_status_is_checked(monkeypatch):
    monkeypatch.setattr(cusolver, "_library", lambda: {"good": lambda *arguments: 0, "bad": lambda *arguments: 7})
    cusolver._call("good", 1)
    with pytest.raises(RuntimeError, match=r"bad .* 7"):
        cusolver._call("bad")
