"""The source archive, the lowest versions of requirements, and the Python that make requires."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_source_archive_contains_what_the_tests_read():
    include = SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(pattern.startswith("/") for pattern in include)
    names = {path.name for pattern in include for path in ROOT.glob(pattern[1:])}
    assert names >= {"src", "tests", "docs", "examples", "benchmarks", "studies", "requirements", "Makefile"}
    assert names >= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"}


def test_the_lowest_versions_are_those_of_the_metadata():
    """Only for what users install; developers use the pinned versions of requirements/dev.txt."""
    extras = SETTINGS["project"]["optional-dependencies"]
    required = [
        *SETTINGS["project"]["dependencies"],
        *(each for name in extras if name not in ("dev", "docs") for each in extras[name]),
    ]
    lowest = {name.split("[")[0]: version for name, version in (each.split(">=") for each in required)}
    lines = (ROOT / "requirements" / "lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {name.split("[")[0]: version for name, version in pinned.items()}
    assert pinned.pop("torchvision") == f"0.{int(lowest['torch'].split('.')[1]) + 15}.0"  # the release for that torch
    assert set(pinned) == set(lowest)
    for name, version in pinned.items():
        assert (version + ".").startswith(lowest[name] + "."), name


@pytest.mark.parametrize(("version", "fits"), [((2, 7, 18), False), ((3, 10, 13), False), ((3, 11, 0), True)])
def test_make_checks_the_python_before_it_creates_an_environment(tmp_path, version, fits):
    text = ".".join(map(str, version))
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.version_info, sys.version = {version}, '{text} (main)'\n"
        "exec(sys.argv[2]) if sys.argv[1] == '-c' else sys.exit('continued')\n"
    )
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert ("continued" in done.stderr) == fits
    assert (text in done.stderr) == (not fits)
    assert not (tmp_path / "venv").exists()
