"""Symmetric eigendecomposition: descending order everywhere, several backends, and repairs for matrices that fail.

All of it is inside one opaque operator, ``eigengrain::eigh``, so that compiled models and ``torch.func.vmap`` see a single
node with a fixed output shape.
"""

import os
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.errors import EigenSolverError, NonFiniteError, UnknownName
from eigengrain.functional._autograd import first_order_only
from eigengrain.functional._cuda import cusolver
from eigengrain.functional._cuda.graphs import capturing
from eigengrain.functional.inputs import LinAlgError, check_square, output_dtype, to_compute, warn_once
from eigengrain.functional.matrix_products import symmetric

Solver = Callable[[Tensor], tuple[Tensor, Tensor]]  # (batch, d, d) -> ascending eigenvalues, eigenvectors in columns


class Eigh(NamedTuple):
    """Descending eigenvalues (*, d), and eigenvectors (*, d, d) in columns."""

    values: Tensor
    vectors: Tensor


def rounding_floor(eigenvalues: Tensor, channels: int | None = None) -> Tensor:
    r"""Threshold at or below which descending eigenvalues are zero up to rounding, :math:`d\,\varepsilon\,\lambda_1`.

    This is the only definition of a null eigenvalue in the package; singular values of features, whose condition number is
    not squared, have a lower threshold (``solver="svd"``). The eigenvalues are (*, r), in the dtype of the
    decomposition, the result is (*, 1), and ``channels`` is d, r by default.

    Example:
        >>> rounding_floor(torch.tensor([1.0, 1e-17], dtype=torch.float64))
        tensor([4.4409e-16], dtype=torch.float64)
    """
    d = eigenvalues.shape[-1] if channels is None else channels
    return d * torch.finfo(eigenvalues.dtype).eps * eigenvalues[..., :1]


def zero_rounding(eigenvalues: Tensor) -> Tensor:
    """Descending eigenvalues (*, d) with those at or below :func:`rounding_floor` set to 0."""
    return torch.where(eigenvalues > rounding_floor(eigenvalues), eigenvalues, 0.0)


def _single_threaded() -> None:
    torch.get_num_threads()  # the first call in a thread applies the process-wide setting, so it must come before
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def workers(threads: int, process: int) -> ThreadPoolExecutor:
    """Thread pool of this process; a forked child inherits the parent's pool without its threads."""
    # each worker runs LAPACK on one thread: splitting a batch of small problems is faster than splitting each of them
    pool = ThreadPoolExecutor(threads, "eigengrain-eigh", initializer=_single_threaded)
    barrier = threading.Barrier(threads)
    list(pool.map(lambda _: barrier.wait(), range(threads)))
    torch.set_num_threads(threads)  # restore the caller's setting; new threads start with the value that was set last
    return pool


def _solve_torch(p: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh``, which loops over a batch; on the CPU the batch is distributed over threads."""
    threads = min(torch.get_num_threads(), p.shape[0])
    if p.device.type != "cpu" or threads < 2 or p.shape[-1] < 32:
        try:
            values, vectors = torch.linalg.eigh(p)
        except NotImplementedError:  # on MPS, depending on the version of torch
            return _solve_cpu(p)
        return values, vectors
    chunks = list(workers(torch.get_num_threads(), os.getpid()).map(torch.linalg.eigh, p.chunk(threads)))
    return torch.cat([c[0] for c in chunks]), torch.cat([c[1].mT for c in chunks]).mT  # LAPACK's rows are contiguous


def _solve_cpu(p: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = _solve_torch(p.cpu())
    return values.to(p.device), vectors.to(p.device)


SOLVERS: dict[str, Solver] = {"torch": _solve_torch, "cusolver-batched": cusolver.syev_batched, "cpu": _solve_cpu}
BACKENDS = ("auto", *SOLVERS)


def choose_backend(backend: str, p: Tensor) -> str:
    """The backend that decomposes a batch (batch, d, d)."""
    if backend == "auto":
        return "cusolver-batched" if p.is_cuda and p.shape[0] > 1 and cusolver.available() else "torch"
    if backend == "cusolver-batched" and not (p.is_cuda and cusolver.available()):
        warn_once(f"backend 'cusolver-batched' is not available here ({cusolver.why_not(p.device)}): using 'torch'")
        return "torch"
    return backend


REPAIRS = ("jitter", "cpu-float64", "zeroed")

_debug: ContextVar[bool] = ContextVar("eigengrain_debug", default=False)


@contextmanager
def debug() -> Iterator[None]:
    """Check every decomposition immediately, on CUDA too: the first bad sample raises an error that names it.

    Without it, samples on CUDA that contain NaN or do not converge are set to zero with zero gradient, counted in
    :func:`solver_repairs` and reported by a warning one step later, because an immediate check would stall the device.
    """
    token = _debug.set(True)
    try:
        yield
    finally:
        _debug.reset(token)


class RepairCounter:
    """Counts repaired matrices without synchronising the device.

    On CUDA the count of a batch is copied to pinned memory after the work, and read once it has arrived: at the next call,
    or when :meth:`read` is called.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._lock = threading.Lock()

    def add(self, repair: str) -> None:
        with self._lock:
            self._counts[repair] += 1

    def add_later(self, zeroed: Tensor) -> None:
        """Add a count on the device of samples that were set to zero, and collect the earlier ones."""
        self.collect()
        count = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
        count.copy_(zeroed, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(zeroed.device))
        with self._lock:
            self._pending.append((event, count))

    def collect(self, wait: bool = False) -> None:
        arrived = 0
        with self._lock:
            while self._pending and (wait or self._pending[0][0].query()):
                event, count = self._pending.popleft()
                if wait:
                    event.synchronize()
                arrived += int(count)
            self._counts["zeroed"] += arrived
        if arrived:
            warnings.warn(
                f"{arrived} samples were set to zero, with zero gradient, because their covariance contained NaN or did "
                "not converge; run inside eigengrain.functional.debug() to see which",
                stacklevel=2,
            )

    def read(self, reset: bool) -> dict[str, int]:
        self.collect(wait=True)
        with self._lock:
            counts = {repair: self._counts[repair] for repair in REPAIRS}
            if reset:
                self._counts.clear()
        return counts


_REPAIRED = RepairCounter()


def solver_repairs(*, reset: bool = False) -> dict[str, int]:
    """Number of matrices repaired so far, ``{"jitter": n, "cpu-float64": m, "zeroed": k}``; ``reset`` sets it to zero."""
    return _REPAIRED.read(reset)


def _jittered(p: Tensor) -> Tensor:
    scale = p.diagonal(dim1=-2, dim2=-1).abs().mean(-1)
    jitter = 16 * torch.finfo(p.dtype).eps * scale.clamp_min(torch.finfo(p.dtype).tiny)
    return p + torch.diag_embed(jitter[:, None].expand(p.shape[:-1]))


def _solve_item(p: Tensor, number: int, solver: Solver) -> tuple[Tensor, Tensor]:
    """Solve one matrix of a batch, (1, d, d) and (1, d), with the first attempt that does not fail."""
    item = p[number : number + 1]
    attempts: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "": lambda: solver(item),
        "jitter": lambda: solver(_jittered(item)),
        "cpu-float64": lambda: torch.linalg.eigh(item.cpu().double()),
    }
    for repair, attempt in attempts.items():
        try:
            values, vectors = attempt()
        except LinAlgError:
            continue
        if not all_finite(vectors):
            continue
        if repair:
            _REPAIRED.add(repair)
        return values.to(item), vectors.to(item)
    raise EigenSolverError(f"eigh failed on matrix {number} of {len(p)}, also with jitter and in float64 on the CPU")


def _solve_or_repair(batch: Tensor, solver: Solver) -> tuple[Tensor, Tensor]:
    """Solve a batch; if that fails, solve it item by item and repair only the items that fail."""
    check_finite(batch, "eigh")
    try:
        values, vectors = solver(batch)
        if all_finite(vectors):
            return values, vectors
    except LinAlgError:
        pass
    items = [_solve_item(batch, number, solver) for number in range(len(batch))]
    return torch.cat([values for values, _ in items]), torch.cat([vectors for _, vectors in items])


def _solve_and_zero(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Solve on CUDA without synchronising: samples that are not finite or do not converge become zero and are counted."""
    finite = batch.isfinite().all(-1).all(-1)
    values, vectors, info = cusolver.syev_batched_unchecked(torch.where(finite[:, None, None], batch, 0.0))
    good = finite & (info == 0) & vectors.sum((-2, -1)).isfinite()
    if not capturing(batch.device):  # a captured copy would be read before it is replayed
        _REPAIRED.add_later((~good).sum())
    return torch.where(good[:, None], values, 0.0), torch.where(good[:, None, None], vectors, 0.0)


def all_finite(vectors: Tensor) -> bool:
    """Whether eigenvectors are finite: in float32 LAPACK returns NaN for some matrices of low rank without an error."""
    return bool(vectors.sum().isfinite())


def check_finite(p: Tensor, function: str) -> None:
    """Raise NonFiniteError with the samples of a batch (batch, …) that contain NaN or infinity."""
    finite = p.flatten(1).sum(1).isfinite()  # finite only if every entry is, and needs no mask as large as the batch
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
        raise NonFiniteError(
            f"{function}: NaN or infinity in {len(bad)} of {p.shape[0]} samples (index {shown}): "
            "look for a diverged loss, a learning rate that is too high, or overflow in half precision",
            bad,
        )


@torch.library.custom_op("eigengrain::eigh", mutates_args=())
def _eigh_op(p: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Descending eigenvalues, and the eigenvectors in ROWS, as the solvers return them, so that nothing is transposed."""
    batch = p.reshape(-1, *p.shape[-2:])
    name = choose_backend(backend, batch)
    if name == "cusolver-batched" and not _debug.get():
        values, vectors = _solve_and_zero(batch)
    else:
        values, vectors = _solve_or_repair(batch, SOLVERS[name])
    # every solver returns ascending order; it is reversed here and nowhere else
    return values.flip(-1).reshape(p.shape[:-1]), vectors.mT.flip(-2).reshape(p.shape)


@_eigh_op.register_fake
def _(p: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return p.new_empty(p.shape[:-1]), p.new_empty(p.shape)


@torch.library.register_vmap("eigengrain::eigh")
def _(info: Any, in_dims: tuple[int | None, None], p: Tensor, backend: str) -> Any:
    assert in_dims[0] is not None
    return _eigh_op(p.movedim(in_dims[0], 0), backend), (0, 0)


def decompose(p: Tensor, backend: str = "auto") -> Eigh:
    """Decompose symmetric ``p`` (*, d, d) in its own dtype, without recording a gradient."""
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    values, rows = _eigh_op(p.detach(), backend)
    return Eigh(values, rows.mT)


class _Eigh(torch.autograd.Function):
    """Attaches the derivative of the eigenvalues to a finished decomposition."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return values.clone(), vectors.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        p, _, vectors = inputs
        ctx.save_for_backward(p, vectors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor | None, grad_vectors: Tensor | None) -> Any:
        if grad_vectors is not None:
            raise RuntimeError(
                "eigh does not differentiate eigenvectors, whose derivative is infinite at equal eigenvalues: use "
                "spectral_function for functions of the matrix, or torch.linalg.eigh for the eigenvectors"
            )
        if grad_values is None:
            return None, None, None
        p, vectors = ctx.saved_tensors
        with torch.no_grad():
            grad = (vectors * grad_values.unsqueeze(-2)) @ vectors.mT
        return first_order_only(grad, "eigh", grad_values, p), None, None


def eigh(P: Tensor, backend: str = "auto") -> Eigh:
    r"""Eigenvalues in descending order and eigenvectors of symmetric matrices, :math:`P = U \Lambda U^T` (Eq. 3).

    The eigenvalues are differentiable, :math:`\partial l/\partial P = U\,\mathrm{diag}(\partial l/\partial\lambda)\,U^T`
    (at equal eigenvalues only for losses that are symmetric in them). The eigenvectors are not: a gradient that reaches
    them raises, because :func:`spectral_function` has the exact one for every function of the matrix.

    Args:
        P: (*, d, d). Only its symmetric part is used. It is decomposed in float64 whatever its dtype.
        backend: ``auto``, ``torch``, ``cusolver-batched`` (CUDA; ``torch`` is used if cuSOLVER lacks it) or ``cpu``.

    Returns:
        ``(values, vectors)``: (*, d) and (*, d, d), float64 if P is float64 and float32 otherwise.

    Raises:
        ValueError: if P is not square or the backend is unknown.
        NonFiniteError: if P contains NaN or infinity; ``samples`` are the bad ones.
        EigenSolverError: if a matrix failed in every attempt: as it is, with a relative jitter, in float64 on the CPU.
            Repaired matrices are counted in :func:`solver_repairs`. With ``cusolver-batched`` both are reported one step
            later instead, see :func:`debug`.

    Example:
        >>> eigh(torch.diag(torch.tensor([1.0, 3.0, 2.0]))).values
        tensor([3., 2., 1.])
    """
    check_square(P)
    p = symmetric(to_compute(P))
    values, vectors = _Eigh.apply(p, *decompose(p, backend))
    return Eigh(values.to(P.device, output_dtype(P)), vectors.to(P.device, output_dtype(P)))
