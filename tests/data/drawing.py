"""Random image files."""

from pathlib import Path
from zlib import crc32

import numpy as np
from PIL import Image


def draw(path, size=(12, 10), seed=None, **options):
    """Write a random image; by default its seed is derived from the end of its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(crc32("/".join(path.parts[-3:]).encode()) if seed is None else seed)
    width, height = size
    Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path, **options)
    return path
