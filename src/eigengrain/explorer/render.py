"""Render results as HTML, SVG charts, a PNG panel or a CSV table.

The templates are in ``templates/explorer`` and escape all text. The charts are SVG from templates, not matplotlib figures:
a few kilobytes in about a millisecond, sharp at every size, with the colours of the page, and safe in several threads.
"""

import base64
import csv
import io
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from eigengrain.explain.plots import Explained, brightest, draw_panel, overlay
from eigengrain.explorer.perturbation import Progress
from eigengrain.explorer.session import SMOOTH, Analysis, Prediction, Session, SpectrumFacts, spectrum_facts
from eigengrain.pages import render

#: number of classes in a prediction
BEST = 4
#: kinds of maps for readers
KIND_TITLES = {SMOOTH: "smooth", "vanilla": "pixels", "deconv": "pixels, deconv", "guided": "pixels, guided"}
#: side of pictures on the page in pixels; smaller ones are enlarged by the browser
MAX_SIDE = 448

#: eigenvalues further below the largest are drawn at the bottom
DECADES = 12

#: characters that start a formula in a spreadsheet
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
#: matplotlib's settings are global, so only one thread draws with it
_matplotlib = Lock()


def answers(models: Sequence[tuple[Session, Analysis]]) -> str:
    """The answers of one or two models about an image, each with its probability and its smooth map."""
    shown = []
    for session, analysis in models:
        prediction, doubt = session.answer(analysis)
        subset = prediction.subset
        smooth = session.explain(analysis, [subset], target=prediction.predicted).maps[SMOOTH][subset]
        values: dict[str, Any] = {"session": session, "analysis": analysis, "prediction": prediction, "doubt": doubt}
        pictures: dict[str, Any] = {"picture": analysis.pixels, "map": overlay(analysis.pixels, smooth, brightest(smooth))}
        shown.append(values | {"best": _best(prediction)} | {name: data_uri(each) for name, each in pictures.items()})
    return render("explorer/answers.html", answers=shown)


def mistakes(session: Session) -> str:
    """How many examples were searched for mistakes, and how many were found."""
    return render("explorer/mistakes.html", session=session)


def numbers(facts: SpectrumFacts, channels: int, split: int) -> str:
    """The numbers of a spectrum as tiles, each with its meaning."""
    condition = "∞" if math.isinf(facts.condition) else _number(facts.condition)
    return render("explorer/numbers.html", facts=facts, condition=condition, channels=channels, split=split)


def predictions(session: Session, analysis: Analysis, cards: Sequence[Prediction]) -> str:
    """The best classes of each subset, side by side."""
    values: dict[str, Any] = {"cards": cards, "best": [_best(card) for card in cards], "channels": session.channels}
    return render("explorer/predictions.html", label=analysis.label, classes=session.classes, **values)


def _best(prediction: Prediction) -> list[tuple[int, float]]:
    """The most probable classes with their probabilities."""
    top = prediction.probabilities.topk(min(BEST, len(prediction.probabilities)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def spectrum(session: Session, analysis: Analysis, split: int, cards: Sequence[Prediction]) -> str:
    """The chart of the eigenvalues, and below it the probabilities with each part alone."""
    custom = next((session.mask(card.subset) for card in cards if card.role == "custom"), None)
    return render(
        "explorer/spectrum.html",
        eigenvalues=spectrum_chart(analysis.eigenvalues, split, custom),
        profile=profile_chart(session.splits, session.profile(analysis), split, session.channels),
        predicted=session.classes[analysis.predicted],
    )


def maps(explained: Explained, roles: Mapping[str, str], scale: str = "row") -> str:
    """The maps with one row per kind and one column per subset.

    Args:
        explained: the maps.
        roles: role → subset as text.
        scale: ``row`` for one colour scale per row, ``each`` for one per map.
    """
    pictures = {}
    for kind, by_subset in explained.maps.items():
        shared = torch.stack(list(by_subset.values()))
        for subset, map in by_subset.items():
            largest = brightest(map if scale == "each" else shared)
            pictures[kind, subset] = data_uri(overlay(explained.pixels, map, largest))
    values: dict[str, Any] = {"explained": explained, "roles": roles, "pictures": pictures, "scale": scale}
    return render("explorer/maps.html", titles=KIND_TITLES, **values)


def perturbation(analysis: Analysis, progress: Progress, toward: str) -> str:
    """The image before and now, their difference, and the loss so far."""
    before, now = analysis.pixels, progress.pixels
    change = ((now.int() - before.int()) * 2 + 128).clamp(0, 255).to(torch.uint8)
    pixels = {"original": before, f"toward {toward}": now, "difference × 2": change}
    return render(
        "explorer/perturbation.html",
        progress=progress,
        pictures={name: data_uri(image) for name, image in pixels.items()},
        chart=loss_chart(progress.losses, progress.steps),
    )


# Charts


def spectrum_chart(eigenvalues: Tensor, split: int, custom: Tensor | None = None) -> str:
    """Eigenvalues relative to the largest, on a log scale, with the large and the small ones in different colours.

    Args:
        eigenvalues: (d,), descending; zeros have no bar.
        split: number of eigenvalues that count as large.
        custom: which eigenvalues to mark, boolean (d,).
    """
    d, largest = len(eigenvalues), float(eigenvalues[0])
    decades = [math.log10(max(value / largest, 10.0**-DECADES)) for value in eigenvalues.tolist() if value > 0]
    lowest = min(-1, math.floor(min(decades, default=0)))
    grid = [(1 - decade / lowest, _power(decade)) for decade in range(0, lowest - 1, -1 if lowest >= -4 else -2)]
    heights = [1 - decade / lowest for decade in decades]
    marks = [] if custom is None else custom.nonzero().flatten().tolist()
    ranks = sorted({1, *range(d // 8 or 1, d + 1, d // 8 or 1)})
    values: dict[str, Any] = {"grid": grid, "heights": heights, "marks": marks, "ranks": ranks}
    return render("explorer/spectrum.svg", split=split, channels=d, **values)


def profile_chart(splits: Sequence[int], profile: Mapping[str, Sequence[float]], split: int, channels: int) -> str:
    """Probability of the predicted class with the large and with the small part alone, at many splits."""
    across = [t / channels for t in splits]
    curves = {role: list(zip(across, shares, strict=True)) for role, shares in profile.items()}
    nearest = min(range(len(splits)), key=lambda k: abs(splits[k] - split))
    return render("explorer/profile.svg", split=split, channels=channels, curves=curves, nearest=nearest)


def loss_chart(losses: Sequence[float], steps: int) -> str:
    """The loss of a perturbation so far; the axis is as long as all its steps."""
    finite = {step: loss for step, loss in enumerate(losses) if math.isfinite(loss)}
    low, high = min(finite.values(), default=0.0), max(finite.values(), default=0.0)
    span = (high - low) or abs(high) or 1.0
    points = [(step / max(steps - 1, 1), (loss - low) / span) for step, loss in finite.items()]
    values: dict[str, Any] = {"points": points, "low": _number(low), "high": _number(high)}
    return render("explorer/loss.svg", step=len(losses), steps=steps, **values)


def _number(value: float) -> str:
    """Four digits, with an exponent only for very small and very large numbers.

    Example:
        >>> _number(-1560.4), _number(0.012345), _number(2.5e-9)
        ('−1560', '0.01235', '2.5e-09')
    """
    text = f"{value:.4g}" if "e" not in f"{value:.4g}" or abs(value) < 1 or abs(value) >= 1e6 else f"{value:.0f}"
    return text.replace("-", "−", 1) if value < 0 else text


def _power(decade: int) -> str:
    """
    Example:
        >>> _power(0), _power(-3)
        ('1', '10⁻³')
    """
    exponent = str(decade).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if decade == 0 else f"10{exponent}"


# Pictures and files


def data_uri(pixels: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    """A picture, uint8 (3, H, W) or (H, W, 3), as a data URI."""
    if isinstance(pixels, Tensor):
        pixels = pixels.permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def panel_png(explained: Explained, scale: str = "row") -> bytes:
    """The maps as a PNG file, as ``eigengrain explain`` draws them."""
    with _matplotlib, tempfile.TemporaryDirectory() as folder:
        return draw_panel([explained], Path(folder) / "panel.png", scale).read_bytes()


def table_csv(session: Session, analysis: Analysis, split: int, cards: Sequence[Prediction]) -> str:
    """A table with one row per number: ``kind, name, subset, value``.

    The kinds are ``view`` (what is shown), ``fact``, ``eigenvalue`` (by rank; ``subset`` is its side of the split) and
    ``probability`` (by class; ``subset`` is what was kept).
    """
    label = "" if analysis.label is None else session.classes[analysis.label]
    view = {"model": session.name, "image": analysis.title, "split": split, "label": label}
    facts = spectrum_facts(analysis.eigenvalues, split)._asdict()
    rows: list[tuple[str, object, str, object]] = [("view", name, "", value) for name, value in view.items()]
    rows += [("fact", name, "", f"{value:.10g}") for name, value in facts.items()]
    rows += [
        ("eigenvalue", rank, "large" if rank <= split else "small", f"{value:.10g}")
        for rank, value in enumerate(analysis.eigenvalues.tolist(), start=1)
    ]
    rows += [
        ("probability", session.classes[number], card.subset, f"{share:.10g}")
        for card in cards
        for number, share in enumerate(card.probabilities.tolist())
    ]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("kind", "name", "subset", "value"))
    writer.writerows([_without_formula(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _without_formula(cell: object) -> str:
    """Quote text that a spreadsheet would run as a formula; numbers are left as they are.

    Example:
        >>> _without_formula("=1+1"), _without_formula("-0.5"), _without_formula("wren")
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
