"""Every example of the pages runs as it stands, and so do the notebooks.

The blocks of a page share their names, as a reader would type them one after the other. A block whose first line is
``# needs NAME`` is for a library that this project does not depend on: it is compiled, and run where the library is there.
"""

import json
import re
from importlib.util import find_spec

import pytest

from docs.pages import NOTEBOOKS, PAGES, ROOT, blocks, title

# the page of the figures shows how they were reduced, from files that are not kept
NEEDS_FILES = {"docs/figures/README.md"}
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture
def somewhere_else(tmp_path, monkeypatch):
    """What an example writes does not stay, and what it registers or draws does not reach other tests."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from eigengrain.heads import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    yield tmp_path
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize("page", WITH_PYTHON, ids=title)
def test_the_examples_of_a_page_run(page, somewhere_else):
    names = {"__name__": "example"}
    for block in blocks(page, "python"):
        # in tracebacks lines are those of the page
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        needed = re.match(r"# needs (\w+)\n", block.text)
        if title(page) in NEEDS_FILES or (needed and find_spec(needed[1]) is None):
            continue
        exec(code, names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=title)
def test_a_notebook_runs(notebook, somewhere_else):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    names = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=title)
def test_a_notebook_was_run_from_top_to_bottom_without_errors(notebook):
    code = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output.get("output_type") for cell in code for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds


def test_there_are_examples():
    assert {"README.md", "docs/quickstart.md", "docs/libraries.md"} <= {title(page) for page in WITH_PYTHON}
    assert [path.name for path in NOTEBOOKS] == ["covariance_head.ipynb", "what_eigenvalues_see.ipynb"]
    assert (ROOT / "docs" / "conf.py").is_file()
