"""Our SEB layer against released code, forward and backward, in one run, on the same float32 features.

The layers: ``ours``, triu_vector(sqrt_covariance(x, seb=True)), with the default precision; ``ours-float64`` and
``ours-float32``, the same with one of them; ``ours-mpncov``, without the branch; ``ours-inference``, without gradients;
``ours-isqrt``, triu_vector(isqrt_covariance(x)), 5 Newton–Schulz steps; ``plain-newton-schulz``, 5 steps
in float32 with automatic differentiation, in ten lines; ``newton-schulz``, the released covariance, 5 steps and upper
triangle, in float32; ``released-seb``, the released SEB module, in float64 inside.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import Layer
from benchmarks.solvers import conditioned_features
from eigengrain.environment import pick_device
from eigengrain.errors import FileError
from eigengrain.functional import isqrt_covariance, sqrt_covariance, triu_vector
from eigengrain.functional.inputs import check_number


@dataclass(frozen=True)
class CompareReleased(measure.Bench):
    """Compare our layers with released code, in turn.

    Args:
        fast_mpn_cov: checkout of fast-MPN-COV, with the Newton–Schulz root of iSQRT-COV; without it that row is left out.
        differentiable_svd: checkout of DifferentiableSVD, with the SEB of the paper, which needs CUDA.
        batch: feature maps in a batch.
        channels: channels of the feature map.
        side: side of the square feature map.
        condition: condition number κ(P) of the features. Small singular values are decomposed again in float32, which takes
            longer the more of them there are; by default the features are noise after a ReLU, which has none.
    """

    fast_mpn_cov: str | None = None
    differentiable_svd: str | None = None
    batch: int = 10
    channels: int = 256
    side: int = 28
    condition: float | None = None
    repeats: int = 21

    def __post_init__(self) -> None:
        super().__post_init__()
        measure.check_sizes(self, "batch", "channels", "side")
        if self.condition is not None:
            check_number(self.condition, "condition", 1)


def accept_dashes(words: Sequence[str]) -> list[str]:
    """Options with dashes, such as --fast-mpn-cov, as options with underscores."""
    return [f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word for word in words]


def load(checkout: str, file: str) -> ModuleType:
    """Import a module of released code from its file alone, since the packages around it do not import any more."""
    path = Path(checkout) / "src" / "representation" / file
    spec = importlib.util.spec_from_file_location(f"released_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileError(path, "there is no such file; expected a checkout of the project")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """The covariance, coupled Newton–Schulz steps on P/tr P, and the upper triangle, as plain products for autograd."""
    x = x.flatten(2)
    x = x - x.mean(-1, keepdim=True)
    p = x @ x.mT / x.shape[-1]
    trace = p.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    y, z = p / trace, None
    eye = torch.eye(p.shape[-1], device=p.device)
    for step in range(steps):
        t = 1.5 * eye - 0.5 * (y if z is None else z @ y)
        y, z = y @ t, None if step == steps - 1 else t if z is None else t @ z
    return triu_vector(y * trace.sqrt())


def run(config: CompareReleased) -> None:
    """``python -m benchmarks compare_released``."""
    device = pick_device(config.device)
    named: dict[str, Layer] = {
        "ours": lambda x: triu_vector(sqrt_covariance(x, seb=True)),
        "ours-float64": lambda x: triu_vector(sqrt_covariance(x, seb=True, dtype=torch.float64)),
        "ours-float32": lambda x: triu_vector(sqrt_covariance(x, seb=True, dtype=torch.float32)),
        "ours-mpncov": lambda x: triu_vector(sqrt_covariance(x)),
        "ours-isqrt": lambda x: triu_vector(isqrt_covariance(x)),
        "plain-newton-schulz": plain_newton_schulz,
    }
    if config.fast_mpn_cov is not None:
        mpncov = load(config.fast_mpn_cov, "MPNCOV.py")
        named["newton-schulz"] = lambda x: mpncov.TriuvecLayer(mpncov.SqrtmLayer(mpncov.CovpoolLayer(x), 5))
    if config.differentiable_svd and device.type == "cuda":
        named["released-seb"] = load(config.differentiable_svd, "SEB.py").SEB(input_dim=config.channels).to(device)
    elif config.differentiable_svd:
        print("the released SEB calls .cuda(): skipped on the CPU", file=sys.stderr)
    path = config.path("released", device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(config.batch, config.channels, config.side, config.side, generator=generator)
    x = x.relu()
    if config.condition is not None:
        x = conditioned_features(config.condition, config.channels, config.side**2, config.batch, generator).features
        x = x.float().unflatten(-1, (config.side, config.side))
    x = x.to(device).requires_grad_()

    def work(layer: Layer) -> float:
        return measure.seconds(lambda: torch.autograd.grad(layer(x).sum(), x), device)

    def infer() -> float:
        with torch.inference_mode():
            return measure.seconds(lambda: named["ours"](x), device)

    works = {name: partial(work, layer) for name, layer in named.items()} | {"ours-inference": infer}
    warmup = 4 if config.warmup is None else config.warmup
    with measure.progress(len(works) * (warmup + config.repeats)) as advance:
        times = measure.take_turns(works, repeats=config.repeats, warmup=warmup, advance=advance)
    medians = {name: 1e3 * median(runs) for name, runs in times.items() if runs}
    rows = [
        {
            "layer": name,
            **measure.pick(config, "batch", "channels"),
            "positions": config.side**2,
            "condition": config.condition,
            "repeats": config.repeats,
            "forward_backward_ms": round(ms, 4),
            "fastest_ms": round(1e3 * min(times[name]), 4),
            "ours_over_this": measure.ratio(medians.get("ours"), ms),
        }
        for name, ms in medians.items()
    ]
    measure.save(path, rows, device)
    table = measure.format_table(rows, ("layer", "forward_backward_ms", "fastest_ms", "ours_over_this"))
    measure.finish({"rows": rows}, [path], device, table)
