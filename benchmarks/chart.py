"""The pictures of the benchmarks, drawn from their rows."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

# figures by themselves, without pyplot: so no screen is needed, and a notebook keeps its own way of drawing
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.functional import Row, by_time, short
from benchmarks.heads import label
from eigengrain.plotting import FONTS, plain

#: from Okabe and Ito's colours, told apart by all kinds of colour vision; each pair differs in lightness too
BLACK, BLUE, SKY, ORANGE, VERMILION, GREEN, PURPLE = (
    *("#000000", "#0072B2", "#56B4E9", "#E69F00"),
    *("#D55E00", "#009E73", "#CC79A7"),
)
GUIDE = "#8c8c8c"

_PLAIN = FuncFormatter(lambda value, place: f"{value:,.0f}".replace(",", " ") if value >= 1 else f"{value:g}")


# --- heads -------------------------------------------------------------------------------------------------------


def _bars(axes: Axes, values: Sequence[float], shown: Sequence[str], colour: str, name: str | None = None) -> None:
    """Horizontal bars on a logarithmic axis, with the numbers at their ends."""
    places = range(len(values))
    axes.barh(places, values, height=0.72, color=colour, label=name)
    for place, value, text in zip(places, values, shown, strict=True):
        note = axes.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
        note.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # stays legible where a line crosses it
    low, high = min(values), max(values)
    axes.set_xscale("log")
    axes.set_xlim(low / 2, high * (high / low) ** 0.22)  # room for the number at the longest bar
    axes.xaxis.set_major_formatter(_PLAIN)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", length=0)
    plain(axes, "x")


def draw_heads(rows: Sequence[Row], reference: str, device: str, path: Path) -> None:
    """Times and memory of the heads side by side, fastest on top; both axes are logarithmic.

    Args:
        rows: from :func:`benchmarks.heads.measure`. Those without a time are left out.
        reference: the head whose time is marked by a line.
        device: its name, for the title.
        path: of the PNG file.
    """
    drawn = sorted((row for row in rows if row["forward_backward_ms"] is not None), key=by_time)
    if not drawn:
        raise ValueError("no head has a time to draw: all of them ran out of memory, use a smaller batch")
    size = " × ".join(str(drawn[0][part]) for part in ("batch", "channels", "height", "width"))
    both, forward = ([float(row[name] or 0) for row in drawn] for name in ("forward_backward_ms", "forward_ms"))
    with_memory = all(row["peak_mib"] for row in drawn)
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.4, 0.9 + 0.21 * len(drawn)), layout="constrained")
        widths = [3, 2] if with_memory else [1]
        left, right = (*figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0], None)[:2]
        _bars(left, both, [short(value) for value in both], SKY, "forward + backward")
        left.barh(range(len(drawn)), forward, height=0.36, color=BLUE, label="forward alone")
        left.set_xlim(left=min(forward) / 2)
        left.set_yticks(range(len(drawn)), [label(row) for row in drawn])
        left.set_ylim(len(drawn) - 0.4, -0.6)
        left.set_xlabel("milliseconds")
        left.set_title(f"{size}, {device}", loc="left")
        for row, value in zip(drawn, both, strict=True):
            if row["head"] == reference:
                left.axvline(value, color=BLACK, linewidth=0.9, linestyle=":", label=f"{reference}, forward + backward")
        if right is not None:
            peaks = [float(row["peak_mib"] or 0) for row in drawn]
            _bars(right, peaks, [short(value) for value in peaks], ORANGE, "peak memory")
            right.set_xlabel("MiB")
        handles = [handle for axes in (left, right) if axes is not None for handle in axes.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=200)


# --- growth ------------------------------------------------------------------------------------------------------

#: marker and colour by method, for those that are measured by default; the others take what is left
_LINES = {"auto": (BLACK, "o"), "eigh": (BLUE, "s"), "products": (VERMILION, "^")}
_SPARE = ((GREEN, "D"), (PURPLE, "v"), (ORANGE, "P"), (SKY, "X"), ("#999999", "<"), ("#F0E442", ">"))


def _line_styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method.

    Example:
        >>> _line_styles(["eigh", "svd"])["svd"]
        ('#009E73', 'D')
    """
    others = [method for method in methods if method not in _LINES]
    return _LINES | {method: _SPARE[place % len(_SPARE)] for place, method in enumerate(others)}


def _growth_panel(axes: Axes, rows: Sequence[Row], sweep: str, power: int, styles: dict[str, tuple[str, str]]) -> None:
    """Time over one size, and a line that grows with a power of it."""
    here = [row for row in rows if row["sweep"] == sweep]
    sizes = sorted({int(row[sweep] or 0) for row in here})
    for method in dict.fromkeys(str(row["method"]) for row in here):
        colour, marker = styles[method]
        line = [(int(r[sweep] or 0), float(r["forward_backward_ms"] or 0)) for r in here if r["method"] == method]
        # what auto takes is one of the others: a ring around its points
        ring = {"markersize": 8, "markerfacecolor": "none", "linestyle": "none"} if method == "auto" else {"markersize": 4}
        axes.plot(*zip(*line, strict=True), color=colour, marker=marker, linewidth=1.3, label=method, **ring)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # a guide below the fastest point of the largest size, across a third of the panel
    start, end = (sizes[-1] ** 2 * sizes[0]) ** (1 / 3), sizes[-1]
    fastest = min(float(row["forward_backward_ms"] or 0) for row in here if row[sweep] == end)
    guide = {size: 0.5 * fastest * (size / end) ** power for size in (start, (start * end) ** 0.5, end)}
    if start < end:
        axes.plot(list(guide), list(guide.values()), color=GUIDE, linewidth=1, linestyle="--")
        text = "∝ B" if power == 1 else f"∝ d$^{power}$"
        axes.annotate(text, list(guide.items())[1], (4, -9), textcoords="offset points", color="#666666")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)  # the last label stays inside the picture
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.tick_params(labelleft=True)  # on both panels, which share their axis
    plain(axes, "both")


def _fixed_sizes(rows: Sequence[Row], sweep: str) -> str:
    """What does not grow in a panel, and the positions where they had to.

    Example:
        >>> _fixed_sizes([{"batch": 32, "channels": d, "positions": n} for d, n in ((512, 784), (1024, 1089))], "channels")
        'B = 32, N = 784 (1089 at d = 1024)'
    """
    first = rows[0]
    fixed = f"d = {first['channels']}" if sweep == "batch" else f"B = {first['batch']}"
    larger = {row["channels"]: row["positions"] for row in rows if row["positions"] != first["positions"]}
    more = ", ".join(f"{positions} at d = {channels}" for channels, positions in larger.items())
    return f"{fixed}, N = {first['positions']}" + (f" ({more})" if more else "")


def draw_growth(rows: Sequence[Row], device: str, path: Path) -> None:
    """Two panels with logarithmic axes: time of the layer over the batch, and over the channels.

    Args:
        rows: from :func:`benchmarks.growth.measure`, with a time each.
        device: its name, for the title.
        path: of the PNG file.
    """
    styles = _line_styles(list(dict.fromkeys(str(row["method"]) for row in rows)))
    panels = {"batch": ("batch size B", 1), "channels": ("channels d", 3)}
    sweeps = [sweep for sweep in panels if any(row["sweep"] == sweep for row in rows)]
    if not sweeps:
        raise ValueError("no size has a time to draw: all of them ran out of memory, use smaller sizes")
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.4, 3.4), layout="constrained")
        grid = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)
        for axes, sweep in zip(grid[0], sweeps, strict=True):
            heading, power = panels[sweep]
            _growth_panel(axes, rows, sweep, power, styles)
            axes.set_xlabel(heading)
            axes.set_title(_fixed_sizes([row for row in rows if row["sweep"] == sweep], sweep), loc="left")
        figure.axes[0].set_ylabel("milliseconds, forward + backward")
        figure.suptitle(f"the SEB layer on {device}", x=0.01, ha="left", fontsize=8.5)
        entries = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        if "auto" in entries:
            entries["auto (takes one of them)"] = entries.pop("auto")
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, dpi=200)
