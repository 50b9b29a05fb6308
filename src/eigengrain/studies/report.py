"""One self-contained page for a study: how to read it, tables, pictures, and where it was measured."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0 0 2rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.bad { color: #b03000; font-weight: 700; }
footer { color: #666; font-size: .85rem; }
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


def _table(data: TableData) -> str:
    def cell(c: Cell) -> str:
        return f'<td class="bad">{escape(c.text)}</td>' if c.bad else f"<td>{escape(c.text)}</td>"

    head = "".join(f"<th>{escape(h)}</th>" for h in data.heads)
    body = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in data.rows)
    table = f"<table><caption>{escape(data.caption)}</caption>\n<tr>{head}</tr>\n{body}\n</table>"
    return f'<div class="wide">{table}</div>'


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def page(
    title: str,
    sentences: Sequence[str],
    tables: Sequence[TableData],
    pictures: Sequence[Path],
    environment: Mapping[str, object],
) -> str:
    """The page as HTML, with the PNG pictures inside it: one file to keep or to send.

    Example:
        >>> html = page("Title", ["Read it so."], [TableData("t", ["a"], [[Cell("1 < 2")]])], [], {"torch": "2"})
        >>> "<td>1 &lt; 2</td>" in html
        True
    """
    parts = [
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        *map(_picture, pictures),
        *map(_table, tables),
        f"<footer>{escape(', '.join(f'{key} {value}' for key, value in environment.items()))}</footer>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
