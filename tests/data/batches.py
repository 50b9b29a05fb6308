"""Images and comparisons for the tests of loaders."""

import numpy as np
import torch
from PIL import Image

from eigengrain.data import ImageSet, Transforms, build_transform

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COUNT = 23


def write_images(folder):
    """Write images of many proportions; returns their paths."""
    generator = np.random.default_rng(0)
    for i in range(COUNT):
        pixels = generator.integers(0, 256, (30 + i, 41 - i % 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return [folder / f"{i}.png" for i in range(COUNT)]


def images(files, kind="imagenet", train=True, **options):
    """A data set of the files, with a transform to 21 × 21 pixels."""
    transform = build_transform(Transforms(kind, 21, **options), train, MEAN, STD)
    return ImageSet("x", "train", ["a", "b", "c"], [i % 3 for i in range(COUNT)], files, transform)


def same(first, second):
    """Whether two sequences of batches are equal, and not empty."""
    pairs = list(zip(first, second, strict=True))
    return len(pairs) > 0 and all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
