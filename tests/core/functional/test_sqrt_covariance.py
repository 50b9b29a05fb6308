import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from spectral_cases import F64, central_difference, features, generator, log_spectrum, refused, relative

from eigengrain import EigenSubset
from eigengrain.errors import NonFiniteError, SecondOrderError
from eigengrain.functional import (
    covariance,
    exp_inverse,
    matrix_sqrt,
    newton_schulz,
    scaling_factor,
    sqrt_covariance,
    sqrt_covariance_of_subsets,
)
from eigengrain.functional.inputs import full_precision
from eigengrain.functional.sqrt_covariance import _svd_op

SPECTRAL = ["eigh", "gram", "svd"]


def gradient(x, g, **options):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(sqrt_covariance(x, **options), x, g)[0]


def upstream(x, seed=0):
    return torch.randn(len(x), x.shape[1], x.shape[1], dtype=F64, generator=generator(seed))


INPUTS = {
    "generic": torch.randn(2, 4, 3, 3, dtype=F64, generator=generator(0)),
    "short rank": torch.randn(2, 6, 4, dtype=F64, generator=generator(1)),
    "one position fewer than channels": torch.randn(1, 5, 5, dtype=F64, generator=generator(2)),
    "repeated": features(4, 9, torch.full((4,), 1.3, dtype=F64), seed=3),
    "repeated, short rank": features(6, 5, torch.full((4,), 0.7, dtype=F64), seed=4),
}


class TestValue:
    @pytest.mark.parametrize("solver", [*SPECTRAL, "products", "auto"])
    @pytest.mark.parametrize("case", INPUTS)
    def test_is_the_root_of_the_covariance(self, case, solver):
        x = INPUTS[case]
        q = sqrt_covariance(x, solver=solver)
        assert relative(q @ q, covariance(x)) < (1e-8 if solver == "products" else 1e-13)
        assert torch.linalg.eigvalsh(q).min() > (-1e-8 if solver == "products" else -1e-14)

    @pytest.mark.parametrize("solver", [*SPECTRAL, "products"])
    def test_seb_is_the_formula_of_the_paper(self, solver):
        x = INPUTS["generic"]
        q, s = matrix_sqrt(covariance(x)), exp_inverse(covariance(x))
        a = torch.linalg.matrix_norm(q @ s.mT)[:, None, None] * q + q
        assert relative(sqrt_covariance(x, seb=True, solver=solver), a) < 1e-12

    @pytest.mark.parametrize("solver", SPECTRAL)
    def test_a_subset_masks_the_root_only(self, solver):
        x = INPUTS["generic"]
        p = covariance(x)
        expected = (1 + scaling_factor(p))[:, None, None] * matrix_sqrt(p, subset="top:1+last:2")
        assert relative(sqrt_covariance(x, True, "top:1+last:2", solver=solver), expected) < 1e-13

    def test_rank_identities(self):
        """196 positions in 256 channels: the top 206 include all nonzero eigenvalues, and the last 50 are zero."""
        x = torch.randn(1, 256, 14, 14, dtype=F64, generator=generator(0))
        assert torch.equal(sqrt_covariance(x, subset="top:206"), sqrt_covariance(x))
        assert sqrt_covariance(x, subset="last:50").abs().max() == 0

    @pytest.mark.parametrize("shape", [(0, 4, 3, 3), (0, 6, 4)])
    @pytest.mark.parametrize("solver", [*SPECTRAL, "products", "auto"])
    def test_empty_batch(self, shape, solver):
        x = torch.zeros(shape, requires_grad=True)
        q = sqrt_covariance(x, seb=True, solver=solver)
        assert q.shape == (0, shape[1], shape[1])
        assert torch.autograd.grad(q.sum(), x)[0].shape == shape

    def test_returned_eigenvalues(self):
        for x in INPUTS.values():
            for solver in [*SPECTRAL, "products"]:
                q, values = sqrt_covariance(x, solver=solver, return_eigenvalues=True)
                expected = torch.linalg.eigvalsh(covariance(x)).flip(-1).clamp_min(0)
                assert torch.allclose(values, expected, rtol=0, atol=1e-13)
                assert not values.requires_grad
                assert q.shape == (len(x), x.shape[1], x.shape[1])


class TestGradient:
    @pytest.mark.parametrize("seb", [False, True])
    @pytest.mark.parametrize("solver", SPECTRAL)
    @pytest.mark.parametrize("case", INPUTS)
    def test_gradcheck(self, case, solver, seb):
        x = INPUTS[case].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda t: sqrt_covariance(t, seb, solver=solver), x)

    @pytest.mark.parametrize("case", ["generic", "repeated"])
    def test_gradcheck_of_the_products_route(self, case):
        x = INPUTS[case].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda t: sqrt_covariance(t, True, solver="products"), x)

    @pytest.mark.parametrize("case", ["short rank", "repeated, short rank"])
    def test_the_products_route_at_short_rank(self, case):
        """Its null directions have noise of 1e-10, too much for finite differences: compare with the exact gradient."""
        x = INPUTS[case]
        assert relative(gradient(x, upstream(x), seb=True, solver="products"), gradient(x, upstream(x), seb=True)) < 1e-3

    @pytest.mark.parametrize("cut", ["exact", "projector"])
    @pytest.mark.parametrize("subset", ["top:2", "last:3", "top:1+last:1"])
    @pytest.mark.parametrize("solver", SPECTRAL)
    def test_subsets_agree_with_the_covariance_route(self, solver, subset, cut):
        x = INPUTS["generic"]
        g = upstream(x)
        y = x.clone().requires_grad_()
        p = covariance(y)
        a = matrix_sqrt(p, subset=subset, cut=cut) * (1 + scaling_factor(p))[:, None, None]
        (expected,) = torch.autograd.grad(a, y, g)
        ours = gradient(x, g, seb=True, subset=subset, cut=cut, solver=solver)
        assert relative(ours.flatten(2), expected.flatten(2)) < 1e-12

    @pytest.mark.parametrize("solver", SPECTRAL)
    def test_exact_subsets_at_short_rank_gradcheck(self, solver):
        x = INPUTS["short rank"].clone().requires_grad_()
        for subset in ("top:2", "~(top:2)"):
            assert torch.autograd.gradcheck(lambda t: sqrt_covariance(t, True, subset, solver=solver), x)  # noqa: B023

    def test_a_partition_adds_up(self):
        x, top = INPUTS["short rank"], EigenSubset.largest(2)
        g = upstream(x)
        parts = gradient(x, g, subset=top) + gradient(x, g, subset=top.complement())
        assert relative(parts, gradient(x, g)) < 1e-13

    @pytest.mark.parametrize("solver", SPECTRAL)
    @pytest.mark.parametrize("seb", [False, True])
    def test_against_finite_differences_at_short_rank_and_with_dead_channels(self, seb, solver):
        """Along directions that keep the rank the map is smooth; at dead channels the symmetric derivative is expected."""
        x = torch.randn(1, 8, 6, dtype=F64, generator=generator(5))
        x[:, [2, 5]] = 0.25
        g = upstream(x)
        ours = gradient(x, g, seb=seb, solver=solver)
        for seed in range(4):
            direction = torch.randn(x.shape, dtype=F64, generator=generator(seed))
            direction[:, [2, 5]] = 0
            numeric = (central_difference(lambda t: sqrt_covariance(t, seb, solver=solver), x, direction, 1e-3) * g).sum()
            assert float((ours * direction).sum()) == pytest.approx(float(numeric), rel=1e-6)
            # into the dead channels: Q moves by |h| there, which the central difference removes
            direction = torch.zeros_like(x)
            direction[:, 2] = torch.randn(6, dtype=F64, generator=generator(seed))
            h = 1e-6
            ahead, back = (sqrt_covariance(x + s * h * direction, seb, solver=solver) for s in (1, -1))
            numeric = ((ahead - back) / (2 * h) * g).sum()
            assert float((ours * direction).sum()) == pytest.approx(float(numeric), abs=1e-6 * float(g.norm()))

    @pytest.mark.parametrize("solver", [*SPECTRAL, "products"])
    @pytest.mark.parametrize("seb", [False, True])
    @pytest.mark.parametrize("x", [torch.full((2, 3, 7), 0.3), torch.zeros(1, 3, 4), torch.randn(2, 5, 1, 1)])
    def test_constant_input_and_a_single_position(self, x, seb, solver):
        x = x.double().requires_grad_()
        q = sqrt_covariance(x, seb, solver=solver)
        (grad,) = torch.autograd.grad(q.sum(), x)
        assert q.abs().max() == 0
        assert grad.abs().max() == 0

    def test_routes_agree_at_condition_number_1e10(self):
        x = features(32, 100, log_spectrum(32, 1e10), seed=8, batch=2)
        g = upstream(x)
        reference = gradient(x, g, seb=True, solver="svd")
        for solver in ("eigh", "gram", "products"):
            assert relative(sqrt_covariance(x, True, solver=solver), sqrt_covariance(x, True, solver="svd")) < 1e-10
            assert relative(gradient(x, g, seb=True, solver=solver), reference) < 1e-6


@pytest.fixture
def products():
    """torch's settings of float32 products may be changed."""
    yield
    torch.set_float32_matmul_precision("highest")
    for setting in (torch.backends, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul):
        setting.fp32_precision = "none"


class TestPrecision:
    @pytest.mark.parametrize("kappa", [1e2, 1e6, 1e10])
    def test_the_float32_route_does_not_square_the_condition_number(self, kappa):
        x = features(32, 100, log_spectrum(32, kappa), seed=9, batch=2).float()
        ours = sqrt_covariance(x, dtype=torch.float32)
        assert relative(ours, sqrt_covariance(x.double())) <= 1e-5
        g = upstream(x)
        assert relative(gradient(x, g.float(), dtype=torch.float32), gradient(x.double(), g)) <= 1e-3

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_dtypes_in_and_out(self, dtype):
        x = torch.randn(2, 4, 5, 5).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q = sqrt_covariance(x, seb=True)
            low = sqrt_covariance(x, seb=True, dtype=torch.float32)
        assert q.dtype == low.dtype == (F64 if dtype == F64 else torch.float32)
        exact = sqrt_covariance(x.detach().double(), seb=True)
        assert relative(q, exact) < 1e-6
        assert relative(low, exact) < 1e-5
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q.sum().backward()
        assert x.grad.dtype == dtype
        assert x.grad.isfinite().all()

    def test_backward_inside_autocast_is_exact_too(self):
        x = torch.randn(2, 6, 30)
        plain = gradient(x, upstream(x).float(), dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = gradient(x, upstream(x).float(), dtype=torch.float32)
        assert torch.equal(plain, inside)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("how", ["high", "medium", "fp32_precision of the operation", "fp32_precision of all"])
    def test_reduced_products_are_switched_off_and_on_again(self, products, how, device):
        """By torch's older and newer setting, which must not be mixed; a CPU may compute in bfloat16, a GPU in TF32."""
        x = SimpleNamespace(dtype=torch.float32, device=torch.device(device))  # a stand-in for a tensor
        setting = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}[device]
        if how == "fp32_precision of the operation":
            setting.fp32_precision = "tf32"
        elif how == "fp32_precision of all":
            torch.backends.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(how)
        before = setting.fp32_precision
        assert before in ("tf32", "bf16")
        first, second = ExitStack(), ExitStack()
        first.enter_context(full_precision(x))
        second.enter_context(full_precision(x))  # as another thread could
        assert setting.fp32_precision == "ieee"
        first.close()
        assert setting.fp32_precision == "ieee"
        second.close()
        assert setting.fp32_precision == before
        if how in ("high", "medium"):
            assert torch.get_float32_matmul_precision() == how

    def test_float64_where_products_could_not_be_switched(self, products):
        """Those of a backward pass by autograd, and of compiled code."""
        x = features(8, 30, log_spectrum(8, 1e6), batch=2).float()
        p = covariance(x)
        compiled = torch.compile(sqrt_covariance, fullgraph=True, backend="eager")
        assert not torch.equal(newton_schulz(p, dtype=torch.float32), newton_schulz(p))
        assert torch.equal(compiled(x), sqrt_covariance(x))
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(newton_schulz(p, dtype=torch.float32), newton_schulz(p))
        exact = sqrt_covariance(x, dtype=F64)
        assert torch.equal(compiled(x), exact)
        assert torch.equal(torch.compile(sqrt_covariance, fullgraph=True, backend="eager")(x, dtype="float32"), exact)
        assert not torch.equal(sqrt_covariance(x), exact)

    def test_channels_last_and_strided_input(self):
        x = torch.randn(2, 6, 5, 4)
        q = sqrt_covariance(x)
        assert torch.equal(sqrt_covariance(x.to(memory_format=torch.channels_last)), q)
        assert torch.equal(sqrt_covariance(x.mT.contiguous().mT), q)


def test_memory_saved_for_backward():
    """At most the centred features and O(d²) per sample: U as the only d × d matrix, one d × N factor, one vector."""
    b, d, n = 3, 16, 64
    x = torch.randn(b, d, n, requires_grad=True)
    saved = {}

    def pack(t):
        if t.dtype == F64:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        sqrt_covariance(x, seb=True)
    centred, square = b * d * n * 8, b * d * d * 8
    assert sum(saved.values()) <= centred + 1.2 * square


class TestTransforms:
    def test_vmap_equals_the_batched_call(self):
        x = torch.randn(3, 2, 4, 9, dtype=F64)
        for solver in [*SPECTRAL, "products"]:
            mapped = torch.func.vmap(lambda t: sqrt_covariance(t, True, solver=solver))(x)  # noqa: B023
            assert torch.allclose(
                mapped.flatten(0, 1), sqrt_covariance(x.flatten(0, 1), True, solver=solver), rtol=0, atol=1e-14
            )

    def test_vmap_and_compile_with_a_covariance_in_quarters(self):
        x = torch.randn(2, 1, 130, 140, dtype=F64)
        mapped = torch.func.vmap(sqrt_covariance)(x).flatten(0, 1)
        whole = sqrt_covariance(x.flatten(0, 1))
        assert torch.allclose(mapped, whole, rtol=0, atol=1e-12)
        assert torch.allclose(
            torch.compile(sqrt_covariance, backend="aot_eager")(x.flatten(0, 1)), whole, rtol=0, atol=1e-12
        )
        assert relative(whole @ whole, covariance(x.flatten(0, 1))) < 1e-12

    def test_per_sample_gradients(self):
        x = torch.randn(3, 1, 4, 9, dtype=F64)

        def loss(t):
            return sqrt_covariance(t, True).sin().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss))(x)
        assert torch.allclose(per_sample.flatten(0, 1), torch.func.grad(loss)(x.flatten(0, 1)), rtol=0, atol=1e-14)

    def test_second_order_raises_rather_than_being_wrong(self):
        x = INPUTS["generic"][:1].clone()

        def loss(t):
            return sqrt_covariance(t, True).sum() + t.pow(3).sum()

        y = x.requires_grad_()
        (grad,) = torch.autograd.grad(loss(y), y, create_graph=True)
        with pytest.raises(SecondOrderError) as error:
            grad.sum().backward()
        assert error.value.function == "sqrt_covariance"
        with pytest.raises(NotImplementedError):
            torch.func.hessian(loss)(x.detach())
        with pytest.raises(SecondOrderError):
            torch.func.jacrev(torch.func.jacrev(loss))(x.detach())

    @pytest.mark.parametrize("solver", ["eigh", "svd", "products"])
    def test_inside_a_compiled_model(self, solver):
        model = torch.nn.Conv2d(3, 6, 3, dtype=F64)
        x = torch.randn(2, 3, 8, 8, dtype=F64)

        def loss(t):
            return sqrt_covariance(model(t).relu(), True, solver=solver).sin().sum()

        # one full compilation is enough; the unrolled products alone would take a code generator minutes
        compiler = "inductor" if solver == "eigh" else "aot_eager"
        (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend=compiler)(x), model.weight)
        (eager,) = torch.autograd.grad(loss(x), model.weight)
        assert torch.allclose(compiled, eager, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("solver", [*SPECTRAL, "products"])
    def test_the_result_may_be_written_to(self, solver):
        x, y = (INPUTS["generic"].clone().requires_grad_() for _ in range(2))
        sqrt_covariance(x, True, solver=solver).mul_(3).sum().backward()
        (3 * sqrt_covariance(y, True, solver=solver)).sum().backward()
        assert torch.allclose(x.grad, y.grad, rtol=1e-12, atol=0)

    def test_operators_are_well_formed(self):
        torch.library.opcheck(_svd_op, (torch.randn(2, 4, 7, dtype=F64),))


@pytest.mark.parametrize(
    "call, subject",
    [
        (lambda: sqrt_covariance(torch.randn(4, 5)), "x"),
        (lambda: sqrt_covariance(torch.ones(1, 2, 3, dtype=torch.int64)), "x"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), solver="eig"), "solver"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), cut="exat"), "cut"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), gradient="pd"), "gradient rule"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), subset="top:3"), "subset"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), dtype=torch.float16), "dtype"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), dtype="float16"), "dtype"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), solver="products", subset="top:1"), "solver"),
        (lambda: sqrt_covariance(torch.randn(1, 2, 3), solver="products", gradient="pade"), "solver"),
        (lambda: sqrt_covariance_of_subsets(torch.randn(1, 2, 3), []), "subsets"),
        (lambda: sqrt_covariance_of_subsets(torch.randn(1, 2, 3), ["all"], solver="products"), "solver"),
    ],
)
def test_errors(call, subject):
    assert refused(call) == subject


@pytest.mark.parametrize("solver", SPECTRAL)
def test_non_finite_samples_are_named(solver):
    x = torch.randn(3, 2, 3)
    x[1, 0, 0] = torch.inf
    with pytest.raises(NonFiniteError) as error:
        sqrt_covariance(x, solver=solver)
    assert error.value.samples == (1,)


def test_rank_is_at_most_n_minus_one():
    x = features(5, 4, torch.ones(3, dtype=F64), seed=1)
    q = sqrt_covariance(x)
    assert torch.linalg.matrix_rank(q) == 3
    assert math.isclose(float(torch.linalg.matrix_norm(q, 2)), 1, rel_tol=1e-12)


@pytest.mark.parametrize("solver", ["eigh", "gram", "svd"])
@pytest.mark.parametrize("subset", ["top:2", "top:3", "top:1+last:5", "last:6"])
def test_a_projector_at_short_rank_has_one_gradient_on_every_route(subset, solver):
    """Against differences of sqrt(Π P Π) with Π fixed, the definition of this cut."""
    x = torch.randn(1, 8, 5, dtype=F64, generator=generator(3))
    g = torch.randn(1, 8, 8, dtype=F64, generator=generator(4))
    vectors = torch.linalg.eigh(covariance(x)).eigenvectors.flip(-1)
    kept = vectors * EigenSubset.parse(subset).mask(8)
    projector = kept @ kept.mT

    def held(y):
        values, u = torch.linalg.eigh(projector @ covariance(y) @ projector)
        root = torch.where(values > 1e-12, values, 0.0).sqrt()  # the root of rounding would be 1e-8
        return ((u * root.unsqueeze(-2)) @ u.mT * g).sum()

    y = x.clone().requires_grad_()
    (dy,) = torch.autograd.grad(sqrt_covariance(y, subset=subset, cut="projector", solver=solver), y, g)
    # a step inside the span of the features: outside of it the root of a singular matrix has a kink
    step = x @ torch.randn(1, 5, 5, dtype=F64, generator=generator(6))
    slope = (held(x + 1e-6 * step) - held(x - 1e-6 * step)) / 2e-6
    assert (dy * step).sum() == pytest.approx(slope.item(), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_svd_returns_exact_zeros_for_null_directions(dtype):
    """LAPACK returns up to 2 √max(d, N) ε for the singular values of positions that are zero."""
    for seed in range(8):
        g = generator(seed)
        x = torch.randn(1, 48, 192, generator=g, dtype=F64) * (torch.rand(192, generator=g) < 0.15)
        rank = min(48, int((x != 0).any(1).sum()))
        values = sqrt_covariance(x.to(dtype), solver="svd", dtype=dtype, return_eigenvalues=True)[1]
        assert int((values > 0).sum()) == rank
