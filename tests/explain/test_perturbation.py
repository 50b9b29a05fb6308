"""EigenPerturbation: the losses, the optimisation, what is not changed, and animations."""

import copy
import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

from eigengrain import output
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain import perturbation
from eigengrain.explain.perturbation import (
    WINDOW,
    EigenPerturbation,
    gaussian_blur,
    perturbation_loss,
    split_covariance,
)
from eigengrain.explain.plots import film_frames, rgb_pixels, write_gif
from eigengrain.models.backbone import Backbone, FeatureLayout
from eigengrain.models.model import CovarianceNet

F64 = torch.float64
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
D, SPLIT, SIDE = 6, 4, 16


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Trunk(nn.Module):
    """Two smooth layers, 16 px → 7 × 7 positions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.seen = []  # whether inputs were channels_last

    def forward_features(self, x):
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.second(torch.tanh(self.first(x)))


def make(head="mpncov", dtype=F64, reduce=D):
    torch.manual_seed(3)
    description = {"mean": MEAN, "std": STD, "input_size": (3, SIDE, SIDE)}
    trunk = Backbone("trunk", {}, None, Trunk(), FeatureLayout("NCHW"), (8,), description, "fc")
    model = CovarianceNet(trunk, head, num_classes=3, reduce=reduce)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 4:
                weight.copy_(torch.randn(weight.shape, generator=generator(weight.numel())) / weight[0].numel() ** 0.5)
        if reduce:  # statistics of the data, and few positions below the ReLU: no channel is dead
            norm = model.head.reduce.get_submodule("1")
            norm.momentum = 1.0
            norm.bias.fill_(1.0)
            model.train().head.reduce(model.forward_features(photos(8, torch.float32, seed=0)))
            model.backbone.seen.clear()
    return model.to(dtype).eval()


def photos(batch=2, dtype=F64, side=SIDE, seed=1):
    """Smooth random images, valid RGB, normalised."""
    rgb = torch.rand(batch, 3, 4, 4, generator=generator(seed), dtype=F64)
    rgb = nn.functional.interpolate(rgb, (side, side), mode="bilinear") * 0.8 + 0.1
    return ((rgb - column(MEAN)) / column(STD)).to(dtype)


def column(values):
    return torch.tensor(values, dtype=F64).view(3, 1, 1)


def psd(seed, d=D, spectrum=None):
    u = torch.linalg.qr(torch.randn(d, d, generator=generator(seed), dtype=F64))[0]
    spectrum = torch.tensor([5.0, 3.0, 2.0, 1.5, 1.0, 0.4], dtype=F64) if spectrum is None else spectrum
    return (u * spectrum) @ u.T


def inner(a, b):
    return (a * b).sum((-2, -1))


# --- Eqs. 10 to 12 -------------------------------------------------------------------------------------------------


def test_the_split_agrees_with_numpy():
    p = torch.stack([psd(0), psd(1)])
    large, small = split_covariance(p, SPLIT)
    for k in range(2):
        values, u = np.linalg.eigh(p[k].numpy())  # ascending
        top = sum(values[i] * np.outer(u[:, i], u[:, i]) for i in range(D - SPLIT, D))
        assert np.allclose(large[k].numpy(), top, rtol=0, atol=1e-13)
    assert torch.allclose(large + small, p, rtol=0, atol=1e-13)
    assert (large @ small).abs().max() < 1e-13


def test_rounding_does_not_count_as_a_small_eigenvalue():
    deficient = psd(0, spectrum=torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0], dtype=F64))
    assert (split_covariance(deficient, 3).small == 0).all()
    assert split_covariance(torch.zeros(2, 3, 3), 1).large.abs().max() == 0


@pytest.mark.parametrize("split", [0, -1, D, 206, 2.0, True, "4"])
def test_split_must_fit(split):
    with pytest.raises(ArgumentError) as caught:
        split_covariance(psd(0), split)
    assert (caught.value.argument, caught.value.value) == ("split", split)


def test_losses_agree_with_the_equations():
    m, (large, small) = torch.stack([psd(5), 3 * psd(6)]), split_covariance(torch.stack([psd(0), psd(1)]), SPLIT)
    for k in range(2):
        to_large, to_small = (np.linalg.norm((m[k] - p[k]).numpy(), "fro") ** 2 for p in (large, small))
        assert np.isclose(perturbation_loss(m, large, small, "large")[k], to_large, rtol=1e-13, atol=0)
        assert np.isclose(perturbation_loss(m, large, small, "small")[k], -to_large + to_small, rtol=1e-12, atol=0)


def test_misspelt_direction():
    with pytest.raises(UnknownName) as caught:
        perturbation_loss(psd(0), psd(1), psd(2), "larg")
    assert caught.value.suggestions == ["large"]
    with pytest.raises(UnknownName) as caught:
        EigenPerturbation(make()).perturb(photos(), "smal", split=SPLIT)
    assert caught.value.suggestions == ["small"]


# --- Proposition 1 -------------------------------------------------------------------------------------------------


def l2(m, large, small):
    return perturbation_loss(m, large, small, "small")


def on_cone(m):
    values, u = torch.linalg.eigh((m + m.mT) / 2)
    return (u * values.clamp_min(0).unsqueeze(-2)) @ u.mT


def on_simplex(values):
    """Project rows onto the simplex (non-negative, sum 1), by bisection on the threshold."""
    low, high = values.amin(-1, keepdim=True) - 1, values.amax(-1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        above = (values - middle).clamp_min(0).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (values - high).clamp_min(0)


def random_psd(count, seed=7):
    factor = torch.randn(count, D, D, generator=generator(seed), dtype=F64)
    return factor @ factor.mT


def test_l2_is_linear_and_has_no_minimum():
    large, small = split_covariance(psd(0), SPLIT)
    m, n = random_psd(2)
    for a in (-0.5, 0.3, 4.0):
        mixed = a * l2(m, large, small) + (1 - a) * l2(n, large, small)
        assert torch.isclose(l2(a * m + (1 - a) * n, large, small), mixed, rtol=1e-12, atol=0)
    values = torch.stack([l2(c * small, large, small) for c in (0.0, 1.0, 1e3, 1e6)])
    assert torch.allclose(
        values - values[0], -2 * small.square().sum() * torch.tensor([0.0, 1.0, 1e3, 1e6], dtype=F64), rtol=1e-12, atol=0
    )
    assert values[-1] < -1e6


def test_for_a_fixed_norm_the_minimum_is_along_the_small_part():
    large, small = split_covariance(psd(0), SPLIT)
    assert torch.allclose(on_cone(small - large), small, rtol=0, atol=1e-13)  # the closed form: a projection …
    best = small / small.norm()
    m = random_psd(50)
    m = m / m.norm(dim=(1, 2), keepdim=True)
    assert (l2(m, large, small) > l2(best, large, small)).all()
    for _ in range(200):  # … and where projected gradients end, from every start
        m = on_cone(m - 0.2 * (large - small))
        m = m / m.norm(dim=(1, 2), keepdim=True)
    assert (m - best).norm(dim=(1, 2)).max() < 1e-10


def test_for_a_fixed_trace_the_minimum_has_rank_one():
    p = psd(0)
    large, small = split_covariance(p, SPLIT)
    u = torch.linalg.eigh(p).eigenvectors[:, D - SPLIT - 1]  # of λ_{t+1}, the largest within P_S
    best = torch.outer(u, u)
    m = random_psd(50)
    m = m / m.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    assert (l2(m, large, small) > l2(best, large, small)).all()
    for _ in range(300):
        values, vectors = torch.linalg.eigh(m - 0.2 * (large - small))
        m = (vectors * on_simplex(values).unsqueeze(-2)) @ vectors.mT
    assert (m - best).norm(dim=(1, 2)).max() < 1e-8
    assert not torch.allclose(best, small / small.trace(), atol=0.1)  # not the minimum for a fixed norm


# --- optimisation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toward", ["large", "small"])
@pytest.mark.parametrize("blur", [0.0, 0.7])
def test_one_step_descends_the_gradient(toward, blur):
    model, x, start = make(), photos(1), photos(1, seed=2)
    method = EigenPerturbation(model, optimiser="sgd", lr=1e-2, bounds=False, blur=blur)
    result = method.perturb(x, toward, SPLIT, steps=1, start=start)
    large, small = split_covariance(method.covariance(x).detach(), SPLIT)

    def loss(image):
        m = np.cov(model.head.reduce(model.forward_features(image)).flatten(2)[0].detach().numpy(), bias=True)
        first, second = (np.linalg.norm(m - part[0].numpy()) ** 2 for part in (large, small))
        return first if toward == "large" else second - first

    assert np.isclose(result.losses[0, 0], loss(start), rtol=1e-12, atol=0)
    differences, h = torch.zeros_like(start), 1e-5
    for k in range(start.numel()):
        step = torch.zeros(start.numel(), dtype=F64)
        step[k] = h
        step = step.view_as(start)
        differences.view(-1)[k] = (loss(start + step) - loss(start - step)) / (2 * h)
    moved = (start - result.images) / 1e-2
    expected = gaussian_blur(differences, blur)
    assert (moved - expected).abs().max() < 1e-7 * expected.abs().max()


@pytest.mark.parametrize("toward", ["large", "small"])
def test_adam_bounds_and_jitter_as_written_out(toward):
    model, x, steps, jitter, lr = make(), photos(1), 6, 3, 0.3
    result = EigenPerturbation(model, lr=lr, jitter=jitter, seed=5).perturb(x, toward, SPLIT, steps=steps)

    def matrix(image):
        features = model.head.reduce(model.forward_features(image))[0].flatten(1)
        centred = features - features.mean(1, keepdim=True)
        return centred @ centred.T / centred.shape[1]

    values, u = torch.linalg.eigh(matrix(x).detach())
    large, small = (u[:, s] @ torch.diag(values[s]) @ u[:, s].T for s in (slice(D - SPLIT, None), slice(D - SPLIT)))
    shifts = torch.randint(-jitter, jitter + 1, (steps, 2), generator=generator(5)).tolist()
    image, first, second, trace = x, 0.0, 0.0, []
    for k, (down, right) in enumerate(shifts, start=1):
        leaf = image.clone().requires_grad_()
        m = matrix(leaf.roll((down, right), (2, 3)))
        to_large, to_small = (m - large).square().sum(), (m - small).square().sum()
        loss = to_large if toward == "large" else -to_large + to_small
        loss.backward()
        first, second = 0.9 * first + 0.1 * leaf.grad, 0.999 * second + 0.001 * leaf.grad**2
        step = lr * (first / (1 - 0.9**k)) / ((second / (1 - 0.999**k)).sqrt() + 1e-8)
        rgb = (image - step) * column(STD) + column(MEAN)
        image = (rgb.clamp(0, 1) - column(MEAN)) / column(STD)
        trace.append(loss.detach())
    assert torch.allclose(result.losses[:, 0], torch.stack(trace), rtol=1e-11, atol=0)
    assert torch.allclose(result.images, image, rtol=0, atol=1e-11)


def shares(method, images, aim):
    m = method.covariance(images).detach()
    return inner(m, aim.large), inner(m, aim.small)


def test_toward_large_comes_near_the_large_part():
    x = photos(3)
    method = EigenPerturbation(make(), optimiser="sgd", lr=0.5)
    aim = split_covariance(method.covariance(x).detach(), SPLIT)
    near = method.perturb(x, "large", SPLIT, steps=60)
    assert torch.allclose(near.losses[0], aim.small.square().sum((1, 2)), rtol=1e-12, atol=0)  # it starts near its minimum
    assert (near.losses.diff(dim=0) < 1e-12).all()
    assert (near.losses[-1] < 0.9 * near.losses[0]).all()
    far = EigenPerturbation(make(), lr=0.02).perturb(x, "large", SPLIT, steps=150, start=photos(3, seed=9))
    assert (far.losses[-1] < 0.1 * far.losses[0]).all()
    assert torch.allclose(far.losses[0], (method.covariance(photos(3, seed=9)) - aim.large).square().sum((1, 2)).detach())


def test_the_learning_rate_of_the_paper_first_leaves_the_minimum_of_l1():
    result = EigenPerturbation(make()).perturb(photos(3), "large", SPLIT, steps=200)
    assert (result.losses.amax(0) > 2 * result.losses[0]).all()  # the first steps increase the loss …
    assert (result.losses[-1] < 0.2 * result.losses[0]).all()  # … and then decrease it below the start


def test_toward_small_leaves_the_large_part():
    x = photos(3)
    method = EigenPerturbation(make())
    aim = split_covariance(method.covariance(x).detach(), SPLIT)
    result = method.perturb(x, "small", SPLIT, steps=60)
    assert (result.losses[-1] < result.losses[0]).all()
    (large_before, small_before), (large_after, small_after) = shares(method, x, aim), shares(method, result.images, aim)
    assert (large_after / small_after < 0.7 * large_before / small_before).all()


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("toward", ["large", "small"])
def test_batch_is_its_images_one_by_one(optimiser, toward):
    x, method = photos(3), EigenPerturbation(make(), optimiser=optimiser, jitter=1, blur=0.5, lr=0.05)
    together = method.perturb(x, toward, SPLIT, steps=15, snapshots=3)
    for k in range(3):
        alone = method.perturb(x[k : k + 1], toward, SPLIT, steps=15, snapshots=3)
        assert torch.allclose(together.images[k], alone.images[0], rtol=0, atol=1e-7)
        assert torch.allclose(together.losses[:, k], alone.losses[:, 0], rtol=1e-7, atol=0)
        assert torch.allclose(together.snapshots[:, k], alone.snapshots[:, 0], rtol=0, atol=1e-7)


def test_bounds_are_valid_rgb():
    x = photos()
    held = EigenPerturbation(make(), lr=0.5).perturb(x, "small", SPLIT, steps=20, snapshots=4)
    for images in (held.images, held.snapshots):
        rgb = images * column(STD) + column(MEAN)
        assert rgb.min() > -1e-12
        assert rgb.max() < 1 + 1e-12
    assert (held.images * column(STD) + column(MEAN)).max() > 1 - 1e-12  # some pixels are at the bounds
    free = EigenPerturbation(make(), lr=0.5, bounds=False).perturb(x, "small", SPLIT, steps=20)
    assert (free.images * column(STD) + column(MEAN)).abs().max() > 1.5


def test_the_seed_determines_the_result():
    def run(seed, jitter=4):
        return EigenPerturbation(make(), seed=seed, jitter=jitter).perturb(photos(), "small", SPLIT, steps=8).images

    before = torch.get_rng_state()
    assert torch.equal(run(1), run(1))
    assert not torch.allclose(run(1), run(2), atol=1e-3)
    assert torch.equal(run(1, jitter=0), run(2, jitter=0))
    torch.manual_seed(3)  # make() sets the seed; nothing else may draw random numbers
    make()
    after = torch.get_rng_state()
    run(1)
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(before)


def test_blur_agrees_with_scipy():
    from scipy.ndimage import gaussian_filter

    x = torch.randn(2, 3, 13, 17, generator=generator(), dtype=F64)
    for sigma in (0.3, 1.0, 2.5):
        radius = int(np.ceil(3 * sigma))
        expected = gaussian_filter(x.numpy(), sigma, mode="mirror", radius=radius, axes=(2, 3))
        assert np.allclose(gaussian_blur(x, sigma).numpy(), expected, rtol=0, atol=1e-13)
    with pytest.raises(ArgumentError) as caught:
        gaussian_blur(x, 4.5)
    assert caught.value.argument == "blur"
    assert gaussian_blur(x, 4.0).shape == x.shape


# --- early ends, callbacks, snapshots ------------------------------------------------------------------------------


def ends_at(losses, tolerance):
    """The step after which an image is held, from the losses (steps,) of a run without tolerance."""
    for step in range(2 * WINDOW, len(losses) + 1, WINDOW):
        old = losses[step - 2 * WINDOW : step - WINDOW].mean()
        new = losses[step - WINDOW : step].mean()
        if abs(new - old) <= tolerance * max(abs(old), abs(new)):
            return step
    return len(losses)


def test_converged_images_are_held():
    x, method, tolerance = photos(3), EigenPerturbation(make(), lr=0.05), 0.02
    whole = method.perturb(x, "small", SPLIT, steps=260)
    result = method.perturb(x, "small", SPLIT, steps=260, tolerance=tolerance)
    ends = [ends_at(whole.losses[:, k].numpy(), tolerance) for k in range(3)]
    assert len(set(ends)) > 1, "the images must end at different steps for this test to see anything"
    assert result.steps_taken == max(ends) < 260
    assert len(result.losses) == max(ends)
    assert result.converged.all()
    assert not result.stopped
    for k, end in enumerate(ends):
        assert torch.allclose(result.losses[:end, k], whole.losses[:end, k], rtol=1e-6, atol=0)
        assert torch.allclose(result.losses[end:, k], result.losses[-1, k], rtol=1e-12, atol=0)
        alone = method.perturb(x[k : k + 1], "small", SPLIT, steps=260, tolerance=tolerance)
        assert alone.steps_taken == end
        assert torch.allclose(alone.images[0], result.images[k], rtol=0, atol=1e-6)
    assert not whole.converged.any()


def return_false(step, losses):
    return step < 5


def raise_stop(step, losses):
    if step == 5:
        raise StopIteration


@pytest.mark.parametrize("on_step", [return_false, raise_stop])
def test_a_callback_can_stop(on_step):
    x, method = photos(), EigenPerturbation(make())
    result = method.perturb(x, "small", SPLIT, steps=12, snapshots=4, on_step=on_step)
    assert result.stopped
    assert result.steps_taken == 5
    assert result.losses.shape == (5, 2)
    assert result.snapshot_steps == (0, 4, 5)
    assert torch.equal(result.snapshots[-1], result.images)
    assert torch.equal(result.images, method.perturb(x, "small", SPLIT, steps=5).images)


def test_a_callback_sees_every_step():
    seen = []
    result = EigenPerturbation(make()).perturb(
        photos(), "small", SPLIT, steps=6, on_step=lambda step, losses: seen.append((step, losses))
    )
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert torch.equal(torch.stack([losses for _, losses in seen]), result.losses)
    assert not any(losses.requires_grad for _, losses in seen)
    assert not result.stopped
    late = EigenPerturbation(make()).perturb(photos(), "small", SPLIT, steps=5, on_step=return_false)
    assert not late.stopped  # the last step


@pytest.mark.parametrize(
    "count, steps", [(1, (9,)), (2, (0, 9)), (4, (0, 3, 6, 9)), (5, (0, 2, 4, 7, 9)), (10, tuple(range(10)))]
)
def test_snapshots_are_evenly_spaced(count, steps):
    x, method = photos(), EigenPerturbation(make())
    result = method.perturb(x, "small", SPLIT, steps=9, snapshots=count)
    assert result.snapshot_steps == steps
    assert result.snapshots.shape == (count, 2, 3, SIDE, SIDE)
    assert torch.equal(result.snapshots[-1], result.images)
    if count > 1:
        assert torch.equal(result.snapshots[0], x)
        second = method.perturb(x, "small", SPLIT, steps=steps[1])
        assert torch.equal(result.snapshots[1], second.images)


def test_no_snapshots_by_default():
    result = EigenPerturbation(make()).perturb(photos(), "small", SPLIT, steps=2)
    assert result.snapshots is None
    assert result.snapshot_steps == ()
    for wrong in (-1, 4, 1.5):
        with pytest.raises(ArgumentError) as caught:
            EigenPerturbation(make()).perturb(photos(), "small", SPLIT, steps=2, snapshots=wrong)
        assert caught.value.argument == "snapshots"


# --- nothing else changes --------------------------------------------------------------------------------------------


def picture_of(model):
    parts = [(name, m.training, len(m._forward_hooks), len(m._backward_hooks)) for name, m in model.named_modules()]
    weights = [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    return parts, weights, copy.deepcopy(model.state_dict())


def same(a, b):
    return (
        a[0] == b[0]
        and all(r == s and (g is h is None or torch.equal(g, h)) for (r, g), (s, h) in zip(a[1], b[1], strict=True))
        and all(torch.equal(v, b[2][k]) for k, v in a[2].items())
    )


@pytest.mark.parametrize("failure", [None, "callback", "network"])
def test_nothing_else_changes(failure, monkeypatch):
    model, x = make(), photos().requires_grad_()
    model.backbone.first.weight.requires_grad_(False)
    model.backbone.second.weight.grad = torch.full_like(model.backbone.second.weight, 7.0)
    before, values = picture_of(model), x.detach().clone()

    class Failure(Exception):
        pass

    def fail(step, losses):
        raise Failure

    if failure == "network":
        whole, calls = model.backbone.forward_features, []

        def broken(images):
            calls.append(images)
            return fail(0, None) if len(calls) == 3 else whole(images)

        monkeypatch.setattr(model.backbone, "forward_features", broken)
    run = {"split": SPLIT, "steps": 4, "tolerance": 0.1, "on_step": fail if failure == "callback" else None}
    if failure:
        with pytest.raises(Failure):
            EigenPerturbation(model).perturb(x, "small", **run)
    else:
        assert not EigenPerturbation(model).perturb(x, "small", **run).images.requires_grad
    assert same(before, picture_of(model))
    assert torch.equal(x, values)
    assert x.requires_grad
    assert x.grad is None
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_callers_without_gradients(context):
    model, x = make(), photos()
    expected = EigenPerturbation(model).perturb(x, "small", SPLIT, steps=3).images
    with context():
        actual = EigenPerturbation(model).perturb(x.clone(), "small", SPLIT, steps=3).images
        assert not torch.is_grad_enabled()
    assert torch.equal(actual, expected)


# --- precision and layout ------------------------------------------------------------------------------------------


def test_float32_image_of_a_float32_network():
    expected = EigenPerturbation(make(), lr=0.02).perturb(photos(), "small", SPLIT, steps=5)
    actual = EigenPerturbation(make(dtype=torch.float32), lr=0.02).perturb(photos(dtype=torch.float32), "small", SPLIT, 5)
    assert actual.images.dtype == torch.float32
    assert actual.losses.dtype == expected.losses.dtype == F64
    assert torch.allclose(actual.losses, expected.losses, rtol=1e-3, atol=0)


def test_half_precision_network_with_full_precision_loss():
    model, x = make(dtype=torch.float32), photos(dtype=torch.float32)
    method, full = EigenPerturbation(model, amp=torch.bfloat16), EigenPerturbation(model)
    p = method.covariance(x)
    assert p.dtype == F64
    assert 1e-5 < (p - full.covariance(x)).norm() / p.norm() < 0.05  # the network did run in bfloat16
    result = method.perturb(x, "large", SPLIT, steps=3)
    small = split_covariance(p.detach(), SPLIT).small
    assert torch.allclose(result.losses[0], small.square().sum((1, 2)), rtol=1e-9, atol=0)  # P and M are rounded alike
    assert result.images.dtype == torch.float32
    fall = method.perturb(x, "small", SPLIT, steps=30).losses
    assert (fall[-1] < fall[0]).all()


def test_channels_last():
    model, x = make(), photos()
    expected = EigenPerturbation(model).perturb(x, "small", SPLIT, steps=4)
    assert not any(model.backbone.seen)
    model.backbone.seen.clear()
    actual = EigenPerturbation(model, channels_last=True).perturb(x, "small", SPLIT, steps=4, snapshots=2)
    assert all(model.backbone.seen)
    assert torch.allclose(actual.images, expected.images, rtol=0, atol=1e-7)
    assert actual.images.is_contiguous()
    assert torch.equal(actual.snapshots[1], actual.images)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_host_does_not_wait_for_the_device():
    def watch(step, losses):
        torch.cuda.set_sync_debug_mode("error" if step < 8 else "default")

    model, x = make(dtype=torch.float32).cuda(), photos(dtype=torch.float32).cuda()
    method = EigenPerturbation(model, jitter=2, blur=0.5, amp=torch.bfloat16, channels_last=True)
    try:
        result = method.perturb(x, "small", SPLIT, steps=8, progress=False, on_step=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.images.is_cuda
    assert result.losses.device.type == "cpu"


# --- errors and warnings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [make("gap"), make("bcnn"), nn.DataParallel(make())])
def test_models_that_do_not_fit(model):
    with pytest.raises(ArgumentError) as caught:
        EigenPerturbation(model)
    assert caught.value.argument == "model"


@pytest.mark.parametrize("head", ["isqrt", "logcov+seb", "mpncov+seb"])
def test_every_covariance_head_has_the_same_covariance(head):
    x = photos()
    actual = EigenPerturbation(make(head)).perturb(x, "small", SPLIT, steps=2)
    assert torch.equal(actual.images, EigenPerturbation(make()).perturb(x, "small", SPLIT, steps=2).images)


def test_without_reduction_the_map_itself_counts():
    model, x = make(reduce=None), photos()
    p = EigenPerturbation(model).covariance(x)
    assert np.allclose(
        p[1].detach().numpy(),
        np.cov(model.forward_features(x)[1].flatten(1).detach().numpy(), bias=True),
        rtol=1e-11,
        atol=1e-14,
    )


@pytest.mark.parametrize("part", ["", "backbone", "head.reduce.1"])
def test_training_mode(part):
    model = make()
    model.get_submodule(part).train()
    with pytest.raises(ArgumentError) as caught:
        EigenPerturbation(model).perturb(photos(), "small", SPLIT, steps=1)
    assert caught.value.argument == "model"


@pytest.mark.parametrize(
    ("argument", "value"),
    [("lr", 0), ("lr", float("inf")), ("jitter", 1.5), ("jitter", -1), ("blur", -0.1), ("amp", torch.float16)],
)
def test_options_out_of_range(argument, value):
    with pytest.raises(ArgumentError) as caught:
        EigenPerturbation(make(), **{argument: value})
    assert (caught.value.argument, caught.value.value) == (argument, value)


def test_unknown_optimiser():
    with pytest.raises(UnknownName) as caught:
        EigenPerturbation(make(), optimiser="adem")
    assert caught.value.suggestions == ["adam"]


def spoilt(value):
    x = photos()
    x[1, 2, 3, 4] = value
    return x


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("split", 206),
        ("split", 0),
        ("steps", 0),
        ("tolerance", -1.0),
        ("x", photos()[0]),
        ("x", photos()[:0]),
        ("x", spoilt(torch.nan)),
        ("x", spoilt(4.0)),
        ("x", photos() * 255),
        ("start", photos(1)),
        ("start", photos() * 255),
    ],
)
def test_arguments_out_of_range(argument, value):
    arguments = {"x": photos(), "toward": "small", "split": SPLIT, "steps": 2} | {argument: value}
    with pytest.raises(ArgumentError) as caught:
        EigenPerturbation(make()).perturb(**arguments)
    assert caught.value.argument == argument


def test_images_must_be_floating_point():
    with pytest.raises(ValueError):
        EigenPerturbation(make()).perturb((photos() * 100).to(torch.uint8), "small", SPLIT, steps=1)


def test_a_model_without_a_mean():
    model = make()
    del model.pretrained_cfg["mean"]
    with pytest.raises(ArgumentError) as caught:
        EigenPerturbation(model)
    assert "mean" in caught.value.remedy


def test_an_empty_small_part_is_warned_about():
    x = photos(side=5)  # 2 × 2 positions: rank 3 at most
    with pytest.warns(UserWarning, match="P_S is 0 in 2 of 2 images"):
        EigenPerturbation(make()).perturb(x, "small", SPLIT, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EigenPerturbation(make()).perturb(photos(), "small", SPLIT, steps=1)


def test_divergence_is_warned_about(monkeypatch):
    monkeypatch.setattr(torch, "tanh", lambda x: x)  # an unbounded network
    method = EigenPerturbation(make(), optimiser="sgd", lr=1e100, bounds=False)
    with pytest.warns(UserWarning, match=r"images \[0, 1\] is not finite"):
        result = method.perturb(photos(), "small", SPLIT, steps=4)
    assert result.steps_taken == 4
    with pytest.warns(UserWarning, match="is not finite"):
        result = method.perturb(photos(), "small", SPLIT, steps=2 * WINDOW, tolerance=0.5)
    assert result.losses[-1].isnan().all()
    assert not result.converged.any()


def test_bar_is_shown_on_a_terminal_by_the_first_process(monkeypatch):
    def shown(progress=True):
        text = io.StringIO()
        console = Console(file=text, force_terminal=True)
        monkeypatch.setattr(output, "stderr_console", lambda: console)
        EigenPerturbation(make()).perturb(photos(), "small", SPLIT, steps=3, progress=progress)
        return text.getvalue()

    assert "toward small" in shown()
    assert shown(progress=False) == ""
    monkeypatch.setattr(perturbation.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(perturbation.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(perturbation.dist, "get_rank", lambda: 1)
    assert shown() == ""
    monkeypatch.setattr(perturbation.dist, "get_rank", lambda: 0)
    assert "toward small" in shown()


# --- animation -----------------------------------------------------------------------------------------------------


def test_pixels_are_the_original_ones():
    rgb = torch.randint(0, 256, (2, 3, 5, 4), generator=generator(), dtype=torch.uint8)
    normalised = (rgb.to(F64) / 255 - column(MEAN)) / column(STD)
    assert torch.equal(rgb_pixels(normalised, MEAN, STD), rgb)
    assert torch.equal(rgb_pixels(normalised.float()[0], MEAN, STD), rgb[0])
    with pytest.raises(ArgumentError):
        rgb_pixels(normalised[:, :2], MEAN, STD)


@pytest.mark.parametrize("batch, columns, size", [(1, None, (16, 16)), (3, None, (56, 20)), (3, 2, (38, 38))])
def test_gif(tmp_path, batch, columns, size):
    result = EigenPerturbation(make()).perturb(photos(batch), "small", SPLIT, steps=8, snapshots=5)
    path = write_gif(result, tmp_path / "new" / "film.gif", seconds_per_frame=0.2, hold=1.5, columns=columns)
    frames = film_frames(result, columns)
    with Image.open(path) as film:
        assert (film.format, film.n_frames, film.size) == ("GIF", 5, size)
        assert film.info["loop"] == 0
        for k, frame in enumerate(frames):
            film.seek(k)
            assert film.info["duration"] == (1500 if k == 4 else 200)
            stored = np.asarray(film.convert("RGB")).astype(int)
            assert np.abs(stored - np.asarray(frame).astype(int)).mean() < 6  # 256 colours per frame
    edge = 0 if batch == 1 else 2  # padding between the images of a batch
    corner = np.asarray(frames[0])[edge : edge + SIDE, edge : edge + SIDE]
    assert np.array_equal(corner.transpose(2, 0, 1), rgb_pixels(photos(batch)[0], MEAN, STD).numpy())


def test_animations_that_cannot_be_written(tmp_path):
    method = EigenPerturbation(make())
    result = method.perturb(photos(), "small", SPLIT, steps=2, snapshots=2)
    empty = method.perturb(photos(), "small", SPLIT, steps=1)
    for argument, write in {
        "path": lambda: write_gif(result, tmp_path / "film.mp4"),
        "seconds_per_frame": lambda: write_gif(result, tmp_path / "film.gif", seconds_per_frame=0.0),
        "hold": lambda: write_gif(result, tmp_path / "film.gif", hold=0.0),
        "columns": lambda: film_frames(result, 0),
        "result": lambda: film_frames(empty),
    }.items():
        with pytest.raises(ArgumentError) as caught:
            write()
        assert caught.value.argument == argument


def test_tolerance_is_relative_to_the_larger_of_two_windows():
    x, method = photos(1), EigenPerturbation(make(), lr=0.05)
    losses = method.perturb(x, "small", SPLIT, steps=2 * WINDOW).losses[:, 0].numpy()
    first, second = abs(losses[:WINDOW].mean()), abs(losses[WINDOW:].mean())
    relative = abs(second - first) / max(first, second)
    assert second > 1.2 * first  # so that the larger and the smaller window differ
    for tolerance, converged in ((1.01 * relative, True), (0.99 * relative, False)):
        result = method.perturb(x, "small", SPLIT, steps=2 * WINDOW + 1, tolerance=tolerance)
        assert result.converged.tolist() == [converged]
        assert result.steps_taken == 2 * WINDOW + (not converged)


@pytest.mark.parametrize("white", [False, True])
def test_images_may_leave_rgb_by_the_rounding_of_half_precision(white):
    method = EigenPerturbation(make())
    low, high = (torch.tensor([(value - m) / s for m, s in zip(MEAN, STD, strict=True)]).view(3, 1, 1) for value in (0, 1))
    x = photos(1)
    for share in (0.009, 0.011):  # the limit is 1 %
        x[0, :, 3, 4:5] = (high + share * (high - low) if white else low - share * (high - low))[:, 0]
        if share < 0.01:
            assert method.perturb(x, "small", SPLIT, steps=1).images.isfinite().all()
        else:
            with pytest.raises(ArgumentError) as error:
                method.perturb(x, "small", SPLIT, steps=1)
            assert error.value.argument == "x"


def test_a_held_image_does_not_move_again(monkeypatch):
    """Its loss can still change with the shifts of the image, and between a window before and one after it was held."""
    x, method = photos(2), EigenPerturbation(make(), lr=0.05, jitter=2)
    answers = iter([[False, True], [True, True], [True, False]])
    monkeypatch.setattr(perturbation, "_changes", lambda recent, tolerance: torch.tensor(next(answers)))
    result = method.perturb(x, "small", SPLIT, steps=100, tolerance=0.1)
    assert result.converged.tolist() == [True, True]
    assert result.steps_taken == 4 * WINDOW
    for k, steps in ((0, 2 * WINDOW), (1, 4 * WINDOW)):
        alone = method.perturb(x, "small", SPLIT, steps=steps)
        assert torch.equal(result.images[k], alone.images[k])
