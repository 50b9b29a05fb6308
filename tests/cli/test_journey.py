"""From a messy folder of photographs to a served model, with no option but the folders."""

import csv
import json
import re
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from benchmarks.explorer_load import served

from data.drawing import write_birds
from eigengrain.cli import main as cli
from eigengrain.cli import train

for package in ("fastapi", "matplotlib", "captum", "onnxruntime"):
    pytest.importorskip(package)

CLASSES = 4


@pytest.fixture(scope="module")
def journey(tmp_path_factory):
    """A folder with the photographs, a training of them, and the photograph that the model is asked about."""
    folder = tmp_path_factory.mktemp("journey")
    images = write_birds(folder / "photos", CLASSES, per_class=30)
    with pytest.MonkeyPatch.context() as patch:  # the recipe for a machine without a network connection
        patch.setattr(train, "_weights_available", lambda backbone: False)
        assert cli.main(["train", str(folder / "photos"), "--out", str(folder / "run")]) == 0
    with (folder / "run/split.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == images
    tested = min(row["path"] for row in rows if row["split"] == "test" and row["path"].endswith(".JPG"))
    (folder / "photo.jpg").write_bytes((folder / "photos" / tested).read_bytes())
    return folder


@pytest.fixture(scope="module")
def answer(journey):
    """The class and the probability of ``predict``."""
    table = journey / "predictions.csv"
    words = ["predict", str(journey / "photo.jpg"), "--checkpoint", str(journey / "run"), "--out", str(table)]
    assert cli.main(words) == 0
    [row] = csv.DictReader(table.read_text(encoding="utf-8-sig").splitlines())
    return row["class_1"], float(row["probability_1"])


def test_the_training_learns_and_reports(journey):
    accuracy = json.loads((journey / "run/results.json").read_text())["scores"]["test_top1"]
    assert accuracy > 1.5 * 100 / CLASSES
    assert (journey / "run/unreadable.txt").read_text().count("broken.jpg") == 1
    page = (journey / "run/report.html").read_text(encoding="utf-8")
    assert f"<b>{accuracy:.1f}" in page
    assert "broken.jpg" in page
    assert cli.main(["report", str(journey / "run"), "--out", str(journey / "again.html")]) == 0
    assert (journey / "again.html").stat().st_size == pytest.approx(len(page.encode()), rel=0.1)


def test_copies_are_on_one_side(journey):
    with (journey / "run/split.csv").open(encoding="utf-8", newline="") as file:
        split = {row["path"]: row["split"] for row in csv.DictReader(file)}
    [copy] = [path for path in split if path.endswith("copy of a bird.jpg")]
    [original] = [path for path in split if re.search(r"garden/IMG 0\.", path)]
    assert split[copy] == split[original]
    assert len({path.split("/")[0] for path in split}) == CLASSES  # folders inside a class belong to it


def test_the_server_gives_the_answer_of_predict(journey, answer):
    with served(str(journey / "run")) as url:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request("POST", "/predict", (journey / "photo.jpg").read_bytes())
        response = connection.getresponse()
        document = json.loads(response.read())
        connection.close()
    assert response.status == 200
    assert (document["class"], document["probability"]) == (answer[0], pytest.approx(answer[1], abs=1e-3))


def test_the_program_of_the_model_card_gives_the_answer_of_predict(journey, answer):
    assert cli.main(["export", str(journey / "run"), "--out", str(journey / "model.onnx")]) == 0
    card = (journey / "run/model/README.md").read_text(encoding="utf-8")
    [program] = [code for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "import onnxruntime" in code]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=journey, capture_output=True, text=True, check=True)
    probability, name = done.stdout.splitlines()[0].split("  ", 1)
    assert (name, float(probability)) == (answer[0], pytest.approx(answer[1], abs=2e-3))
