"""The output of commands: tables and sentences, bare lines, or JSON; and their exit codes."""

import contextlib
import csv
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain import output
from eigengrain.cli import main as cli
from eigengrain.models import create_model, save_pretrained
from eigengrain.progress import progress_bar, track
from eigengrain.training import loop

SIDE = 32


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of noise, in the layout of a user's own images."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for part, many in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for number in range(many):
                pixels = generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def small(photos, out):
    data = f"--data.name folder --data.root {photos} --data.transforms.kind none --data.transforms.img_size {SIDE}"
    model = "--model.backbone test_resnet --model.head mpncov --model.reduce 4 --model.last_stride 1"
    return f"{data} {model} --epochs 1 --batch_size 4 --workers 0 --device cpu --out {out}".split()


@pytest.fixture(scope="module")
def training(photos, tmp_path_factory):
    """The folder of a short training, and its stdout and stderr."""
    out, stdout, stderr = tmp_path_factory.mktemp("runs") / "mine", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        assert cli.main(["train", "--json", *small(photos, out)]) == 0
    return out, stdout.getvalue(), stderr.getvalue()


def in_process(*words, code=0, **options):
    """stdout and stderr of a command in its own process."""
    command = [sys.executable, "-m", "eigengrain", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def run(capsys, *words, code=0):
    """stdout and stderr of a command in this process."""
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == code
    return capsys.readouterr()


# the modes


def test_with_json_only_the_document_reaches_stdout(capsys):
    with output.mode(json=True):
        print("a library prints")
        output.console().print("a table")
        output.stderr_console().print("half way")
        output.result({"a": [1.5, float("nan"), Path("x")], "b": (np.float64(2), True)})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": [1.5, None, "x"], "b": [2.0, True]}
    assert err == "a library prints\nhalf way\n"


def test_quiet_leaves_the_result(capsys):
    with output.mode(quiet=True), warnings.catch_warnings(record=True) as caught:
        output.console().print("a table")
        output.stderr_console().print("half way")
        warnings.simplefilter("always")
        output.result({"a": 1}, ["one", Path("two")])
    assert capsys.readouterr() == ("one\ntwo\n", "")
    assert caught == []


def test_a_warning_of_the_package_is_one_line(capsys, monkeypatch):
    ours, theirs, usual = str(Path(output.__file__)), "/elsewhere/module.py", []
    monkeypatch.setattr(warnings, "showwarning", lambda *arguments: usual.append(arguments[2:4]))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with output.mode():
            warnings.warn_explicit("few positions", UserWarning, ours, 1)
            warnings.warn_explicit("from elsewhere", UserWarning, theirs, 7)
        assert capsys.readouterr().err == "eigengrain: note: few positions\n"
        assert usual == [(theirs, 7)]
        with output.mode(quiet=True):
            warnings.warn_explicit("few positions", UserWarning, ours, 2)
        warnings.warn_explicit("after the command", UserWarning, ours, 3)
    assert capsys.readouterr().err == ""
    assert usual == [(theirs, 7), (ours, 3)]


def test_bars_are_on_stderr_of_a_terminal_and_not_in_quiet(monkeypatch, capsys):
    assert list(track("ab", 2, "letters")) == ["a", "b"]
    assert capsys.readouterr() == ("", "")  # stderr is not a terminal here
    assert progress_bar().disable
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    bar = progress_bar()
    assert not bar.disable
    assert bar.console.stderr
    with output.mode(json=True):
        assert not progress_bar().disable
    with output.mode(quiet=True):
        assert progress_bar().disable
    assert progress_bar(show=False).disable


def test_without_a_mode_there_is_no_document(capsys):
    output.console().print("a table")
    output.stderr_console().print("half way")
    output.result({"a": 1}, ["one"])
    assert capsys.readouterr() == ("a table\n", "half way\n")


def test_the_mode_ends_with_the_command(capsys):
    def fail():
        with output.mode(quiet=True, json=True):
            assert output.current().quiet
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert output.current() == output.Mode()
    print("visible")
    assert capsys.readouterr().out == "visible\n"


def test_a_value_that_json_cannot_represent_is_a_bug():
    with pytest.raises(TypeError):
        output.plain({"a": object()})


@pytest.mark.parametrize(("words", "code"), [("datasets -q", 0), ("datasets --json", 0), ("datasts", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_not_an_error(words, code, closed):
    line = f"exec {shlex.quote(sys.executable)} -m eigengrain {words} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("\n") == (closed == ">&-" and code == 2)
    assert bool(done.stdout) == (closed == "2>&-" and code == 0)  # an error does not appear on the other stream


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_stdout_cannot_encode(encoding):
    options = {"env": {**os.environ, "PYTHONIOENCODING": encoding}, "encoding": encoding}
    assert "image_00001.jpg \\u2026" in in_process("datasets", "list", "flowers", **options)[0]
    [flowers] = json.loads(in_process("datasets", "list", "flowers", "--json", **options)[0])
    assert flowers["layout"][0][0] == "jpg/image_00001.jpg …"


def test_the_error_handler_of_stdout_is_restored(capsys):
    before = sys.stdout.errors
    run(capsys, "datasets")
    assert sys.stdout.errors == before


def test_only_one_of_several_processes_prints(capsys, monkeypatch):
    result = loop.Result("last", 1, {"test_top1": 50.0}, 1, "runs/x/model")
    monkeypatch.setattr(loop, "train", lambda config: result)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        for mode in ("--json", "--quiet"):
            assert bool(run(capsys, "train", mode).out) == printed


# every command


def test_train(training, photos, tmp_path, capsys):
    out, stdout, stderr = training
    document = json.loads(stdout)
    assert document["model"] == str(out / "model")
    assert document["scores"]["test_top1"] >= 0
    assert stderr
    assert run(capsys, "train", *small(photos, tmp_path / "quiet"), "-q") == (f"{tmp_path}/quiet/model\n", "")
    plan = json.loads(run(capsys, "train", *small(photos, tmp_path / "dry"), "--dry_run", "--json").out)["plan"]
    assert {"data", "model"} <= set(plan)


@pytest.mark.parametrize(("part", "option"), [("", []), ("model", ["--checkpoint"])])
def test_every_command_opens_a_model_in_the_same_ways(training, photos, tmp_path, capsys, part, option, monkeypatch):
    """With and without the option, the folder of the training or its model."""
    monkeypatch.chdir(tmp_path)
    folder, image = training[0] / part, photos / "test/cat/0.png"
    scores = json.loads(run(capsys, "evaluate", *option, folder, "--workers", 0, "--json").out)["scores"]
    assert [score["samples"] for score in scores] == [4]
    answer = json.loads(run(capsys, "predict", image, "--checkpoint", folder, "--json").out)
    assert answer["predictions"][0]["path"] == str(image)
    assert {each["class"] for each in answer["predictions"][0]["classes"]} == {"cat", "dog"}
    few = ("--count", 1, "--measure_count", 2, "--rules", "vanilla", "--out", "seen")
    document = json.loads(run(capsys, "explain", *option, folder, *few, "--json").out)
    assert "seen/gallery.html" in document["files"]
    assert {row["rule"] for row in document["measures"]} == {"vanilla"}
    written = json.loads(run(capsys, "export", *option, folder, "--format", "pt2", "--out", "m.pt2", "--json").out)
    assert written["path"] == "m.pt2"
    assert written["relative_error"] < 1e-4
    assert cli.parse(["explore", *option, str(folder)]).config.checkpoint == [str(folder)]


def test_quiet_evaluate_and_predict(training, photos, tmp_path, capsys):
    subsets = ["--subset", "all", "--subset", "top:2", "--out", tmp_path / "e.csv", "--workers", 0]
    lines = run(capsys, "evaluate", training[0], *subsets, "-q").out.splitlines()
    with (tmp_path / "e.csv").open(newline="") as file:
        assert lines == [f"{row['subset']}\t{float(row['top1']):.2f}" for row in csv.DictReader(file)]
    image = photos / "test/cat/0.png"
    names = run(capsys, "predict", image, "--checkpoint", training[0], "--out", tmp_path / "p.csv", "-q")
    assert names.out.split("\t")[0] == str(image)
    assert names.out.split("\t")[1].strip() in ("cat", "dog")
    assert names.err == ""


def test_an_unfinished_training_is_refused(photos, tmp_path, capsys):
    (tmp_path / "args.yaml").write_text("epochs: 3\n")
    image = photos / "test/cat/0.png"
    for words in (["evaluate", tmp_path], ["predict", image, "--checkpoint", tmp_path], ["export", tmp_path]):
        assert "--resume" in run(capsys, *words, code=2).err


def test_lists(capsys):
    assert json.loads(run(capsys, "models", "tv:alexnet", "--json").out)[0]["channels"] == 256
    assert run(capsys, "models", "tv:alexnet", "-q") == ("tv:alexnet\n", "")
    assert "mpncov+seb" in run(capsys, "heads", "-q").out.split()
    assert "cub" in run(capsys, "datasets", "-q").out.split()
    assert json.loads(run(capsys, "datasets", "list", "cub", "--json").out)[0]["published"] == [200, 5994, 5794]


def test_a_check_of_images(photos, tmp_path, capsys):
    assert run(capsys, "datasets", "check", photos, "--workers", 0, "-q") == ("", "")
    (tmp_path / "train/a").mkdir(parents=True)
    (tmp_path / "train/a/0.png").write_text("no image")
    document = json.loads(run(capsys, "datasets", "check", tmp_path, "--workers", 0, "--json", code=1).out)
    assert [problem["kind"] for problem in document["problems"]] == ["unreadable"]
    assert run(capsys, "datasets", "check", tmp_path, "--workers", 0, "-q", code=1).out.startswith("unreadable: ")


# exit codes


def test_a_broken_image_is_a_problem(training, photos, tmp_path, capsys):
    (tmp_path / "broken.png").write_text("no image")
    image, out = photos / "test/cat/0.png", tmp_path / "p.csv"
    words = ["predict", image, tmp_path / "broken.png", "--checkpoint", training[0], "--out", out]
    printed = run(capsys, *words, "--json", code=1)
    assert [bool(each["problem"]) for each in json.loads(printed.out)["predictions"]] == [False, True]
    assert str(tmp_path / "broken.png") in printed.err


def test_a_training_that_diverges_has_failed(photos, tmp_path, capsys):
    words = ["train", *small(photos, tmp_path / "run"), "--optimiser.lr", "1e30", "--epochs", 3, "--json"]
    out, err = run(capsys, *words, code=1)
    assert out == ""
    assert err.splitlines()[-1].startswith("eigengrain: error: ")


def test_an_export_that_is_not_exact_has_failed(tmp_path, capsys, monkeypatch):
    from eigengrain.models import export

    save_pretrained(create_model("test_resnet", head="gap", num_classes=2), tmp_path / "model")
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    words = ["export", tmp_path / "model", "--format", "pt2", "--img_size", 32, "--out", tmp_path / "m.pt2"]
    assert run(capsys, *words, code=1).out == ""
    assert not (tmp_path / "m.pt2").exists()


WAITING = """
import signal, sys, time
from dataclasses import dataclass
from eigengrain.cli import main as cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process inherits that Ctrl-C is ignored
@dataclass(frozen=True)
class NoOptions:
    pass
def run(config):
    print("ready", flush=True)
    time.sleep(60)
sys.exit(cli.run_commands("eigengrain", [cli.Command("wait", "of a test", NoOptions, run)], ["wait"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(number, code):
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline() == "ready\n", program.stderr.read()
            time.sleep(0.1)
            program.send_signal(number)
            _, err = program.communicate(timeout=30)
        finally:
            program.kill()
    assert program.returncode == code
    assert err.startswith("eigengrain: ")
    assert err.count("\n") == 1


def test_a_reader_that_closes_the_pipe_is_not_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "eigengrain", "datasets"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


NOTING = """
import sys
from eigengrain import output
from eigengrain.cli.completion import Completion
from eigengrain.cli.main import Command, run_commands

def note(config):
    output.note("a note")
    print("a line")

sys.exit(run_commands("notes", [Command("", "print a note", Completion, note, positional={"shell": "?"})]))
"""


@pytest.mark.parametrize(("word", "code"), [("zsh", 141), ("tcsh", 2)])
def test_a_reader_that_closes_the_pipe_of_both_streams(word, code):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", NOTING, word], stdout=writer, stderr=writer)  # as 2>&1 | head
    os.close(writer)
    assert done.returncode == code


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["datasets"], ["--help"], ["datasets", "--json"]])
def test_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "eigengrain", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "eigengrain: error: no space left on the disk: free some and run it again\n"
