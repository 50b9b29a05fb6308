"""Self-contained HTML pages from Jinja2 templates: style and pictures are inside the file, and it loads nothing."""

import base64
import hashlib
import math
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

    ``groups`` are (title, number of columns) of column groups above the headers, starting at the second column. ``words``
    are columns of text.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()
    words: Sequence[int] = ()

    @property
    def group_starts(self) -> set[int]:
        """Columns with a rule at their left."""
        return set(accumulate((count for _, count in self.groups), initial=1)) if self.groups else set()

    @property
    def text_columns(self) -> set[int]:
        """Columns of phrases, aligned left; numbers and the short words between them are aligned right."""
        columns = enumerate(zip(*self.rows, strict=False))
        long = {k for k, cells in columns if k and all(cell.text[:1].isalpha() and len(cell.text) > 12 for cell in cells)}
        return long | set(self.words)


def render(template: str | Path, /, **values: Any) -> str:
    """Render a template to HTML; values are escaped.

    Templates extend ``base.html``, which needs ``title`` and ``environment`` (a mapping, for the footer), and use the
    macros of ``parts.html``, such as ``table``, ``figure``, ``tiles`` and ``commands``.

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
    environment.filters |= {"data_uri": data_uri, "percent": percent, "sha256": _sha256}
    return environment


def percent(share: float) -> str:
    """A share as text that is not broken across lines: 0.5 is '50.0 %', and NaN is '–'."""
    return "–" if math.isnan(share) else f"{100 * share:.1f}\u00a0%"


def _sha256(script: str) -> str:
    """The hash by which a content security policy allows a script and no other."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def data_uri(picture: Path | bytes) -> str:
    """The contents of a PNG or GIF file as the ``src`` of an ``<img>``; bytes are a PNG or a JPEG."""
    data, kind = (picture, "png") if isinstance(picture, bytes) else (picture.read_bytes(), picture.suffix[1:])
    kind = "jpeg" if data[:2] == b"\xff\xd8" else kind
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
