"""Run every Python block of the pages, and the notebooks.

The blocks of a page share their variables. A block that begins with ``# needs NAME`` is compiled, and run only if that
package is installed; ``# needs a trained model`` and other phrases are compiled only.
"""

import json
import re
from importlib.util import find_spec

import pytest

from docs.pages import NOTEBOOKS, PAGES, ROOT, blocks, title

# shows how the figures were reduced from files that are not in the repository
NEEDS_FILES = {"docs/figures/README.md"}
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """Run in a temporary folder, and undo what an example registers or draws."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from eigengrain.data.datasets import registry as datasets
    from eigengrain.heads import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    monkeypatch.setattr(datasets, "_ENTRIES", {entry.name: entry for entry in datasets.list_entries()})
    yield tmp_path
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize("page", WITH_PYTHON, ids=title)
def test_the_blocks_of_a_page_run(page, temporary_folder):
    names = {"__name__": "example"}
    for block in blocks(page, "python"):
        # in tracebacks lines are those of the page
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        needed = re.match(r"# needs (.+)\n", block.text)
        if title(page) in NEEDS_FILES or (needed and (" " in needed[1] or find_spec(needed[1]) is None)):
            continue
        exec(code, names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=title)
def test_a_notebook_runs(notebook, temporary_folder):
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
