"""A run that was interrupted anywhere ends in the same bits as one that was not."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eigengrain.models import from_pretrained
from eigengrain.training import setup as build
from eigengrain.training import train
from eigengrain.training.checkpoint import CheckpointError, read_checkpoint
from eigengrain.training.signals import Interrupted
from eigengrain.training.telemetry import COLUMNS, Summary, read_summary
from training.small_run import colours, small

EMA = {"ema": 0.9, "save_every": 2, "select": "best-test"}


def stop_at(epoch, batch, number=signal.SIGTERM):
    """Raise a signal at one batch, as a user or a cluster would."""

    def on_step(e, b, loss):
        if (e, b) == (epoch, batch):
            signal.raise_signal(number)

    return on_step


def flat(value, name=""):
    """Everything in a checkpoint by path."""
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_saves_and_the_rest_is_the_same_to_the_bit(uninterrupted, tmp_path, number, code, workers):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"in epoch 1 after batch 3 of 5; go on with --resume") as stop:
        train(small(tmp_path, workers=workers, **EMA), colours(), stop_at(0, 2, number))
    assert stop.value.exit_code == code
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "model").exists()
    seen = []
    train(small(tmp_path, workers=workers, resume=True, **EMA), colours(), lambda e, b, _: seen.append((e, b)))
    assert seen == [(0, 3), (0, 4), *((1, b) for b in range(5))]
    assert_same_run(uninterrupted, tmp_path)


class ActedAtOnce(Exception):
    pass


@pytest.fixture
def acts_at_once():
    """What SIGINT and SIGTERM do where nobody takes note of them."""

    def act(number, frame):
        raise ActedAtOnce

    before = {number: signal.signal(number, act) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(*numbers):
    """Signals one after the other in the first step."""

    def step(epoch, batch, loss):
        for number in numbers:
            signal.raise_signal(number)

    return step


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_sigterm_does_not_cost_the_checkpoint(tmp_path, acts_at_once, first):
    with pytest.raises(Interrupted):
        train(small(tmp_path), colours(), raising(first, signal.SIGTERM))
    assert read_checkpoint(tmp_path / "last.pt")["progress"]["batch"] == 1
    with pytest.raises(ActedAtOnce):  # as before the training
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_ctrl_c_does_not_wait(tmp_path, acts_at_once, first):
    with pytest.raises(ActedAtOnce):
        train(small(tmp_path), colours(), raising(first, signal.SIGINT))
    assert not (tmp_path / "last.pt").exists()


def test_a_signal_at_the_last_batch_and_between_epochs(uninterrupted, tmp_path):
    with pytest.raises(Interrupted, match="after batch 5 of 5"):
        train(small(tmp_path, **EMA), colours(), stop_at(0, 4))
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_a_signal_during_the_evaluation(uninterrupted, tmp_path, monkeypatch):
    from eigengrain.training import loop

    def interrupted(model, batches, *arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(model, batches, *arguments, **options)

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", interrupted)
    with pytest.raises(Interrupted, match="after batch 5 of 5"):
        train(small(tmp_path, **EMA), colours())
    monkeypatch.undo()
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_kill_9_in_the_middle_of_an_epoch(uninterrupted, tmp_path):
    tests = str(Path(__file__).parents[1])
    script = [sys.executable, "-m", "training.small_run", str(tmp_path), json.dumps(EMA), "0,3"]
    done = subprocess.run(script, env={**os.environ, "PYTHONPATH": tests}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    where = read_checkpoint(tmp_path / "last.pt")["progress"]
    assert (where["epoch"], where["batch"]) == (0, 2)
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_rows_of_epochs_that_are_trained_again_are_not_doubled(uninterrupted, tmp_path):
    with pytest.raises(Interrupted):
        train(small(tmp_path, **EMA), colours(), stop_at(0, 2))
    with (tmp_path / "summary.csv").open("a") as file:  # a row whose checkpoint was not written any more, and half a row
        file.write("1,0.5\n2,")
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_a_row_that_was_cut_in_its_first_number_is_no_epoch(tmp_path):
    path = tmp_path / "summary.csv"
    Summary(path)
    for epoch in range(1, 13):
        Summary(path, epoch - 1).append({"epoch": epoch, "train_loss": 0.5})
    text = path.read_text()
    path.write_text(text[: text.index("\n12,") + 2])  # the 1 of 12
    Summary(path, 11)
    assert [row["epoch"] for row in read_summary(path)] == list(range(1, 12))


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    with pytest.raises(Interrupted):
        train(small(tmp_path), colours(), stop_at(0, 2))
    half = tmp_path / ".last.pt.123.tmp"
    half.write_bytes((tmp_path / "last.pt").read_bytes()[:1000])
    train(small(tmp_path, resume=True), colours())
    assert not half.exists()
    assert not list(tmp_path.glob(".*"))


def test_what_others_have_in_the_folder_stays(tmp_path):
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


def test_kill_9_between_last_and_best(uninterrupted, tmp_path, monkeypatch):
    from eigengrain.training import loop

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop, "keep_copy", killed)
        with pytest.raises(Killed):
            train(small(tmp_path, **EMA), colours())
    assert not (tmp_path / "best.pt").exists()
    train(small(tmp_path, resume=True, **EMA), colours())
    assert_same_run(uninterrupted, tmp_path)


def test_resume_without_a_checkpoint_starts_anew(tmp_path):
    assert train(small(tmp_path, epochs=1, resume=True), colours()).epochs_trained == 1


def test_a_folder_with_a_run_is_not_overwritten(uninterrupted):
    with pytest.raises(ValueError, match="holds a run already: go on with --resume, or choose another"):
        train(small(uninterrupted, **EMA), colours())


def test_a_folder_with_a_run_is_refused_before_the_images_are_opened(uninterrupted, monkeypatch):
    monkeypatch.setattr(build, "open_sources", lambda *_: pytest.fail("the images were opened"))
    with pytest.raises(ValueError, match="holds a run already"):
        train(small(uninterrupted, **EMA))


def test_other_options_or_classes_are_refused(uninterrupted):
    with pytest.raises(ValueError, match=r"started with other options \(batch_size, seed\)"):
        train(small(uninterrupted, resume=True, batch_size=2, seed=3, **EMA), colours())
    sources = colours()
    sources.train.classes = ["a", "b", "c"]
    with pytest.raises(ValueError, match="other classes"):
        train(small(uninterrupted, resume=True, **EMA), sources)


def test_a_checkpoint_cut_in_half_is_one_clear_line(tmp_path):
    train(small(tmp_path, epochs=1), colours())
    whole = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").write_bytes(whole[: len(whole) // 2])
    said = r"last\.pt is damaged or only a part of a checkpoint.*copy .*best\.pt over it"
    with pytest.raises(CheckpointError, match=said) as error:
        train(small(tmp_path, epochs=1, resume=True), colours())
    assert "\n" not in str(error.value)
    (tmp_path / "last.pt").write_bytes((tmp_path / "best.pt").read_bytes())  # what the line advises
    assert train(small(tmp_path, epochs=1, resume=True), colours()).epochs_trained == 1
