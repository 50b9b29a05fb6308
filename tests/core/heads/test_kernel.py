"""Kernel pooling against loops over tensor products, and against the kernel that it approximates."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from spectral_cases import refused

from eigengrain.heads import create_head
from eigengrain.heads.kernel import KernelPooling, gaussian_coefficients, suggest_gamma

EPS = 1e-6


@pytest.fixture(autouse=True)
def _one_thread():
    """Single-threaded: for thousands of small Fourier transforms, threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit_columns(sample):
    return sample / np.linalg.norm(sample, axis=0)


def naive_feature_map(head, sample):
    """Mean over positions of [α₀, α₁x, α₂φ₂(x), …]; φ adds each entry of the tensor product to its bin."""
    alpha = head.alpha.detach().double().numpy()
    total = 0
    for x in unit_columns(sample).T:
        parts = [alpha[:1], alpha[1] * x]
        for degree, sketch in enumerate(head.sketches, 2):
            index, sign = sketch.index.numpy(), sketch.sign.numpy()
            bins = np.zeros(sketch.out_features)
            for channels in product(range(len(x)), repeat=degree):
                entry = math.prod(sign[f, c] * x[c] for f, c in enumerate(channels))
                bins[sum(index[f, c] for f, c in enumerate(channels)) % len(bins)] += entry
            parts.append(alpha[degree] * bins)
        total = total + np.concatenate(parts)
    return total / sample.shape[1]


@pytest.mark.parametrize("shape", [(2, 3, 2, 3), (1, 4, 1, 5)])
@pytest.mark.parametrize(
    "options", [{"order": 1}, {"order": 2, "sizes": 9}, {"order": 4, "sizes": (9, 16, 7), "gamma": 2.0}]
)
def test_matches_loops(shape, options):
    x = features(*shape)
    head = KernelPooling(shape[1], **options).double()
    for sample, mapped, vector in zip(x.flatten(2).numpy(), head.feature_map(x), head(x), strict=True):
        expected = naive_feature_map(head, sample)
        torch.testing.assert_close(mapped, torch.tensor(expected), atol=1e-12, rtol=0)
        root = np.sign(expected) * (np.sqrt(np.abs(expected) + EPS) - np.sqrt(EPS))
        torch.testing.assert_close(vector, torch.tensor(root / np.linalg.norm(root)), atol=1e-9, rtol=0)


def truncated_kernel(x, y, gamma, order):
    """Mean over all pairs of positions of the Taylor polynomial of exp(2γ(<x, y> − 1)) at <x, y> = 0."""
    total = 0.0
    for a in unit_columns(x).T:
        for b in unit_columns(y).T:
            total += sum((2 * gamma * float(a @ b)) ** i / math.factorial(i) for i in range(order + 1))
    return math.exp(-2 * gamma) * total / x.shape[1] / y.shape[1]


def kernel_errors(sizes, seeds=128, gamma=1.0, order=4):
    """Root mean square error of inner products of feature maps over pairs of maps and seeds, for each size."""
    x = features(12, 32, 1, 4).abs()  # not negative, as after ReLU; the first six are paired with the last six
    exact = np.array([truncated_kernel(*(x[i, :, 0].numpy() for i in (n, n + 6)), gamma, order) for n in range(6)])
    errors = []
    for size in sizes:
        estimates = []
        for seed in range(seeds):
            with torch.no_grad():
                y = KernelPooling(32, order=order, sizes=size, gamma=gamma, seed=100 * seed).double().feature_map(x)
            estimates.append((y[:6] * y[6:]).sum(-1).numpy())
        errors.append(np.sqrt(((np.array(estimates) - exact) ** 2).mean()))
    return np.array(errors), exact


def test_kernel_error_falls_as_one_over_the_root_of_the_size():
    sizes = [64, 128, 256, 512, 1024]
    errors, exact = kernel_errors(sizes)
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -0.6 < slope < -0.4, (slope, errors)
    assert errors[-1] < 0.03 * exact.mean()


def test_truncated_series_is_close_to_the_gaussian():
    inner = torch.linspace(0, 1, 11, dtype=torch.float64)
    powers = inner.unsqueeze(-1) ** torch.arange(5)
    for gamma, tolerance in ((0.25, 3e-4), (0.5, 4e-3), (1.0, 0.06)):
        series = powers @ gaussian_coefficients(gamma, 4).square()
        assert (series - torch.exp(2 * gamma * (inner - 1))).abs().max() < tolerance


def test_suggested_gamma_is_one_over_the_mean_inner_product():
    x = features(3, 6, 2, 4).abs()
    inner = []
    for sample in x.flatten(2).numpy():
        columns = unit_columns(sample).T
        inner += [a @ b for a in columns for b in columns]
    assert suggest_gamma(x) == pytest.approx(1 / np.mean(inner), rel=1e-12)
    assert refused(lambda: suggest_gamma(torch.zeros(1, 3, 2, 2))) == "x"


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_gradcheck(order):
    head = KernelPooling(3, order=order, sizes=11).double()
    x = features(2, 3, 1, 5).requires_grad_()
    assert torch.autograd.gradcheck(head, x, atol=1e-6)


def test_coefficients_are_trained_by_default():
    x = features(2, 5, 3, 3, dtype=torch.float32)
    head = KernelPooling(5, sizes=16)
    out = head(x)
    (out * features(*out.shape, seed=1)).sum().backward()
    assert head.alpha.grad.shape == (5,)
    assert head.alpha.grad.abs().min() > 0
    fixed = KernelPooling(5, sizes=16, learnable=False)
    assert not list(fixed.parameters())
    torch.testing.assert_close(fixed(x), head(x), atol=0, rtol=0)


def test_zero_features_and_zero_positions_are_finite():
    x = features(2, 5, 3, 3, dtype=torch.float32)
    x[0] = 0
    x[1, :, 0] = 0
    x.requires_grad_()
    head = KernelPooling(5, sizes=16)
    out = head(x)
    (out * features(*out.shape, seed=4)).sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(x.grad).all()
    assert not x.grad[0].any()
    assert out[0, 0] == 1
    assert not out[0, 1:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_diverged_features_give_nan(bad):
    x = features(2, 5, 3, 3, dtype=torch.float32)
    x[1, 2, 1, 1] = bad
    out = KernelPooling(5, sizes=16)(x)
    assert torch.isfinite(out[0]).all()
    assert out[1].isnan().all()


def test_layouts_dtypes_and_batch_of_one():
    x = features(2, 6, 3, 5, dtype=torch.float32)
    head = KernelPooling(6, sizes=32)
    plain = head(x)
    assert plain.shape == (2, head.out_features) == (2, 1 + 6 + 3 * 32)
    assert plain.dtype == torch.float32
    assert head(x.double()).dtype == torch.float64
    torch.testing.assert_close(head(x.to(memory_format=torch.channels_last)), plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(head(x[:1]), plain[:1], atol=1e-5, rtol=0)
    torch.testing.assert_close(plain.double(), head(x.double()), atol=1e-4, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(x), plain, atol=0, rtol=0)
        assert head(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("learnable", [True, False])
def test_state_dict_round_trip(learnable):
    head, other = (
        create_head("kp", in_channels=12, reduce=5, sizes=16, seed=seed, gamma=gamma, learnable=learnable).eval()
        for seed, gamma in ((1, 1.0), (7, 2.0))
    )
    x = features(2, 12, 3, 3, dtype=torch.float32)
    assert not torch.equal(other(x), head(x))
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other(x), head(x), atol=0, rtol=0)


def test_published_size():
    assert KernelPooling(512).out_features == 1 + 512 + 3 * 4096
    assert KernelPooling(512, order=3, sizes=[4096, 8192]).out_features == 1 + 512 + 4096 + 8192


@pytest.mark.parametrize(
    "options, subject",
    [
        ({"order": 0}, "order"),
        ({"order": -2}, "order"),
        ({"order": 3, "sizes": [16]}, "sizes"),
        ({"order": 3, "sizes": [16, 16, 16]}, "sizes"),
        ({"sizes": 1.5}, "sizes"),
        ({"sizes": 0}, "sizes"),
        ({"sizes": [16, 16, 1.5]}, "sizes"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": float("nan")}, "gamma"),
        ({"gamma": 1e3}, "gamma"),
        ({"eps": 0.0}, "eps"),
        ({"degree": 2}, "option of head 'kp'"),
    ],
)
def test_errors(options, subject):
    assert refused(lambda: create_head("kp", in_channels=6, **options)) == subject


def test_orders_have_sketches_of_their_own():
    """With one seed for all orders their first factors would put the same channels into the same bins."""
    first, second, third = KernelPooling(32, order=4, sizes=64, seed=5).sketches
    for a, b in ((first, second), (first, third), (second, third)):
        assert (a.index[0] == b.index[0]).sum() < 8
        assert 8 < (a.sign[0] == b.sign[0]).sum() < 24


def test_suggested_gamma_is_at_least_one_for_equal_features():
    """The mean inner product of equal unit vectors is 1, or a little more by rounding."""
    for seed in range(50):
        x = features(1, 7, 1, 1, seed=seed).expand(-1, -1, 3, 5)
        assert 1 <= suggest_gamma(x) < 1 + 1e-12
