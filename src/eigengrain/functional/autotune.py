"""Which solver is fastest here: measured once for a kind of input, and remembered.

On the CPU the choice follows from the sizes. On CUDA the eigensolver and matrix products compete, and who wins depends on
the chip, the library and the batch: both are timed, forward and backward, when a size is first met, and the result is
kept in a file for later processes.
"""

import json
import math
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from eigengrain.functional.inputs import output_dtype

#: Relative error of Q in the Frobenius norm against a float64 SVD of the features, at condition number 1e10 of the
#: covariance and full rank. tests/functional/test_autotune.py holds them to it.
ERROR_BOUNDS = {"eigh": 1e-9, "gram": 1e-9, "svd": 1e-9, "products": 1e-9}
FLOAT32_ERROR_BOUND = 1e-5

_memory: dict[str, dict[str, float]] = {}


def cache_file() -> Path:
    """Where measurements are kept: ``EIGENGRAIN_CACHE``, or the user's cache folder."""
    folder = os.environ.get("EIGENGRAIN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "eigengrain"
    return Path(folder).expanduser() / "solvers.json"


def measurements() -> dict[str, dict[str, float]]:
    """Milliseconds by solver for every kind of input measured so far on this machine, in this and earlier processes."""
    if not _memory:
        try:
            stored = json.loads(cache_file().read_text())
            _memory.update({str(k): {str(s): float(t) for s, t in v.items()} for k, v in stored.items()})
        except (OSError, ValueError, AttributeError):
            pass  # no file, or not ours: measure again
    return _memory


def _remember(key: str, times: dict[str, float]) -> None:
    _memory[key] = times
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(_memory, indent=1, sort_keys=True))
        partial.replace(path)
    except OSError as error:
        warnings.warn(
            f"solver timings could not be kept in {path} ({error}); they are measured again next time", stacklevel=2
        )


def _round_up(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _key(x: Tensor, batch: int) -> str:
    name = torch.cuda.get_device_name(x.device)
    return f"{name}, torch {torch.__version__}, batch {batch}, channels {x.shape[1]}"


def _time(solver: str, batch: int, d: int, n: int, device: torch.device) -> float:
    """Median milliseconds of forward and backward with the branch, on random features."""
    from eigengrain.functional.sqrt_covariance import sqrt_covariance

    x = torch.rand(batch, d, n, device=device, generator=torch.Generator(device).manual_seed(0)).requires_grad_()
    grad = torch.ones(batch, d, d, device=device)
    times = []
    for attempt in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.autograd.grad(sqrt_covariance(x, True, solver=solver), x, grad)
        end.record()
        torch.cuda.synchronize(device)
        if attempt >= 3:  # the first ones load libraries and record graphs
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def fastest(x: Tensor) -> str:
    """The fastest of the solvers that are exact for these features (B, C, …) in float64."""
    d, n = x.shape[1], math.prod(x.shape[2:])
    if n < d:
        return "gram"
    if not x.is_cuda or n - 1 < d:
        return "eigh"
    batch = _round_up(len(x))
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return "products"  # nothing can be timed now; this one compiles and captures
    key = _key(x, batch)
    if key not in measurements():
        # timed as in training, also when the first call comes from an evaluation
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
            _remember(key, {solver: _time(solver, batch, d, n, x.device) for solver in ("eigh", "products")})
    times = measurements()[key]
    return min(times, key=lambda solver: times[solver])


def check_accuracy(accuracy: float, dtype: torch.dtype, solver: str, x: Tensor) -> None:
    """Refuse a route whose error bound is above what was asked for."""
    bound = FLOAT32_ERROR_BOUND if dtype == torch.float32 else ERROR_BOUNDS[solver]
    if accuracy < bound:
        work = "float32" if dtype == torch.float32 else "float64"
        raise ValueError(
            f"accuracy={accuracy:g} was asked for, solver {solver!r} in {work} promises {bound:g}: "
            + ("use dtype=torch.float64" if dtype == torch.float32 else f"ask for {bound:g} or more")
            + ("" if output_dtype(x) == torch.float64 else " (and float32 features carry 6e-8 at best)")
        )
