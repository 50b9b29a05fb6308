"""Words and files become the config of a command."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from eigengrain.cli import main as cli
from eigengrain.cli.parser import UsageError
from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.options import as_words, check, setting
from eigengrain.recipes import load_recipe
from eigengrain.training.config import from_mapping


def test_options_come_from_the_dataclass(command):
    for words in ([], ["--steps", "5", "--widths=[1,2]"], ["--widths", "7"], ["--widths", "1,2", "--widths", "3"]):
        assert cli.main(["try", *words]) == 0
    values = [(config.steps, config.widths) for config in command.calls]
    assert values == [(3, 1), (5, [1, 2]), (3, 7), (3, [1, 2, 3])]


def test_options_of_the_command_line_override_those_of_files(command, tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("steps: 5\nwidths: [1, 2]\n")
    second.write_text("widths: 3\n")
    assert cli.main(["try", "--config", str(first), "--steps", "6"]) == 0
    assert cli.main(["try", "--steps", "6", f"--config={first}", "--config", str(second)]) == 0
    assert [(config.steps, config.widths) for config in command.calls] == [(6, [1, 2]), (5, 3)]


@pytest.mark.parametrize(
    ("words", "kind", "facts"),
    [
        (["--setps", "3"], UsageError, {"word": "--setps", "suggestions": ("--steps",)}),
        (["--setps=3"], UsageError, {"word": "--setps", "suggestions": ("--steps",)}),
        (["--step", "3"], UsageError, {"word": "--step", "suggestions": ("--steps",)}),
        (["--xyz"], UsageError, {"word": "--xyz", "suggestions": ()}),
        (["-x"], UsageError, {"word": "-x"}),
        (["word"], UsageError, {"word": "word"}),
        (["--steps", "many"], ArgumentError, {"argument": "steps", "value": "many"}),
        (["--widths", "1,b"], ArgumentError, {"argument": "widths", "value": "1,b"}),
        (["--steps"], ArgumentError, {"argument": "steps", "value": None}),
        (["--steps", "--widths", "3"], ArgumentError, {"argument": "steps"}),
        (["--steps", "-1"], ArgumentError, {"argument": "steps", "value": -1}),
        (["--quiet=yes"], ArgumentError, {"argument": "quiet"}),
        (["--config"], ArgumentError, {"argument": "config"}),
        (["--config="], ArgumentError, {"argument": "config"}),
        (["--config", "missing.yaml"], FileError, {"path": Path("missing.yaml")}),
    ],
)
def test_mistakes(command, words, kind, facts):
    with pytest.raises(kind) as error:
        cli.parse(["try", *words])
    assert {name: getattr(error.value, name) for name in facts} == facts
    assert cli.main(["try", *words]) == 2
    assert command.calls == []


@pytest.mark.parametrize(
    ("name", "suggestions"),
    [
        ("lr", ["optimiser.lr"]),
        ("img_size", ["data.transforms.img_size", "model.img_size"]),
        ("weight_dacay", ["optimiser.weight_decay"]),
        ("model.lr", ["optimiser.lr"]),
        ("optimizer.lr", ["optimiser.lr"]),
        ("batch-size", ["batch_size"]),
        ("xyzzy", []),
    ],
)
def test_suggestions_are_by_the_last_part_of_a_name(name, suggestions, tmp_path):
    with pytest.raises(UsageError) as error:
        cli.parse(["train", f"--{name}", "1"])
    assert error.value.suggestions == tuple(f"--{each}" for each in suggestions)
    if "." not in name:
        with pytest.raises(UnknownName) as unknown:
            from_mapping({name: 1})
        assert unknown.value.suggestions == suggestions


def test_messages_name_options_and_the_help(command, one_line):
    for words, line in (
        (["--setps", "3"], "unknown option '--setps': did you mean '--steps'?"),
        (["--steps", "many"], "--steps must be an integer, got 'many'"),
        (["--steps"], "--steps needs a value: an integer"),
    ):
        assert cli.main(["try", *words]) == 2
        assert one_line() == f"{line} (see 'eigengrain try --help')"


@pytest.mark.parametrize(
    ("text", "kind", "facts"),
    [
        ("setps: 5\n", UnknownName, {"name": "setps"}),
        ("data:\n  nam: cub\n", UnknownName, {"name": "data.nam"}),
        ("data:\n  transforms:\n    kindd: timm\n", UnknownName, {"name": "data.transforms.kindd"}),
        ("optimiser:\n  - lr: 3\n", ArgumentError, {"argument": "optimiser", "value": [{"lr": 3}]}),
        ("seed: 1\ndata:\n", ArgumentError, {"argument": "data"}),
        ("seed: 1\nepochs:\n", ArgumentError, {"argument": "epochs", "value": None}),
        ("optimiser: {lr: null}\n", ArgumentError, {"argument": "optimiser.lr"}),
        ("resume: 'false'\n", ArgumentError, {"argument": "resume", "value": "false"}),
    ],
)
def test_mistakes_in_files(tmp_path, text, kind, facts):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(kind) as error:
        cli.parse(["train", "--config", str(file)])
    assert {name: getattr(error.value, name) for name in facts} == facts
    assert cli.main(["train", "--config", str(file)]) == 2


@pytest.mark.parametrize("content", [b"steps: [1\n", "steps: 1\n".encode("utf-16"), b"# steps: 1\n", b"- steps\n", b""])
def test_files_without_options(command, tmp_path, content):
    good, file = tmp_path / "good.yaml", tmp_path / "options.yaml"
    good.write_text("steps: 1\n")
    file.write_bytes(content)
    with pytest.raises(FileError) as error:
        cli.parse(["try", "--config", str(good), f"--config={file}"])
    assert error.value.path == file


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "photos", "näher.jpg", "--checkpoint", "runs/1", "--topk", "3"],
        ["evaluate", "runs/1", "--subset", "top:3", "--flip"],
        ["datasets", "check", "cub", "birds"],
        ["models", "resnet18"],
        ["train", "--data.transforms.kind=timm", "--data.transforms.scale", "0.1,1", "--data.options", "{level: family}"],
    ],
)
def test_printed_options_can_be_read_back(capsys, tmp_path, words):
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--print_config"])
    assert stop.value.code == 0
    file = tmp_path / "options.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert cli.parse([words[0], "--config", str(file)]).config == cli.parse(words).config


def test_null_and_switches_of_a_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("ema: null\nresume: false\ndry_run: true\n")
    config = cli.parse(["train", "--config", str(file)]).config
    assert (config.ema, config.resume, config.dry_run) == (None, False, True)


def test_a_switch_of_a_file_can_be_turned_off(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("channels_last: true\ndry_run: true\n")
    words = ["train", "photos", "--config", str(file), "--resume"]
    for more in (["--channels_last", "false", "--dry_run=false"], ["--channels_last=false", "--dry_run", "false"]):
        config = cli.parse([*words, *more]).config
        assert (config.data.root, config.resume, config.channels_last, config.dry_run) == ("photos", True, False, False)
    typed = as_words(config, base=cli.parse(words).config)
    assert cli.parse([*words, *typed]).config == config


def test_the_home_folder_is_expanded_everywhere(tmp_path, monkeypatch):
    """The shell expands '--out ~/runs', but neither '--out=~/runs' nor a file."""
    monkeypatch.setenv("HOME", "/home/ada")
    file = tmp_path / "options.yaml"
    file.write_text("out: ~/runs\ndata: {root: ~/birds}\n")
    config = cli.parse(["train", "--config", str(file), "--model.weights=~/w.pth"]).config
    assert (config.out, config.data.root, config.model.weights) == ("/home/ada/runs", "/home/ada/birds", "/home/ada/w.pth")
    config = cli.parse(["predict", "~/a.jpg", "b~.jpg", "--checkpoint=~/runs"]).config
    assert (config.images, config.checkpoint) == (["/home/ada/a.jpg", "b~.jpg"], "/home/ada/runs")
    assert cli.parse(["evaluate", "x", "--subset=~(top:2)"]).config.subset == ["~(top:2)"]
    config = cli.parse(["evaluate", "x", "--root=~", "--out=null"]).config
    assert (config.root, config.out) == ("/home/ada", None)  # ~ alone is a folder, although YAML reads it as null
    assert cli.parse(["train", "--data.root=~"]).config.data.root == "/home/ada"


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["evaluate", "x", "--subset", "top:2,last:3", "--subset=all"], "subset", ["top:2", "last:3", "all"]),
        (["explore", "--checkpoint", "x", "--checkpoint=x"], "checkpoint", ["x", "x"]),
        (["demo", "--seeds", "1", "--seeds", "[2,3]"], "seeds", [1, 2, 3]),
        (["explain", "x", "--rules", "vanilla,guided"], "rules", ["vanilla", "guided"]),
        (["explain", "x", "--rules", "vanilla", "guided"], "rules", ["vanilla", "guided"]),
        (["explain", "x", "--rules", "[vanilla]", "--count", "3"], "rules", ["vanilla"]),
        (["explain", "x", "--images=1.jpg,2.jpg"], "images", ["1.jpg", "2.jpg"]),
        (["explain", "x", "--images", "a.jpg", "b c.jpg", "--count", "3"], "images", ["a.jpg", "b c.jpg"]),
    ],
)
def test_lists(words, option, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert getattr(cli.parse(words).config, option) == value


def test_a_list_of_the_command_line_replaces_that_of_a_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("seeds: [7, 8]\n")
    assert cli.parse(["demo", "--config", str(file), "--seeds", "1", "--seeds", "2"]).config.seeds == [1, 2]
    assert cli.parse(["demo", "--seeds", "1", "--config", str(file)]).config.seeds == [7, 8]


def test_a_comma_in_the_name_of_a_file(tmp_path):
    file = tmp_path / "1,2.jpg"
    file.touch()
    assert cli.parse(["explain", str(tmp_path), "--images", str(file)]).config.images == [str(file)]


def test_a_pair_of_numbers_is_a_list():
    words = ["train", "--data.transforms.kind", "timm", "--data.transforms.scale"]
    for pair in ("0.1,1", "[0.1,1]"):
        assert cli.parse([*words, pair]).config.data.transforms.scale == (0.1, 1.0)


def test_switches_of_every_command_can_be_anywhere():
    for words in (["-q", "heads", "gap"], ["heads", "-q", "gap"], ["heads", "gap", "--quiet"]):
        request = cli.parse(words)
        assert (request.quiet, request.json, request.config.pattern) == (True, False, "gap")
    assert cli.parse(["--json", "heads"]).json


def test_json_is_refused_by_a_command_without_a_result():
    with pytest.raises(UsageError) as error:
        cli.parse(["completion", "bash", "--json"])
    assert error.value.word == "--json"


def test_words_after_two_dashes_are_arguments():
    for words in (
        ["-q", "predict", "--checkpoint", "x", "--", "-a.jpg"],
        ["predict", "--checkpoint=x", "-q", "--", "-a.jpg"],
    ):
        request = cli.parse(words)
        assert (request.config.images, request.quiet) == (["-a.jpg"], True)
    request = cli.parse(["predict", "--checkpoint", "x", "--", "-q", "--json"])
    assert (request.config.images, request.quiet, request.json) == (["-q", "--json"], False, False)


def test_arguments_and_options_can_alternate():
    words = ["predict", "a.jpg", "--topk", "3", "b.jpg", "--checkpoint", "x", "-"]
    assert cli.parse(words).config.images == ["a.jpg", "b.jpg", "-"]


def test_an_option_that_is_given_twice_in_two_ways():
    for words in (["evaluate", "x", "--checkpoint", "y"], ["models", "--pattern=a", "b"]):
        with pytest.raises(UsageError):
            cli.parse(words)


def test_any_characters_in_file_names_and_thousands_of_them():
    names = ["a\udcff.jpg", "b\x7f\x85.jpg", "null", "[1,2]", "~x", *map(str, range(20_000))]
    assert cli.parse(["predict", "--checkpoint", "folder", *names]).config.images == names
    assert cli.parse(["predict", "--checkpoint", "folder", "--", *names]).config.images == names


def test_an_empty_path_is_not_the_current_folder():
    for words, name in (
        (["train", ""], "data.root"),
        (["train", "--out="], "out"),
        (["predict", "a.jpg", "", "--checkpoint", "x"], "images"),
        (["explain", "x", "--images", "a.jpg", ""], "images"),
        (["explore", ""], "checkpoint"),
    ):
        with pytest.raises(ArgumentError) as error:
            cli.parse(words)
        assert error.value.argument == name


@dataclass(frozen=True)
class Bounds:
    """One number.

    Args:
        x: a number.
    """

    x: float = setting(0.5, above=0, most=1)


def test_bounds_of_a_number():
    for x in (1e-300, 1, 1.0):
        check(Bounds(x))
    for x in (0.0, 1.0000001, float("inf"), float("nan")):
        with pytest.raises(ArgumentError) as error:
            check(Bounds(x))
        assert error.value.argument == "x"
        assert error.value.problem.count("1") == 1  # the bound as it is declared


def test_options_override_the_recipe():
    words = ["train", "--epochs", "3", "--recipe=birds-vgg16-paper"]
    assert cli.parse(words).config == load_recipe("birds-vgg16-paper", {"epochs": 3})
    with pytest.raises(UnknownName) as unknown:
        cli.parse(["train", "--recipe", "bird-vgg16-paper"])
    assert unknown.value.suggestions[0] == "birds-vgg16-paper"
    for words in (
        ["--recipe"],
        ["--recipe", "--epochs"],
        ["--recipe", "birds-vgg16-paper", "--recipe", "cars-vgg16-paper"],
    ):
        with pytest.raises(ArgumentError) as error:
            cli.parse(["train", *words])
        assert error.value.argument == "recipe"


def test_a_file_of_options_can_name_its_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: plumage-demo\nepochs: 3\n")
    for words in (["--config", str(file)], [f"--config={file}"], ["--config", str(file), "--recipe", "plumage-demo"]):
        config = cli.parse(["train", *words, "--seed", "1"]).config
        assert config == load_recipe("plumage-demo", {"epochs": 3, "seed": 1})
    with pytest.raises(ArgumentError):
        cli.parse(["train", "--config", str(file), "--recipe", "birds-vgg16-paper"])
    file.write_text("recipe: plumage-dmo\n")
    with pytest.raises(UnknownName):
        cli.parse(["train", "--config", str(file)])
    with pytest.raises(FileError):
        cli.parse(["train", "--config", str(tmp_path)])


def test_the_folder_of_a_training_needs_no_option(tmp_path):
    folder = str(tmp_path)
    data = cli.parse(["train", folder, "--recipe", "birds-resnet50-modern"]).config.data  # the recipe is for cub
    assert (data.name, data.root) == ("folder", folder)
    assert cli.parse(["train", "--data.name", "cub", folder]).config.data.name == "cub"
    with pytest.raises(UsageError) as error:
        cli.parse(["train", folder, "--data.root", folder])
    assert error.value.word == folder
