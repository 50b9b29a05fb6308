"""Matrix products on CUDA in Triton, for the iterations of ``matrix_products`` in float64 and of ``polar`` in float32.

Compared with one call per product there are fewer launches, because one of them makes two products and the sums around
them; of symmetric results only the upper triangle is computed; and each matrix of a batch makes only the steps that it
needs, which the kernels read from the device.

Matrices are (B, m, n) and contiguous, and those of one call have the same dtype. In float32 tensor cores make three TF32 or
six BF16 products, which is as exact as float32. Importing this module requires Triton.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eigengrain.functional.matrix_products import Coefficients

#: factors of Y and Z for matrices that are far, and for the others
Weights = tuple[tuple[float, float], tuple[float, float]]

#: side of the tiles of kernels without products
_BLOCK = 32

#: largest max |1 − x²| before the last common step from which that step converges: it is of the third order
CONVERGED = 1e-4

#: a level that every matrix is above
_EVERY = -1000


@triton.jit
def _tile(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows and columns of a tile, the offsets of its entries, and which of them are inside of the matrix."""
    i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    return i, j, i[:, None] * COLUMNS + j[None, :], (i < ROWS)[:, None] & (j < COLUMNS)[None, :]


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    a, b, c, d, i, j, SIGN: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows i and columns j of AB, or of AB ± CD; B and D are transposed in memory if TRANSPOSED."""
    total = tl.zeros((TILE, TILE), dtype=a.dtype.element_ty)
    for start in range(0, INNER, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = i[:, None] * INNER + k[None, :]
        right = k[:, None] + j[None, :] * INNER if TRANSPOSED else k[:, None] * COLUMNS + j[None, :]
        if (ROWS % TILE == 0) and (COLUMNS % TILE == 0) and (INNER % DEPTH == 0):
            total = tl.dot(tl.load(a + left), tl.load(b + right), total, input_precision=PRECISION, out_dtype=total.dtype)
            if SIGN != 0:
                other = SIGN * tl.load(c + left)
                total = tl.dot(other, tl.load(d + right), total, input_precision=PRECISION, out_dtype=total.dtype)
        else:
            rows, columns = (i < ROWS)[:, None] & (k < INNER)[None, :], (k < INNER)[:, None] & (j < COLUMNS)[None, :]
            own, own_right = tl.load(a + left, rows, 0.0), tl.load(b + right, columns, 0.0)
            total = tl.dot(own, own_right, total, input_precision=PRECISION, out_dtype=total.dtype)
            if SIGN != 0:
                other, other_right = SIGN * tl.load(c + left, rows, 0.0), tl.load(d + right, columns, 0.0)
                total = tl.dot(other, other_right, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def _job(  # type: ignore[no-untyped-def]
    a, b, c, d, base, keep, out, active, weights, level, row, column,
    SIGN: tl.constexpr, MIRROR: tl.constexpr, IDENTITY: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a :class:`_Job`."""
    i, j, at, inside = _tile(row, column, ROWS, COLUMNS, TILE)
    if active:
        if (MIRROR == 0) | (row <= column):
            total = _products(a, b, c, d, i, j, SIGN, ROWS, INNER, COLUMNS, TRANSPOSED, TILE, DEPTH, PRECISION)
            diagonal = tl.where(i[:, None] == j[None, :], 1.0, 0.0).to(total.dtype)
            if base is not None:
                of_base, of_product = tl.load(weights + 1).to(total.dtype), tl.load(weights + 2).to(total.dtype)
                total = of_base * tl.load(base + at, inside, 0.0) + of_product * total
                if IDENTITY:
                    total += tl.load(weights).to(total.dtype) * diagonal
            tl.store(out + at, total, inside)
            if (MIRROR != 0) and (row < column):
                tl.store(out + j[:, None] * COLUMNS + i[None, :], MIRROR * tl.trans(total), tl.trans(inside))
            if level is not None:
                distance = tl.max(tl.max(tl.where(inside, tl.abs(total - diagonal), 0.0), 1), 0)
                tl.atomic_max(level, tl.where(distance <= tl.load(weights + 3), 0, 1))  # 1 for NaN too
    elif keep is not None:
        tl.store(out + at, tl.load(keep + at, inside, 0.0), inside)


@triton.jit(do_not_specialize=["above", "row_far", "row_near"])
def _step_kernel(  # type: ignore[no-untyped-def]
    a, b, c, d, base, keep, out, a2, b2, c2, d2, base2, keep2, out2, level, table, above, row_far, row_near,
    SIGN: tl.constexpr, MIRROR: tl.constexpr, IDENTITY: tl.constexpr,
    SIGN2: tl.constexpr, MIRROR2: tl.constexpr, IDENTITY2: tl.constexpr, MEASURE: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two jobs, the second of which may be missing, for matrices of a level above ``above``, or all without levels."""
    ACROSS: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    TILES: tl.constexpr = ACROSS * ((ROWS + TILE - 1) // TILE)
    number, item = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    row, column = number // ACROSS, number % ACROSS
    active, weights = True, table + 4 * row_near
    if level is not None:
        own_level = tl.load(level + item)
        active, weights = own_level > above, table + 4 * tl.where(own_level > 0, row_far, row_near)
    left, right, to = item * ROWS * INNER, item * INNER * COLUMNS, item * ROWS * COLUMNS
    if tl.program_id(1) == 0:
        if base is not None:
            base += to
        if keep is not None:
            keep += to
        measured = None
        if MEASURE:
            measured = level + item
        _job(
            a + left, b + right, c + left, d + right, base, keep, out + to, active, weights, measured, row, column,
            SIGN, MIRROR, IDENTITY, ROWS, INNER, COLUMNS, TRANSPOSED, TILE, DEPTH, PRECISION,
        )  # fmt: skip
    else:
        if a2 is not None:
            if base2 is not None:
                base2 += to
            if keep2 is not None:
                keep2 += to
            _job(
                a2 + left, b2 + right, c2 + left, d2 + right, base2, keep2, out2 + to, active, weights, None, row, column,
                SIGN2, MIRROR2, IDENTITY2, ROWS, INNER, COLUMNS, TRANSPOSED, TILE, DEPTH, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=["turn"])
def _square_kernel(  # type: ignore[no-untyped-def]
    source, target, times, turn, n: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """E ← 2E + E² for symmetric E, if ``turn`` is below the number of squarings of the matrix."""
    ACROSS: tl.constexpr = (n + TILE - 1) // TILE
    number, item = tl.program_id(0) % (ACROSS * ACROSS), tl.program_id(0) // (ACROSS * ACROSS)
    row, column = number // ACROSS, number % ACROSS
    if (turn < tl.load(times + item)) & (row <= column):
        source, target = source + item.to(tl.int64) * n * n, target + item.to(tl.int64) * n * n
        i, j, at, inside = _tile(row, column, n, n, TILE)
        total = _products(source, source, source, source, i, j, 0, n, n, n, TRANSPOSED, TILE, DEPTH, PRECISION)
        total += 2 * tl.load(source + at, inside, 0.0)
        tl.store(target + at, total, inside)
        if row < column:
            tl.store(target + j[:, None] * n + i[None, :], tl.trans(total), tl.trans(inside))


@triton.jit
def _symmetric_tile(x, row, column, n: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of (X + Xᵀ)/2 in float64, and its place, see :func:`_tile`."""
    i, j, at, inside = _tile(row, column, n, n, TILE)
    own = tl.load(x + at, inside, 0.0).to(tl.float64)
    other = tl.load(x + j[:, None] * n + i[None, :], tl.trans(inside), 0.0).to(tl.float64)
    return 0.5 * (own + tl.trans(other)), i, j, at, inside


@triton.jit
def _symmetrise_kernel(y, z, ACROSS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Y ← (Y + Yᵀ)/2 and Z ← (Z + Zᵀ)/2 in place."""
    number, at = tl.program_id(0) % (ACROSS * ACROSS), (tl.program_id(0) // (ACROSS * ACROSS)).to(tl.int64) * n * n
    row, column = number // ACROSS, number % ACROSS
    if row <= column:
        for which in tl.static_range(2):
            matrix = y + at if which == 0 else z + at
            mean, i, j, to, inside = _symmetric_tile(matrix, row, column, n, TILE)
            tl.store(matrix + to, mean, inside)
            tl.store(matrix + j[:, None] * n + i[None, :], tl.trans(mean), tl.trans(inside))


@triton.jit
def _start_kernel(  # type: ignore[no-untyped-def]
    grad, y, z, far, weights, g, b, dots, ACROSS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """G = (grad + gradᵀ)/2 in float64, B = w_1 Y + w_2 Z, and the sum of the entries of G ∘ Y in each tile."""
    number, item = tl.program_id(0) % (ACROSS * ACROSS), tl.program_id(0) // (ACROSS * ACROSS)
    at = item.to(tl.int64) * n * n
    mean, _, _, to, inside = _symmetric_tile(grad + at, number // ACROSS, number % ACROSS, n, TILE)
    weights += 4 * tl.where(tl.load(far + item) != 0, 0, 1)
    own = tl.load(y + at + to, inside, 0.0)
    tl.store(g + at + to, mean, inside)
    newton = tl.load(weights + 1) * own + tl.load(weights + 2) * tl.load(z + at + to, inside, 0.0)
    tl.store(b + at + to, newton, inside)
    tl.store(dots + item * ACROSS * ACROSS + number, tl.sum(tl.sum(mean * own, 1), 0))


@triton.jit
def _residual_kernel(m, m2, todo, partial, ACROSS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the entries of (M − M²) ∘ (I − M) in each tile."""
    number, item = tl.program_id(0) % (ACROSS * ACROSS), tl.program_id(0) // (ACROSS * ACROSS)
    if tl.load(todo + item) > 0:
        i, j, at, inside = _tile(number // ACROSS, number % ACROSS, n, n, TILE)
        at += item.to(tl.int64) * n * n
        own = tl.load(m + at, inside, 0.0)
        left = (own - tl.load(m2 + at, inside, 0.0)) * (tl.where(i[:, None] == j[None, :], 1.0, 0.0) - own)
        tl.store(partial + item * ACROSS * ACROSS + number, tl.sum(tl.sum(left, 1), 0))


@triton.jit
def _last_step_kernel(  # type: ignore[no-untyped-def]
    m, m2, todo, partial, table, limit, out, further,
    ACROSS: tl.constexpr, PARTS: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """w_0 I + w_1 M + w_2 M², with the first row of the table if the residual is above the limit, else the second."""
    number, item = tl.program_id(0) % (ACROSS * ACROSS), tl.program_id(0) // (ACROSS * ACROSS)
    if tl.load(todo + item) > 0:
        part = tl.arange(0, PARTS)
        residual = tl.sum(tl.load(partial + item * ACROSS * ACROSS + part, part < ACROSS * ACROSS, 0.0), 0)
        row = table + tl.where(residual > limit, 0, 4)
        i, j, at, inside = _tile(number // ACROSS, number % ACROSS, n, n, TILE)
        at += item.to(tl.int64) * n * n
        own, square = tl.load(m + at, inside, 0.0), tl.load(m2 + at, inside, 0.0)
        total = tl.load(row + 1).to(own.dtype) * own + tl.load(row + 2).to(own.dtype) * square
        total += tl.where(i[:, None] == j[None, :], tl.load(row).to(own.dtype), 0.0)
        tl.store(out + at, total, inside)
        if number == 0:
            tl.store(further + item, tl.where(residual > limit, 1, 0))
    elif number == 0:
        tl.store(further + item, 0)


@triton.jit
def _centre_kernel(  # type: ignore[no-untyped-def]
    x, factor, out, ROW: tl.constexpr, COLUMN: tl.constexpr, c: tl.constexpr, n: tl.constexpr, SCALE: tl.constexpr,
    DOUBLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of (c, n) with the strides ROW and COLUMN, less their mean, divided by √n if SCALE, in float64 if DOUBLE."""
    BLOCKS: tl.constexpr = (c + ROWS - 1) // ROWS
    DTYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    item, i = (tl.program_id(0) // BLOCKS).to(tl.int64), (tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS))[:, None]
    times = tl.full((1, 1), 1.0, DTYPE)
    if factor is not None:
        times *= tl.load(factor + item).to(DTYPE)
    # a factor below 1 comes first and another one last: no difference or sum overflows
    first_times, last_times = tl.where(times < 1, times, 1.0), tl.where(times < 1, 1.0, times)
    x, out = x + item * c * n, out + item * c * n
    first = tl.load(x + i * ROW, i < c, 0.0).to(DTYPE) * first_times
    total = tl.zeros((ROWS, COLUMNS), dtype=DTYPE)
    for start in range(0, n, COLUMNS):
        j = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (i < c) & (j < n)
        value = tl.load(x + i * ROW + j * COLUMN, inside, 0.0).to(DTYPE) * first_times
        total += tl.where(inside, value - first, 0.0)
    size = tl.zeros((ROWS, 1), dtype=DTYPE) + n
    mean = tl.sum(total, 1)[:, None] / size
    for start in range(0, n, COLUMNS):
        j = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (i < c) & (j < n)
        value = tl.load(x + i * ROW + j * COLUMN, inside, 0.0).to(DTYPE) * first_times - first - mean
        if SCALE:
            value /= tl.sqrt(size)
        tl.store(out + i * ROW + j * COLUMN, value * last_times, inside)


class _Job(NamedTuple):
    """out = AB + sign CD, or w_0 I + w_1 base + w_2 (AB + sign CD), without w_0 I unless ``identity``.

    ``mirror`` is 1 or −1 if the result is symmetric or antisymmetric, and 0 otherwise. Matrices that are not active get
    ``keep``, if it is given.
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
    keep: Tensor | None = None


class _Steps:
    """Launches with one table of coefficients and one level per matrix, or none."""

    def __init__(self, level: Tensor | None, table: Tensor):
        self.level, self.table = level, table

    def run(
        self,
        first: _Job,
        second: _Job | None = None,
        *,
        above: int = _EVERY,
        rows: tuple[int, int] = (0, 0),
        measure: bool = False,
        transposed: bool = False,
    ) -> None:
        """Launch one or two jobs for the matrices of a level above ``above``, or for all without levels.

        ``rows`` are those of the table for matrices of a level above 0 and for others. With ``measure`` the level becomes 1
        where the result of the first job is far from the identity.
        """
        jobs = [first] if second is None else [first, second]
        pointers: list[Tensor | None] = []
        for a, b, out, _, base, _, _, c, d, keep in jobs:
            pointers += [a, b, a if c is None else c, b if d is None else d, base, keep, out]
        last = jobs[-1]
        options = {"SIGN": first.sign, "MIRROR": first.mirror, "IDENTITY": first.identity, "MEASURE": measure}
        options |= {"SIGN2": last.sign, "MIRROR2": last.mirror, "IDENTITY2": last.identity}
        batch, m, n = first.out.shape
        constants = _shape(first.a, m, n, transposed)
        tiles = triton.cdiv(m, constants["TILE"]) * triton.cdiv(n, constants["TILE"])
        with torch.cuda.device(first.a.device):  # Triton launches on the current device
            # the first job of all matrices starts before the second: the longer tiles come first
            _step_kernel[(tiles * batch, len(jobs))](
                *pointers, *[None] * (14 - len(pointers)), self.level, self.table, above, *rows,
                ROWS=m, INNER=first.a.shape[-1], COLUMNS=n, **options, **constants,
            )  # fmt: skip


#: side and depth of a tile and its warps, by dtype: small tiles, and large ones for results that fill the device with them
_TILES = {
    torch.float64: ((32, 16, 2), (64, 16, 4)),
    torch.float32: ((64, 32, 4), (64, 32, 4)),
}
#: whether Triton makes float32 products from products in BF16, as it does since 3.6
_HAS_BF16X6 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
#: entries of the results of a launch from which large tiles fill the device
_LARGE = 24 * 256 * 256


def _shape(a: Tensor, m: int, n: int, transposed: bool) -> dict[str, Any]:
    """The constants of a launch for results (m, n)."""
    tile, depth, warps = _TILES[a.dtype][len(a) * m * n >= _LARGE]
    precision = _precision(a.device, transposed) if a.dtype == torch.float32 else "ieee"
    tiles = {"TRANSPOSED": transposed, "TILE": tile, "DEPTH": depth}
    return {**tiles, "PRECISION": precision, "num_warps": warps, "num_stages": 3}


@functools.cache
def _precision(device: torch.device, transposed: bool) -> str:
    """How float32 products are made: of several less exact ones where tensor cores are more than three times as fast.

    Three TF32 products are fastest if the right operand is transposed in memory: tensor cores read it along the inner
    dimension alone. Another one would first be transposed, and six BF16 products, which can be read across, are faster.
    """
    if torch.cuda.get_device_capability(device) not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return "ieee"
    return "bf16x6" if _HAS_BF16X6 and not transposed else "tf32x3"


@functools.cache
def _table(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Coefficients on a device, and :data:`CONVERGED`: numbers of Python would reach a kernel in float32."""
    with torch.inference_mode(False):
        return torch.tensor([[*row, CONVERGED] for row in rows], dtype=torch.float64, device=device)


#: of products that are not added to anything
_NO_COEFFICIENTS = ((0.0, 0.0, 0.0),)


def product(
    a: Tensor,
    b: Tensor,
    *,
    transposed: bool = False,
    mirror: int = 0,
    todo: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """AB, or ABᵀ; with ``mirror`` 1 the lower triangle is that above it.

    With ``todo`` (B,), int32, only for its samples; others get ``keep``, or are not written.
    """
    a, b = a.contiguous(), b.contiguous()
    out = a.new_empty(len(a), a.shape[-2], b.shape[-2 if transposed else -1])
    steps = _Steps(todo, _table(_NO_COEFFICIENTS, a.device))
    steps.run(_Job(a, b, out, mirror, keep=keep), above=0, transposed=transposed)
    return out


def _reads_transposed(symmetric: Tensor) -> bool:
    """Whether a symmetric right operand is read transposed, as the tensor cores of TF32 do faster."""
    return symmetric.dtype == torch.float32


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """AB for symmetric B, where the result is symmetric."""
    return product(a, b, transposed=_reads_transposed(b), mirror=1)


def with_product(base: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """base + factor · AB for symmetric B, where the result is symmetric."""
    base, a, b = base.contiguous(), a.contiguous(), b.contiguous()
    out = torch.empty_like(base)
    steps = _Steps(None, _table(((0.0, 1.0, factor),), base.device))
    steps.run(_Job(a, b, out, 1, base), transposed=_reads_transposed(b))
    return out


def coupled_iteration(a: Tensor, coefficients: Coefficients, common: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``matrix_products.coupled_iteration``; only matrices that are far from convergence after ``common`` steps go on.

    Returns (A^½, A^−½, far), where far (B,) is 1 for these matrices and 0 for the others.
    """
    assert (len(coefficients) - common) % 2 == 0  # so that both kinds of matrices end in the same buffer
    far = torch.zeros(len(a), dtype=torch.int32, device=a.device)
    m, h, y, z, next_y, next_z = (torch.empty_like(a) for _ in range(6))
    steps = _Steps(far, _table(coefficients, a.device))
    steps.run(_Job(a, a, z, 1, a, True))
    steps.run(_Job(a, z, y, 1))
    for turn in range(1, len(coefficients)):
        where: dict[str, Any] = {"above": _EVERY if turn < common else 0, "rows": (turn, turn)}
        steps.run(_Job(z, y, m), **where, measure=turn == common - 1)
        steps.run(_Job(m, m, h, 0, m, True), **where)
        steps.run(_Job(y, h, next_y), _Job(h, z, next_z), **where)
        y, z, next_y, next_z = next_y, next_z, y, z
    across = triton.cdiv(a.shape[-1], _BLOCK)
    with torch.cuda.device(a.device):
        _symmetrise_kernel[(across * across * len(a),)](y, z, ACROSS=across, n=a.shape[-1], TILE=_BLOCK)
    return y, z, far


class _Block:
    """The iteration for the sign of (B C; 0 −B), with C symmetric (``mirror`` 1) or antisymmetric (−1)."""

    def __init__(self, b: Tensor, c: Tensor, level: Tensor, coefficients: Coefficients, mirror: int):
        self.b, self.c, self.mirror = b, c, mirror
        self.steps = _Steps(level, _table(coefficients, b.device))
        self.s, self.commutator, self.h, self.e, self.next_b, self.next_c = (torch.empty_like(b) for _ in range(6))

    def step(self, *, last: bool, keep: bool = False, **where: Any) -> None:
        """One step, without B if it is the ``last``. Matrices that are not active stay as they are if ``keep``."""
        b, c, s, h, e, between = self.b, self.c, self.s, self.h, self.e, self.commutator
        mirror = -self.mirror  # of BC − CB, and of the corner of the square
        # right operands are read transposed if C is antisymmetric: C is then −C, and BC − CB and E have the other sign
        sign = -self.mirror
        where["transposed"] = self.mirror < 0
        self.steps.run(_Job(b, c, between, mirror, sign=sign, c=c, d=b), _Job(b, b, s, 1), **where)
        self.steps.run(_Job(s, between, e, mirror, between, sign=1, c=between, d=s), _Job(s, s, h, 1, s, True), **where)
        corner = _Job(c, h, self.next_c, self.mirror, sign=-sign, c=b, d=e, keep=c if keep else None)
        block = None if last else _Job(b, h, self.next_b, 1, keep=b if keep else None)
        self.steps.run(corner, block, **where)
        self.b, self.c, self.next_b, self.next_c = self.next_b, self.next_c, b, c


def lyapunov(
    grad: Tensor, y: Tensor, z: Tensor, far: Tensor, newton: Weights, coefficients: Coefficients, of_far: int, of_near: int
) -> tuple[Tensor, Tensor]:
    """See ``matrix_products.lyapunov``.

    Matrices that are far use the first of the ``newton`` weights and the first ``of_far`` rows of the coefficients, others
    the second and the ``of_near`` rows after them.
    """
    late = of_far - of_near
    assert late % 2 == 0  # the others find their input where it was
    g, b, c, between = (torch.empty_like(y) for _ in range(4))
    n = y.shape[-1]
    across = triton.cdiv(n, _BLOCK)
    dots = torch.empty(len(y), across * across, dtype=y.dtype, device=y.device)
    weights = _table(tuple((0.0, *pair) for pair in newton), y.device)
    with torch.cuda.device(y.device):
        _start_kernel[(across * across * len(y),)](grad, y, z, far, weights, g, b, dots, ACROSS=across, n=n, TILE=_BLOCK)
    start = _Steps(far, weights)
    start.run(_Job(z, g, between))
    start.run(_Job(between, z, c, 1, g), rows=(0, 1))
    block = _Block(b, c, far, coefficients, 1)
    for turn in range(of_far):
        above = _EVERY if turn >= late else 0
        block.step(last=turn == of_far - 1, above=above, rows=(turn, of_far + turn - late))
    return block.c, dots.sum(1)


def corner_of_sign(b: Tensor, s: Tensor, entry: Tensor, coefficients: Coefficients, last_entry: int) -> Tensor:
    """See ``polar.corner_of_sign``: samples begin at the row ``entry`` (B,), at most ``last_entry``."""
    block = _Block(b.contiguous(), s.contiguous(), -entry, coefficients, -1)
    for turn in range(len(coefficients)):
        late = turn < last_entry
        block.step(last=turn == len(coefficients) - 1, keep=late, above=-turn - 1 if late else _EVERY, rows=(turn, turn))
    return block.c


def run_of_steps(m: Tensor, rows: Coefficients, todo: Tensor | None, leave: bool) -> tuple[Tensor, Tensor | None]:
    """See ``polar.run_of_steps``; ``todo`` (B,) is int32, and the results of other samples are not written."""
    steps, left = _Steps(todo, _table(rows, m.device)), m
    t: Tensor | None = None
    for turn in range(len(rows)):
        where: dict[str, Any] = {"above": 0, "rows": (turn, turn), "transposed": True}
        last = turn == len(rows) - 1
        h, between, next_t = (torch.empty_like(m) for _ in range(3))
        steps.run(_Job(left, left, h, 1, left, True), **where)
        onward = [_Job(h, left, between)] if leave or not last else []
        # right operands are read transposed, which is right for the symmetric h: t is Tᵀ until the last step
        total: list[_Job] = []
        if t is not None:
            total = [_Job(h, t, next_t) if last else _Job(t, h, next_t)]
        t = h if t is None else next_t
        if onward or total:
            steps.run(*onward, *total, **where)
        if onward:
            left = torch.empty_like(m)
            steps.run(_Job(between, h, left, 1), **where)
    assert t is not None
    return t, left if leave else None


def last_step(m: Tensor, todo: Tensor, onward: Coefficients, limit: float) -> tuple[Tensor, Tensor]:
    """See ``polar.last_step``; the results of samples that are not in ``todo`` (B,), int32, are not written."""
    n = m.shape[-1]
    across = triton.cdiv(n, _BLOCK)
    m2 = product(m, m, transposed=True, todo=todo)
    partial = m.new_empty(len(m), across * across)
    out, further, table = torch.empty_like(m), torch.empty_like(todo), _table(onward, m.device)
    constants = {"ACROSS": across, "n": n, "TILE": _BLOCK}
    with torch.cuda.device(m.device):
        _residual_kernel[(across * across * len(m),)](m, m2, todo, partial, **constants)
        _last_step_kernel[(across * across * len(m),)](
            m, m2, todo, partial, table, limit, out, further, PARTS=triton.next_power_of_2(across * across), **constants
        )
    return out, further


def square_repeatedly(e: Tensor, times: Tensor, most: int) -> Tensor:
    """E ← 2E + E² for symmetric E, repeated ``times`` (B,), int32, for each matrix, from 0 to ``most``."""
    n = e.shape[-1]
    constants = _shape(e, n, n, _reads_transposed(e))
    across = triton.cdiv(n, constants["TILE"])
    source, target = e, torch.empty_like(e)
    with torch.cuda.device(e.device):
        for turn in range(most):
            _square_kernel[(across * across * len(e),)](source, target, times, turn, n=n, **constants)
            source, target = target, source
    # matrices that were done after an odd number of turns are in the other buffer
    even, odd = (source, target) if most % 2 == 0 else (target, source)
    return torch.where((times % 2 == 0)[:, None, None], even, odd)


def centre(x: Tensor, dtype: torch.dtype, *, scale: bool, factor: Tensor | None = None) -> Tensor:
    """Features or a gradient (B, C, …) as (B, C, N), less the mean over positions, and divided by √N if ``scale``.

    Samples are multiplied by a factor (B,), if there is one. Of features in channels_last the result has the same order in
    memory.
    """
    x = x.flatten(2)
    batch, c, n = x.shape
    if x.stride() != (c * n, 1, c):
        x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    constants = {"ROW": x.stride(1), "COLUMN": x.stride(2), "c": c, "n": n, "SCALE": scale, "ROWS": 16, "COLUMNS": 64}
    constants["DOUBLE"] = torch.float64 in (x.dtype, dtype)
    with torch.cuda.device(x.device):
        _centre_kernel[(triton.cdiv(c, 16) * batch,)](x, None if factor is None else factor.contiguous(), out, **constants)
    return out


def try_kernels(device: torch.device) -> None:
    """Compile and run the kernels once; raises what the compiler raises."""
    one = centre(torch.zeros(1, 16, 16, device=device), torch.float64, scale=True)
    square_repeatedly(one, torch.ones(1, dtype=torch.int32, device=device), 1)
    y, z, far = coupled_iteration(one, ((1.5, -0.5, 0.0),) * 2, 2)
    lyapunov(one, y, z, far, ((1.0, 0.0),) * 2, ((1.5, -0.5, 0.0),) * 2, 1, 1)
    product(one.float(), one.float())
