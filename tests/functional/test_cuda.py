"""What only a CUDA device can show; skipped elsewhere."""

import pytest
import torch

from eigengrain.functional import (
    cusolver,
    eigh,
    matrix_sqrt,
    newton_schulz,
    quintic_sqrt,
    scaling_factor,
    solver_repairs,
    sqrt_covariance,
)
from spectral_cases import F64, features, generator, log_spectrum, matrix, relative

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
    assert solver_repairs() == {"jitter": 0, "cpu-float64": 0}


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
def test_tf32_and_autocast_stay_out(autocast):
    x = features(64, 200, log_spectrum(64, 1e6), seed=2, batch=2).float().cuda()
    exact = sqrt_covariance(x.double(), True)
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
            p = (x[:, :, :60] @ x[:, :, :60].mT).double().float()
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
