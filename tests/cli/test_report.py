"""The report of a training: every number of the page against a calculation of its own, hostile names, stopped runs."""

import base64
import hashlib
import io
import json
import shlex
import shutil
import signal
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain.cli import main as cli
from eigengrain.cli import report
from eigengrain.cli.report import Report
from eigengrain.data import ImageSet
from eigengrain.errors import UnfinishedWarning
from eigengrain.models import create_model
from eigengrain.report import Measured, class_rows, confused_pairs, render_page
from eigengrain.report.examples import PAIRS, worst_mistakes
from eigengrain.report.page import train_command
from eigengrain.text import wilson_interval
from eigengrain.training import loop, open_run
from eigengrain.training.run_folder import TrainedModel

CLASSES = ["<img src=x onerror=alert(1)>", "a & b\"'", "{{ 7 * 7 }}"]
OPTIONS = ["--model.backbone", "test_resnet", "--model.head", "mpncov", "--model.reduce", "4", "--model.last_stride", "1"]
OPTIONS += ["--data.name", "folder", "--data.transforms.kind", "none", "--workers", "0", "--device", "cpu"]
OPTIONS += ["--batch_size", "8", "--optimiser.lr", "0.05"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Noise in which one colour is stronger, in folders with hostile names; one test image is also a training image."""
    folder, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 8)):
        for k, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 200, (40, 32, 3))
                pixels[..., k] += generator.integers(-10, 50)
                file = folder / split / name / f"<b onclick=x>{number}&.png"
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file)
    shutil.copy(folder / "train" / CLASSES[0] / "<b onclick=x>0&.png", folder / "test" / CLASSES[0] / "copy.png")
    return folder


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "mine"
    words = [*OPTIONS, "--data.root", str(photos), "--data.val_fraction", "0.3", "--epochs", "2", "--out", str(out)]
    assert cli.main(["train", *words]) == 0
    return out


class Page(HTMLParser):
    """Tags, tables (rows of cells), and the text of a page by class of the element."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.tables, self.lines, self.scripts = [], [], {}, []
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("img", "meta", "br"):
            self._open.append((tag, dict(attrs).get("class", "")))

    def handle_endtag(self, tag):
        while self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        kinds = [kind for kind, _ in self._open]
        if "script" in kinds:
            self.scripts.append(data)
        elif "td" in kinds or "th" in kinds:
            self.tables[-1][-1][-1] += data
        for tag, name in self._open:
            if name or tag in ("dd", "h4", "b"):
                self.lines.setdefault(name or tag, []).append(data)


@pytest.fixture(scope="module")
def page(trained):
    return Page((trained / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def truth(trained):
    """Probabilities, labels and files of the test images, one image at a time."""
    run = open_run(trained)
    dataset = run.dataset("test")
    with torch.inference_mode():
        logits = torch.cat([run.model(dataset[i][0][None]) for i in range(len(dataset))]).double()
    return logits.numpy(), np.array(dataset.labels), dataset, run.model.temperature


def softmax(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def share(value):
    return f"{100 * value:.1f}\u00a0%"


def test_the_headline_is_the_result_of_the_training(trained, page, truth):
    results = json.loads((trained / "results.json").read_text())
    logits, labels, *_ = truth
    right = int((logits.argmax(1) == labels).sum())
    assert results["scores"]["test_top1"] == pytest.approx(100 * right / 25)
    headline = "".join(page.lines["headline"])
    assert headline.startswith(share(results["scores"]["test_top1"] / 100))
    assert "25 test images" in headline
    low, high = binomtest(right, 25).proportion_ci(method="wilson")
    text = (trained / "report.html").read_text(encoding="utf-8")
    assert f"{share(low)} and {share(high)}" in text


@pytest.mark.parametrize(("right", "samples"), [(0, 5), (5, 5), (3, 8), (900, 1000)])
def test_the_interval_is_wilsons(right, samples):
    expected = binomtest(right, samples).proportion_ci(method="wilson")
    assert wilson_interval(right, samples) == pytest.approx(expected, abs=1e-6)


def test_precision_and_recall_of_the_table(page, truth):
    logits, labels, *_ = truth
    answers = logits.argmax(1)
    header, *rows = page.tables[0]
    assert header[:5] == ["class", "recall", "precision", "F1", "images"]
    assert sorted(row[0] for row in rows) == sorted(CLASSES)
    scores = []
    for name, recall, precision, f1, images, other in rows:
        k = sorted(CLASSES).index(name)
        hits = sum((answers == k) & (labels == k))
        expected = hits / sum(labels == k), hits / sum(answers == k) if sum(answers == k) else None
        assert recall == share(expected[0])
        assert precision == ("–" if expected[1] is None else share(expected[1]))
        assert images == str(sum(labels == k))
        scores.append(2 * hits / (sum(labels == k) + sum(answers == k)))
        assert f1 == share(scores[-1])
        wrong = [int(sum((labels == k) & (answers == j))) * (j != k) for j in range(3)]
        assert other == (f"{sorted(CLASSES)[int(np.argmax(wrong))]} ({max(wrong)} of {images})" if max(wrong) else "–")
    assert scores == sorted(scores)


def test_the_class_that_is_found_least_often(page, truth):
    logits, labels, *_ = truth
    found = [(logits.argmax(1) == labels)[labels == k].mean() for k in range(3)]
    k = int(np.argmin(found))
    line = next(line for line in page.lines["dd"] if "least often" in line)
    assert sorted(CLASSES)[k] in line
    assert share(found[k]) in line


def test_the_confusion_matrix_and_the_pairs(page, truth):
    logits, labels, dataset, _ = truth
    answers = logits.argmax(1)
    counts = [[int(sum((labels == i) & (answers == j))) for j in range(3)] for i in range(3)]
    _, *rows = page.tables[1]
    assert [[int(cell or 0) for cell in row[1:]] for row in rows] == counts
    wrong = sorted((-counts[i][j], i, j) for i in range(3) for j in range(3) if i != j and counts[i][j])
    names = dataset.classes
    headings = [f"{names[i]} taken for {names[j]}: {-n} of {sum(counts[i])}" for n, i, j in wrong]
    assert page.lines["h4"] == headings[:PAIRS]


def test_the_worst_mistakes(page, truth, trained):
    logits, labels, dataset, temperature = truth
    p = softmax(logits / temperature)
    wrong = [i for i in np.argsort(-p.max(1), kind="stable") if p[i].argmax() != labels[i]]
    assert wrong
    named = [text for text in page.lines["bad"] if "%" in text][: len(wrong)]
    assert named == [f"{dataset.classes[p[i].argmax()]}, {share(p[i].max())}" for i in wrong[:12]]
    pictures = [attributes for tag, attributes in page.tags if tag == "img" and attributes.get("title")]
    assert {attributes["title"] for attributes in pictures} <= {dataset.path(i).name for i in range(len(dataset))}
    maps = [attributes for tag, attributes in page.tags if tag == "img" and attributes["alt"].startswith("map of")]
    assert len(maps) == min(len(wrong), 12)
    for attributes in maps:
        image = Image.open(io.BytesIO(base64.b64decode(attributes["src"].split(",")[1])))
        assert np.asarray(image).std() > 10  # not one colour


def test_tokens_of_no_place_have_no_maps(trained, truth):
    logits, labels, dataset, _ = truth
    measured = Measured(dataset, torch.from_numpy(logits), torch.from_numpy(labels), 1.0, 0)
    run = open_run(trained)
    for head, count in {"gap": 1, "token": 0}.items():
        other = replace(run, model=create_model("test_vit", head, num_classes=3, img_size=(40, 32), patch_size=8))
        [mistake] = worst_mistakes(other, measured, 1)
        assert (mistake["photo"].map is not None) == bool(count)


def test_the_calibration_errors(trained, truth, capsys, tmp_path):
    logits, labels, _, temperature = truth
    words = ["--workers", "0", "--check_images", "false", "--out", str(tmp_path / "page.html"), "--json"]
    assert cli.main(["report", str(trained), *words]) == 0
    document = json.loads(capsys.readouterr().out)
    errors = {"calibration_error": softmax(logits), "calibration_error_with_temperature": softmax(logits / temperature)}
    for key, p in errors.items():
        bins = np.ceil(p.max(1) * 15).astype(int)
        gaps = [abs((p.max(1) - (p.argmax(1) == labels))[bins == b].sum()) for b in set(bins)]
        assert document[key] == pytest.approx(sum(gaps) / len(labels), abs=1e-6)
        assert share(document[key]) in (trained / "report.html").read_text(encoding="utf-8")
    assert document["temperature"] == temperature
    assert document["file"] == str(tmp_path / "page.html")


def test_hostile_names_are_text(page, photos):
    allowed = "html head meta title style body main h1 h2 h3 h4 p b dl dt dd div img figure figcaption section span small"
    allowed += " table caption thead tbody tr th td code pre script footer ul li"
    assert {tag for tag, _ in page.tags} <= set(allowed.split())
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert {row[0] for row in page.tables[0][1:]} == set(CLASSES)  # braces too: names are not templates
    # the only script is that of the package, and the page allows no other
    [policy] = [attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256("".join(page.scripts).encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_the_page_is_one_small_file(page, trained):
    text = (trained / "report.html").read_text(encoding="utf-8")
    assert len(text) < 5_000_000
    assert "://" not in text
    sources = [attributes["src"] for _, attributes in page.tags if "src" in attributes]
    assert len(sources) > 4
    assert all(source.startswith(("data:image/png;base64,", "data:image/jpeg;base64,")) for source in sources)


def test_an_image_in_two_splits_is_reported(page, photos):
    [problem] = page.tables[-1][1:]
    assert problem[:2] == [str(photos / "test" / CLASSES[0] / "copy.png"), "duplicate"]
    assert problem[3] == "test"
    assert any("1 with a problem" in text for text in page.lines["bad"])
    _, *splits = page.tables[-2]
    assert splits[0][0] == "train"
    assert splits[-1][:2] == ["test", "25"]


def test_the_command_repeats_the_training(trained, tmp_path):
    words = shlex.split(train_command(open_run(trained).config))
    assert words[:2] == ["eigengrain", "train"]
    again = tmp_path / "again"
    assert cli.main([*words[1:], "--out", str(again), "--report", "false"]) == 0
    first, second = (json.loads((run / "results.json").read_text())["scores"] for run in (trained, again))
    assert first == second
    assert not (again / "report.html").exists()


def test_a_stopped_run_has_a_report(photos, tmp_path, monkeypatch, capsys):
    original = loop.train

    def stopped(config, *rest):
        return original(config, None, lambda epoch, batch, loss: signal.raise_signal(signal.SIGINT) if epoch == 1 else None)

    monkeypatch.setattr(loop, "train", stopped)
    assert cli.main(["train", *OPTIONS, "--data.root", str(photos), "--epochs", "3", "--out", str(tmp_path)]) == 130
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "headline" not in page.lines
    charts = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(charts) == 3
    with pytest.warns(UnfinishedWarning):
        report.run(Report(str(tmp_path), workers=0, check_images=False))
    with pytest.warns(UnfinishedWarning):
        run = open_run(tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    with torch.inference_mode():
        right = sum(
            int(run.model(run.dataset("test")[i][0][None]).argmax()) == run.dataset("test").labels[i] for i in range(25)
        )
    assert page.lines["headline"][0] == share(right / 25)


def test_a_folder_that_does_not_exist_is_not_created(tmp_path, capsys):
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        assert cli.main(["report", str(tmp_path / name)]) == 2
        assert f"cannot read {tmp_path / name}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_model_folder_of_a_run_has_its_report_beside_it(trained):
    page = trained / "report.html"
    before = page.read_bytes()
    try:
        assert cli.main(["report", str(trained / "model"), "--mistakes", "0", "--check_images", "false"]) == 0
        assert not (trained / "model/report.html").exists()
        assert page.read_bytes() != before
    finally:
        page.write_bytes(before)


def test_without_matplotlib_and_captum(trained, tmp_path, monkeypatch):
    for module in ("page", "examples"):
        monkeypatch.setattr(f"eigengrain.report.{module}.find_spec", lambda name: None)
    report.run(Report(str(trained), workers=0, check_images=False, out=str(tmp_path / "plain.html")))
    page = Page((tmp_path / "plain.html").read_text(encoding="utf-8"))
    kinds = {attributes["src"].split(";")[0] for tag, attributes in page.tags if tag == "img"}
    assert kinds == {"data:image/jpeg"}  # photographs, and no charts
    assert len(page.tables[0]) == 4


class Grey(ImageSet):
    def image(self, index):
        return Image.new("RGB", (50, 40), (index % 256,) * 3)


def test_many_classes_have_a_picture_and_numbers(tmp_path):
    classes, labels = [f"species {k}" for k in range(200)], torch.arange(200).repeat(5)
    logits = torch.eye(200, dtype=torch.float64)[(labels + (torch.arange(1000) % 7 == 0)) % 200] * 9
    dataset = Grey("grey", "test", classes, labels.tolist())
    trained = TrainedModel(create_model("test_resnet", head="gap", num_classes=200))
    measured = Measured(dataset, logits, labels, 2.0, 50)
    text = render_page(tmp_path, trained, measured, data="grey", mistakes=0, check_images=False)
    page = Page(text)
    assert len(text) < 5_000_000
    header, *rows = page.tables[0]
    assert [row[header.index("number")] for row in rows if row[0] == "species 41"] == ["42"]
    assert len(page.tables) == 2  # no matrix of numbers
    [picture] = [attributes["src"] for _, attributes in page.tags if "Confusion matrix" in attributes.get("alt", "")]
    assert Image.open(io.BytesIO(base64.b64decode(picture.split(",")[1]))).width > 800


def test_classes_without_images_or_answers():
    rows = class_rows(torch.tensor([[3, 1, 0], [0, 0, 0], [2, 0, 0]]), ["a", "b", "c"])
    assert [row.name for row in rows] == ["c", "a", "b"]
    assert (rows[0].recall, rows[0].f1, rows[0].taken_for, rows[0].times) == (0, 0, "a", 2)
    assert np.isnan(rows[0].precision)
    assert np.isnan(rows[2].recall)
    assert rows[2].precision == 0
    assert confused_pairs(torch.tensor([[3, 1, 0], [0, 0, 0], [2, 0, 0]]), 9) == [(2, 0), (0, 1)]
    assert confused_pairs(torch.eye(3, dtype=torch.long), 9) == []
