"""The pictures of the demo: how the heads learn, and the spectra of what they have learned."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator
from numpy.typing import NDArray

from eigengrain.plotting import FONTS, plain

#: Okabe and Ito's colours, told apart by all kinds of colour vision, and a marker each for print
_STYLES = (
    ("#000000", "o"),
    ("#E69F00", "^"),
    ("#0072B2", "s"),
    ("#D55E00", "D"),
    ("#009E73", "v"),
    ("#CC79A7", "P"),
    ("#56B4E9", "X"),
)

#: (epochs, values) of one run
Curve = tuple[Sequence[int], Sequence[float]]
Spectra = NDArray[np.float64]


def _lines(axes: Axes, curves: Mapping[str, Sequence[Curve]], line: str = "-", marked: bool = True) -> None:
    """A line a run; the runs of a head look alike."""
    for (head, runs), (colour, marker) in zip(curves.items(), cycle(_STYLES), strict=False):
        for turn, (epochs, values) in enumerate(runs):
            axes.plot(
                epochs,
                values,
                line,
                color=colour,
                marker=marker if marked else ".",
                markersize=3.5,
                linewidth=1.2,
                label=None if turn else head,
            )


def draw_curves(
    accuracy: Mapping[str, Sequence[Curve]],
    loss: Mapping[str, Sequence[Curve]],
    training_loss: Mapping[str, Sequence[Curve]],
    path: Path,
) -> None:
    """Test accuracy and losses against the epoch, by head, at the width of a page."""
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.4, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        _lines(left, accuracy)
        _lines(right, loss)
        _lines(right, training_loss, ":", marked=False)
        left.set_ylim(0, 103)
        right.set_yscale("log")  # from chance to nearly nothing, and a first epoch that may be far above chance
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter(LogFormatter())  # says something only where the axis spans few powers of ten
        for axes, title in ((left, "test accuracy, %"), (right, "loss: test images (lines), training images (dotted)")):
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            plain(axes, title=title)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, dpi=200)


def draw_spectra(spectra: Mapping[str, Spectra], conditions: Mapping[str, Spectra], path: Path) -> None:
    """The mean spectrum of the test images by head, and a box of their condition numbers.

    Args:
        spectra: of each head, λ_i/λ_1 above 0, (n, d) descending.
        conditions: of each head, log10 of the condition number, (n,).
    """
    with matplotlib.rc_context(FONTS):
        figure = Figure(figsize=(7.4, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (head, values), (colour, marker) in zip(spectra.items(), cycle(_STYLES), strict=False):
            mean = 10 ** np.log10(values).mean(0)
            number = np.arange(1, len(mean) + 1)
            left.plot(number, mean, color=colour, marker=marker, markersize=3, markevery=8, linewidth=1.2, label=head)
        left.set_yscale("log")
        left.set_xlabel("number i of the eigenvalue")
        plain(left, title="eigenvalues λᵢ/λ₁, geometric mean of the test images")
        boxes = right.boxplot(
            list(conditions.values()),
            tick_labels=list(conditions),
            widths=0.5,
            whis=(5, 95),
            showfliers=False,
            patch_artist=True,
            medianprops={"color": "#ffffff", "linewidth": 1.4},
        )
        for box, (colour, _) in zip(boxes["boxes"], cycle(_STYLES), strict=False):
            box.set(facecolor=colour, edgecolor="#222222")
        plain(right, title="log₁₀ of the condition number, whiskers 5 % to 95 %")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, dpi=200)
