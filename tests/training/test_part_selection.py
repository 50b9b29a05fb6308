"""Training with heads that add loss terms: TransFG and AFTrans on a tiny vision transformer."""

import csv
import signal

import pytest
import torch
from torch.nn.functional import cross_entropy

from eigengrain.data import make_loader
from eigengrain.errors import ArgumentError, Interrupted
from eigengrain.training import evaluate, open_run, train
from eigengrain.training.checkpoint import read_checkpoint
from eigengrain.training.config import from_mapping
from eigengrain.training.loss import Loss
from training.small_run import PLUMAGE, SIZE
from training.two_processes import part_gradients

HEADS = ("transfg", "aftrans")


def config(head, out, **changes):
    """A run of two epochs on drawn birds, with overlapping patches."""
    model = {"backbone": "test_vit", "head": head, "img_size": SIZE, "drop_rate": 0.1}
    model |= {"backbone_options": {"patch_stride": 8, "depth": 3}, **changes.pop("model", {})}
    options = {"epochs": 2, "optimiser": {"lr": 0.01}, "clip_grad": 1.0, "out": str(out), **changes}
    return from_mapping({**PLUMAGE, "model": model, **options})


def state(folder):
    content = read_checkpoint(folder / "last.pt")
    return {f"{part}.{name}": value for part in ("model", "ema") for name, value in (content[part] or {}).items()}


@pytest.mark.parametrize("head", HEADS)
def test_two_epochs_and_the_same_bits_after_a_resume(head, tmp_path):
    torch.set_num_threads(1)
    options = {"ema": 0.9, "accumulate": 2, "label_smoothing": 0.1, "save_every": 2}
    losses = []
    train(config(head, tmp_path / "whole", **options), on_step=lambda epoch, batch, loss: losses.append(loss))

    def stop(epoch, batch, loss):
        if (epoch, batch) == (0, 1):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(config(head, tmp_path / "parts", **options), on_step=stop)
    rest = []
    train(config(head, tmp_path / "parts", resume=True, **options), on_step=lambda epoch, batch, loss: rest.append(loss))
    assert rest == losses[2:]
    whole, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("head", HEADS)
def test_evaluation_is_the_cross_entropy_alone(head, tmp_path):
    train(config(head, tmp_path, epochs=1))
    run = open_run(tmp_path)
    loader = make_loader(run.dataset("test"), 4, train=False)
    with torch.no_grad():
        sums = [cross_entropy(run.model(x), y, reduction="sum") for x, y in loader]
    [score] = evaluate(run.model, make_loader(run.dataset("test"), 4, train=False))
    assert score.loss == pytest.approx(float(sum(sums)) / score.samples, rel=1e-5)
    with (tmp_path / "summary.csv").open(newline="") as file:
        assert float(next(csv.DictReader(file))["test_loss"]) == pytest.approx(score.loss, rel=1e-5)


def test_the_loss_of_a_step_has_the_terms(tmp_path):
    """The first loss with the contrastive term is that without it, and more."""
    first = {}
    for contrast in (0.0, 1.0, 3.0):

        def record(epoch, batch, loss, contrast=contrast):
            first.setdefault(contrast, loss)

        train(
            config("transfg", tmp_path / str(contrast), epochs=1, model={"head_options": {"contrast": contrast}}),
            None,
            record,
        )
    term = first[1.0] - first[0.0]
    assert term > 0
    assert first[3.0] - first[0.0] == pytest.approx(3 * term, rel=1e-4)


@pytest.mark.parametrize("option", ["mixup", "cutmix"])
def test_mixed_labels(option, tmp_path):
    with pytest.raises(ArgumentError) as error:
        train(config("transfg", tmp_path / "refused", **{option: 0.5}))
    assert error.value.argument == option
    assert error.value.remedy
    assert not (tmp_path / "refused").exists()
    for head, model in (("transfg", {"head_options": {"contrast": 0}}), ("aftrans", {})):
        result = train(config(head, tmp_path / head, epochs=1, model=model, **{option: 0.5}))
        assert result.epochs_trained == 1


@pytest.mark.parametrize("head", HEADS)
def test_half_precision_and_a_dry_run(head, tmp_path, capsys):
    assert train(config(head, tmp_path / "half", epochs=1, amp="bf16")).epochs_trained == 1
    assert train(config(head, tmp_path / "dry", dry_run=True)) is None


def test_class_weights_and_smoothing_apply_to_all_scores():
    loss, targets = Loss([1, 3], balance=True, label_smoothing=0.1), torch.tensor([0, 1, 1])
    scores = torch.randn(3, 2)
    rows = cross_entropy(scores, targets, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(loss.cross_entropy(scores, targets), (loss.weights[targets] * rows).mean())


@pytest.mark.parametrize("head", HEADS)
def test_the_gradients_of_one_process(head):
    """What test_distributed compares those of two processes with."""
    gradients = part_gradients(head, 0)
    assert len(gradients) > 30
    assert all(value > 0 for value in gradients.values())


@pytest.mark.parametrize("head", HEADS)
def test_features_that_depend_on_the_head_are_not_kept(head, tmp_path):
    """With a frozen backbone, the features of these heads still change with their parameters."""
    losses = {True: [], False: []}
    for keep, steps in losses.items():
        data = {**PLUMAGE["data"], "transforms": {"kind": "none"}}
        run = config(head, tmp_path / str(keep), freeze="backbone", cache_features=keep, data=data)
        train(run, on_step=lambda epoch, batch, loss, steps=steps: steps.append(loss))
    assert losses[True] == losses[False]
    assert len(losses[True]) > 2
