"""Cross-covariance pooling with singular value power normalisation against loops and the SVD."""

import numpy as np
import pytest
import torch
from spectral_cases import refused

from eigengrain.errors import SecondOrderError
from eigengrain.heads import create_head
from eigengrain.heads.cross_covariance import CrossCovariancePooling, cross_covariance_svpn, leading_singular_value


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive_matrices(head, sample):
    """Both terms of the definition for one image (C, N), with the singular triple of NumPy and s + ε."""
    weight = head.projection.weight.detach().double().numpy()
    matrices = []
    for h in range(head.heads):
        rows = weight[h * (head.rows + head.columns) :][: head.rows]
        columns = weight[h * (head.rows + head.columns) + head.rows :][: head.columns]
        p = np.zeros((head.rows, head.columns))
        for n in range(sample.shape[1]):
            p += np.outer(rows @ sample[:, n], columns @ sample[:, n]) / sample.shape[1]
        u, s, vt = np.linalg.svd(p)
        leading = s[0] * np.outer(u[:, 0], vt[0])
        slope = (s[0] + head.eps) ** (head.power - 1)
        matrices.append(slope * leading + slope * (p - leading))
    return np.stack(matrices)


OPTIONS = [
    {"rows": 3, "heads": 1},
    {"rows": 2, "columns": 4, "heads": 3, "power": 0.3},
    {"rows": 4, "columns": 1, "heads": 2, "power": 1.0},
    {"rows": 3, "heads": 2, "eps": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 5, 1, 1)])
def test_matches_loops_with_the_svd(shape, options):
    torch.manual_seed(0)
    head, x = CrossCovariancePooling(5, iterations=300, **options).double(), features(*shape)
    expected = np.stack([naive_matrices(head, sample).reshape(-1) for sample in x.flatten(2).numpy()])
    torch.testing.assert_close(head(x).detach(), torch.tensor(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_matches_that_of_the_svd(options):
    """Against autograd through torch's singular values, which have an exact gradient."""
    torch.manual_seed(0)
    head = CrossCovariancePooling(5, iterations=300, **options).double()
    x = features(2, 5, 12).requires_grad_()
    weight = head.projection.weight
    left, right = (weight @ x).unflatten(1, (head.heads, -1)).split((head.rows, head.columns), dim=2)
    p = left @ right.mT / 12
    expected = p * (torch.linalg.svdvals(p)[..., :1, None] + head.eps) ** (head.power - 1)
    out = head(x.unflatten(2, (3, 4)))
    direction = features(*out.shape, seed=1)
    gradients = torch.autograd.grad(out, (x, weight), direction, retain_graph=True)
    for got, wanted in zip(gradients, torch.autograd.grad(expected.flatten(1), (x, weight), direction), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_gradcheck(power):
    left, right = features(2, 3, 6).requires_grad_(), features(2, 4, 6, seed=1).requires_grad_()

    def function(x, y):
        return cross_covariance_svpn(x, y, torch.ones(4), iterations=400, power=power, eps=1e-3)

    assert torch.autograd.gradcheck(function, (left, right), atol=1e-7)


def test_singular_values_of_the_result():
    head = CrossCovariancePooling(6, rows=4, heads=1, iterations=300, eps=1e-300).double()
    x = features(1, 6, 10)
    left, right = (head.projection.weight @ x).split((4, 4), dim=1)
    before = torch.linalg.svdvals(left @ right.mT / 10)[0]
    after = torch.linalg.svdvals(head.matrices(x.unsqueeze(-1))[0, 0])
    torch.testing.assert_close(after, before / before[0].sqrt(), rtol=1e-9, atol=1e-12)


def test_leading_singular_value_from_below_and_its_gradient():
    p = features(20, 5, 7).requires_grad_()
    exact = torch.linalg.svdvals(p)[:, 0]
    errors = []
    for iterations in (1, 5, 25, 500):
        s = leading_singular_value(p, torch.ones(7), iterations)
        assert (s <= exact * (1 + 1e-12)).all()
        errors.append(float((exact - s).detach().abs().max()))
        (gradient,) = torch.autograd.grad(s.sum(), p)
        torch.testing.assert_close(gradient.flatten(1).norm(dim=1), torch.ones(20, dtype=p.dtype))  # also unconverged
    assert errors == sorted(errors, reverse=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact.sum(), p)[0], rtol=1e-6, atol=1e-8)


def test_a_second_derivative_is_refused():
    """That of the singular value at fixed vectors would be 0 instead of the true one."""
    p = features(2, 3, 4).requires_grad_()
    s = leading_singular_value(p, torch.ones(4), iterations=50)
    (gradient,) = torch.autograd.grad(s.square().sum(), p, create_graph=True)
    with pytest.raises(SecondOrderError) as caught:
        gradient.sum().backward()
    assert caught.value.function == "leading_singular_value"
    x = features(1, 5, 3, 3).requires_grad_()
    head = CrossCovariancePooling(5, rows=3).double()
    (gradient,) = torch.autograd.grad(head(x).sin().sum(), x, create_graph=True)
    with pytest.raises(SecondOrderError):
        gradient.sum().backward()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1e4, 1e15])
def test_every_scale_in_single_precision(scale):
    torch.manual_seed(0)
    head = CrossCovariancePooling(6, rows=3, heads=2)
    exact = CrossCovariancePooling(6, rows=3, heads=2).double()
    exact.load_state_dict(head.state_dict())
    direction = features(2, 18, seed=1)
    results = []
    for layer, dtype in ((head, torch.float32), (exact, torch.float64)):
        x = (features(2, 6, 3, 5) * scale).to(dtype).requires_grad_()
        out = layer(x)
        (out * direction.to(dtype)).sum().backward()
        assert out.isfinite().all()
        assert x.grad.isfinite().all()
        results.append((out.detach(), x.grad))
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5 * float(double.abs().max()) + 1e-37)


@pytest.mark.parametrize("power", [0.1, 0.5])
def test_zero_features_have_a_zero_vector_and_a_zero_gradient(power):
    x = torch.zeros(2, 6, 3, 3, requires_grad=True)
    head = CrossCovariancePooling(6, rows=3, power=power)
    out = head(x)
    (out * features(*out.shape, dtype=torch.float32)).sum().backward()
    assert not out.any()
    assert not x.grad.any()
    assert not head.projection.weight.grad.any()


def test_the_gradient_is_bounded_where_the_features_cancel():
    """P is rounding although the features are not small: without ε its gradient would grow without limit."""
    left, right = torch.ones(1, 2, 8), torch.tensor([1.0, -1.0] * 4).expand(1, 2, 8).clone()
    right = (right + 1e-8 * features(1, 2, 8, dtype=torch.float32)).requires_grad_()
    out = cross_covariance_svpn(left, right, torch.ones(2), eps=1e-4)
    (gradient,) = torch.autograd.grad(out.sum(), right)
    # ‖d‖ of a matrix of ones is 2; times ε^(α−1) (1 + (1−α)√2) and ‖left‖/N = 1/2 (four columns of each sign)
    assert gradient.norm() <= 2 * 1e-4**-0.5 * (1 + 0.5 * 2**0.5) * 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_diverged_features_give_nan(bad):
    x = features(2, 5, 3, 3, dtype=torch.float32)
    x[1, 2, 1, 1] = bad
    out = CrossCovariancePooling(5, rows=3)(x)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


def test_the_start_is_part_of_the_state():
    x = features(2, 12, 3, 3, dtype=torch.float32)
    head, other = (create_head("svpn", 12, reduce=6, rows=4, iterations=1, seed=seed).eval() for seed in (1, 2))
    other.projection.load_state_dict(head.projection.state_dict())
    assert not torch.equal(other(x), head(x))
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(x), head(x))
    assert torch.equal(head.train()(x), head(x))


def test_layouts_dtypes_and_batch_of_one():
    x, head = features(2, 6, 3, 5, dtype=torch.float32), CrossCovariancePooling(6, rows=3)
    plain = head(x)
    torch.testing.assert_close(head(x.to(memory_format=torch.channels_last)), plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(head(x[:1]), plain[:1], atol=1e-5, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(x), plain)
        assert head(x.bfloat16()).dtype == torch.float32


def test_default_sizes():
    assert CrossCovariancePooling(6).out_features == 6 * 32 * 32
    assert CrossCovariancePooling(6, rows=8, columns=3, heads=2).out_features == 48


@pytest.mark.parametrize(
    "options, subject",
    [
        ({"rows": 0}, "rows"),
        ({"columns": -1}, "columns"),
        ({"heads": True}, "heads"),
        ({"iterations": 0}, "iterations"),
        ({"power": 0.0}, "power"),
        ({"power": 1.5}, "power"),
        ({"eps": 0.0}, "eps"),
        ({"alpha": 0.5}, "option of head 'svpn'"),
    ],
)
def test_errors(options, subject):
    assert refused(lambda: create_head("svpn", in_channels=6, **options)) == subject
