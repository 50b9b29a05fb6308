"""Random feature maps through every route of the square root of a covariance.

    python -m tests.fuzz --samples 100000 --seed 0 --device cpu

A sample is one feature map, forward and backward with a random upstream gradient. Three properties are checked:

- the matrix and the gradient are finite (in float16, where a correct gradient may overflow, not NaN);
- the gradient of float32 and float64 features is at most (1 + 1e-6) times its bound: √(2/N) ‖G‖, with the Scaling Eigen
  Branch (√2 (1 + s) + ‖Q‖) ‖G‖/√N. The bound is claimed for every route but ``newton-schulz``, which is not a root, and for
  the full spectrum or a cut with the projector held fixed;
- a float64 sample with condition number below 1e6 (zero eigenvalues aside) is the same alone and in a batch, to 1e-12.
  Gradients are compared relative to the larger of ‖∂l/∂X‖ and √(2/N) ‖G‖, since that of some G is zero. Left out are cuts
  between eigenvalues closer than 1e-3 of the largest, whose derivative enlarges rounding by as much, and, for ``products``,
  zero eigenvalues, whose gradient it approximates. On CUDA, where a batch of one takes other kernels, which round
  differently, a sample alone is a batch of copies of it.
"""

import argparse
import functools
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eigengrain.functional import EigenSubset, isqrt_covariance, sqrt_covariance, sqrt_covariance_of_subsets

F64 = torch.float64
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BOUND, BATCH, CONDITION, GAP = 1 + 1e-6, 1e-12, 1e6, 1e-3
SPECTRAL = ("eigh", "gram", "svd", "eigh-float32", "gram-float32", "svd-float32")
ROUTES = (*SPECTRAL, "products", "products-float32", "newton-schulz")
LOW = tuple(route for route in ROUTES if route.endswith("-float32"))
KINDS = "gaussian rank copies sum dead repeated condition clusters relu sparse offset constant".split()


@dataclass
class Case:
    """A batch of samples, and the options they are computed with."""

    route: str
    x: Tensor
    seb: bool
    subset: str | None
    cut: str
    together: bool  # by sqrt_covariance_of_subsets

    def __call__(self, x: Tensor) -> Tensor:
        if self.route == "newton-schulz":
            return isqrt_covariance(x, 5)
        solver, dtype = self.route.removesuffix("-float32"), torch.float32 if self.route in LOW else F64
        if self.together:
            subsets = ["top:1", self.subset or "all"]
            return sqrt_covariance_of_subsets(x, subsets, self.seb, self.cut, solver, dtype=dtype)[0][1]
        return sqrt_covariance(x, self.seb, self.subset, self.cut, solver, dtype=dtype)

    def __str__(self) -> str:
        options = f"seb={self.seb} subset={self.subset} cut={self.cut} together={self.together}"
        return f"{self.route} {tuple(self.x.shape)} {str(self.x.dtype)[6:]} {options}"


def spectrum(pick: random.Random, kind: str, rank: int) -> Tensor:
    """Descending singular values: equal, logarithmic down to 1e-8, or clustered."""
    if kind == "repeated":
        return torch.ones(rank, dtype=F64)
    sigma = torch.logspace(0, -pick.uniform(0, 8), rank, dtype=F64)
    return 10 ** sigma.log10().mul(2).round().div(2) if kind == "clusters" else sigma


def draw(pick: random.Random, d: int, n: int, dtype: torch.dtype) -> Tensor:
    """One feature map (d, n)."""
    g, kind = torch.Generator().manual_seed(pick.randrange(2**31)), pick.choice(KINDS)
    normal = functools.partial(torch.randn, generator=g, dtype=F64)
    x, half = normal(d, n), d // 2
    if kind == "rank":
        rank = pick.randint(0, d)
        x = normal(d, rank) @ normal(rank, n)
    elif kind == "copies":
        x[half : 2 * half] = x[:half]
    elif kind == "sum":
        x[-1] = x[:-1].sum(0)
    elif kind == "dead":
        x[torch.rand(d, generator=g) < 0.4] = pick.choice([0.0, 1.0, -3.7])
    elif kind in ("repeated", "condition", "clusters"):
        rank = pick.randint(0, min(d, n - 1))
        u, v = normal(d, rank), normal(n, rank)
        x = (torch.linalg.qr(u)[0] * spectrum(pick, kind, rank)) @ torch.linalg.qr(v - v.mean(0))[0].mT * math.sqrt(n)
    elif kind == "relu":
        x = x.relu()
    elif kind == "sparse":
        x = x * (torch.rand(n, generator=g) < 0.2)
    elif kind == "offset":
        x = x + 10 ** pick.uniform(-2, 4)
    elif kind == "constant":
        x = torch.full_like(x, pick.uniform(-5, 5))
    low, high = (-7, 4) if dtype == torch.float16 else (-30, 30)
    x = x * 10 ** (pick.uniform(low, high) if pick.random() < 0.5 else pick.uniform(-2, 2))
    return x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)


def draw_case(pick: random.Random) -> Case:
    d = pick.choice([1, 2, 2, 3, 3, 4, 5, 6, 8, 8, 12, 16, 24]) if pick.random() < 0.96 else pick.choice([32, 48, 64])
    n = max(pick.choice([1, 2, 3, d - 1, d, d + 1, d + 2, 2 * d, 4 * d, pick.randint(1, 100)]), 1)
    route, dtype = pick.choice(ROUTES), pick.choice(DTYPES)
    subset, cut = None, "exact"
    if route in SPECTRAL and pick.random() < 0.5:
        k = pick.randint(1, d)
        subset = pick.choice([f"top:{k}", f"last:{k}", f"top:1+last:{k}", f"~(~(top:{k}))"])
        cut = pick.choice(["exact", "projector"])
    x = torch.stack([draw(pick, d, n, dtype) for _ in range(pick.choice([1, 2, 3, 6, 12]))])
    together = route in SPECTRAL and pick.random() < 0.3
    return Case(route, x, route != "newton-schulz" and pick.random() < 0.5, subset, cut, together)


def upstream(pick: random.Random, matrix: Tensor) -> Tensor:
    """Gradients of norm 1: random, one entry, along the matrix, or between two eigenvectors, where the bound is sharp."""
    g = torch.Generator().manual_seed(pick.randrange(2**31))
    out = torch.randn(matrix.shape, generator=g, dtype=F64)
    d = matrix.shape[-1]
    for sample in range(len(out)):
        kind, i, j = pick.randrange(5), pick.randrange(d), pick.randrange(d)
        if kind == 0:
            out[sample] = 0
            out[sample, i, j] = 1
        elif kind == 1 and matrix[sample].abs().max() > 0:
            out[sample] = matrix[sample] / matrix[sample].abs().max()
        elif kind < 4 and matrix[sample].isfinite().all():
            u = torch.linalg.eigh(matrix[sample])[1]
            out[sample] = torch.outer(u[:, i], u[:, j]) + torch.outer(u[:, j], u[:, i])
    return out / torch.linalg.matrix_norm(out, keepdim=True)


def forward_backward(case: Case, x: Tensor, g: Tensor | None, pick: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Matrix, upstream gradient and gradient, in float64 on the CPU."""
    x = x.clone().requires_grad_()
    a = case(x)
    g = upstream(pick, a.detach().cpu().to(F64)).to(a.dtype) if g is None else g.to(a.dtype)
    (dx,) = torch.autograd.grad(a, x, g.to(a.device))
    return a.detach().cpu().to(F64), g.to(F64), dx.cpu().to(F64)


def bounds(case: Case, eigenvalues: Tensor) -> Tensor | None:
    """The largest ratio ‖∂l/∂X‖/‖∂l/∂A‖ of each sample; None if no bound is claimed."""
    if case.route == "newton-schulz" or (case.subset and case.cut == "exact" and eigenvalues.shape[-1] > 1):
        return None
    root_n = math.sqrt(case.x.shape[-1])
    if not case.seb:
        return torch.full_like(eigenvalues[:, 0], math.sqrt(2) / root_n)
    s = (eigenvalues * torch.exp(-2 * eigenvalues)).sum(-1).sqrt()
    return (math.sqrt(2) * (1 + s) + eigenvalues.sum(-1).sqrt()) / root_n


def indices(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def comparable(case: Case, eigenvalues: Tensor) -> Tensor:
    """Samples whose result must not depend on the batch."""
    if case.x.dtype != F64 or case.route in LOW:
        return torch.zeros(len(eigenvalues), dtype=torch.bool)
    size = eigenvalues / eigenvalues[:, :1].clamp_min(1e-300)
    ok = ((size > 1 / CONDITION) | ((size < 1e-30) & (case.route != "products"))).all(-1)
    kept = EigenSubset.parse(case.subset).mask(size.shape[-1], size.device)
    gaps = torch.where(kept[1:] != kept[:-1], -size.diff(dim=-1), 1.0)
    return ok & (gaps > GAP).all(-1)


@dataclass
class Tally:
    samples: int = 0
    ratio: float = 0.0
    difference: float = 0.0
    compared: int = 0
    failures: list[str] = field(default_factory=list)


def check(case: Case, pick: random.Random, device: str, tally: Tally) -> Iterator[tuple[int, str]]:
    """Failed samples and their problems."""
    x, n = case.x.to(device), case.x.shape[-1]
    a, g, dx = forward_backward(case, x, None, pick)
    for name, result in (("matrix", a), ("gradient", dx)):
        bad = result.isnan() if x.dtype == torch.float16 else ~result.isfinite()
        yield from ((sample, f"the {name} is not finite") for sample in indices(bad.flatten(1).any(1)))
    xc = case.x.to(F64) - case.x.to(F64)[..., :1]
    sigma = torch.linalg.svdvals((xc - xc.mean(-1, keepdim=True)) / math.sqrt(n))
    eigenvalues = torch.nn.functional.pad(sigma.square(), (0, x.shape[1] - sigma.shape[-1]))
    bound = bounds(case, eigenvalues)
    if bound is not None and x.dtype in (torch.float32, F64):
        ratios = dx.flatten(1).norm(dim=1) / (bound * g.flatten(1).norm(dim=1))
        tally.ratio = max(tally.ratio, float(ratios.nan_to_num().max()))
        yield from ((sample, f"the gradient is {ratios[sample]:.9f} times its bound") for sample in indices(ratios > BOUND))
    for sample in indices(comparable(case, eigenvalues)) if len(x) > 1 else ():
        alone = [sample] * (len(x) if x.is_cuda else 1)
        b, _, db = (result[:1] for result in forward_backward(case, x[alone], g[alone], pick))
        one = slice(sample, sample + 1)
        difference = float((b - a[one]).norm() / a[one].norm().clamp_min(1e-300))
        difference = max(difference, float((db - dx[one]).norm()) / max(float(dx[sample].norm()), math.sqrt(2 / n)))
        tally.difference, tally.compared = max(tally.difference, difference), tally.compared + 1
        if not difference <= BATCH:
            yield sample, f"alone it differs by {difference:.1e}"


def run_case(number: int, seed: int, device: str, tallies: dict[str, Tally]) -> int:
    """Draw and check one batch; returns its number of samples."""
    pick = random.Random(f"{seed}/{number}")
    case = draw_case(pick)
    tally, name = tallies[case.route], f"--seed {seed} --only {number}: {case}"
    try:
        tally.failures += [f"{name}, sample {sample}: {problem}" for sample, problem in check(case, pick, device, tally)]
    except Exception as error:
        tally.failures.append(f"{name}: {error!r}")
    tally.samples += len(case.x)
    return len(case.x)


def fuzz(
    samples: int, seed: int = 0, device: str = "cpu", seconds: float = math.inf, only: int | None = None
) -> dict[str, Tally]:
    """Run at least ``samples`` samples, or the batch ``only``; stops early after ``seconds`` or on Ctrl-C."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    start = shown = time.monotonic()
    done, number = 0, 0 if only is None else only
    try:
        while done < samples and time.monotonic() - start < seconds:
            done += run_case(number, seed, device, tallies)
            number += 1
            if only is not None:
                break
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                failures = sum(len(tally.failures) for tally in tallies.values())
                print(f"{done} of {samples} samples, {failures} failures, {shown - start:.0f} s", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"stopped after {done} of {samples} samples", file=sys.stderr)
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the square root of a covariance.")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--only", type=int, help="number of one batch to run again")
    options = parser.parse_args()
    tallies = fuzz(options.samples, options.seed, options.device, 60 * options.minutes, options.only)
    print(f"{'route':17}{'samples':>9}{'worst ratio':>14}{'compared':>10}{'difference':>12}{'failures':>10}")
    for route in ROUTES:
        t = tallies[route]
        print(f"{route:17}{t.samples:9}{t.ratio:14.9f}{t.compared:10}{t.difference:12.1e}{len(t.failures):10}")
    failures = [failure for route in ROUTES for failure in tallies[route].failures]
    done = sum(tally.samples for tally in tallies.values())
    print(f"{done} samples, {len(failures)} failures, seed {options.seed}, {options.device}")
    for failure in failures[:50]:
        print(failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
