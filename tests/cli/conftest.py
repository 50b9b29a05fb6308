import sys
import types
from dataclasses import dataclass

import pytest

from eigengrain.cli import main as cli
from eigengrain.options import check, setting


@dataclass(frozen=True)
class Options:
    """Options of the command ``try``.

    Args:
        steps: number of steps.
        widths: one or several widths.
    """

    steps: int = setting(3, least=0)
    widths: list[int] | int = 1

    def __post_init__(self):
        check(self)


@pytest.fixture
def command(monkeypatch):
    """A command ``try`` that appends its config to ``command.calls`` and then calls ``command.act``."""
    module = types.ModuleType("command_of_a_test")
    module.calls = []
    module.act = lambda config: None

    def run(config):
        module.calls.append(config)
        return module.act(config)

    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = cli.Command("try", "of a test", Options, "command_of_a_test:run")
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, entry))
    return module


@pytest.fixture
def one_line(capsys):
    """A function that returns the error message: the only line on stderr, with nothing on stdout."""

    def read() -> str:
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("eigengrain: error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return err.removeprefix("eigengrain: error: ").strip()

    return read
