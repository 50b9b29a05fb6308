"""The help of every command."""

import re
import shlex
import subprocess
import sys

import pytest

from eigengrain.cli import main as cli
from eigengrain.cli.help import subject_of
from eigengrain.options import options_of

EVERY = pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)


def sections(text):
    """Heading → lines, for the parts of a help that have a heading."""
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
    parts = sections(text)
    assert list(parts)[-1] == "examples"
    assert 2 <= len(parts["examples"]) <= 3
    assert {option.argument for option in options_of(command.config) if option.name in command.positional} == {
        line.split()[0] for line in parts.get("arguments", []) if not line.startswith("   ")
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
            rows = re.findall(rf"^  --{re.escape(option.name)}(?: |$)", text, re.MULTILINE)
            assert len(rows) == 1, option.name
        if option.default_text:
            assert f"(default: {option.default_text})" in words
    for noise in ("type:", "Literal", "<class", "(required", "null)", "object at", "factory", "{}", "default: False"):
        assert noise not in text, noise


def test_options_stand_under_their_subjects():
    train = next(command for command in cli.COMMANDS if command.name == "train")
    parts = sections(cli.help_of(train))
    assert list(parts)[:7] == ["arguments", "training", "data", "transforms", "model", "optimiser", "schedule"]
    for subject, start in (
        ("training", "--recipe NAME"),
        ("optimiser", "--optimiser.lr X"),
        ("output", "--out PATH"),
        ("speed and devices", "--amp {none,bf16,fp16}"),
    ):
        assert any(line.strip().startswith(start) for line in parts[subject])
    for command in cli.COMMANDS:
        for option in options_of(command.config):
            assert option.name in command.positional or subject_of(command.name, option) != "options"


@EVERY
def test_examples_can_be_parsed(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mine/model", "runs/other", "runs/demo/mpncov"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/mine/args.yaml").write_text("epochs: 3\n")
    for example in command.examples:
        [words] = re.findall(r"eigengrain ([^>)']*(?:'[^']*'[^>)']*)*)", example)
        assert cli.parse(shlex.split(words)).command is command


def test_the_overview_lists_every_command():
    text = cli.help_of(None)
    for command in cli.COMMANDS:
        assert re.search(rf"^  {command.name} ", text, re.MULTILINE), command.name


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["help"], "usage: eigengrain COMMAND [options]"),
        (["help", "demo"], "usage: eigengrain demo [options]"),
        (["train", "--epochs", "3", "-h"], "usage: eigengrain train [FOLDER] [--recipe NAME] [options]"),
        (["predict", "--help"], "usage: eigengrain predict [IMAGES ...] --checkpoint PATH [options]"),
    ],
)
def test_ways_to_print_the_help(words, first, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    assert capsys.readouterr().out.splitlines()[0] == first


def test_the_help_of_the_benchmarks_needs_no_web_page():
    script = "import sys; sys.modules['gradio'] = None; from benchmarks.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "explorer_load" in done.stdout
