import itertools
import math

import numpy as np
import pytest
import torch
from spectral_cases import refused

import eigengrain.heads.compact  # noqa: F401  (registers the head)
from eigengrain.heads import create_head
from eigengrain.heads.compact import RandomMaclaurin, TensorSketch

F64 = torch.float64
SKETCHES = [TensorSketch, RandomMaclaurin]
PROJECTIONS = ["tensor-sketch", "random-maclaurin"]


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def naive_tensor_sketch(sketch, vectors):
    """Add every entry of the tensor product to its bin, one at a time: no transform, no convolution."""
    index, sign = sketch.index.tolist(), sketch.sign.tolist()
    out = np.zeros(sketch.out_features)
    for channels in itertools.product(range(sketch.in_channels), repeat=sketch.order):
        at = sum(index[k][c] for k, c in enumerate(channels)) % sketch.out_features
        out[at] += math.prod(sign[k][c] * vectors[k][c] for k, c in enumerate(channels))
    return out


def naive_random_maclaurin(sketch, vectors):
    sign = sketch.sign.tolist()
    out = np.zeros(sketch.out_features)
    for j in range(sketch.out_features):
        sums = [sum(s * v for s, v in zip(sign[k][j], vectors[k], strict=True)) for k in range(sketch.order)]
        out[j] = math.prod(sums) / math.sqrt(sketch.out_features)
    return out


NAIVE = {TensorSketch: naive_tensor_sketch, RandomMaclaurin: naive_random_maclaurin}


@pytest.mark.parametrize("out_features", [1, 8, 13])  # at odd lengths an inverse transform can lose a number
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("kind", SKETCHES)
def test_sketch_equals_the_definition(kind, order, out_features):
    sketch = kind(5, out_features, order, seed=3)
    xs = [draw(2, 3, 5, seed=k) for k in range(order)]
    y = sketch(*xs)
    same = sketch(xs[0])
    assert y.shape == same.shape == (2, 3, out_features)
    for at in itertools.product(range(2), range(3)):
        np.testing.assert_allclose(y[at].numpy(), NAIVE[kind](sketch, [x[at].tolist() for x in xs]), rtol=0, atol=1e-12)
        np.testing.assert_allclose(same[at].numpy(), NAIVE[kind](sketch, [xs[0][at].tolist()] * order), rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels, positions", [(3, 20), (12, 2), (4, 1)])  # covers both ways of pooling
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("kind", SKETCHES)
def test_pooled_sketch_is_the_sum_over_positions(kind, order, channels, positions):
    sketch = kind(channels, 11, order)
    x = draw(3, positions, channels)
    assert torch.allclose(sketch.pool(x), sketch(x).sum(-2), rtol=1e-12, atol=1e-12)


def test_both_ways_of_pooling_agree():
    x = draw(2, 9, 6)
    sketch = TensorSketch(6, 32)
    assert torch.allclose(sketch._pool_matrix(x), sketch._pool_spectra(x), rtol=1e-12, atol=1e-12)
    maclaurin = RandomMaclaurin(6, 32)
    assert torch.allclose(maclaurin._pool_matrix(x), maclaurin(x).sum(-2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("kind", SKETCHES)
def test_sketch_derivatives(kind, order):
    sketch = kind(4, 7, order)
    x = draw(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(sketch, x)
    assert torch.autograd.gradcheck(sketch.pool, x)
    assert torch.autograd.gradgradcheck(sketch.pool, x)
    if order > 1:
        xs = tuple(draw(3, 4, seed=k).requires_grad_() for k in range(order))
        assert torch.autograd.gradcheck(sketch, xs)


@pytest.mark.parametrize("kind", SKETCHES)
def test_sketch_under_vmap(kind):
    sketch = kind(4, 9)
    x = draw(5, 3, 4)
    assert torch.allclose(torch.func.vmap(sketch)(x), sketch(x), rtol=0, atol=1e-12)
    assert torch.allclose(torch.func.vmap(sketch.pool)(x), sketch.pool(x), rtol=0, atol=1e-12)
    per_sample = torch.func.vmap(torch.func.grad(lambda item: sketch.pool(item).square().sum()))(x)
    y = x.clone().requires_grad_()
    (whole,) = torch.autograd.grad(sketch.pool(y).square().sum(), y)
    assert torch.allclose(per_sample, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SKETCHES)
def test_inner_products_are_unbiased(kind):
    x, y = draw(2, 6)
    for order in (1, 2, 3):
        estimates = torch.stack([(s := kind(6, 16, order, seed))(x) @ s(y) for seed in range(1500)])
        error = (estimates.mean() - (x @ y) ** order).abs()
        assert error < 4 * estimates.std() / math.sqrt(1500), order


@pytest.mark.parametrize("kind", SKETCHES)
def test_sketch_computes_in_float32_under_autocast(kind):
    sketch = kind(6, 10)
    x = draw(2, 3, 6).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, pooled = sketch(x), sketch.pool(x)
    assert y.dtype == pooled.dtype == torch.float32
    assert torch.allclose(y.double(), sketch(x.double()), rtol=1e-5, atol=1e-5)
    assert torch.allclose(pooled.double(), sketch.pool(x.double()), rtol=1e-5, atol=1e-5)
    assert torch.equal(sketch.half()(x), sketch(x))  # signs and indices are exact in every precision
    assert sketch(x, x.double()).dtype == F64


@pytest.mark.parametrize("kind", SKETCHES)
def test_sketches_have_their_own_generator(kind):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, again, other = kind(8, 16, seed=1), kind(8, 16, seed=1), kind(8, 16, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    x = draw(8)
    assert torch.equal(first(x), again(x))
    assert not torch.allclose(first(x), other(x))
    other.load_state_dict(first.state_dict())
    assert torch.equal(first(x), other(x))
    # the factors of one sketch are independent of each other too
    assert not torch.equal(first.sign[0], first.sign[1])


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("kind", SKETCHES)
def test_empty_inputs(kind, order):
    sketch = kind(5, 16, order=order)
    none = torch.zeros(0, 5, requires_grad=True)
    sketch(none).sum().backward()
    assert sketch(none).shape == (0, 16)
    assert none.grad.shape == (0, 5)
    assert sketch.pool(torch.zeros(0, 3, 5)).shape == (0, 16)
    assert torch.equal(sketch.pool(torch.zeros(2, 0, 5)), torch.zeros(2, 16))


@pytest.mark.parametrize("kind", SKETCHES)
def test_sketch_is_created_on_the_default_device(kind):
    with torch.device("meta"):
        sketch = kind(8, 16)
    assert all(buffer.is_meta for buffer in sketch.buffers())


def kernel_errors(projection, sizes, seeds):
    """Error of Σ <x_n, y_m>² at each length, relative to the norms, root mean square over pairs of images and seeds."""
    images = draw(24, 4, 32)  # (image, position, channel)
    exact = torch.einsum("anc,bmc->abnm", images, images).square().sum((2, 3))
    norms = exact.diagonal().sqrt()
    errors = []
    for size in sizes:
        squares = []
        for seed in seeds:
            head = create_head("cbp", 32, out_features=size, projection=projection, seed=seed)
            pooled = head.projection.pool(images)
            squares.append(((pooled @ pooled.T - exact) / (norms * norms[:, None])).square())
        errors.append(float(torch.stack(squares).mean().sqrt()))
    return errors


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_error_of_the_kernel_falls_with_the_root_of_the_length(projection):
    sizes = [256, 1024, 4096, 16384]
    errors = kernel_errors(projection, sizes, range(30))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.03), dict(zip(sizes, errors, strict=True))
    # the norms are about equal here, so the constant is near 1 too, which excludes a bias
    assert max(error * math.sqrt(size) for size, error in zip(sizes, errors, strict=True)) < 1.2


def oracle(head, image, eps=1e-5):
    """One image (C, H, W), position by position, by the definition of the projection."""
    channels = image.shape[0]
    positions = image.reshape(channels, -1).T
    naive = NAIVE[type(head.projection)]
    y = sum(naive(head.projection, [list(p)] * 2) for p in positions) / len(positions)
    y = np.array([math.copysign(math.sqrt(abs(e) + eps), e) if e else 0.0 for e in y])
    return y / np.sqrt(np.sum(y * y))


@pytest.mark.parametrize("shape, out_features", [((2, 4, 3, 5), 64), ((1, 6, 1, 5), 7), ((2, 9, 1, 2), 16)])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_head_equals_the_definition(projection, shape, out_features):
    x = draw(*shape)
    head = create_head("cbp", shape[1], out_features=out_features, projection=projection, seed=5)
    v = head(x)
    assert v.dtype == F64
    assert v.shape == (shape[0], out_features)
    expected = np.stack([oracle(head, image) for image in x.numpy()])
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_head_gradient(projection):
    x = (draw(2, 3, 2, 2).abs() + 0.5).requires_grad_()
    head = create_head("cbp", 3, out_features=3, projection=projection, seed=2)
    pooled = head.projection.pool(x.flatten(2).mT)
    assert pooled.abs().min() > 1e-3  # away from the step of the signed root
    assert torch.autograd.gradcheck(head, x)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (2, 30, 1, 1)])
def test_zero_features_are_finite(projection, shape, dtype):
    x = torch.zeros(shape, dtype=dtype)
    x[1, 0, 0, 0] = 1.0
    x.requires_grad_()
    v = create_head("cbp", shape[1], out_features=16, projection=projection)(x)
    (grad,) = torch.autograd.grad(v, x, torch.ones_like(v))
    assert v.isfinite().all()
    assert grad.isfinite().all()
    assert (v[0] == 0).all()
    assert (grad[0] == 0).all()


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_head_under_autocast_and_layouts(projection):
    x = draw(2, 6, 4, 3).abs().to(torch.bfloat16)
    head = create_head("cbp", 6, out_features=64, projection=projection)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = head(x)
    assert v.dtype == torch.float32
    assert torch.equal(v, head(x))
    assert torch.allclose(head(x.to(memory_format=torch.channels_last)), v, rtol=0, atol=1e-5)
    assert torch.allclose(torch.func.vmap(lambda item: head(item.unsqueeze(0)).squeeze(0))(x), v, rtol=0, atol=1e-5)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_state_round_trip(projection):
    x = draw(3, 6, 4, 4, dtype=torch.float32)
    first = create_head("cbp", 6, out_features=64, projection=projection, seed=1)
    second = create_head("cbp", 6, out_features=64, projection=projection, seed=2)
    assert not torch.allclose(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


def test_defaults():
    head = create_head("cbp", 4)
    assert head.out_features == 8192
    assert not head.quadratic
    assert isinstance(head.projection, TensorSketch)
    reduced = create_head("cbp", 8, reduce=3, out_features=32)
    assert reduced.projection.in_channels == 3
    assert reduced.classifier(5)(reduced(torch.rand(2, 8, 3, 3))).shape == (2, 5)


def test_errors():
    assert refused(lambda: create_head("cbp", 5)(torch.rand(2, 4, 3, 3))) == "x"
    assert refused(lambda: create_head("cbp", 5, projection="tensorsketch")) == "projection"
    assert refused(lambda: create_head("cbp", 5, out_features=0)) == "out_features"
    assert refused(lambda: create_head("cbp", 5, eps=-1.0)) == "eps"


@pytest.mark.parametrize("kind", SKETCHES)
def test_sketch_errors(kind):
    assert refused(lambda: kind(5, 8, order=0)) == "order"
    assert refused(lambda: kind(5, 2.5)) == "out_features"
    sketch = kind(5, 8, order=3)
    assert refused(lambda: sketch(torch.rand(5), torch.rand(5))) == "xs"
    assert refused(lambda: sketch(torch.rand(5, 4))) == "x"
    assert refused(lambda: sketch(torch.ones(5, dtype=torch.int64))) == "x"
    assert refused(lambda: sketch.pool(torch.rand(5))) == "x"


@pytest.mark.parametrize("order, size, fits", [(1, 12, True), (2, 12, True), (3, 16, True), (3, 12, False), (4, 12, False)])
def test_a_sketch_of_a_higher_order_exports_with_a_power_of_two(order, size, fits):
    sketch = TensorSketch(4, size, order=order)
    if fits:
        x = draw(2, 5, 4)
        expected = sketch.pool(x)
        sketch.use_products()
        torch.testing.assert_close(sketch.pool(x), expected, atol=1e-12, rtol=0)
    else:
        assert refused(sketch.use_products) == "out_features"
