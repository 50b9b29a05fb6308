"""How the charts of this package look."""

from typing import Literal

from matplotlib.axes import Axes

FONTS = {"font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 8}
GRID = "#e5e5e5"


def plain(axes: Axes, grid: Literal["x", "y", "both"] = "y", title: str | None = None) -> None:
    """A light grid behind what is drawn, no frame at the top and at the right, and a title at the left if there is one."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    if title is not None:
        axes.set_title(title, loc="left")
