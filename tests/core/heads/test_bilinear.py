import math

import numpy as np
import pytest
import scipy.linalg
import torch
from spectral_cases import refused

import eigengrain.heads.bilinear
from eigengrain.errors import NonFiniteError
from eigengrain.heads import create_head
from eigengrain.heads.layers import power_normalise, signed_sqrt

HEADS = ["bcnn", "bcnn-improved"]
F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle(name, image, eps=1e-5, ridge=1e-3):
    """One image (C, H, W), entry by entry; the matrix root is SciPy's, which does not use eigenvectors."""
    channels, height, width = image.shape
    a = np.zeros((channels, channels))
    for i in range(channels):
        for j in range(channels):
            a[i, j] = sum(image[i, p, q] * image[j, p, q] for p in range(height) for q in range(width)) / (height * width)
    if name == "bcnn-improved":
        a = scipy.linalg.sqrtm(a + ridge * np.eye(channels)).real
    b = np.array([math.copysign(math.sqrt(abs(e) + eps), e) if e else 0.0 for e in a.ravel()])
    return b / math.sqrt(sum(e * e for e in b))


@pytest.mark.parametrize("shape", [(3, 4, 3, 5), (1, 6, 1, 5), (2, 1, 2, 2), (2, 7, 1, 1)])
@pytest.mark.parametrize("name", HEADS)
def test_equals_the_definition(name, shape):
    x = draw(*shape)
    v = create_head(name, shape[1])(x)
    assert v.dtype == F64
    assert v.shape == (shape[0], shape[1] ** 2)
    np.testing.assert_allclose(v.numpy(), [oracle(name, image) for image in x.numpy()], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", HEADS)
def test_triangle_and_options(name):
    x = draw(2, 5, 3, 4)
    head = create_head(name, 5, triangle=True, eps=1e-3)
    full = np.stack([oracle(name, image, eps=1e-3).reshape(5, 5)[np.triu_indices(5)] for image in x.numpy()])
    expected = full / np.linalg.norm(full, axis=1, keepdims=True)
    assert head.out_features == 15
    np.testing.assert_allclose(head(x).numpy(), expected, rtol=1e-9, atol=1e-10)


def test_ridge():
    x = draw(2, 6, 1, 3)  # short rank, where the ridge matters
    for ridge in (1e-6, 0.1):
        v = create_head("bcnn-improved", 6, ridge=ridge)(x)
        expected = [oracle("bcnn-improved", image, ridge=ridge) for image in x.numpy()]
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", HEADS)
def test_vector_has_unit_norm_and_repeats_off_the_diagonal(name):
    v = create_head(name, 4)(draw(3, 4, 5, 5))
    assert torch.allclose(v.norm(dim=1), torch.ones(3, dtype=F64), rtol=1e-13, atol=0)
    m = v.unflatten(1, (4, 4))
    assert torch.allclose(m, m.mT, rtol=1e-12, atol=0)


@pytest.mark.parametrize("triangle", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_gradient(name, triangle):
    # matrix entries away from 0, where the signed root has a step
    x = (draw(2, 3, 2, 3).abs() + 0.2).requires_grad_()
    head = create_head(name, 3, triangle=triangle)
    assert head.matrix(x).abs().min() > 1e-2
    assert torch.autograd.gradcheck(head, x)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", HEADS)
def test_zero_features_are_finite(name, dtype):
    x = torch.zeros(2, 4, 3, 3, dtype=dtype)
    x[1, 0] = 1e-30  # its square underflows in float32
    x.requires_grad_()
    v = create_head(name, 4)(x)
    (grad,) = torch.autograd.grad(v, x, torch.ones_like(v))
    assert v.isfinite().all()
    assert grad.isfinite().all()
    if name == "bcnn":
        assert (v[0] == 0).all()
        assert (grad[0] == 0).all()


@pytest.mark.parametrize("name", HEADS)
def test_dead_channels_are_zero_and_have_finite_gradients(name):
    x = draw(2, 24, 8, 8, dtype=torch.float32).relu()
    x[:, [2, 11]] = 0
    x.requires_grad_()
    v = create_head(name, 24)(x)
    (grad,) = torch.autograd.grad(v, x, draw(2, 576, seed=1, dtype=torch.float32))
    assert v.isfinite().all()
    assert grad.isfinite().all()
    assert grad.norm() > 0
    dead = v.unflatten(1, (24, 24))[:, 2].clone()
    dead[:, 2] = 0  # the ridge is on the diagonal
    assert (dead == 0).all()


def test_signed_root_slope_is_bounded():
    x = torch.tensor([-1.0, -1e-12, 0.0, 1e-300, 1e-9, 4.0], dtype=F64, requires_grad=True)
    y = signed_sqrt(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y.tolist() == pytest.approx([math.copysign(math.sqrt(abs(e) + 1e-5), e) if e else 0.0 for e in x.tolist()])
    assert slope.max() == pytest.approx(0.5 / math.sqrt(1e-5))
    assert slope[2] == 0
    assert torch.equal(power_normalise(torch.zeros(3)), torch.zeros(3))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_input_gives_float32(name, dtype):
    x = draw(2, 5, 4, 4).to(dtype)
    v = create_head(name, 5)(x)
    assert v.dtype == torch.float32
    # only the rounding of the features themselves is lost
    assert torch.allclose(v.double(), create_head(name, 5)(x.double()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", HEADS)
def test_autocast_has_no_effect(name):
    x = draw(2, 5, 4, 4).to(torch.bfloat16)
    head = create_head(name, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = head(x)
    assert v.dtype == torch.float32
    assert torch.equal(v, head(x))


@pytest.mark.parametrize("name", HEADS)
def test_memory_layout_does_not_matter(name):
    x = draw(2, 5, 4, 3, dtype=torch.float32)
    head = create_head(name, 5)
    assert torch.allclose(head(x.to(memory_format=torch.channels_last)), head(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_vmap(name):
    x = draw(4, 3, 5, 2, 3)
    head = create_head(name, 5)
    assert torch.allclose(torch.func.vmap(head)(x), torch.stack([head(item) for item in x]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", HEADS)
def test_state_round_trip_with_reduction(name):
    x = draw(4, 8, 4, 4, dtype=torch.float32)
    first, second = create_head(name, 8, reduce=3).eval(), create_head(name, 8, reduce=3).eval()
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert first.out_features == 9
    assert first.quadratic
    assert first.classifier(7)(first(x)).shape == (4, 7)


@pytest.mark.parametrize("name", HEADS)
def test_errors(name):
    assert refused(lambda: create_head(name, 5)(torch.rand(2, 4, 3, 3))) == "x"
    assert refused(lambda: create_head(name, 5, eps=0)) == "eps"
    assert refused(lambda: create_head(name, 5, trianlge=True)) == f"option of head '{name}'"


def test_errors_of_the_improved_head():
    assert refused(lambda: create_head("bcnn-improved", 5, ridge=0)) == "ridge"
    x = torch.rand(2, 5, 3, 3)
    x[1, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError) as error:
        create_head("bcnn-improved", 5)(x)
    assert error.value.samples == (1,)


def test_registered():
    assert eigengrain.heads.bilinear.BilinearPooling is type(create_head("bcnn", 2))


def test_the_form_by_products_has_the_same_ridge():
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    head = create_head("bcnn-improved", 4, ridge=0.5)
    expected = head(x)
    head.use_products()
    torch.testing.assert_close(head(x), expected, atol=1e-9, rtol=0)


def test_the_moment_of_float32_features_is_computed_in_float64():
    """Eigenvalues from 1e6 down to 1e-2: a second moment in float32 would lose the smallest."""
    g = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=g))[0]
    v = torch.linalg.qr(torch.randn(25, 3, dtype=torch.float64, generator=g))[0]
    x = (5 * u * torch.tensor([1e3, 10.0, 0.1], dtype=torch.float64) @ v.mT).reshape(1, 3, 5, 5).float()
    root = create_head("bcnn-improved", 3, ridge=1e-9).matrix(x)
    exact = torch.linalg.svdvals(x[0].flatten(1).double()) / 5
    assert torch.linalg.eigvalsh(root[0].double()).flip(0).tolist() == pytest.approx(exact.tolist(), rel=5e-3)
