"""The float32 route of sqrt_covariance, and dtype="auto": against float64, without a float64 operation, at every rank."""

import importlib
import math
from typing import ClassVar

import pytest
import torch
from spectral_cases import F64, MpsHere, features, generator, log_spectrum, on_mps, relative
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eigengrain.functional import (
    choose_dtype,
    eigen,
    graded_factors,
    sqrt_covariance,
    sqrt_covariance_of_subsets,
    triu_vector,
)
from eigengrain.functional.graded_factors import _resolve_op, length_floor, resolve_fixed
from eigengrain.heads import create_head, list_heads
from eigengrain.heads.kernel import suggest_gamma

F32 = torch.float32
sqrt_module = importlib.import_module("eigengrain.functional.sqrt_covariance")


def tail(count, first, second):
    """One singular value of 1, and a spectrum far below it."""
    return torch.cat([torch.ones(1, dtype=F64), first * log_spectrum(count - 1, second)])


def spectra(count):
    j = torch.arange(1, count + 1, dtype=F64)
    return {
        "1e2": log_spectrum(count, 1e2),
        "1e6": log_spectrum(count, 1e6),
        "1e8": log_spectrum(count, 1e8),
        "1e10": log_spectrum(count, 1e10),
        "power law": 1 / j,
        "steep power law": j**-2,
        "far below the first": tail(count, 1e-3, 1e4),
        "equal, far below the first": tail(count, 1e-4, 1.0),
        "two clusters": torch.cat([torch.ones(count // 2, dtype=F64), torch.full((count - count // 2,), 1e-4, dtype=F64)]),
    }


def both(x, g, **options):
    x = x.clone().requires_grad_()
    q = sqrt_covariance(x, **options)
    return q.detach(), torch.autograd.grad(q, x, g.to(q.dtype))[0]


def upstream(x):
    return torch.randn(len(x), x.shape[1], x.shape[1], dtype=F64, generator=generator(7))


@pytest.fixture(params=["any device", "cpu"])
def form(request, monkeypatch):
    """The form of the other devices, whose sizes are fixed, also runs on a CPU."""
    if request.param != "cpu":
        monkeypatch.setattr(sqrt_module, "resolve", resolve_fixed)
    return request.param


class TestAccuracy:
    @pytest.mark.parametrize("shape", [(64, 200), (80, 64), (64, 65)])
    @pytest.mark.parametrize("name", spectra(8))
    def test_against_float64(self, name, shape, form):
        """The form of other devices, with one level, is less accurate where σ is far below 1e-3 of the largest."""
        d, n = shape
        x = features(d, n, spectra(min(d, n - 1))[name], seed=1, batch=2).float()
        g = upstream(x)
        (q, dx), (exact, slope) = both(x, g), both(x.double(), g, solver="svd")
        assert relative(q, exact) <= 2e-5
        loose = name in ("1e10", "steep power law")
        assert relative(dx, slope) <= (1e-3 if not loose else 5e-3 if form == "cpu" else 0.05)

    @pytest.mark.parametrize("seb", [False, True])
    @pytest.mark.parametrize("kappa", [1e2, 1e6])
    def test_the_branch_and_the_scale(self, kappa, seb, form):
        for scale in (1e-3, 1.0, 30.0):
            x = scale * features(48, 100, log_spectrum(48, kappa), seed=2, batch=2).float()
            g = upstream(x)
            (q, dx), (exact, slope) = both(x, g, seb=seb), both(x.double(), g, seb=seb, solver="svd")
            assert relative(q, exact) <= 1e-5
            assert relative(dx, slope) <= 2e-4

    @pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
    @pytest.mark.parametrize("seb", [False, True])
    def test_the_range_of_float32(self, scale, seb, form):
        x = features(6, 20, log_spectrum(6, 1e4), seed=3, batch=2)
        g = upstream(x)
        q, dx = both((scale * x).float(), g, seb=seb)
        exact, slope = both(scale * x, g, seb=seb, solver="svd")
        assert relative(q.double() / scale, exact / scale) <= 1e-5
        assert relative(dx, slope) <= 1e-4

    @pytest.mark.parametrize("cut", ["exact", "projector"])
    @pytest.mark.parametrize("subset", ["top:3", "last:10", "top:1+last:5", "~(top:3)"])
    @pytest.mark.parametrize("n", [12, 50])
    def test_subsets(self, n, subset, cut, form):
        x = features(20, n, log_spectrum(min(20, n - 1), 1e6), seed=4, batch=2).float()
        g = upstream(x)
        q, dx = both(x, g, subset=subset, cut=cut)
        exact, slope = both(x.double(), g, subset=subset, cut=cut, solver="svd")
        assert relative(q, exact) <= 1e-4
        assert relative(dx, slope) <= 1e-3
        [shared], values = sqrt_covariance_of_subsets(x, [subset], cut=cut)
        assert torch.equal(shared, q)
        assert (values.diff() <= 0).all()

    @pytest.mark.parametrize("x", [torch.full((2, 3, 7), 0.3), torch.zeros(1, 3, 4), torch.randn(2, 5, 1, 1)])
    @pytest.mark.parametrize("seb", [False, True])
    def test_constant_input_and_a_single_position(self, x, seb, form):
        q, dx = both(x, upstream(x), seb=seb)
        assert q.abs().max() == 0
        assert dx.abs().max() == 0

    @pytest.mark.parametrize("n", [9, 60])
    def test_dead_channels_and_short_rank(self, n, form):
        """A few of the channels are constant, equal to another one, or a multiple of it."""
        x = torch.randn(2, 16, n, generator=generator(5))
        x[:, [2, 7]] = 0.25
        x[:, 5], x[:, 9] = x[:, 4], 2 * x[:, 3]
        g = upstream(x)
        (q, dx), (exact, slope) = both(x, g, seb=True), both(x.double(), g, seb=True)
        assert q[:, [2, 7]].abs().max() <= 1e-6
        assert relative(q, exact) <= 1e-5
        assert relative(dx, slope) <= 1e-4
        values = sqrt_covariance(x, return_eigenvalues=True)[1]
        exact_values = sqrt_covariance(x.double(), return_eigenvalues=True)[1]
        assert torch.equal(values > 0, exact_values > 0)

    def test_null_directions_are_exactly_zero(self, form):
        for seed in range(8):
            g = generator(seed)
            x = torch.randn(1, 48, 192, generator=g) * (torch.rand(192, generator=g) < 0.15)
            rank = min(48, int((x != 0).any(1).sum()))
            assert int((sqrt_covariance(x, return_eigenvalues=True)[1] > 0).sum()) == rank

    def test_the_bound_is_reached_and_not_exceeded(self, form):
        x = features(4, 9, torch.tensor([1.0], dtype=F64), seed=0).float()
        u = torch.linalg.eigh(sqrt_covariance(x))[1]
        g = u[:, :, 3, None] * u[:, None, :, 0]
        g = g + g.mT
        assert float(both(x, g)[1].norm() / g.norm()) / math.sqrt(2 / 9) == pytest.approx(1, rel=1e-6)


class RefuseFloat64(TorchDispatchMode):
    """Raises at a float64 tensor, as MPS does; it also looks into the operators of this package."""

    inside: ClassVar = {"eigengrain::eigh": eigen._eigh_op, "eigengrain::resolve": _resolve_op}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name() in self.inside:
            with self:
                return self.inside[func.name()]._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs, out)):
            assert not (isinstance(leaf, torch.Tensor) and leaf.dtype == F64), func
            assert leaf is not F64, func
        return out


def with_threads(number):
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread():
    """Modes do not reach other threads."""
    yield from with_threads(1)


@pytest.fixture
def two_threads():
    yield from with_threads(2)


#: settings of the covariance head that compute in float64
OPTIONS = {
    "factor s": {"factor": "s"},
    "learned factor": {"factor": "mlp-eigenvalues"},
    "learned factor of a logarithm": {"factor": "mlp-eigenvalues", "normalise": "log"},
    "published gradient": {"gradient": "pade"},
    "float64": {"dtype": "float64"},
}


class TestWithoutFloat64:
    @pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(2, 40, 9, 9), (2, 40, 4, 4), (2, 3, 1, 1)])
    @pytest.mark.parametrize("options", [{}, {"seb": True}, {"subset": "top:2"}, {"subset": "last:1", "cut": "projector"}])
    def test_forward_and_backward(self, options, shape, dtype, form, one_thread):
        x = torch.randn(shape, generator=generator(1)) * torch.logspace(0, -4, shape[1])[:, None, None]
        x = x.to(dtype).requires_grad_()
        with RefuseFloat64():
            q, values = sqrt_covariance(x, **options, return_eigenvalues=True)
            triu_vector(q).sin().sum().backward()
        assert q.dtype == values.dtype == F32
        assert x.grad.isfinite().all()

    @pytest.mark.parametrize("name", ["mpncov", "mpncov+seb"])
    def test_the_head_with_its_telemetry(self, name, form, one_thread):
        head = create_head(name, 24, reduce=16)
        head.record_spectrum = True
        x = torch.randn(4, 24, 6, 6, generator=generator(2), requires_grad=True)
        with RefuseFloat64():
            head(x).sin().sum().backward()
            with torch.inference_mode():
                head(x)
            head.pool_subsets(head.reduce(x), ["top:2", "last:3"])
        assert head.last_spectrum.eigenvalues.dtype == F32

    @pytest.mark.parametrize("name", ["isqrt", "isqrt+seb"])
    def test_newton_schulz(self, name, one_thread):
        head, x = create_head(name, 5), torch.randn(2, 5, 4, 4, requires_grad=True)
        with RefuseFloat64():
            head(x).sin().sum().backward()
        exact, copy = create_head(name, 5, dtype="float64"), x.detach().clone().requires_grad_()
        exact(copy).sin().sum().backward()
        torch.testing.assert_close(x.grad, copy.grad, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("kappa", [1e2, 1e12])
    @pytest.mark.parametrize("n", [90, 30])
    def test_errors_of_newton_schulz(self, kappa, n):
        x = features(40, n, 3 * log_spectrum(min(40, n - 1), kappa), seed=3, batch=2)[..., None]
        head, results = create_head("isqrt", 40, steps=10), []
        for features_of_a_dtype in (x.clone(), x.float()):
            vector = head(features_of_a_dtype.requires_grad_())
            vector.sin().sum().backward()
            results.append((vector[None], features_of_a_dtype.grad.flatten(2)))
        for exact, low in zip(*results, strict=True):
            assert low.dtype == F32
            assert relative(low, exact) < 2e-5

    def test_many_steps_of_newton_schulz_take_float64(self):
        x = torch.randn(2, 5, 4, 4)
        assert torch.equal(create_head("isqrt", 5, steps=11)(x), create_head("isqrt", 5, steps=11, dtype="float64")(x))
        assert not torch.equal(create_head("isqrt", 5)(x), create_head("isqrt", 5, dtype="float64")(x))

    @pytest.mark.parametrize("name", ["mpncov", "mpncov+seb", "isqrt+seb"])
    def test_products(self, name, one_thread):
        head = create_head(name, 5, solver="products", dtype="float32")
        with RefuseFloat64(), torch.no_grad():
            head(torch.randn(2, 5, 4, 4))

    @pytest.mark.parametrize("name", [*list_heads(any_backbone=True), *OPTIONS])
    def test_every_head_on_a_device_without_float64(self, name):
        """What needs float64 is computed on the CPU, and the vector goes back to the device."""
        x = torch.randn(2, 6, 5, 5, generator=generator(3))
        head = create_head("mpncov+seb", 6, **OPTIONS[name]) if name in OPTIONS else create_head(name, 6)
        expected = head.eval()(x)
        with MpsHere():
            vector = head(on_mps(x))
        assert vector.device.type == "mps"
        torch.testing.assert_close(vector.as_subclass(torch.Tensor), expected)

    def test_telemetry_on_a_device_without_float64(self):
        x = torch.randn(2, 6, 5, 5, generator=generator(3))
        for name in ("logcov+seb", "isqrt+seb"):
            head = create_head(name, 6)
            with MpsHere(), head.recording():
                head(on_mps(x))
            torch.testing.assert_close(head.last_spectrum.eigenvalues, head.eigenvalues(x), check_device=False)
        with MpsHere():
            assert suggest_gamma(on_mps(x)) == pytest.approx(suggest_gamma(x))

    def test_the_mode_notices_float64(self, one_thread):
        with pytest.raises(AssertionError), RefuseFloat64():
            sqrt_covariance(torch.randn(1, 3, 9), dtype=F64)


class TestChoice:
    def test_rule(self, monkeypatch):
        assert choose_dtype("cpu") == choose_dtype("mps") == F32
        assert choose_dtype("cpu", F64) == choose_dtype("cuda", F64) == F64
        assert choose_dtype("cpu", torch.bfloat16) == F32
        rates = {(7, 0): F64, (7, 5): F32, (8, 0): F64, (8, 6): F32, (8, 9): F32, (9, 0): F64, (10, 0): F64, (12, 0): F32}
        for capability, dtype in rates.items():
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)  # noqa: B023
            assert choose_dtype(torch.device("cuda", 0)) == dtype

    def test_float64_where_float32_cannot_be_meant(self):
        x = torch.randn(2, 4, 9)
        exact = sqrt_covariance(x, dtype=F64)
        assert torch.equal(sqrt_covariance(x, dtype="float64"), exact)
        assert torch.equal(sqrt_covariance(x, accuracy=1e-8), exact)
        assert not torch.equal(sqrt_covariance(x), exact)
        assert relative(sqrt_covariance(x, solver="products"), exact) < 1e-7
        assert relative(sqrt_covariance(x, gradient="taylor"), exact) < 1e-7

    @pytest.mark.parametrize("dtype", ["auto", "float32", "float64"])
    def test_option_of_the_head(self, dtype):
        x = torch.randn(2, 5, 4, 4)
        expected = triu_vector(sqrt_covariance(x, seb=True, dtype=dtype))
        assert torch.equal(create_head("mpncov+seb", 5, dtype=dtype)(x), expected)


class TestOperator:
    def test_is_well_formed(self):
        x = torch.randn(2, 6, 20) * torch.logspace(0, -4, 6)[:, None]
        torch.library.opcheck(_resolve_op, (torch.linalg.qr(torch.randn(2, 6, 6))[0], x))

    @pytest.mark.parametrize("kappa", [1e2, 1e10])
    def test_threads_and_samples_are_independent(self, kappa, one_thread):
        x = features(40, 90, log_spectrum(40, kappa), seed=6, batch=3).float()
        g = upstream(x)
        alone = both(x, g)
        torch.set_num_threads(2)
        for one, two in zip(alone, both(x, g), strict=True):
            assert relative(two, one) < 1e-3

    @pytest.mark.parametrize("name", ["far below the first", "1e8"])
    def test_rows_are_orthogonal(self, name, form):
        sigma = spectra(40)[name]
        x = (features(40, 90, sigma, seed=6) / math.sqrt(90)).float()
        rows = torch.linalg.eigh(x @ x.mT)[1].flip(-1).mT
        rows, y = sqrt_module.resolve(rows, rows @ x)
        assert (rows @ rows.mT - torch.eye(40)).abs().max() < 1e-5
        lengths = y.norm(dim=-1)
        v = y / lengths[..., None]
        assert (v @ v.mT - torch.eye(40)).abs().max() < 0.03
        assert torch.allclose(lengths[0].double(), sigma, rtol=1e-2, atol=0)
        assert (lengths.diff() <= 0).all()
        assert (lengths > length_floor(lengths, 40)).all()

    def test_a_failure_keeps_the_first_decomposition(self, monkeypatch):
        x = features(20, 50, log_spectrum(20, 1e6), seed=1).float()
        expected = sqrt_covariance(x)
        solve = torch.linalg.eigh

        def fails(p):
            if p.shape[-1] < 20:
                raise torch.linalg.LinAlgError
            return solve(p)

        monkeypatch.setattr(graded_factors.torch.linalg, "eigh", fails)
        q = sqrt_covariance(x)
        assert 0 < relative(q, expected) < 1e-3

    def test_vmap_and_compile(self):
        x = features(6, 20, log_spectrum(6, 1e6), seed=2, batch=3).float()
        whole = sqrt_covariance(x, seb=True)
        assert relative(torch.func.vmap(lambda t: sqrt_covariance(t[None], True)[0])(x), whole) < 1e-6
        compiled = torch.compile(lambda t: sqrt_covariance(t, True), fullgraph=True, backend="aot_eager")
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(compiled(y).sin().sum(), y)
        expected = torch.autograd.grad(sqrt_covariance(y, True).sin().sum(), y)[0]
        assert relative(slope, expected) < 1e-5

        def loss(t):
            return sqrt_covariance(t[None], True).sin().sum()

        assert relative(torch.func.vmap(torch.func.grad(loss))(x), expected) < 1e-5


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("solver", ["eigh", "gram", "svd"])
def test_inference_gives_the_same_values(solver, dtype, two_threads):
    """Without gradients Vᵀ is not computed."""
    for x in (torch.randn(2, 6, 5), features(40, 90, log_spectrum(40, 1e8), batch=2).float()):
        check_inference(x, solver, dtype)


def check_inference(x, solver, dtype):
    recorded = sqrt_covariance(x.clone().requires_grad_(), True, solver=solver, dtype=dtype).detach()
    assert torch.equal(sqrt_covariance(x, True, solver=solver, dtype=dtype), recorded)
    with torch.inference_mode():
        assert torch.equal(sqrt_covariance(x, True, solver=solver, dtype=dtype), recorded)


def test_eigenvectors_that_lapack_returns_as_nan_are_repaired():
    """Two positions that differ by the smallest float16 number in some of 64 channels: a rank of 1."""
    x = torch.randint(-1, 2, (200, 64, 1), generator=generator(0)) * torch.tensor([1.0, -1.0])
    q = sqrt_covariance(x * 2.0**-24, solver="eigh")
    assert q.isfinite().all()
    assert relative(q, sqrt_covariance(x.double() * 2.0**-24)) < 1e-5
