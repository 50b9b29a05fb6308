"""Does the score follow the map: pixels are taken out of an image, or put into an empty one, in the order of the map."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from torchvision.transforms import functional as F

from eigengrain.errors import UnknownName
from eigengrain.explain.measures import collapse

BASELINES = ("blur", "mean")

#: standard deviation of the blur, as a share of the image's shorter side: the object is gone, its colours stay
BLUR = 1 / 16


@dataclass(frozen=True)
class Curve:
    """How the probability of a class goes with the share of pixels that were deleted or inserted.

    Args:
        shares: of the pixels, (k + 1,), from 0 to 1.
        scores: probability of the target class, (B, k + 1).
        area: under the curve, (B,); NaN for a map that gives no order. Of two maps the one with the smaller area for
            deletion, the larger one for insertion, found the pixels that the model decides by.
    """

    shares: Tensor
    scores: Tensor
    area: Tensor


def deletion_curve(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    targets: Tensor | int,
    *,
    steps: int = 20,
    baseline: str | Tensor = "blur",
    batch_size: int = 64,
) -> Curve:
    r"""Replace the pixels of an image by those of a baseline, the largest of the map first, and watch the score.

    .. math:: \text{area} = \frac1k \sum_{j=1}^{k} \frac{p_{j-1} + p_j}{2}

    with :math:`p_j` the probability of the target class once the share j/k of the pixels is gone.

    Args:
        model: from images to class scores, on their device; anything that can be called. Its mode is left as it is.
        images: (B, C, H, W).
        maps: (B, H, W), whose largest values go first, or signed gradients (B, C, H, W), collapsed by ``abs-max``. Equal
            values go in an order that is drawn once and is the same for all images and maps.
        targets: class of each image (B,), or one for all.
        steps: k.
        baseline: ``blur``, the image itself blurred; ``mean``, its mean colour; or a tensor that broadcasts to the images,
            such as 0 for the mean colour of a normalised data set.
        batch_size: images that the model sees at once, of all steps together.

    Returns:
        a :class:`Curve` in float64, on the device of the images (on the CPU where that has no float64).

    Raises:
        ValueError: for shapes that do not fit, steps below 1 or more than there are pixels, a class that there is not, or
            an unknown baseline.

    Example:
        >>> model = lambda x: torch.stack([x[:, 0, 0, 0], torch.zeros(len(x))], 1)  # looks at one pixel alone
        >>> map = torch.zeros(1, 2, 2)
        >>> map[0, 0, 0] = 1
        >>> curve = deletion_curve(model, torch.full((1, 1, 2, 2), 9.0), map, 0, steps=4, baseline=torch.zeros(()))
        >>> [round(p, 3) for p in curve.scores[0].tolist()]
        [1.0, 0.5, 0.5, 0.5, 0.5]

    References:
        V. Petsiuk et al., RISE: Randomized Input Sampling for Explanation of Black-box Models, BMVC 2018, Section 4.
    """
    start, end = images, _baseline(images, baseline)
    return _curve(model, start, end, maps, targets, steps, batch_size)


def insertion_curve(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    targets: Tensor | int,
    *,
    steps: int = 20,
    baseline: str | Tensor = "blur",
    batch_size: int = 64,
) -> Curve:
    """Begin with the baseline, put the pixels of the image into it, the largest of the map first, and watch the score.

    All arguments and what is returned are those of :func:`deletion_curve`.

    Example:
        >>> model = lambda x: torch.stack([x[:, 0, 0, 0], torch.zeros(len(x))], 1)
        >>> map = torch.tensor([[[4.0, 3.0], [2.0, 1.0]]])
        >>> curve = insertion_curve(model, torch.full((1, 1, 2, 2), 9.0), map, 0, steps=2, baseline=torch.zeros(()))
        >>> curve.shares.tolist(), round(curve.area.item(), 3)
        ([0.0, 0.5, 1.0], 0.875)
    """
    start, end = _baseline(images, baseline), images
    return _curve(model, start, end, maps, targets, steps, batch_size)


@torch.no_grad()
def _curve(
    model: Callable[[Tensor], Tensor],
    start: Tensor,
    end: Tensor,
    maps: Tensor,
    targets: Tensor | int,
    steps: int,
    batch_size: int,
) -> Curve:
    """The score while the pixels of one image give way to those of another."""
    order, defined = _places(maps, start)
    count, pixels = order.shape
    if not 1 <= steps <= pixels or batch_size < 1:
        raise ValueError(
            f"steps must be 1 to {pixels}, the number of pixels, and batch_size at least 1; got {steps} and {batch_size}"
        )
    wanted = torch.as_tensor(targets, device=start.device)
    whole = not (wanted.is_floating_point() or wanted.is_complex() or wanted.dtype == torch.bool)
    if not whole or wanted.shape not in ((), (count,)):
        raise ValueError(f"targets must be a whole number or one for each of {count} images, got {targets}")
    wanted = wanted.long().expand(count)
    # after step j the first `changed[j]` pixels of the order are changed
    changed = torch.tensor([round(j * pixels / steps) for j in range(steps + 1)], device=start.device)
    # every image at every step, as one long list that is cut into batches
    image = torch.arange(count, device=start.device).repeat_interleave(steps + 1)
    step = torch.arange(steps + 1, device=start.device).repeat(count)
    scores = []
    for which, when in zip(image.split(batch_size), step.split(batch_size), strict=True):
        gone = (order[which] < changed[when, None]).view(-1, 1, *start.shape[2:])
        logits = model(torch.where(gone, end[which], start[which])).detach()
        if logits.ndim != 2 or not 0 <= int(wanted.min()) <= int(wanted.max()) < logits.shape[1]:
            raise ValueError(
                f"the model must return scores (B, classes) that have the classes {wanted.min()} to {wanted.max()}, "
                f"got {tuple(logits.shape)}"
            )
        logits = (logits.cpu() if logits.device.type == "mps" else logits).double()
        scores.append(logits.softmax(1).gather(1, wanted[which, None].to(logits.device))[:, 0])
    p = torch.cat(scores).view(count, steps + 1)
    area = (p[:, 1:] + p[:, :-1]).mean(1) / 2
    shares = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=p.device)
    return Curve(shares, p, torch.where(defined.to(p.device), area, torch.nan))


def _places(maps: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Place of every pixel in the map's descending order (B, n), and whether there is one: not in a constant map."""
    if images.ndim != 4 or len(images) == 0:
        raise ValueError(f"images (B, C, H, W) are expected, got {tuple(images.shape)}")
    if maps.ndim == 4:
        maps = collapse(maps, "abs-max")
    if maps.shape != images[:, 0].shape:
        raise ValueError(f"maps must be as large as the images {tuple(images.shape)}, got {tuple(maps.shape)}")
    values = maps.detach().to(images.device).flatten(1)
    pixels = values.shape[1]
    # shuffled before a stable sort: equal values would else go from the top of the image to its bottom
    shuffle = torch.randperm(pixels, generator=torch.Generator().manual_seed(0)).to(images.device)
    order = shuffle[values[:, shuffle].argsort(dim=1, descending=True, stable=True)]
    places = torch.empty_like(order).scatter_(1, order, torch.arange(pixels, device=images.device).expand_as(order))
    return places, (values.amax(1) > values.amin(1)) & values.isfinite().all(1)


def _baseline(images: Tensor, baseline: str | Tensor) -> Tensor:
    """What pixels are replaced by, as large as the images."""
    if isinstance(baseline, Tensor):
        try:
            return baseline.to(images).expand_as(images)
        except RuntimeError as error:
            raise ValueError(
                f"a baseline must broadcast to the images {tuple(images.shape)}, got {tuple(baseline.shape)}"
            ) from error
    if baseline not in BASELINES:
        raise UnknownName("baseline", baseline, BASELINES)
    if baseline == "mean":
        return images.mean((-2, -1), keepdim=True).expand_as(images)
    sigma = BLUR * min(images.shape[-2:])
    return F.gaussian_blur(images, [2 * math.ceil(3 * sigma) + 1] * 2, [sigma, sigma])
