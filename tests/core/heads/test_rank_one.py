"""Rank-one update normalisation against loops, its gradient, and features of which nothing is left."""

import numpy as np
import pytest
import torch
from spectral_cases import refused

from eigengrain.heads import create_head
from eigengrain.heads.layers import unit
from eigengrain.heads.rank_one import RankOneUpdatePooling, damp_leading_direction

EPS = 1e-6


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive_update(sample, start, iterations, epsilon):
    """B − εBvvᵀ − εvvᵀB + ε²(vᵀBv)vvᵀ by loops over the power iterations, on the bilinear matrix itself."""
    n = sample.shape[1]
    bilinear = sum(np.outer(sample[:, i], sample[:, i]) for i in range(n)) / n
    v = start.copy()
    for _ in range(iterations):
        v = bilinear @ v
    v = v / np.sqrt((v**2).sum())
    bv = bilinear @ v
    return bilinear - epsilon * np.outer(bv, v) - epsilon * np.outer(v, bv) + epsilon**2 * (v @ bv) * np.outer(v, v)


def naive_root(matrix):
    return np.sign(matrix) * (np.sqrt(np.abs(matrix) + EPS) - np.sqrt(EPS))


@pytest.mark.parametrize("shape", [(3, 6, 4, 5), (1, 6, 1, 5), (2, 4, 2, 7)])
@pytest.mark.parametrize("iterations, epsilon", [(1, 1.0), (2, 1.0), (2, 0.5), (5, 0.3)])
def test_full_matches_loops(shape, iterations, epsilon):
    x = features(*shape)
    head = RankOneUpdatePooling(shape[1], iterations=iterations, epsilon=epsilon)
    start = head.start.double().numpy()
    for sample, vector in zip(x.flatten(2).numpy(), head(x), strict=True):
        root = naive_root(naive_update(sample, start, iterations, epsilon))
        c = len(root)
        triangle = np.array([root[i, j] * (1 if i == j else np.sqrt(2)) for i in range(c) for j in range(i, c)])
        torch.testing.assert_close(vector, torch.tensor(triangle / np.linalg.norm(root)), atol=1e-11, rtol=0)


def test_compact_matches_loops():
    x = features(2, 5, 3, 4)
    head = RankOneUpdatePooling(5, compact=True, out_features=11, seed=3)
    index, sign = head.sketch.index.numpy(), head.sketch.sign.numpy()
    for sample, vector in zip(x.flatten(2).numpy(), head(x), strict=True):
        matrix = naive_update(sample, head.start.double().numpy(), 2, head.epsilon)
        bins = np.zeros(11)
        for i in range(5):
            for j in range(5):
                bins[(index[0, i] + index[1, j]) % 11] += sign[0, i] * sign[1, j] * matrix[i, j]
        root = naive_root(bins)
        torch.testing.assert_close(vector, torch.tensor(root / np.linalg.norm(root)), atol=1e-11, rtol=0)


def test_inner_products_are_those_of_the_whole_matrix():
    x = features(2, 5, 3, 4)
    head = RankOneUpdatePooling(5)
    whole = [naive_root(naive_update(s, head.start.double().numpy(), 2, head.epsilon)) for s in x.flatten(2).numpy()]
    cosine = (whole[0] * whole[1]).sum() / np.linalg.norm(whole[0]) / np.linalg.norm(whole[1])
    vectors = head(x)
    assert float(vectors[0] @ vectors[1]) == pytest.approx(cosine, abs=1e-12)


def test_many_iterations_damp_the_leading_singular_value_alone():
    u, _ = torch.linalg.qr(features(5, 5))
    v, _ = torch.linalg.qr(features(8, 5, seed=1))
    x = (u @ torch.diag(torch.tensor([10.0, 2.0, 1.5, 1.0, 0.5], dtype=torch.float64)) @ v.T).unsqueeze(0)
    out = damp_leading_direction(x, torch.ones(5), iterations=30, epsilon=0.9)
    expected = torch.tensor([[2.0, 1.5, 1.0, 1.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.svdvals(out), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("options", [{}, {"iterations": 1, "epsilon": 1.0}, {"compact": True, "out_features": 17}])
def test_gradcheck(options):
    head = RankOneUpdatePooling(4, **options)
    assert torch.autograd.gradcheck(head, features(2, 4, 2, 5).requires_grad_(), atol=1e-6)


@pytest.mark.parametrize("compact", [False, True])
def test_zero_features_are_finite(compact):
    for scale in (0.0, 1e-8, 1e-30):
        x = (scale * features(2, 5, 3, 3, dtype=torch.float32)).requires_grad_()
        head = RankOneUpdatePooling(5, compact=compact)
        out = head(x)
        (out * features(*out.shape, seed=4)).sum().backward()
        assert torch.isfinite(out).all()
        assert torch.isfinite(x.grad).all()
        if scale == 0:
            assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_one_features_become_exactly_zero(dtype):
    """ε = 1 removes the only direction: the ℓ2 norm must not enlarge rounding to a unit vector."""
    x = features(3, 6, 1, 1, dtype=dtype) * features(3, 1, 4, 4, seed=1, dtype=dtype)
    assert not RankOneUpdatePooling(6, epsilon=1.0)(x).any()
    torch.testing.assert_close(RankOneUpdatePooling(6, epsilon=0.5)(x).norm(dim=1), torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-12, 1e9, 1e15])
def test_the_direction_is_correct_at_every_scale(scale):
    """In single precision, where the squares of the power iterates overflow or underflow."""
    x = features(2, 6, 20, dtype=torch.float32) + 1
    start = torch.ones(6)
    expected = damp_leading_direction(x.double(), start, 3, 1.0)
    got = damp_leading_direction(x * scale, start, 3, 1.0) / scale
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_diverged_features_give_nan(compact, bad):
    """The loss would stay finite while every weight becomes NaN."""
    x = features(2, 5, 3, 3, dtype=torch.float32)
    x[1, 2, 1, 1] = bad
    out = RankOneUpdatePooling(5, compact=compact)(x)
    assert torch.isfinite(out[0]).all()
    assert out[1].isnan().all()


def test_unit_in_single_precision():
    v = torch.tensor([[3.0, 4.0]]) * torch.tensor([[1e-30], [1e30]])
    torch.testing.assert_close(unit(v), torch.tensor([[0.6, 0.8]]).expand(2, 2))


def test_unit_of_zero_has_zero_gradient():
    v = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    unit(v)[:, 0].sum().backward()
    torch.testing.assert_close(v.grad, torch.tensor([[0.0, 0.0], [16 / 125, -12 / 125]]))


def test_start_is_fixed_unless_resampled_in_training():
    x = features(2, 6, 3, 3)
    fixed = RankOneUpdatePooling(6).train()
    torch.testing.assert_close(fixed(x), fixed(x), atol=0, rtol=0)
    fresh = RankOneUpdatePooling(6, resample=True).train()
    torch.manual_seed(0)
    first, second = fresh(x), fresh(x)
    torch.manual_seed(0)
    torch.testing.assert_close(fresh(x), first, atol=0, rtol=0)  # restoring the generator state repeats the draw
    assert (first - second).abs().max() > 1e-3
    state = torch.get_rng_state()
    torch.testing.assert_close(fresh.eval()(x), fixed(x), atol=0, rtol=0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("options", [{}, {"compact": True, "out_features": 64}])
def test_layouts_dtypes_and_batch_of_one(options):
    x = features(2, 6, 3, 5, dtype=torch.float32)
    head = RankOneUpdatePooling(6, **options)
    assert head(x).shape == (2, head.out_features)
    assert head(x).dtype == torch.float32
    torch.testing.assert_close(head(x.to(memory_format=torch.channels_last)), head(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(head(x[:1]), head(x)[:1], atol=1e-5, rtol=0)
    torch.testing.assert_close(head(x).double(), head(x.double()), atol=1e-4, rtol=0)
    plain = head(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(x), plain, atol=0, rtol=0)
        assert head(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"compact": True, "out_features": 64}])
def test_state_dict_round_trip(options):
    head = create_head("run", in_channels=12, reduce=6, seed=1, **options).eval()
    other = create_head("run", in_channels=12, reduce=6, seed=2, **options).eval()
    x = features(2, 12, 3, 3, dtype=torch.float32)
    assert not torch.equal(other(x), head(x))
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other(x), head(x), atol=0, rtol=0)


def test_default_sizes():
    assert RankOneUpdatePooling(6).out_features == 21
    assert RankOneUpdatePooling(6, compact=True).out_features == 8192


@pytest.mark.parametrize(
    "options, subject",
    [
        ({"iterations": 0}, "iterations"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 1.5}, "epsilon"),
        ({"out_features": 64}, "out_features"),
        ({"compact": True, "out_features": 0}, "out_features"),
        ({"eps": 0.0}, "eps"),
        ({"iteration": 2}, "option of head 'run'"),
    ],
)
def test_errors(options, subject):
    assert refused(lambda: create_head("run", in_channels=6, **options)) == subject
