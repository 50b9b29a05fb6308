"""The picture of the tour of gradients: error and ratio to the bound against the condition number."""

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

#: Okabe and Ito's colours, told apart by all kinds of colour vision, and a marker each for print
_STYLES = {
    "exact, svd": ("#000000", "o", "-"),
    "exact": ("#000000", "o", "--"),
    "original": ("#D55E00", "v", "-"),
    "trunc": ("#E69F00", "^", "-"),
    "topn": ("#999999", "s", "-"),
    "taylor": ("#56B4E9", "D", "-"),
    "pade": ("#0072B2", "P", "-"),
    "power-iteration": ("#CC79A7", "X", "-"),
    "newton": ("#009E73", "<", "-"),
    "lyapunov": ("#F0E442", ">", "-"),
}

Shown = dict[str, dict[str, tuple[float, float]]]


def _panel(axes: Axes, shown: Shown, which: int, limits: tuple[float, float], base: int = 10) -> None:
    """One measure of every rule: a line over the condition numbers, then the two special cases apart from it."""
    cases = list(next(iter(shown.values())))
    swept = [case for case in cases if case.startswith("1e")]
    special = [case for case in cases if case not in swept]
    places = {case: float(i) for i, case in enumerate(swept)}
    places |= {case: len(swept) + 0.5 + 1.2 * i for i, case in enumerate(special)}
    values = [row[case][which] for row in shown.values() for case in cases]
    seen = [value for value in values if 0 < value < math.inf]
    low, high = min(limits[0], *seen), max(limits[1], *(1.5 * value for value in seen))
    for turn, (rule, row) in enumerate(shown.items()):
        colour, marker, line = _STYLES[rule]
        shift = 0.07 * (turn - len(shown) / 2)  # so that points on the same spot stay visible
        look: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "markersize": 4.5,
            "markeredgecolor": "#222222",
            "markeredgewidth": 0.4,
        }
        if line == "--":
            look |= {"markerfacecolor": "#ffffff", "markeredgewidth": 1.0}
        for group, style in ((swept, line), (special, "none")):
            x = [places[case] + shift for case in group]
            y = [row[case][which] for case in group]
            finite = [max(value, low) if math.isfinite(value) else math.nan for value in y]
            label = rule if group is swept else None
            axes.plot(x, finite, linestyle=style, linewidth=1.1, label=label, zorder=3 + (turn < 2), **look)
            lost = [a for a, value in zip(x, y, strict=True) if not math.isfinite(value)]
            if lost:
                axes.plot(lost, [high] * len(lost), linestyle="none", clip_on=False, zorder=6, **look)
    axes.axvline(len(swept) - 0.25, color="#bbbbbb", linewidth=0.8)
    axes.set_yscale("log", base=base)
    axes.set_ylim(low, high)
    axes.set_xlim(-0.5, max(places.values()) + 0.5)
    labels = [f"$10^{{{case[2:]}}}$" if case in swept else case for case in cases]
    axes.set_xticks([places[case] for case in cases], labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("condition number κ(P)", x=0.4)
    axes.text(-0.4, high, "not finite", va="center", color="#666666", fontsize=7)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw(shown: Shown, path: Path) -> None:
    """Two panels and one legend, at the width of a page, from what :func:`benchmarks.gradients.summary` gives."""
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8}):
        figure = Figure(figsize=(7.4, 3.7), layout="constrained")
        left, right = figure.subplots(1, 2)
        _panel(left, shown, 0, (3e-17, 30))
        left.set_title("relative error of ∂l/∂X", loc="left", pad=10)
        _panel(right, shown, 1, (0.25, 6), base=2)
        right.axhline(1, color="#000000", linewidth=0.8, linestyle=":")
        right.text(-0.4, 1.04, "bound", va="bottom", fontsize=7)
        right.yaxis.set_major_formatter("{x:g}")
        right.set_title("‖∂l/∂X‖ over the proven bound", loc="left", pad=10)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, dpi=200)
