"""The help of every command, as a person reads it."""

import inspect
import re
import shlex
import subprocess
import sys
import time

import pytest

from eigengrain.cli import main as cli
from eigengrain.cli.help import subject_of
from eigengrain.options import options_of

EVERY = pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)


def sections(text):
    """Heading → lines, of the parts of a help that have one."""
    parts = [part.splitlines() for part in text.split("\n\n")]
    return {lines[0].removesuffix(":"): lines[1:] for lines in parts if lines[0].endswith(":")}


@EVERY
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = cli.help_of(command)
    # names, and words that cannot be broken, may be longer
    long = [line for line in text.splitlines() if len(line) > columns - 2 and " " in line.strip()]
    assert [line for line in long if not line.lstrip().startswith("--")] == []
    assert "\0" not in text


@EVERY
def test_help_begins_with_a_short_usage_and_ends_with_examples(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = cli.help_of(command)
    first = text.splitlines()[0]
    assert first.startswith(f"usage: eigengrain {command.name} ")
    assert first.endswith("[options]")
    assert len(first) < 80
    shown = sections(text)
    assert list(shown)[-1] == "examples"
    assert 2 <= len(shown["examples"]) <= 3
    assert {option.name.upper() for option in options_of(command.config) if option.name in command.positional} == {
        line.split()[0] for line in shown.get("arguments", []) if not line.startswith("   ")
    }


@EVERY
def test_help_has_every_option_once_with_its_text_and_default(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = cli.help_of(command)
    words = " ".join(text.split())
    for option in options_of(command.config):
        assert option.help, option.name
        if option.name in command.positional:
            assert words.count(f"also as --{option.name} ") == 1
        else:
            found = re.findall(rf"^  --{re.escape(option.name)}(?: |$)", text, re.MULTILINE)
            assert len(found) == 1, option.name
        if option.default_text:
            assert f"(default: {option.default_text})" in words
    for noise in ("type:", "Literal", "<class", "(required", "null)", "object at", "factory", "{}", "default: False"):
        assert noise not in text, noise


def test_options_stand_under_their_subjects():
    train = next(command for command in cli.COMMANDS if command.name == "train")
    shown = sections(cli.help_of(train))
    assert list(shown)[:6] == ["training", "data", "transforms", "model", "optimiser", "schedule"]
    assert any("--recipe NAME" in line for line in shown["training"])
    assert any("--optimiser.lr X" in line for line in shown["optimiser"])
    assert any("--out PATH" in line for line in shown["output"])
    assert any("--amp {none,bf16,fp16}" in line for line in shown["speed and devices"])
    # what has no subject of its own belongs to what a command makes: few do
    homeless = [
        f"{command.name} {option.name}"
        for command in cli.COMMANDS
        for option in options_of(command.config)
        if option.name not in command.positional and subject_of(command.name, option) == "what is made"
    ]
    assert {name.split()[0] for name in homeless} <= {"evaluate", "predict", "explain", "export"}


@EVERY
def test_examples_can_be_read(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mine/model", "runs/other", "runs/demo/mpncov"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/mine/args.yaml").write_text("epochs: 3\n")
    for example in command.examples:
        [words] = re.findall(r"eigengrain ([^>)']*(?:'[^']*'[^>)']*)*)", example)
        assert cli.parse(shlex.split(words)).command is command


def test_overviews_name_every_command():
    text = cli.help_of("")
    for name in cli._choices(""):
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name
    group = cli.help_of("bench")
    for name in cli._choices("bench"):
        assert re.search(rf"^  {name} ", group, re.MULTILINE), name


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["--help"], "usage: eigengrain COMMAND [options]"),
        (["-h"], "usage: eigengrain COMMAND [options]"),
        (["help"], "usage: eigengrain COMMAND [options]"),
        (["bench", "--help"], "usage: eigengrain bench COMMAND [options]"),
        (["help", "bench", "step"], "usage: eigengrain bench step [options]"),
        (["train", "--epochs", "3", "-h"], "usage: eigengrain train [--recipe NAME] [options]"),
        (["predict", "--help"], "usage: eigengrain predict [IMAGES ...] --checkpoint PATH [options]"),
    ],
)
def test_ways_to_ask_for_help(words, first, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    assert capsys.readouterr().out.splitlines()[0] == first


def test_help_needs_no_parser_and_no_time():
    """Without the parser and everything heavy; the time is the best of three, as other work may go on."""
    code = "import sys; from eigengrain.cli.main import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'rich'} & set(sys.modules)"
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5


def test_the_signature_of_create_model_shows_its_defaults():
    from eigengrain.models import create as factory
    from eigengrain.models import create_model

    written = inspect.getsource(create_model)
    assert 'head: str | None = "mpncov+seb"' in written
    defaults = inspect.signature(create_model).parameters
    assert defaults["head"].default == factory.DEFAULT_HEAD
    assert defaults["num_classes"].default == factory.DEFAULT_CLASSES
