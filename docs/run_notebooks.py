"""Run the notebooks and keep their outputs in them, without times or versions: python docs/run_notebooks.py [NAME …]"""

import base64
import io
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

FOLDER = Path(__file__).parent / "notebooks"


def reduced(png: str) -> str:
    """A picture in 256 colours, a fraction as large."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    file = io.BytesIO()
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.metadata.pop("execution", None)
        cell.id = f"cell-{number}"
        # what libraries say about the notebook's own set-up is of no interest to a reader
        kept = [output for output in cell.get("outputs", []) if "IProgress" not in output.get("text", "")]
        for output in kept:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = reduced(output.data["image/png"])
        if "outputs" in cell:
            cell.outputs = kept
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            print(path.name)
            run(path)
