"""An interrupted and resumed run gives exactly the results of an uninterrupted one."""

import csv
import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml

from eigengrain.errors import ArgumentError, CheckpointError, Interrupted, UnfinishedWarning
from eigengrain.models import from_pretrained
from eigengrain.training import loop, open_run, setup, train
from eigengrain.training.checkpoint import read_checkpoint
from eigengrain.training.config import Model, Optimiser, Schedule, from_mapping
from eigengrain.training.distributed import preserve_generators
from eigengrain.training.telemetry import COLUMNS, Summary, read_summary
from training.small_run import colours, small

EMA = {"ema": 0.9, "save_every": 2, "select": "best-test"}


def stop_at(epoch, batch, number=signal.SIGTERM):
    """Raise a signal at one batch, as a user or a cluster does."""

    def on_step(e, b, loss):
        if (e, b) == (epoch, batch):
            signal.raise_signal(number)

    return on_step


def flat(value, name=""):
    """All values of a checkpoint by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{name}.{i}").items()}
    return {name: value}


def assert_same_run(one: Path, other: Path):
    a, b = (flat(read_checkpoint(folder / "last.pt")) for folder in (one, other))
    free = (".config.out", ".config.resume", ".config.workers", ".config.save_every")
    a, b = ({k: v for k, v in s.items() if not k.startswith(free)} for s in (a, b))
    assert a.keys() == b.keys()
    assert any(k.startswith(".optimiser.state") for k in a)
    for name, value in a.items():
        same = torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        assert same, name
    assert (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()
    rows = [list(csv.DictReader((folder / "summary.csv").open())) for folder in (one, other)]
    for before, after in zip(*rows, strict=True):
        timed = {"images_per_second"}
        assert {c: before[c] for c in COLUMNS if c not in timed} == {c: after[c] for c in COLUMNS if c not in timed}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole")
    train(small(out, **EMA), colours())
    return out


@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 2)])
def test_a_signal_saves_and_the_resumed_run_is_identical(uninterrupted, tmp_path, number, code, workers):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as stop:
        train(small(tmp_path, workers=workers, **EMA), colours(), stop_at(0, 2, number))
    assert (stop.value.signal, stop.value.exit_code) == (number, code)
    assert stop.value.position == "in epoch 1 after batch 3 of 5"
    del stop  # its traceback refers to the loader, whose processes would wait for the garbage collector
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "model").exists()
    seen = []
    train(small(tmp_path, workers=workers, resume=True, **EMA), colours(), lambda e, b, _: seen.append((e, b)))
    assert seen == [(0, 3), (0, 4), *((1, b) for b in range(5))]
    assert_same_run(uninterrupted, tmp_path)


class Stopped(Exception):
    pass


@pytest.fixture
def stopping_handlers():
    """Handlers of SIGINT and SIGTERM outside of a training: they stop at once."""

    def act(number, frame):
        raise Stopped

    before = {number: signal.signal(number, act) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(*numbers):
    """Raise signals one after the other in the first step."""

    def step(epoch, batch, loss):
        for number in numbers:
            signal.raise_signal(number)

    return step


def test_channels_dropped_by_the_head_continue_too(tmp_path, monkeypatch):
    probability = torch.tensor(0.4)
    monkeypatch.setattr("eigengrain.heads.drop_covariance.drop_probability", lambda *_: probability)
    changes = {"model": Model("test_resnet", head="dropcov", reduce=8, last_stride=1), "optimiser": Optimiser(lr=1e-3)}
    losses = []
    train(small(tmp_path / "whole", **changes), colours(), lambda e, b, loss: losses.append(float(loss)))
    with pytest.raises(Interrupted):
        train(small(tmp_path / "part", **changes), colours(), stop_at(0, 2))
    train(small(tmp_path / "part", resume=True, **changes), colours(), lambda e, b, loss: losses.append(float(loss)))
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    assert losses[3:10] == losses[10:]
    probability.zero_()
    train(small(tmp_path / "none", **changes), colours(), lambda e, b, loss: losses.append(float(loss)))
    assert losses[17] != losses[0]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_sigterm_does_not_prevent_the_checkpoint(tmp_path, stopping_handlers, first):
    with pytest.raises(Interrupted):
        train(small(tmp_path), colours(), raising(first, signal.SIGTERM))
    assert read_checkpoint(tmp_path / "last.pt")["progress"]["batch"] == 1
    with pytest.raises(Stopped):  # as before the training
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_ctrl_c_stops_at_once(tmp_path, stopping_handlers, first):
    with pytest.raises(Stopped):
        train(small(tmp_path), colours(), raising(first, signal.SIGINT))
    assert not (tmp_path / "last.pt").exists()


def test_a_signal_at_the_last_batch_and_between_epochs(uninterrupted, tmp_path):
    with pytest.raises(Interrupted):
        train(small(tmp_path, **EMA), colours(), stop_at(0, 4))
    assert read_checkpoint(tmp_path / "last.pt")["progress"]["batch"] == 5
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_a_signal_during_the_evaluation(uninterrupted, tmp_path, monkeypatch):
    def interrupted(model, batches, *arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(model, batches, *arguments, **options)

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", interrupted)
    with pytest.raises(Interrupted):
        train(small(tmp_path, **EMA), colours())
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "last.pt")["progress"]["batch"] == 5
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_a_signal_is_noticed_soon_whatever_the_number_of_accumulated_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "check_interval", lambda device: 4)  # as on an accelerator
    with pytest.raises(Interrupted):
        train(small(tmp_path, accumulate=3), colours(train=56), stop_at(0, 0))
    assert read_checkpoint(tmp_path / "last.pt")["progress"]["batch"] == 6  # the end of the first group after 4 batches


def test_the_generator_of_mps_is_a_part_of_the_state(monkeypatch):
    states = [torch.tensor([3]), torch.tensor([5])]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    with preserve_generators(torch.device("mps")):
        states.append(torch.tensor([7]))
    assert [int(state) for state in states] == [3, 5, 7, 5]


def test_kill_9_in_the_middle_of_an_epoch(uninterrupted, tmp_path):
    child = os.fork()
    if child == 0:
        try:
            train(small(tmp_path, **EMA), colours(), stop_at(0, 3, signal.SIGKILL))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    progress = read_checkpoint(tmp_path / "last.pt")["progress"]
    assert (progress["epoch"], progress["batch"]) == (0, 2)
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_epochs_that_are_trained_again_have_one_row(uninterrupted, tmp_path):
    with pytest.raises(Interrupted):
        train(small(tmp_path, **EMA), colours(), stop_at(0, 2))
    with (tmp_path / "summary.csv").open("a") as file:  # a row whose checkpoint was not written, and an incomplete row
        file.write("1,0.5\n2,")
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_a_row_that_is_cut_in_its_first_number_is_ignored(tmp_path):
    path = tmp_path / "summary.csv"
    Summary(path)
    for epoch in range(1, 13):
        Summary(path, epoch - 1).append({"epoch": epoch, "train_loss": 0.5})
    text = path.read_text()
    path.write_text(text[: text.index("\n12,") + 2])  # the 1 of 12
    Summary(path, 11)
    assert [row["epoch"] for row in read_summary(path)] == list(range(1, 12))


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    with pytest.raises(Interrupted):
        train(small(tmp_path), colours(), stop_at(0, 2))
    temporary = tmp_path / ".last.pt.123.tmp"
    temporary.write_bytes((tmp_path / "last.pt").read_bytes()[:1000])
    train(small(tmp_path, resume=True), colours())
    assert not temporary.exists()
    assert not list(tmp_path.glob(".*"))


def test_files_of_others_in_the_folder_stay(tmp_path):
    others = [tmp_path / name for name in (".mine.tmp", "model/code.py", "model/evaluation.csv")]
    (tmp_path / "model").mkdir()
    for file in others:
        file.write_text("mine")
    for resume in (False, True):
        train(small(tmp_path, epochs=1, resume=resume), colours())
        assert [file.read_text() for file in others] == ["mine"] * 3
        assert from_pretrained(tmp_path / "model").num_classes == 3
    assert [file.name for file in tmp_path.glob(".*")] == [".mine.tmp"]


def test_resume_of_a_finished_run_changes_nothing(uninterrupted):
    before = (uninterrupted / "last.pt").read_bytes()
    result = train(small(uninterrupted, resume=True, **EMA), colours(), stop_at(0, 0))
    assert result.epochs_trained == 2
    assert (uninterrupted / "last.pt").read_bytes() == before


@pytest.mark.parametrize("schedule", [Schedule("drops", drops=[1, 3], factor=0.5), Schedule("step", every=2)])
def test_more_epochs_for_a_finished_run_give_a_longer_run(tmp_path, schedule, capsys):
    changes = {**EMA, "schedule": schedule}
    longer = train(small(tmp_path / "whole", epochs=4, **changes), colours())
    train(small(tmp_path / "part", epochs=2, **changes), colours())
    with pytest.raises(Interrupted):
        train(small(tmp_path / "part", epochs=4, resume=True, **changes), colours(), stop_at(2, 1))
    assert not (tmp_path / "part/results.json").exists()
    with pytest.warns(UnfinishedWarning):  # not the model of two epochs
        open_run(tmp_path / "part")
    result = train(small(tmp_path / "part", epochs=4, resume=True, **changes), colours())
    assert (result.scores, result.epoch) == (longer.scores, longer.epoch)
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    assert from_mapping(yaml.safe_load((tmp_path / "part/args.yaml").read_text())).epochs == 4
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("4 instead of 2 epochs: ")]) == 1


@pytest.mark.parametrize("trained", [1, 2])
def test_the_rates_of_a_changed_number_of_epochs_are_those_of_the_new_length(tmp_path, trained):
    schedule = Schedule("cosine", warmup_epochs=0.4)
    if trained == 2:
        train(small(tmp_path, epochs=2, schedule=schedule), colours())
    else:
        with pytest.raises(Interrupted):
            train(small(tmp_path, epochs=2, schedule=schedule), colours(), stop_at(1, 1))
    seen = []
    build = loop.build

    def spying(*arguments):
        run = build(*arguments)
        run.net.register_forward_pre_hook(lambda *_: run.net.training and seen.append(run.optimiser.param_groups[0]["lr"]))
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", spying)
        train(small(tmp_path, epochs=4, schedule=schedule, resume=True), colours())
    first = 10 if trained == 2 else 7
    expected = [0.02 * (1 + math.cos(math.pi * update / 20)) / 2 for update in range(first, 20)]
    assert seen == pytest.approx(expected, abs=1e-9)


def test_fewer_epochs_end_a_run_but_not_before_what_is_trained_and_evaluated(tmp_path):
    changes = {"eval_every": 2, "select": "best-test"}
    with pytest.raises(Interrupted):
        train(small(tmp_path, epochs=9, **changes), colours(), stop_at(2, 4))
    train(small(tmp_path, epochs=3, resume=True, **changes), colours())
    assert json.loads((tmp_path / "results.json").read_text())["epochs_trained"] == 3
    with pytest.raises(Interrupted):
        train(small(tmp_path, epochs=9, resume=True, **changes), colours(), stop_at(4, 4))
    for epochs in (1, 4):
        with pytest.raises(ArgumentError) as error:
            train(small(tmp_path, epochs=epochs, resume=True, **changes), colours())
        assert (error.value.argument, error.value.value) == ("epochs", epochs)
    assert train(small(tmp_path, epochs=5, resume=True, **changes), colours()).scores


def test_kill_9_between_last_and_best(uninterrupted, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop, "copy_atomically", killed)
        with pytest.raises(Killed):
            train(small(tmp_path, **EMA), colours())
    assert not (tmp_path / "best.pt").exists()
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_a_folder_with_a_run_is_refused_before_the_images_are_opened(uninterrupted, monkeypatch):
    monkeypatch.setattr(setup, "open_sources", lambda *_: pytest.fail("the images were opened"))
    with pytest.raises(ArgumentError) as error:
        train(small(uninterrupted, **EMA))
    assert (error.value.argument, error.value.value) == ("out", str(uninterrupted))


def test_other_options_or_classes_are_refused(uninterrupted):
    with pytest.raises(ArgumentError) as error:
        train(small(uninterrupted, resume=True, batch_size=2, seed=3, **EMA), colours())
    assert error.value.argument == "out"
    assert re.findall(r"{(\w+)}", error.value.problem) == ["batch_size", "seed"]  # references to other arguments
    sources = colours()
    sources.train.classes = ["a", "b", "c"]
    with pytest.raises(ArgumentError) as error:
        train(small(uninterrupted, resume=True, **EMA), sources)
    assert error.value.argument == "out"


def test_a_damaged_checkpoint_can_be_replaced_by_the_best_one(tmp_path):
    assert train(small(tmp_path, epochs=1, resume=True), colours()).epochs_trained == 1  # without a checkpoint it starts
    whole = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError) as error:
        train(small(tmp_path, epochs=1, resume=True), colours())
    assert error.value.path == tmp_path / "last.pt"
    (tmp_path / "last.pt").write_bytes((tmp_path / "best.pt").read_bytes())  # as the message suggests
    assert train(small(tmp_path, epochs=1, resume=True), colours()).epochs_trained == 1
