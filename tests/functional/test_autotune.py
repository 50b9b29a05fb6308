import json

import pytest
import torch

from eigengrain.functional import autotune, sqrt_covariance
from spectral_cases import F64, features, log_spectrum, relative


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "_memory", {})
    return tmp_path / "solvers.json"


def test_bounds_hold_at_condition_number_1e10():
    x = features(48, 120, log_spectrum(48, 1e10), seed=3, batch=3)
    exact = sqrt_covariance(x, solver="svd")
    for solver, bound in autotune.ERROR_BOUNDS.items():
        assert relative(sqrt_covariance(x, solver=solver), exact) <= bound
    x = x.float()
    low = sqrt_covariance(x, dtype=torch.float32)
    assert relative(low, sqrt_covariance(x.double(), solver="svd")) <= autotune.FLOAT32_ERROR_BOUND


def test_what_cannot_be_reached_is_refused():
    x = torch.randn(1, 3, 9, dtype=F64)
    sqrt_covariance(x, accuracy=1e-9)
    with pytest.raises(ValueError, match="accuracy=1e-15 was asked for, solver 'eigh' in float64 promises 1e-09"):
        sqrt_covariance(x, accuracy=1e-15)
    with pytest.raises(ValueError, match=r"in float32 promises 1e-05: use dtype=torch\.float64"):
        sqrt_covariance(x, accuracy=1e-8, dtype=torch.float32)


@pytest.mark.parametrize("shape, expected", [((2, 8, 20), "eigh"), ((2, 8, 8), "eigh"), ((2, 8, 2, 3), "gram")])
def test_the_cpu_goes_by_size(shape, expected):
    assert autotune.fastest(torch.randn(shape)) == expected


def test_measurements_survive_the_process(cache):
    autotune._remember("some chip, batch 4", {"eigh": 2.0, "products": 1.0})
    assert json.loads(cache.read_text()) == {"some chip, batch 4": {"eigh": 2.0, "products": 1.0}}
    autotune._memory.clear()
    assert autotune.measurements() == {"some chip, batch 4": {"eigh": 2.0, "products": 1.0}}


@pytest.mark.parametrize("content", ["", "not json", "[1, 2]", '{"a": 3}'])
def test_a_spoilt_file_is_measured_again(cache, content):
    cache.write_text(content)
    assert autotune.measurements() == {}


def test_a_folder_that_cannot_be_written_is_said_once_and_harmless(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("EIGENGRAIN_CACHE", str(blocked))
    monkeypatch.setattr(autotune, "_memory", {})
    with pytest.warns(UserWarning, match="could not be kept"):
        autotune._remember("key", {"eigh": 1.0})
    assert autotune._memory == {"key": {"eigh": 1.0}}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_measures_once(cache, monkeypatch):
    x = torch.randn(5, 32, 100, device="cuda")
    choice = autotune.fastest(x)
    assert choice in ("eigh", "products")
    (times,) = json.loads(cache.read_text()).values()
    assert choice == min(times, key=times.get)
    monkeypatch.setattr(autotune, "_time", None)
    assert autotune.fastest(x[:6]) == choice  # the same power of two: nothing is timed again
