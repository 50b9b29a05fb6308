"""Label smoothing, class weights, mixup and cutmix against independent calculations, and in a training."""

import math
import random
import signal

import numpy as np
import pytest
import torch

from eigengrain.errors import ArgumentError, Interrupted
from eigengrain.training import train
from eigengrain.training.config import Data, Train
from eigengrain.training.loss import Loss, hits
from training.small_run import colours, small
from training.test_loop import rows
from training.test_resume import assert_same_run, stop_at

CLASSES = 5


def batch(size=6, side=8):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, side, side, generator=generator)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return images, labels, torch.randn(size, CLASSES, generator=generator)


def smoothed(labels, smoothing):
    return torch.nn.functional.one_hot(labels, CLASSES) * (1 - smoothing) + smoothing / CLASSES


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_averages_images_and_smoothed_labels(smoothing):
    images, labels, scores = batch()
    loss = Loss([1] * CLASSES, mixup=0.5, label_smoothing=smoothing)
    mixed, shares = loss.mix(images.clone(), labels, 3, 1)
    own, other = images[0].flatten().double(), images[-1].flatten().double()
    lam = float(((mixed[0].flatten().double() - other) @ (own - other)) / (own - other).square().sum())
    assert 0 < lam < 1
    torch.testing.assert_close(mixed, lam * images + (1 - lam) * images.flip(0))
    expected = lam * smoothed(labels, smoothing) + (1 - lam) * smoothed(labels.flip(0), smoothing)
    torch.testing.assert_close(shares, expected)
    # the labels are smoothed once
    torch.testing.assert_close(loss(scores, shares), -(expected * scores.log_softmax(1)).sum(1).mean())
    dominant = labels if lam > 0.5 else labels.flip(0)
    assert hits(scores, shares) == (scores.argmax(1) == dominant).sum()


def test_cutmix_replaces_a_rectangle_and_its_share_is_its_area():
    images, labels, _ = batch(side=16)
    areas = []
    for key in range(20):
        mixed, shares = Loss([1] * CLASSES, cutmix=1.0).mix(images.clone(), labels, key)
        replaced = (mixed[0] != images[0]).all(0)
        assert torch.equal(mixed[0][:, replaced], images[-1][:, replaced])
        lines, columns = replaced.any(1), replaced.any(0)
        assert replaced.sum() == lines.sum() * columns.sum()  # a rectangle
        areas.append(float(replaced.float().mean()))
        expected = (1 - areas[-1]) * smoothed(labels, 0) + areas[-1] * smoothed(labels.flip(0), 0)
        torch.testing.assert_close(shares, expected)
    assert len(set(areas)) > 10


def test_with_both_each_batch_uses_one_and_some_are_not_mixed():
    images, labels, _ = batch(side=16)
    loss = Loss([1] * CLASSES, mixup=1.0, cutmix=1.0, mix_probability=0.5)
    kinds = []
    for key in range(60):
        changed = (loss.mix(images.clone(), labels, key)[0] != images).float().mean()
        kinds.append("none" if changed == 0 else "mixup" if changed > 0.99 else "cutmix")
    assert {kind: kinds.count(kind) for kind in ("none", "mixup", "cutmix")} == pytest.approx(
        {"none": 30, "mixup": 15, "cutmix": 15}, abs=10
    )


def test_mixing_depends_on_the_key_alone():
    images, labels, _ = batch()
    loss = Loss([1] * CLASSES, mixup=1.0, seed=3)
    first, shares = loss.mix(images.clone(), labels, 0, 1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    again, _ = Loss([1] * CLASSES, mixup=1.0, seed=3).mix(images.clone(), labels, 0, 1)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    for other, key in ((Loss([1] * CLASSES, mixup=1.0, seed=4), (0, 1)), (loss, (0, 2)), (loss, (1, 1))):
        assert not torch.equal(other.mix(images.clone(), labels, *key)[1], shares)


@pytest.mark.parametrize("size", [1, 3])
def test_the_last_of_an_odd_number_is_not_mixed(size):
    images, labels, _ = batch(size)
    mixed, shares = Loss([1] * CLASSES, mixup=1.0, label_smoothing=0.1).mix(images.clone(), labels, 0)
    assert torch.equal(mixed[-1], images[-1])
    torch.testing.assert_close(shares[-1], smoothed(labels, 0.1)[-1])
    assert (mixed[:-1] != images[:-1]).all()
    torch.testing.assert_close(shares.sum(1), torch.ones(size))


def test_class_weights_give_all_classes_the_same_weight():
    counts = [8, 1, 3, 0, 4]
    loss = Loss(counts, balance=True)
    totals = loss.weights * torch.tensor(counts)
    torch.testing.assert_close(totals, torch.tensor([4.0, 4.0, 4.0, 0.0, 4.0]))  # of 16 images
    _, labels, scores = batch()
    labels = labels.where(labels != 3, 0)
    expected = torch.tensor(
        [-16 / (4 * counts[y]) * float(s.log_softmax(0)[y]) for y, s in zip(labels, scores, strict=True)]
    )
    torch.testing.assert_close(loss(scores, labels), expected.mean())
    torch.testing.assert_close(loss(scores, smoothed(labels, 0.0)), expected.mean())  # as the targets of mixing
    assert Loss(counts).weights is None


SQUARES = {"snapmix": 5.0, "maps": lambda images, labels: images.square().sum(1)}


@pytest.mark.parametrize("mixing", [{}, {"mixup": 1.0}, SQUARES])
def test_the_weight_of_an_image_multiplies_its_smoothed_target(mixing):
    images, labels, scores = batch()
    labels = labels.where(labels != 3, 0)
    partners, own, partner = labels.flip(0), torch.ones(6), torch.zeros(6)
    if mixing:  # the shares of both labels, from the same mixing without smoothing
        _, shares = Loss([1] * CLASSES, **mixing).mix(images.clone(), labels, 0)
        own, partner = (shares.gather(1, each[:, None])[:, 0] for each in (labels, partners))
        partner = partner.where(labels != partners, 0)
    counts = [80, 10, 3, 0, 1]
    weights = torch.tensor([94 / (4 * count) if count else 0.0 for count in counts])
    losses = {each: -(smoothed(each, 0.1) * scores.log_softmax(1)).sum(1) for each in (labels, partners)}
    expected = own * weights[labels] * losses[labels] + partner * weights[partners] * losses[partners]
    loss = Loss(counts, balance=True, label_smoothing=0.1, **mixing)
    _, targets = loss.mix(images.clone(), labels, 0)
    torch.testing.assert_close(loss(scores, targets), expected.mean())


def test_an_image_of_a_frequent_class_pulls_towards_it():
    scores = torch.zeros(1, 2, requires_grad=True)
    Loss([300, 3], balance=True, label_smoothing=0.1)(scores, torch.tensor([0])).backward()
    assert scores.grad[0, 0] < 0 < scores.grad[0, 1]


def test_weights_do_not_depend_on_how_images_are_shared():
    """The mean over two processes, or over two accumulated batches, is that of one batch."""
    _, labels, scores = batch()
    loss = Loss([8, 1, 3, 2, 4], balance=True)
    halves = (loss(scores[:3], labels[:3]) + loss(scores[3:], labels[3:])) / 2
    torch.testing.assert_close(loss(scores, labels), halves)


MIXED = {"mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1, "accumulate": 2, "ema": 0.9, "epochs": 2}


def test_a_mixed_training_resumes_to_the_same_weights(tmp_path):
    whole, part = [], []
    train(small(tmp_path / "whole", **MIXED), colours(), lambda e, b, loss: whole.append(loss))
    with pytest.raises(Interrupted):
        train(small(tmp_path / "part", **MIXED), colours(), stop_at(0, 1, signal.SIGTERM))
    train(small(tmp_path / "part", resume=True, **MIXED), colours(), lambda e, b, loss: part.append(loss))
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    assert part == whole[2:]
    # more than the entropy of the smoothed labels, which is what a perfect model reaches without mixing
    assert min(whole) > -sum(p * math.log(p) for p in (0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3))


def test_the_weights_of_an_unbalanced_training(tmp_path):
    losses = {}
    for balance in ("none", "weights"):
        values = losses[balance] = []
        config = small(tmp_path / balance, data=Data("colours", transforms=small(".").data.transforms, balance=balance))
        sources = colours(train=12)
        part = sources.train.subset([0, 1, 2, 3, 6, 9])  # four red, one green, one blue
        train(config, sources._replace(train=part), lambda e, b, loss, values=values: values.append(loss))
    assert losses["none"][0] != pytest.approx(losses["weights"][0], rel=1e-3)


def test_the_training_accuracy_is_in_the_summary(tmp_path):
    correct, seen = [], []
    original = hits

    def spy(scores, targets):
        correct.append(original(scores, targets))
        seen.append(len(scores))
        return correct[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eigengrain.training.loop.hits", spy)
        train(small(tmp_path), colours())
    for epoch, row in enumerate(rows(tmp_path)):
        part = slice(5 * epoch, 5 * epoch + 5)
        assert float(row["train_top1"]) == pytest.approx(100 * int(sum(correct[part])) / sum(seen[part]))


def test_options_that_do_not_fit():
    for options in (
        {"mix_probability": 0.5},
        {"mixup": 0.2, "mix_probability": 1.5},
        {"cutmix": -1.0},
        {"mixup": math.nan},
    ):
        with pytest.raises(ArgumentError) as error:
            Train(**options)
        assert error.value.argument == list(options)[-1]
