"""Tests that need a CUDA device."""

import math

import pytest
import torch
from spectral_cases import F64, features, generator, log_spectrum, matrix, relative

from eigengrain.errors import NonFiniteError
from eigengrain.functional import (
    covariance,
    debug,
    eigh,
    isqrt_covariance,
    matrix_products,
    matrix_sqrt,
    newton_schulz,
    quintic_sqrt,
    scaling_factor,
    solver_repairs,
    sqrt_covariance,
)
from eigengrain.functional._cuda import cusolver
from eigengrain.heads import create_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
batched = pytest.mark.skipif(not cusolver.available(), reason="this libcusolver has no batched eigensolver")


@batched
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (32, 256), (3, 512), (70, 33)])
def test_batched_solver(shape, dtype):
    batch, d = shape
    bound = 4 * max(d, 16) * torch.finfo(dtype).eps
    a = torch.randn(batch, d, d, dtype=dtype, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    a = a + a.mT
    values, vectors = cusolver.syev_batched(a)
    assert (values.diff(dim=-1) >= 0).all()
    assert relative((vectors * values.unsqueeze(-2)) @ vectors.mT, a) < bound
    assert relative(vectors.mT @ vectors, torch.eye(d, device="cuda", dtype=dtype).expand(a.shape)) < bound
    assert torch.allclose(values, torch.linalg.eigvalsh(a), atol=bound * d)


@batched
def test_batched_solver_on_low_rank_zero_and_repeated():
    zero = torch.zeros(4, 64, 64, dtype=F64)
    low = matrix(torch.cat([torch.ones(5, dtype=F64), torch.zeros(59, dtype=F64)]), batch=4)
    repeated = torch.eye(64, dtype=F64).expand(4, 64, 64)
    for p in (zero, low, repeated):
        values, vectors = eigh(p.cuda(), "cusolver-batched")
        assert torch.allclose((vectors * values.unsqueeze(-2)) @ vectors.mT, p.cuda(), atol=1e-12)
    assert not any(solver_repairs().values())


@batched
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_bad_samples_are_zeroed_counted_and_reported_late(dtype):
    x = torch.randn(4, 16, 50, device="cuda", requires_grad=True)
    with torch.no_grad():
        x[1, 0, 0] = torch.nan
        x[3, 2, 7] = torch.inf
    solver_repairs(reset=True)

    def run():
        q = sqrt_covariance(x, True, solver="eigh", dtype=dtype)
        q.sum().backward()
        return q.detach(), solver_repairs(reset=True)

    with pytest.warns(UserWarning, match="2 samples"):  # by the second decomposition in float32, or by reading the count
        q, repairs = run()
    assert repairs["zeroed"] == 2
    assert q[[1, 3]].abs().max() == 0
    assert x.grad[[1, 3]].abs().max() == 0
    assert x.grad.isfinite().all()
    assert q[[0, 2]].abs().amin((1, 2)).max() > 0
    with debug(), pytest.raises(NonFiniteError) as error:
        sqrt_covariance(x, True, solver="eigh", dtype=dtype)
    assert error.value.samples == (1, 3)


@batched
@pytest.mark.parametrize("solver", ["eigh", "products"])
@pytest.mark.parametrize("kappa", [1e2, 1e6])
@pytest.mark.parametrize("shape", [(48, 100), (60, 40), (256, 784)])
def test_float32_against_float64(shape, kappa, solver):
    d, n = shape
    x = features(d, n, log_spectrum(min(d, n - 1), kappa), seed=1, batch=3).float().cuda()
    g = torch.randn(3, d, d, generator=generator(2)).cuda()
    results = []
    for dtype in (torch.float32, F64):
        y = x.clone().requires_grad_()
        q = sqrt_covariance(y, True, dtype=dtype, solver=solver if dtype == torch.float32 else "eigh")
        results.append((q.detach(), torch.autograd.grad(q, y, g)[0]))
    (q, dx), (exact, slope) = results
    assert relative(q, exact) < 2e-5
    assert relative(dx, slope) < 1e-3


@batched
@pytest.mark.parametrize(
    "solver, dtype", [(s, d) for d in (F64, torch.float32) for s in ("eigh", "products")] + [("gram", torch.float32)]
)
def test_no_synchronisation(solver, dtype):
    x = torch.randn(4, 32, 100, device="cuda", requires_grad=True)
    for _ in range(4):
        sqrt_covariance(x, True, solver=solver, dtype=dtype).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sqrt_covariance(x, True, solver=solver, dtype=dtype).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_replayed_graphs_give_what_plain_calls_give():
    x = torch.randn(3, 24, 60, device="cuda", dtype=F64)
    g = torch.randn(3, 24, 24, device="cuda", dtype=F64)
    results = []
    for _ in range(5):
        y = x.clone().requires_grad_()
        q = sqrt_covariance(y, True, solver="products")
        results.append((q.detach(), torch.autograd.grad(q, y, g)[0]))
        x = x + 0  # another address
    for q, dq in results[1:]:
        assert torch.allclose(q, results[0][0], rtol=1e-12, atol=1e-13)
        assert torch.allclose(dq, results[0][1], rtol=1e-9, atol=1e-12)
    other = sqrt_covariance(x + 1 + torch.randn_like(x), True, solver="products")
    assert relative(other, results[0][0]) > 1e-2
    assert torch.equal(results[-1][0], results[-2][0])  # later replays do not overwrite an output


@batched
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_replayed_eigensolver(dtype):
    """It is recorded at the third call, in inference mode too, and later calls do not change earlier results."""
    shapes, results = [(5, 48), (3, 33)], []
    for number in range(6):
        for batch, d in shapes:
            p = matrix(log_spectrum(d, 1e3), seed=number, batch=batch).to("cuda", dtype)
            with torch.inference_mode(number < 4):
                values, vectors = eigh(p, "cusolver-batched")
            results.append((p, values, vectors))
    for p, values, vectors in results:
        assert relative((vectors * values.unsqueeze(-2)) @ vectors.mT, p) < 4 * 48 * torch.finfo(dtype).eps


def test_replayed_newton_schulz():
    for _ in range(5):
        x = torch.randn(3, 24, 60, device="cuda", dtype=F64, requires_grad=True)
        g = torch.randn(3, 24, 24, device="cuda", dtype=F64)
        ours = torch.autograd.grad(isqrt_covariance(x), x, g)[0]
        (expected,) = torch.autograd.grad(newton_schulz(covariance(x)), x, g)
        assert torch.allclose(isqrt_covariance(x), newton_schulz(covariance(x)), atol=1e-12)
        assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_the_products_route_can_be_captured():
    x = torch.randn(3, 24, 60, device="cuda", dtype=F64)
    expected = sqrt_covariance(x, True, solver="products")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = sqrt_covariance(x, True, solver="products")
    graph.replay()
    assert torch.allclose(q, expected, rtol=1e-12, atol=1e-13)


@batched
def test_batched_solver_runs_on_the_current_stream():
    p = matrix(log_spectrum(64, 1e4), batch=8).cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        values = eigh(p, "cusolver-batched").values
    side.synchronize()
    assert torch.allclose(values, eigh(p, "torch").values, atol=1e-13)


@pytest.mark.parametrize("solver", ["eigh", "gram", "svd", "products"])
@pytest.mark.parametrize("shape", [(64, 100), (64, 40)])
def test_same_as_on_the_cpu(shape, solver):
    d, n = shape
    x = features(d, n, log_spectrum(min(d, n - 1), 1e8), seed=1, batch=3)
    g = torch.randn(3, d, d, dtype=F64, generator=generator(0))
    results = []
    for device in ("cpu", "cuda"):
        y = x.to(device).requires_grad_()
        q = sqrt_covariance(y, True, solver=solver)
        results.append((q.detach().cpu(), torch.autograd.grad(q, y, g.to(device))[0].cpu()))
    (q, dq), (cq, cdq) = results
    assert relative(cq, q) < 1e-8
    assert relative(cdq, dq) < (1e-2 if solver == "products" and n <= d else 1e-5)


@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
def test_tf32_and_autocast_have_no_effect(autocast):
    x = features(64, 200, log_spectrum(64, 1e6), seed=2, batch=2).float().cuda()
    exact = sqrt_covariance(x.double(), True)
    p = (x.double() @ x.double().mT).float()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            y = x.clone().requires_grad_()
            q = sqrt_covariance(y, True)
            low = sqrt_covariance(y, True, dtype=torch.float32)
            assert q.dtype == low.dtype == torch.float32
            assert relative(q, exact) < 1e-6
            assert relative(low, exact) < 1e-5
            (q.sum() + low.sum()).backward()
            assert relative(newton_schulz(p, dtype=torch.float32), newton_schulz(p.double())) < 1e-6
            assert relative(quintic_sqrt(p), matrix_sqrt(p)) < 1e-5
        assert y.grad.isfinite().all()
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_half_precision_features_in_channels_last():
    x = (
        torch.randn(4, 32, 14, 14, device="cuda", dtype=torch.bfloat16)
        .to(memory_format=torch.channels_last)
        .requires_grad_()
    )
    q = sqrt_covariance(x, True)
    q.sum().backward()
    assert q.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16
    assert relative(q, sqrt_covariance(x.detach().double().cpu(), True).cuda()) < 1e-6


def test_inside_a_compiled_model():
    x = torch.randn(4, 16, 10, 10, device="cuda", dtype=F64, requires_grad=True)

    def loss(t):
        return sqrt_covariance(t.relu(), True).sin().sum()

    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)
    (eager,) = torch.autograd.grad(loss(x), x)
    assert torch.allclose(compiled, eager, atol=1e-10)


def test_scaling_factor_by_both_routes():
    p = matrix(log_spectrum(48, 1e8), batch=3).cuda() * 50
    assert torch.allclose(scaling_factor(p), scaling_factor(p, solver="products"), rtol=1e-11)


def test_the_first_call_may_come_from_an_evaluation():
    """Graphs that are recorded in inference mode must serve training too."""
    x = torch.randn(3, 25, 60, device="cuda")
    for _ in range(4):
        with torch.inference_mode():
            assert sqrt_covariance(x).isfinite().all()
    y = x.clone().requires_grad_()
    sqrt_covariance(y).sum().backward()
    assert y.grad.isfinite().all()


def test_auto_can_be_captured():
    x = torch.randn(3, 24, 60, device="cuda", dtype=F64)
    expected = sqrt_covariance(x, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = sqrt_covariance(x, True)
    graph.replay()
    assert torch.allclose(q, expected, rtol=1e-9, atol=1e-12)


@batched
def test_default_device():
    """``torch.set_default_device("cuda")``: tensors that belong on the host are created there explicitly."""
    with torch.device("cuda"):
        head = create_head("run", 24)  # its start is drawn on the host
        x = torch.rand(3, 24, 8, 8)
        assert head(x).is_cuda
        assert sqrt_covariance(x, True, solver="eigh").isfinite().all()
    assert torch.equal(head.start.cpu(), create_head("run", 24).start)


@pytest.mark.parametrize("d", [5, 64, 100])
def test_squarings_that_are_counted_on_the_device(d):
    """Spectra from 1e-9 to 1e5 side by side: each matrix takes its own number of squarings."""
    pytest.importorskip("triton")
    sizes = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 30.0, 1e3, 1e5], dtype=F64)
    p = (matrix(log_spectrum(d, 1e6), batch=len(sizes)) * sizes[:, None, None]).cuda()
    values, vectors = torch.linalg.eigh(p)
    exact = (vectors * (-2 * values).exp().unsqueeze(-2)) @ vectors.mT
    assert matrix_products._kernels(p.device) is not None
    counted = matrix_products.exp_minus_twice(p)
    assert (counted - exact).abs().max() < 1e-13
    assert torch.equal(counted, counted.mT)
    assert matrix_products.exp_minus_twice(1e60 * p).isfinite().all()


@pytest.mark.parametrize("d", [5, 64, 100, 256])
def test_matrices_make_only_the_steps_that_they_need(d):
    """Well and ill-conditioned matrices side by side: root and Lyapunov equation as by the same steps on the CPU."""
    pytest.importorskip("triton")
    spectra = [log_spectrum(d, kappa) ** 2 for kappa in (10, 1e5, 1e9)]
    spectra.append(torch.where(torch.arange(d) < 3, 1.0, 0.0).to(F64))
    p = torch.cat([matrix(spectrum, seed=seed) for seed, spectrum in enumerate(spectra)])
    g = torch.randn(p.shape, dtype=F64, generator=generator(1))
    g = g + g.mT
    roots = matrix_products.roots(p.cuda())
    assert roots.far.tolist() == [0, 0, 1, 1]
    exact = matrix_products.roots(p)
    (solution, product), (expected, inner) = matrix_products.lyapunov(roots, g.cuda()), matrix_products.lyapunov(exact, g)
    for number, bound in enumerate((1e-13, 1e-12, 1e-10, 1e-8)):
        assert relative(roots.y[number].cpu(), exact.y[number]) < bound
    assert torch.allclose(product.cpu(), inner, rtol=0, atol=1e-8 * float(torch.linalg.matrix_norm(g).max()))
    for number, bound in enumerate((1e-10, 1e-10, 1e-5)):
        assert relative(solution[number].cpu(), expected[number]) < bound
    # the solution for a singular matrix is approximate, but 2 X P^½, the gradient to the features, keeps its bound
    root = roots.y[3] * roots.scale[3].sqrt()
    assert torch.linalg.matrix_norm(2 * solution[3] @ root) <= math.sqrt(2) * (1 + 1e-6) * torch.linalg.matrix_norm(g[3])
    alone = matrix_products.roots(p[1:2].cuda())
    assert relative(alone.y[0], roots.y[1]) < 1e-14
