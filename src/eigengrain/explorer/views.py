"""Answers, numbers and maps as HTML. Every word that is not ours is escaped here."""

import base64
import io
import math
from collections.abc import Sequence
from html import escape

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from eigengrain.explain.measures import norm_ratio
from eigengrain.explain.plots import PERCENTILE, Explained, overlay
from eigengrain.explorer import charts
from eigengrain.explorer.perturbing import Progress
from eigengrain.explorer.session import Answer, Facts, Lens, Look
from eigengrain.functional import EigenSubset

#: classes that an answer names
BEST = 4
#: sides of pictures on the page, in dots; smaller ones are enlarged in the browser
LARGEST = 448


def data_uri(pixels: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    """A picture, uint8 (3, H, W) or (H, W, 3), inside an address."""
    if isinstance(pixels, Tensor):
        pixels = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    picture.thumbnail((LARGEST, LARGEST))
    stream = io.BytesIO()
    picture.save(stream, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def picture(lens: Lens, look: Look) -> str:
    """The image, what it is and what it was taken for."""
    predicted = int(look.scores["all"].argmax())
    parts = [f'<img src="{data_uri(look.pixels)}" alt="the image as the network sees it"/>']
    parts.append(f'<div class="caption"><b>{escape(look.title)}</b>')
    if look.label is not None:
        right = predicted == look.label
        parts.append(f"<br>{escape(lens.classes[look.label])}")
        parts.append(f'<br><span class="{"right" if right else "wrong"}">{"recognised" if right else "mistaken"}</span>')
    if lens.own:
        parts.append(f"<br>The model itself keeps <b>{escape(lens.own)}</b>; <b>all</b> is with the others too")
    return f'<div class="picture">{"".join(parts)}</div></div>'


def numbers(found: Facts, channels: int, split: int) -> str:
    """The numbers of a spectrum as tiles."""
    condition = "∞" if math.isinf(found.condition) else f"{found.condition:.3g}"
    rank = "" if found.rank == channels else f" (rank {found.rank})"
    tiles = (
        ("s", f"{found.s:.4g}", "the factor of the Scaling Eigen Branch, √Σ λ e^(−2λ)"),
        ("κ", condition + rank, "λ₁ over the last eigenvalue"),
        ("effective rank", f"{found.effective_rank:.1f}", "e to the entropy of the eigenvalues' shares"),
        (
            f"energy of the small {channels - split}",
            f"{100 * found.energy:.3g} %",
            "share of the small part in the sum of the eigenvalues",
        ),
        (
            "gap at the cut",
            "between zeros" if math.isnan(found.gap) else f"{found.gap:.3g}",
            "(λ_t − λ_t+1)/λ_t: exact maps grow as its inverse",
        ),
    )
    cells = (f'<div title="{why}"><span>{name}</span><b>{value}</b></div>' for name, value, why in tiles)
    return f'<div class="numbers">{"".join(cells)}</div>'


def spectrum(lens: Lens, look: Look, split: int, answers: Sequence[Answer]) -> str:
    """The chart of the eigenvalues, and below it that of what each part alone is sure of."""
    own = next((answer.subset for answer in answers if answer.role == "custom"), None)
    kept = None if own is None else EigenSubset.parse(own).mask(lens.channels)
    predicted = escape(lens.classes[answers[0].predicted])
    return (
        charts.spectrum(look.eigenvalues, split, kept)
        + f'<p class="note">Probability of <b>{predicted}</b> with the <span class="large">large</span> part alone and the '
        + '<span class="small">small</span> part alone, for every split</p>'
        + charts.profile(lens.profile(look), split, lens.channels)
    )


def predictions(lens: Lens, look: Look, answers: Sequence[Answer]) -> str:
    """What each subset says, side by side."""
    cards = []
    for answer in answers:
        best = answer.probabilities.topk(min(BEST, len(lens.classes)))
        rows = []
        for share, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            true = " true" if number == look.label else ""
            name = escape(lens.classes[number])
            rows.append(
                f'<div class="row{true}" title="{name}"><div class="fill" style="width:{100 * share:.1f}%"></div>'
                f'<span class="class">{name}</span><span class="share">{100 * share:.1f} %</span></div>'
            )
        agrees = answer.predicted == answers[0].predicted
        verdict = "" if answer.role == "all" else "same answer" if agrees else "another answer"
        cards.append(
            f'<div class="card {answer.role}"><h4>{answer.role}<small>{escape(_said(answer))} of '
            f"{lens.channels}</small><em>{verdict}</em></h4>{''.join(rows)}</div>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _said(answer: Answer) -> str:
    return str(answer.kept) if answer.role == answer.subset else f"{answer.subset}, {answer.kept}"


def maps(explained: Explained, roles: dict[str, str], scale: str = "row") -> str:
    """A row a rule and a column a subset; the maps of a row share one scale of colours, or each has its own."""
    heads = "".join(
        f'<div class="head {role}">{role}<small>{"" if role == subset else escape(subset)}</small></div>'
        for role, subset in roles.items()
    )
    rows = []
    for rule, found in explained.maps.items():
        shared = _bright(torch.stack(list(found.values())))
        cells = []
        for subset in roles.values():
            said = explained.remark(rule, subset)
            if not said and subset != "all":
                ratio = float(norm_ratio(found[subset][None], found["all"][None]))
                said = f"norm × {ratio:.2g}" if math.isfinite(ratio) else ""
            shown = data_uri(
                overlay(explained.pixels, found[subset], _bright(found[subset]) if scale == "each" else shared)
            )
            cells.append(
                f'<figure><img src="{shown}" alt="{rule}, {escape(subset)}"/><figcaption>{said}</figcaption></figure>'
            )
        rows.append(f'<div class="rule">{rule}</div>{"".join(cells)}')
    style = f"grid-template-columns: 4.6rem repeat({len(roles)}, minmax(0, 1fr))"
    note = (
        f"Gradient of the score of <b>{escape(explained.target)}</b> with a subset of the eigenvalues kept, over the image "
        f"in grey; one scale of colours a {'row' if scale == 'row' else 'map'}."
    )
    return f'<div class="maps" style="{style}"><div></div>{heads}{"".join(rows)}</div><p class="note">{note}</p>'


def perturbed(look: Look, progress: Progress, toward: str) -> str:
    """The image before and now, what has changed, and the loss on the way."""
    before, now = look.pixels, progress.pixels
    change = ((now.int() - before.int()) * 2 + 128).clamp(0, 255).to(torch.uint8)
    named = (("the image", before), (f"toward {toward}", now), ("change, doubled", change))
    pictures = "".join(
        f'<figure><img src="{data_uri(pixels)}" alt="{name}"/><figcaption>{name}</figcaption></figure>'
        for name, pixels in named
    )
    share = 100 * progress.step / progress.steps
    state = escape(progress.ended) or "running"
    last = f", loss {progress.losses[-1]:.4g}" if progress.losses else ""
    curve = charts.loss_curve(progress.losses, progress.steps)
    return (
        f'<div class="bar"><div style="width:{share:.1f}%"></div></div><p class="note" data-state="{state}">step '
        f"{progress.step} of {progress.steps}{last} · {state}</p>"
        f'<div class="perturbed"><div class="pictures">{pictures}</div>{curve}</div>'
    )


def _bright(found: Tensor) -> float:
    """The value of the brightest colour."""
    values = found[found.isfinite()].double().numpy()
    return float(np.percentile(values, PERCENTILE)) or float(values.max(initial=0.0)) if len(values) else 0.0
