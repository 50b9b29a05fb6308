"""Symmetric eigendecomposition with one convention (descending), a choice of solver, and a ladder for those that fail.

The whole ladder lives inside one opaque operator, ``eigengrain::eigh``, so that compiled models and ``torch.func.vmap``
meet a single node whose shape is known, whatever had to be repaired inside it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from eigengrain.errors import EigenSolverError, NonFiniteError, UnknownName
from eigengrain.functional._autograd import first_order_only
from eigengrain.functional._cuda import cusolver
from eigengrain.functional._cuda.monitor import MONITOR, debugging
from eigengrain.functional.inputs import LinAlgError, check_square, output_dtype, say_once, to_compute

Solver = Callable[[Tensor], tuple[Tensor, Tensor]]  # (batch, d, d) -> ascending eigenvalues, eigenvectors in columns


class Eigh(NamedTuple):
    """Descending eigenvalues (*, d) and the eigenvectors (*, d, d) in the columns."""

    values: Tensor
    vectors: Tensor


# --- solvers -----------------------------------------------------------------------------------------------------


def _alone() -> None:
    torch.get_num_threads()  # the first question in a thread takes over what the process has, and would do so afterwards
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads for a batch, of this process: a child that was forked has the pool of its parent without its threads."""
    # each worker runs LAPACK on one thread: a batch of small problems gains more from being split than each of them
    pool = ThreadPoolExecutor(threads, "eigengrain-eigh", initializer=_alone)
    all_there = Barrier(threads)
    list(pool.map(lambda _: all_there.wait(), range(threads)))
    torch.set_num_threads(threads)  # as it was for the caller; threads that are yet to come begin with what was set last
    return pool


def _solve_torch(p: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh``, which loops over a batch; on the CPU the batch is shared among the threads."""
    threads = min(torch.get_num_threads(), p.shape[0])
    if p.device.type != "cpu" or threads < 2 or p.shape[-1] < 32:
        values, vectors = torch.linalg.eigh(p)
        return values, vectors
    chunks = list(_workers(torch.get_num_threads(), os.getpid()).map(torch.linalg.eigh, p.chunk(threads)))
    return torch.cat([c[0] for c in chunks]), torch.cat([c[1].mT for c in chunks]).mT  # rows are contiguous in LAPACK's


def _solve_cpu(p: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = _solve_torch(p.cpu())
    return values.to(p.device), vectors.to(p.device)


SOLVERS: dict[str, Solver] = {"torch": _solve_torch, "cusolver-batched": cusolver.syev_batched, "cpu": _solve_cpu}
BACKENDS = ("auto", *SOLVERS)


def _choose(backend: str, p: Tensor) -> str:
    if backend == "auto":
        return "cusolver-batched" if p.is_cuda and p.shape[0] > 1 and cusolver.available() else "torch"
    if backend == "cusolver-batched" and not (p.is_cuda and cusolver.available()):
        say_once(f"backend 'cusolver-batched' is not available here ({cusolver.why_not(p.device)}): 'torch' is used")
        return "torch"
    return backend


# --- the ladder --------------------------------------------------------------------------------------------------


def _jittered(p: Tensor) -> Tensor:
    scale = p.diagonal(dim1=-2, dim2=-1).abs().mean(-1)
    jitter = 16 * torch.finfo(p.dtype).eps * scale.clamp_min(torch.finfo(p.dtype).tiny)
    return p + torch.diag_embed(jitter[:, None].expand(p.shape[:-1]))


def _repair(p: Tensor, solver: Solver) -> tuple[Tensor, Tensor]:
    """Solve item by item; an item that fails climbs the ladder alone, and the others keep their plain solution."""
    values, vectors = p.new_empty(p.shape[:-1]), torch.empty_like(p)
    for i in range(p.shape[0]):
        item = p[i : i + 1]
        rungs: list[tuple[str | None, Callable[[], tuple[Tensor, Tensor]]]] = [
            (None, lambda item=item: solver(item)),  # type: ignore[misc]
            ("jitter", lambda item=item: solver(_jittered(item))),  # type: ignore[misc]
            ("cpu-float64", lambda item=item: torch.linalg.eigh(item.cpu().double())),  # type: ignore[misc]
        ]
        for rung, attempt in rungs:
            try:
                w, v = attempt()
            except LinAlgError:
                continue
            values[i], vectors[i] = w[0], v[0]
            if rung:
                MONITOR.count(rung)
            break
        else:
            raise EigenSolverError(f"eigh failed on matrix {i} of {p.shape[0]}, with jitter and in float64 on the CPU too")
    return values, vectors


def _solve_or_repair(batch: Tensor, solver: Solver) -> tuple[Tensor, Tensor]:
    check_finite(batch, "eigh")
    try:
        return solver(batch)
    except LinAlgError:
        return _repair(batch, solver)


def _solve_and_zero(batch: Tensor) -> tuple[Tensor, Tensor]:
    """On CUDA nothing is asked of the host: samples that are not finite or do not converge become zero, and are counted."""
    finite = batch.isfinite().all(-1).all(-1)
    values, vectors, info = cusolver.syev_batched_unchecked(torch.where(finite[:, None, None], batch, 0.0))
    good = finite & (info == 0)
    MONITOR.watch((~good).sum())
    return torch.where(good[:, None], values, 0.0), torch.where(good[:, None, None], vectors, 0.0)


def check_finite(p: Tensor, who: str) -> None:
    """Name the samples of a batch (batch, …) that contain NaN or infinity."""
    finite = p.flatten(1).sum(1).isfinite()  # a sum is finite only if all of it is, and makes no mask of the batch
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
        raise NonFiniteError(
            f"{who}: NaN or infinity in {len(bad)} of {p.shape[0]} samples (index {shown}): "
            "look for a diverged loss, a learning rate that is too high, or overflow in half precision"
        )


@torch.library.custom_op("eigengrain::eigh", mutates_args=())
def _eigh_op(p: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Descending eigenvalues, and the eigenvectors in ROWS: as solvers leave them, so that nothing is transposed."""
    batch = p.reshape(-1, *p.shape[-2:])
    name = _choose(backend, batch)
    if name == "cusolver-batched" and not debugging():
        values, vectors = _solve_and_zero(batch)
    else:
        values, vectors = _solve_or_repair(batch, SOLVERS[name])
    # every solver here returns ascending order; this is the one place where it is turned round
    return values.flip(-1).reshape(p.shape[:-1]), vectors.mT.flip(-2).reshape(p.shape)


@_eigh_op.register_fake
def _(p: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return p.new_empty(p.shape[:-1]), p.new_empty(p.shape)


@torch.library.register_vmap("eigengrain::eigh")
def _(info: Any, in_dims: tuple[int | None, None], p: Tensor, backend: str) -> Any:
    assert in_dims[0] is not None
    return _eigh_op(p.movedim(in_dims[0], 0), backend), (0, 0)


def decompose(p: Tensor, backend: str = "auto") -> Eigh:
    """The decomposition as constants: no gradient is recorded. ``p`` is symmetric (*, d, d), in the working precision."""
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    values, rows = _eigh_op(p.detach(), backend)
    return Eigh(values, rows.mT)


# --- the public function -----------------------------------------------------------------------------------------


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
                "eigenvectors are not differentiated apart from their eigenvalues (the derivative is infinite at equal "
                "ones): use spectral_function for functions of the matrix, or torch.linalg.eigh for the eigenvectors"
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
    (at equal eigenvalues only for losses that do not tell them apart). The eigenvectors are not: a gradient that reaches
    them raises, because :func:`spectral_function` has the exact one for every function of the matrix.

    Args:
        P: (*, d, d). Only its symmetric part is used. It is decomposed in float64 whatever its dtype.
        backend: ``auto``, ``torch``, ``cusolver-batched`` (CUDA; falls back to ``torch`` where cuSOLVER lacks it) or
            ``cpu``.

    Returns:
        ``(values, vectors)``: (*, d) and (*, d, d), float64 if P is float64 and float32 otherwise.

    Raises:
        ValueError: if P is not square or the backend unknown.
        NonFiniteError: if P holds NaN or infinity; the samples are named.
        EigenSolverError: if a matrix failed on every rung: plainly, with a relative jitter, in float64 on the CPU. What
            was repaired is counted in :func:`solver_repairs`. With ``cusolver-batched`` both are reported one step late
            instead, see :func:`debug`.

    Example:
        >>> eigh(torch.diag(torch.tensor([1.0, 3.0, 2.0]))).values
        tensor([3., 2., 1.])
    """
    check_square(P, "eigh")
    p = to_compute(P)
    p = (p + p.mT) / 2
    values, vectors = _Eigh.apply(p, *decompose(p, backend))
    return Eigh(values.to(P.device, output_dtype(P)), vectors.to(P.device, output_dtype(P)))
