"""One self-contained HTML page: text, tables, pictures and commands in a file that loads nothing and runs nothing."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path

STYLE = (Path(__file__).with_name("templates") / "page.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Cell:
    """The text of a cell, whether it should catch the eye, and small lines under it."""

    text: str
    bad: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class TableData:
    """A table before it is drawn: the first column names the rows.

    Args:
        caption: what the table shows.
        heads: of all columns.
        rows: of cells, as many as there are heads.
        groups: a line above the heads: what some columns have in common and how many they are, from the second column on.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True)
class Heading:
    """Of the parts that follow."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Names, and what is to be said of each."""

    about: Mapping[str, str]


@dataclass(frozen=True)
class Commands:
    """Lines to type."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A PNG or GIF file, what it shows in words for those who do not see it, and what stands under it."""

    path: Path
    shows: str
    caption: str = ""


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


#: a paragraph, the path of a picture that the heading above it describes, or one of the above
Part = str | Path | Heading | Facts | TableData | Commands | Figure | Gallery


def page(title: str, parts: Sequence[Part], environment: Mapping[str, object]) -> str:
    """The page as HTML, with its pictures and its style inside it: one file to keep, to send or to print.

    Args:
        title: of the page.
        parts: from top to bottom.
        environment: where it was measured, for the last line.

    Example:
        >>> html = page("Title", ["Read it so.", TableData("t", ["", "a"], [[Cell("b"), Cell("1 < 2")]])], {"torch": "2"})
        >>> "<p>Read it so.</p>" in html, '<th scope="row">b</th><td>1 &lt; 2</td>' in html
        (True, True)
    """
    body, heading = [f"<h1>{escape(title)}</h1>"], title
    for part in parts:
        heading = part.text if isinstance(part, Heading) else heading
        body.append(_html(Figure(part, heading) if isinstance(part, Path) else part))
    where = escape(", ".join(f"{key} {value}" for key, value in environment.items()))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{STYLE}</style></head>\n'
        "<body><main>\n" + "\n".join(body) + f"\n</main>\n<footer>{where}</footer></body></html>\n"
    )


def _html(part: str | Heading | Facts | TableData | Commands | Figure | Gallery) -> str:
    if isinstance(part, Heading):
        return f"<h2>{escape(part.text)}</h2>"
    if isinstance(part, Facts):
        return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(said)}</dd>' for name, said in part.about.items())}</dl>"
    if isinstance(part, TableData):
        return _table(part)
    if isinstance(part, Commands):
        return f"<pre>{escape(chr(10).join(part.lines))}</pre>"
    if isinstance(part, Figure):
        kind = part.path.suffix[1:]
        caption = f"<figcaption>{escape(part.caption)}</figcaption>" if part.caption else ""
        return f"<figure>{_image(part.path.read_bytes(), part.shows, kind)}{caption}</figure>"
    if isinstance(part, Gallery):
        return f'<div class="tiles">{"".join(map(_tile, part.tiles))}</div>'
    return f"<p>{escape(part)}</p>"


def _image(data: bytes, shows: str, kind: str = "png") -> str:
    look = ' class="film"' if kind == "gif" else ""
    return f'<img{look} alt="{escape(shows)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'


def _tile(tile: Tile) -> str:
    lines = "".join(_tag("span", escape(line.text), bad=line.bad) for line in tile.lines)
    return f"<figure>{_image(tile.png, tile.title)}<figcaption><b>{escape(tile.title)}</b>{lines}</figcaption></figure>"


def _table(data: TableData) -> str:
    first = set(accumulate((count for _, count in data.groups), initial=1)) if data.groups else set()
    # phrases are read from the left; numbers, and the short words that stand for them, end below each other
    columns = enumerate(zip(*data.rows, strict=False))
    words = {k for k, cells in columns if k and all(cell.text[:1].isalpha() and len(cell.text) > 12 for cell in cells)}

    def line(cells: Sequence[Cell], scope: str) -> str:
        found = []
        for k, cell in enumerate(cells):
            name = f'th scope="{scope}"' if scope == "col" or not k else "td"
            found.append(_tag(name, _inside(cell), bad=cell.bad, first=k in first, words=k in words))
        return f"<tr>{''.join(found)}</tr>"

    groups = "".join(
        _tag(f'th scope="colgroup" colspan="{count}"', escape(text), first=True) for text, count in data.groups
    )
    over = f"<tr><td></td>{groups}</tr>\n" if groups else ""
    heads, rows = line([Cell(head) for head in data.heads], "col"), "\n".join(line(row, "row") for row in data.rows)
    caption = escape(data.caption)
    # a table that is wider than the screen is moved sideways, by keys too
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>\n'
        f"<thead>{over}{heads}</thead>\n<tbody>{rows}</tbody></table></div>"
    )


def _inside(cell: Cell) -> str:
    notes = (escape(note).replace("\n", "<br>") for note in cell.notes)
    return escape(cell.text) + "".join(f"<small>{note}</small>" for note in notes)


def _tag(name: str, inside: str, **classes: bool) -> str:
    """An element, named with its attributes, of the classes that apply."""
    given = " ".join(key for key, applies in classes.items() if applies)
    marked = f'{name} class="{given}"' if given else name
    return f"<{marked}>{inside}</{name.split()[0]}>"
