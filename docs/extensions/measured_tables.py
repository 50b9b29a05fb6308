"""Tables read from files at build time, so that no number is copied by hand.

``measured`` shows columns of a CSV file in ``benchmarks/``, ``recipes`` the headers of the packaged recipes.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from eigengrain.recipes import list_recipes, recipe_path

ROOT = Path(__file__).parents[2]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], literal: Sequence[int] = ()) -> nodes.table:
    """Build a table; the columns with an index in ``literal`` are set as code."""
    group = nodes.tgroup(cols=len(heads))
    group.extend(nodes.colspec(colwidth=1) for _ in heads)
    head, body = nodes.thead(), nodes.tbody()
    group += head
    group += body
    for place, cells in [(head, heads), *((body, row) for row in rows)]:
        row = nodes.row()
        for number, text in enumerate(cells):
            code = place is body and number in literal and text
            content = [nodes.literal(text, text)] if code else _with_options(text)
            row += nodes.entry("", nodes.paragraph("", "", *content))
        place += row
    return nodes.table("", group, classes=["wide"] if len(heads) > 8 else [])


def _with_options(text: str) -> list[nodes.Node]:
    """Set command-line options and their values in a text as code, which keeps their two dashes."""
    parts = re.split(r"(--\w[\w.]*(?: (?!--)[^\s,;)]+)?)", text)
    return [nodes.literal(part, part) if part.startswith("--") else nodes.Text(part) for part in parts if part]


def rounded(text: str) -> str:
    """Round a number to three significant digits; leave other text unchanged."""
    if not re.fullmatch(r"-?\d+\.\d+", text):
        return text
    value = float(text)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


class Measured(SphinxDirective):
    """``measured`` FILE, with ``columns`` (name, or name=title), and ``where`` (column=value, all must hold)."""

    required_arguments = 1
    option_spec: ClassVar = {"columns": directives.unchanged_required, "where": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        path = ROOT / "benchmarks" / self.arguments[0]
        self.env.note_dependency(str(path))
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for condition in filter(None, (part.strip() for part in self.options.get("where", "").split(";"))):
            column, _, value = condition.partition("=")
            rows = [row for row in rows if row[column] == value]
        columns = [part.strip().partition("=") for part in self.options["columns"].split(";")]
        missing = [name for name, *_ in columns if rows and name not in rows[0]]
        if not rows or missing:
            raise ExtensionError(f"{path}: {f'no column {missing[0]}' if missing else 'no row left'}")
        heads = [title or name for name, _, title in columns]
        cells = [[rounded(row[name]) for name, *_ in columns] for row in rows]
        where = "{device_name}, torch {torch}".format(**rows[0]) if "torch" in rows[0] else ""
        source = nodes.paragraph("", f"From benchmarks/{self.arguments[0]}{': ' + where if where else ''}.")
        source["classes"].append("source")
        return [table(heads, cells), source]


class Recipes(SphinxDirective):
    """One row per packaged recipe: what it trains, and the measured result."""

    def run(self) -> list[nodes.Node]:
        rows = []
        for name in list_recipes():
            text = Path(recipe_path(name)).read_text(encoding="utf-8")
            self.env.note_dependency(recipe_path(name))
            # the result may continue on the next lines, which are indented
            result = re.search(r"^# result: +(.*(?:\n#  +.*)*)$", text, re.MULTILINE)
            text_of_result = re.sub(r"\n# +", " ", result[1]) if result else ""
            rows.append([name, text.partition("\n")[0].lstrip("# "), text_of_result])
        return [table(["recipe", "what it trains", "result"], rows, literal=[0])]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("measured", Measured)
    app.add_directive("recipes", Recipes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
