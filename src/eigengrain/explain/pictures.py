"""Panels as in the paper: an image a row, and beside it its maps, or what it was changed into (Figures 2, 7–9, 11, 12)."""

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengrain.errors import unknown_name
from eigengrain.explain.animation import rgb_pixels
from eigengrain.explain.measures import collapse, norm_ratio
from eigengrain.explain.perturbation import Perturbed
from eigengrain.explain.saliency import Subset, Target, attribute_rules
from eigengrain.functional import EigenSubset
from eigengrain.models import CovarianceNet
from eigengrain.runtime.records import writable

try:
    # figures by themselves, without pyplot: so no window is opened, and a notebook keeps its own way of drawing
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:
    raise ImportError("pictures need matplotlib: pip install 'eigengrain[explain]'") from error

SCALES = ("row", "each")

#: dark to bright in equal steps of lightness, so that it is read alike with every kind of colour vision, and in grey
COLOURS = "inferno"

#: what has the brightest colour: single pixels that are larger would leave all others in the dark
PERCENTILE = 99.5

#: a space at which no line is broken
_KEEP = "\N{NO-BREAK SPACE}"

#: of the image's lightness that is left under a map
_DIMMED = 0.3

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Explained:
    """An image with the maps of eigenvalue subsets, and what is known about it.

    Args:
        pixels: the square that the network saw, uint8 (3, H, W).
        name: of the image.
        maps: rule → subset → map (H, W): the largest absolute gradient of the three colours.
        gaps: subset → relative gap of the eigenvalues at its cut, infinite where nothing is cut.
        cut: how the cut spectrum was differentiated.
        channels: d, the number of eigenvalues.
        positions: N of the feature map; no more than N − 1 eigenvalues are above 0.
        target: class that the maps are of, or what else they are of.
        predicted: class, or None for a model without classes.
        probability: of the predicted class.
        truth: class, where it is known.
    """

    pixels: Tensor
    name: str
    maps: dict[str, dict[str, Tensor]]
    gaps: dict[str, float]
    cut: str
    channels: int
    positions: int
    target: str
    predicted: str | None = None
    probability: float = math.nan
    truth: str | None = None

    @property
    def caption(self) -> str:
        """Name, answer, truth and gap in a line."""
        parts = [self.name] if self.name else []
        if self.predicted is not None:
            right = "" if self.truth is None else ", right" if self.truth == self.predicted else f", true: {self.truth}"
            parts.append(f"predicted: {self.predicted} ({100 * self.probability:.1f} %){right}")
        if self.target != self.predicted:
            parts.append(f"explained: {self.target}")
        return " · ".join([*parts, *self._gap()])

    def _gap(self) -> list[str]:
        subsets: dict[str, list[str]] = {}  # by the text of their gap
        for subset, gap in self.gaps.items():
            if gap != math.inf:
                subsets.setdefault("between zeros" if math.isnan(gap) else f"{gap:.2g}", []).append(subset)
        if len(subsets) > 1:
            return ["gaps at the cuts: " + "; ".join(f"{text} ({', '.join(names)})" for text, names in subsets.items())]
        return [f"gap at the cut: {text}".replace(" ", _KEEP) for text in subsets]

    def remark(self, rule: str, subset: str) -> str:
        """What a map is by the rank of the covariance: zero, or that of all eigenvalues; empty for any other map.

        Example:
            >>> dead = {"all": torch.ones(2, 2), "top:5": torch.ones(2, 2), "last:3": torch.zeros(2, 2)}
            >>> image = Explained(torch.zeros(3, 2, 2).byte(), "", {"vanilla": dead}, {}, "exact", 8, 5, "wren")
            >>> image.remark("vanilla", "last:3"), image.remark("vanilla", "top:5")
            ('zero: rank N−1 = 4 < 6', '= all: rank 4')
        """
        maps, rank = self.maps[rule], self.positions - 1
        kept = EigenSubset.parse(subset).mask(self.channels)
        if not bool(maps[subset].any()):
            first = int(kept.nonzero()[0]) + 1
            return f"zero: rank N−1 = {rank} < {first}" if first > rank else "zero everywhere"
        same = not kept.all() and bool(kept[:rank].all()) and "all" in maps
        return f"= all: rank {rank}" if same and torch.allclose(maps[subset], maps["all"], rtol=1e-3) else ""


def explain_images(
    model: CovarianceNet,
    images: Tensor,
    subsets: Sequence[Subset],
    rules: Sequence[str],
    *,
    target: Target = None,
    cut: str = "exact",
    names: Sequence[str] = (),
    labels: Sequence[int] | None = None,
) -> list[Explained]:
    """Maps of a batch, with the model's answers, ready to be drawn by :func:`draw_panel`.

    Args:
        model: in evaluation mode.
        images: (B, 3, H, W), normalised as the model wants them.
        subsets: of the eigenvalues.
        rules: at the rectifiers.
        target: as for :func:`eigengrain.explain.attribute_rules`.
        cut: ``exact`` or ``projector``.
        names: of the images.
        labels: their classes, where they are known.

    Raises:
        ValueError: as :func:`eigengrain.explain.attribute_rules`, or if names or labels are not one for each image.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3).eval()
        >>> [image] = explain_images(model, torch.zeros(1, 3, 64, 64), ["all", "top:2"], ["vanilla"], names=["black.png"])
        >>> image.maps["vanilla"]["top:2"].shape, image.caption
        (torch.Size([64, 64]), 'black.png · predicted: ... %) · gap\xa0at\xa0the\xa0cut:\xa0...')
    """
    for what, given in (("names", names), ("labels", labels or ())):
        if given and len(given) != len(images):
            raise ValueError(f"{len(given)} {what} for {len(images)} images: give one for each, or none")
    with torch.no_grad():
        features = model.forward_features(images)
        scores = model.forward_head(features).double().cpu() if model.num_classes else None
    likely = None if scores is None else scores.softmax(1).max(1)
    if target is None and likely is not None:
        target = likely.indices.to(images.device)  # the class that the caption names, whatever subset the head keeps
    found = attribute_rules(model, images, subsets, rules, target, cut)
    first = found[next(iter(found))]
    maps = {
        rule: {subset: collapse(signed.detach()).float().cpu() for subset, signed in each.maps.items()}
        for rule, each in found.items()
    }
    gaps = {subset: gap.tolist() for subset, gap in first.gaps.items()}
    targets = first.targets.tolist()
    pixels = rgb_pixels(images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])

    def title(number: int) -> str:
        return str(number) if model.class_names is None else model.class_names[number]

    return [
        Explained(
            pixels=pixels[i],
            name=names[i] if names else "",
            maps={rule: {subset: batch[i] for subset, batch in each.items()} for rule, each in maps.items()},
            gaps={subset: gap[i] for subset, gap in gaps.items()},
            cut=cut,
            channels=model.head.channels,
            positions=features.shape[-2] * features.shape[-1],
            target="norm of the representation" if targets[i] < 0 else title(targets[i]),
            predicted=None if likely is None else title(int(likely.indices[i])),
            probability=math.nan if likely is None else float(likely.values[i]),
            truth=None if labels is None else title(labels[i]),
        )
        for i in range(len(images))
    ]


def overlay(pixels: Tensor, map: Tensor, largest: float) -> Pixels:
    r"""A map in colours over its image, which is dimmed and grey.

    .. math:: v = \min(\sqrt{a / a_{max}},\, 1), \qquad \text{picture} = (1 - v)\,\text{grey} + v\,\text{colour}(v)

    The square root shows maps that are weaker by a hundred times as well, on the same scale.

    Args:
        pixels: uint8 (3, H, W).
        map: a, (H, W), nowhere negative.
        largest: :math:`a_{max}`, of the brightest colour.

    Returns:
        RGB (H, W, 3).

    Example:
        >>> overlay(torch.full((3, 1, 2), 200, dtype=torch.uint8), torch.tensor([[0.0, 2.0]]), largest=2.0).tolist()
        [[[60, 60, 60], [252, 255, 164]]]
    """
    grey = pixels.double().mul(torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0) / 255
    strength = (map.double() / largest).clamp(0, 1).sqrt().nan_to_num(0) if largest > 0 else torch.zeros(map.shape)
    colour = torch.from_numpy(colormaps[COLOURS](strength.numpy())[..., :3])
    strength = strength.unsqueeze(-1)
    blended: Pixels = ((1 - strength) * _DIMMED * grey.unsqueeze(-1) + strength * colour).mul(255).round().byte().numpy()
    return blended


def draw_panel(images: Sequence[Explained], path: str | os.PathLike[str], scale: str = "row") -> Path:
    """One row an image: the image, then for each rule its maps, one a subset.

    The maps of a rule in a row share one colour scale; under each stands its norm over that of all eigenvalues. A map that
    is zero because the covariance has too few positions is labelled so, not drawn.

    Args:
        images: of :func:`explain_images`, with the same rules, subsets and cut.
        path: of the PNG file; its folder is made.
        scale: ``row`` for one scale, ``each`` for one a map.

    Raises:
        ValueError: for no images, images that differ in rules, subsets or cut, or another scale.
    """
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    asked = {(image.cut, tuple((rule, tuple(maps)) for rule, maps in image.maps.items())) for image in images}
    if len(asked) != 1:
        raise ValueError(f"a panel needs images with the same rules, subsets and cut, got {len(asked)} kinds of them")
    first = images[0]
    groups = [("", ["image"])]
    groups += [(rule, [_subset_title(subset) for subset in maps]) for rule, maps in first.maps.items()]
    lines = [_Line(image.caption, [_Cell(_shown(image.pixels)), *_map_cells(image, scale)]) for image in images]
    shared = "one scale for the maps of a rule in a row" if scale == "row" else "each map on a scale of its own"
    what = "score of the explained class" if first.target != "norm of the representation" else "norm of the representation"
    cut = {
        "exact": "exact (the kept subspace turns with the image)",
        "projector": "projector (the kept subspace is held fixed)",
    }
    note = (
        f"Gradient of the {what} with a subset of the {first.channels} eigenvalues kept: the largest absolute value of the "
        f"three colours, over the image in grey. Cut: {cut[first.cut]}. Colour: {shared}, by the square root, brightest "
        f"from the {PERCENTILE:g}th percentile on. Under a map: its norm over that of all eigenvalues."
    )
    return _save(_compose(groups, lines, note, bar=True), path)


def draw_perturbed(
    pixels: Tensor,
    results: Sequence[Perturbed],
    path: str | os.PathLike[str],
    names: Sequence[str] = (),
    columns: int = 3,
) -> Path:
    """One row an image: the image, then what it became toward large and small eigenvalues, after more and more steps.

    Args:
        pixels: the images, uint8 (B, 3, H, W).
        results: of :meth:`EigenPerturbation.perturb` for these images, with snapshots, one for each direction.
        path: of the PNG file; its folder is made.
        names: of the images.
        columns: steps that are shown of each direction.

    Raises:
        ValueError: for a result without snapshots.
    """
    groups = [("", ["image"])]
    shown = []
    for result in results:
        if result.snapshots is None:
            raise ValueError("there are no snapshots to draw: call perturb with snapshots=20, say")
        frames = _spread(len(result.snapshot_steps), columns)
        groups.append((f"toward {result.toward}", [f"step {result.snapshot_steps[frame]}" for frame in frames]))
        shown.append(rgb_pixels(result.snapshots[frames], result.mean, result.std))
    lines = []
    for i, image in enumerate(pixels):
        cells = [_Cell(_shown(image)), *(_Cell(_shown(frame)) for part in shown for frame in part[:, i])]
        lines.append(_Line(" · ".join([*names[i : i + 1], *(_losses(result, i) for result in results)]), cells))
    note = (
        "Images changed, with the weights frozen, until the covariance of their features goes toward that of the "
        f"{results[0].split} largest eigenvalues (l₁, Eq. 11), or away from it toward that of the others (l₂, Eq. 12)."
    )
    return _save(_compose(groups, lines, note, bar=False), path)


def _losses(result: Perturbed, image: int) -> str:
    first, last = result.losses[0, image].item(), result.losses[-1, image].item()
    return f"{'l₁' if result.toward == 'large' else 'l₂'} from {_number(first)} to {_number(last)}"


def _number(value: float) -> str:
    """Three digits, without an exponent where they are easy to read.

    Example:
        >>> [_number(value) for value in (-1443.21, 0.0123456, 5.213e-7)]
        ['−1440', '0.0123', '5.21e-07']
    """
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    text = np.format_float_positional(value, 3, fractional=False, trim="-") if plain else f"{value:.3g}"
    return text.replace("-", "−", 1) if value < 0 else text


def _spread(frames: int, columns: int) -> list[int]:
    """Snapshots to show: never the start, always the end, closer together at first, where the image changes most.

    Example:
        >>> _spread(21, 3), _spread(3, 3), _spread(1, 3)
        ([2, 6, 20], [1, 2], [0])
    """
    return sorted({max(min(1, frames - 1), round((frames - 1) * 0.3**k)) for k in range(columns)})


def _subset_title(subset: str) -> str:
    kind = EigenSubset.parse(subset).kind
    return {"top": f"large\n{subset}", "last": f"small\n{subset}"}.get(kind, f"\n{subset}")


def _shown(pixels: Tensor) -> Pixels:
    return pixels.permute(1, 2, 0).numpy()


def _map_cells(image: Explained, scale: str) -> "list[_Cell]":
    cells = []
    for rule, maps in image.maps.items():
        together = torch.stack(list(maps.values()))
        for subset, map in maps.items():
            remark = image.remark(rule, subset)
            if remark.startswith("zero"):
                cells.append(_Cell(None, remark))
                continue
            pixels = overlay(image.pixels, map, _bright(map if scale == "each" else together))
            cells.append(_Cell(pixels, remark or _strength(maps, subset)))
    return cells


def _bright(maps: Tensor) -> float:
    """The value of the brightest colour."""
    values = maps[maps.isfinite()].numpy()
    return float(np.percentile(values, PERCENTILE)) or float(values.max(initial=0.0)) if len(values) else 0.0


def _strength(maps: dict[str, Tensor], subset: str) -> str:
    if subset == "all" or "all" not in maps:
        return ""
    ratio = norm_ratio(maps[subset][None], maps["all"][None]).item()
    return f"× {ratio:#.2g}" if math.isfinite(ratio) else ""


class _Cell(NamedTuple):
    """RGB (H, W, 3) and what stands under it; without a picture, what stands in its place."""

    picture: Pixels | None
    text: str = ""


class _Line(NamedTuple):
    caption: str
    cells: list[_Cell]


class _Sheet:
    """Where things stand on a panel, in inches from its upper left corner, rounded to whole dots."""

    margin, between, between_groups, between_lines = 0.06, 0.025, 0.11, 0.07
    font, small = 7.0, 6.0
    #: height of a line of text, and width of a letter, of the larger type
    line, letter = 0.125, 0.0505

    def __init__(self, groups: Sequence[tuple[str, Sequence[str]]], side: tuple[int, int]):
        counts = [len(titles) for _, titles in groups]
        gaps = self.between * (sum(counts) - len(counts)) + self.between_groups * (len(counts) - 1)
        free = 7.4 - 2 * self.margin - gaps
        self.cell = min(max(free / sum(counts), 0.62), 1.8)
        self.width = 2 * self.margin + gaps + self.cell * sum(counts)
        self.height_of_cell = self.cell * side[0] / side[1]
        # a whole number of dots a pixel, where that is neither coarse nor heavy
        times = max(math.ceil(190 * self.cell / side[1]), 1)
        self.dpi = min(times * side[1] / self.cell, 300)
        self.width = self.dots(self.width)
        self.lefts: list[list[float]] = []
        left = self.margin
        for count in counts:
            self.lefts.append([left + k * (self.cell + self.between) for k in range(count)])
            left += count * (self.cell + self.between) - self.between + self.between_groups

    def wrapped(self, text: str, width: float | None = None) -> list[str]:
        room = (width or self.width) - 2 * self.margin
        return textwrap.wrap(text, max(int(room / self.letter), 20)) or [""]

    def dots(self, inches: float) -> float:
        return round(inches * self.dpi) / self.dpi


def _save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    path = writable(Path(path))
    figure.savefig(path, dpi=figure.dpi, format="png")
    return path


def _compose(groups: Sequence[tuple[str, Sequence[str]]], lines: Sequence[_Line], note: str, bar: bool) -> Figure:
    """A sheet of rows under column titles, with a note below."""
    side = next(cell.picture.shape[:2] for cell in lines[0].cells if cell.picture is not None)
    sheet = _Sheet(groups, (side[0], side[1]))
    bar_width = 1.3 if bar else 0.0
    notes = sheet.wrapped(note, sheet.width - bar_width - (0.15 if bar else 0))
    captions = [sheet.wrapped(line.caption) for line in lines]
    labelled = 0.115 if any(cell.text for line in lines for cell in line.cells) else 0.0
    low = sheet.margin + 0.06 + (1 + max(title.count("\n") + 1 for _, titles in groups for title in titles)) * sheet.line
    tops = []
    top = low
    for caption in captions:
        top += sheet.between_lines
        tops.append(top)
        top += len(caption) * sheet.line + sheet.height_of_cell + labelled
    height = sheet.dots(top + 0.08 + max(len(notes), 2 if bar else 1) * sheet.line + sheet.margin)

    figure = Figure(figsize=(sheet.width, height), dpi=sheet.dpi)
    page = _Page(figure, sheet, height)
    for (group, titles), lefts in zip(groups, sheet.lefts, strict=True):
        middle = (lefts[0] + lefts[-1] + sheet.cell) / 2
        page.text(middle, sheet.margin + 0.1, group, weight="bold", ha="center", va="baseline")
        if group:
            page.line(lefts[0], lefts[-1] + sheet.cell, sheet.margin + sheet.line + 0.03)
        for title, left in zip(titles, lefts, strict=True):
            for up, words in enumerate(reversed(title.split("\n"))):
                size = sheet.font * min(1, sheet.cell / (sheet.letter * max(len(words), 1)))
                base = low - up * sheet.line - 0.03
                page.text(left + sheet.cell / 2, base, words, ha="center", va="baseline", fontsize=size)
    flat = [left for lefts in sheet.lefts for left in lefts]
    for line, caption, top in zip(lines, captions, tops, strict=True):
        page.text(sheet.margin, top, "\n".join(caption))
        for cell, left in zip(line.cells, flat, strict=True):
            page.cell(left, top + len(caption) * sheet.line, cell)
    page.text(sheet.margin, height - sheet.margin - len(notes) * sheet.line, "\n".join(notes), color="#444444")
    if bar:
        page.bar(sheet.width - sheet.margin - bar_width + 0.1, height - sheet.margin - 0.23, bar_width - 0.2)
    return figure


class _Page:
    """A figure that is addressed in inches from its upper left corner."""

    def __init__(self, figure: Figure, sheet: _Sheet, height: float):
        self.figure, self.sheet, self.height = figure, sheet, height

    def text(self, x: float, y: float, text: str, **look: Any) -> None:
        look = {"fontsize": self.sheet.font, "va": "top", "linespacing": 1.25, **look}
        self.figure.text(x / self.sheet.width, 1 - y / self.height, text, parse_math=False, **look)

    def line(self, left: float, right: float, y: float) -> None:
        across = [left / self.sheet.width, right / self.sheet.width]
        self.figure.add_artist(Line2D(across, [1 - y / self.height] * 2, color="#888888", linewidth=0.6))

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        left, bottom = self.sheet.dots(x), self.sheet.dots(self.height - y - height)
        place = (left / self.sheet.width, bottom / self.height, width / self.sheet.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        return axes

    def cell(self, x: float, y: float, cell: _Cell) -> None:
        sheet = self.sheet
        axes = self.axes(x, y, sheet.cell, sheet.height_of_cell)
        if cell.picture is not None:
            larger = sheet.cell * sheet.dpi >= cell.picture.shape[1]
            axes.imshow(cell.picture, aspect="auto", interpolation="nearest" if larger else "antialiased")
            self.text(x + sheet.cell / 2, y + sheet.height_of_cell + 0.02, cell.text, fontsize=sheet.small, ha="center")
            return
        axes.set_facecolor("#eeeeee")
        text = cell.text.replace(" = ", f"{_KEEP}={_KEEP}").replace("< ", f"<{_KEEP}")
        text = "\n".join(textwrap.wrap(text, max(int(0.9 * sheet.cell / sheet.letter), 8)))
        self.text(x + sheet.cell / 2, y + sheet.height_of_cell / 2, text, fontsize=sheet.small, ha="center", va="center")

    def bar(self, x: float, y: float, width: float) -> None:
        axes = self.axes(x, y, width, 0.08)
        axes.imshow(np.linspace(0, 1, 256)[None], aspect="auto", cmap=COLOURS)
        for share, name in ((0.0, "0"), (0.1, "10 %"), (1.0, "brightest")):
            where = x + width * math.sqrt(share)
            self.text(where, y + 0.1, name, fontsize=self.sheet.small, ha="right" if share == 1 else "center")
