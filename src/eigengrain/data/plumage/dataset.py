"""Plumage as a data set: birds that are drawn when it is opened, with labels and masks."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from eigengrain.data.image_set import Box, ImageSet
from eigengrain.data.plumage import cache as disk
from eigengrain.data.plumage.render import Drawing, Mask, render
from eigengrain.data.plumage.scene import Nuisance, draw_scene
from eigengrain.data.plumage.species import SPECIES
from eigengrain.progress import tracked

PER_CLASS = {"train": 200, "test": 100}
_STREAMS = {"train": 0, "test": 1}
# where a pixel lies: the background is 0
_BIRD, _PART = 1, 2


def draw(seed: int, split: str, index: int, species: int, size: int, nuisance: Nuisance) -> Drawing:
    """One image: the scene depends on (seed, split, index) alone, the marks on the species alone."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, _STREAMS[split], index)))
    return render(draw_scene(np.random.Generator(bits), nuisance), SPECIES[species], size)


class Plumage(ImageSet):
    """Drawn birds whose species differ in small parts only; made by :func:`open_plumage`."""

    def __init__(
        self,
        split: str,
        classes: int,
        images: NDArray[np.uint8],
        regions: NDArray[np.uint8],
        transform: Callable[[Image.Image], Tensor] | None,
        seed: int,
    ):
        labels = [index % classes for index in range(len(images))]
        names = [marks.name for marks in SPECIES[:classes]]
        super().__init__("plumage", split, names, labels, transform=transform, seed=seed)
        self._images, self._regions = images, regions
        # a subset shares the pixels and has rows of its own
        self._rows = np.arange(len(images))

    def image(self, index: int) -> Image.Image:
        """The image of a sample, RGB."""
        return Image.fromarray(self._images[self._rows[index]])

    def mask(self, index: int) -> Mask:
        """Which pixels the bird touches, (H, W)."""
        mask: Mask = self._regions[self._rows[index]] >= _BIRD
        return mask

    def parts(self, index: int) -> Mask:
        """Which pixels tell the species, (H, W): the only ones that would change if the same bird were of another."""
        mask: Mask = self._regions[self._rows[index]] == _PART
        return mask

    def masks(self, index: int) -> Tensor:
        """:meth:`mask` as a tensor."""
        return torch.from_numpy(self.mask(index))

    def boxes(self, index: int) -> Box:
        """(left, top, right, bottom) in pixels around the bird."""
        rows, columns = np.nonzero(self.mask(index))
        return float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)

    def subset(self, indices: Sequence[int]) -> "Plumage":
        """The samples with these numbers, in this order, without a copy of their pixels."""
        part = super().subset(indices)
        if not isinstance(part, Plumage):
            raise TypeError(f"a part of {type(self).__name__} must be of the same kind, got {type(part).__name__}")
        part._rows = self._rows[np.asarray(indices, np.int64)]
        return part


def open_plumage(
    split: str = "train",
    classes: int = 10,
    per_class: int | None = None,
    size: int = 96,
    seed: int = 0,
    cache: bool = True,
    nuisance: Nuisance | None = None,
    transform: Callable[[Image.Image], Tensor] | None = None,
) -> Plumage:
    """A fine-grained data set without files: drawn birds that differ in small parts.

    Species share silhouette and palette; bars on the wing, a ring around the eye, a stripe on the crown, the colour of the
    bill and the pattern of the breast tell them apart, and any two differ in at least two of these. Pose, build, plumage,
    light and background are drawn anew for each image. Sample k is of species k modulo ``classes``, and its scene depends
    on (seed, split, k) alone, so a larger set begins with the smaller one.

    Bars, ring and crown are easily seen and sort the 10 default species into 6 groups; the rest is in the faint marks,
    breast and bill. How faint they are was chosen by the accuracy of average pooling (the head ``gap``) alone, without a
    look at that of any other head: ``eigengrain demo --heads [gap] --seeds [0,1,2,3,4]`` measures it.

    Args:
        split: ``train`` or ``test``; their scenes have nothing in common.
        classes: number of species, 2 to 24.
        per_class: images of each; 200 for training and 100 for testing if None.
        size: side of the images in pixels, at least 32.
        seed: of the drawings, and of the augmentation that ``transform`` may do.
        cache: keep the drawings on disk as well, see :func:`eigengrain.data.plumage.cache_folder`.
        nuisance: how much the scenes vary; the default is the data set that results are reported on.
        transform: see :class:`eigengrain.data.image_set.ImageSet`.

    Raises:
        ValueError: for a split that does not exist, or a number that is out of range.

    Example:
        >>> birds = open_plumage("test", classes=4, per_class=2, size=64, cache=False)
        >>> len(birds), birds.labels[:5], birds.classes[0]
        (8, [0, 1, 2, 3, 0], 'one-barred ringed dark-billed plain-breasted')
        >>> birds.image(3).size, bool((birds.parts(3) <= birds.mask(3)).all())
        ((64, 64), True)
    """
    if split not in _STREAMS:
        raise ValueError(f"plumage has the splits train and test, got {split!r}")
    if not 2 <= classes <= len(SPECIES):
        raise ValueError(f"plumage has 2 to {len(SPECIES)} classes, got {classes}")
    per_class = PER_CLASS[split] if per_class is None else per_class
    if per_class < 1:
        raise ValueError(f"per_class must be at least 1, got {per_class}")
    if size < 32:
        raise ValueError(f"at less than 32 pixels the parts vanish, got size={size}")
    if seed < 0:
        raise ValueError(f"the seed must not be negative, got {seed}")
    nuisance = Nuisance() if nuisance is None else nuisance
    count = classes * per_class
    file = disk.cache_file(seed, split, classes, count, size, nuisance) if cache else None
    arrays = disk.load(file, count, size) if file is not None else None
    if arrays is None:
        arrays = _draw_all(seed, split, classes, count, size, nuisance)
        if file is not None:
            disk.save(file, arrays)
    return Plumage(split, classes, *arrays, transform=transform, seed=seed)


def _draw_all(seed: int, split: str, classes: int, count: int, size: int, nuisance: Nuisance) -> disk.Arrays:
    images = np.empty((count, size, size, 3), np.uint8)
    regions = np.empty((count, size, size), np.uint8)
    for index in tracked(range(count), count, f"drawing birds ({split})"):
        drawing = draw(seed, split, index, index % classes, size, nuisance)
        images[index] = drawing.image
        regions[index] = np.where(drawing.parts, _PART, np.where(drawing.bird, _BIRD, 0))
    return images, regions
