"""The site builds without warnings, loads nothing from the network, and documents every public name."""

import importlib
import re
import subprocess
import sys

import pytest

from docs.pages import ROOT

PACKAGES = ("functional", "heads", "models", "data", "training", "explain")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    text = (ROOT / "docs" / "api" / f"{package}.md").read_text(encoding="utf-8")
    shown = {name.split(".")[-1] for name in re.findall(r"auto(?:function|class|data|exception):: (\S+)", text)}
    assert set(importlib.import_module(f"eigengrain.{package}").__all__) <= shown


def test_every_name_of_the_reference_exists():
    for package in PACKAGES:
        module = ""
        for line in (ROOT / "docs" / "api" / f"{package}.md").read_text(encoding="utf-8").splitlines():
            module = line.split()[-1] if "currentmodule::" in line else module
            match = re.search(r"auto(?:function|class|data|exception):: (\S+)", line)
            if match:
                path = match[1] if "." in match[1] else f"{module}.{match[1]}"
                owner, _, name = path.rpartition(".")
                assert hasattr(importlib.import_module(owner), name), path


def test_options_in_tables_are_set_as_code(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    tables = importlib.import_module("measured_tables")
    table = tables.table(["result"], [["84.8 % (with --data.val_fraction 0.1), --compile --model.weights FILE"]])
    [body] = table.findall(tables.nodes.tbody)
    assert [code.astext() for code in body.findall(tables.nodes.literal)] == [
        "--data.val_fraction 0.1",
        "--compile",
        "--model.weights FILE",
    ]
    assert body.astext() == "84.8 % (with --data.val_fraction 0.1), --compile --model.weights FILE"


def test_make_rebuilds_every_page():
    """The help of the commands and the recipes can change without a change of their pages."""
    output = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [build] = [line.split() for line in output.splitlines() if "sphinx-build" in line]
    assert {"-E", "-a", "-W"} <= set(build)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for needed in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|link|iframe|source)[^>]*(?:src|href)=\"((?:https?:)?//[^\"]*)\"", page.read_text()
        )
        assert loaded == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), style.name


@pytest.mark.slow
def test_formulas_have_a_local_mathjax(site):
    text = (site / "mathematics.html").read_text()
    [script] = re.findall(r"src=\"([^\"?]*mathjax[^\"?]*\.js)", text)
    assert (site / script).is_file()
    assert text.count('class="math notranslate') > 40


@pytest.mark.slow
def test_the_command_reference_contains_the_help(site):
    text = (site / "commands.html").read_text()
    for words in ("eigengrain train", "--optimiser.classifier_lr_scale", "eigengrain doctor", "--split_at"):
        assert words in text


@pytest.mark.slow
def test_references_in_docstrings_are_links(site):
    """Unqualified names link to the page of the name, also from other modules."""
    text = (site / "api" / "functional.html").read_text()
    assert re.search(r'href="#eigengrain.functional.spectral_function"[^>]*>\s*<code', text)


@pytest.mark.slow
def test_the_reference_has_no_docstrings_of_builtin_types(site):
    for page in (site / "api").glob("*.html"):
        assert not re.search(r"Built-in (?:im)?mutable sequence|Alias for field number", page.read_text()), page.name
