"""The iterations of ``matrix_products`` for float64 matrices on CUDA, in Triton.

Compared with one call per product there are fewer launches, because one of them makes two products and the sums around
them; of symmetric results only the upper triangle is computed; and each matrix of a batch makes only the steps that it
needs, which the kernels read from the device.

All matrices are (B, d, d), float64 and contiguous. Importing this module requires Triton.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]
#: factors of Y and Z for matrices that are far, and for the others
Weights = tuple[tuple[float, float], tuple[float, float]]

#: side of the tiles of kernels without products
_BLOCK = 32

#: largest max |1 − x²| before the last common step from which that step converges: it is of the third order
CONVERGED = 1e-4


@triton.jit
def _products(a, b, c, d, i, j, SIGN: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows i and columns j of AB, or of AB ± CD."""
    total = tl.zeros((TILE, TILE), dtype=tl.float64)
    for start in range(0, n, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left, right = i[:, None] * n + k[None, :], k[:, None] * n + j[None, :]
        if (n % TILE == 0) and (n % DEPTH == 0):
            total = tl.dot(tl.load(a + left), tl.load(b + right), total, input_precision="ieee", out_dtype=tl.float64)
            if SIGN != 0:
                other = SIGN * tl.load(c + left)
                total = tl.dot(other, tl.load(d + right), total, input_precision="ieee", out_dtype=tl.float64)
        else:
            rows, columns = (i < n)[:, None] & (k < n)[None, :], (k < n)[:, None] & (j < n)[None, :]
            own, right_own = tl.load(a + left, rows, 0.0), tl.load(b + right, columns, 0.0)
            total = tl.dot(own, right_own, total, input_precision="ieee", out_dtype=tl.float64)
            if SIGN != 0:
                other, right_other = SIGN * tl.load(c + left, rows, 0.0), tl.load(d + right, columns, 0.0)
                total = tl.dot(other, right_other, total, input_precision="ieee", out_dtype=tl.float64)
    return total


@triton.jit
def _job(  # type: ignore[no-untyped-def]
    a, b, c, d, base, out, weights, far, row, column,
    SIGN: tl.constexpr, MIRROR: tl.constexpr, IDENTITY: tl.constexpr,
    n: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of a :class:`Job`."""
    if (MIRROR == 0) | (row <= column):
        i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
        total = _products(a, b, c, d, i, j, SIGN, n, TILE, DEPTH)
        at, inside = i[:, None] * n + j[None, :], (i < n)[:, None] & (j < n)[None, :]
        diagonal = tl.where(i[:, None] == j[None, :], 1.0, 0.0).to(tl.float64)
        if base is not None:
            total = tl.load(weights + 1) * tl.load(base + at, inside, 0.0) + tl.load(weights + 2) * total
            if IDENTITY:
                total += tl.load(weights) * diagonal
        tl.store(out + at, total, inside)
        if (MIRROR != 0) and (row < column):
            tl.store(out + j[:, None] * n + i[None, :], MIRROR * tl.trans(total), tl.trans(inside))
        if far is not None:
            distance = tl.max(tl.max(tl.where(inside, tl.abs(total - diagonal), 0.0), 1), 0)
            tl.atomic_max(far, tl.where(distance <= tl.load(weights + 3), 0, 1))  # 1 for NaN too


@triton.jit(do_not_specialize=["everyone", "row_far", "row_near"])
def _step_kernel(  # type: ignore[no-untyped-def]
    a, b, c, d, base, out, a2, b2, c2, d2, base2, out2, far, table, everyone, row_far, row_near,
    SIGN: tl.constexpr, MIRROR: tl.constexpr, IDENTITY: tl.constexpr,
    SIGN2: tl.constexpr, MIRROR2: tl.constexpr, IDENTITY2: tl.constexpr,
    MEASURE: tl.constexpr, ACROSS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Two jobs, the second of which may be missing, for all matrices or for those that are far."""
    number, item = tl.program_id(0), tl.program_id(1)
    is_far = tl.load(far + item) != 0
    if is_far | (everyone != 0):
        at = item.to(tl.int64) * n * n
        weights = table + 4 * tl.where(is_far, row_far, row_near)
        row, column = number // ACROSS, number % ACROSS
        if tl.program_id(2) == 0:
            if base is not None:
                base += at
            own_far = None
            if MEASURE:
                own_far = far + item
            _job(
                a + at, b + at, c + at, d + at, base, out + at, weights, own_far, row, column,
                SIGN, MIRROR, IDENTITY, n, TILE, DEPTH,
            )  # fmt: skip
        else:
            if a2 is not None:
                if base2 is not None:
                    base2 += at
                _job(
                    a2 + at, b2 + at, c2 + at, d2 + at, base2, out2 + at, weights, None, row, column,
                    SIGN2, MIRROR2, IDENTITY2, n, TILE, DEPTH,
                )  # fmt: skip


@triton.jit(do_not_specialize=["turn"])
def _square_kernel(  # type: ignore[no-untyped-def]
    source, target, times, turn, ACROSS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """E ← 2E + E² for symmetric E, if ``turn`` is below the number of squarings of the matrix."""
    number, item = tl.program_id(0), tl.program_id(1)
    row, column = number // ACROSS, number % ACROSS
    if (turn < tl.load(times + item)) & (row <= column):
        at = item.to(tl.int64) * n * n
        i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
        inside = (i < n)[:, None] & (j < n)[None, :]
        total = _products(source + at, source + at, source, source, i, j, 0, n, TILE, DEPTH)
        total += 2 * tl.load(source + at + i[:, None] * n + j[None, :], inside, 0.0)
        tl.store(target + at + i[:, None] * n + j[None, :], total, inside)
        if row < column:
            tl.store(target + at + j[:, None] * n + i[None, :], tl.trans(total), tl.trans(inside))


@triton.jit
def _symmetric_tile(x, row, column, n: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of (X + Xᵀ)/2 in float64, its offsets, and which of them are inside."""
    i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    inside = (i < n)[:, None] & (j < n)[None, :]
    own = tl.load(x + i[:, None] * n + j[None, :], inside, 0.0).to(tl.float64)
    other = tl.load(x + j[:, None] * n + i[None, :], tl.trans(inside), 0.0).to(tl.float64)
    return 0.5 * (own + tl.trans(other)), i[:, None] * n + j[None, :], inside


@triton.jit
def _symmetrise_kernel(y, z, ACROSS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Y ← (Y + Yᵀ)/2 and Z ← (Z + Zᵀ)/2 in place."""
    number, at = tl.program_id(0), tl.program_id(1).to(tl.int64) * n * n
    row, column = number // ACROSS, number % ACROSS
    if row <= column:
        for which in tl.static_range(2):
            matrix = y + at if which == 0 else z + at
            mean, to, inside = _symmetric_tile(matrix, row, column, n, TILE)
            i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
            tl.store(matrix + to, mean, inside)
            tl.store(matrix + j[:, None] * n + i[None, :], tl.trans(mean), tl.trans(inside))


@triton.jit
def _start_kernel(  # type: ignore[no-untyped-def]
    grad, y, z, far, weights, g, b, dots, ACROSS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """G = (grad + gradᵀ)/2 in float64, B = w_1 Y + w_2 Z, and the sum of the entries of G ∘ Y in each tile."""
    number, item = tl.program_id(0), tl.program_id(1)
    at = item.to(tl.int64) * n * n
    mean, to, inside = _symmetric_tile(grad + at, number // ACROSS, number % ACROSS, n, TILE)
    weights += 4 * tl.where(tl.load(far + item) != 0, 0, 1)
    own = tl.load(y + at + to, inside, 0.0)
    tl.store(g + at + to, mean, inside)
    newton = tl.load(weights + 1) * own + tl.load(weights + 2) * tl.load(z + at + to, inside, 0.0)
    tl.store(b + at + to, newton, inside)
    tl.store(dots + item * ACROSS * ACROSS + number, tl.sum(tl.sum(mean * own, 1), 0))


@triton.jit
def _centre_kernel(  # type: ignore[no-untyped-def]
    x, out, ROW: tl.constexpr, COLUMN: tl.constexpr, c: tl.constexpr, n: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of (c, n) with the strides ROW and COLUMN, less their mean, and divided by √n if SCALE."""
    item, i = tl.program_id(1).to(tl.int64), (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    x, out = x + item * c * n, out + item * c * n
    first = tl.load(x + i * ROW, i < c, 0.0).to(tl.float64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
    for start in range(0, n, COLUMNS):
        j = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (i < c) & (j < n)
        total += tl.where(inside, tl.load(x + i * ROW + j * COLUMN, inside, 0.0).to(tl.float64) - first, 0.0)
    size = tl.zeros((ROWS, 1), dtype=tl.float64) + n
    mean = tl.sum(total, 1)[:, None] / size
    for start in range(0, n, COLUMNS):
        j = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (i < c) & (j < n)
        value = tl.load(x + i * ROW + j * COLUMN, inside, 0.0).to(tl.float64) - first - mean
        if SCALE:
            value /= tl.sqrt(size)
        tl.store(out + i * ROW + j * COLUMN, value, inside)


class _Job(NamedTuple):
    """out = AB + sign CD, or w_0 I + w_1 base + w_2 (AB + sign CD), without w_0 I unless ``identity``.

    ``mirror`` is 1 or −1 if the result is symmetric or antisymmetric, and 0 otherwise.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    mirror: int = 0
    base: Tensor | None = None
    identity: bool = False
    sign: int = 0
    c: Tensor | None = None
    d: Tensor | None = None


class _Steps:
    """Launches for matrices of one shape with one table of coefficients."""

    def __init__(self, like: Tensor, far: Tensor, table: Tensor):
        self.far, self.table = far, table
        self.shape = _shape(*like.shape[:2])

    def run(
        self,
        first: _Job,
        second: _Job | None = None,
        *,
        everyone: bool = True,
        rows: tuple[int, int] = (0, 0),
        measure: bool = False,
    ) -> None:
        """Launch one or two jobs, for all matrices or for those that are far, with their row of the table: far, near."""
        jobs = [first] if second is None else [first, second]
        pointers: list[Tensor | None] = []
        for a, b, out, _, base, _, _, c, d in jobs:
            pointers += [a, b, a if c is None else c, b if d is None else d, base, out]
        options: dict[str, Any] = {"SIGN": first.sign, "MIRROR": first.mirror, "IDENTITY": first.identity}
        last = jobs[-1]
        options |= {"SIGN2": last.sign, "MIRROR2": last.mirror, "IDENTITY2": last.identity, "MEASURE": measure}
        constants, across = self.shape
        # the first job of all matrices starts before the second: long tiles first leave fewer processors idle at the end
        _step_kernel[(across * across, len(first.a), len(jobs))](
            *pointers, *[None] * (12 - len(pointers)), self.far, self.table, int(everyone), *rows, **options, **constants
        )


def _shape(batch: int, n: int) -> tuple[dict[str, Any], int]:
    """The constants of a launch, and the number of tiles in a row: small tiles if large ones do not fill the device."""
    large = batch * n * n >= 24 * 256 * 256
    tile, depth, warps = (64, 16, 4) if large else (32, 32, 2)
    across = -(-n // tile)
    return {"ACROSS": across, "n": n, "TILE": tile, "DEPTH": depth, "num_warps": warps, "num_stages": 3}, across


@functools.cache
def _table(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Coefficients on a device, and :data:`CONVERGED`: numbers of Python would reach a kernel in float32."""
    with torch.inference_mode(False):
        return torch.tensor([[*row, CONVERGED] for row in rows], dtype=torch.float64, device=device)


def coupled_iteration(a: Tensor, coefficients: Coefficients, common: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``matrix_products.coupled_iteration``; only matrices that are far from convergence after ``common`` steps go on.

    Returns (A^½, A^−½, far), where far (B,) is 1 for these matrices and 0 for the others.
    """
    assert (len(coefficients) - common) % 2 == 0  # so that both kinds of matrices end in the same buffer
    far = torch.zeros(len(a), dtype=torch.int32, device=a.device)
    m, h, y, z, next_y, next_z = (torch.empty_like(a) for _ in range(6))
    with torch.cuda.device(a.device):  # Triton launches on the current device
        steps = _Steps(a, far, _table(coefficients, a.device))
        steps.run(_Job(a, a, z, 1, a, True))
        steps.run(_Job(a, z, y, 1))
        for turn in range(1, len(coefficients)):
            everyone, rows = turn < common, (turn, turn)
            steps.run(_Job(z, y, m), everyone=everyone, rows=rows, measure=turn == common - 1)
            steps.run(_Job(m, m, h, 0, m, True), everyone=everyone, rows=rows)
            steps.run(_Job(y, h, next_y), _Job(h, z, next_z), everyone=everyone, rows=rows)
            y, z, next_y, next_z = next_y, next_z, y, z
        across = -(-a.shape[-1] // _BLOCK)
        _symmetrise_kernel[across * across, len(a)](y, z, ACROSS=across, n=a.shape[-1], TILE=_BLOCK)
    return y, z, far


def lyapunov(
    grad: Tensor, y: Tensor, z: Tensor, far: Tensor, newton: Weights, coefficients: Coefficients, of_far: int, of_near: int
) -> tuple[Tensor, Tensor]:
    """See ``matrix_products.lyapunov``.

    Matrices that are far use the first of the ``newton`` weights and the first ``of_far`` rows of the coefficients, others
    the second and the ``of_near`` rows after them.
    """
    late = of_far - of_near
    assert late % 2 == 0  # the others find their input where it was
    g, b, c, next_b, next_c, s, commutator, h, e = (torch.empty_like(y) for _ in range(9))
    n = y.shape[-1]
    across = -(-n // _BLOCK)
    dots = torch.empty(len(y), across * across, dtype=y.dtype, device=y.device)
    weights = _table(tuple((0.0, *pair) for pair in newton), y.device)
    with torch.cuda.device(y.device):
        _start_kernel[across * across, len(y)](
            grad, y, z, far, weights, g, b, dots, ACROSS=across, n=y.shape[-1], TILE=_BLOCK
        )
        start = _Steps(y, far, weights)
        start.run(_Job(z, g, e))
        start.run(_Job(e, z, c, 1, g), rows=(0, 1))
        steps = _Steps(y, far, _table(coefficients, y.device))
        for turn in range(of_far):
            where: dict[str, Any] = {"everyone": turn >= late, "rows": (turn, of_far + turn - late)}
            steps.run(_Job(b, c, commutator, -1, sign=-1, c=c, d=b), _Job(b, b, s, 1), **where)
            of_commutator = _Job(s, commutator, e, -1, commutator, sign=1, c=commutator, d=s)
            steps.run(of_commutator, _Job(s, s, h, 1, s, True), **where)
            corner = _Job(c, h, next_c, 1, sign=1, c=b, d=e)
            steps.run(corner, _Job(b, h, next_b, 1) if turn < of_far - 1 else None, **where)
            b, c, next_b, next_c = next_b, next_c, b, c
    return c, dots.sum(1)


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """AB, which is symmetric up to rounding: the lower triangle is that above it."""
    out, far = torch.empty_like(a), torch.zeros(len(a), dtype=torch.int32, device=a.device)
    with torch.cuda.device(a.device):
        _Steps(a, far, far).run(_Job(a, b, out, 1))
    return out


def square_repeatedly(e: Tensor, times: Tensor, most: int) -> Tensor:
    """E ← 2E + E² for symmetric E, repeated ``times`` (B,), int32, for each matrix, from 0 to ``most``."""
    constants, across = _shape(*e.shape[:2])
    source, target = e, torch.empty_like(e)
    with torch.cuda.device(e.device):
        for turn in range(most):
            _square_kernel[(across * across, len(e))](source, target, times, turn, **constants)
            source, target = target, source
    # matrices that were done after an odd number of turns are in the other buffer
    even, odd = (source, target) if most % 2 == 0 else (target, source)
    return torch.where((times % 2 == 0)[:, None, None], even, odd)


def centre(x: Tensor, dtype: torch.dtype, *, scale: bool) -> Tensor:
    """Features or a gradient (B, C, …) as (B, C, N), less the mean over positions, and divided by √N if ``scale``.

    Of features in channels_last the result has the same order in memory.
    """
    x = x.flatten(2)
    batch, c, n = x.shape
    if x.stride() != (c * n, 1, c):
        x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    constants = {"ROW": x.stride(1), "COLUMN": x.stride(2), "c": c, "n": n, "SCALE": scale, "ROWS": 16, "COLUMNS": 64}
    with torch.cuda.device(x.device):
        _centre_kernel[(-(-c // 16), batch)](x, out, **constants)
    return out


def try_kernels(device: torch.device) -> None:
    """Compile and run the kernels once; raises what the compiler raises."""
    one = centre(torch.zeros(1, 16, 16, device=device), torch.float64, scale=True)
    square_repeatedly(one, torch.ones(1, dtype=torch.int32, device=device), 1)
    y, z, far = coupled_iteration(one, ((1.5, -0.5, 0.0),) * 2, 2)
    lyapunov(one, y, z, far, ((1.0, 0.0),) * 2, ((1.5, -0.5, 0.0),) * 2, 1, 1)
