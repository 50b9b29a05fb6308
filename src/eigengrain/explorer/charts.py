"""Charts as SVG, drawn for each answer anew: a few kilobytes in a millisecond, sharp at every size, dark or light."""

import math
from collections.abc import Sequence

from torch import Tensor

from eigengrain.explorer.session import Profile

WIDTH = 760
#: room at the left for the scale, and at the right
LEFT, RIGHT = 46, 14
#: eigenvalues further below the largest are drawn at the bottom
DECADES = 12


def _across(rank: float, channels: int) -> float:
    """Where an eigenvalue stands; ``rank`` goes from 1 to d."""
    return LEFT + (rank - 0.5) / channels * (WIDTH - LEFT - RIGHT)


def _svg(height: int, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" class="chart" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _path(points: Sequence[tuple[float, float]], kind: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>'


def spectrum(eigenvalues: Tensor, split: int, custom: Tensor | None = None) -> str:
    """Eigenvalues over the largest of them, by decades; the large and the small in their colours, the split between them.

    Args:
        eigenvalues: (d,), descending.
        split: eigenvalues that count as large.
        custom: which of them a subset of the visitor's own keeps, boolean (d,); marked below.
    """
    d, top, bottom = len(eigenvalues), 22.0, 176.0
    largest = float(eigenvalues[0]) or 1.0
    heights = [math.log10(max(float(value) / largest, 10.0**-DECADES)) for value in eigenvalues]
    lowest = min(-1, math.floor(min(heights)))
    width = max((WIDTH - LEFT - RIGHT) / d - (2 if d <= 128 else 0.4), 0.8)
    parts = []
    step = 1 if lowest >= -6 else 2
    for decade in range(0, lowest - 1, -step):
        y = top + decade / lowest * (bottom - top)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y, "grid"), _text(LEFT - 6, y + 4, _power(decade), "end")]
    for rank, height in enumerate(heights, start=1):
        y = top + height / lowest * (bottom - top)
        kind = "large" if rank <= split else "small"
        if float(eigenvalues[rank - 1]) > 0:
            x = _across(rank, d) - width / 2
            tall = max(bottom - y, 1.5)
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - tall:.1f}" width="{width:.1f}" height="{tall:.1f}" class="{kind}"/>'
            )
        if custom is not None and bool(custom[rank - 1]):
            parts.append(
                f'<circle cx="{_across(rank, d):.1f}" cy="{bottom + 6:.1f}" r="{min(width / 2, 2.5):.1f}" class="custom"/>'
            )
    middle = (_across(split, d) + _across(split + 1, d)) / 2
    parts += [
        _line(middle, 6, middle, bottom + 10, "cut"),
        _text(middle - 8, 14, f"large: {split}", "end", "name large") if split > d / 8 else "",
        _text(middle + 8, 14, f"small: {d - split}", "start", "name small") if split < d - d / 8 else "",
        _text(LEFT - 6, 12, "λ/λ₁", "end", "tick unit"),
    ]
    ranks = sorted({1, *range(d // 8 or 1, d + 1, d // 8 or 1)})
    parts += [_text(_across(rank, d), bottom + 22, str(rank)) for rank in ranks]
    return _svg(202, parts, f"eigenvalue spectrum, {split} of {d} count as large")


def profile(found: Profile, split: int, channels: int) -> str:
    """How sure the large and the small part alone are of the predicted class, at every split."""
    top, bottom = 8.0, 84.0

    def place(t: int, share: float) -> tuple[float, float]:
        return (_across(t, channels) + _across(t + 1, channels)) / 2, bottom - share * (bottom - top)

    parts = []
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - top)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y, "grid"), _text(LEFT - 6, y + 4, f"{100 * share:.0f} %", "end")]
    for kind, shares in (("large", found.large), ("small", found.small)):
        parts.append(_path([place(t, share) for t, share in zip(found.splits, shares, strict=True)], f"curve {kind}"))
        nearest = min(range(len(found.splits)), key=lambda k: abs(found.splits[k] - split))
        x, y = place(found.splits[nearest], shares[nearest])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/>')
    x, _ = place(split, 0)
    parts.append(_line(x, top - 4, x, bottom + 4, "cut"))
    return _svg(96, parts, "probability of the predicted class with one part alone, for every split")


def loss_curve(losses: Sequence[float], steps: int) -> str:
    """The loss of a perturbation so far, over the steps that it may take."""
    top, bottom = 12.0, 150.0
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return _svg(176, [_text(WIDTH / 2, 84, "the loss will be drawn here")], "no loss yet")
    low, high = min(finite), max(finite)
    span = (high - low) or abs(high) or 1.0

    def place(step: int, loss: float) -> tuple[float, float]:
        x = LEFT + 24 + step / max(steps - 1, 1) * (WIDTH - LEFT - 24 - RIGHT)
        return x, bottom - (loss - low) / span * (bottom - top)

    parts = [_line(LEFT + 24, y, WIDTH - RIGHT, y, "grid") for y in (top, bottom)]
    parts += [_text(LEFT + 18, top + 4, _number(high), "end"), _text(LEFT + 18, bottom + 4, _number(low), "end")]
    points = [place(step, loss) for step, loss in enumerate(losses) if math.isfinite(loss)]
    x, y = points[-1]
    parts += [
        _path(points, "curve loss"),
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="loss"/>',
        _text(LEFT + 24, bottom + 18, "1"),
        _text(WIDTH - RIGHT, bottom + 18, f"step {steps}", "end"),
    ]
    return _svg(174, parts, f"loss after {len(losses)} of {steps} steps")


def _number(value: float) -> str:
    """Four digits, with an exponent only where they are hard to read without.

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
    raised = str(decade).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if decade == 0 else f"10{raised}"
