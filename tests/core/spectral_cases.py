"""Matrices and features with a prescribed spectrum for the oracle tests, and a helper for tests of errors."""

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from eigengrain.errors import ArgumentError, UnknownName

mpmath.mp.dps = 60  # the reference arithmetic of every oracle

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthonormal(rows: int, columns: int, g: torch.Generator, batch: int = 1, centred: bool = False) -> Tensor:
    """(batch, rows, columns) with orthonormal columns; with ``centred`` each column sums to zero."""
    a = torch.randn(batch, rows, columns, generator=g, dtype=F64)
    if centred:
        a = a - a.mean(1, keepdim=True)
    return torch.linalg.qr(a)[0]


def log_spectrum(count: int, kappa: float) -> Tensor:
    """Singular values from 1 down to κ^−½, so that the covariance has condition number κ."""
    return torch.logspace(0, -math.log10(kappa) / 2, count, dtype=F64) if count > 1 else torch.ones(count, dtype=F64)


def features(d: int, n: int, sigma: Tensor, seed: int = 0, batch: int = 1) -> Tensor:
    """(batch, d, n) whose covariance has the eigenvalues σ² and zeros; needs len(σ) ≤ min(d, n − 1)."""
    g = generator(seed)
    u = orthonormal(d, len(sigma), g, batch)
    v = orthonormal(n, len(sigma), g, batch, centred=True)
    return (u * sigma) @ v.mT * math.sqrt(n)


def matrix(values: Tensor, seed: int = 0, batch: int = 1) -> Tensor:
    """(batch, d, d) symmetric with the given eigenvalues."""
    u = orthonormal(len(values), len(values), generator(seed), batch)
    p = (u * values) @ u.mT
    return (p + p.mT) / 2


def relative(a: Tensor, b: Tensor) -> float:
    """Largest relative error in the Frobenius norm over a batch."""
    a, b = a.detach().double(), b.detach().double()
    return float((torch.linalg.vector_norm(a - b, dim=(-2, -1)) / torch.linalg.vector_norm(b, dim=(-2, -1))).max())


def central_difference(f, x: Tensor, direction: Tensor, step: float) -> Tensor:
    """Fourth-order central difference of f at x along a direction."""
    h = step
    return (8 * (f(x + h * direction) - f(x - h * direction)) - (f(x + 2 * h * direction) - f(x - 2 * h * direction))) / (
        12 * h
    )


MPS = torch.device("mps")


class OnMps(torch.Tensor):
    """A tensor that claims to be on MPS and refuses float64, as that device does; it is computed on the CPU."""

    @property
    def device(self):
        return MPS

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        here = tree_map_only(OnMps, lambda t: t.as_subclass(torch.Tensor), (arguments, options or {}))
        out = function(*here[0], **here[1])
        if function is torch.Tensor.device.__get__:
            return MPS
        return out if function is torch.Tensor.cpu or isinstance(out, torch.Size) else on_mps(out)


def on_mps(result):
    """A tensor, or every tensor of a result, on that device."""
    assert all(t.dtype != F64 for t in tree_leaves(result) if isinstance(t, Tensor)), "MPS has no float64"
    return tree_map_only(Tensor, lambda t: t.as_subclass(OnMps), result)


class MpsHere(TorchFunctionMode):
    """Lets the CPU act as the MPS device for tensors that are created there or moved to it."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        to = [a for a in (*arguments[1:], options.get("device")) if isinstance(a, torch.device)]
        if MPS not in to:
            return function(*arguments, **options)
        if "device" in options:
            options["device"] = "cpu"
        return on_mps(function(*("cpu" if isinstance(a, torch.device) else a for a in arguments), **options))


def refused(call: Callable[[], object]) -> str:
    """Call a function that must raise; return the argument, or the kind of name, that its error is about."""
    with pytest.raises((ArgumentError, UnknownName)) as caught:
        call()
    error = caught.value
    return error.argument if isinstance(error, ArgumentError) else error.kind
