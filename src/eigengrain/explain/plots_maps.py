"""Images with the maps of eigenvalue subsets and the model's answers: what a panel shows, and what it says of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eigengrain.explain.animation import rgb_pixels
from eigengrain.explain.measures import collapse
from eigengrain.explain.saliency import Subset, Target, attribute_rules
from eigengrain.functional import EigenSubset
from eigengrain.models import CovarianceNet

#: a space at which no line is broken
_KEEP = "\N{NO-BREAK SPACE}"


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
    """Maps of a batch, with the model's answers, ready to be drawn by :func:`eigengrain.explain.plots.draw_panel`.

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
