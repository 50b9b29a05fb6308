"""The pictures of a report: classes that are confused, and the worst mistakes with their maps."""

import io
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from eigengrain.data import ImageSet
from eigengrain.heads import TransformerHead
from eigengrain.pages import percent
from eigengrain.report.measured import Measured, confused_pairs
from eigengrain.text import printable
from eigengrain.training.run_folder import TrainedModel

#: pairs of classes that are confused, and pictures of each kind for one pair
PAIRS, EXAMPLES = 6, 3
#: side of a small picture, in pixels
SIDE = 224


class Photo(NamedTuple):
    """A small picture (JPEG), a line about it, and its map if there is one."""

    jpeg: bytes
    text: str
    file: str
    map: bytes | None = None


def pair_examples(measured: Measured, confusion: Tensor) -> list[dict[str, Any]]:
    """The most confused pairs: images that are mistaken, beside images of the class for which they are taken."""
    confidence = measured.probabilities.max(-1).values
    pairs = []
    for true, answer in confused_pairs(confusion, PAIRS):

        def most_confident(label: int, answer: int = answer) -> list[int]:
            chosen = torch.nonzero((measured.labels == label) & (measured.answers == answer))[:, 0]
            return chosen[confidence[chosen].argsort(descending=True, stable=True)][:EXAMPLES].tolist()

        pairs.append(
            {
                "true": measured.dataset.classes[true],
                "answer": measured.dataset.classes[answer],
                "times": int(confusion[true, answer]),
                "images": int(confusion[true].sum()),
                "mistaken": [_photo(measured, index) for index in most_confident(true)],
                "others": [_photo(measured, index) for index in most_confident(answer)],
            }
        )
    return pairs


def worst_mistakes(trained: TrainedModel, measured: Measured, count: int) -> list[dict[str, Any]]:
    """The wrong answers with the highest probability, with the map of the answer if captum and matplotlib are installed."""
    probabilities, classes = measured.probabilities, measured.dataset.classes
    wrong = torch.nonzero(measured.answers != measured.labels)[:, 0]
    chosen = wrong[probabilities[wrong].max(-1).values.argsort(descending=True, stable=True)][:count].tolist()
    maps: list[bytes | None] = [None] * len(chosen)
    if chosen and has_maps(trained) and find_spec("captum") and find_spec("matplotlib"):
        maps = [*draw_maps(trained, measured.dataset, chosen, measured.answers[chosen])]
    return [
        {
            "photo": _photo(measured, index)._replace(map=map),
            "true": classes[int(measured.labels[index])],
            "answer": classes[int(measured.answers[index])],
            "probability": float(probabilities[index].max()),
            "probability_of_true": float(probabilities[index, measured.labels[index]]),
        }
        for index, map in zip(chosen, maps, strict=True)
    ]


def has_maps(trained: TrainedModel) -> bool:
    """Whether a smooth map shows places of the image; a head that pools tokens of no place has none."""
    return not isinstance(trained.model.head, TransformerHead)


def draw_maps(trained: TrainedModel, dataset: ImageSet, indices: Sequence[int], target: Tensor) -> Iterable[bytes]:
    """Smooth maps of a class for some images, over the images as the model sees them."""
    from eigengrain.explain.plots import brightest, overlay, rgb_pixels
    from eigengrain.explain.smooth import smooth_maps

    model = trained.model
    device, described = next(model.parameters()).device, model.pretrained_cfg
    for index, label in zip(indices, target.tolist(), strict=True):
        images = torch.stack([dataset[index][0]])
        map = smooth_maps(model, images.to(device), label)[0].cpu()
        pixels = rgb_pixels(images, described["mean"], described["std"])[0]
        yield _jpeg(Image.fromarray(overlay(pixels, map, brightest(map))))


def _photo(measured: Measured, index: int) -> Photo:
    path = measured.dataset.path(index)
    share = float(measured.probabilities[index].max())
    name = printable(path.name) if path is not None else f"{measured.dataset.split} {index}"
    return Photo(_jpeg(measured.dataset.image(index)), percent(share), name)


def _jpeg(image: Image.Image) -> bytes:
    """A small copy of an image."""
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    image.save(stream := io.BytesIO(), "JPEG", quality=82)
    return stream.getvalue()
