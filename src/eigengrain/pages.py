"""Self-contained HTML pages from Jinja2 templates: style and pictures are inside the file, and it runs no script."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Cell:
    """One cell of a table; ``bad`` draws attention to it, ``notes`` are small lines below the text."""

    text: str
    bad: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class TableData:
    """A table; the first column names the rows, and ``heads`` the columns.

    ``groups`` are (title, number of columns) of column groups above the headers, starting at the second column.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()

    @property
    def group_starts(self) -> set[int]:
        """Columns with a rule at their left."""
        return set(accumulate((count for _, count in self.groups), initial=1)) if self.groups else set()

    @property
    def text_columns(self) -> set[int]:
        """Columns of phrases, aligned left; numbers and the short words between them are aligned right."""
        columns = enumerate(zip(*self.rows, strict=False))
        return {k for k, cells in columns if k and all(cell.text[:1].isalpha() and len(cell.text) > 12 for cell in cells)}


def render(template: str | Path, /, **values: Any) -> str:
    """Render a template to HTML; values are escaped.

    Templates extend ``base.html``, which needs ``title`` and ``environment`` (a mapping, for the footer), and use the
    macros of ``parts.html``: ``table``, ``figure``, ``tiles`` and ``commands``.

    Args:
        template: name of a template of this package, or the path of one elsewhere.
        values: variables of the template; a missing one raises ``jinja2.UndefinedError``.

    Example:
        >>> html = render("base.html", title="Birds & cars", environment={"torch": "2"})
        >>> "<h1>Birds &amp; cars</h1>" in html, "<footer>torch 2</footer>" in html
        (True, True)
    """
    environment = _environment()
    if isinstance(template, Path):
        return environment.from_string(template.read_text(encoding="utf-8")).render(values)
    return environment.get_template(template).render(values)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    layout: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, **layout)
    environment.filters["data_uri"] = data_uri
    return environment


def data_uri(picture: Path | bytes) -> str:
    """The contents of a PNG or GIF file as the ``src`` of an ``<img>``; bytes are a PNG."""
    data, kind = (picture, "png") if isinstance(picture, bytes) else (picture.read_bytes(), picture.suffix[1:])
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
