"""Moment embedding against the computation of the paper by singular vectors, and its gradient at every rank."""

import numpy as np
import pytest
import torch
from spectral_cases import refused

from eigengrain.heads import create_head
from eigengrain.heads.moment import MomentEmbedding, homogeneous, moment_fourth_root, moment_root

EPS = 1e-6
BOTH = [{"compact": False}, {"compact": True, "out_features": 23}]


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rooted_features(sample):
    """The sub-matrix root of the paper: Z = UΣVᵀ with a 1 before each feature becomes UΣ^½Vᵀ, (C + 1, N)."""
    z = np.vstack([np.ones(sample.shape[1]), sample]) / np.sqrt(sample.shape[1])
    u, s, vt = np.linalg.svd(z, full_matrices=False)
    return u @ np.diag(np.sqrt(s)) @ vt


def naive_root(vector):
    return np.sign(vector) * (np.sqrt(np.abs(vector) + EPS) - np.sqrt(EPS))


@pytest.mark.parametrize("shape", [(3, 5, 4, 3), (1, 5, 1, 5), (2, 7, 2, 2)])
def test_full_matches_the_computation_of_the_paper(shape):
    x = features(*shape)
    head = MomentEmbedding(shape[1], compact=False)
    for sample, vector in zip(x.flatten(2).numpy(), head(x), strict=True):
        rooted = rooted_features(sample)
        bilinear = sum(np.outer(rooted[:, n], rooted[:, n]) for n in range(rooted.shape[1]))
        root = naive_root(bilinear)
        c = len(root)
        triangle = np.array([root[i, j] * (1 if i == j else np.sqrt(2)) for i in range(c) for j in range(i, c)])
        torch.testing.assert_close(vector, torch.tensor(triangle / np.linalg.norm(root)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(3, 5, 4, 3), (1, 5, 1, 5), (2, 7, 2, 2)])
def test_sketch_of_the_fourth_root_is_the_papers_sketch_of_rooted_features(shape):
    x = features(*shape)
    size = 29
    head = MomentEmbedding(shape[1], out_features=size, seed=4)
    index, sign = head.sketch.index.numpy(), head.sketch.sign.numpy()
    for sample, vector in zip(x.flatten(2).numpy(), head(x), strict=True):
        bins = np.zeros(size)
        for column in rooted_features(sample).T:  # compact pooling, position by position
            for i, a in enumerate(column):
                for j, b in enumerate(column):
                    bins[(index[0, i] + index[1, j]) % size] += sign[0, i] * sign[1, j] * a * b
        root = naive_root(bins)
        torch.testing.assert_close(vector, torch.tensor(root / np.linalg.norm(root)), atol=1e-10, rtol=0)


def test_moment_matrix_holds_mean_and_second_moment():
    x = features(2, 4, 3, 3)
    root = moment_root(x)
    fourth = moment_fourth_root(x)
    flat = x.flatten(2)
    moment = root @ root
    torch.testing.assert_close(moment[:, 0, 0], torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(moment[:, 0, 1:], flat.mean(-1))
    torch.testing.assert_close(moment[:, 1:, 1:], flat @ flat.mT / 9)
    torch.testing.assert_close(fourth @ fourth, root)
    torch.testing.assert_close(homogeneous(x)[:, 0], torch.ones(2, 9, dtype=torch.float64))


@pytest.mark.parametrize("options", BOTH)
@pytest.mark.parametrize("shape", [(2, 3, 2, 4), (1, 5, 1, 3), (1, 4, 1, 1)])
def test_gradcheck_also_at_short_rank(options, shape):
    """With fewer positions than channels + 1 the matrix is singular for every input, and the vector is still smooth."""
    head = MomentEmbedding(shape[1], **options)
    assert torch.autograd.gradcheck(head, features(*shape).requires_grad_(), atol=1e-6)


def test_both_solvers_have_the_same_gradient():
    x = features(2, 6, 1, 4).requires_grad_()
    weight = features(2, 7, 7, seed=2)
    fourth = moment_fourth_root(x)
    roots = moment_root(x), fourth.mT @ fourth
    torch.testing.assert_close(*(torch.autograd.grad((root * weight).sum(), x)[0] for root in roots))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("seed", range(4))
def test_gradient_of_the_root_is_bounded(scale, seed):
    """‖∂l/∂X‖ ≤ √(2/N) ‖∂l/∂Q‖ at every condition number, with dead and repeated channels."""
    x = features(1, 8, 4, 5, seed=seed) * torch.logspace(0, -9, 8, dtype=torch.float64).reshape(1, 8, 1, 1) * scale
    x[:, 3] = 0
    x[:, 5] = x[:, 6]
    x.requires_grad_()
    weight = features(1, 9, 9, seed=seed + 10)
    (moment_root(x) * weight).sum().backward()
    assert float(x.grad.norm()) <= (2 / 20) ** 0.5 * float(weight.norm()) * (1 + 1e-9)


@pytest.mark.parametrize("options", BOTH)
@pytest.mark.parametrize("kill", [slice(None), slice(0, 3), slice(4, 5)])
def test_zero_and_dead_channels_are_finite(options, kill):
    x = features(2, 5, 3, 3, dtype=torch.float32)
    x[:, kill] = 0
    x.requires_grad_()
    out = MomentEmbedding(5, **options)(x)
    (out * features(*out.shape, seed=4)).sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(x.grad).all()
    torch.testing.assert_close(out.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("options", BOTH)
def test_layouts_dtypes_and_batch_of_one(options):
    x = features(2, 6, 3, 5, dtype=torch.float32)
    head = MomentEmbedding(6, **options)
    plain = head(x)
    assert plain.shape == (2, head.out_features)
    assert plain.dtype == torch.float32
    torch.testing.assert_close(head(x.to(memory_format=torch.channels_last)), plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(head(x[:1]), plain[:1], atol=1e-5, rtol=0)
    torch.testing.assert_close(plain.double(), head(x.double()), atol=1e-4, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(x), plain, atol=0, rtol=0)
        assert head(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("options", BOTH)
def test_state_dict_round_trip(options):
    head = create_head("monet", in_channels=12, reduce=5, seed=1, **options).eval()
    other = create_head("monet", in_channels=12, reduce=5, seed=2, **options).eval()
    other.load_state_dict(head.state_dict())
    x = features(2, 12, 3, 3, dtype=torch.float32)
    torch.testing.assert_close(other(x), head(x), atol=0, rtol=0)


def test_seed_chooses_the_sketch():
    x = features(2, 6, 3, 3)
    one, two = (MomentEmbedding(6, out_features=64, seed=seed)(x) for seed in (1, 2))
    assert (one - two).abs().max() > 0.01


def test_default_sizes():
    assert MomentEmbedding(6).out_features == 10_000
    assert MomentEmbedding(6, compact=False).out_features == 28


@pytest.mark.parametrize(
    "options, subject",
    [
        ({"compact": False, "out_features": 64}, "out_features"),
        ({"out_features": 0}, "out_features"),
        ({"eps": -1.0}, "eps"),
        ({"sketch": 64}, "option of head 'monet'"),
    ],
)
def test_errors(options, subject):
    assert refused(lambda: create_head("monet", in_channels=6, **options)) == subject
