import math

import numpy as np
import pytest
import torch
from spectral_cases import refused

from eigengrain.errors import ArgumentError
from eigengrain.functional import covariance, matrix_from_triu, triu_vector
from eigengrain.functional.covariance import outer_product


@pytest.mark.parametrize("shape", [(3, 5, 4, 7), (3, 5, 28), (1, 1, 1, 1), (2, 6, 3), (2, 4, 1)])
def test_equals_numpy(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    p = covariance(x)
    for item, ours in zip(x.flatten(2).numpy(), p.numpy(), strict=True):
        np.testing.assert_allclose(ours, np.atleast_2d(np.cov(item, bias=True)) if shape[-1] > 1 else 0, rtol=0, atol=1e-13)


def test_a_large_offset_costs_nothing():
    x = torch.randn(2, 4, 50, dtype=torch.float64)
    assert torch.allclose(covariance(x + 1e6), covariance(x), rtol=1e-8, atol=1e-8)


def test_constant_channels_are_exactly_zero():
    x = torch.rand(2, 3, 9) * 0.3
    x[:, 1] = 0.1
    p = covariance(x)
    assert p[:, 1].abs().max() == 0
    assert p[:, :, 1].abs().max() == 0
    assert covariance(torch.full((1, 4, 7), 0.3)).abs().max() == 0


def test_channels_last_gives_the_same():
    x = torch.randn(2, 8, 5, 6)
    assert torch.equal(covariance(x), covariance(x.to(memory_format=torch.channels_last)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_in_and_out(dtype):
    x = torch.randn(2, 4, 30).to(dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = covariance(x)
    assert p.dtype == expected
    assert torch.allclose(p.double(), covariance(x.double()), rtol=1e-6, atol=0)
    assert covariance(x, dtype=torch.float64).dtype == torch.float64
    assert covariance(x, dtype=torch.float32).dtype == torch.float32


def test_gradcheck():
    x = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(covariance, x)
    assert torch.autograd.gradgradcheck(covariance, x)


@pytest.mark.parametrize("isometric", [False, True])
@pytest.mark.parametrize("d", [1, 2, 7])
def test_triangle_and_back(d, isometric):
    a = torch.randn(2, 3, d, d, dtype=torch.float64)
    a = a + a.mT
    v = triu_vector(a, isometric=isometric)
    assert v.shape == (2, 3, d * (d + 1) // 2)
    assert torch.allclose(matrix_from_triu(v, isometric=isometric), a, rtol=1e-14, atol=0)
    naive = torch.stack(
        [a[..., i, j] * (math.sqrt(2) if isometric and i < j else 1) for i in range(d) for j in range(i, d)], -1
    )
    assert torch.allclose(v, naive, rtol=1e-14, atol=0)
    if isometric:
        assert torch.allclose(v.norm(dim=-1), torch.linalg.matrix_norm(a), rtol=1e-13, atol=0)


def test_triangle_gradcheck():
    a = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: triu_vector(m, isometric=True), a)
    v = torch.randn(2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: matrix_from_triu(t, isometric=True), v)


@pytest.mark.parametrize(
    "call, subject",
    [
        (lambda: covariance(torch.randn(4, 5)), "x"),
        (lambda: covariance(torch.randn(2, 3, 4, 5, 6)), "x"),
        (lambda: covariance(torch.randn(2, 3, 0)), "x"),
        (lambda: covariance(torch.ones(2, 3, 4, dtype=torch.int64)), "x"),
        (lambda: covariance(torch.ones(2, 3, 4, dtype=torch.complex64)), "x"),
        (lambda: covariance([[1.0]]), "x"),
        (lambda: covariance(torch.randn(2, 3, 4), dtype=torch.float16), "dtype"),
        (lambda: triu_vector(torch.randn(3, 4)), "matrix"),
        (lambda: matrix_from_triu(torch.randn(4)), "vector"),
    ],
)
def test_errors(call, subject):
    assert refused(call) == subject


def test_message_names_the_argument_and_the_remedy():
    with pytest.raises(
        ArgumentError, match=r"^x must have shape \(B, C, H, W\) or \(B, C, N\), got \(4, 5\): add a batch "
    ):
        covariance(torch.randn(4, 5))


def test_the_triangle_is_the_upper_one():
    a = torch.arange(9.0).view(3, 3).requires_grad_()
    vector = triu_vector(a)
    assert vector.tolist() == [0, 1, 2, 4, 5, 8]
    vector.backward(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert a.grad.tolist() == [[1, 2, 3], [0, 4, 5], [0, 0, 6]]


@pytest.mark.parametrize("d", [127, 128, 131])
def test_outer_product_in_quarters(d):
    x = torch.randn(2, d, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    torch.testing.assert_close(outer_product(x), torch.einsum("bin,bjn->bij", x, x), atol=1e-13, rtol=0)
