"""Layout of a panel: pictures in rows under column titles, with captions and a note."""

import math
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eigengrain.errors import MissingPackageError
from eigengrain.files import writable

try:
    # Figure without pyplot: no window is opened, and the backend of a notebook is not changed
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:
    raise MissingPackageError("pictures need matplotlib: pip install 'eigengrain[explain]'") from error

#: a colour map of uniform lightness steps, readable with any colour vision and in grey
COLOURS = colormaps["inferno"]

#: a space without a line break
KEEP = "\N{NO-BREAK SPACE}"

Pixels = NDArray[np.uint8]


class Cell(NamedTuple):
    """A picture, RGB (H, W, 3), with a text below it; or only a text."""

    picture: Pixels | None
    text: str = ""


class Line(NamedTuple):
    """A row of cells with a caption above it."""

    caption: str
    cells: list[Cell]


def compose(groups: Sequence[tuple[str, Sequence[str]]], lines: Sequence[Line], note: str, bar: bool) -> Figure:
    """Draw a sheet of rows (at least one) under columns, in groups (title, titles of the columns), with a note below.

    With ``bar``, a colour bar of :data:`COLOURS` for values whose square root is the colour is drawn beside the note.
    """
    sheet = _Sheet(groups, next(cell.picture for cell in lines[0].cells if cell.picture is not None))
    notes = sheet.wrap(note, sheet.width - (sheet.bar_width + 0.15 if bar else 0))
    captions = [sheet.wrap(line.caption) for line in lines]
    labelled = 0.115 if any(cell.text for line in lines for cell in line.cells) else 0.0
    low = sheet.margin + 0.06 + (1 + max(title.count("\n") + 1 for _, titles in groups for title in titles)) * sheet.line
    heights = [sheet.between_lines + len(caption) * sheet.line + sheet.height_of_cell + labelled for caption in captions]
    *tops, end = accumulate(heights, initial=low)
    figure = sheet.open(end + 0.08 + max(len(notes), 2 if bar else 1) * sheet.line + sheet.margin)
    for (group, titles), lefts in zip(groups, sheet.lefts, strict=True):
        middle = (lefts[0] + lefts[-1] + sheet.cell) / 2
        sheet.text(middle, sheet.margin + 0.1, group, weight="bold", ha="center", va="baseline")
        if group:
            y = 1 - (sheet.margin + sheet.line + 0.03) / sheet.height
            ends = [lefts[0] / sheet.width, (lefts[-1] + sheet.cell) / sheet.width]
            figure.add_artist(Line2D(ends, [y, y], color="#888888", linewidth=0.6))
        for title, left in zip(titles, lefts, strict=True):
            for up, words in enumerate(reversed(title.split("\n"))):
                size = sheet.font * min(1, sheet.cell / (sheet.letter * max(len(words), 1)))
                base = low - up * sheet.line - 0.03
                sheet.text(left + sheet.cell / 2, base, words, ha="center", va="baseline", fontsize=size)
    flat = [left for lefts in sheet.lefts for left in lefts]
    for line, caption, above in zip(lines, captions, tops, strict=True):
        top = above + sheet.between_lines
        sheet.text(sheet.margin, top, "\n".join(caption))
        for cell, left in zip(line.cells, flat, strict=True):
            sheet.draw_cell(left, top + len(caption) * sheet.line, cell)
    sheet.text(sheet.margin, sheet.height - sheet.margin - len(notes) * sheet.line, "\n".join(notes), color="#444444")
    if bar:
        sheet.draw_bar(sheet.width - sheet.margin - sheet.bar_width + 0.1, sheet.height - sheet.margin - 0.23)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write the sheet as a PNG file and create its folder."""
    path = writable(path)
    figure.savefig(path, dpi=figure.dpi, format="png")
    return path


class _Sheet:
    """A figure with coordinates in inches from its upper left corner, rounded to dots."""

    margin, between, between_groups, between_lines = 0.06, 0.025, 0.11, 0.07
    font, small, bar_width = 7.0, 6.0, 1.3
    #: height of a line of text and width of a letter, for the larger font
    line, letter = 0.125, 0.0505

    def __init__(self, groups: Sequence[tuple[str, Sequence[str]]], picture: Pixels):
        height, width, _ = picture.shape
        counts = [len(titles) for _, titles in groups]
        gaps = self.between * (sum(counts) - len(counts)) + self.between_groups * (len(counts) - 1)
        free = 7.4 - 2 * self.margin - gaps
        self.cell = min(max(free / sum(counts), 0.62), 1.8)
        self.height_of_cell = self.cell * height / width
        # an integer number of dots per pixel, unless that is too coarse or too large
        times = max(math.ceil(190 * self.cell / width), 1)
        self.dpi = min(times * width / self.cell, 300)
        self.width = self.dots(2 * self.margin + gaps + self.cell * sum(counts))
        self.lefts: list[list[float]] = []
        left = self.margin
        for count in counts:
            self.lefts.append([left + k * (self.cell + self.between) for k in range(count)])
            left += count * (self.cell + self.between) - self.between + self.between_groups

    def open(self, height: float) -> Figure:
        self.height = self.dots(height)
        self.figure = Figure(figsize=(self.width, self.height), dpi=self.dpi)
        return self.figure

    def wrap(self, text: str, width: float | None = None) -> list[str]:
        room = (width or self.width) - 2 * self.margin
        return textwrap.wrap(text, max(int(room / self.letter), 20)) or [""]

    def dots(self, inches: float) -> float:
        return round(inches * self.dpi) / self.dpi

    def text(self, x: float, y: float, text: str, **look: Any) -> None:
        look = {"fontsize": self.font, "va": "top", "linespacing": 1.25, **look}
        self.figure.text(x / self.width, 1 - y / self.height, text, parse_math=False, **look)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        left, bottom = self.dots(x), self.dots(self.height - y - height)
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(place, xticks=[], yticks=[], frame_on=False)

    def draw_cell(self, x: float, y: float, cell: Cell) -> None:
        axes = self.axes(x, y, self.cell, self.height_of_cell)
        if cell.picture is not None:
            larger = self.cell * self.dpi >= cell.picture.shape[1]
            axes.imshow(cell.picture, aspect="auto", interpolation="nearest" if larger else "antialiased")
            self.text(x + self.cell / 2, y + self.height_of_cell + 0.02, cell.text, fontsize=self.small, ha="center")
            return
        axes.set(facecolor="#eeeeee", frame_on=True)
        axes.spines[:].set_visible(False)
        text = cell.text.replace(" = ", f"{KEEP}={KEEP}").replace("< ", f"<{KEEP}")
        text = "\n".join(textwrap.wrap(text, max(int(0.9 * self.cell / self.letter), 8)))
        self.text(x + self.cell / 2, y + self.height_of_cell / 2, text, fontsize=self.small, ha="center", va="center")

    def draw_bar(self, x: float, y: float) -> None:
        width = self.bar_width - 0.2
        self.axes(x, y, width, 0.08).imshow(np.linspace(0, 1, 256)[None], aspect="auto", cmap=COLOURS)
        for share, name in ((0.0, "0"), (0.1, "10 %"), (1.0, "brightest")):
            where = x + width * math.sqrt(share)
            self.text(where, y + 0.1, name, fontsize=self.small, ha="right" if share == 1 else "center")
