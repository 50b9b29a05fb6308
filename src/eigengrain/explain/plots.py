"""Panels with one row per image: its maps, or its perturbed versions (Figures 2, 7–9, 11, 12); and animations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from torchvision.utils import make_grid

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain.measures import collapse, norm_ratio
from eigengrain.explain.perturbation import Perturbed
from eigengrain.explain.saliency import Subset, Target, attribute_rules
from eigengrain.explain.sheet import COLOURS, KEEP, Cell, Line, Pixels, compose, save
from eigengrain.files import writable
from eigengrain.functional import EigenSubset
from eigengrain.heads import Parts
from eigengrain.models import CovarianceNet
from eigengrain.names import SCALES

#: percentile of a map that has the brightest colour; a few larger pixels would make all others dark
PERCENTILE = 99.5

#: colour of the frame of a selected part, and share of the lightness that is left outside
PART_COLOUR, PART_DIMMED = (255, 60, 0), 0.45

#: share of the image's lightness that is left under a map
_DIMMED = 0.3


@dataclass(frozen=True, eq=False)
class Explained:
    """An image with the maps of eigenvalue subsets and the prediction of the model."""

    pixels: Tensor  #: the image as the network sees it, uint8 (3, H, W)
    name: str  #: name of the image
    maps: dict[str, dict[str, Tensor]]  #: rule → subset → map (H, W): the largest absolute gradient of the three colours
    gaps: dict[str, float]  #: subset → relative gap of the eigenvalues at its cut; infinite for all eigenvalues
    cut: str  #: how the cut spectrum was differentiated
    channels: int  #: d, the number of eigenvalues
    positions: int  #: N, the number of positions of the feature map; at most N − 1 eigenvalues are above 0
    target: str | None  #: class that the maps explain; None for the norm of the representation
    predicted: str | None = None  #: predicted class; None for a model without classes
    probability: float = math.nan  #: probability of the predicted class
    truth: str | None = None  #: true class, if it is available

    @property
    def caption(self) -> str:
        """Name, prediction, true class and gap in one line."""
        parts = [self.name] if self.name else []
        if self.predicted is not None:
            right = "" if self.truth is None else ", right" if self.truth == self.predicted else f", true: {self.truth}"
            parts.append(f"predicted: {self.predicted} ({100 * self.probability:.1f} %){right}")
        if self.target is None or self.target != self.predicted:
            parts.append(f"explained: {self.target or 'norm of the representation'}")
        return " · ".join([*parts, *self._gap()])

    def _gap(self) -> list[str]:
        subsets: dict[str, list[str]] = {}  # by the text of their gap
        for subset, gap in self.gaps.items():
            if gap != math.inf:
                subsets.setdefault("between zeros" if math.isnan(gap) else f"{gap:.2g}", []).append(subset)
        if len(subsets) > 1:
            return ["gaps at the cuts: " + "; ".join(f"{text} ({', '.join(names)})" for text, names in subsets.items())]
        return [f"gap at the cut: {text}".replace(" ", KEEP) for text in subsets]

    def is_zero(self, rule: str, subset: str) -> bool:
        """Whether a map is zero everywhere."""
        return not bool(self.maps[rule][subset].any())

    def remark(self, rule: str, subset: str) -> str:
        """A note for a map that is zero or equals the map of all eigenvalues because of the rank; empty for other maps.

        Example:
            >>> dead = {"all": torch.ones(2, 2), "top:5": torch.ones(2, 2), "last:3": torch.zeros(2, 2)}
            >>> image = Explained(torch.zeros(3, 2, 2).byte(), "", {"vanilla": dead}, {}, "exact", 8, 5, "wren")
            >>> image.remark("vanilla", "last:3"), image.remark("vanilla", "top:5")
            ('zero: rank N−1 = 4 < 6', '= all: rank 4')
        """
        maps, rank = self.maps[rule], self.positions - 1
        kept = EigenSubset.parse(subset).mask(self.channels)
        if self.is_zero(rule, subset):
            first = int(kept.nonzero()[0]) + 1
            return f"zero: rank N−1 = {rank} < {first}" if first > rank else "zero everywhere"
        same = not kept.all() and bool(kept[:rank].all()) and "all" in maps
        return f"= all: rank {rank}" if same and torch.allclose(maps[subset], maps["all"], rtol=1e-3) else ""

    def strength(self, rule: str, subset: str) -> float:
        """Norm of a map divided by the norm of the map of all eigenvalues; NaN if it is undefined or trivial."""
        map, whole = self.maps[rule][subset], self.maps[rule].get("all")
        return math.nan if subset == "all" or whole is None else norm_ratio(map[None], whole[None]).item()


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
    classes: Sequence[str] | None = None,
) -> list[Explained]:
    """Compute the maps and predictions of a batch, ready for :func:`draw_panel`.

    The first arguments are those of :func:`eigengrain.explain.attribute_rules`. ``names`` and ``labels`` have one entry per
    image; ``classes`` are the names of the classes, by default those of the model.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3).eval()
        >>> [image] = explain_images(model, torch.zeros(1, 3, 64, 64), ["all", "top:2"], ["vanilla"], names=["black.png"])
        >>> image.maps["vanilla"]["top:2"].shape, image.caption
        (torch.Size([64, 64]), 'black.png · predicted: ... %) · gap\xa0at\xa0the\xa0cut:\xa0...')
    """
    for argument, values in (("names", names), ("labels", labels or ())):
        if values and len(values) != len(images):
            raise ArgumentError(argument, f"must have one entry for each of {len(images)} images", len(values))
    with torch.no_grad():
        features = model.forward_features(images)
        scores = model.forward_head(features).cpu().double() if model.num_classes else None
    likely = None if scores is None else (scores / model.temperature).softmax(1).max(1)
    if target is None and likely is not None:
        target = likely.indices.to(images.device)  # the class in the caption, whatever subset the head keeps
    results = attribute_rules(model, images, subsets, rules, target, cut)
    first = next(iter(results.values()))
    maps = {
        rule: {subset: collapse(signed.detach()).float().cpu() for subset, signed in result.maps.items()}
        for rule, result in results.items()
    }
    pixels = rgb_pixels(images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    titles = classes or model.class_names or list(map(str, range(model.num_classes)))
    return [
        Explained(
            pixels=pixels[i],
            name=names[i] if names else "",
            maps={rule: {subset: batch[i] for subset, batch in each.items()} for rule, each in maps.items()},
            gaps={subset: gap[i].item() for subset, gap in first.gaps.items()},
            cut=cut,
            channels=model.head.channels,
            positions=features.shape[-2] * features.shape[-1],
            target=None if first.targets[i] < 0 else titles[int(first.targets[i])],
            predicted=None if likely is None else titles[int(likely.indices[i])],
            probability=math.nan if likely is None else likely.values[i].item(),
            truth=None if labels is None else titles[labels[i]],
        )
        for i in range(len(images))
    ]


def overlay(pixels: Tensor, map: Tensor, largest: float) -> Pixels:
    r"""Draw a map in colours over its image, which is dimmed and grey.

    .. math:: v = \min(\sqrt{a / a_{max}},\, 1), \qquad \text{picture} = (1 - v)\,\text{grey} + v\,\text{colour}(v)

    The image is uint8 (3, H, W), the map a (H, W) is non-negative, and ``largest`` is :math:`a_{max}`; the picture is RGB,
    (H, W, 3). The square root makes maps that are a hundred times weaker visible on the same scale.

    Example:
        >>> overlay(torch.full((3, 1, 2), 200, dtype=torch.uint8), torch.tensor([[0.0, 2.0]]), largest=2.0).tolist()
        [[[60, 60, 60], [252, 255, 164]]]
    """
    grey = np.tensordot(_array(pixels), [0.299, 0.587, 0.114], 1)[..., None] / 255
    strength = (map.double() / largest).clamp(0, 1).sqrt().nan_to_num(0).numpy() if largest > 0 else np.zeros(map.shape)
    colour = COLOURS(strength)[..., :3]
    blended: Pixels = (
        (255 * ((1 - strength[..., None]) * _DIMMED * grey + strength[..., None] * colour)).round().astype("u1")
    )
    return blended


def brightest(maps: Tensor) -> float:
    """The value of the brightest colour for maps that share a scale."""
    values = maps[maps.isfinite()].numpy()
    return float(np.percentile(values, PERCENTILE)) or float(values.max(initial=0.0)) if len(values) else 0.0


def draw_panel(images: Sequence[Explained], path: str | Path, scale: str = "row") -> Path:
    """Draw one row per image: the image, then one map per rule and subset.

    Under each map is its norm divided by the norm of the map of all eigenvalues. A map that is zero because the covariance
    has too few positions is labelled instead of drawn. The file is a PNG, and its folder is created. With the scale ``row``
    the maps of a rule in a row share one colour scale; with ``each`` every map has its own.
    """
    if scale not in SCALES:
        raise UnknownName("scale", scale, SCALES)
    kinds = {(image.cut, tuple((rule, tuple(maps)) for rule, maps in image.maps.items())) for image in images}
    if len(kinds) != 1:
        raise ArgumentError("images", f"must have the same rules, subsets and cut; there are {len(kinds)} combinations")
    first = images[0]
    groups = [("", ["image"])]
    groups += [(rule, [_subset_title(subset) for subset in maps]) for rule, maps in first.maps.items()]
    lines = [Line(image.caption, [Cell(_array(image.pixels)), *_map_cells(image, scale)]) for image in images]
    output = "score of the explained class" if first.target is not None else "norm of the representation"
    turns = {"exact": "turns with the image", "projector": "is held fixed"}
    colour = "one scale for the maps of a rule in a row" if scale == "row" else "one scale per map"
    note = (
        f"Gradient of the {output} with a subset of the {first.channels} eigenvalues kept: the largest absolute value of "
        f"the three colours, over the image in grey. Cut: {first.cut} (the kept subspace {turns[first.cut]}). Colour: "
        f"square root, {colour}, brightest from the {PERCENTILE:g}th percentile."
    )
    if "smooth" in first.maps:
        note += " Smooth maps: features times gradient at the positions of the feature map, where it is positive."
    if any("all" in maps and len(maps) > 1 for maps in first.maps.values()):
        note += " Under a map: its norm relative to that of all eigenvalues."
    return save(compose(groups, lines, note, bar=True), path)


def _map_cells(image: Explained, scale: str) -> list[Cell]:
    cells = []
    for rule, maps in image.maps.items():
        together = torch.stack(list(maps.values()))
        for subset, map in maps.items():
            remark, strength = image.remark(rule, subset), image.strength(rule, subset)
            if image.is_zero(rule, subset):
                cells.append(Cell(None, remark))
                continue
            pixels = overlay(image.pixels, map, brightest(map if scale == "each" else together))
            cells.append(Cell(pixels, remark or (f"× {strength:#.2g}" if math.isfinite(strength) else "")))
    return cells


def _subset_title(subset: str) -> str:
    kind = EigenSubset.parse(subset).kind
    return {"top": f"large\n{subset}", "last": f"small\n{subset}"}.get(kind, f"\n{subset}")


def _array(pixels: Tensor) -> Pixels:
    return pixels.permute(1, 2, 0).numpy()


def draw_perturbed(
    pixels: Tensor, results: Sequence[Perturbed], path: str | Path, names: Sequence[str] = (), columns: int = 3
) -> Path:
    """Draw one row per image: the image, then its perturbed versions after more and more steps.

    The images are uint8 (B, 3, H, W), with one result of :meth:`EigenPerturbation.perturb` per direction, with snapshots;
    ``columns`` is the number of steps to show per direction. The file is a PNG, and its folder is created.
    """
    groups = [("", ["image"])]
    pictures = []
    for result in results:
        snapshots, frames = _snapshot_pixels(result), _spread(len(result.snapshot_steps), columns)
        groups.append((f"toward {result.toward}", [f"step {result.snapshot_steps[frame]}" for frame in frames]))
        pictures.append(snapshots[frames])
    lines = []
    for i, image in enumerate(pixels):
        cells = [Cell(_array(image)), *(Cell(_array(frame)) for part in pictures for frame in part[:, i])]
        lines.append(Line(" · ".join([*names[i : i + 1], *(_losses(result, i) for result in results)]), cells))
    note = (
        "Images perturbed, with the weights frozen, until the covariance of their features approaches the part with the "
        f"{results[0].split} largest eigenvalues (l₁, Eq. 11), or leaves it and approaches the rest (l₂, Eq. 12)."
    )
    return save(compose(groups, lines, note, bar=False), path)


def draw_parts(pixels: Tensor, parts: Parts, path: str | Path, names: Sequence[str] = ()) -> Path:
    """Draw one row per image: the image, and the image with the boxes that its head selects, darker outside of them.

    The images are uint8 (B, 3, H, W), the parts those of :meth:`CovarianceNet.selected_parts`. A patch that several
    attention heads select has one box. The file is a PNG, and its folder is created.
    """
    lines = []
    for i, image in enumerate(pixels):
        boxes = dict.fromkeys(tuple(map(round, box)) for box in parts.boxes[i].tolist())
        lit = (_array(image) * PART_DIMMED).astype(np.uint8)
        for x0, y0, x1, y1 in boxes:
            lit[y0:y1, x0:x1] = _array(image)[y0:y1, x0:x1]
        drawn = Image.fromarray(lit)
        pen, width = ImageDraw.Draw(drawn), max(1, round(min(image.shape[1:]) / 150))
        for x0, y0, x1, y1 in boxes:
            pen.rectangle((x0, y0, x1 - 1, y1 - 1), outline=PART_COLOUR, width=width)
        lines.append(Line("".join(names[i : i + 1]), [Cell(_array(image)), Cell(np.asarray(drawn))]))
    count = parts.boxes.shape[1]
    kind = "region" if parts.indices is None else "patch"
    note = f"Parts of the image that the head selects by attention, {count} per image; each {kind} in a frame."
    return save(compose([("", ["image", "parts"])], lines, note, bar=False), path)


def _snapshot_pixels(result: Perturbed) -> Tensor:
    if result.snapshots is None:
        raise ArgumentError("result", "has no snapshots", remedy="call perturb with snapshots=20, for example")
    return rgb_pixels(result.snapshots, result.mean, result.std)


def _losses(result: Perturbed, image: int) -> str:
    """The first and the last measured loss; the last is measured before the last step."""
    name, losses = "l₁" if result.toward == "large" else "l₂", result.losses[:, image].tolist()
    if len(losses) == 1:
        return f"{name} {_number(losses[0])} at step 0"
    return f"{name} from {_number(losses[0])} to {_number(losses[-1])} at step {len(losses) - 1}"


def _number(value: float) -> str:
    """Three digits, with an exponent only for very small and very large numbers.

    Example:
        >>> [_number(value) for value in (-1443.21, 0.0123456, 5.213e-7)]
        ['−1440', '0.0123', '5.21e-07']
    """
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    text = np.format_float_positional(value, 3, fractional=False, trim="-") if plain else f"{value:.3g}"
    return text.replace("-", "−", 1) if value < 0 else text


def _spread(frames: int, columns: int) -> list[int]:
    """Snapshots to show: not the start, always the end, and closer together at first, where the image changes most.

    Example:
        >>> _spread(21, 3), _spread(3, 3), _spread(1, 3)
        ([2, 6, 20], [1, 2], [0])
    """
    return sorted({max(min(1, frames - 1), round((frames - 1) * 0.3**k)) for k in range(columns)})


def rgb_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Convert normalised images (*, 3, H, W) to RGB from 0 to 255, uint8, on the CPU, clipped to that range.

    Example:
        >>> rgb_pixels(torch.tensor([-1.0, 0.0, 9.0]).view(3, 1, 1), mean=(0.5,) * 3, std=(0.5,) * 3).flatten()
        tensor([  0, 128, 255], dtype=torch.uint8)
    """
    if images.ndim < 3 or not images.shape[-3] == len(mean) == len(std) == 3:
        problem = "must be (*, 3, H, W), with three values in {mean} and {std}"
        raise ArgumentError("images", problem, (tuple(images.shape), *mean, *std))
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (std, mean))
    return (images.detach().cpu().float() * scale + shift).mul(255).round().clamp(0, 255).byte()


def film_frames(result: Perturbed, columns: int | None = None) -> list[Image.Image]:
    """One picture per snapshot, with the images of the batch side by side, in rows of ``columns`` images."""
    if columns is not None and columns < 1:
        raise ArgumentError("columns", "must be at least 1", columns)
    batches = _snapshot_pixels(result)
    grids = (make_grid(batch, nrow=columns or len(batch), padding=2, pad_value=255) for batch in batches)
    return [Image.fromarray(_array(grid)) for grid in grids]


def write_gif(
    result: Perturbed, path: str | Path, seconds_per_frame: float = 0.1, hold: float = 1.0, columns: int | None = None
) -> Path:
    """Write the snapshots as an animated GIF that repeats.

    A GIF has 256 colours per frame: for exact pixels use :func:`rgb_pixels`. Equal consecutive frames are joined into one
    that is shown longer. The last frame is held for ``hold`` seconds; ``columns`` is the number of images per row, by
    default all. Frames last at least 0.02 seconds, because viewers slow down faster animations.
    """
    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ArgumentError("path", "must end in .gif", path.name)
    for argument, seconds in (("seconds_per_frame", seconds_per_frame), ("hold", hold)):
        if seconds < 0.02:
            raise ArgumentError(argument, "must be at least 0.02", seconds)
    first, *others = film_frames(result, columns)
    times = [*[round(1000 * seconds_per_frame)] * len(others), round(1000 * hold)]
    first.save(writable(path), save_all=True, append_images=others, duration=times, loop=0)
    return path
