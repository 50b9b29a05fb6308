"""A sheet of pictures in rows under column titles, with captions and a note: where everything stands, and its file."""

import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eigengrain.errors import MissingPackageError
from eigengrain.files import writable

try:
    # figures by themselves, without pyplot: so no window is opened, and a notebook keeps its own way of drawing
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:
    raise MissingPackageError("pictures need matplotlib: pip install 'eigengrain[explain]'") from error

#: dark to bright in equal steps of lightness, so that it is read alike with every kind of colour vision, and in grey
COLOURS = "inferno"

#: a space at which no line is broken
_KEEP = "\N{NO-BREAK SPACE}"

Pixels = NDArray[np.uint8]


class Cell(NamedTuple):
    """RGB (H, W, 3) and what stands under it; without a picture, what stands in its place."""

    picture: Pixels | None
    text: str = ""


class Line(NamedTuple):
    """A row: what stands above it, and its cells from left to right."""

    caption: str
    cells: list[Cell]


def coloured(values: NDArray[Any]) -> NDArray[Any]:
    """The RGB colours (*, 3), from 0 to 1, of values (*) from 0 to 1."""
    colours: NDArray[Any] = colormaps[COLOURS](values)[..., :3]
    return colours


def compose(groups: Sequence[tuple[str, Sequence[str]]], lines: Sequence[Line], note: str, bar: bool) -> Figure:
    """A sheet of rows under column titles, with a note below.

    Args:
        groups: of columns, each with its title and those of its columns.
        lines: at least one, each with a cell for every column.
        note: what stands below.
        bar: whether the scale of :data:`COLOURS` stands beside the note, for values whose square root is the colour.
    """
    side = next(cell.picture.shape[:2] for cell in lines[0].cells if cell.picture is not None)
    sheet = _Sheet(groups, (side[0], side[1]))
    bar_width = 1.3 if bar else 0.0
    notes = sheet.wrapped(note, sheet.width - bar_width - (0.15 if bar else 0))
    captions = [sheet.wrapped(line.caption) for line in lines]
    labelled = 0.115 if any(cell.text for line in lines for cell in line.cells) else 0.0
    low = sheet.margin + 0.06 + (1 + max(title.count("\n") + 1 for _, titles in groups for title in titles)) * sheet.line
    tops = []
    top = low
    for caption in captions:
        top += sheet.between_lines
        tops.append(top)
        top += len(caption) * sheet.line + sheet.height_of_cell + labelled
    height = sheet.dots(top + 0.08 + max(len(notes), 2 if bar else 1) * sheet.line + sheet.margin)

    figure = Figure(figsize=(sheet.width, height), dpi=sheet.dpi)
    page = _Page(figure, sheet, height)
    for (group, titles), lefts in zip(groups, sheet.lefts, strict=True):
        middle = (lefts[0] + lefts[-1] + sheet.cell) / 2
        page.text(middle, sheet.margin + 0.1, group, weight="bold", ha="center", va="baseline")
        if group:
            page.line(lefts[0], lefts[-1] + sheet.cell, sheet.margin + sheet.line + 0.03)
        for title, left in zip(titles, lefts, strict=True):
            for up, words in enumerate(reversed(title.split("\n"))):
                size = sheet.font * min(1, sheet.cell / (sheet.letter * max(len(words), 1)))
                base = low - up * sheet.line - 0.03
                page.text(left + sheet.cell / 2, base, words, ha="center", va="baseline", fontsize=size)
    flat = [left for lefts in sheet.lefts for left in lefts]
    for line, caption, top in zip(lines, captions, tops, strict=True):
        page.text(sheet.margin, top, "\n".join(caption))
        for cell, left in zip(line.cells, flat, strict=True):
            page.cell(left, top + len(caption) * sheet.line, cell)
    page.text(sheet.margin, height - sheet.margin - len(notes) * sheet.line, "\n".join(notes), color="#444444")
    if bar:
        page.bar(sheet.width - sheet.margin - bar_width + 0.1, height - sheet.margin - 0.23, bar_width - 0.2)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write the sheet as a PNG file; its folder is made."""
    path = writable(Path(path))
    figure.savefig(path, dpi=figure.dpi, format="png")
    return path


class _Sheet:
    """Where things stand on a panel, in inches from its upper left corner, rounded to whole dots."""

    margin, between, between_groups, between_lines = 0.06, 0.025, 0.11, 0.07
    font, small = 7.0, 6.0
    #: height of a line of text, and width of a letter, of the larger type
    line, letter = 0.125, 0.0505

    def __init__(self, groups: Sequence[tuple[str, Sequence[str]]], side: tuple[int, int]):
        counts = [len(titles) for _, titles in groups]
        gaps = self.between * (sum(counts) - len(counts)) + self.between_groups * (len(counts) - 1)
        free = 7.4 - 2 * self.margin - gaps
        self.cell = min(max(free / sum(counts), 0.62), 1.8)
        self.width = 2 * self.margin + gaps + self.cell * sum(counts)
        self.height_of_cell = self.cell * side[0] / side[1]
        # a whole number of dots a pixel, where that is neither coarse nor heavy
        times = max(math.ceil(190 * self.cell / side[1]), 1)
        self.dpi = min(times * side[1] / self.cell, 300)
        self.width = self.dots(self.width)
        self.lefts: list[list[float]] = []
        left = self.margin
        for count in counts:
            self.lefts.append([left + k * (self.cell + self.between) for k in range(count)])
            left += count * (self.cell + self.between) - self.between + self.between_groups

    def wrapped(self, text: str, width: float | None = None) -> list[str]:
        room = (width or self.width) - 2 * self.margin
        return textwrap.wrap(text, max(int(room / self.letter), 20)) or [""]

    def dots(self, inches: float) -> float:
        return round(inches * self.dpi) / self.dpi


class _Page:
    """A figure that is addressed in inches from its upper left corner."""

    def __init__(self, figure: Figure, sheet: _Sheet, height: float):
        self.figure, self.sheet, self.height = figure, sheet, height

    def text(self, x: float, y: float, text: str, **look: Any) -> None:
        look = {"fontsize": self.sheet.font, "va": "top", "linespacing": 1.25, **look}
        self.figure.text(x / self.sheet.width, 1 - y / self.height, text, parse_math=False, **look)

    def line(self, left: float, right: float, y: float) -> None:
        across = [left / self.sheet.width, right / self.sheet.width]
        self.figure.add_artist(Line2D(across, [1 - y / self.height] * 2, color="#888888", linewidth=0.6))

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        left, bottom = self.sheet.dots(x), self.sheet.dots(self.height - y - height)
        place = (left / self.sheet.width, bottom / self.height, width / self.sheet.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        return axes

    def cell(self, x: float, y: float, cell: Cell) -> None:
        sheet = self.sheet
        axes = self.axes(x, y, sheet.cell, sheet.height_of_cell)
        if cell.picture is not None:
            larger = sheet.cell * sheet.dpi >= cell.picture.shape[1]
            axes.imshow(cell.picture, aspect="auto", interpolation="nearest" if larger else "antialiased")
            self.text(x + sheet.cell / 2, y + sheet.height_of_cell + 0.02, cell.text, fontsize=sheet.small, ha="center")
            return
        axes.set_facecolor("#eeeeee")
        text = cell.text.replace(" = ", f"{_KEEP}={_KEEP}").replace("< ", f"<{_KEEP}")
        text = "\n".join(textwrap.wrap(text, max(int(0.9 * sheet.cell / sheet.letter), 8)))
        self.text(x + sheet.cell / 2, y + sheet.height_of_cell / 2, text, fontsize=sheet.small, ha="center", va="center")

    def bar(self, x: float, y: float, width: float) -> None:
        axes = self.axes(x, y, width, 0.08)
        axes.imshow(np.linspace(0, 1, 256)[None], aspect="auto", cmap=COLOURS)
        for share, name in ((0.0, "0"), (0.1, "10 %"), (1.0, "brightest")):
            where = x + width * math.sqrt(share)
            self.text(where, y + 0.1, name, fontsize=self.sheet.small, ha="right" if share == 1 else "center")
