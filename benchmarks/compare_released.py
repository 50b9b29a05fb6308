"""Our SEB layer against released code, forward and backward, in one run.

    python benchmarks/compare_released.py --fast-mpn-cov PATH [--differentiable-svd PATH]

PATH is a checkout of the released project (fast-MPN-COV: the Newton–Schulz root of iSQRT-COV; DifferentiableSVD: the
paper's SEB, which needs CUDA). Repeats take turns, so that a disturbance of the machine meets everyone; times are medians
and the ratio is that of the medians. The layers, all on the same float32 features:

    ours           triu_vector(sqrt_covariance(x, seb=True)), float64 inside
    ours-mpncov    the same without the branch
    ours-isqrt     triu_vector(isqrt_covariance(x)), 5 Newton–Schulz steps, float64 inside
    newton-schulz  the released covariance, 5 steps, upper triangle, in float32
    released-seb   the released SEB module, float64 inside
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
from torch import Tensor

from eigengrain.environment import describe, pick_device
from eigengrain.files import writable, write_csv
from eigengrain.functional import isqrt_covariance, sqrt_covariance, triu_vector

Layer = Callable[[Tensor], Tensor]


def load(checkout: Path, file: str) -> ModuleType:
    """A module of released code from its file alone: the packages around it do not import any more."""
    path = checkout / "src" / "representation" / file
    spec = importlib.util.spec_from_file_location(f"released_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SystemExit(f"error: {path} is not there: give the path of the project's checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layers(args: argparse.Namespace, device: torch.device) -> dict[str, Layer]:
    found: dict[str, Layer] = {
        "ours": lambda x: triu_vector(sqrt_covariance(x, seb=True)),
        "ours-mpncov": lambda x: triu_vector(sqrt_covariance(x)),
        "ours-isqrt": lambda x: triu_vector(isqrt_covariance(x)),
    }
    mpncov = load(args.fast_mpn_cov, "MPNCOV.py")
    found["newton-schulz"] = lambda x: mpncov.TriuvecLayer(mpncov.SqrtmLayer(mpncov.CovpoolLayer(x), 5))
    if args.differentiable_svd and device.type == "cuda":
        seb = load(args.differentiable_svd, "SEB.py").SEB(input_dim=args.channels).to(device)
        found["released-seb"] = seb
    elif args.differentiable_svd:
        print("the released SEB calls .cuda(): skipped on the CPU", file=sys.stderr)
    return found


def seconds(layer: Layer, x: Tensor, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    torch.autograd.grad(layer(x).sum(), x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast-mpn-cov", type=Path, required=True, help="checkout of fast-MPN-COV")
    parser.add_argument("--differentiable-svd", type=Path, help="checkout of DifferentiableSVD (CUDA only)")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--side", type=int, default=28, help="of the square feature map")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="CSV file; benchmarks/released-DEVICE.csv by default")
    args = parser.parse_args()
    try:
        device = pick_device(args.device)
        path = writable(args.out or f"benchmarks/released-{device.type}.csv")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None

    torch.manual_seed(0)
    shape = (args.batch, args.channels, args.side, args.side)
    x = torch.randn(shape).relu().to(device).requires_grad_()
    contestants = layers(args, device)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(4 + args.repeats):
        for name, layer in contestants.items():
            t = seconds(layer, x, device)
            if turn >= 4:  # the first ones warm up
                times[name].append(t)

    medians = {name: 1e3 * median(runs) for name, runs in times.items()}
    rows = []
    print(f"features {shape}, {args.repeats} repeats in turn, forward + backward, {describe(device)['device_name']}")
    for name, ms in medians.items():
        ratio = medians["ours"] / ms
        fastest, slowest = 1e3 * min(times[name]), 1e3 * max(times[name])
        print(f"{name:14s} {ms:8.1f} ms  (from {fastest:.1f} to {slowest:.1f})   ours / this: {ratio:.2f}")
        rows.append(
            {
                "layer": name,
                "batch": args.batch,
                "channels": args.channels,
                "positions": args.side**2,
                "repeats": args.repeats,
                "forward_backward_ms": round(ms, 4),
                "fastest_ms": round(fastest, 4),
                "ours_over_this": round(ratio, 4),
                **describe(device),
            }
        )
    write_csv(path, rows)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
