"""The matplotlib style of the package."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from matplotlib import style as matplotlib_style

STYLE = Path(__file__).with_name("templates") / "eigengrain.mplstyle"


def style(changes: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """Context manager that applies the style of the package and further settings; figures are made and saved inside it."""
    context: AbstractContextManager[None] = matplotlib_style.context([STYLE, dict(changes or {})])
    return context
