"""What commands print: for reading, in bare lines, as JSON; and with which code they end."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain import output
from eigengrain.cli import main as cli
from eigengrain.cli.listing import Heads
from eigengrain.cli.words import named
from eigengrain.models import create_model, save_pretrained
from eigengrain.options import options_of
from eigengrain.progress import progress_bar
from eigengrain.training import loop

SIDE = 32


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of noise, laid out as a user's own images are."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for part, many in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for number in range(many):
                pixels = generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def training(photos, tmp_path_factory):
    """The folder of a short training, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    return out, said("train", "--json", *small(photos, out))


def small(photos, out):
    data = f"--data.name folder --data.root {photos} --data.transforms.kind none --data.transforms.img_size {SIDE}"
    model = "--model.backbone test_resnet --model.head mpncov --model.reduce 4 --model.last_stride 1"
    return f"{data} {model} --epochs 1 --batch_size 4 --workers 0 --device cpu --out {out}".split()


def said(*words, code=0):
    """stdout and stderr of a command in a process of its own."""
    command = [sys.executable, "-m", "eigengrain.cli.main", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def run(capsys, *words, code=0):
    """stdout and stderr of a command in this process."""
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == code
    return capsys.readouterr()


# the modes themselves


def test_json_stands_alone_whoever_prints(capsys):
    with output.mode(json=True):
        print("a library talks")
        output.reading().print("a table")
        output.progress().print("half way")
        output.result({"a": [1.5, float("nan"), Path("x")], "b": (np.float64(2), True)})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": [1.5, None, "x"], "b": [2.0, True]}
    assert err == "a library talks\nhalf way\n"


def test_quiet_leaves_the_result(capsys):
    with output.mode(quiet=True), warnings.catch_warnings(record=True) as told:
        output.reading().print("a table")
        output.progress().print("half way")
        warnings.simplefilter("always")
        output.result({"a": 1}, ["one", Path("two")])
    assert capsys.readouterr() == ("one\ntwo\n", "")
    assert told == []


def test_a_warning_of_ours_is_one_line(capsys, monkeypatch):
    ours, of_others, usual = str(Path(output.__file__)), "/elsewhere/module.py", []
    monkeypatch.setattr(warnings, "showwarning", lambda *arguments: usual.append(arguments[2:4]))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with output.mode():
            warnings.warn_explicit("few positions", UserWarning, ours, 1)
            warnings.warn_explicit("from elsewhere", UserWarning, of_others, 7)
        assert capsys.readouterr().err == "eigengrain: note: few positions\n"
        assert usual == [(of_others, 7)]
        with output.mode(quiet=True):
            warnings.warn_explicit("few positions", UserWarning, ours, 2)
        warnings.warn_explicit("after the command", UserWarning, ours, 3)
    assert capsys.readouterr().err == ""
    assert usual == [(of_others, 7), (ours, 3)]


def test_bars_are_on_stderr_of_a_terminal_and_not_in_quiet(monkeypatch):
    assert progress_bar().disable  # stderr is caught here
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    bar = progress_bar()
    assert not bar.disable
    assert bar.console.stderr
    with output.mode(json=True):
        assert not progress_bar().disable
    with output.mode(quiet=True):
        assert progress_bar().disable
    assert progress_bar(show=False).disable


def test_a_hidden_bar_leaves_nothing(capsys):
    with progress_bar() as bar:
        bar.advance(bar.add_task("work", total=1))
    assert capsys.readouterr() == ("", "")


def test_for_reading_there_is_no_document(capsys):
    output.reading().print("a table")
    output.progress().print("half way")
    output.result({"a": 1}, ["one"])
    assert capsys.readouterr() == ("a table\n", "half way\n")


def test_the_mode_ends_with_the_command(capsys):
    def fail():
        with output.mode(quiet=True, json=True):
            raise ValueError(f"quiet: {output.current().quiet}")

    with pytest.raises(ValueError, match="quiet: True"):
        fail()
    assert output.current() == output.Mode()
    print("heard")
    assert capsys.readouterr().out == "heard\n"


def test_a_value_without_a_form_in_json_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="no JSON for a value of type object"):
        output.plain({"a": object()})


def test_the_switches_stand_anywhere(capsys):
    for words in (["-q", "heads", "gap"], ["heads", "-q", "gap"], ["heads", "gap", "--quiet"]):
        assert run(capsys, *words) == ("gap\n", "")


def test_json_is_refused_where_there_is_no_result(capsys):
    assert "leave it out" in run(capsys, "completion", "bash", "--json", code=2).err


def test_words_after_two_dashes_are_arguments():
    [option] = options_of(Heads)
    assert named(["--", "-q"], [option], {"pattern": "?"}).texts == {"pattern": "-q"}
    for words in (
        ["-q", "predict", "--checkpoint", "x", "--", "-a.jpg"],
        ["predict", "--checkpoint=x", "-q", "--", "-a.jpg"],
    ):
        request = cli.parse(words)
        assert (request.config.images, request.quiet) == (["-a.jpg"], True)
    request = cli.parse(["predict", "--checkpoint", "x", "--", "-q", "--json"])
    assert (request.config.images, request.quiet, request.json) == (["-q", "--json"], False, False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("heads gap", 0), ("heads gap --json", 0), ("heds", 2)])
def test_a_stream_that_is_closed_is_no_error(words, code, closed):
    line = f"exec {shlex.quote(sys.executable)} -m eigengrain.cli.main {words} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("\n") == (closed == ">&-" and code == 2)
    assert bool(done.stdout) == (closed == "2>&-" and code == 0)  # an error does not come out of the other stream


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_stdout_does_not_have(encoding):
    def printed(*words):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "eigengrain.cli.main", *words]
        return subprocess.run(command, capture_output=True, env=environment, check=True).stdout.decode(encoding)

    assert "image_00001.jpg \\u2026" in printed("datasets", "list", "flowers")
    [flowers] = json.loads(printed("datasets", "list", "flowers", "--json"))
    assert flowers["layout"][0][0] == "jpg/image_00001.jpg …"


def test_the_way_of_stdout_is_put_back(capsys):
    before = sys.stdout.errors
    run(capsys, "heads", "gap")
    assert sys.stdout.errors == before


def test_of_several_processes_one_speaks(capsys, monkeypatch):
    result = loop.Result("last", 1, {"test_top1": 50.0}, 1, "runs/x/model")
    monkeypatch.setattr(loop, "train", lambda config: result)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        for mode in ("--json", "--quiet"):
            assert bool(run(capsys, "train", mode).out) == printed


# every command


def test_train(training, photos, tmp_path, capsys):
    out, (stdout, stderr) = training
    document = json.loads(stdout)
    assert document["model"] == str(out / "model")
    assert document["scores"]["test_top1"] >= 0
    assert "epoch 1/1" in stderr
    assert run(capsys, "train", *small(photos, tmp_path / "quiet"), "-q") == (f"{tmp_path}/quiet/model\n", "")
    plan = json.loads(run(capsys, "train", *small(photos, tmp_path / "dry"), "--dry_run", "--json").out)["plan"]
    assert plan["data"].startswith("folder: 8 training")


@pytest.mark.parametrize("part", ["", "model"])
@pytest.mark.parametrize("option", [[], ["--checkpoint"]])
def test_a_checkpoint_is_given_in_one_way(training, photos, tmp_path, capsys, part, option, monkeypatch):
    """With and without the option, the folder of the training or its model, for every command that reads one."""
    monkeypatch.chdir(tmp_path)
    folder, image = training[0] / part, photos / "test/cat/0.png"
    scores = json.loads(run(capsys, "evaluate", *option, folder, "--workers", 0, "--json").out)["scores"]
    assert [score["samples"] for score in scores] == [4]
    answer = json.loads(run(capsys, "predict", image, "--checkpoint", folder, "--json").out)
    assert answer["predictions"][0]["path"] == str(image)
    assert {each["class"] for each in answer["predictions"][0]["classes"]} == {"cat", "dog"}
    few = ("--count", 1, "--measure_count", 2, "--rules", "vanilla", "--out", "seen")
    found = json.loads(run(capsys, "explain", *option, folder, *few, "--json").out)
    assert "seen/gallery.html" in found["files"]
    assert {row["rule"] for row in found["measures"]} == {"vanilla"}
    written = json.loads(run(capsys, "export", *option, folder, "--format", "pt2", "--out", "m.pt2", "--json").out)
    assert written["path"] == "m.pt2"
    assert written["relative_error"] < 1e-4
    assert cli.parse(["explore", *option, str(folder)]).config.checkpoint == [str(folder)]


def test_quiet_evaluate_predict_and_export(training, photos, tmp_path, capsys):
    out, _ = training
    subset = ["--subset", "all", "--subset", "top:2", "--out", tmp_path / "e.csv", "--workers", 0]
    lines = run(capsys, "evaluate", out, *subset, "-q").out.splitlines()
    with (tmp_path / "e.csv").open(newline="") as file:
        assert lines == [f"{row['subset']}\t{float(row['top1']):.2f}" for row in csv.DictReader(file)]
    image = photos / "test/cat/0.png"
    names = run(capsys, "predict", image, "--checkpoint", out, "--out", tmp_path / "p.csv", "-q")
    assert names.out.split("\t")[0] == str(image)
    assert names.out.split("\t")[1].strip() in ("cat", "dog")
    assert names.err == ""


def test_an_unfinished_training_is_said(photos, tmp_path, capsys):
    (tmp_path / "args.yaml").write_text("epochs: 3\n")
    image = photos / "test/cat/0.png"
    for words in (["evaluate", tmp_path], ["predict", image, "--checkpoint", tmp_path], ["export", tmp_path]):
        assert "has not ended" in run(capsys, *words, code=2).err


def test_lists(capsys):
    assert json.loads(run(capsys, "models", "tv:alexnet", "--json").out)[0]["channels"] == 256
    assert run(capsys, "models", "tv:alexnet", "-q") == ("tv:alexnet\n", "")
    assert "mpncov+seb" in run(capsys, "heads", "-q").out.split()
    assert run(capsys, "datasets", "-q").out.split()[0] == "cub"
    assert json.loads(run(capsys, "datasets", "list", "cub", "--json").out)[0]["published"] == [200, 5994, 5794]


def test_a_check_of_images(photos, tmp_path, capsys):
    assert run(capsys, "datasets", "check", photos, "--workers", 0, "-q") == ("", "")
    (tmp_path / "train/a").mkdir(parents=True)
    (tmp_path / "train/a/0.png").write_text("no image")
    found = json.loads(run(capsys, "datasets", "check", tmp_path, "--workers", 0, "--json", code=1).out)
    assert [problem["kind"] for problem in found["problems"]] == ["unreadable"]
    assert run(capsys, "datasets", "check", tmp_path, "--workers", 0, "-q", code=1).out.startswith("unreadable: ")


SMALL_BENCHES = {
    "functional": "--batch 2 --channels 4 --positions 9 --repeats 1 --methods eigh --device cpu --out {}/b.csv",
    "gradients": "--channels 8 --positions 20 --samples 1 --out {}",
    "heads": "--heads gap --batch 1 --channels 4 --side 4 --repeats 1 --device cpu --out {}/b.csv",
    "step": "--backbones test_resnet --heads gap,isqrt --batch 2 --img_size 64 --reduce 4 --repeats 1 --device cpu "
    "--out {}/b.csv",
    "growth": "--batch 1,2 --channels 4 --at_channels 4 --at_batch 1 --positions 9 --methods eigh --repeats 1 "
    "--device cpu --out {}/b.csv",
    "solvers": "--batch 1 --channels 4 --at_channels 4 --positions 9 --samples 1 --repeats 1 --device cpu --out {}",
    "explain": "--backbone test_resnet --batch 1 --img_size 64 --subsets all --rules vanilla --repeats 1 --device cpu "
    "--out {}/b.csv",
    "loader": "--images 4 --size 16 --batch_size 2 --repeats 1 --out {}/b.csv",
}


def test_no_benchmark_is_forgotten():
    assert set(SMALL_BENCHES) == {command.last_word for command in cli.COMMANDS if command.group == "bench"}


@pytest.mark.parametrize("name", SMALL_BENCHES)
def test_benchmarks(name, tmp_path, capsys):
    words = SMALL_BENCHES[name].format(tmp_path).split()
    out, _ = run(capsys, "bench", name, *words, "--json")
    document = json.loads(out)
    assert document["files"]
    assert all(Path(file).is_file() for file in document["files"])
    assert document.get("rows") or document["eigensolvers"]
    lines, err = run(capsys, "bench", name, *words, "--quiet")
    assert err == ""
    assert set(lines.split()) <= set(document["files"])
    assert lines


def test_studies(tmp_path, capsys):
    listed = json.loads(run(capsys, "study", "list", "--scale", "smoke", "--json").out)
    assert [row["name"] for row in listed] == run(capsys, "study", "list", "--scale", "smoke", "-q").out.split()
    words = ["study", "spectrum", "--scale", "smoke", "--device", "cpu", "--only_report", "--out", tmp_path]
    document = json.loads(run(capsys, *words, "--json").out)
    assert [study["name"] for study in document["studies"]] == ["spectrum"]
    assert set(run(capsys, *words, "-q").out.split()) == set(document["files"])


def test_the_demo(tmp_path, capsys):
    words = ["demo", "--heads", "gap", "--epochs", 1, "--per_class", 2, "--device", "cpu", "--out", tmp_path]
    document = json.loads(run(capsys, *words, "--json").out)
    assert [row["head"] for row in document["rows"]] == ["gap"]
    assert run(capsys, *words, "-q") == (f"{tmp_path}/report.html\n", "")


# exit codes


def test_a_broken_image_is_a_problem_that_was_found(training, photos, tmp_path, capsys):
    (tmp_path / "broken.png").write_text("no image")
    image, out = photos / "test/cat/0.png", tmp_path / "p.csv"
    words = ["predict", image, tmp_path / "broken.png", "--checkpoint", training[0], "--out", out]
    said = run(capsys, *words, "--json", code=1)
    assert [bool(each["problem"]) for each in json.loads(said.out)["predictions"]] == [False, True]
    assert "1 could not be read" in said.err


def test_a_training_that_diverges_has_failed(photos, tmp_path):
    out, err = said("train", *small(photos, tmp_path / "run"), "--optimiser.lr", "1e30", "--epochs", 3, "--json", code=1)
    assert out == ""
    assert err.splitlines()[-1].startswith("eigengrain: error: ")


def test_an_export_that_is_not_exact_has_failed(tmp_path, capsys, monkeypatch):
    from eigengrain.models import export

    save_pretrained(create_model("test_resnet", head="gap", num_classes=2), tmp_path / "model")
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    words = ["export", tmp_path / "model", "--format", "pt2", "--img_size", 32, "--out", tmp_path / "m.pt2"]
    assert "differ from PyTorch's" in run(capsys, *words, code=1).err


@dataclass(frozen=True)
class NoOptions:
    """None."""


WAITING = """
import signal, sys, time, types
from dataclasses import dataclass
from eigengrain.cli import main as cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits that Ctrl-C is ignored
@dataclass(frozen=True)
class NoOptions:
    pass
module = types.ModuleType("waiting")
def run(config):
    print("ready", flush=True)
    time.sleep(60)
module.run = run
sys.modules["waiting"] = module
cli.COMMANDS = (*cli.COMMANDS, cli.Command("wait", "of a test", NoOptions, "waiting:run"))
sys.exit(cli.main(["wait"]))
"""


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "eigengrain: interrupted\n"),
        (signal.SIGTERM, 143, "eigengrain: stopped by SIGTERM\n"),
    ],
)
def test_signals(number, code, line):
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline() == "ready\n", program.stderr.read()
            time.sleep(0.1)
            program.send_signal(number)
            _, err = program.communicate(timeout=30)
        finally:
            program.kill()
    assert (program.returncode, err) == (code, line)


def test_sigterm_is_handled_as_before_after_a_command(capsys):
    before = signal.getsignal(signal.SIGTERM)
    run(capsys, "heads", "gap")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "eigengrain.cli.main", "datasets"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_has_its_code(monkeypatch, capfd):
    def break_it(config):
        raise BrokenPipeError

    module = types.ModuleType("breaking")
    module.run = break_it
    monkeypatch.setitem(sys.modules, "breaking", module)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, cli.Command("break", "of a test", NoOptions, "breaking:run")))
    kept = os.dup(1)
    try:
        assert cli.main(["break"]) == 141
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["datasets"], ["--help"], ["datasets", "--json"]])
def test_a_full_disk_is_said_in_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "eigengrain.cli.main", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "eigengrain: error: no space is left on the disk: free some, then run it again\n",
    )


def test_any_letters_in_the_names_of_files_and_thousands_of_them():
    names = ["a\udcff.jpg", "b\x7f\x85.jpg", "null", "[1,2]", "~x", *map(str, range(20_000))]
    config = cli.parse(["predict", "--checkpoint", "folder", "--", *names]).config
    assert config.images == names
