"""The rule behind solver="auto" and the accuracy that every solver guarantees."""

import pytest
import torch
from spectral_cases import F64, features, log_spectrum, relative

from eigengrain.errors import ArgumentError
from eigengrain.functional import choose_solver, sqrt_covariance
from eigengrain.functional.sqrt_covariance import ERROR_BOUNDS

F32 = torch.float32


def test_every_solver_keeps_its_error_bound_at_condition_number_1e10():
    x = features(48, 120, log_spectrum(48, 1e10), seed=3, batch=3)
    exact = sqrt_covariance(x, solver="svd")
    for solver in ("eigh", "gram", "products"):
        assert relative(sqrt_covariance(x, solver=solver), exact) <= ERROR_BOUNDS[F64]
    x = x.float()
    low = sqrt_covariance(x, dtype=torch.float32)
    assert relative(low, sqrt_covariance(x.double(), solver="svd")) <= ERROR_BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype, accuracy", [(F64, 1e-15), (torch.float32, 1e-8)])
def test_accuracy_below_the_bound_is_refused(dtype, accuracy):
    x = torch.randn(1, 3, 9, dtype=F64)
    sqrt_covariance(x, accuracy=ERROR_BOUNDS[dtype], dtype=dtype)
    with pytest.raises(ArgumentError) as error:
        sqrt_covariance(x, accuracy=accuracy, dtype=dtype)
    assert (error.value.argument, error.value.value) == ("accuracy", accuracy)


@pytest.mark.parametrize(
    "device, batch, channels, positions, options, expected",
    [
        ("cpu", 32, 256, 784, {}, "eigh"),
        ("cpu", 32, 256, 256, {}, "eigh"),
        ("cpu", 32, 256, 255, {}, "gram"),
        ("mps", 32, 256, 784, {}, "eigh"),
        ("mps", 32, 256, 784, {"dtype": torch.float32}, "products"),
        ("mps", 32, 512, 196, {"dtype": torch.float32}, "products"),
        ("mps", 32, 256, 784, {"dtype": torch.float32, "spectrum": True}, "eigh"),
        ("mps", 32, 512, 196, {"dtype": torch.float32, "spectrum": True}, "gram"),
        ("cuda", 32, 256, 784, {}, "products"),
        ("cuda", 1, 256, 784, {}, "products"),
        ("cuda", 128, 512, 784, {}, "products"),
        ("cuda", 129, 512, 784, {}, "eigh"),  # batch × channels³ above 2³⁴
        ("cuda", 128, 256, 784, {}, "products"),
        ("cuda", 8, 1024, 1089, {}, "products"),
        ("cuda", 32, 1024, 1089, {}, "eigh"),
        ("cuda", 32, 256, 257, {}, "products"),
        ("cuda", 32, 256, 256, {}, "eigh"),  # rank N − 1: singular
        ("cuda", 32, 512, 196, {}, "gram"),
        ("cuda", 32, 256, 784, {"spectrum": True}, "eigh"),
        ("cuda", 32, 512, 196, {"spectrum": True}, "gram"),
        ("cpu", 32, 256, 784, {"dtype": torch.float32}, "eigh"),
        ("cuda", 32, 256, 784, {"dtype": torch.float32}, "products"),
        ("cuda", 32, 512, 196, {"dtype": torch.float32}, "products"),
        ("cuda", 129, 512, 784, {"dtype": torch.float32}, "eigh"),
        ("cuda", 129, 512, 196, {"dtype": torch.float32}, "gram"),
        ("cuda", 32, 256, 784, {"dtype": torch.float32, "spectrum": True}, "eigh"),
    ],
)
def test_rule(device, batch, channels, positions, options, expected):
    assert choose_solver(device, channels, positions, batch=batch, **options) == expected


@pytest.mark.parametrize(
    "shape, options, expected",
    [
        ((2, 8, 20), {}, ("cpu", 8, 20, F32, 2, False)),
        ((2, 8, 20), {"accuracy": 1e-6}, ("cpu", 8, 20, F64, 2, False)),
        ((2, 8, 20), {"dtype": F64}, ("cpu", 8, 20, F64, 2, False)),
        ((2, 8, 20), {"dtype": "float64"}, ("cpu", 8, 20, F64, 2, False)),
        ((3, 8, 2, 3), {"seb": True}, ("cpu", 8, 6, F32, 3, False)),
        ((2, 8, 20), {"subset": "top:3"}, ("cpu", 8, 20, F32, 2, True)),
        ((2, 8, 20), {"gradient": "taylor"}, ("cpu", 8, 20, F64, 2, True)),
        ((2, 8, 20), {"return_eigenvalues": True}, ("cpu", 8, 20, F32, 2, True)),
        ((2, 8, 20), {"dtype": F32}, ("cpu", 8, 20, F32, 2, False)),
    ],
)
def test_auto_passes_the_facts_to_the_rule(monkeypatch, shape, options, expected):
    calls = []

    def rule(device_type, channels, positions, dtype, *, batch, spectrum):
        calls.append((device_type, channels, positions, dtype, batch, spectrum))
        return "svd"

    monkeypatch.setitem(sqrt_covariance.__globals__, "choose_solver", rule)
    sqrt_covariance(torch.randn(shape), **options)
    assert calls == [expected]
