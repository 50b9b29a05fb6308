"""Spelling is correct and British."""

import json
import re
import subprocess
import sys

import pytest

from docs.pages import NOTEBOOKS, PAGES, ROOT, prose, title

#: correct here: the paper's name for a data set, and an option of matplotlib
RIGHT = "aircrafts,whis"
#: beginnings of American spellings
AMERICAN = (
    *("normaliz", "optimiz", "regulariz", "initializ", "generaliz", "visualiz", "randomiz", "summariz", "recogniz"),
    *("color", "center", "behavior", "neighbor", "favor", "labeled", "labeling", "modeling", "gray ", "analyz", "catalog "),
)


def american(text: str) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z]+ ?", text) if word.lower().startswith(AMERICAN)]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_pages_are_british(page):
    assert american(prose(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=title)
def test_notebooks_are_british(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert american(prose(text)) == []


def test_the_check_works():
    assert american("the colour of a normalised centre") == []
    assert american("Color, normalized") == ["Color", "normalized"]


def test_spelling(tmp_path):
    pytest.importorskip("codespell_lib")
    # outputs of notebooks contain encoded images, so only their text is checked
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        (tmp_path / f"{notebook.stem}.txt").write_text("\n".join("".join(cell["source"]) for cell in cells))
    places = [*PAGES, ROOT / "src", ROOT / "examples", ROOT / "docs" / "extensions", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--ignore-words-list", RIGHT, *map(str, places)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    assert done.returncode == 0
