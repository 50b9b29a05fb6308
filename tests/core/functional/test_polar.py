"""The float32 root by matrix products and its gradient, against factors by an SVD in float64."""

import itertools
import math

import mpmath
import pytest
import torch
from functional.test_graded_factors import RefuseFloat64, one_thread  # noqa: F401
from spectral_cases import F64, features, generator, log_spectrum, relative

from eigengrain.errors import SecondOrderError
from eigengrain.functional import covariance, matrix_sqrt, polar, sqrt_covariance
from eigengrain.functional.matrix_products import QUINTIC, block_step

F32 = torch.float32


def by_products(x, seb=False):
    return sqrt_covariance(x, seb, solver="products", dtype="float32")


def forward_backward(x, g, seb=False):
    y = x.clone().requires_grad_()
    a = by_products(y, seb)
    return a.detach(), torch.autograd.grad(a, y, g.to(a.dtype))[0]


def upstream(x, seed=0):
    return torch.randn(len(x), x.shape[1], x.shape[1], generator=generator(seed))


def factors(x, floor):
    """U, σ and Vᵀ of the centred features in float64; σ is 0 below a multiple of the largest."""
    x = x.double() - x.double()[..., :1]
    u, s, vt = torch.linalg.svd((x - x.mean(-1, keepdim=True)) / math.sqrt(x.shape[-1]), full_matrices=False)
    return u, torch.where(s > floor * s[..., :1], s, 0.0), vt


def oracle(x, g, seb=False, floor=1e-9):
    """Q or A and its gradient in float64."""
    u, s, vt = factors(x, floor)
    g = (g.double() + g.double().mT) / 2
    gu = g @ u
    inner = u.mT @ gu
    total = s.unsqueeze(-1) + s.unsqueeze(-2)
    ratio = torch.where(total > 0, s.unsqueeze(-2) / torch.where(total > 0, total, 1.0), 0.0)
    outside = (gu - u @ inner) * (s > 0).unsqueeze(-2)
    q, dx = (u * s.unsqueeze(-2)) @ u.mT, 2 * (u @ (inner * ratio) + outside) @ vt
    if seb:
        decay = torch.exp(-s.square())
        factor = (s * decay).norm(dim=-1, keepdim=True)
        slope = torch.where(factor > 0, (1 - 2 * s.square()) * s * decay.square() / factor.clamp_min(1e-300), 0.0)
        factor, along = factor.unsqueeze(-1), (g * q).sum((1, 2))[:, None, None]
        q, dx = (1 + factor) * q, (1 + factor) * dx + along * (u * slope.unsqueeze(-2)) @ vt
    return q, dx / math.sqrt(x.shape[-1])


def bound(x, g, seb=False):
    """The bound of ‖∂l/∂X‖ of each sample."""
    s = factors(x, 0.0)[1]
    out = torch.full_like(s[:, 0], math.sqrt(2))
    if seb:
        out = math.sqrt(2) * (1 + (s * torch.exp(-s.square())).norm(dim=1)) + s.norm(dim=1)
    return out * g.double().flatten(1).norm(dim=1) / math.sqrt(x.shape[-1])


def check(x, q_error, gradient_error, seb=False, floor=1e-9, g=None):
    """Errors of the matrix with and without a gradient, the error of the gradient, and the bound."""
    x = x.float()
    g = upstream(x) if g is None else g
    (a, dx), (exact, exact_dx) = forward_backward(x, g, seb), oracle(x, g, seb, floor)
    assert relative(a, exact) <= q_error
    assert relative(by_products(x, seb), exact) <= q_error
    assert relative(dx, exact_dx) <= gradient_error
    assert (dx.double().flatten(1).norm(dim=1) <= (1 + 1e-5) * bound(x, g, seb)).all()


SHAPES = [(64, 196), (64, 65), (64, 40), (128, 150), (5, 30)]


@pytest.mark.parametrize("seb", [False, True])
@pytest.mark.parametrize("kappa, q_error, gradient_error", [(1e2, 1e-5, 5e-4), (1e6, 1e-5, 5e-4), (1e10, 2e-5, 5e-3)])
@pytest.mark.parametrize("d, n", SHAPES)
def test_errors(d, n, kappa, q_error, gradient_error, seb):
    check(features(d, n, 1.5 * log_spectrum(min(d, n - 1), kappa), seed=1, batch=2), q_error, gradient_error, seb)


@pytest.mark.parametrize("seb", [False, True])
@pytest.mark.parametrize("kappa, bound_of_q", [(1e4, 1e-5), (1e16, 1e-4)])
def test_256_channels(kappa, bound_of_q, seb):
    check(features(256, 784, log_spectrum(256, kappa)), bound_of_q, 5e-4 if kappa < 1e10 else 0.2, seb)


def singular_cases(d, n):
    base = torch.randn(1, d, n, generator=generator(5), dtype=F64)
    cases = {name: base.clone() for name in ("dead", "copies", "sum", "7 positions", "one large", "one larger")}
    cases["dead"][:, : d // 8] = torch.arange(d // 8)[:, None] * 0.3
    cases["copies"][:, d // 2 :] = cases["copies"][:, : d - d // 2]
    cases["sum"][:, 0] = cases["sum"][:, 1:].sum(1)
    cases["7 positions"][:, :, 7:] = 0
    cases["one large"][:, 0] *= 1e3
    cases["one larger"][:, 0] *= 1e6
    cases |= {"gaussian": base, "sparse": (base - 2.5).relu(), "offset": base + 100, "2 positions": base[..., :2]}
    cases |= {f"rank d/4, {kappa:g}": features(d, n, log_spectrum(d // 4, kappa), seed=3) for kappa in (1e4, 1e8)}
    return cases


CASES = singular_cases(64, 196) | {f"{name}, short": x for name, x in singular_cases(64, 40).items()}


@pytest.mark.parametrize("case", CASES)
def test_singular_covariances(case):
    floor = 1e-9 if "large" in case else 2e-6
    check(CASES[case], 1e-4, 5e-3, floor=floor)
    if "large" not in case:
        check(CASES[case], 1e-4, 5e-3, seb=True, floor=floor)


def test_graded_rows():
    """Thirteen orders of magnitude: beyond float32 in the gradient, which stays within its bound."""
    check(CASES["gaussian"] * torch.logspace(-6, 6, 64)[:, None], 1e-5, 0.5)


@pytest.mark.parametrize("seb", [False, True])
@pytest.mark.parametrize("kappa", [1e4, 1e8, 1e12, 1e16])
@pytest.mark.parametrize("d, n", [(64, 196), (64, 40)])
def test_the_bound_where_it_is_sharp(d, n, kappa, seb):
    """Between the eigenvectors of a large and of a small or null eigenvalue."""
    x = features(d, n, log_spectrum(min(d, n - 1), kappa), seed=2).float()
    u = torch.linalg.svd(x.double() - x.double().mean(-1, keepdim=True))[0]
    for i, j in ((0, d - 1), (0, d // 2), (d // 2, d - 1), (d - 2, d - 1)):
        g = u[:, :, i, None] * u[:, None, :, j]
        g = (g + g.mT).float()
        a, dx = forward_backward(x, g, seb)
        assert a.isfinite().all()
        assert dx.double().norm() <= (1 + 1e-6) * bound(x, g, seb)
        if (i, j) == (0, d - 1) and not seb:
            assert dx.double().norm() >= 0.99 * bound(x, g)


@pytest.mark.parametrize("d, n, low", [(2, 40, 3e-5), (8, 40, 1e-5), (64, 100, 3e-6)])
def test_the_bound_between_two_groups_of_eigenvalues(d, n, low):
    """The exact norm is the bound, and rounding alone would exceed it."""
    sigma = torch.ones(d, dtype=F64)
    sigma[d // 2 :] = low
    x = features(d, n, sigma, seed=3, batch=6).float()
    u = torch.linalg.svd(x.double() - x.double().mean(-1, keepdim=True))[0]
    between = torch.zeros(6, d, d, dtype=F64)
    between[:, : d // 2, d // 2 :] = torch.randn(6, d // 2, d - d // 2, generator=generator(4), dtype=F64)
    g = (u @ (between + between.mT) @ u.mT).float()
    norms = forward_backward(x, g)[1].double().flatten(1).norm(dim=1)
    assert (norms <= (1 + 1e-6) * bound(x, g)).all()
    assert (norms >= 0.999 * bound(x, g)).all()


@pytest.mark.parametrize("d, n", [(2, 2), (8, 3), (16, 2)])
def test_the_bound_between_the_range_and_the_null_space(d, n):
    """The exact norm is the bound; among so many samples rounding alone would exceed it by 1e-6."""
    x = torch.randn(4000, d, n, generator=generator(1))
    u = torch.linalg.svd(x.double() - x.double().mean(-1, keepdim=True))[0]
    g = u[:, :, :1] * u[:, None, :, -1]
    g = (g + g.mT).float()
    norms = forward_backward(x, g)[1].double().flatten(1).norm(dim=1)
    assert (norms <= (1 + 5e-7) * bound(x, g)).all()


@pytest.mark.parametrize("d", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("n", [2, 3, 50])
@pytest.mark.parametrize("kappa", [1e2, 1e6, 1e10])
def test_small_shapes(d, n, kappa):
    check(features(d, n, log_spectrum(min(d, n - 1), kappa), seed=7, batch=4), 1e-5, 5e-3, floor=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e-2, 1e2, 1e6, 1e30])
@pytest.mark.parametrize("seb", [False, True])
def test_scale(scale, seb):
    x, g = features(16, 40, 3 * log_spectrum(16, 1e3), seed=2, batch=2) * scale, torch.randn(2, 16, 16)
    check(x, 2e-4 if seb and scale == 1e2 else 1e-5, 5e-3, seb)
    small, large = (forward_backward(x.float(), size * g, seb)[1] for size in (1e-6, 1e6))
    assert relative(1e12 * small.double(), large) < 1e-6


def test_dead_channels_beside_large_ones():
    """The square of the scale overflows, and times 0 it would be NaN."""
    x = torch.randn(2, 4, 9, generator=generator(4))
    x[:, 1] = 3.5
    check(1e30 * x, 1e-5, 1e-3, seb=True)


@pytest.mark.parametrize("constant", [1e20, 1e37])
def test_channels_beside_a_large_constant_channel(constant):
    """The range of float32 is that of the differences of features."""
    x, g = features(6, 40, log_spectrum(6, 1e4), seed=5, batch=2).float(), torch.randn(2, 6, 6, generator=generator(5))
    for solver in ("products", "eigh"):
        results = []
        for channel in (0.0, constant):
            y = x.clone()
            y[:, 1] = channel
            y.requires_grad_()
            q = sqrt_covariance(y, solver=solver, dtype="float32")
            results.append((q, torch.autograd.grad(q, y, g)[0]))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("large, small", [(1e3, 1e-3), (1e2, 1e-4), (10, 1e-5)])
def test_the_slope_of_the_branch_is_at_most_1(large, small):
    """One large eigenvalue and a small s, in which rounding enlarges the slope by up to half."""
    sigma = torch.full((64,), small, dtype=F64)
    sigma[0] = large
    x, size, m = polar.scaled((features(64, 100, sigma, batch=6) / 10).float())
    s, slope = polar._branch(x, m, polar.polar_decomposition(x, m).q, size)
    assert (s > 0).all()
    assert slope.flatten(1).norm(dim=1).max() <= 1


def test_the_gradient_is_centred():
    """The rows of W for small singular values are centred only up to the rounding of the features."""
    x = features(32, 60, log_spectrum(32, 1e10), seed=6, batch=2).float()
    dx = forward_backward(x, upstream(x))[1]
    assert dx.mean(-1).abs().max() <= 1e-6 * dx.abs().max()


def test_samples_do_not_depend_on_each_other():
    """Samples that need further runs and other entries of the sign iteration are beside samples that do not."""
    x = torch.cat(
        [features(32, 60, log_spectrum(32, kappa), seed=4) for kappa in (1e1, 1e4, 1e8, 1e14)] + [torch.ones(1, 32, 60)]
    )
    x, g = x.float(), torch.randn(5, 32, 32, generator=generator(1))
    a, dx = forward_backward(x, g, True)
    for sample in range(5):
        one = slice(sample, sample + 1)
        alone = forward_backward(x[one], g[one], True)
        torch.testing.assert_close(alone[0], a[one], rtol=0, atol=1e-5)
        assert (alone[1] - dx[one]).norm() <= 1e-4 * bound(x[one], g[one])


@pytest.mark.parametrize("seb", [False, True])
@pytest.mark.parametrize("x", [torch.full((2, 3, 7), 0.3), torch.zeros(1, 3, 4), torch.randn(2, 5, 1, 1)])
def test_constant_input_and_a_single_position(x, seb):
    q, dx = forward_backward(x, torch.ones(len(x), x.shape[1], x.shape[1]), seb)
    assert not q.any()
    assert not dx.any()


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (0, 6, 4)])
def test_empty_batch(shape):
    q, dx = forward_backward(torch.zeros(shape), torch.zeros(0, shape[1], shape[1]), True)
    assert q.shape == (0, shape[1], shape[1])
    assert dx.shape == shape


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_an_offset_costs_the_rounding_of_the_features_alone(offset):
    x = (torch.randn(2, 32, 100, generator=generator(3)) + offset).float()
    check(x, 1e-5, 1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_sample(bad):
    x = torch.randn(3, 4, 9, generator=generator(6))
    x[1, 0, 0] = bad
    for seb in (False, True):
        q, dx = forward_backward(x, upstream(x), seb)
        alone = forward_backward(x[[0, 2]], upstream(x)[[0, 2]], seb)
        for result, expected in zip((q, dx), alone, strict=True):
            torch.testing.assert_close(result[[0, 2]], expected, rtol=1e-5, atol=1e-6)
            assert (result[1].isnan() | (result[1] == 0)).all()
        assert by_products(x, seb)[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
@pytest.mark.parametrize("seb", [False, True])
def test_dtypes_in_and_out_under_autocast(dtype, seb):
    x = torch.randn(2, 6, 5, 8, generator=generator(8)).to(dtype)
    g = upstream(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, dx = forward_backward(x, g, seb)
    exact, exact_dx = oracle(x.flatten(2), g, seb)
    assert (q.dtype, dx.dtype) == (F64 if dtype == F64 else F32, dtype)
    assert relative(q, exact) < 1e-5
    assert relative(dx.flatten(2), exact_dx) < (1e-4 if dtype in (F32, F64) else 1e-2)


def test_reduced_products_have_no_effect():
    x = features(16, 50, log_spectrum(16, 1e6), batch=2).float()
    before = forward_backward(x, upstream(x), True)
    torch.set_float32_matmul_precision("medium")
    try:
        after = forward_backward(x, upstream(x), True)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("shape", [(2, 40, 9, 9), (2, 40, 4, 4), (2, 3, 1, 1)])
@pytest.mark.parametrize("seb", [False, True])
def test_no_float64(shape, seb, one_thread):  # noqa: F811
    x = (torch.randn(shape, generator=generator(1)) * torch.logspace(0, -4, shape[1])[:, None, None]).requires_grad_()
    with RefuseFloat64():
        by_products(x, seb).sin().sum().backward()
        with torch.no_grad():
            by_products(x, seb)
    assert x.grad.isfinite().all()


def test_directional_derivatives_of_the_branch():
    """Of sums of entries of A, against differences in float64."""
    x = torch.randn(2, 5, 20, generator=generator(9), dtype=F64)
    g = upstream(x)
    dx = forward_backward(x.float(), g, True)[1].double()
    for seed in range(5):
        direction = torch.randn(x.shape, generator=generator(seed), dtype=F64)
        ahead, back = (sqrt_covariance(x + h * direction, True, dtype=F64) for h in (1e-5, -1e-5))
        numeric = ((ahead - back) / 2e-5 * g).sum()
        assert float((dx * direction).sum()) == pytest.approx(float(numeric), rel=1e-4, abs=1e-4)


class TestValue:
    """Without a gradient, as exported programs compute it: 1e-5 at every condition number."""

    @pytest.mark.parametrize("kappa", [1e2, 1e6, 1e10, 1e12])
    @pytest.mark.parametrize("d, n", [(64, 200), (64, 65), (64, 30), (5, 2)])
    @pytest.mark.parametrize("seb", [False, True])
    def test_against_the_factors(self, d, n, kappa, seb):
        sigma = 1.5 * log_spectrum(min(d, n - 1), kappa)
        x = features(d, n, sigma, seed=1, batch=2)
        q = matrix_sqrt(covariance(x))
        s = (sigma.square() * torch.exp(-2 * sigma.square())).sum().sqrt() if seb else 0
        got = by_products(x.float(), seb)
        assert got.dtype == torch.float32
        assert relative(got, (1 + s) * q) < 1e-5

    @pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
    def test_scale(self, scale):
        x = features(16, 40, log_spectrum(16, 1e6), seed=2, batch=2)
        exact = sqrt_covariance(x * scale)
        assert relative(by_products((x * scale).float()), exact) < 1e-5
        branch = by_products((x * scale).float(), True)
        assert relative(branch, sqrt_covariance(x * scale, True)) < 1e-5

    @pytest.mark.parametrize("seb", [False, True])
    def test_singular_covariances(self, seb):
        x = torch.randn(6, 12, 30, generator=torch.Generator().manual_seed(0)).relu()
        x[0, 4:8] = x[0, :4]
        x[1, 3:] = 0
        x[2, -1] = x[2, :-1].sum(0)
        x[3] = 2.5
        x[4, :, 1:] = x[4, :, :1]
        got = by_products(x, seb)
        exact = sqrt_covariance(x.double(), seb)
        assert (got - exact).abs().amax() < 1e-5 * exact.abs().amax()
        assert not got[3:5].any()
        assert not by_products(x[3, :, :1][None], seb).any()

    def test_nan_stays_in_its_sample(self):
        x = torch.randn(2, 4, 9)
        x[0, 0, 0] = torch.nan
        got = by_products(x)
        assert got[0].isnan().all()
        assert got[1].isfinite().all()


class TestTransforms:
    @pytest.mark.parametrize("seb", [False, True])
    def test_vmap_and_per_sample_gradients(self, seb):
        x = torch.randn(3, 2, 4, 9, generator=generator(2))
        flat = x.flatten(0, 1)

        def loss(t):
            return by_products(t, seb).sin().sum()

        mapped = torch.func.vmap(lambda t: by_products(t, seb))(x).flatten(0, 1)
        torch.testing.assert_close(mapped, by_products(flat, seb), rtol=1e-5, atol=1e-6)
        per_sample = torch.func.vmap(torch.func.grad(loss))(x).flatten(0, 1)
        torch.testing.assert_close(per_sample, torch.func.grad(loss)(flat), rtol=1e-4, atol=1e-5)

    def test_second_order_raises(self):
        def loss(t):
            return by_products(t, True).sum() + t.pow(3).sum()

        x = torch.randn(1, 3, 8, generator=generator(3), requires_grad=True)
        (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
        with pytest.raises(SecondOrderError) as error:
            grad.sum().backward()
        assert error.value.function == "sqrt_covariance"
        with pytest.raises(SecondOrderError):
            torch.func.jacrev(torch.func.jacrev(loss))(x.detach())

    @pytest.mark.parametrize("d", [6, 130])
    def test_inside_a_compiled_model(self, d):
        model = torch.nn.Conv2d(3, d, 3)
        x = torch.randn(2, 3, 14, 14, generator=generator(4))

        def loss(t):
            return by_products(model(t).relu(), True).sin().sum()

        (eager,) = torch.autograd.grad(loss(x), model.weight)
        (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), model.weight)
        assert (compiled - eager).norm() <= 1e-3 * eager.norm()

    def test_the_result_may_be_written_to(self):
        x, y = (torch.randn(2, 4, 9, generator=generator(5)).requires_grad_() for _ in range(2))
        by_products(x, True).mul_(3).sum().backward()
        (3 * by_products(y, True)).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def step(x, row):
    c0, c1, c2 = row
    return x * (c0 + c1 * x**2 + c2 * x**4)


class TestCoefficients:
    """What is built from the rows of ``QUINTIC``, which test_matrix_products.py derives by a Remez exchange."""

    def test_the_first_row_keeps_its_interval(self):
        """It is the minimax row of [0.049, 1.951], and takes [0.18, 1.82], in which all of its images lie, to itself."""
        low, high = next(itertools.islice(polar._intervals(3.25e-4, QUINTIC), 3, None))
        assert (low, high) == pytest.approx((0.0486, 1.9514), abs=1e-4)
        x = torch.linspace(0.18, 1.82, 10001, dtype=F64)
        y = step(x, polar._SAFE)
        assert y.min() > 0.178
        assert y.max() < 1.822
        small = torch.linspace(0, 0.05, 1001, dtype=F64)[1:]
        assert (step(small, polar._SAFE) / small).min() > 3.8

    def test_runs(self):
        """Singular values from 5e-4 of the largest converge in the first runs, and a further run gains a factor of 90."""
        x = torch.logspace(-9, 0, 90001, dtype=F64) * polar._TOP
        reached, start = [], x
        for rows in polar._RUNS:
            for row in rows:
                x = step(x, row)
        for rows in polar._CHECKED_RUNS:
            for row in rows:
                x = step(x, row)
            finished = step(x, polar._FINISH)
            reached.append(float(start[(finished - 1).abs() > 1e-5].max()) / polar._TOP)
            assert finished.max() <= 1 + 1e-12
            x = step(x, polar._ONWARD)
            assert x.max() < 1.83
        assert reached[0] < 5e-4
        assert reached[1] < reached[0] / 85
        assert reached[2] < reached[1] / 85

    def test_the_last_step(self):
        """x ↦ (5x³ − 3x⁵)/2 has a maximum of 1 at 1, and its first two derivatives vanish at 0."""
        x = mpmath.mpf
        c0, c1, c2 = map(x, polar._FINISH)
        assert c0 == 0
        assert c0 + c1 + c2 == 1
        assert c0 + 3 * c1 + 5 * c2 == 0
        assert 6 * c1 + 20 * c2 < 0

    def test_steps_of_the_value_alone(self):
        """Values from 1e-5 on converge, and none that is large becomes small on the way, which would cost its digits."""
        x = torch.logspace(math.log10(1.4e-5), 0, 20001, dtype=F64) * polar._TOP
        large = x > 0.3
        for row in polar.STEPS:
            x = step(x, row)
            assert x[large].min() > 0.178
            assert x.max() < 1.83
        assert (x - 1).abs().max() < 1e-9

    @pytest.mark.parametrize("entry", range(polar._LAST_ENTRY + 1))
    def test_every_entry_of_the_sign_iteration_converges(self, entry):
        low, high = polar._ENTRIES[entry]
        x = torch.linspace(low, high, 10001, dtype=F64)
        for row in polar._SIGN[entry:]:
            x = step(x, row)
        assert (x - 1).abs().max() < 1.3e-4


class TestSteps:
    """The functions that kernels may replace."""

    def test_run_of_steps(self):
        w = features(12, 30, torch.linspace(0.3, 1.7, 12, dtype=F64), seed=1, batch=2) / math.sqrt(30)
        t, m = polar.run_of_steps(w @ w.mT, polar._LAST)
        assert polar.run_of_steps(w @ w.mT, polar._LAST, leave=False)[1] is None
        expected = w
        for c0, c1, c2 in polar._LAST:
            s = expected @ expected.mT
            expected = c0 * expected + c1 * s @ expected + c2 * s @ s @ expected
        assert relative(t @ w, expected) < 1e-13
        assert relative(m, expected @ expected.mT) < 1e-13

    @pytest.mark.parametrize("mirror", [1, -1])
    def test_a_step_of_blocks(self, mirror):
        b, c = (torch.randn(2, 6, 6, generator=generator(seed), dtype=F64) for seed in (1, 2))
        b, c, row = b + b.mT, c + mirror * c.mT, (0.7, -0.3, 0.05)
        whole = torch.cat([torch.cat([b, c], 2), torch.cat([torch.zeros_like(b), -b], 2)], 1)
        square = whole @ whole
        expected = whole @ (row[0] * torch.eye(12, dtype=F64) + row[1] * square + row[2] * square @ square)
        got_b, got_c = block_step(b, c, row, mirror)
        assert relative(got_b, expected[:, :6, :6]) < 1e-13
        assert relative(got_c, expected[:, :6, 6:]) < 1e-13

    def test_each_sample_enters_the_sign_iteration_at_its_row(self):
        g = generator(3)
        s = torch.randn(5, 8, 8, generator=g, dtype=F64)
        s = s - s.mT
        basis = torch.linalg.qr(torch.randn(5, 8, 8, generator=g, dtype=F64))[0]
        values = torch.stack([torch.linspace(low, high, 8, dtype=F64) for low, high in polar._ENTRIES])
        b = (basis * values.unsqueeze(-2)) @ basis.mT
        x = polar.corner_of_sign(b, s, torch.arange(5, dtype=torch.int32))
        # B X + X B = 2 S
        assert relative((b @ x + x @ b) / 2, s) < 3e-4


@pytest.mark.parametrize("trace, branch", [(2.0**20, True), (2.0**22, False)])
def test_s_is_zero_where_its_rounding_is_as_large_as_itself(trace, branch):
    """One eigenvalue of about the trace, and one of 0.3 whose share of s float32 loses at a trace above 2²¹."""
    x = features(2, 50, torch.tensor([trace, 0.3], dtype=F64).sqrt()).float()
    plain, scaled = (sqrt_covariance(x, seb, solver="products", dtype=torch.float32) for seb in (False, True))
    s = float((scaled / plain)[0, 0, 0]) - 1
    assert abs(s - math.sqrt(0.3) * math.exp(-0.3)) < 0.1 if branch else s == 0
