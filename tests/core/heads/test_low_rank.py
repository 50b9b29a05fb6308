import math

import numpy as np
import pytest
import torch
from spectral_cases import refused

import eigengrain.heads.low_rank  # noqa: F401  (registers the head)
from eigengrain.functional import matrix_from_triu
from eigengrain.heads import create_head
from eigengrain.heads.layers import smooth_signed_sqrt
from eigengrain.heads.low_rank import LowRankBilinearClassifier

F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def projected(head, image):
    """X̂ (m, N) of one image (C, H, W): signed root, projection and division by √N, entry by entry."""
    channels = image.shape[0]
    flat = image.reshape(channels, -1)
    eps = head.eps
    rooted = [[math.copysign(math.sqrt(abs(e) + eps) - math.sqrt(eps), e) for e in row] for row in flat]
    p = head.projection.weight.detach().double().numpy()
    n = flat.shape[1]
    return np.array(
        [[sum(p[i, c] * rooted[c][k] for c in range(channels)) / math.sqrt(n) for k in range(n)] for i in range(len(p))]
    )


def frobenius_scores(classifier, xhat):
    """‖U₊ᵀ X̂‖²_F − ‖U₋ᵀ X̂‖²_F + b for every class, squared norms summed one by one."""
    factors, bias = classifier.factors.detach().double().numpy(), classifier.bias.detach().double().numpy()
    half = classifier.rank // 2
    scores = []
    for u, b in zip(factors, bias, strict=True):
        positive = sum(float(np.dot(column, x)) ** 2 for column in u[:half] for x in xhat.T)
        negative = sum(float(np.dot(column, x)) ** 2 for column in u[half:] for x in xhat.T)
        scores.append(positive - negative + b)
    return np.array(scores)


@pytest.mark.parametrize("shape", [(3, 6, 3, 5), (1, 6, 1, 5), (2, 3, 2, 2)])
def test_vector_is_the_second_moment_of_projected_features(shape):
    x = draw(*shape)
    head = create_head("lrbp", shape[1], project=4).double()
    v = head(x)
    assert v.dtype == F64
    assert v.shape == (shape[0], 10)
    for matrix, image in zip(matrix_from_triu(v, isometric=True).detach(), x.numpy(), strict=True):
        xhat = projected(head, image)
        np.testing.assert_allclose(matrix.numpy(), xhat @ xhat.T, rtol=1e-11, atol=1e-13)
    # isometric: the vector has the norm of the matrix
    np.testing.assert_allclose(
        v.detach().norm(dim=1).numpy(), matrix_from_triu(v, isometric=True).detach().norm(dim=(1, 2))
    )


@pytest.mark.parametrize("rank", [2, 6])
def test_scores_are_differences_of_frobenius_norms(rank):
    x = draw(3, 6, 3, 4)
    head = create_head("lrbp", 6, project=5, rank=rank).double()
    classifier = head.classifier(num_classes=7).double()
    torch.nn.init.normal_(classifier.bias)
    scores = classifier(head(x)).detach().numpy()
    assert scores.shape == (3, 7)
    expected = [frobenius_scores(classifier, projected(head, image)) for image in x.numpy()]
    np.testing.assert_allclose(scores, expected, rtol=1e-11, atol=1e-12)


def test_class_matrices_have_the_rank_and_signature():
    classifier = LowRankBilinearClassifier(channels=9, num_classes=2, rank=6).double()
    assert classifier.factors.shape == (2, 6, 9)
    basis = torch.eye(classifier.in_features, dtype=F64)
    weight = (classifier(basis) - classifier.bias).detach().T  # (classes, 45)
    for values in torch.linalg.eigvalsh(matrix_from_triu(weight, isometric=True)):
        assert (values > 1e-9).sum() == 3
        assert (values < -1e-9).sum() == 3


def test_gradient():
    head = create_head("lrbp", 4, project=3, rank=2, eps=0.1).double()
    classifier = head.classifier(2).double()
    x = draw(2, 4, 2, 3)
    x[0, 0] = 0  # the smoothed root is differentiable there
    x.requires_grad_()
    assert torch.autograd.gradcheck(head, x)
    away = (draw(2, 4, 2, 3).abs() + 0.2).requires_grad_()
    parameters = (head.projection.weight, classifier.factors, classifier.bias)

    def scores(x, p, f, b):
        vector = torch.func.functional_call(head, {"projection.weight": p}, (x,))
        return torch.func.functional_call(classifier, {"factors": f, "bias": b}, (vector,))

    assert torch.autograd.gradcheck(scores, (away, *parameters))
    assert torch.autograd.gradgradcheck(scores, (away, *parameters))


def test_smooth_root():
    x = torch.tensor([-9.0, -1e-9, 0.0, 1e-300, 1e-6, 4.0], dtype=F64, requires_grad=True)
    y = smooth_signed_sqrt(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y[0].item() == pytest.approx(-math.sqrt(9 + 1e-4) + 1e-2, rel=1e-14)
    assert y[2] == 0
    assert slope.tolist() == pytest.approx([0.5 / math.sqrt(abs(e) + 1e-4) for e in x.tolist()], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_zero_features_are_finite(dtype):
    head = create_head("lrbp", 5, project=3).to(dtype)
    x = torch.zeros(2, 5, 3, 3, dtype=dtype, requires_grad=True)
    v = head(x)
    scores = head.classifier(4).to(dtype)(v)
    grads = torch.autograd.grad(scores.sum(), (x, head.projection.weight))
    assert (v == 0).all()
    assert all(g.isfinite().all() for g in grads)


def test_low_precision_and_autocast():
    x = draw(2, 6, 4, 4).to(torch.bfloat16)
    head = create_head("lrbp", 6, project=4)
    classifier = head.classifier(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = head(x)
        scores = classifier(v)
    assert v.dtype == scores.dtype == torch.float32
    assert torch.equal(v, head(x))
    assert torch.equal(scores, classifier(head(x)))
    exact = head.double()(x.double())
    assert torch.allclose(v.double(), exact, rtol=0, atol=1e-5)
    assert torch.allclose(scores.double(), classifier.double()(exact), rtol=0, atol=1e-5)
    assert head.half()(x).dtype == torch.float32
    assert classifier.half()(v).dtype == torch.float32


def test_memory_layout_and_vmap():
    x = draw(3, 6, 4, 5, dtype=torch.float32)
    head = create_head("lrbp", 6, project=4)
    v = head(x)
    assert torch.allclose(head(x.to(memory_format=torch.channels_last)), v, rtol=0, atol=1e-6)
    assert torch.allclose(torch.func.vmap(lambda item: head(item.unsqueeze(0)).squeeze(0))(x), v, rtol=0, atol=1e-6)


def test_state_round_trip():
    x = draw(2, 6, 3, 3, dtype=torch.float32)
    first, second = create_head("lrbp", 6, project=4), create_head("lrbp", 6, project=4)
    classifiers = first.classifier(3), second.classifier(3)
    assert not torch.allclose(first(x), second(x))
    second.load_state_dict(first.state_dict())
    classifiers[1].load_state_dict(classifiers[0].state_dict())
    assert torch.equal(first(x), second(x))
    assert torch.equal(classifiers[0](first(x)), classifiers[1](second(x)))


def test_defaults():
    head = create_head("lrbp", 512)
    assert head.out_features == 5050
    assert not head.quadratic
    weight = head.projection.weight.detach()
    assert torch.allclose(weight @ weight.T, torch.eye(100), rtol=0, atol=1e-5)
    classifier = head.classifier(200)
    assert (classifier.in_features, classifier.out_features, classifier.rank) == (5050, 200, 8)
    # far fewer numbers than the linear classifier of the full matrix
    assert sum(p.numel() for p in classifier.parameters()) == 200 * 8 * 100 + 200
    assert create_head("lrbp", 16, reduce=6, project=4)(torch.rand(2, 16, 3, 3)).shape == (2, 10)


def test_learns_to_separate_classes_of_equal_mean():
    """Two classes that differ only in the correlation of two channels, which needs a quadratic classifier."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(64) % 2
    base = torch.randn(64, 2, 6, 6, generator=generator)
    sign = torch.where(labels == 0, 1.0, -1.0).view(-1, 1, 1)
    x = torch.stack([base[:, 0], 0.5 * sign * base[:, 0] + base[:, 1]], 1)
    head = create_head("lrbp", 2, project=2, rank=2)
    classifier = head.classifier(2)
    optimiser = torch.optim.Adam([*head.parameters(), *classifier.parameters()], lr=0.05)
    for _ in range(80):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(classifier(head(x)), labels).backward()
        optimiser.step()
    assert (classifier(head(x)).argmax(1) == labels).float().mean() > 0.9


def test_errors():
    assert refused(lambda: create_head("lrbp", 5)(torch.rand(2, 4, 3, 3))) == "x"
    assert refused(lambda: create_head("lrbp", 5, rank=3)) == "rank"
    assert refused(lambda: create_head("lrbp", 5, project=0)) == "project"
    assert refused(lambda: create_head("lrbp", 5, eps=0)) == "eps"
    assert refused(lambda: create_head("lrbp", 5).classifier(0)) == "num_classes"
    assert refused(lambda: create_head("lrbp", 5, project=4).classifier(3)(torch.rand(2, 9))) == "vector"


def test_factors_of_the_classifier_have_unit_length_on_average():
    torch.manual_seed(0)
    factors = LowRankBilinearClassifier(64, 200, rank=8).factors
    assert factors.square().sum(-1).mean().item() == pytest.approx(1, abs=0.02)
    assert factors.mean().abs() < 1e-3
