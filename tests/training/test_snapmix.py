"""SnapMix against loops over single pixels, and in a training."""

import math
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from eigengrain.data.sampler import seeded
from eigengrain.errors import ArgumentError, Diverged, Interrupted
from eigengrain.models import create_model
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.models.model import eval_mode
from eigengrain.training import setup, train
from eigengrain.training.config import Model, Optimiser, Train
from eigengrain.training.distributed import Process
from eigengrain.training.features import reason_against
from eigengrain.training.loss import Loss, hits
from eigengrain.training.snapmix import draw_box, mass, snapmix
from training.small_run import SIZE, colours, small
from training.test_resume import assert_same_run, stop_at

CLASSES = 4


def batch(size=5, height=9, width=7):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, height, width, generator=generator, dtype=torch.float64)
    maps = torch.rand(size, height, width, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (size,), generator=generator), maps * (maps > 0.3)


def resized(content, height, width):
    """Bilinear interpolation between the centres of pixels, one pixel at a time."""
    _, rows, columns = content.shape
    out = torch.zeros(3, height, width, dtype=content.dtype)
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * rows / height - 0.5, 0), rows - 1)
            x = min(max((j + 0.5) * columns / width - 0.5, 0), columns - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            above = content[:, top, left] * (1 - x + left) + content[:, top, right] * (x - left)
            below = content[:, bottom, left] * (1 - x + left) + content[:, bottom, right] * (x - left)
            out[:, i, j] = above * (1 - y + top) + below * (y - top)
    return out


def naive_mass(map, box):
    inside = [float(map[i, j]) for i in range(box[0].start, box[0].stop) for j in range(box[1].start, box[1].stop)]
    if not any(value for row in map.tolist() for value in row):
        return len(inside) / map.numel()
    return sum(inside) / sum(float(value) for row in map.tolist() for value in row)


BOXES = [
    ((slice(2, 5), slice(1, 6)), (slice(0, 7), slice(3, 5))),
    ((slice(0, 9), slice(0, 7)), (slice(8, 9), slice(6, 7))),  # everything by one pixel in a corner
    ((slice(4, 5), slice(0, 1)), (slice(0, 9), slice(0, 7))),
    ((slice(5, 9), slice(4, 7)), (slice(5, 9), slice(4, 7))),
]


@pytest.mark.parametrize(("box", "source"), BOXES)
def test_images_and_weights_of_given_boxes_and_maps(box, source):
    images, _, maps = batch()
    maps[1] = 0  # nothing contributes
    mixed, own, partner = snapmix(images.clone(), maps, box, source)
    for a in range(5):
        b = 4 - a
        expected = images[a].clone()
        content = images[b, :, source[0], source[1]]
        expected[:, box[0], box[1]] = resized(content, box[0].stop - box[0].start, box[1].stop - box[1].start)
        torch.testing.assert_close(mixed[a], expected, rtol=1e-12, atol=1e-12)
        assert float(own[a]) == pytest.approx(1 - naive_mass(maps[a], box), abs=1e-12)
        assert float(partner[a]) == pytest.approx(naive_mass(maps[b], source), abs=1e-12)


def test_the_masses_of_disjoint_boxes_add_up_and_do_not_depend_on_the_sum_of_a_map():
    _, _, maps = batch()
    whole = (slice(0, 9), slice(0, 7))
    torch.testing.assert_close(mass(maps, whole), torch.ones(5, dtype=torch.float64))
    for row in range(1, 9):
        parts = [mass(1e-20 * maps, (rows, slice(0, 7))) for rows in (slice(0, row), slice(row, 9))]
        torch.testing.assert_close(sum(parts), torch.ones(5, dtype=torch.float64))
        torch.testing.assert_close(parts[0], maps[:, :row].sum((1, 2)) / maps.sum((1, 2)))
    torch.testing.assert_close(mass(torch.zeros(1, 4, 4), (slice(0, 4), slice(0, 1))), torch.tensor([0.25]))


@pytest.mark.parametrize(("height", "width"), [(9, 7), (1, 1), (100, 30)])
def test_boxes_are_inside_and_not_empty(height, width):
    np.random.seed(0)
    for alpha in (0.1, 1, 5, 100):
        for _ in range(200):
            for box, size in zip(draw_box(height, width, alpha), (height, width), strict=True):
                assert 0 <= box.start < box.stop <= size


def test_sizes_are_those_of_the_beta_distribution():
    """Before it is cut at the borders a box has the share λ of the area: the largest boxes around each point show it."""
    np.random.seed(0)
    boxes = [draw_box(1000, 1000, 5.0) for _ in range(4000)]
    uncut = [box for box in boxes if all(side.start > 0 and side.stop < 1000 for side in box)]
    assert len(uncut) > 100
    for rows, columns in uncut:
        assert rows.stop - rows.start == columns.stop - columns.start
    # a box of side s is inside with probability (1 − s)², and its area s² is from Beta(5, 5)
    area = np.linspace(0, 1, 20001)
    density = (area * (1 - area)) ** 4 * (1 - np.sqrt(area)) ** 2
    expected = (area * density).sum() / density.sum()
    measured = np.mean([(rows.stop - rows.start) ** 2 / 1e6 for rows, _ in uncut])
    assert measured == pytest.approx(expected, abs=0.02)


def mixing(maps, **options):
    return Loss([1] * CLASSES, snapmix=5.0, maps=lambda images, labels: maps, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_the_loss_is_the_weighted_sum_of_two_cross_entropies(smoothing, size):
    images, labels, maps = batch(size)
    labels[-1] = labels[0]  # one pair of one class, and in the middle of 5 an image with itself
    loss = mixing(maps, label_smoothing=smoothing)
    mixed, shares = loss.mix(images.clone(), labels, 0, 3)
    assert (mixed != images).any()
    scores = torch.randn(size, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    box, source = boxes_of(loss, images, (0, 3))
    own, partner = 1 - mass(maps, box), mass(maps.flip(0), source)
    terms = own * cross_entropy(scores, labels, reduction="none", label_smoothing=smoothing)
    terms += partner * cross_entropy(scores, labels.flip(0), reduction="none", label_smoothing=smoothing)
    assert float(loss(scores, shares)) == pytest.approx(float(terms.mean()), rel=1e-6)
    torch.testing.assert_close(shares.sum(1), own + partner, check_dtype=False)
    changed = (mixed != images).any(1).any(0)
    assert changed[box].sum() == changed.sum()  # nothing outside of the box
    dominant = labels.where(own >= partner, labels.flip(0))
    assert hits(scores, shares) == (scores.argmax(1) == dominant).sum()


def boxes_of(loss, images, key):
    """The boxes of the batch with this key, by the same generator."""
    with seeded(loss.seed, *key, 11):
        np.random.rand()
        return [draw_box(*images.shape[2:], loss.snapmix) for _ in range(2)]


def test_class_weights_multiply_the_terms_of_their_classes():
    images, labels, maps = batch(4)
    loss = Loss([8, 1, 3, 4], snapmix=5.0, balance=True, maps=lambda images, labels: maps)
    _, shares = loss.mix(images.clone(), labels, 1)
    scores = torch.randn(4, CLASSES, dtype=torch.float64)
    weights = torch.tensor([16 / (4 * count) for count in (8, 1, 3, 4)], dtype=torch.float64)
    expected = -(weights * shares * scores.log_softmax(1)).sum(1).mean()
    assert float(loss(scores, shares)) == pytest.approx(float(expected), rel=1e-6)


def test_mixing_depends_on_the_key_alone():
    images, labels, maps = batch()
    first, shares = mixing(maps, seed=3).mix(images.clone(), labels, 0, 1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    again, _ = mixing(maps, seed=3).mix(images.clone(), labels, 0, 1)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    for seed, key in ((4, (0, 1)), (3, (0, 2)), (3, (1, 1))):
        assert not torch.equal(mixing(maps, seed=seed).mix(images.clone(), labels, *key)[1], shares)


def test_some_batches_are_not_mixed():
    images, labels, maps = batch()
    loss = mixing(maps, mix_probability=0.25)
    plain = 0
    for key in range(200):
        mixed, targets = loss.mix(images.clone(), labels, key)
        plain += targets is labels
        assert torch.equal(mixed, images) == (targets is labels)
    assert plain == pytest.approx(150, abs=20)


MODELS = {
    "gap": ("test_resnet", "gap", {"last_stride": 1}),
    "mpncov+seb": ("test_resnet", "mpncov+seb", {"reduce": 3, "last_stride": 1}),
    "mid level": ("test_resnet", "isqrt", {"reduce": 3, "last_stride": 1, "mid_level": 5}),
    "class token": ("test_vit", "mpncov", {"reduce": 3, "class_token": "beside", "img_size": 64}),
}


@pytest.mark.parametrize("name", MODELS)
def test_maps_are_contributions_to_the_score_of_the_label(name):
    """By finite differences: scaling all channels at one position changes the score by that position's contribution."""
    backbone, head, options = MODELS[name]
    torch.manual_seed(0)
    model = create_model(backbone, head, num_classes=3, **options).double().train()
    images, labels = torch.randn(4, 3, 64, 64, dtype=torch.float64), torch.tensor([2, 0, 1, 1])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    maps = setup._maps(MixedPrecision(model), Process(torch.device("cpu")))(images, labels)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not maps.requires_grad
    with eval_mode(model), torch.no_grad():
        pooled, beside = model.split_features(model.forward_features(images))
        reduced = model.head.reduce(pooled)
        small = torch.zeros(4, *reduced.shape[2:], dtype=torch.float64)
        for i in range(reduced.shape[2]):
            for j in range(reduced.shape[3]):
                scores = []
                for change in (1e-5, -1e-5):
                    changed = reduced.clone()
                    changed[:, :, i, j] *= 1 + change
                    scores.append(model.forward_vector(model.head.pool(changed), beside=beside))
                small[:, i, j] = (scores[0] - scores[1])[range(4), labels] / 2e-5
    expected = torch.nn.functional.interpolate(small.clamp_min(0)[:, None], (64, 64), mode="bilinear")[:, 0]
    torch.testing.assert_close(maps, expected, rtol=1e-5, atol=1e-6 * float(expected.max()) + 1e-10)
    assert maps.max() > 0


CHANGES = {
    "plain": {},
    "accumulated": {"accumulate": 2, "label_smoothing": 0.1, "ema": 0.9},
    "half precision": {"amp": "bf16", "mix_probability": 0.5},
    "frozen": {"freeze": "backbone", "clip_grad": 1.0},
    "mid level": {
        "model": Model("test_resnet", "mpncov+seb", reduce=3, last_stride=1, mid_level=4, calibrate=True),
        "optimiser": Optimiser(lr=1e-3),
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_training_resumes_to_the_same_weights(tmp_path, name):
    options = {"snapmix": 5.0, "epochs": 2, "batch_size": 5, **CHANGES[name]}
    whole, part = [], []
    train(small(tmp_path / "whole", **options), colours(train=25), lambda e, b, loss: whole.append(loss))
    with pytest.raises(Interrupted):
        train(small(tmp_path / "part", **options), colours(train=25), stop_at(0, 1, signal.SIGTERM))
    train(small(tmp_path / "part", resume=True, **options), colours(train=25), lambda e, b, loss: part.append(loss))
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    assert part == whole[2:]
    assert all(map(math.isfinite, whole))


def test_the_first_batch_of_a_training(tmp_path):
    """Its loss is that of a batch that is mixed by hand."""
    seen = []
    original = Loss.mix

    def spy(loss, images, labels, *key):
        plain = images.clone()
        mixed, shares = original(loss, images, labels, *key)
        seen.append((plain, labels, mixed, shares, loss, key))
        return mixed, shares

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loss, "mix", spy)
        train(small(tmp_path, snapmix=5.0, epochs=1, seed=4), colours())
    plain, labels, mixed, shares, loss, key = seen[0]
    assert key == (0, 0)
    box, source = boxes_of(loss, plain, key)
    torch.manual_seed(4)
    model = setup.create_model(**setup._model_options(small(tmp_path), colours().train)).eval()
    maps = setup._maps(MixedPrecision(model), Process(torch.device("cpu")))(plain, labels)
    expected, own, partner = snapmix(plain.clone(), maps, box, source)
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(shares.sum(1), own + partner)


def test_features_that_are_not_finite_end_the_run(tmp_path):
    sources = colours()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "contributions", lambda model, features, classes, size: model.head(features * math.nan))
        with pytest.raises(Diverged):
            train(small(tmp_path, snapmix=5.0), sources)


def test_features_of_a_frozen_backbone_are_not_kept():
    config = replace(small("."), snapmix=5.0, freeze="backbone")
    assert reason_against(config, create_model("test_resnet", "gap", 2).head) is not None
    assert reason_against(replace(config, snapmix=0.0), create_model("test_resnet", "gap", 2).head) is None


@pytest.mark.parametrize("options", [{"mixup": 0.2, "snapmix": 5}, {"cutmix": 1.0, "snapmix": 5}, {"snapmix": -1.0}])
def test_options_that_do_not_fit(options):
    with pytest.raises(ArgumentError) as error:
        Train(**options)
    assert error.value.argument == "snapmix"


@pytest.mark.parametrize("head", ["transfg", "aftrans"])
def test_heads_without_a_map_or_mixed_labels_are_refused(tmp_path, head):
    with pytest.raises(ArgumentError) as error:
        train(small(tmp_path, snapmix=5.0, model=Model("test_vit", head, img_size=SIZE)), colours())
    assert error.value.argument == "snapmix"
