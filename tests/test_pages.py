"""The page that reports are written on: what is in it, that nothing leaks into it, and that everyone can read it."""

import base64
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from eigengrain.pages import Cell, Commands, Facts, Figure, Gallery, Heading, TableData, Tile, page

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=")
VOID = {"meta", "img", "br"}


class Outline(HTMLParser):
    """Opening tags with their attributes; refuses a page whose tags do not close in order."""

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


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "curve.png"
    path.write_bytes(PNG)
    return path


@pytest.fixture
def outline(picture):
    rows = [
        [Cell("gap"), Cell("81.5", notes=["± 0.1", "n = 3,\n1 undefined"]), Cell("NaN", bad=True), Cell("more than a word")]
    ]
    table = TableData("Accuracy", ["", "birds", "cars", "said"], rows, groups=[("sets", 2), ("more", 1)])
    tiles = Gallery([Tile(PNG, "a bird", [Cell("gap: right"), Cell("mpncov: wrong", bad=True)])])
    figure = Figure(picture, "a curve that rises", "The curve")
    parts = [Facts({"Model": "small"}), Heading("First"), picture, "Text.", table, Heading("Second"), figure, tiles]
    return Outline(page("Title", [*parts, Commands(["one", "two"])], {"torch": "2"}))


def test_tags_close_and_headings_are_in_order(outline):
    assert [tag for tag, _ in outline.tags if tag in ("h1", "h2", "h3")] == ["h1", "h2", "h2"]
    assert outline.all("html") == [{"lang": "en"}]
    assert len(outline.all("main")) == len(outline.all("footer")) == len(outline.all("style")) == 1


def test_every_picture_is_inside_and_said_in_words(outline):
    said = [attributes["alt"] for attributes in outline.all("img")]
    assert said == ["First", "a curve that rises", "a bird"]  # a bare path is described by its heading
    for attributes in outline.all("img"):
        kind, data = attributes["src"].split(",")
        assert (kind, base64.b64decode(data)) == ("data:image/png;base64", PNG)


def test_every_head_of_a_table_says_what_it_is_the_head_of(outline):
    heads = outline.all("th")
    assert [attributes["scope"] for attributes in heads] == ["colgroup"] * 2 + ["col"] * 4 + ["row"]
    assert [attributes["colspan"] for attributes in heads[:2]] == ["2", "1"]
    assert [attributes.get("class") for attributes in heads[2:6]] == [None, "first", None, "first words"]
    [region] = [attributes for attributes in outline.all("div") if attributes["class"] == "wide"]
    assert (region["role"], region["tabindex"], region["aria-label"]) == ("region", "0", "Accuracy")


def test_cells_have_their_marks_and_small_lines():
    rows = [[Cell("a"), Cell("1", notes=["± 2", "n = 3,\n1 undefined"])], [Cell("b", bad=True), Cell("2", bad=True)]]
    text = page("t", [TableData("c", ["", "x"], rows)], {})
    assert "<td>1<small>± 2</small><small>n = 3,<br>1 undefined</small></td>" in text
    assert '<tr><th scope="row" class="bad">b</th><td class="bad">2</td></tr>' in text


def test_a_table_may_have_no_rows():
    assert "<tbody></tbody>" in page("t", [TableData("c", ["", "x"], [])], {})


def test_everything_that_is_shown_is_escaped(picture):
    evil = '<b>&"'
    tiles = Gallery([Tile(PNG, evil, [Cell(evil, bad=True)])])
    table = TableData(evil, [evil, evil], [[Cell(evil), Cell(evil, notes=[evil])]], groups=[(evil, 1)])
    parts = [evil, Heading(evil), picture, Facts({evil: evil}), table, Commands([evil]), Figure(picture, evil, evil), tiles]
    text = page(evil, parts, {evil: evil})
    assert evil not in text
    assert text.count("<b>") == 1  # the title of the tile
    assert "<h2>&lt;b&gt;&amp;&quot;</h2>" in text
    Outline(text)


def test_the_page_loads_and_runs_nothing(outline, picture):
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in outline.tags}
    assert not [name for _, attributes in outline.tags for name in attributes if name.startswith("on")]
    text = page("t", [picture], {})
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_writing_a_page_needs_neither_torch_nor_matplotlib():
    code = "import sys, eigengrain.pages; sys.exit(bool({'torch', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
