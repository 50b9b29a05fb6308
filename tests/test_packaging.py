"""What is handed out and how it is set up: the source archive, the versions it asks for, and the Python that make takes."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_source_archive_has_what_the_tests_read_and_nothing_of_the_same_name_elsewhere():
    include = SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(pattern.startswith("/") for pattern in include)
    found = {path.name for pattern in include for path in ROOT.glob(pattern[1:])}
    assert found >= {"src", "tests", "docs", "examples", "benchmarks", "requirements", "Makefile"}
    assert found >= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"}


def test_the_lowest_versions_are_those_that_are_asked_for():
    """Of what users need; whoever works on the package has the pinned versions of requirements/dev.txt."""
    extras = SETTINGS["project"]["optional-dependencies"]
    wanted = [
        *SETTINGS["project"]["dependencies"],
        *(each for name in extras if name not in ("dev", "docs") for each in extras[name]),
    ]
    lowest = {name.split("[")[0]: version for name, version in (each.split(">=") for each in wanted)}
    lines = (ROOT / "requirements" / "lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {name.split("[")[0]: version for name, version in pinned.items()}
    assert pinned.pop("torchvision") == f"0.{int(lowest['torch'].split('.')[1]) + 15}.0"  # the one of that torch
    assert set(pinned) == set(lowest)
    for name, version in pinned.items():
        assert (version + ".").startswith(lowest[name] + "."), name


@pytest.mark.parametrize(("version", "fits"), [((2, 7, 18), False), ((3, 10, 13), False), ((3, 11, 0), True)])
def test_make_says_which_python_it_needs_before_it_makes_an_environment(tmp_path, version, fits):
    said = ".".join(map(str, version))
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.version_info, sys.version = {version}, '{said} (main)'\n"
        "exec(sys.argv[2]) if sys.argv[1] == '-c' else sys.exit('goes on')\n"
    )
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert ("goes on" in done.stderr) == fits
    assert (f"Python 3.11 or later is needed, this is {said}: make PYTHON=" in done.stderr) == (not fits)
    assert not (tmp_path / "venv").exists()
