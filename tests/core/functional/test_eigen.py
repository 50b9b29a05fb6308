import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from spectral_cases import F64, matrix

from eigengrain.errors import ArgumentError, EigenSolverError, NonFiniteError, SecondOrderError, UnknownName
from eigengrain.functional import BACKENDS, eigen, eigh, rounding_floor, solver_repairs
from eigengrain.functional.inputs import LinAlgError, warn_once


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(4, 4), (3, 5, 5), (2, 3, 40, 40), (1, 1, 1), (0, 3, 3)])
def test_descending_and_reconstructs(shape, backend):
    a = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    a = a + a.mT
    values, vectors = eigh(a, backend)
    assert values.shape == shape[:-1]
    assert (values.diff(dim=-1) <= 0).all()
    assert torch.allclose((vectors * values.unsqueeze(-2)) @ vectors.mT, a, rtol=0, atol=1e-12)
    assert torch.allclose(vectors.mT @ vectors, torch.eye(shape[-1], dtype=F64).expand(shape), rtol=0, atol=1e-12)


def test_only_the_symmetric_part_is_used():
    a = torch.randn(3, 6, 6, dtype=F64)
    assert torch.allclose(eigh(a).values, eigh((a + a.mT) / 2).values, rtol=0, atol=1e-12)


def test_float32_is_decomposed_in_float64():
    p = matrix(torch.logspace(0, -6, 8, dtype=F64)).float()
    values = eigh(p).values
    assert values.dtype == torch.float32
    assert torch.allclose(values.double(), torch.linalg.eigvalsh(p.double()).flip(-1), rtol=1e-6, atol=0)


def test_eigenvalue_gradient():
    a = matrix(torch.tensor([3.0, 2.0, 0.5, -1.0], dtype=F64), batch=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: eigh(m).values, a)
    # at equal eigenvalues a loss that is symmetric in them is differentiable: tr P² has the gradient 2P
    equal = (2 * torch.eye(3, dtype=F64)).requires_grad_()
    (grad,) = torch.autograd.grad(eigh(equal).values.square().sum(), equal)
    assert torch.allclose(grad, 2 * equal, rtol=0, atol=1e-13)


def test_eigenvectors_refuse_a_gradient():
    a = matrix(torch.tensor([3.0, 2.0], dtype=F64)).requires_grad_()
    with pytest.raises(RuntimeError):
        eigh(a).vectors.sum().backward()


def test_second_order_raises_rather_than_being_wrong():
    a = matrix(torch.tensor([3.0, 2.0], dtype=F64)).requires_grad_()
    (grad,) = torch.autograd.grad(eigh(a).values.square().sum(), a, create_graph=True)
    with pytest.raises(SecondOrderError):
        grad.sum().backward()
    with pytest.raises(NotImplementedError):
        torch.func.hessian(lambda m: eigh(m).values.square().sum())(a.detach()[0])


def test_vmap_equals_the_batched_call():
    a = matrix(torch.tensor([3.0, 2.0, 1.0], dtype=F64), batch=4)
    for ours, batched in zip(torch.func.vmap(eigh)(a), eigh(a), strict=True):
        assert torch.equal(ours, batched)
    moved = torch.func.vmap(eigh, in_dims=1)(a.movedim(0, 1))
    assert torch.equal(moved.values, eigh(a).values)


def test_the_operator_is_well_formed():
    torch.library.opcheck(eigen._eigh_op, (matrix(torch.tensor([3.0, 2.0, 1.0], dtype=F64), batch=4), "auto"))


NOTHING = {"jitter": 0, "cpu-float64": 0, "zeroed": 0}


class Flaky:
    """A solver that fails a number of times on the matrices marked by their first diagonal entry."""

    def __init__(self, marks, failures):
        self.marks, self.left = marks, dict.fromkeys(marks, failures)

    def __call__(self, p):
        for i, mark in enumerate(p[:, 0, 0].round().tolist()):
            if mark in self.left and self.left[mark] > 0:
                self.left[mark] -= len(p) == 1
                raise LinAlgError(f"item {i}")
        return torch.linalg.eigh(p)


@pytest.mark.parametrize("failures, repair", [(0, None), (1, "jitter"), (2, "cpu-float64")])
def test_only_failing_items_are_repaired(monkeypatch, failures, repair):
    p = torch.stack([torch.diag(torch.tensor([float(10 * i + 1), 0.5, 0.25], dtype=F64)) for i in range(4)])
    monkeypatch.setitem(eigen.SOLVERS, "torch", Flaky([11, 31], failures))
    solver_repairs(reset=True)
    values, vectors = eigh(p, "torch")
    counts = solver_repairs(reset=True)
    assert counts == NOTHING | ({repair: 2} if repair else {})
    assert torch.allclose(values, p.diagonal(dim1=-2, dim2=-1), rtol=1e-12, atol=0)
    assert torch.equal(values[[0, 2]], p.diagonal(dim1=-2, dim2=-1)[[0, 2]])
    assert torch.allclose((vectors * values.unsqueeze(-2)) @ vectors.mT, p, rtol=1e-12, atol=0)
    assert solver_repairs() == NOTHING


def test_a_matrix_that_cannot_be_repaired_raises(monkeypatch):
    def never(p):
        raise LinAlgError("no")

    monkeypatch.setitem(eigen.SOLVERS, "torch", never)
    monkeypatch.setattr(torch.linalg, "eigh", never)
    with pytest.raises(EigenSolverError):
        eigh(torch.eye(3).repeat(2, 1, 1), "torch")


@pytest.fixture
def two_threads():
    """Distribute batches over two workers on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    eigen.workers.cache_clear()
    yield
    torch.set_num_threads(before)


def test_number_of_threads_is_unchanged(two_threads):
    eigh(torch.eye(40).repeat(6, 1, 1))
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as later:  # a thread created later starts with the same number
        assert later.submit(torch.get_num_threads).result() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_its_own_workers(two_threads):
    p = torch.eye(40).repeat(6, 1, 1)
    eigh(p)
    child = os.fork()
    if child == 0:
        wrong = True
        try:
            wrong = not torch.equal(eigh(p).values, torch.ones(6, 40))
        finally:
            os._exit(wrong)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


def test_cusolver_falls_back_with_a_warning():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="cusolver-batched"):
        values = eigh(torch.eye(3).repeat(2, 1, 1), "cusolver-batched").values
    assert torch.equal(values, torch.ones(2, 3))


@pytest.mark.parametrize("P", [torch.randn(3, 4), torch.randn(3), torch.eye(3, dtype=torch.int32), "P"])
def test_bad_matrices(P):
    with pytest.raises(ArgumentError) as error:
        eigh(P)
    assert error.value.argument == "P"


def test_unknown_backend():
    with pytest.raises(UnknownName) as error:
        eigh(torch.eye(3), "cusolver")
    assert (error.value.kind, error.value.suggestions) == ("backend", ["cusolver-batched"])


def test_non_finite_samples_are_named():
    p = torch.eye(2).repeat(12, 1, 1)
    p[1, 0, 0], p[3:, 1, 1] = torch.inf, torch.nan
    with pytest.raises(NonFiniteError) as error:
        eigh(p)
    assert error.value.samples == (1, *range(3, 12))
    assert str(error.value).startswith("eigh: NaN or infinity in 10 of 12 samples (index 1, 3, 4, 5, 6, 7, 8, 9, …): ")


def test_rounding_floor_and_zeroing():
    """The definition of a null eigenvalue: at or below d ε λ₁."""
    eps = torch.finfo(F64).eps
    values = torch.tensor([[2.0, 6.1 * eps, 5.9 * eps, -eps], [0.0, 0.0, 0.0, 0.0]], dtype=F64)
    assert torch.equal(rounding_floor(values, 3), torch.tensor([[6 * eps], [0.0]], dtype=F64))
    kept = eigen.zero_rounding(values[:, :3]) > 0
    assert kept.tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_operator_maps_over_any_dimension(dim):
    a = matrix(torch.tensor([3.0, 2.0, 1.0], dtype=F64), batch=3)
    values, rows = torch.func.vmap(eigen._eigh_op, in_dims=(dim, None))(a.movedim(0, dim), "auto")
    assert torch.equal(values, eigen.decompose(a).values)
    assert torch.equal(rows.mT, eigen.decompose(a).vectors)


def test_the_last_attempt_is_in_double_precision():
    """An eigenvalue of 1e-7 of the largest has no correct digit from a float32 solver."""
    p = matrix(torch.tensor([1.0, 1e-3, 1e-7], dtype=F64), batch=8, seed=3).float()
    values = torch.cat([eigen._solve_item(p, i, Flaky([0.0, 1.0, -0.0], 2))[0] for i in range(len(p))])
    expected = torch.linalg.eigvalsh(p.double())
    assert values.dtype == torch.float32
    assert torch.allclose(values.double(), expected, rtol=1e-6, atol=0)
    assert not torch.allclose(torch.linalg.eigvalsh(p).double(), expected, rtol=1e-2, atol=0)
