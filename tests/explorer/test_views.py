"""Charts, HTML and files of a view."""

import csv
import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.explorer import charts, downloads, views
from eigengrain.explorer.perturbing import Progress
from eigengrain.explorer.session import Lens, facts


def rects(svg, kind):
    return [node for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect") if node.get("class") == kind]


@pytest.mark.parametrize("split", [1, 5, 7])
def test_the_spectrum_has_a_bar_for_each_eigenvalue(split):
    values = torch.logspace(0, -5, 8).double()
    svg = charts.spectrum(values, split, torch.arange(8) > 6)
    assert len(rects(svg, "large")) == split
    assert len(rects(svg, "small")) == 8 - split
    heights = [float(bar.get("height")) for bar in (*rects(svg, "large"), *rects(svg, "small"))]
    assert heights == sorted(heights, reverse=True)
    assert svg.count('class="custom"') == 1


def test_zero_eigenvalues_have_no_bar():
    svg = charts.spectrum(torch.tensor([1.0, 0.5, 0.0, 0.0]).double(), 1)
    assert len(rects(svg, "small")) == 1


def test_a_spectrum_of_nothing_is_drawn():
    ET.fromstring(charts.spectrum(torch.zeros(4).double(), 2))


def test_the_loss_curve_ends_where_the_steps_do():
    svg = charts.loss_curve([3.0, float("inf"), 1.0, 2.0], 10)
    assert ET.fromstring(svg).get("aria-label") == "loss after 4 of 10 steps"
    line = next(ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")).get("points").split()
    assert len(line) == 3  # what is not finite has no place
    ET.fromstring(charts.loss_curve([], 10))
    ET.fromstring(charts.loss_curve([1.0], 1))


def test_names_are_escaped(lens):
    evil = Lens("evil", lens.model, lens.images)
    evil.classes = ["<script>alert(1)</script>", '" onload="x', "c"]
    look = evil.upload(lens.images.image(0), "<img src=x onerror=alert(1)>.png")
    answers = evil.answers(look, 5)
    pages = (
        views.picture(evil, look),
        views.predictions(evil, look, answers),
        views.spectrum(evil, look, 5, answers),
        views.maps(evil.explain(look, 5, ["vanilla"]), evil.subsets(5)),
    )
    for page in pages:
        assert "<script" not in page
        assert "<img src=x" not in page
        assert '" onload' not in page


def test_the_page_says_what_the_subsets_say(lens):
    look = lens.look("example-1")
    answers = lens.answers(look, 52, "top:3")
    page = views.predictions(lens, look, answers)
    for answer in answers:
        assert f"{100 * float(answer.probabilities.max()):.1f} %" in page
    assert page.count("<h4>") == 4
    numbers = views.numbers(facts(look.eigenvalues, 52), 64, 52)
    assert f"{facts(look.eigenvalues, 52).s:.4g}" in numbers


@pytest.mark.parametrize("scale", ["row", "each"])
def test_one_picture_a_rule_and_subset(lens, scale):
    explained = lens.explain(lens.look("example-1"), 52, ["vanilla", "deconv", "guided"], "top:1+last:3")
    assert views.maps(explained, lens.subsets(52, "top:1+last:3"), scale).count("<img") == 12


def test_a_perturbation_on_the_page(lens):
    look = lens.look("example-1")
    page = views.perturbed(look, Progress(5, 20, [3.0, 2.0], look.pixels, "stopped"), "small")
    assert "step 5 of 20" in page
    assert 'data-state="stopped"' in page


def test_a_picture_inside_an_address():
    pixels = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
    uri = views.data_uri(pixels)
    import base64

    image = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert np.array_equal(np.asarray(image), pixels.permute(1, 2, 0).numpy())


def test_the_table_has_every_number(lens):
    look = lens.look("example-2")
    answers = lens.answers(look, 40, "top:2")
    rows = list(csv.DictReader(io.StringIO(downloads.table(lens, look, 40, answers))))
    eigenvalues = [float(row["value"]) for row in rows if row["kind"] == "eigenvalue"]
    assert eigenvalues == pytest.approx(look.eigenvalues.tolist())
    assert [row["subset"] for row in rows if row["kind"] == "eigenvalue"].count("large") == 40
    for answer in answers:
        mine = [row for row in rows if row["kind"] == "probability" and row["subset"] == answer.subset]
        assert [row["name"] for row in mine] == lens.classes
        assert [float(row["value"]) for row in mine] == pytest.approx(answer.probabilities.tolist())
    stated = {row["name"]: float(row["value"]) for row in rows if row["kind"] == "fact"}
    assert stated == pytest.approx(facts(look.eigenvalues, 40)._asdict())


def test_the_table_holds_no_formula(lens):
    evil = Lens("=cmd()", lens.model, lens.images)
    look = evil.upload(lens.images.image(0), "+1.png")
    for row in csv.reader(io.StringIO(downloads.table(evil, look, 5, evil.answers(look, 5)))):
        assert not any(cell.startswith(("=", "+", "@")) for cell in row)


def test_the_panel_is_a_png(lens):
    explained = lens.explain(lens.look("example-1"), 52, ["vanilla"])
    image = Image.open(io.BytesIO(downloads.panel(explained)))
    assert image.format == "PNG"
    assert image.width > 600
    assert len(image.convert("RGB").getcolors(1 << 24)) > 500  # there is something on it
