"""The charts, HTML and files of a view."""

import base64
import csv
import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.explorer import render
from eigengrain.explorer.perturbation import Progress, State
from eigengrain.explorer.session import Session, spectrum_facts

SVG = "{http://www.w3.org/2000/svg}"


def parse(fragment):
    """A fragment of the page as an XML element."""
    return ET.fromstring(f"<div>{fragment.replace('<br>', '<br/>')}</div>")


def shapes(svg, tag, kind):
    return [node for node in parse(svg).iter(SVG + tag) if node.get("class") == kind]


@pytest.mark.parametrize("split", [1, 5, 7])
def test_the_spectrum_has_one_bar_per_eigenvalue(split):
    values = torch.logspace(0, -5, 8).double()
    svg = render.spectrum_chart(values, split, torch.arange(8) > 6)
    assert len(shapes(svg, "rect", "large")) == split
    assert len(shapes(svg, "rect", "small")) == 8 - split
    heights = [float(bar.get("height")) for kind in ("large", "small") for bar in shapes(svg, "rect", kind)]
    assert heights == sorted(heights, reverse=True)
    assert len(shapes(svg, "circle", "custom")) == 1


def test_zero_eigenvalues_have_no_bar():
    svg = render.spectrum_chart(torch.tensor([1.0, 0.5, 0.0, 0.0]).double(), 1)
    assert len(shapes(svg, "rect", "small")) == 1


def test_a_spectrum_of_zeros_is_drawn():
    assert not shapes(render.spectrum_chart(torch.zeros(4).double(), 2), "rect", "large")


def test_the_loss_curve():
    svg = render.loss_chart([3.0, float("inf"), 1.0, 2.0], 10)
    (curve,) = shapes(svg, "polyline", "curve loss")
    assert len(curve.get("points").split()) == 3  # without the infinite loss
    assert not shapes(render.loss_chart([], 10), "polyline", "curve loss")
    assert shapes(render.loss_chart([1.0], 1), "polyline", "curve loss")


def test_names_are_escaped(session):
    evil = Session("evil", session.model, session.images)
    evil.classes = ["<script>alert(1)</script>", '" onload="x', "c"]
    analysis = evil.upload(session.images.image(0), "<img src=x onerror=alert(1)>.png")
    predictions = evil.predict(analysis, 5)
    failed = Progress(1, 2, [1.0], analysis.pixels, State.FAILED, "<script>")
    fragments = (
        render.answers([(evil, analysis)]),
        render.mistakes(evil),
        render.predictions(evil, analysis, predictions),
        render.spectrum(evil, analysis, 5, predictions),
        render.maps(evil.explain(analysis, list(evil.subsets(5).values())), evil.subsets(5)),
        render.perturbation(analysis, failed, "small"),
    )
    for fragment in fragments:
        assert not list(parse(fragment).iter("script"))
        assert not any("onload" in node.attrib or node.get("src") == "x" for node in parse(fragment).iter())


def test_the_numbers_of_the_predictions(session):
    analysis = session.analyse("example-1")
    predictions = session.predict(analysis, 52, "top:3")
    root = parse(render.predictions(session, analysis, predictions))
    cards = {node.get("data-subset"): node for node in root.iter("div") if node.get("data-subset")}
    assert list(cards) == ["all", "top:52", "last:12", "top:3"]
    for prediction in predictions:
        shares = [node.text for node in cards[prediction.subset].iter("span") if node.get("class") == "share"]
        assert shares[0] == f"{100 * float(prediction.probabilities.max()):.1f} %"
    facts = spectrum_facts(analysis.eigenvalues, 52)
    assert parse(render.numbers(facts, 64, 52)).find(".//b").text == f"{facts.s:.4g}"


def test_the_answer_comes_with_its_doubt_and_beside_that_of_another_model(session, plain_session, monkeypatch):
    analysis = session.analyse("example-1")
    prediction, _ = session.answer(analysis)
    for doubt in ("", "unsure", "none of these"):
        monkeypatch.setattr(session, "answer", lambda _, doubt=doubt: (prediction, doubt))
        root = parse(render.answers([(session, analysis), (plain_session, plain_session.analyse("example-1"))]))
        first = "".join(next(root.iter("h2")).itertext())
        assert [node.get("data-model") for node in root.iter("section")] == ["seb", "plain"]
        assert first.lower().startswith(doubt or session.classes[prediction.predicted])
    assert len(list(root.iter("img"))) == 4


def test_the_numbers_have_tooltips(session):
    root = parse(render.numbers(spectrum_facts(session.analyse("example-1").eigenvalues, 40), 64, 40))
    tiles = [node for node in root.iter("div") if node.get("class") == "tile"]
    assert [tile.find("span").text for tile in tiles[:3]] == ["s", "κ", "effective rank"]
    assert all(tile.get("tabindex") == "0" and tile.find("p").get("role") == "tooltip" for tile in tiles)
    assert len(tiles) == 5


@pytest.mark.parametrize("scale", ["row", "each"])
def test_one_picture_per_rule_and_subset(session, scale):
    roles = session.subsets(52, "top:1+last:3")
    explained = session.explain(session.analyse("example-1"), list(roles.values()), ["smooth", "vanilla", "guided"])
    root = parse(render.maps(explained, roles, scale))
    assert len(list(root.iter("img"))) == len([node for node in root.iter("button") if node.get("class") == "zoom"]) == 12


def test_the_progress_of_a_perturbation(session):
    analysis = session.analyse("example-1")
    root = parse(render.perturbation(analysis, Progress(5, 20, [3.0, 2.0], analysis.pixels, State.STOPPED), "small"))
    note = root.find("p")
    assert (note.get("data-step"), note.get("data-state")) == ("5", "STOPPED")
    assert len(list(root.iter("img"))) == 3


def test_a_picture_as_a_data_uri():
    pixels = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
    encoded = render.data_uri(pixels).split(",")[1]
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert np.array_equal(np.asarray(image), pixels.permute(1, 2, 0).numpy())


def test_the_table_contains_every_number(session):
    analysis = session.analyse("example-2")
    predictions = session.predict(analysis, 40, "top:2")
    rows = list(csv.DictReader(io.StringIO(render.table_csv(session, analysis, 40, predictions))))
    eigenvalues = [float(row["value"]) for row in rows if row["kind"] == "eigenvalue"]
    assert eigenvalues == pytest.approx(analysis.eigenvalues.tolist())
    assert [row["subset"] for row in rows if row["kind"] == "eigenvalue"].count("large") == 40
    for prediction in predictions:
        mine = [row for row in rows if row["kind"] == "probability" and row["subset"] == prediction.subset]
        assert [row["name"] for row in mine] == session.classes
        assert [float(row["value"]) for row in mine] == pytest.approx(prediction.probabilities.tolist())
    facts = {row["name"]: float(row["value"]) for row in rows if row["kind"] == "fact"}
    assert facts == pytest.approx(spectrum_facts(analysis.eigenvalues, 40)._asdict())


def test_the_table_contains_no_formula(session):
    evil = Session("=cmd()", session.model, session.images)
    analysis = evil.upload(session.images.image(0), "+1.png")
    for row in csv.reader(io.StringIO(render.table_csv(evil, analysis, 5, evil.predict(analysis, 5)))):
        assert not any(cell.startswith(("=", "+", "@")) for cell in row)


def test_the_panel_is_a_png(session):
    explained = session.explain(session.analyse("example-1"), ["all", "top:52"], ["smooth", "vanilla"])
    image = Image.open(io.BytesIO(render.panel_png(explained)))
    assert image.format == "PNG"
    assert image.width > 600
    assert len(image.convert("RGB").getcolors(1 << 24)) > 500  # it is not empty
