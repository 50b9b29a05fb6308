"""Hostile files against every command that opens such a file: refused in one line, without code, other files or memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli import hostile_files
from cli.hostile_files import BYTES, CASES, SECONDS
from eigengrain.cli.commands import COMMANDS
from eigengrain.options import options_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The document of the child: what each command did with each file."""
    base = tmp_path_factory.mktemp("hostile")
    own = {"HOME": str(base), "MPLCONFIGDIR": str(base), "OMP_NUM_THREADS": "1", "EIGENGRAIN_CACHE": str(base / "cache")}
    child = subprocess.run(
        [sys.executable, hostile_files.__file__, str(base)],
        env={**os.environ, **own, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=500,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout)


def test_there_are_enough_files_and_every_command_opens_some():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 60
    tried = {words[0] for case in CASES for words in case.commands}
    opening = {command.name for command in COMMANDS if any(o.last == "checkpoint" for o in options_of(command.config))}
    assert opening | {"train", "datasets", "doctor", "studies"} <= tried


def test_no_code_ran_and_nothing_else_was_opened(done):
    assert not done["canary"]
    assert done["watched"] == ["open /etc/hostname"]  # the child would have noticed
    assert {tuple(each["seen"]) for each in done["results"]} == {()}


def test_commands_open_what_is_not_hostile(done):
    control = [each for each in done["results"] if each["name"] == "control"]
    assert [each["code"] for each in control] == [0, 0]


def test_time_and_memory_are_bounded(done):
    for each in done["results"]:
        assert each["seconds"] <= SECONDS or each["name"] == "control", each
        assert each["peak"] < BYTES, each


def test_each_file_is_refused_in_one_line(done):
    for each in done["results"]:
        assert not each["crash"], each["crash"]
        lines = each["errors"].splitlines()
        if not each["refused"]:
            assert each["code"] == 0, each
        elif each["code"] == 2:  # the file is refused
            assert len(lines) == 1, each
            assert lines[0].startswith(("eigengrain: error: ", "studies: error: ")), each
            assert len(lines[0]) < 3000, each
        else:  # one line per image that cannot be read, in a list
            assert each["code"] == 1, each
            assert "unreadable" in each["out"] or (len(lines) == 2 and lines[1].startswith("  ")), each
