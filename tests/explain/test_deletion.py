"""Deletion and insertion curves against a loop that changes one pixel after another."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from eigengrain.explain.deletion import deletion_curve, insertion_curve


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
    net[-1].weight.data.mul_(10)
    return net.double()


@pytest.fixture
def images():
    return torch.randn(3, 3, 6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def maps():
    return torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(2))


TARGETS = torch.tensor([4, 0, 2])


def slow_curve(model, start, end, scores, target, steps):
    """One image: its pixels as a list sorted by the map, changed one by one."""
    pixels = sorted(((scores[y, x].item(), y, x) for y in range(6) for x in range(7)), reverse=True)
    image, changed, curve = start.clone(), 0, []
    for j in range(steps + 1):
        while changed < round(j * 42 / steps):
            _, y, x = pixels[changed]
            image[:, y, x] = end[:, y, x]
            changed += 1
        with torch.no_grad():
            logits = model(image[None])[0].tolist()
        powers = [2.718281828459045**v for v in logits]
        curve.append(powers[target] / sum(powers))
    area = sum((a + b) / 2 / steps for a, b in pairwise(curve))
    return curve, area


@pytest.mark.parametrize("steps", [1, 5, 42])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_curves_by_a_loop(model, images, maps, steps, batch_size):
    baseline = images.mean((2, 3), keepdim=True).expand_as(images)
    for function, ends in ((deletion_curve, (images, baseline)), (insertion_curve, (baseline, images))):
        curve = function(model, images, maps, TARGETS, steps=steps, baseline="mean", batch_size=batch_size)
        assert curve.scores.shape == (3, steps + 1)
        assert torch.allclose(curve.shares, torch.arange(steps + 1).double() / steps)
        for i in range(3):
            expected, area = slow_curve(model, ends[0][i], ends[1][i], maps[i], TARGETS[i].item(), steps)
            assert torch.allclose(curve.scores[i], torch.tensor(expected).double(), atol=1e-6)
            assert curve.area[i].item() == pytest.approx(area, abs=1e-6)


def test_deletion_ends_where_insertion_begins(model, images, maps):
    out = deletion_curve(model, images, maps, TARGETS, steps=4)
    back = insertion_curve(model, images, -maps, TARGETS, steps=4)
    # taking away from the top, or building up from the bottom, is the same path in two directions
    assert torch.allclose(out.scores, back.scores.flip(1), atol=1e-12)


def test_the_pixels_that_matter_fall_first():
    """A model that looks at three pixels: the map that knows them has the smallest deletion area, the largest insertion."""
    spots = torch.zeros(8, 8, dtype=torch.bool)
    spots[2, 3] = spots[5, 1] = spots[6, 6] = True

    def model(x):
        inside = x[:, 0][:, spots].sum(1)
        return torch.stack([inside, torch.zeros_like(inside)], 1)

    images = torch.ones(1, 1, 8, 8) * 4
    knows, knows_not = spots[None].float(), (~spots)[None].float()
    options = {"steps": 16, "baseline": torch.zeros(())}
    assert deletion_curve(model, images, knows, 0, **options).area < 0.55
    assert deletion_curve(model, images, knows_not, 0, **options).area > 0.95
    assert insertion_curve(model, images, knows, 0, **options).area > 0.95
    assert insertion_curve(model, images, knows_not, 0, **options).area < 0.55


def test_signed_gradients_are_ranked_by_their_largest_colour(model, images):
    gradients = torch.randn(3, 3, 6, 7, generator=torch.Generator().manual_seed(3))
    whole = deletion_curve(model, images, gradients, TARGETS, steps=6)
    assert torch.equal(whole.scores, deletion_curve(model, images, gradients.abs().amax(1), TARGETS, steps=6).scores)
    assert not torch.equal(whole.scores, deletion_curve(model, images, gradients.sum(1), TARGETS, steps=6).scores)


def test_equal_pixels_do_not_fall_from_top_to_bottom():
    """A map with one large pixel: the others, all equal, fall in a scattered order that is the same for every image."""
    seen = []

    def model(x):
        seen.append((x[:, 0] == 0).float())
        return torch.zeros(len(x), 2)

    maps = torch.zeros(2, 10, 10)
    maps[:, 9, 9] = 1
    deletion_curve(model, torch.ones(2, 1, 10, 10), maps, 0, steps=4, baseline=torch.zeros(()))
    gone = torch.cat(seen).view(2, 5, 10, 10)
    assert torch.equal(gone[0], gone[1])
    assert gone[0].sum((1, 2)).tolist() == [0, 25, 50, 75, 100]
    assert gone[0, 1, 9, 9] == 1
    assert 0.2 < gone[0, 2, :5].mean() < 0.8


def test_a_constant_map_gives_no_order(model, images, maps):
    maps = maps.clone()
    maps[1] = 0
    maps[2, 0, 0] = float("nan")
    for function in (deletion_curve, insertion_curve):
        assert function(model, images, maps, TARGETS, steps=3).area.isnan().tolist() == [False, True, True]


def test_baselines(model, maps):
    images = torch.randn(3, 3, 6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images += torch.arange(3.0).view(3, 1, 1, 1)
    last = {}
    for name in ("blur", "mean"):
        seen = []
        deletion_curve(lambda x, seen=seen: seen.append(x) or model(x), images, maps, TARGETS, steps=1, baseline=name)
        last[name] = torch.cat(seen)[1::2]
    colour = images.mean((2, 3), keepdim=True)
    assert torch.allclose(last["mean"], colour.expand_as(images))
    # a blurred image varies less than the image and more than its mean colour
    spread = [(x - x.mean((2, 3), keepdim=True)).pow(2).mean().item() for x in (last["blur"], images)]
    assert 0 < spread[0] < spread[1]
    with pytest.raises(ValueError, match="unknown baseline 'blurr': did you mean 'blur'"):
        deletion_curve(model, images, maps, TARGETS, baseline="blurr")
    with pytest.raises(ValueError, match="broadcast"):
        deletion_curve(model, images, maps, TARGETS, baseline=torch.zeros(5, 5))


def test_the_model_is_left_alone(model, images, maps):
    model.train()
    images.requires_grad_()
    curve = deletion_curve(model, images, maps, TARGETS, steps=2)
    assert model.training
    assert images.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert not curve.scores.requires_grad


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_classes_are_whole_numbers_of_any_kind(model, images, maps, dtype):
    expected = deletion_curve(model, images, maps, TARGETS, steps=2)
    assert torch.equal(deletion_curve(model, images, maps, TARGETS.to(dtype), steps=2).scores, expected.scores)


def test_refusals(model, images, maps):
    for changes, said in (
        ({"targets": torch.tensor([0, 1])}, "one for each of 3 images"),
        ({"targets": torch.tensor([0.0, 1, 2])}, "whole number"),
        ({"targets": True}, "whole number"),
        ({"targets": 5}, "classes 5 to 5"),
        ({"targets": torch.tensor([-1, 1, 2])}, "classes -1 to 2"),
        ({"maps": maps[..., :5]}, "as large as the images"),
        ({"images": images[0]}, r"images \(B, C, H, W\)"),
        ({"steps": 0}, "steps must be 1 to 42"),
        ({"steps": 43}, "steps must be 1 to 42"),
    ):
        given = {"model": model, "images": images, "maps": maps, "targets": TARGETS} | changes
        with pytest.raises(ValueError, match=said):
            deletion_curve(**given)
