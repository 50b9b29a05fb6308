"""One self-contained page for a study: text, tables, pictures, examples, commands, and where it was measured."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.markup import escape as plain
from rich.table import Table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin: 2.2rem 0 .4rem; font-size: 1.25rem; }
img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0 0 2rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.bad { color: #b03000; font-weight: 700; }
pre { background: #f5f5f5; padding: .7rem 1rem; overflow-x: auto; font-size: .85rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; font-size: .8rem; line-height: 1.35; }
figure img { width: 100%; image-rendering: pixelated; }
figcaption b { display: block; margin-bottom: .2rem; }
figcaption span { display: block; }
footer { color: #666; font-size: .85rem; margin-top: 2rem; border-top: 1px solid #ddd; }
"""


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and whether it should catch the eye."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class TableData:
    """A table before it is drawn: the first column names the rows."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Heading:
    """Of the parts that follow."""

    text: str


@dataclass(frozen=True)
class Commands:
    """Lines to type."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Tile:
    """A small PNG picture with its title and lines under it."""

    png: bytes
    title: str
    lines: Sequence[Cell]


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side."""

    tiles: Sequence[Tile]


#: a paragraph, the path of a PNG picture, or one of the above
Part = str | Path | Heading | TableData | Commands | Gallery


def _marked(cell: Cell, tag: str) -> str:
    return f'<{tag} class="bad">{escape(cell.text)}</{tag}>' if cell.bad else f"<{tag}>{escape(cell.text)}</{tag}>"


def _table(data: TableData) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in data.heads)
    body = "\n".join(f"<tr>{''.join(_marked(cell, 'td') for cell in row)}</tr>" for row in data.rows)
    table = f"<table><caption>{escape(data.caption)}</caption>\n<tr>{head}</tr>\n{body}\n</table>"
    return f'<div class="wide">{table}</div>'


def _image(png: bytes, said: str) -> str:
    return f'<img alt="{escape(said)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _tile(tile: Tile) -> str:
    lines = "".join(_marked(line, "span") for line in tile.lines)
    caption = f"<figcaption><b>{escape(tile.title)}</b>{lines}</figcaption>"
    return f"<figure>{_image(tile.png, tile.title)}{caption}</figure>"


def _html(part: Part) -> str:
    if isinstance(part, Path):
        return _image(part.read_bytes(), part.stem)
    if isinstance(part, TableData):
        return _table(part)
    if isinstance(part, Heading):
        return f"<h2>{escape(part.text)}</h2>"
    if isinstance(part, Commands):
        return f"<pre>{escape(chr(10).join(part.lines))}</pre>"
    if isinstance(part, Gallery):
        return f'<div class="tiles">{"".join(map(_tile, part.tiles))}</div>'
    return f"<p>{escape(part)}</p>"


def page(title: str, parts: Sequence[Part], environment: Mapping[str, object]) -> str:
    """The page as HTML, with its pictures inside it: one file to keep or to send, that loads nothing and runs nothing.

    Example:
        >>> html = page("Title", ["Read it so.", TableData("t", ["a"], [[Cell("1 < 2")]])], {"torch": "2"})
        >>> "<p>Read it so.</p>" in html, "<td>1 &lt; 2</td>" in html
        (True, True)
    """
    footer = f"<footer>{escape(', '.join(f'{key} {value}' for key, value in environment.items()))}</footer>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join([*map(_html, parts), footer]) + "\n</body></html>\n"
    )


def on_terminal(data: TableData) -> Table:
    """The same table for the terminal."""
    table = Table(title=data.caption, box=None, padding=(0, 1, 0, 0), title_justify="left")
    for place, head in enumerate(data.heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    for row in data.rows:
        table.add_row(*(f"[bold red]{plain(cell.text)}[/]" if cell.bad else plain(cell.text) for cell in row))
    return table
