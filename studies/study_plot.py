"""The pictures of the studies: the paper's numbers hollow, ours filled."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eigengrain.plotting import FONTS, plain

#: Okabe and Ito's colours, told apart by all kinds of colour vision, and a marker each for print
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "D"),
    ("#009E73", "^"),
    ("#E69F00", "s"),
    ("#CC79A7", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)
_FONTS = FONTS | {"legend.fontsize": 7.5}
_PAPER: dict[str, Any] = {"marker": "o", "mfc": "white", "mec": "#444444", "color": "#444444", "linestyle": "none"}

Curve = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True)
class Dots:
    """A line of a table: its name, the paper's number, and ours under each protocol, one a seed."""

    label: str
    printed: float | None
    ours: dict[str, list[float]] = field(default_factory=dict)


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(width * count, 4.6), height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _legend(figure: Figure, axes: Sequence[Axes], across: int = 4) -> None:
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    for columns in range(min(len(found), across), 0, -1):
        legend = figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, frameon=False)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def _looks(panels: Iterable[Iterable[str]]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each name, the same in every panel, whichever of them it has."""
    names = dict.fromkeys(name for panel in panels for name in panel)
    return dict(zip(names, cycle(_STYLES), strict=False))


def draw_dots(panels: Mapping[str, Sequence[Dots]], what: str, path: Path) -> None:
    """A panel a data set with numbers of ours, a line a method: hollow is the paper's number, filled ours, a dot a seed.

    A method has the same height in all panels, also where one does not have it.
    """
    panels = {title: lines for title, lines in panels.items() if any(dots.ours for dots in lines)}
    labels = list(dict.fromkeys(dots.label for lines in panels.values() for dots in lines))
    heights = {label: height for height, label in enumerate(reversed(labels))}
    with matplotlib.rc_context(_FONTS):
        figure, axes = _panels(len(panels), 3.6, 1.1 + 0.22 * len(labels))
        # plain names, which are in most figures, come first and so look the same in all of them
        looks = _looks([sorted({kind for lines in panels.values() for dots in lines for kind in dots.ours}, key=len)])
        for place, (each, (title, lines)) in enumerate(zip(axes, panels.items(), strict=True)):
            for dots in reversed(lines):
                height = heights[dots.label]
                if dots.printed is not None:
                    each.plot([dots.printed], [height], label="paper", **_PAPER)
                for kind, values in dots.ours.items():
                    colour, marker = looks[kind]
                    each.plot(values, [height] * len(values), marker, color=colour, label=kind, alpha=0.85)
            each.set_yticks(list(heights.values()), list(heights) if place == 0 else [])
            each.set_ylim(-0.6, len(labels) - 0.4)
            each.set_xlabel(what if place == len(panels) // 2 else "")
            plain(each, "both", title)
        _legend(figure, axes)
        figure.savefig(path, dpi=200)


def draw_histograms(panels: Mapping[str, Mapping[str, Mapping[str, Any]]], peak: float, path: Path) -> None:
    """A column a data set: the histogram of all eigenvalues, and the condition number of each image (Figure 6)."""
    with matplotlib.rc_context(_FONTS):
        figure = Figure(figsize=(max(3.4 * len(panels), 5.2), 5.0), layout="constrained")
        grid = figure.subplots(2, len(panels), squeeze=False)
        looks = _looks(panels.values())
        for top, bottom, (title, methods) in zip(grid[0], grid[1], panels.items(), strict=True):
            for name, values in methods.items():
                colour, _ = looks[name]
                edges, counts = np.asarray(values["histogram_edges"]), np.asarray(values["histogram"], float)
                seen = np.nonzero(counts)[0]
                low, high = seen[0], seen[-1] + 1
                top.stairs(counts[low:high] / counts.sum(), edges[low : high + 1], color=colour, label=name, linewidth=1.3)
            top.axvline(math.log10(peak), color="#666666", linewidth=0.9, linestyle=":", label="peak in the paper")
            top.set_xlabel("log₁₀ λ")
            top.set_ylim(bottom=0)
            plain(top, title=f"{title}: eigenvalues, share")
            _conditions(bottom, methods, looks)
        _legend(figure, grid[0])
        figure.savefig(path, dpi=200)


def _conditions(axes: Axes, methods: Mapping[str, Mapping[str, Any]], looks: Mapping[str, tuple[str, str]]) -> None:
    """κ of single images, or of a record without them its quantiles."""
    if all("log10_condition_of_images" in values for values in methods.values()):
        for name, values in methods.items():
            each = values["log10_condition_of_images"]
            axes.plot(np.arange(len(each)), each, ".", markersize=1.5 if len(each) > 500 else 4, color=looks[name][0])
        axes.set_xlabel("test image")
        plain(axes, title="log₁₀ κ(P) of each image")
        return
    for place, (name, values) in enumerate(methods.items()):
        low, lower, middle, upper, high = values["log10_condition"]
        box = {"med": middle, "q1": lower, "q3": upper, "whislo": low, "whishi": high, "label": name}
        drawn = axes.bxp([box], [place], widths=0.4, showfliers=False, patch_artist=True)
        drawn["boxes"][0].set(facecolor=looks[name][0], alpha=0.5)
        drawn["medians"][0].set(color="#222222")
    axes.set_xlim(-0.7, len(methods) - 0.3)
    plain(axes, title="log₁₀ κ(P) of the images, whiskers 5 % to 95 %")


def draw_subsets(panels: Mapping[str, Mapping[str, Sequence[float]]], order: Sequence[str], path: Path) -> None:
    """Accuracy with each subset of the eigenvalues (Table 2)."""
    with matplotlib.rc_context(_FONTS):
        figure, axes = _panels(len(panels), 4.6, 1.3 + 0.2 * len(order))
        looks = _looks([name for name in lines if not name.startswith("paper")] for lines in panels.values())
        for each, (title, lines) in zip(axes, panels.items(), strict=True):
            heights = np.arange(len(order))[::-1]
            for name, values in lines.items():
                if name in looks:
                    colour, marker = looks[name]
                    each.plot(values, heights, marker, color=colour, label=name)
                else:
                    each.plot(values, heights, label=name, **_PAPER)
            each.set_yticks(heights, order if each is axes[0] else [])
            each.set_xlabel("test accuracy, %")
            plain(each, "both", title)
        _legend(figure, axes)
        figure.savefig(path, dpi=200)


def _line(axes: Axes, name: str | None, drawn: Curve, style: tuple[str, str]) -> None:
    colour, marker = style
    axes.plot(*drawn, color=colour, marker=marker, markersize=3.5, linewidth=1.2, label=name)


def _whole_numbers(axes: Axes, curves: Iterable[Curve]) -> None:
    """Ticks at whole numbers only, also where there is one point."""
    seen = {x for xs, _ in curves for x in xs}
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    if len(seen) == 1:
        axes.set_xlim(min(seen) - 1, min(seen) + 1)


def draw_truncation(
    panels: Mapping[str, tuple[Mapping[str, Curve], Mapping[str, Curve], Mapping[str, Curve]]], most: int, path: Path
) -> None:
    """A row a data set: accuracy against truncated eigenvalues, then accuracy and training loss at the most (Figure 1)."""
    with matplotlib.rc_context(_FONTS):
        figure = Figure(figsize=(8.6, 0.7 + 2.3 * len(panels)), layout="constrained")
        grid = figure.subplots(len(panels), 3, squeeze=False)
        looks = _looks(curves for parts in panels.values() for curves in parts)
        for row, (title, parts) in zip(grid, panels.items(), strict=True):
            titles = (
                f"{title}: test accuracy, %",
                f"{most} truncated: test accuracy, %",
                f"{most} truncated: training loss",
            )
            for axes, curves, said in zip(row, parts, titles, strict=True):
                for name, drawn in curves.items():
                    _line(axes, name, drawn, looks[name])
                axes.set_xlabel("truncated eigenvalues" if curves is parts[0] else "epoch")
                axes.set_visible(bool(curves))
                _whole_numbers(axes, curves.values())
                plain(axes, title=said)
        _legend(figure, [axes for row in grid for axes in row])
        figure.savefig(path, dpi=200)


#: f of the logarithm to base 10 of an eigenvalue
NORMALISATIONS = {
    "λ": lambda logs: 10**logs,
    "P^0.1": lambda logs: 10 ** (0.1 * logs),
    "P^0.3": lambda logs: 10 ** (0.3 * logs),
    "P^0.5": lambda logs: 10 ** (0.5 * logs),
    "log P": lambda logs: math.log(10) * logs,
    "e^-P": lambda logs: np.exp(-(10**logs)),
}


def draw_normalisations(spectra: Mapping[str, Sequence[float]], path: Path) -> None:
    """What each normalisation makes of a mean spectrum (Figure 4); the logarithm, which is signed, has its own axis."""
    with matplotlib.rc_context(_FONTS):
        figure, axes = _panels(len(spectra), 4.6, 3.4)
        for each, (title, logs) in zip(axes, spectra.items(), strict=True):
            values = np.asarray(logs)
            number = np.arange(1, len(values) + 1)
            signed = each.twinx()
            for (name, f), (colour, _) in zip(NORMALISATIONS.items(), cycle(_STYLES), strict=False):
                target = signed if name == "log P" else each
                target.plot(number, f(values), color=colour, linewidth=1.4, linestyle="--" if name == "log P" else "-")
                each.plot([], [], color=colour, linestyle="--" if name == "log P" else "-", label=name)
            each.set_yscale("log")
            smallest = 10 ** (values.min() - 0.5)
            each.set_ylim(smallest, None)
            each.set_xlabel("i")
            signed.set_ylabel("log λᵢ (dashed)")
            signed.spines["top"].set_visible(False)
            each.set_title(f"{title}: normalised eigenvalues", loc="left")
            each.grid(axis="y", color="#e5e5e5", linewidth=0.6)
            each.spines["top"].set_visible(False)
        _legend(figure, axes)
        figure.savefig(path, dpi=200)


#: points below the best accuracy that are still drawn
FAR = 12.0


def draw_rates(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], scaled: bool, path: Path
) -> None:
    """A line a head: accuracy against the rate of the classifier; two panels a row.

    ``scaled`` are rates that would act alike on vectors of one length. What is far below the best is cut off, so that the
    others can be told apart.
    """
    with matplotlib.rc_context(_FONTS):
        figure = Figure(figsize=(9.6, 0.6 + 3.2 * math.ceil(len(panels) / 2)), layout="constrained")
        axes = list(figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False).flat)
        looks = _looks(panels.values())
        dashed = {name: ("-", "--", ":")[place // len(_STYLES) % 3] for place, name in enumerate(looks)}
        for each, (title, lines) in zip(axes, panels.items(), strict=True):
            for name, (rates, values) in lines.items():
                (colour, marker), dashes = looks[name], dashed[name]
                each.plot(rates, values, dashes, color=colour, marker=marker, markersize=4, linewidth=1.2, label=name)
            each.set_xscale("log")
            ticks = _ticks([rate for rates, _ in lines.values() for rate in rates])
            each.set_xticks(ticks, [f"×{rate:g}" for rate in ticks])
            each.minorticks_off()
            best = max(value for _, values in lines.values() for value in values)
            least = min(value for _, values in lines.values() for value in values)
            each.set_ylim(max(least, best - FAR) - 0.5, best + 0.5)
            each.set_xlabel(f"rate of the classifier over that of the backbone{' × c²' * scaled}")
            plain(each, title=f"{title}: accuracy, %")
        _legend(figure, axes, across=3)
        figure.savefig(path, dpi=200)


def _ticks(rates: Sequence[float]) -> list[float]:
    """1, 3, 10, 30 and so on between the rates, or the rates where these are few."""
    low, high = min(rates), max(rates)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 3) if low <= digit * 10.0**decade <= high]
    return found if len(found) > 1 else sorted(set(rates))


def draw_curves(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[Curve]]]], path: Path) -> None:
    """Values after each epoch: a row a data set, its panels side by side, a line a seed (Figures 5 and 10)."""
    across = max(len(row) for row in panels.values())
    # data sets side by side where each has one panel only
    turned = across == 1
    rows, columns = (1, len(panels)) if turned else (len(panels), across)
    with matplotlib.rc_context(_FONTS):
        figure = Figure(figsize=(max(3.6 * columns, 4.6), 0.7 + 2.4 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        every = [axes for row in grid for axes in row]
        flat = [(data, title, lines) for data, row in panels.items() for title, lines in row.items()]
        looks = _looks(lines for _, _, lines in flat)
        for axes, (data, title, lines) in zip(every, flat, strict=False):
            for name, curves in lines.items():
                for turn, drawn in enumerate(curves):
                    _line(axes, None if turn else name, drawn, looks[name])
            axes.set_xlabel("epoch")
            _whole_numbers(axes, [drawn for curves in lines.values() for drawn in curves])
            plain(axes, title=f"{data}: {title}")
        for axes in every[len(flat) :]:
            axes.set_visible(False)
        _legend(figure, every)
        figure.savefig(path, dpi=200)
