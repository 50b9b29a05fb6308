"""Panels as in the paper: an image a row, and beside it its maps, or what it was changed into (Figures 2, 7–9, 11, 12)."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eigengrain.errors import UnknownName
from eigengrain.explain.animation import rgb_pixels
from eigengrain.explain.measures import norm_ratio
from eigengrain.explain.perturbation import Perturbed
from eigengrain.explain.plots_maps import Explained, explain_images
from eigengrain.explain.plots_sheet import Cell, Line, Pixels, coloured, compose, save
from eigengrain.functional import EigenSubset

__all__ = ["PERCENTILE", "SCALES", "Explained", "draw_panel", "draw_perturbed", "explain_images", "overlay"]

SCALES = ("row", "each")

#: what has the brightest colour: single pixels that are larger would leave all others in the dark
PERCENTILE = 99.5

#: of the image's lightness that is left under a map
_DIMMED = 0.3


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
    colour = torch.from_numpy(coloured(strength.numpy()))
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
        raise UnknownName("scale", scale, SCALES)
    asked = {(image.cut, tuple((rule, tuple(maps)) for rule, maps in image.maps.items())) for image in images}
    if len(asked) != 1:
        raise ValueError(f"a panel needs images with the same rules, subsets and cut, got {len(asked)} kinds of them")
    first = images[0]
    groups = [("", ["image"])]
    groups += [(rule, [_subset_title(subset) for subset in maps]) for rule, maps in first.maps.items()]
    lines = [Line(image.caption, [Cell(_shown(image.pixels)), *_map_cells(image, scale)]) for image in images]
    shared = "one scale for the maps of a rule in a row" if scale == "row" else "each map on a scale of its own"
    what = "score of the explained class" if first.target != "norm of the representation" else "norm of the representation"
    cut = {
        "exact": "exact (the kept subspace turns with the image)",
        "projector": "projector (the kept subspace is held fixed)",
    }
    note = (
        f"Gradient of the {what} with a subset of the {first.channels} eigenvalues kept: the largest absolute value of the "
        f"three colours, over the image in grey. Cut: {cut[first.cut]}. Colour: {shared}, by the square root, brightest "
        f"from the {PERCENTILE:g}th percentile on."
    )
    if any("all" in maps and len(maps) > 1 for maps in first.maps.values()):
        note += " Under a map: its norm over that of all eigenvalues."
    return save(compose(groups, lines, note, bar=True), path)


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
        cells = [Cell(_shown(image)), *(Cell(_shown(frame)) for part in shown for frame in part[:, i])]
        lines.append(Line(" · ".join([*names[i : i + 1], *(_losses(result, i) for result in results)]), cells))
    note = (
        "Images changed, with the weights frozen, until the covariance of their features goes toward that of the "
        f"{results[0].split} largest eigenvalues (l₁, Eq. 11), or away from it toward that of the others (l₂, Eq. 12)."
    )
    return save(compose(groups, lines, note, bar=False), path)


def _losses(result: Perturbed, image: int) -> str:
    """The first and the last loss that were measured; the last is that before the last step."""
    name, losses = "l₁" if result.toward == "large" else "l₂", result.losses[:, image].tolist()
    if len(losses) == 1:
        return f"{name} {_number(losses[0])} at step 0"
    return f"{name} from {_number(losses[0])} to {_number(losses[-1])} at step {len(losses) - 1}"


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


def _map_cells(image: Explained, scale: str) -> list[Cell]:
    cells = []
    for rule, maps in image.maps.items():
        together = torch.stack(list(maps.values()))
        for subset, map in maps.items():
            remark = image.remark(rule, subset)
            if remark.startswith("zero"):
                cells.append(Cell(None, remark))
                continue
            pixels = overlay(image.pixels, map, _bright(map if scale == "each" else together))
            cells.append(Cell(pixels, remark or _strength(maps, subset)))
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
