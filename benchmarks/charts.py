"""The charts of the benchmarks."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure  # without pyplot: no screen is needed, and a notebook keeps its backend
from matplotlib.ticker import NullLocator, ScalarFormatter

from benchmarks.measure import Row
from eigengrain.plotting import style

#: colours by Okabe and Ito, which all kinds of colour vision can distinguish, and markers for print
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442")
MARKERS = "os^DvPX<>"


def draw_growth(rows: Sequence[Row], device: str, path: Path) -> None:
    """Time of the layer over the batch and over the channels, with guides of B and d³; all axes are logarithmic."""
    frame = pd.DataFrame(rows)
    looks = dict(zip(dict.fromkeys(frame["method"]), zip(COLOURS, MARKERS, strict=True), strict=False))
    panels = [("batch", "batch size B", 1), ("channels", "channels d", 3)]
    panels = [panel for panel in panels if (frame["sweep"] == panel[0]).any()]
    with style({"axes.grid.axis": "both"}):
        figure = Figure(figsize=(7.4, 3.4), layout="constrained")
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (sweep, heading, power) in zip(grid, panels, strict=True):
            here = frame[frame["sweep"] == sweep]
            for method, line in here.groupby("method", sort=False):
                colour, marker = looks[method]
                # auto chooses one of the others: a ring around its points
                ring = {"markersize": 8, "mfc": "none", "linestyle": "none"} if method == "auto" else {"markersize": 4}
                name = "auto (chooses one of them)" if method == "auto" else method
                axes.plot(line[sweep], line["forward_backward_ms"], color=colour, marker=marker, label=name, **ring)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            sizes = sorted(here[sweep].unique())
            end, start = sizes[-1], (sizes[-1] ** 2 * sizes[0]) ** (1 / 3)
            low = 0.5 * here.loc[here[sweep] == end, "forward_backward_ms"].min()
            if start < end:  # below the fastest point of the largest size, across a third of the panel
                axes.plot([start, end], [low * (start / end) ** power, low], color="#8c8c8c", linewidth=1, linestyle="--")
                axes.annotate("∝ B" if power == 1 else f"∝ d$^{power}$", (end, low), (-24, -12), textcoords="offset points")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.set_xlabel(heading)
            axes.set_title(_fixed_sizes(here, sweep))
        grid[0].set_ylabel("milliseconds, forward + backward")
        figure.suptitle(f"the SEB layer on {device}", x=0.01, ha="left", fontsize=8.5)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, dpi=200)


def _fixed_sizes(frame: pd.DataFrame, sweep: str) -> str:
    """The sizes that are fixed in a panel, and the positions where they had to grow.

    Example:
        >>> _fixed_sizes(pd.DataFrame({"batch": 32, "channels": [512, 1024], "positions": [784, 1089]}), "channels")
        'B = 32, N = 784 (1089 at d = 1024)'
    """
    first = frame.iloc[0]
    larger = frame[frame["positions"] != first["positions"]].drop_duplicates("channels")
    more = ", ".join(f"{n} at d = {d}" for d, n in zip(larger["channels"], larger["positions"], strict=True))
    fixed = f"d = {first['channels']}" if sweep == "batch" else f"B = {first['batch']}"
    return f"{fixed}, N = {first['positions']}" + (f" ({more})" if more else "")


def draw_gradients(errors: pd.DataFrame, ratios: pd.DataFrame, path: Path) -> None:
    """Two measures of every rule (rules × cases): a line over the condition numbers, and the last two cases apart."""
    titles = ("relative error of ∂l/∂X", "‖∂l/∂X‖ over the proven bound (dotted)")
    places = [i + 0.5 * (i >= len(errors.columns) - 2) for i in range(len(errors.columns))]
    with style():
        figure = Figure(figsize=(7.4, 3.7), layout="constrained")
        left, right = panels = figure.subplots(1, 2)
        limits = ((3e-17, 30), (0.25, 6))
        for axes, frame, (least, most), base, title in zip(panels, (errors, ratios), limits, (10, 2), titles, strict=True):
            values = [value for value in frame.to_numpy().flat if 0 < value < math.inf]
            low, high = min(least, *values), max(most, *(1.5 * value for value in values))
            styles = zip((COLOURS[0], *COLOURS), (MARKERS[0], *MARKERS), strict=True)
            for turn, ((rule, row), (colour, marker)) in enumerate(zip(frame.iterrows(), styles, strict=True)):
                look = {"color": colour, "marker": marker, "markersize": 4.5, "mec": "#222222", "mew": 0.4, "lw": 1.1}
                look |= {"linestyle": "--", "mfc": "#ffffff", "mew": 1.0} if rule == "exact" else {"linestyle": "-"}
                x = [place + 0.07 * (turn - len(frame) / 2) for place in places]  # so that equal points stay visible
                y = [max(value, low) if math.isfinite(value) else math.nan for value in row]
                axes.plot(x[:-2], y[:-2], label=rule, **look)
                axes.plot(x[-2:], y[-2:], **look | {"linestyle": "none"})
                lost = [place for place, value in zip(x, row, strict=True) if not math.isfinite(value)]
                axes.plot(lost, [high] * len(lost), clip_on=False, zorder=6, **look | {"linestyle": "none"})
            axes.set_yscale("log", base=base)
            axes.set_ylim(low, high)
            axes.set_xticks(places, [f"$10^{{{case[2:]}}}$" if case.startswith("1e") else case for case in frame.columns])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("condition number κ(P)", x=0.4)
            axes.text(-0.4, high, "not finite", va="center", color="#666666", fontsize=7)
            axes.set_title(title, pad=10)
        right.axhline(1, color=COLOURS[0], linewidth=0.8, linestyle=":")
        right.yaxis.set_major_formatter("{x:g}")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, dpi=200)


def draw_errors(rows: Sequence[Row], path: Path) -> None:
    """Errors of the matrix and of the gradient over the condition number, one line per solver and precision."""
    frame = pd.DataFrame(rows)
    frame = frame[(frame["note"] == "") & (frame["solver"] != "auto")]  # auto is one of the others
    with style():
        figure = Figure(figsize=(7.4, 3.4), layout="constrained")
        panels = zip(figure.subplots(1, 2), ("forward_error", "gradient_error"), ("A", "∂l/∂X"), strict=True)
        for axes, column, what in panels:
            lines = frame.groupby(["solver", "dtype"], sort=False)
            for ((solver, dtype), line), colour, marker in zip(lines, COLOURS, MARKERS, strict=False):
                look = {
                    "linestyle": "-" if dtype == "float64" else "--",
                    "mfc": colour if dtype == "float64" else "#ffffff",
                }
                axes.plot(line["condition"], line[column], color=colour, marker=marker, label=f"{solver}, {dtype}", **look)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("condition number κ(P)")
            axes.set_title(f"relative error of {what}")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=200)
