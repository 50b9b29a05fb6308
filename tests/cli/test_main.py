"""Commands are found and run; mistakes of users get one line and an exit code, bugs keep their traceback."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest
import torch

from eigengrain import __version__
from eigengrain.cli import main as cli
from eigengrain.cli.parser import UsageError
from eigengrain.errors import (
    ArgumentError,
    EigenSolverError,
    FailedError,
    FileError,
    Interrupted,
    LayoutError,
    NonFiniteError,
    UnknownName,
)

HEAVY = ("torch", "torch._dynamo", "timm", "torchvision", "captum", "matplotlib", "rich")


def test_heavy_packages_are_imported_only_when_they_are_needed():
    """One interpreter per set of packages: what is imported stays imported."""
    light = """
import eigengrain
from eigengrain.cli import main as cli
cli.help_of(None), [cli.help_of(command) for command in cli.COMMANDS]
for words in (["train", "--epochs", "3"], ["predict", "a.jpg", "--checkpoint", "x"], ["export", "x"], ["heads"]):
    cli.parse(words)
for words in (["train", "--help"], ["--version"]):
    try:
        cli.main(words)
    except SystemExit:
        pass
cli.main(["completion", "bash"])
"""
    spectral = "import eigengrain.functional, eigengrain.heads"
    for statement, expected in ((light, set()), (spectral, {"torch"})):
        code = f"import sys\n{statement}\nprint(*[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert set(done.stderr.split()) == expected


def test_the_exit_code_of_a_command(command):
    assert cli.main(["try"]) == 0
    command.act = lambda config: 7
    assert cli.main(["try"]) == 7


def test_no_command_prints_the_help(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 0
        assert capsys.readouterr().out == cli.help_of(None)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"eigengrain {__version__}\n"


@pytest.mark.parametrize(
    ("words", "kind", "facts"),
    [
        (["trian"], UnknownName, {"kind": "command", "name": "trian", "suggestions": ["train"]}),
        (["--verison"], UsageError, {"word": "--verison"}),
        (["-x"], UsageError, {"word": "-x", "suggestions": ()}),
        (["study", "spectrum"], UsageError, {"word": "study"}),
        (["bench", "functional", "--batch", "1"], UsageError, {"word": "bench"}),
    ],
)
def test_words_that_are_not_commands(words, kind, facts, one_line):
    with pytest.raises(kind) as error:
        cli.parse(words)
    assert {name: getattr(error.value, name) for name in facts} == facts
    assert cli.main(words) == 2
    one_line()


def test_former_commands_are_run_from_a_checkout(one_line):
    for name, module in (("study", "studies"), ("bench", "benchmarks")):
        assert cli.main([name]) == 2
        assert f"python -m {module}" in one_line()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("first line\n  second line"), 2, "first line second line"),
        (ArgumentError("steps", "must be below {widths}", 9), 2, "--steps must be below --widths, got 9"),
        (ArgumentError("depth", "is too small"), 2, "depth is too small"),
        (UnknownName("widths", "x", ["y"]), 2, "unknown --widths 'x': choose from: y"),
        (FileError("a.yaml", "it is empty"), 2, "cannot read a.yaml: it is empty"),
        (NonFiniteError("nan"), 1, "nan"),
        (EigenSolverError("failed"), 1, "failed"),
        (FailedError("failed"), 1, "failed"),
    ],
)
def test_an_error_of_the_package_is_one_line_with_the_names_of_options(command, one_line, error, code, line):
    def act(config):
        raise error

    command.act = act
    assert cli.main(["try"]) == code
    assert one_line() == line


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_no_memory_is_not_a_bug(command, one_line, error):
    def act(config):
        raise error

    command.act = act
    assert cli.main(["try"]) == 1
    one_line()


def test_the_option_of_an_argument():
    commands = {each.name: each for each in cli.COMMANDS}
    assert cli.option_name("epochs", commands["train"]) == "--epochs"
    assert cli.option_name("model.reduce", commands["train"]) == "--model.reduce"
    assert cli.option_name("reduce", commands["train"]) == "--model.reduce"
    assert cli.option_name("options", commands["train"]) == "options"  # of the data or of the optimiser
    for name in ("evaluate", "explain", "explore"):  # they call TrainedModel.dataset(name=..., options=...)
        assert cli.option_name("name", commands[name]) == "--data"
        assert cli.option_name("options", commands[name]) == "--data_options"
    assert cli.option_name("epochs", None) == "epochs"


def test_a_layout_keeps_its_lines(command, capsys):
    def act(config):
        raise LayoutError("first line\n  second line")

    command.act = act
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "eigengrain: error: first line\n  second line\n"


def test_a_bug_keeps_its_traceback(command):
    def act(config):
        raise RuntimeError("ours")

    command.act = act
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["try"])


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGTERM, "after epoch 3"), 143)]
)
def test_interrupts_have_their_codes(command, capsys, error, code):
    def act(config):
        raise error

    command.act = act
    assert cli.main(["try"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_sigterm_is_handled_as_before_after_a_command(command):
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["try"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_broken_pipe_has_its_code(command, capfd):
    def act(config):
        raise BrokenPipeError

    command.act = act
    kept = os.dup(1)
    try:
        assert cli.main(["try"]) == 141
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@dataclass(frozen=True)
class Greet:
    """Who is greeted.

    Args:
        name: name of a person.
        loud: in capitals.
    """

    name: str = "world"
    loud: bool = False


def greet(config):
    if config.name == "nobody":
        raise ArgumentError("name", "must be somebody", config.name)
    print(f"hello {config.name}".upper() if config.loud else f"hello {config.name}")


def test_other_programs_have_tables_of_their_own(capsys, tmp_path):
    table = [cli.Command("greet", "print a greeting", Greet, greet, positional={"name": "?"})]
    assert cli.run_commands("python -m greetings", table, ["greet", "birds", "--loud"]) == 0
    assert capsys.readouterr().out == "HELLO BIRDS\n"
    file = tmp_path / "greeting.yaml"
    file.write_text("name: cats\n")
    assert cli.run_commands("python -m greetings", table, ["greet", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "hello cats\n"
    assert cli.run_commands("python -m greetings", table, ["greet", "nobody"]) == 2
    assert capsys.readouterr().err == "greetings: error: --name must be somebody, got 'nobody'\n"
    assert cli.run_commands("python -m greetings", table, ["gret"]) == 2
    assert capsys.readouterr().err.startswith("greetings: error: unknown command 'gret'")
    for words in (["--help"], []):
        with pytest.raises(SystemExit):
            cli.run_commands("python -m greetings", table, words, about="Greetings.")
        assert capsys.readouterr().out.startswith("usage: python -m greetings COMMAND [options]\n\nGreetings.\n")


def test_a_program_without_command_names(capsys):
    table = [cli.Command("", "print a greeting", Greet, greet, positional={"name": "?"})]
    assert cli.run_commands("python -m greet", table, ["birds"]) == 0
    assert capsys.readouterr().out == "hello birds\n"
    assert cli.run_commands("python -m greet", table, ["birds", "--lod"]) == 2
    assert "see 'python -m greet --help'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.run_commands("python -m greet", table, ["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m greet [NAME] [options]\n")


@pytest.mark.parametrize("entry", cli.COMMANDS, ids=lambda c: c.name)
def test_every_command_can_be_run_and_explains_its_options(entry):
    assert callable(entry.function())
    for field in fields(entry.config):
        assert f"        {field.name}: " in entry.config.__doc__, f"{entry.name}: --{field.name} has no help"


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "eigengrain", "demo", "--epohcs", "2"], capture_output=True, text=True)
    line = "eigengrain: error: unknown option '--epohcs': did you mean '--epochs'? (see 'eigengrain demo --help')\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
