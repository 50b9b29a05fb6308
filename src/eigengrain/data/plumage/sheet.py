"""A look at the data set."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from eigengrain.data.plumage.dataset import Plumage

_OUTLINE = (255, 0, 160)
_CAPTION = 14  # height in pixels


def contact_sheet(dataset: Plumage, classes: int = 6, samples: int = 5, zoom: int = 2, outline: bool = True) -> Image.Image:
    """The first samples of the first classes, a row for each class under its name.

    Args:
        dataset: from :func:`open_plumage`.
        classes: rows at most.
        samples: images a row at most.
        zoom: whole-number enlargement.
        outline: draw a line around the parts that tell the species.

    Example:
        >>> from eigengrain.data.plumage import open_plumage
        >>> contact_sheet(open_plumage("test", classes=3, per_class=2, size=64, cache=False), zoom=1).size
        (128, 234)
    """
    if min(classes, samples, zoom) < 1:
        raise ValueError(f"classes, samples and zoom must be at least 1, got {classes}, {samples} and {zoom}")
    rows = [
        [index for index, label in enumerate(dataset.labels) if label == k][:samples]
        for k in range(min(classes, len(dataset.classes)))
    ]
    side = dataset.image(0).width * zoom
    sheet = Image.new("RGB", (side * max(len(row) for row in rows), (side + _CAPTION) * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    for k, row in enumerate(rows):
        top = k * (side + _CAPTION)
        pen.text((3, top + 1), dataset.classes[k], fill="black")
        for column, index in enumerate(row):
            tile = np.asarray(dataset.image(index)).repeat(zoom, 0).repeat(zoom, 1)
            if outline:
                tile[_edge(dataset.parts(index).repeat(zoom, 0).repeat(zoom, 1))] = _OUTLINE
            sheet.paste(Image.fromarray(tile), (column * side, top + _CAPTION))
    return sheet


def _edge(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Pixels just outside a mask."""
    wide = np.pad(mask, 1)
    near: NDArray[np.bool_] = wide[:-2, 1:-1] | wide[2:, 1:-1] | wide[1:-1, :-2] | wide[1:-1, 2:]
    return near & ~mask
