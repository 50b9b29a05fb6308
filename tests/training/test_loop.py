"""The training loop: against an independent one, step by step, and where it must stop or select."""

import csv
import json
import math
import os
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.data import ImageSet, build_transform, make_loader
from eigengrain.errors import ArgumentError, Diverged, FileError, MissingPackageError, UnknownName, UnreadableImages
from eigengrain.models import create_model, from_pretrained
from eigengrain.training import loop, open_run, telemetry, train
from eigengrain.training.checkpoint import read_checkpoint
from eigengrain.training.config import Data, Model, Optimiser, Schedule
from eigengrain.training.distributed import Process
from eigengrain.training.evaluation import evaluate
from eigengrain.training.schedule import build_optimiser, build_schedule, learning_rates
from eigengrain.training.sources import Sources, check_readable
from eigengrain.training.telemetry import Meter, spectrum_row
from training.small_run import SIZE, colours, small, without_batch_statistics


def rows(out):
    with open(out / "summary.csv", newline="") as file:
        return list(csv.DictReader(file))


def plain(out, **changes):
    """Without dropout, so that a loop without random numbers gives the same losses."""
    config = small(out, **changes)
    return replace(config, model=replace(config.model, drop_rate=0.0))


def test_against_an_independent_loop(tmp_path):
    schedule = Schedule("drops", drops=[1], factor=0.5, warmup_epochs=0.4, warmup_lr=0.001)
    config = plain(tmp_path, schedule=schedule, clip_grad=2.0, label_smoothing=0.1)
    losses = []
    train(config, colours(), lambda e, b, loss: losses.append(loss))

    torch.manual_seed(config.seed)
    model = create_model("test_resnet", head="mpncov+seb", num_classes=3, reduce=3, last_stride=1)
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    images = colours().train
    images.transform = build_transform(config.data.transforms, True, mean, std)
    loader = make_loader(images, 4, train=True, seed=config.seed)
    velocity, expected, norms = {}, [], []
    for update in range(10):
        epoch, batch = divmod(update, 5)
        loader.set_epoch(epoch, start_batch=batch)
        x, y = next(iter(loader))
        model.train().zero_grad()
        log_p = model(x).log_softmax(1)
        target = torch.full((4, 3), 0.1 / 3).scatter(1, y[:, None], 0.9 + 0.1 / 3)
        loss = -(target * log_p).sum(1).mean()
        loss.backward()
        expected.append(loss.item())
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        norms.append(norm)
        for name, p in model.named_parameters():
            top = 0.02 * (5 if name.startswith("classifier") else 1)
            # two updates of warm-up, the drop after five
            lr = 0.001 + (top - 0.001) * update / 2 if update < 2 else top * (0.5 if update >= 5 else 1)
            step = p.grad * min(1, 2.0 / norm) + 1e-4 * p.detach()
            velocity[name] = step if update == 0 else 0.9 * velocity[name] + step
            p.data -= lr * velocity[name]
    assert losses == pytest.approx(expected, abs=2e-4)
    kept = from_pretrained(tmp_path / "model").state_dict()
    for name, p in model.named_parameters():
        torch.testing.assert_close(kept[name], p.detach(), atol=2e-4, rtol=1e-3)
    first, second = rows(tmp_path)
    assert float(first["train_loss"]) == pytest.approx(np.mean(expected[:5]), abs=1e-4)
    assert float(first["gradient_norm"]) == pytest.approx(np.mean(norms[:5]), rel=1e-3)
    assert [float(first[f"lr_{part}"]) for part in ("backbone", "head", "classifier")] == pytest.approx([0.02, 0.02, 0.1])
    assert [float(second[f"lr_{part}"]) for part in ("backbone", "head", "classifier")] == pytest.approx([0.01, 0.01, 0.05])


def test_the_saved_model_has_the_reported_accuracy(tmp_path):
    result = train(small(tmp_path), colours())
    run = open_run(tmp_path)
    assert run.classes == ["red", "green", "blue"]
    assert run.model.pretrained_cfg["input_size"] == (3, SIZE, SIZE)
    images = colours().test
    images.transform = run.transform
    [score] = evaluate(run.model, make_loader(images, 3, train=False))
    assert score.samples == 10
    assert score.top1 == result.scores["test_top1"] == float(rows(tmp_path)[-1]["test_top1"])
    assert score.loss == pytest.approx(result.scores["test_loss"], rel=1e-5)


def test_accumulated_batches_are_one_large_batch(tmp_path):
    """Ten batches of 2 in groups of 3, the last group with one batch, against updates with the joined batches."""
    seen = []
    config = without_batch_statistics(tmp_path / "a", batch_size=2, accumulate=3, epochs=1, save_every=3)
    config = replace(config, model=replace(config.model, calibrate=False))
    train(config, colours(train=20), lambda e, b, loss: seen.append(b))
    assert seen == list(range(10))
    assert read_checkpoint(tmp_path / "a/last.pt")["progress"]["updates"] == 4

    torch.manual_seed(config.seed)
    model = create_model("test_convnext", head="mpncov+seb", num_classes=3, reduce=None, last_stride=1)
    images = colours(train=20).train
    images.transform = build_transform(
        config.data.transforms, True, model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    )
    batches = list(make_loader(images, 2, train=True, seed=config.seed))
    optimiser = build_optimiser(model, config.optimiser)
    for group in (batches[:3], batches[3:6], batches[6:9], batches[9:]):
        x, y = torch.cat([b[0] for b in group]), torch.cat([b[1] for b in group])
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model.train()(x), y).backward()
        optimiser.step()
    kept = from_pretrained(tmp_path / "a/model").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(kept[name], tensor, atol=2e-5, rtol=1e-4)


def test_averaged_weights_are_evaluated_and_saved(tmp_path):
    states = []

    class Spy(loop.build.__globals__["ModelEmaV3"]):
        def update(self, model, step=None):
            super().update(model, step)
            states.append((self.get_decay(step), model.classifier.weight.detach().clone()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loop.build.__globals__, "ModelEmaV3", Spy)
        train(small(tmp_path, ema=0.5, epochs=1), colours())
    average = None
    for decay, weight in states:
        average = weight if average is None else decay * average + (1 - decay) * weight
    assert states[0][0] == 0  # the initialisation is dropped
    kept = from_pretrained(tmp_path / "model").classifier.weight
    torch.testing.assert_close(kept.detach(), average)
    assert not torch.equal(kept, states[-1][1])
    assert json.loads((tmp_path / "results.json").read_text())["weights"] == "averaged"


def test_the_spectrum_of_the_last_batch_is_in_the_summary(tmp_path, monkeypatch):
    recorded = []
    monkeypatch.setattr(loop, "spectrum_row", lambda *s: recorded.append(s) or spectrum_row(*s))
    train(small(tmp_path), colours())
    assert len(recorded) == 2  # once per epoch
    for (eigenvalues, s), row in zip(recorded, rows(tmp_path), strict=True):
        values = eigenvalues.double().numpy()
        middle = lambda x: np.sort(x)[(len(x) - 1) // 2]  # noqa: E731  (torch's median is the lower one)
        assert values.shape == (4, 3)
        assert float(row["lambda_1"]) == pytest.approx(middle(values[:, 0]), rel=1e-6)
        with np.errstate(divide="ignore"):
            condition = np.log10(values[:, 0] / values[:, 2])
        assert float(row["log10_condition"]) == pytest.approx(middle(condition), rel=1e-5)
        assert float(row["energy_last"]) == pytest.approx(middle(values[:, 2] / values.sum(1)), rel=1e-5)
        assert float(row["q_norm"]) == pytest.approx(middle(np.sqrt(values.sum(1))), rel=1e-6)
        assert float(row["s"]) == pytest.approx(middle(np.sqrt((values * np.exp(-2 * values)).sum(1))), rel=1e-6)
        assert s.shape == (4,)


def test_the_last_50_of_256_eigenvalues_and_a_dead_spectrum():
    values = torch.arange(256.0, 0, -1)[None]
    assert spectrum_row(values, None)["energy_last"] == pytest.approx(sum(range(1, 51)) / sum(range(1, 257)))
    dead = spectrum_row(torch.zeros(2, 4), torch.zeros(2))
    assert dead["lambda_1"] == dead["q_norm"] == dead["s"] == 0
    assert math.isnan(dead["log10_condition"])
    one_dead = spectrum_row(torch.tensor([[8.0, 2.0], [0.0, 0.0], [4.0, 1.0]]), None)
    assert (one_dead["lambda_1"], one_dead["energy_last"]) == (4.0, 0.2)
    assert one_dead["log10_condition"] == pytest.approx(math.log10(4))
    singular = spectrum_row(torch.tensor([[1.0, 0.5, 0.0, -1e-18]]).double(), None)
    assert singular["log10_condition"] == pytest.approx(-math.log10(4 * 2.220446e-16), rel=1e-6)


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_random_numbers_of_the_caller_do_not_change(tmp_path, dry_run):
    def draw():
        return torch.rand(1).item(), random.random(), np.random.random()

    def seed():
        torch.manual_seed(1), random.seed(2), np.random.seed(3)

    seed()
    expected = draw()
    seed()
    train(small(tmp_path, epochs=1, dry_run=dry_run), colours())
    assert draw() == expected


def test_a_head_without_spectrum_leaves_the_columns_empty(tmp_path):
    train(small(tmp_path, model=Model("test_resnet", head="gap"), epochs=1), colours())
    [row] = rows(tmp_path)
    assert row["lambda_1"] == row["s"] == row["lr_head"] == ""
    assert row["repaired_solves"] == "0"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path, monkeypatch, bad):
    calls = []

    def poisoned(scores, labels, **options):
        calls.append(1)
        return torch.nn.functional.cross_entropy(scores, labels, **options) * (bad if len(calls) == 8 else 1)

    monkeypatch.setattr("eigengrain.training.loss.cross_entropy", poisoned)
    with pytest.raises(Diverged) as error:
        train(small(tmp_path, save_every=1), colours())
    diverged = error.value
    assert (diverged.epoch, diverged.batch, diverged.batches) == (2, 3, 5)
    assert diverged.loss == pytest.approx(bad, nan_ok=True)
    assert diverged.checkpoint == tmp_path / "last.pt"
    assert str(diverged).startswith(f"the loss is {bad} in epoch 2 at batch 3 of 5: start again")
    state = read_checkpoint(tmp_path / "last.pt")
    assert (state["progress"]["epoch"], state["progress"]["batch"]) == (1, 2)
    assert all(t.isfinite().all() for t in state["model"].values())


def test_features_without_variance_stop_the_training(tmp_path, monkeypatch):
    """Covariances of zero have no gradient, although the loss is finite."""
    runs = []
    build = loop.build
    monkeypatch.setattr(loop, "build", lambda *a: runs.append(build(*a)) or runs[-1])

    def kill(epoch, batch, loss):
        if (epoch, batch) == (1, 2):
            runs[0].model.head.register_forward_pre_hook(lambda head, given: tuple(0 * features for features in given))

    with pytest.raises(Diverged) as error:
        train(small(tmp_path, epochs=3), colours(), kill)
    assert (error.value.epoch, error.value.batch, error.value.loss) == (2, 5, None)
    assert read_checkpoint(tmp_path / "last.pt")["progress"]["epoch"] == 1


def falling(monkeypatch, accuracies):
    """Let the evaluations return these accuracies in turn, (validation, test)."""
    answers = iter([value for pair in accuracies for value in pair if value is not None])

    def fake(*arguments, **options):
        [score] = evaluate(*arguments, **options)
        return [replace(score, top1=next(answers))]

    monkeypatch.setattr(loop, "evaluate", fake)


@pytest.mark.parametrize(
    ("select", "accuracies", "epoch", "top1"),
    [
        ("last", [(None, 9.0), (None, 5.0), (None, 6.0)], 3, 6.0),
        ("best-test", [(None, 5.0), (None, 9.0), (None, 6.0)], 2, 9.0),
        ("best-val", [(7.0, 1.0), (6.0, 2.0), (5.0, 3.0)], 1, 1.0),  # the test images do not count
        ("best-test", [(7.0, 1.0), (6.0, 2.0), (5.0, 0.0)], 2, 2.0),  # nor the validation images
    ],
)
def test_which_epoch_is_kept(tmp_path, monkeypatch, select, accuracies, epoch, top1):
    falling(monkeypatch, accuracies)
    val = 0 if accuracies[0][0] is None else 4
    weights = []
    data = replace(small(tmp_path).data, val_fraction=0.1 if val else 0.0)
    original = loop.copy_atomically
    monkeypatch.setattr(loop, "copy_atomically", lambda a, b: weights.append(read_checkpoint(a)) or original(a, b))
    result = train(small(tmp_path, select=select, data=data, epochs=3), colours(train=8, val=val))
    assert (result.select, result.epoch, result.scores["test_top1"], result.epochs_trained) == (select, epoch, top1, 3)
    record = json.loads((tmp_path / "results.json").read_text())
    assert (record["select"], record["epoch"], record["test_time_augmentation"]) == (select, epoch, "none")
    state = weights[-1] if select != "last" else read_checkpoint(tmp_path / "last.pt")
    assert state["progress"]["epoch"] == epoch
    kept = from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in state["model"].items())


def test_early_stop_after_two_epochs_without_improvement_also_after_resume(tmp_path, monkeypatch):
    falling(monkeypatch, [(None, a) for a in (3.0, 4.0, 4.0, 1.0, 9.0)])
    config = small(tmp_path, epochs=9, early_stop=2, select="best-test")
    assert train(config, colours(train=4)).epochs_trained == 4
    assert train(replace(config, resume=True), colours(train=4)).epochs_trained == 4


@pytest.mark.parametrize(("accuracies", "epochs", "best"), [((3.0, 2.0), 6, 3), ((3.0, 4.0, 4.0), 9, 6)])
def test_early_stop_waits_for_an_evaluation(tmp_path, monkeypatch, accuracies, epochs, best):
    """Epochs without an evaluation are not epochs without improvement."""
    falling(monkeypatch, [(None, a) for a in accuracies])
    config = small(tmp_path, epochs=20, early_stop=2, eval_every=3, select="best-test")
    result = train(config, colours(train=4))
    assert (result.epochs_trained, result.epoch) == (epochs, best)
    assert train(replace(config, resume=True), colours(train=4)) == result


def test_evaluation_every_other_epoch_and_the_last(tmp_path):
    train(small(tmp_path, epochs=3, eval_every=2), colours(train=4))
    assert [bool(row["test_top1"]) for row in rows(tmp_path)] == [False, True, True]


@pytest.mark.parametrize(
    ("opt", "options"), [("adamw", {"betas": [0.8, 0.9]}), ("lion", {}), ("nesterov", {}), ("sgd", {})]
)
def test_optimisers_of_timm(opt, options):
    model = create_model("test_resnet", head="mpncov", num_classes=3, reduce=3)
    optimiser = build_optimiser(model, Optimiser(opt, lr=0.1, head_lr_scale=2, classifier_lr_scale=3, options=options))
    assert learning_rates(optimiser) == pytest.approx({"lr_backbone": 0.1, "lr_head": 0.2, "lr_classifier": 0.3})
    nesterov = optimiser.param_groups[0].get("nesterov")
    assert nesterov == {"nesterov": True, "sgd": False}.get(opt, nesterov)
    if options:
        assert list(optimiser.param_groups[0]["betas"]) == [0.8, 0.9]


def test_unknown_optimisers_and_options_are_refused():
    model = create_model("test_resnet", head="gap", num_classes=3)
    with pytest.raises(UnknownName) as unknown:
        build_optimiser(model, Optimiser("adamv"))
    assert {"adam", "adamw"} & set(unknown.value.suggestions)
    for config, argument in (
        (Optimiser("sgd", options={"bets": 1}), "optimiser.options"),
        (Optimiser("adahessian"), "optimiser.opt"),
    ):
        with pytest.raises(ArgumentError) as error:
            build_optimiser(model, config)
        assert error.value.argument == argument


@pytest.mark.parametrize("kind", ["cosine", "tanh", "step", "poly", "drops", "constant"])
def test_schedules_by_update(kind):
    parameter = torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [parameter], "lr": 1.0, "name": "backbone"}]
    optimiser = torch.optim.SGD(groups)
    config = Schedule(kind, every=2, drops=[2] if kind == "drops" else [], factor=0.5, warmup_epochs=0.5)
    schedule = build_schedule(optimiser, config, epochs=4, updates_per_epoch=4)
    values = []
    for update in range(1, 17):
        values.append(optimiser.param_groups[0]["lr"])
        schedule.step_update(update)
    assert values[:2] == pytest.approx([0.0, 0.5], abs=1e-5)  # tanh rises to the value of its curve, slightly below 1
    later = np.array(values[2:])
    t = np.arange(2, 16)
    expected = {
        "cosine": (1 + np.cos(np.pi * t / 16)) / 2,
        "step": 0.5 ** (t // 8),
        "poly": (1 - t / 16) ** 0.5,
        "drops": np.where(t >= 8, 0.5, 1),
        "constant": np.ones(14),
    }.get(kind)
    if expected is not None:
        np.testing.assert_allclose(later, expected, rtol=0, atol=1e-12)
    assert (np.diff(later) <= 1e-12).all()
    with pytest.raises(ArgumentError) as error:
        build_schedule(optimiser, replace(config, warmup_epochs=5), 4, 4)
    assert (error.value.argument, error.value.value) == ("schedule.warmup_epochs", 5)


def test_plateau_drops_when_the_accuracy_does_not_improve(tmp_path, monkeypatch):
    falling(monkeypatch, [(None, 5.0)] * 6)
    schedule = Schedule("plateau", factor=0.1, patience=1)
    train(small(tmp_path, epochs=6, schedule=schedule, select="best-test"), colours(train=4))
    values = [float(row["lr_backbone"]) for row in rows(tmp_path)]
    assert values[0] == pytest.approx(0.02)
    assert values[-1] < values[0] / 9


def test_plateau_counts_evaluations_only(tmp_path, monkeypatch):
    falling(monkeypatch, [(None, 5.0)] * 4)
    schedule = Schedule("plateau", factor=0.1, patience=1)
    train(small(tmp_path, epochs=8, eval_every=2, schedule=schedule, select="best-test"), colours(train=4))
    # the third evaluation, after epoch 6, is the second without improvement
    values = [float(row["lr_backbone"]) for row in rows(tmp_path)]
    assert values == pytest.approx([0.02] * 6 + [0.002] * 2)


def test_the_warm_up_of_plateau_changes_at_every_update():
    optimiser = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0, "name": "backbone"}])
    config = Schedule("plateau", factor=0.5, patience=1, warmup_epochs=1.5, warmup_lr=0.1)
    schedule = build_schedule(optimiser, config, epochs=6, updates_per_epoch=4)
    values = []
    for update in range(1, 25):
        values.append(optimiser.param_groups[0]["lr"])
        schedule.step_update(update)
        if update % 4 == 0:
            schedule.step(update // 4, 7.0)
    # six updates of warm-up; accuracies count from epoch 2 on: the first is the best, and 3 and 4 do not improve
    assert values == pytest.approx([0.1 + 0.9 * t / 6 for t in range(6)] + [1.0] * 10 + [0.5] * 8)


def test_channels_last_and_bf16_train(tmp_path):
    result = train(small(tmp_path, amp="bf16", channels_last=True, epochs=1), colours())
    assert math.isfinite(result.scores["test_loss"])
    assert from_pretrained(tmp_path / "model").classifier.weight.dtype == torch.float32


@pytest.mark.parametrize("mixing", [{}, {"mixup": 0.5, "cutmix": 1.0}])
def test_the_cache_trains_as_the_files_do(tmp_path, mixing):
    for cache in ("none", "device"):
        train(small(tmp_path / cache, cache=cache, **mixing), colours())
    a, b = (from_pretrained(tmp_path / cache / "model").state_dict() for cache in ("none", "device"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4)


def test_missing_tensorboard_is_reported_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("eigengrain.training.setup.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError):
        train(small(tmp_path, log="tensorboard", dry_run=True), colours())


def test_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small(tmp_path, log="tensorboard"), colours())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("test_top1")] == [1, 2]


def test_a_training_that_fails_closes_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    before = threading.active_count()

    def fail(epoch, batch, loss):
        raise KeyError("a mistake of the caller")

    with pytest.raises(KeyError):
        train(small(tmp_path, log="tensorboard"), colours(), fail)
    assert threading.active_count() == before


def test_one_data_set_can_be_used_for_training_and_testing(tmp_path):
    losses = {"one": [], "two": []}
    images, others = colours().train, colours().train
    for name, test in (("one", images), ("two", others)):
        train(small(tmp_path / name, epochs=1), Sources(images, test), lambda e, b, loss: losses[name].append(loss))  # noqa: B023
    assert losses["one"] == losses["two"]
    assert images.transform is None  # the data set of the caller is unchanged


def test_broken_images_are_listed_before_training(tmp_path):
    files = []
    for number in range(6):
        file = tmp_path / f"{number}.png"
        Image.new("RGB", (SIZE, SIZE), (40 * number, 0, 0)).save(file)
        files.append(file)
    for number in (1, 4):
        files[number].write_bytes(files[number].read_bytes()[:60])
    images = ImageSet("files", "train", ["a", "b"], [0, 1] * 3, files)
    steps = []
    with pytest.raises(UnreadableImages) as error:
        train(small(tmp_path / "run", batch_size=2), Sources(images, colours().test), lambda *s: steps.append(s))
    assert steps == []
    assert [path for path, _ in error.value.problems] == [str(files[1]), str(files[4])]
    assert error.value.listing == tmp_path / "run/unreadable.txt"
    listed = error.value.listing.read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == [str(files[1]), str(files[4])]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_check_of_the_images(tmp_path, processes):
    files = [tmp_path / f"{number}.png" for number in range(5)]  # none of them exists
    sources = Sources(ImageSet("files", "train", ["a"], [0] * 5, files), colours().test)

    class Silent(Process):
        def gather(self, value):
            return [value]

    counts = []
    for rank in range(processes):
        out = tmp_path / f"run{rank}"
        kept, error = check_readable(sources, out, 0, Silent(torch.device("cpu"), rank, processes))
        counts.append(len(error.problems))
        assert len(kept.train) == 5 - len(error.problems)
        assert (out / "unreadable.txt").exists() == (rank == 0)  # one process writes
    assert sum(counts) == 5
    assert max(counts) - min(counts) <= 1


def test_a_broken_image_with_a_name_that_is_not_text(tmp_path):
    file = bytes(tmp_path) + b"/latin \xe9\n.png"
    with open(file, "wb"):
        pass
    sources = Sources(ImageSet("files", "train", ["a"], [0], [os.fsdecode(file)]), colours().test)
    with pytest.raises(UnreadableImages):
        train(small(tmp_path / "run", batch_size=2), sources)
    assert (tmp_path / "run/unreadable.txt").read_text() == f"{tmp_path}/latin \\udce9\\n.png\tthe file is empty\n"
    (tmp_path / "taken").touch()
    with pytest.raises(FileError):
        train(small(tmp_path / "taken"), sources)


@pytest.mark.parametrize("head", ["gap", "mpncov"])
def test_weights_that_are_not_finite_after_the_last_step_are_not_saved(tmp_path, head):
    """All losses are finite, and only the evaluation fails."""
    model = Model("test_resnet", head=head, reduce=None if head == "gap" else 3, last_stride=1)
    with pytest.raises(Diverged) as error:
        train(small(tmp_path, epochs=1, optimiser=Optimiser(lr=1e30), model=model), colours(train=4))
    assert (error.value.epoch, error.value.batch, error.value.checkpoint) == (1, 1, None)
    assert not (tmp_path / "model").exists()


def test_losses_and_repairs_are_summed_over_processes(monkeypatch):
    class OfTwo(Process):
        def sum(self, values):
            return values + torch.tensor([1.0, 3.0, 2.0, 5.0])  # values of the other process

    monkeypatch.setattr(telemetry, "solver_repairs", lambda reset: {"jitter": 1, "zeroed": 2})
    meter, process = Meter(), OfTwo(torch.device("cpu"), world_size=2)
    norms = [torch.tensor(1.0), torch.tensor(math.inf)]  # an update that the scaler of fp16 skipped
    hits = [torch.tensor(3), torch.tensor(4)]
    assert meter.add([torch.tensor(2.0), torch.tensor(4.0)], hits, norms, process) == [1.5, 3.5]
    assert (meter.loss, meter.batches, meter.gradient_norm, meter.updates, meter.repaired) == (1.5 + 3.5, 2, 1.0, 1, 8)
    assert meter.hits == 9


def test_repairs_of_an_evaluation_are_not_counted(tmp_path, monkeypatch):
    repairs = {"eigh": 0}

    def counted(reset=False):
        before = dict(repairs)
        repairs["eigh"] *= not reset
        return before

    def evaluated(*arguments, **options):
        repairs["eigh"] += 100
        return evaluate(*arguments, **options)

    monkeypatch.setattr(loop, "solver_repairs", counted)
    monkeypatch.setattr(telemetry, "solver_repairs", counted)
    monkeypatch.setattr(loop, "evaluate", evaluated)

    def step(*_):
        repairs["eigh"] += 1

    repairs["eigh"] = 1000  # from earlier work of this process
    train(small(tmp_path, epochs=2), colours(), step)
    assert [row["repaired_solves"] for row in rows(tmp_path)] == ["5", "5"]


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_batch_that_does_not_fit_into_memory(tmp_path, monkeypatch, dry_run):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr("eigengrain.models.mixed_precision.MixedPrecision.features", full)
    with pytest.raises(ArgumentError) as error:
        train(small(tmp_path, dry_run=dry_run), colours())
    assert (error.value.argument, error.value.value) == ("batch_size", 4)


def test_names_are_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    for config in (
        small(out, model=Model("test_resnett")),
        small(out, model=Model("test_resnet", head="mpncv")),
        small(out, optimiser=Optimiser("sdg")),
        small(out, device="cuda:7"),
        small(out, data=replace(small(out).data, val_fraction=0.5)),
    ):
        with pytest.raises(ValueError):
            train(config, colours())
    with pytest.raises(UnknownName) as error:
        train(small(out, data=Data("clours")))
    assert error.value.name == "clours"
    assert not out.exists()
