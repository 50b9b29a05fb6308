"""The tables of pages on the terminal."""

from rich.markup import escape
from rich.table import Table

from eigengrain.pages import TableData


def on_terminal(data: TableData) -> Table:
    """A table of a page for the terminal."""
    table = Table(title=escape(data.caption), box=None, padding=(0, 1, 0, 0), title_justify="left")
    for place, head in enumerate(data.heads):
        table.add_column(escape(head), justify="right" if place else "left", no_wrap=True)
    for row in data.rows:
        table.add_row(*(f"[bold red]{escape(cell.text)}[/]" if cell.bad else escape(cell.text) for cell in row))
    return table
