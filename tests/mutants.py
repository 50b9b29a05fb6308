"""Mutation score of functional, heads and explain: each change listed here must make a test fail.

``python -m tests.mutants [TEXT ...]`` applies one change at a time to a temporary copy of src and tests, and runs the tests
of its room until one fails; TEXT selects changes by a part of their line. A line is ``old → new``, under the name of its
file, and ``old`` must be in that file exactly once. List only changes that change a result, not the speed or a message.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/eigengrain"
#: part of the package → its tests
ROOMS = {
    "functional": "tests/core",
    "heads": "tests/core/heads",
    "explain": "tests/explain",
    "data": "tests/data/test_boxes.py",
}
LEAST = 0.95  # of the changes must make a test fail

MUTANTS = """
functional/covariance.py
    x = x - x[..., :1] → x = x.clone()
    out[..., : d // 2, d // 2 :].mT → out[..., : d // 2, d // 2 :]
    row * d + col) → col * d + row)
    return covariance(x / scale, dtype=dtype), scale → return covariance(x, dtype=dtype), torch.ones_like(scale)
functional/eigen.py
    return d * torch.finfo( → return torch.finfo(
    _eigh_op(p.movedim(in_dims[0], 0), backend) → _eigh_op(p, backend)
    torch.linalg.eigh(item.cpu().double()) → torch.linalg.eigh(item.cpu())
functional/graded_factors.py
    if end <= begin: → if end <= begin + 1:
    z = torch.linalg.eigh(g[:, begin:] - w → z = torch.linalg.eigh(g[:, begin:] + 1e-3 * w
    t[:begin].addmm_(w.mT, t[begin:end]) → t[:begin].add_(0)
    change = torch.cat([-(z @ w), z], -1) → change = torch.cat([0 * (z @ w), z], -1)
    change = z - z @ w + w.mT → change = z - z @ w
    return 4 * math.sqrt(channels) → return 400 * math.sqrt(channels)
functional/inputs.py
    (9, 0), (10, 0)) → (9, 0))
    if dtype == torch.float64 or → if
functional/gradient_rules.py
    geometric_ratio(high, low, rule.degree + 1) → geometric_ratio(high, low, rule.degree)
    torch.arange(d, device=values.device) < keep → torch.arange(d, device=values.device) <= keep
functional/matrix_products.py
    torch.where(size > 0, size, 1.0) → torch.where(size > 1e-12, size, 1.0)
    torch.linalg.matrix_norm(p / largest, keepdim=True) * largest → torch.linalg.matrix_norm(p, keepdim=True)
    beta=c1, alpha=c2), beta=c0) → beta=c1, alpha=c2), beta=1)
    (QUINTIC[1],) * 6 → (QUINTIC[1],) * 0
    c + mirror * c.mT → c + c.mT
    product = (g * y).sum((-2, -1)) → product = (g * z).sum((-2, -1))
    _FAR = _NewtonStep.of(1 / _NULL_INVERSE, margin=2.0) → _FAR = _NewtonStep.of(1e-3, margin=2.0)
    + _REST → + _REST[:3]
    _LARGEST_TRACE * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps → _LARGEST_TRACE
functional/newton_schulz.py
    if steps <= _FLOAT32_STEPS else → if steps <= 40 else
    torch.promote_types(dtype, output_dtype(P)) → dtype
    - (da * a).sum((-2, -1)) → + (da * a).sum((-2, -1))
    LYAPUNOV_STEPS = 8 → LYAPUNOV_STEPS = 7
    return dx.sub_(dx.mean(-1, keepdim=True)) → return dx
    _SMALLEST_SQUARE = 1e-12 → _SMALLEST_SQUARE = 1e-1
    times * product[:, None, None] * scale.sqrt() → times * product[:, None, None]
functional/polar.py
    (_SAFE,) * 7 + _LAST → (_SAFE,) * 4 + _LAST
    _FINISH = (0.0, 2.5, -1.5) → _FINISH = _ONWARD
    _CONVERGED = (1e-3, 0.05, math.inf) → _CONVERGED = (1e3, 50.0, math.inf)
    _LAST_ENTRY = 4 → _LAST_ENTRY = 6
    k * _cap(length, → k * _cap(0 * length,
    2 * c - _times_transposed(p, c + _omega(c, polar, p)) → c + _omega(c, polar, p)
    return x / size, size, m / size.square() → return x / size, size, m / size
    q + inverse - 2 * projector, 2.0) → q + inverse, 2.0)
    * size.clamp_max(LARGEST_SCALE).square() → * size.square()
    | (trace(p) > 4 * largest_trace(p.dtype)) → | (trace(p) < 0)
    (relative <= floor) → (relative < 0)
    slope * _cap(frobenius(slope), → slope * _cap(0 * frobenius(slope),
    return dx.sub_(dx.mean(-1, keepdim=True)) → return dx
functional/scalar_functions.py
    self.definite = self.p <= 0 → self.definite = self.p < 0
    (a > self.floor).to(run.dtype) → torch.ones_like(run)
    b.clamp_min(self.floor) → b
functional/scaling_eigen_branch.py
    slope = (1 - 2 * values) → slope = (1 - values)
    torch.where(total <= 0, 0.0, root) → root
functional/spectral.py
    torch.where(relative <= rounding_floor(relative), 0.0, values) → values.clamp_min(0)
    if not smallest > floor → if smallest < floor
    _evaluate(P.detach(), SquareRoot() → _evaluate(P, SquareRoot()
functional/sqrt_covariance.py
    (sigma > floor) → (sigma > 0)
    return dx.sub_(dx.mean(-1, keepdim=True)) → return dx
    within & (lengths > length_floor → within & (lengths > 0 * length_floor
    sigma = sigma * scale → sigma = sigma
    * sigma * keep).sum → * sigma).sum
    accuracy < ERROR_BOUNDS[dtype] → accuracy <= ERROR_BOUNDS[dtype]
    accuracy < ERROR_BOUNDS[torch.float32] → False
    q * (1 + scaling_factor → q * (scaling_factor
functional/subsets.py
    max(round(d * 50 / 256), 1) → max(int(d * 50 / 256), 1)
    (upper - lower) / upper → (upper - lower) / lower
heads/base.py
    self.record_spectrum = before → self.record_spectrum = False
heads/bilinear.py
    root.abs() > rounding → root.abs() >= 0
    second_moment(to_compute(x)) → second_moment(x.to(output_dtype(x)))
    quintic_sqrt(moment + ridge) → quintic_sqrt(moment)
heads/compact.py
    self.index[0].unsqueeze(-1) + self.index[1] → self.index[1].unsqueeze(-1) + self.index[0]
    self._spectrum(x).sum(-2), n=self.out_features) → self._spectrum(x).sum(-2))
    self.order > 2 and → self.order > 3 and
heads/covariance.py
    subsets, self.seb, *settings, dtype=self.dtype) → subsets, not self.seb, *settings, dtype=self.dtype)
    p * scale.clamp_max(LARGEST_SCALE).square() → p
    lower = factor.tril(-1) → lower = factor.tril(-2)
    torch.where(failed[:, None, None] == 0, factor, torch.nan) → factor
heads/cross_covariance.py
    for _ in range(iterations) → for _ in range(iterations - 1)
    eps / scales[0] / scales[1] → eps
    scales[0] ** power * scales[1] ** power → scales[0] * scales[1]
heads/drop_covariance.py
    torch.rand_like(gate) >= probability → torch.rand_like(gate[:1]) >= probability
    kept / nonzero(1 - probability) → kept
    1 - 10 / math.log2( → 1 - 10 / math.log(
    x * y[..., None, None] + x → x * y[..., None, None]
    unit(matrix.sum(-1)) → unit(matrix.diagonal(dim1=-2, dim2=-1))
    cosine.mean() → cosine.max()
    if self.training else p → if True else p
heads/inverse_covariance.py
    (1 - i / (iterations - 1)) → (1 - i / iterations)
    _positive_part(-precision) - step * (penalty - gradient) → _positive_part(-precision) - step * (penalty + gradient)
    .clamp_min(d * floor).sqrt() → .sqrt()
    floor, most = 1 / (1 + ridge + penalty * d) → floor, most = 1 / (1 + ridge)
    gradient = c - inverted → gradient = start - inverted
    _invert_by_products(floored(precision, floor), floor, most) → _invert_by_products(precision, floor, most)
heads/kernel.py
    seed=seed + i) → seed=seed)
heads/layers.py
    + eps**0.5) → + eps)
    zero = largest == 0 → zero = largest < 1e-12
heads/moment.py
    torch.cat([z, -z], -1) → z
heads/rank_one.py
    for _ in range(iterations) → for _ in range(iterations - 1)
    self.resample and self.training → self.resample
heads/subspace.py
    run.abs() > rounding_floor(b) → run != 0
    if self.k >= self.channels → if self.k > self.channels
explain/measures.py
    (largest & inside).sum(1) / largest.sum(1).double() → (largest & inside).any(1).double()
    rows.amax(1, keepdim=True) == rows.amin(1, keepdim=True) → rows.isnan()
explain/perturbation.py
    torch.maximum(first.abs(), second.abs()) → torch.minimum(first.abs(), second.abs())
    return 2 * (M * (P_L - P_S)) → return (M * (P_L - P_S))
    self.covariance(self._copy(x)), split) → self.covariance(self._copy(begin)), split)
    memory_format=layout, copy=True) → memory_format=layout)
    slack = _SLACK * (high - low) → slack = 0 * (high - low)
    moving &= _changes → moving = _changes
explain/relu_rules.py
    torch.where(x >= 0, gradient, 0.0) → torch.where(x > 0, gradient, 0.0)
    "threshold") == 0 and option(1, "value") == 0 → "threshold") == 0
explain/saliency.py
    difference = first - second → difference = second - first
    torch.where(left_out == 2, difference, second), → second,
    and not isinstance(head.learned_factor, MatrixFactor) → and True
    not linear or not independent → not linear
    and not model.beside_channels → and True
    with request.watched():  # the mid-level → with nullcontext():  # the mid-level
    rule == request.rules[0] or switch.relus > before → rule == request.rules[0]
explain/sanity.py
    (order[which] < changed → (order[which] <= changed
    norms += [module → norms = [module
explain/survey.py
    values = m.mae(maps, whole, normalise) → values = m.mae(maps, whole)
explain/plots.py
    .mul(255).round() → .mul(255)
    brightest(map if scale == "each" else together) → brightest(map)
explain/report.py
    row["number"] = indices[row["number"]] → pass
data/boxes.py
    int(pipeline.size[0] * side / other) → round(pipeline.size[0] * side / other)
    (centres < stop * resized) → (centres <= stop * resized)
"""


def read_mutants(text: str = MUTANTS) -> list[tuple[str, str, str]]:
    """(file, old, new) of every line."""
    mutants, file = [], ""
    for line in text.strip().splitlines():
        old, arrow, new = line.strip().partition(" → ")
        if arrow:
            mutants.append((file, old, new))
        else:
            file = line
    return mutants


def survives(mutant: tuple[str, str, str]) -> bool:
    """Whether the tests pass with a change."""
    file, old, new = mutant
    room, name = file.split("/")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for part in ("src", "tests"):
            copytree(ROOT / part, scratch / part, ignore=ignore_patterns("__pycache__"))
        copy(ROOT / "pyproject.toml", scratch)
        path = scratch / SOURCE.relative_to(ROOT) / file
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        # the tests of the same name come first, because they usually find the change
        own = [str(test.relative_to(scratch)) for test in (scratch / ROOMS[room]).rglob(f"test_{name}")]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not slow", *own, ROOMS[room]]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(scratch / "src")}
        return subprocess.run(command, cwd=scratch, env=environment, stdout=subprocess.DEVNULL).returncode == 0


def main(selection: list[str]) -> int:
    mutants = [mutant for mutant in read_mutants() if not selection or any(text in " ".join(mutant) for text in selection)]
    stale = [(file, old, new) for file, old, new in mutants if (SOURCE / file).read_text(encoding="utf-8").count(old) != 1]
    mutants = [mutant for mutant in mutants if mutant not in stale]
    for file, old, _ in stale:
        print(f"not exactly once in {file}: {old}")
    # without a change first: if those tests fail, every change would seem to be found
    unchanged = {ROOMS[file.split("/")[0]]: (file, old, old) for file, old, _ in mutants}
    survivors = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passes = pool.map(survives, unchanged.values())
        failing = [room for room, passed in zip(unchanged, passes, strict=True) if not passed]
        if failing or not mutants:
            print(f"the tests fail without a change: {', '.join(failing)}" if failing else "no change to apply")
            return 1
        for (file, old, new), survived in zip(mutants, pool.map(survives, mutants), strict=True):
            survivors += survived
            print(f"{'SURVIVED' if survived else 'killed  '} {file}: {old} → {new}", flush=True)
    killed = len(mutants) - survivors
    print(f"{killed} of {len(mutants)} changes make a test fail ({killed / len(mutants):.1%})")
    return int(bool(stale) or killed < LEAST * len(mutants))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
