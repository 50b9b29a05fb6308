"""Grassmann pooling: the projector, its gradient at and near ties, short rank, and the factorised classifier."""

import numpy as np
import pytest
import torch
from spectral_cases import refused

from eigengrain.functional import matrix_from_triu, spectral_function
from eigengrain.heads import create_head
from eigengrain.heads.subspace import GrassmannPooling, LeadingSubspace, SubspaceClassifier


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive(x, k):
    """Sum of outer products of the leading left singular vectors, by NumPy's SVD, as an isometric triangle."""
    rows = []
    for sample in x.flatten(2).numpy():
        u, s, _ = np.linalg.svd(sample, full_matrices=False)
        projector = np.zeros((len(sample), len(sample)))
        for i in range(min(k, (s > 1e-12 * s[0]).sum())):
            projector += np.outer(u[:, i], u[:, i])
        c = len(sample)
        rows.append([projector[i, j] * (1 if i == j else np.sqrt(2)) for i in range(c) for j in range(i, c)])
    return torch.tensor(np.array(rows))


@pytest.mark.parametrize("shape", [(3, 6, 4, 5), (1, 6, 1, 5), (2, 8, 7, 3)])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_matches_the_svd(shape, k):
    x = features(*shape)
    torch.testing.assert_close(GrassmannPooling(shape[1], k=k)(x), naive(x, k), atol=1e-12, rtol=0)


def test_short_rank_gives_the_whole_span():
    x = features(2, 8, 1, 3)  # rank 3, k = 6
    head = GrassmannPooling(8, k=6)
    projector = head.projector(x)
    torch.testing.assert_close(head(x), naive(x, 6), atol=1e-12, rtol=0)
    torch.testing.assert_close(projector.diagonal(dim1=1, dim2=2).sum(-1), torch.full((2,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(projector @ x.flatten(2), x.flatten(2))


def test_inner_products_are_principal_angles_and_scale_does_not_matter():
    x, y = features(1, 7, 3, 4), features(1, 7, 3, 4, seed=5)
    head = GrassmannPooling(7, k=2)
    u, v = (np.linalg.svd(t.flatten(2)[0].numpy())[0][:, :2] for t in (x, y))
    cosines = np.linalg.svd(u.T @ v)[1]
    assert float((head(x) * head(y)).sum()) == pytest.approx((cosines**2).sum(), abs=1e-12)
    assert float(head(x).square().sum()) == pytest.approx(2)
    torch.testing.assert_close(head(1e-6 * x), head(x))


@pytest.mark.parametrize("shape, k", [((2, 5, 2, 4), 2), ((1, 6, 1, 2), 4), ((1, 5, 1, 5), 4)])
def test_gradcheck(shape, k):
    """Also at short rank: with two positions the projector is that of their span, a smooth function of them."""
    head = GrassmannPooling(shape[1], k=k)
    assert torch.autograd.gradcheck(head, features(*shape).requires_grad_(), atol=1e-7)


def test_is_the_cut_spectral_function():
    x = features(2, 6, 3, 4).requires_grad_()
    moment = x.flatten(2) @ x.flatten(2).mT
    expected = spectral_function(moment, torch.ones_like, subset="top:2", cut="exact")
    weight = features(2, 6, 6, seed=3)
    head = GrassmannPooling(6, k=2)
    torch.testing.assert_close(head.projector(x), expected)
    torch.testing.assert_close(*(torch.autograd.grad((p * weight).sum(), x)[0] for p in (head.projector(x), expected)))


@pytest.mark.parametrize("gap", [1e-1, 1e-4, 1e-8, 1e-12])
def test_gradient_near_a_tie_is_one_over_the_gap(gap):
    """With W = u₂u₃ᵀ + u₃u₂ᵀ across the cut, ∂<U_k U_kᵀ, W>/∂X = 2WX/(λ₂ − λ₃), of norm 2√(λ₂ + λ₃)/(λ₂ − λ₃)."""
    values = torch.tensor([3.0, 1.0 + gap, 1.0, 0.5, 0.2], dtype=torch.float64)
    u, _ = torch.linalg.qr(features(5, 5))
    v, _ = torch.linalg.qr(features(9, 5, seed=1))
    x = (u @ torch.diag(values.sqrt()) @ v.T).reshape(1, 5, 1, 9).requires_grad_()
    weight = torch.outer(u[:, 1], u[:, 2])
    (GrassmannPooling(5, k=2).projector(x) * (weight + weight.T)).sum().backward()
    # eigenvalues are accurate to about 1e-15, which limits the accuracy of a gap of 1e-12
    assert float(x.grad.norm()) == pytest.approx(2 * (2 + gap) ** 0.5 / gap, rel=max(1e-9, 1e-14 / gap))


def test_exact_tie_has_a_finite_gradient_that_is_right_elsewhere():
    """The tied pair contributes nothing; a change that keeps the tie is differentiated correctly."""
    x = torch.zeros(1, 4, 1, 4, dtype=torch.float64)
    x[0, :, 0, :] = torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.5], dtype=torch.float64))
    x.requires_grad_()
    head = GrassmannPooling(4, k=2)
    weight = features(4, 4, seed=2)
    (head.projector(x) * weight).sum().backward()
    assert torch.isfinite(x.grad).all()
    # turning direction 1 towards 4 does not change the two equal eigenvalues: exact by Daleckii–Krein, 2·1·w/(4 − 1/4)
    symmetric = (weight + weight.T) / 2
    assert float(x.grad[0, 3, 0, 0]) == pytest.approx(float(2 * 2 * symmetric[0, 3] / (4 - 0.25)), rel=1e-12)


def test_factorised_classifier_is_the_projection_kernel():
    torch.manual_seed(0)
    head = create_head("gp", in_channels=6, k=2, class_rank=3).double()
    classifier = head.classifier(4).double()
    assert isinstance(classifier, SubspaceClassifier)
    torch.nn.init.normal_(classifier.bias)
    x = features(3, 6, 4, 4)
    expected = np.zeros((3, 4))
    for b in range(3):
        u = np.linalg.svd(x[b].flatten(1).numpy())[0][:, :2]
        for c in range(4):
            w = classifier.basis[c].detach().numpy().T
            expected[b, c] = np.linalg.norm(w.T @ u) ** 2 + classifier.bias[c].item()
    torch.testing.assert_close(classifier(head(x)), torch.tensor(expected))
    assert isinstance(GrassmannPooling(6, k=2).classifier(4), torch.nn.Linear)


def test_layouts_dtypes_and_batch_of_one():
    x = features(2, 6, 3, 5, dtype=torch.float32)
    head = GrassmannPooling(6, k=2)
    assert head(x).dtype == torch.float32
    assert head(x).shape == (2, head.out_features)
    torch.testing.assert_close(head(x.to(memory_format=torch.channels_last)), head(x))
    torch.testing.assert_close(head(x[:1]), head(x)[:1])
    torch.testing.assert_close(head(x).double(), head(x.double()), atol=1e-6, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(x), head.float()(x), atol=0, rtol=0)
        assert head(x.bfloat16()).dtype == torch.float32
        classifier = SubspaceClassifier(6, 3, 2)
        assert classifier(head(x)).dtype == torch.float32


@pytest.mark.parametrize("kill", [slice(None), slice(0, 4), slice(5, 6)])
def test_zero_and_dead_channels_are_finite(kill):
    x = features(2, 6, 3, 3)
    x[:, kill] = 0
    x.requires_grad_()
    head = GrassmannPooling(6, k=3)
    out = head(x)
    (out * features(*out.shape, seed=4)).sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(x.grad).all()
    if kill == slice(None):
        assert not out.any()


def test_state_dict_round_trip_and_default_k():
    head, other = (create_head("gp", in_channels=12, reduce=6) for _ in range(2))
    other.load_state_dict(head.state_dict())
    head.eval(), other.eval()
    x = features(2, 12, 3, 3, dtype=torch.float32)
    torch.testing.assert_close(other(x), head(x), atol=0, rtol=0)
    assert [GrassmannPooling(c).k for c in (2, 9, 32, 512)] == [1, 4, 16, 16]
    assert matrix_from_triu(head(x), isometric=True).shape == (2, 6, 6)


@pytest.mark.parametrize(
    "options, subject",
    [
        ({"k": 6}, "k"),
        ({"k": 7}, "k"),
        ({"k": 0}, "k"),
        ({"k": 2.5}, "k"),
        ({"class_rank": 7}, "class_rank"),
        ({"class_rank": 0}, "class_rank"),
        ({"kk": 2}, "option of head 'gp'"),
    ],
)
def test_errors(options, subject):
    assert refused(lambda: create_head("gp", in_channels=6, **options)) == subject


def test_classifier_refuses_other_vectors():
    assert refused(lambda: SubspaceClassifier(6, 3, 2)(torch.zeros(2, 20))) == "vector"


def test_eigenvalues_that_are_equal_up_to_rounding_have_no_slope_across_the_cut():
    eps = torch.finfo(torch.float64).eps
    values = torch.tensor([2.0, 1 + 2 * eps, 1.0, 0.5], dtype=torch.float64)
    slope = LeadingSubspace(2).divided_difference(values.unsqueeze(-1), values.unsqueeze(-2))
    expected = torch.tensor([[0, 0, 1, 2 / 3], [0, 0, 0, 2], [1, 0, 0, 0], [2 / 3, 2, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(slope, expected)


def test_a_class_may_have_as_many_directions_as_there_are_channels():
    classifier = GrassmannPooling(5, k=2, class_rank=5).classifier(3)
    assert classifier.basis.shape == (3, 5, 5)
    assert refused(lambda: GrassmannPooling(5, k=2, class_rank=6)) == "class_rank"
