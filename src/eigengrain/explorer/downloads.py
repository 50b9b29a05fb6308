"""What a visitor takes along: the panel as PNG, the numbers as CSV."""

import csv
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from eigengrain.explain.plots import Explained, draw_panel
from eigengrain.explorer.session import Answer, Lens, Look, facts
from eigengrain.functional import EigenSubset

#: characters with which a spreadsheet would begin a formula
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def panel(explained: Explained, scale: str = "row") -> bytes:
    """The maps as a PNG, as ``eigengrain explain`` draws them."""
    with tempfile.TemporaryDirectory() as folder:
        return draw_panel([explained], Path(folder) / "panel.png", scale).read_bytes()


def table(lens: Lens, look: Look, split: int, answers: Sequence[Answer]) -> str:
    """One row a number: ``kind, name, subset, value``, with every eigenvalue and every probability.

    Kinds are ``view`` (what was looked at), ``fact``, ``eigenvalue`` (by rank; ``subset`` says on which side of the split)
    and ``probability`` (by class; ``subset`` says what was kept).
    """
    rows: list[tuple[str, object, str, object]] = [
        ("view", "model", "", lens.name),
        ("view", "image", "", look.title),
        ("view", "split", "", split),
        ("view", "label", "", "" if look.label is None else lens.classes[look.label]),
    ]
    rows += [("fact", name, "", f"{value:.10g}") for name, value in facts(look.eigenvalues, split)._asdict().items()]
    large = EigenSubset.largest(split).mask(lens.channels)
    rows += [
        ("eigenvalue", rank, "large" if large[rank - 1] else "small", f"{value:.10g}")
        for rank, value in enumerate(look.eigenvalues.tolist(), start=1)
    ]
    rows += [
        ("probability", lens.classes[number], answer.subset, f"{share:.10g}")
        for answer in answers
        for number, share in enumerate(answer.probabilities.tolist())
    ]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("kind", "name", "subset", "value"))
    writer.writerows([_plain(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _plain(cell: object) -> str:
    """Text that no spreadsheet takes for a formula; numbers stay as they are.

    Example:
        >>> _plain("=1+1"), _plain("-0.5"), _plain("wren")
        ("'=1+1", '-0.5', 'wren')
    """
    text = str(cell)
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return "'" + text
    return text
