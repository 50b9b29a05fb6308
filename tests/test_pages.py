"""HTML pages: structure, accessibility, escaping, and that a page loads nothing."""

import base64
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from jinja2 import UndefinedError

from eigengrain.pages import Cell, TableData, render

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=")
VOID = {"meta", "img", "br"}

#: every macro
TEMPLATE = """\
{% extends "base.html" %}
{% from "parts.html" import commands, figure, table, tiles %}
{% block main %}
<h2>{{ text }}</h2>{{ table(data) }}{{ figure(picture, text, text) }}{{ figure(film, text) }}
<h2>Birds</h2>{{ tiles(birds) }}{{ commands([text, "two"]) }}
{% endblock %}
"""


class Outline(HTMLParser):
    """Opening tags with their attributes; fails for a page whose tags do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    """Render every macro with one text in all places."""
    folder = tmp_path_factory.mktemp("pages")
    template, picture, film = folder / "all.html", folder / "curve.png", folder / "birds.gif"
    template.write_text(TEMPLATE)
    picture.write_bytes(PNG)
    film.write_bytes(b"GIF89a")

    def with_text(text):
        notes = ["± 0.1", f"n = 3,\n{text}"]
        rows = [[Cell(text), Cell("81.5", notes=notes), Cell("NaN", bad=True), Cell("more than a word")]]
        return render(
            template,
            title=text,
            text=text,
            data=TableData(text, ["", "birds", text, "answer"], rows, groups=[(text, 2), ("more", 1)]),
            picture=picture,
            film=film,
            birds=[SimpleNamespace(png=PNG, title=text, lines=[Cell("gap: right"), Cell(text, bad=True)])],
            environment={"torch": text},
        )

    return with_text


@pytest.fixture(scope="module")
def outline(draw):
    return Outline(draw("curves"))


def test_headings_are_in_order_and_the_language_is_declared(outline):
    assert [tag for tag, _ in outline.tags if tag in ("h1", "h2", "h3")] == ["h1", "h2", "h2"]
    assert outline.all("html") == [{"lang": "en"}]
    assert len(outline.all("main")) == len(outline.all("footer")) == len(outline.all("style")) == 1


def test_pictures_are_embedded_and_have_a_text_alternative(outline):
    images = outline.all("img")
    assert [attributes["alt"] for attributes in images] == ["curves"] * 3
    assert [attributes.get("class") for attributes in images] == [None, "film", None]
    embedded = [attributes["src"].split(",") for attributes in images]
    assert [kind for kind, _ in embedded] == [f"data:image/{kind};base64" for kind in ("png", "gif", "png")]
    assert [base64.b64decode(data) for _, data in embedded] == [PNG, b"GIF89a", PNG]


def test_table_headers_have_a_scope_and_columns_their_alignment(outline):
    heads = outline.all("th")
    assert [attributes["scope"] for attributes in heads] == ["colgroup"] * 2 + ["col"] * 4 + ["row"]
    assert [attributes["colspan"] for attributes in heads[:2]] == ["2", "1"]
    assert [attributes.get("class") for attributes in heads[2:6]] == [None, "first", None, "first words"]
    cells = outline.all("td")[1:]  # the first is above the names of the rows
    assert [attributes.get("class") for attributes in cells] == ["first", "bad", "first words"]
    [region] = [attributes for attributes in outline.all("div") if attributes["class"] == "wide"]
    assert (region["role"], region["tabindex"], region["aria-label"]) == ("region", "0", "curves")


def test_cells_show_their_notes(draw):
    assert '<td class="first">81.5<small>± 0.1</small><small>n = 3,\ncurves</small></td>' in draw("curves")


def test_a_table_without_rows_is_well_formed(tmp_path):
    template = tmp_path / "table.html"
    template.write_text('{% from "parts.html" import table %}{{ table(data) }}')
    outline = Outline(render(template, data=TableData("c", ["", "x"], [])))
    assert len(outline.all("tbody")) == 1
    assert outline.all("td") == []


def test_all_values_are_escaped(draw):
    evil = """<b>&"'"""
    text = draw(evil)
    assert evil not in text
    assert text.count("<b>") == 1  # the title of the tile
    assert "<h2>&lt;b&gt;&amp;&#34;&#39;</h2>" in text
    assert Outline(text).tags[-1] == ("footer", {})


def test_a_page_loads_and_runs_nothing(outline, draw):
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in outline.tags}
    assert not [name for _, attributes in outline.tags for name in attributes if name.startswith("on")]
    assert not [word for word in ("http", "url(", "@import") if word in draw("curves")]


def test_a_missing_value_is_an_error():
    with pytest.raises(UndefinedError):
        render("base.html", title="t")


def test_pages_need_neither_torch_nor_matplotlib():
    code = (
        "import sys; from eigengrain.pages import render; render('base.html', title='t', environment={});"
        "sys.exit(bool({'torch', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
