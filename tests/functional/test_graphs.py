"""The book-keeping of recorded calls, with the recording itself replaced; the real one is in test_cuda.py."""

import pytest
import torch

from eigengrain.functional._cuda import graphs as _graphs


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
    monkeypatch.setattr(_graphs, "_Recording", Recording)
    monkeypatch.setattr(_graphs, "_recordable", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))
    calls = []

    @_graphs.replayed
    def double(x, *, times=2):
        calls.append(len(x))
        return times * x

    return double


def test_a_shape_is_recorded_when_it_comes_for_the_third_time(recorder):
    for turn in range(5):
        assert torch.equal(recorder(torch.ones(3)), torch.full((3,), 2.0))
        assert Recording.made == (turn >= 2)


def test_shapes_and_options_are_told_apart(recorder):
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


def test_what_cannot_be_recorded_is_called_and_said(recorder, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_graphs._Recording, "__init__", fail)
    recorder(torch.ones(2))
    recorder(torch.ones(2))
    with pytest.warns(UserWarning, match=r"not recorded, kernels are launched one by one \(out of memory\)"):
        assert torch.equal(recorder(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(recorder(torch.ones(2)), torch.full((2,), 2.0))


def test_on_the_cpu_it_is_the_function():
    plain = _graphs.replayed(lambda x: x + 1)
    assert torch.equal(plain(torch.zeros(2)), torch.ones(2))
