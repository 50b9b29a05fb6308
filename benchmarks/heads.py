"""Time and memory of every head on one feature map."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks import measure
from benchmarks.functional import solver_of
from benchmarks.measure import Advance, Case, Row, ignore
from eigengrain.environment import pick_device
from eigengrain.heads import CovarianceHead, Head, create_head, list_heads


@dataclass(frozen=True)
class HeadsBench(measure.Bench):
    """Measure heads on one feature map.

    Args:
        heads: heads to measure, such as [gap,mpncov+seb]; all by default. The reference is always measured.
        batch: feature maps in a batch; 4 on the CPU and 32 elsewhere by default.
        channels: channels of the feature map.
        side: side of the square feature map: 28 is the map of a ResNet with last_stride=1 at 448 pixels.
        reference: head that times are divided by in the column of ratios.
        dtype: precision of the feature map.
    """

    heads: list[str] | None = None
    batch: int | None = None
    channels: int = 256
    side: int = 28
    reference: str = "isqrt"
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        measure.check_sizes(self, "batch", "channels", "side", "heads")


def build_heads(names: list[str], channels: int, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Head]:
    """Heads with default options; parameters stay in float32 for 16-bit features, as in mixed precision."""
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    heads = {}
    with torch.random.fork_rng(devices=[]):
        for name in names:
            torch.manual_seed(seed)
            heads[name] = create_head(name, channels).to(device, parameters)
    return heads


def measure_heads(names: list[str], config: HeadsBench, device: torch.device, advance: Advance = ignore) -> list[Row]:
    """Measure heads, including the reference, on one random map in turn, with gradients of map and parameters."""
    config = measure.fill(config, {"batch": (4, 32)}, device)
    shape, dtype = (config.batch or 0, config.channels, config.side, config.side), getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(shape, generator=generator).relu().to(device, dtype).requires_grad_()  # as after a ReLU
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    heads = build_heads(names, config.channels, device, dtype, config.seed)
    cases = {}
    for name, head in heads.items():
        grad = torch.randn(shape[0], head.out_features, generator=generator).to(device, out_dtype)
        cases[name] = Case(head, x, grad, [*head.parameters(), *head.buffers()])
    warmup = config.runs(device)
    figures = measure.time_and_memory(cases, config.reference, repeats=config.repeats, warmup=warmup, advance=advance)

    def solver(name: str, head: Head) -> str | None:
        if figures[name]["forward_ms"] is None or not isinstance(head, CovarianceHead) or head.normalise != "sqrt":
            return None
        return solver_of(head.solver, x)

    return [
        {
            **dict(zip(("batch", "channels", "height", "width"), shape, strict=True)),
            "head": name,
            "vector": head.out_features,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "solver": solver(name, head),
            **figures[name],
            "features": config.dtype,
            "repeats": config.repeats,
        }
        for name, head in heads.items()
    ]


def run(config: HeadsBench) -> None:
    """``python -m benchmarks heads``."""
    device = pick_device(config.device)
    names = measure.check_names("head", [*(config.heads or list_heads(any_backbone=True)), config.reference], list_heads())
    path = config.path("heads", device)
    with measure.progress(len(names) * (config.runs(device) + config.repeats + 1)) as advance:
        rows = measure_heads(names, config, device, advance)
    measure.save(path, rows, device)
    numbers = ("forward_ms", "forward_backward_ms", f"ratio_to_{config.reference}", "peak_mib", "saved_mib")
    rows.sort(key=lambda row: row["forward_backward_ms"] or math.inf)
    table = measure.format_table(rows, ("head", "vector", "solver", *numbers))
    measure.finish({"rows": rows}, [path], device, table)
