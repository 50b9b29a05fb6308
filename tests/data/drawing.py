"""Image files of noise and of drawn birds."""

from pathlib import Path
from zlib import crc32

import numpy as np
from PIL import Image

from eigengrain.data.plumage import open_plumage


def draw(path, size=(12, 10), seed=None, **options):
    """Write a random image; by default its seed is derived from the end of its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(crc32("/".join(path.parts[-3:]).encode()) if seed is None else seed)
    width, height = size
    Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path, **options)
    return path


def write_birds(folder, classes=6, per_class=20):
    """Write drawn birds into a flat folder, as people keep photographs; return the number of images that can be read.

    There are also a copy in another format, a folder inside a class, a file that is not an image, and a letter.
    """
    birds, folder = open_plumage("train", classes=classes, per_class=per_class, cache=False), Path(folder)
    for number, label in enumerate(birds.labels):
        place = folder / birds.classes[label] / ("garden" if number % 7 == 0 else "")
        place.mkdir(parents=True, exist_ok=True)
        birds.image(number).save(place / f"IMG {number}.{('JPG', 'png', 'webp')[number % 3]}", quality=95)
    first = folder / birds.classes[0]
    birds.image(birds.labels.index(0)).save(first / "copy of a bird.jpg", quality=80)
    (first / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a photograph")
    (first / "Thumbs.db").write_bytes(bytes(8))
    (folder / "notes.txt").write_text("wren: seen on Tuesday")
    return len(birds) + 1
