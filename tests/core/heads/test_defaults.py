"""Documented defaults of the heads: a head without options computes the same as one with the documented values."""

import pytest
import torch

from eigengrain.heads import create_head

DEFAULTS = {
    "bcnn": {"triangle": False, "eps": 1e-5},
    "bcnn-improved": {"triangle": False, "eps": 1e-5, "ridge": 1e-3},
    "cbp": {"out_features": 8192, "projection": "tensor-sketch", "seed": 0, "eps": 1e-5},
    "gp": {"k": 3, "class_rank": None},  # half of the channels
    "isice": {"iterations": 5, "eta": 5.0, "penalty": 0.01, "ridge": 0.01},
    "isqrt": {"steps": 5},
    "kp": {"order": 4, "sizes": 4096, "gamma": 1.0, "learnable": True, "seed": 0, "eps": 1e-6},
    "logchol": {"normalise": "log-cholesky", "epsilon": 1e-3, "isometric": False},
    "logcov": {"epsilon": 1e-3},
    "lrbp": {"project": 100, "rank": 8, "eps": 1e-4},
    "monet": {"compact": True, "out_features": 10_000, "seed": 0, "eps": 1e-6},
    "mpa": {"degree": 5},
    "mpncov+seb": {"path": "both", "factor": "qs", "subset": "all", "cut": "exact", "isometric": False},
    "mtp": {"degree": 10},
    "precision": {"iterations": 0, "ridge": 0.01},
    "run": {"iterations": 2, "epsilon": 0.5, "compact": False, "seed": 0, "resample": False, "eps": 1e-6},
    "svpn": {"rows": 32, "columns": None, "heads": 6, "power": 0.5, "iterations": 10, "eps": 1e-6, "seed": 0},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    x = torch.randn(2, 6, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    heads = []
    for options in ({}, DEFAULTS[name]):
        torch.manual_seed(0)
        heads.append(create_head(name, 6, **options).double())
    first, second = heads
    assert torch.equal(first(x), second(x))
    assert [p.shape for p in first.parameters()] == [p.shape for p in second.parameters()]
    assert [p.shape for p in first.classifier(4).parameters()] == [p.shape for p in second.classifier(4).parameters()]
