"""What is printed during a training and by a dry run: the time left for all epochs, from batches after the first."""

import json
import re
import types

import pytest
from PIL import Image
from rich.console import Console

from eigengrain import output, progress
from eigengrain.data import ImageSet
from eigengrain.errors import UnreadableImages
from eigengrain.progress import TrainingProgress
from eigengrain.training import plan, train
from eigengrain.training.sources import Sources
from training.small_run import SIZE, Colours, colours, small


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def steps(shown, clock, count, seconds, *facts):
    for _ in range(count):
        clock.now += seconds
        shown.advance(*facts)


def test_the_time_left_counts_all_epochs_and_their_evaluations(clock):
    with TrainingProgress(epochs=3, batches=5, images=8) as shown:
        shown.start_epoch(0, 0)
        steps(shown, clock, 1, 100)
        assert shown.left() == []  # the first batch also starts the workers
        steps(shown, clock, 2, 10)
        assert shown.left() == ["2 min 0 s left"]  # twelve batches
        steps(shown, clock, 2, 10)
        clock.now += 30
        shown.end_epoch()
        assert shown.left() == ["2 min 40 s left"]  # ten batches and two evaluations
        shown.start_epoch(1, 0)
        steps(shown, clock, 5, 10)
        shown.end_epoch()
        shown.start_epoch(2, 0)
        steps(shown, clock, 5, 10)
        shown.end_epoch()
        assert shown.left() == []


def test_a_resumed_run_counts_what_is_left(clock):
    with TrainingProgress(epochs=2, batches=10, images=4) as shown:
        shown.start_epoch(1, 6)
        steps(shown, clock, 2, 5)
        assert shown.left() == ["10.0 s left"]


@pytest.mark.parametrize("show", [True, False])
def test_one_line_per_minute_without_a_terminal(clock, capsys, show):
    with TrainingProgress(epochs=2, batches=10, images=4, show=show) as shown:
        shown.start_epoch(0, 0)
        steps(shown, clock, 10, 25, "loss 1.5000")
        shown.end_epoch()
    lines = capsys.readouterr().err.splitlines()
    assert lines == show * [
        "epoch 1/2   batch 3/10   loss 1.5000   0.2 images/s   7 min 5 s left",
        "epoch 1/2   batch 6/10   loss 1.5000   0.2 images/s   5 min 50 s left",
        "epoch 1/2   batch 9/10   loss 1.5000   0.2 images/s   4 min 35 s left",
    ]


def test_a_line_of_an_epoch_postpones_the_next(clock, capsys):
    with TrainingProgress(epochs=2, batches=10, images=4) as shown:
        shown.start_epoch(0, 0)
        steps(shown, clock, 2, 25)
        shown.print("epoch 1/2")
        steps(shown, clock, 2, 25)
    assert capsys.readouterr().err == "epoch 1/2\n"


@pytest.mark.parametrize(("width", "state"), [(60, ""), (80, "   loss 1.5000"), (120, "   loss 1.5000   0.0 images/s")])
def test_the_bar_on_a_terminal_shows_the_time_left_first(clock, monkeypatch, capsys, width, state):
    monkeypatch.setattr(output, "stderr_console", lambda: Console(stderr=True, force_terminal=True, width=width))
    with TrainingProgress(epochs=2, batches=10, images=4) as shown:
        shown.start_epoch(0, 0)
        steps(shown, clock, 3, 90, "loss 1.5000")
        shown._bar.refresh()
    text = capsys.readouterr().err
    last = re.sub(r"\x1b\[[\d;]*m", "", text).rpartition("epoch 1/2 ")[2].splitlines()[0]
    assert last.split("3/10 ")[1].strip() == f"25 min 30 s left{state}"


def test_the_lines_of_a_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    train(small(tmp_path), colours())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12  # ten batches and two epochs
    number = r"\d+\.\d+"
    accuracies = rf"train {number} %   test {number} %"
    speed = rf"{number} images/s"
    assert re.fullmatch(rf"epoch 1/2   batch 5/5   loss {number}   train {number} %   {speed}   {number} s left", lines[4])
    assert re.fullmatch(rf"epoch 1/2   loss {number}   {accuracies}   {speed}   .*   {number} s left", lines[5])
    assert re.match(rf"epoch 2/2   batch 2/5   loss {number}   {accuracies}   {speed}   {number} s left", lines[7])
    assert not lines[-1].endswith("left")


class Slow(Colours):
    """Each image takes a second, and the very first 200 seconds."""

    def __init__(self, split, count, clock):
        super().__init__(split, count)
        self.clock = clock

    def image(self, index):
        self.clock.now += 200 if self.clock.now == 0 else 1
        return super().image(index)


@pytest.mark.parametrize(("eval_every", "evaluations"), [(1, 3), (2, 2)])
def test_the_estimate_of_a_dry_run_is_from_warm_batches(tmp_path, monkeypatch, capsys, eval_every, evaluations):
    clock = Clock()
    monkeypatch.setattr(plan, "time", types.SimpleNamespace(perf_counter=clock.perf_counter))
    sources = Sources(Slow("train", 22, clock), Slow("test", 8, clock))
    with output.mode(json=True):
        train(small(tmp_path / "run", epochs=3, dry_run=True, eval_every=eval_every), sources)
    estimate = json.loads(capsys.readouterr().out)["estimate"]
    assert estimate["seconds_per_batch"] == 4
    assert estimate["seconds_per_evaluation"] == 8
    assert estimate["seconds"] == 3 * 5 * 4 + evaluations * 8
    assert estimate["memory_bytes"] > 1 << 20
    assert not (tmp_path / "run").exists()


def test_a_dry_run_lists_unreadable_images_and_goes_on(tmp_path, capsys):
    files = [tmp_path / f"{number}.png" for number in range(8)]
    for number, file in enumerate(files):
        Image.new("RGB", (SIZE, SIZE), (30 * number, 0, 0)).save(file)
    for number in (0, 5):
        files[number].write_bytes(b"no image")
    images, test = (ImageSet("files", "train", ["a", "b"], [0, 1] * (len(part) // 2), part) for part in (files, files[1:5]))
    with output.mode(json=True), pytest.raises(UnreadableImages) as error:
        train(small(tmp_path / "run", batch_size=2, dry_run=True), Sources(images, test))
    assert [path for path, _ in error.value.problems] == [str(files[0]), str(files[5])]
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["data"].startswith("files: 6 training, ")
    assert str(files[5]) in plan["unreadable"]
    assert not (tmp_path / "run/last.pt").exists()


def test_a_dry_run_trains_with_the_options_of_the_run(tmp_path, capsys):
    options = {"mixup": 0.2, "cutmix": 1.0, "accumulate": 2, "ema": 0.9, "dry_run": True}
    with output.mode(json=True):
        assert train(small(tmp_path / "run", **options), colours(train=4)) is None  # an epoch of one batch
    assert json.loads(capsys.readouterr().out)["estimate"]["seconds"] > 0
