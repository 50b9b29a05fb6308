"""The site builds without warnings, loads nothing from the network, and documents every public name."""

import importlib
import re
import subprocess
import sys

import pytest

from docs.pages import ROOT, blocks, prose
from eigengrain.cli.commands import COMMANDS
from eigengrain.options import options_of

PACKAGES = ("functional", "heads", "models", "data", "training", "explain", "report")


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


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_page(command):
    """With an example of its own and its options."""
    page = ROOT / "docs" / "commands" / f"{command.name}.md"
    examples = [line for block in blocks(page, "console") for line in block.text.splitlines()]
    assert any(f"eigengrain {command.name}" in line for line in examples)
    assert f"```{{command-reference}} {command.name}\n" in page.read_text(encoding="utf-8")
    assert len(prose(page.read_text(encoding="utf-8")).split()) > 30


def test_every_page_of_a_command_is_of_a_command():
    assert {page.stem for page in (ROOT / "docs" / "commands").glob("*.md")} == {command.name for command in COMMANDS}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for needed in ("sphinx", "furo", "myst_nb", "sphinx_copybutton"):
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
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_reference_of_a_command_contains_its_options(site, command):
    text = (site / "commands" / f"{command.name}.html").read_text()
    assert f'href="commands/{command.name}.html"' in (site / "commands.html").read_text()
    for option in options_of(command.config):
        if option.name not in command.positional:
            assert f"--{option.name}" in text
            label = f"{command.name}-{option.name}".lower().translate(str.maketrans("._", "--"))
            assert f'id="{label}"' in text


@pytest.mark.slow
def test_code_can_be_copied_and_outputs_cannot(site):
    text = (site / "quickstart.html").read_text()
    assert "copybutton.js" in text
    assert (site / "_static" / "clipboard.min.js").is_file()
    script = (site / "_static" / "copybutton.js").read_text()
    assert ".highlight pre" in script
    assert ":not(.output)" in script


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    ["learning rate", "initialisation", "ReLU", "fine-tun", "imbalance", "confusion matrix", "HEIC", "calibration"],
)
def test_words_that_people_search_for_are_headings_or_index_terms(site, word):
    headings = [
        text for page in site.rglob("*.html") for text in re.findall(r"<h[1-4]>(.*?)<", page.read_text(), re.DOTALL)
    ]
    terms = re.findall(r"<a href=\"[^\"]*\">([^<]+)</a>", (site / "genindex.html").read_text())
    headings += re.findall(r"<(?:td|li)>([^<]+)", (site / "genindex.html").read_text())
    assert any(word.lower() in text.lower() for text in [*headings, *terms])


@pytest.mark.slow
def test_references_in_docstrings_are_links(site):
    """Unqualified names link to the page of the name, also from other modules."""
    text = (site / "api" / "functional.html").read_text()
    assert re.search(r'href="#eigengrain.functional.spectral_function"[^>]*>\s*<code', text)


@pytest.mark.slow
def test_the_reference_has_no_docstrings_of_builtin_types(site):
    for page in (site / "api").glob("*.html"):
        assert not re.search(r"Built-in (?:im)?mutable sequence|Alias for field number", page.read_text()), page.name
