"""The figures of the studies: numbers of the paper are hollow, ours are filled."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eigengrain.plotting import style

#: colours by Okabe and Ito, which all kinds of colour vision can distinguish, and markers for print
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
_LOOKS = tuple(zip(_COLOURS, "oD^svPX", strict=True))
_PAPER: dict[str, Any] = {"marker": "o", "mfc": "white", "mec": "#444444", "color": "#444444", "linestyle": "none"}

Curve = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True)
class Dots:
    """A line of a table: its name, the number of the paper, and ours by protocol, one per seed."""

    label: str
    paper: float | None
    ours: dict[str, list[float]] = field(default_factory=dict)


@contextmanager
def _canvas(
    path: Path, rows: int, columns: int, size: tuple[float, float], grid: str = "y", across: int = 4
) -> Iterator[list[Axes]]:
    """The panels of a figure, which is finished at the end."""
    with style({"legend.fontsize": 7.5, "axes.grid.axis": grid}):
        figure = Figure(figsize=size, layout="constrained")
        yield list(figure.subplots(rows, columns, squeeze=False).flat)
        _finish(figure, path, across)


def _finish(figure: Figure, path: Path, across: int) -> None:
    """One legend below all panels, no wider than the figure, and the file."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    for columns in range(min(len(entries), across), 0, -1):
        legend = figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns, frameon=False)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    figure.savefig(path, dpi=200)


def _looks(panels: Iterable[Iterable[str]]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each name, the same in every panel."""
    names = dict.fromkeys(name for panel in panels for name in panel)
    return dict(zip(names, cycle(_LOOKS), strict=False))


def draw_dots(panels: Mapping[str, Sequence[Dots]], quantity: str, path: Path) -> None:
    """One panel per data set with numbers of ours, one dot per seed; a method has the same height in all panels."""
    panels = {title: lines for title, lines in panels.items() if any(dots.ours for dots in lines)}
    labels = list(dict.fromkeys(dots.label for lines in panels.values() for dots in lines))
    heights = {label: height for height, label in enumerate(reversed(labels))}
    # short names, which are in most figures, come first and so look the same in all of them
    looks = _looks([sorted({kind for lines in panels.values() for dots in lines for kind in dots.ours}, key=len)])
    with _canvas(path, 1, len(panels), (max(3.6 * len(panels), 4.6), 1.1 + 0.22 * len(labels)), "both") as axes:
        for place, (each, (title, lines)) in enumerate(zip(axes, panels.items(), strict=True)):
            for dots in reversed(lines):
                height = heights[dots.label]
                if dots.paper is not None:
                    each.plot([dots.paper], [height], label="paper", **_PAPER)
                for kind, values in dots.ours.items():
                    colour, marker = looks[kind]
                    each.plot(values, [height] * len(values), marker, color=colour, label=kind, alpha=0.85)
            each.set_yticks(list(heights.values()), list(heights) if place == 0 else [])
            each.set_ylim(-0.6, len(labels) - 0.4)
            each.set_xlabel(quantity if place == len(panels) // 2 else "")
            each.set_title(title)


def draw_histograms(panels: Mapping[str, Mapping[str, Mapping[str, Any]]], peak: float, path: Path) -> None:
    """One column per data set: the histogram of all eigenvalues, and the condition number of each image (Figure 6)."""
    looks = _looks(panels.values())
    with _canvas(path, 2, len(panels), (max(3.4 * len(panels), 5.2), 5.0)) as axes:
        for top, bottom, (title, methods) in zip(axes, axes[len(panels) :], panels.items(), strict=False):
            for name, values in methods.items():
                edges, counts = np.asarray(values["histogram_edges"]), np.asarray(values["histogram"], float)
                used = np.nonzero(counts)[0]
                low, high = used[0], used[-1] + 1
                shares = counts[low:high] / counts.sum()
                top.stairs(shares, edges[low : high + 1], color=looks[name][0], label=name, linewidth=1.3)
            top.axvline(math.log10(peak), color="#666666", linewidth=0.9, linestyle=":", label="peak in the paper")
            top.set_xlabel("log₁₀ λ")
            top.set_ylim(bottom=0)
            top.set_title(f"{title}: eigenvalues, share")
            _draw_conditions(bottom, methods, looks)


def _draw_conditions(axes: Axes, methods: Mapping[str, Mapping[str, Any]], looks: Mapping[str, tuple[str, str]]) -> None:
    """κ of single images, or its quantiles for records without them."""
    if all("log10_condition_of_images" in values for values in methods.values()):
        for name, values in methods.items():
            each = values["log10_condition_of_images"]
            axes.plot(np.arange(len(each)), each, ".", markersize=1.5 if len(each) > 500 else 4, color=looks[name][0])
        axes.set_xlabel("test image")
        axes.set_title("log₁₀ κ(P) of each image")
        return
    for place, (name, values) in enumerate(methods.items()):
        keys = ("whislo", "q1", "med", "q3", "whishi")
        box = dict(zip(keys, values["log10_condition"], strict=True)) | {"label": name}
        drawn = axes.bxp([box], [place], widths=0.4, showfliers=False, patch_artist=True)
        drawn["boxes"][0].set(facecolor=looks[name][0], alpha=0.5)
        drawn["medians"][0].set(color="#222222")
    axes.set_xlim(-0.7, len(methods) - 0.3)
    axes.set_title("log₁₀ κ(P) of the images, whiskers 5 % to 95 %")


def draw_normalisations(spectra: Mapping[str, Sequence[float]], path: Path) -> None:
    """Normalised eigenvalues of a mean spectrum (Figure 4); the logarithm, which is signed, has its own axis."""
    with _canvas(path, 1, len(spectra), (max(4.6 * len(spectra), 4.6), 3.4)) as axes:
        for each, (title, logs) in zip(axes, spectra.items(), strict=True):
            values = np.asarray(logs)
            number = np.arange(1, len(values) + 1)
            signed = each.twinx()
            curves = {"λ": 10**values} | {f"P^{power}": 10 ** (power * values) for power in (0.1, 0.3, 0.5)}
            curves |= {"log P": math.log(10) * values, "e^-P": np.exp(-(10**values))}
            for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
                target, dashes = (signed, "--") if name == "log P" else (each, "-")
                target.plot(number, curve, color=colour, linewidth=1.4, linestyle=dashes)
                each.plot([], [], color=colour, linestyle=dashes, label=name)
            each.set_yscale("log")
            each.set_ylim(10 ** (values.min() - 0.5), None)
            each.set_xlabel("i")
            signed.set_ylabel("log λᵢ (dashed)")
            signed.spines["right"].set_visible(True)
            signed.grid(False)
            each.set_title(f"{title}: normalised eigenvalues")


#: points below the best accuracy that are always drawn; lower ones only as far as the best of each line is seen
FAR = 12.0


def draw_rates(panels: Mapping[str, Mapping[str, Any]], scaled: bool, path: Path) -> None:
    """One line per head: accuracy against the rate of the classifier, times c² if ``scaled``; two panels per row."""
    looks = _looks(panels.values())
    dashes = {name: ("-", "--", ":", "-.")[place // len(_LOOKS) % 4] for place, name in enumerate(looks)}
    rows = math.ceil(len(panels) / 2)
    with _canvas(path, rows, 2, (9.6, 0.6 + 3.2 * rows), across=3) as axes:
        for each in axes[len(panels) :]:
            each.set_visible(False)
        for each, (title, lines) in zip(axes, panels.items(), strict=False):
            for name, (rates, values) in lines.items():
                colour, marker = looks[name]
                each.plot(rates, values, dashes[name], color=colour, marker=marker, markersize=4, linewidth=1.2, label=name)
            each.set_xscale("log")
            ticks = _rate_ticks([rate for rates, _ in lines.values() for rate in rates])
            each.set_xticks(ticks, [f"×{rate:g}" for rate in ticks])
            each.minorticks_off()
            accuracies = [value for _, values in lines.values() for value in values]
            best = max(accuracies)
            shown = min(best - FAR, min(max(values) for _, values in lines.values()) - 1.5)  # each line around its best
            each.set_ylim(max(min(accuracies), shown) - 0.5, best + 0.5)
            each.set_xlabel(f"rate of the classifier over that of the backbone{' × c²' * scaled}")
            each.set_title(f"{title}: accuracy, %")


def _rate_ticks(rates: Sequence[float]) -> list[float]:
    """1, 3, 10, 30 and so on between the rates, without the 3 if there are many, or the rates if there are few."""
    low, high = min(rates), max(rates)
    digits = (1, 3) if high / low < 1e4 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
    return ticks if len(ticks) > 1 else sorted(set(rates))


def draw_curves(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[Curve]]]], path: Path, *, x: str = "epoch") -> None:
    """Values after each epoch: a row of panels per data set, the first with the label ``x``; one line per seed."""
    across = max(len(row) for row in panels.values())
    # data sets are side by side if each has one panel only
    rows, columns = (1, len(panels)) if across == 1 else (len(panels), across)
    flat = [(data, title, lines) for data, row in panels.items() for title, lines in row.items()]
    looks = _looks(lines for _, _, lines in flat)
    with _canvas(path, rows, columns, (max(3.6 * columns, 4.6), 0.7 + 2.4 * rows)) as axes:
        for each, (data, title, lines) in zip(axes, flat, strict=False):
            for name, curves in lines.items():
                for turn, curve in enumerate(curves):
                    colour, marker = looks[name]
                    label = None if turn else name
                    each.plot(*curve, color=colour, marker=marker, markersize=3.5, linewidth=1.2, label=label)
            each.set_xlabel(x if title == next(iter(panels[data])) else "epoch")
            each.set_visible(bool(lines))
            places = {x for curves in lines.values() for xs, _ in curves for x in xs}
            each.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
            if len(places) == 1:
                each.set_xlim(min(places) - 1, min(places) + 1)
            each.set_title(f"{data}: {title}")
        for each in axes[len(flat) :]:
            each.set_visible(False)
