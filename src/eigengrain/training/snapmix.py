r"""SnapMix: a box of each image is replaced by a box of another one, and both keep the labels that they still show.

For an image a and its partner b, with boxes :math:`A` and :math:`B` and maps :math:`S` with the sum 1:

.. math:: \rho_a = 1 - \sum_{p \in A} S_a(p), \qquad \rho_b = \sum_{p \in B} S_b(p), \qquad
   L = \rho_a\, \ell(y_a) + \rho_b\, \ell(y_b)

The content of B is resized to A. The weights need not add up to 1: a box of background that covers the object leaves
nothing of either class. If both images have one class, its weight is :math:`\rho_a + \rho_b`, as the formula says.

The definition is that of Huang, Wang and Tao (AAAI 2021). Their maps are class activation maps, which need average pooling.
Here they are those of :mod:`eigengrain.models.contributions`, which any head has.
"""

import math

import numpy as np
from torch import Tensor
from torch.nn.functional import interpolate

#: rows and columns of a box, each as a slice
Box = tuple[slice, slice]


def draw_box(height: int, width: int, alpha: float) -> Box:
    """A box whose area is a share of the image from Beta(alpha, alpha), around a random point, cut at the borders.

    It has the proportions of the image and at least one pixel, and is drawn from NumPy's generator.
    """
    side = math.sqrt(np.random.beta(alpha, alpha))
    return _interval(height, side), _interval(width, side)


def _interval(size: int, share: float) -> slice:
    length, centre = max(1, round(share * size)), np.random.randint(size)
    start = centre - length // 2
    return slice(max(start, 0), min(start + length, size))


def mass(maps: Tensor, box: Box) -> Tensor:
    """Share (B,) of the sum of each map (B, H, W) that is inside a box; that of its area for a map of zeros.

    Example:
        >>> import torch
        >>> maps = torch.tensor([[[3.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
        >>> mass(maps, (slice(0, 2), slice(1, 2))).tolist()
        [0.25, 0.5]
    """
    maps = maps.where(maps.sum((1, 2), keepdim=True) != 0, 1)
    return maps[:, box[0], box[1]].sum((1, 2)) / maps.sum((1, 2))


def snapmix(images: Tensor, maps: Tensor, box: Box, source: Box) -> tuple[Tensor, Tensor, Tensor]:
    """Mix each image of a batch with the one at the mirrored place, in place.

    Args:
        images: (B, 3, H, W); the middle one of an odd number is mixed with itself.
        maps: S (B, H, W) of the images for their own classes, at least 0, with any sum.
        box: A, the box that is replaced.
        source: B, the box of the partner that replaces it.

    Returns:
        the images, and the weights of their labels (B,) and of their partners' labels (B,).
    """
    content = images.flip(0)[:, :, source[0], source[1]]
    size = (box[0].stop - box[0].start, box[1].stop - box[1].start)
    images[:, :, box[0], box[1]] = interpolate(content, size, mode="bilinear", align_corners=False)
    return images, 1 - mass(maps, box), mass(maps.flip(0), source)
