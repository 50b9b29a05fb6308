"""The model and the images of ``eigengrain explain``. Nothing heavy is imported before they are opened."""

import math
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eigengrain.cli.checkpoint import plain_transform, preparation
from eigengrain.cli.evaluate import Evaluate, find_run, open_for_evaluation
from eigengrain.cli.explain_options import Explain
from eigengrain.cli.predict import find_images

if TYPE_CHECKING:
    from eigengrain.data import ImageSet
    from eigengrain.models import CovarianceNet


@dataclass(frozen=True)
class Source:
    """A model and the images that it is asked about.

    Args:
        model: in evaluation mode.
        dataset: the images, with the transform of the model.
        numbers: of those that are measured, the first of them drawn; the choice and its order are those of the seed.
        labelled: whether their classes are known.
        located: whether it is known where the object is.
        problems: images that cannot be read, each with its reason.
    """

    model: "CovarianceNet"
    dataset: "ImageSet"
    numbers: list[int]
    labelled: bool
    located: bool
    problems: tuple[str, ...] = ()

    def place(self, number: int) -> str:
        """The path of an image, or its number in a data set without files; in letters that every file can hold."""
        path = self.dataset.path(number)
        text = f"{self.dataset.split} {number}" if path is None else str(path)
        return "".join(letter if letter.isprintable() else "?" for letter in text)

    def name(self, number: int) -> str:
        return os.path.basename(self.place(number))


def open_source(config: Explain) -> Source:
    """The model and the images of a config.

    Raises:
        ValueError: if one of them is not there, or they do not fit.
    """
    from eigengrain.data.transforms import Pipeline
    from eigengrain.models import from_pretrained

    folder, training = find_run(config.checkpoint)  # a training says which images, and how they were prepared
    if config.images:
        model = from_pretrained(folder)
        dataset, problems = _given_images(config, model)
        return Source(model, dataset, list(range(len(dataset))), labelled=False, located=False, problems=problems)
    if config.data is None and training is None:
        raise ValueError(f"{config.checkpoint!r} does not say its images: give --images, or --data and --root")
    asked = Evaluate(config.checkpoint, config.data, config.root, config.data_options, config.split)
    model, dataset = open_for_evaluation(asked, folder, training)
    if not isinstance(dataset.transform, Pipeline):
        dataset.transform = _transform(model)
    if model.class_names is None:
        model.class_names = list(dataset.classes)
    numbers = list(range(len(dataset)))
    random.Random(config.seed).shuffle(numbers)
    located = isinstance(dataset.transform, Pipeline)
    return Source(model, dataset, numbers[: config.needed], labelled=True, located=located)


def _given_images(config: Explain, model: "CovarianceNet") -> tuple["ImageSet", tuple[str, ...]]:
    """The images at the places that were named, as a data set, and why others are not in it."""
    from eigengrain.data import ImageSet
    from eigengrain.data.decode import decode

    paths, missing = find_images(config.images)
    problems = [f"{each.path}: {each.problem}" for each in missing]
    readable: list[str] = []
    for path in paths:
        if len(readable) == config.needed:
            break
        try:
            decode(path)
        except ValueError as error:
            problems.append(str(error))
        else:
            readable.append(path)
    if not readable:
        raise ValueError("no image can be read: " + "; ".join(problems))
    classes = model.class_names or [str(number) for number in range(max(model.num_classes, 1))]
    dataset = ImageSet("images", "given", classes, [0] * len(readable), readable, _transform(model))
    return dataset, tuple(problems)


def _transform(model: "CovarianceNet") -> Any:
    """What the checkpoint says is done to images: through which regions can be carried, where that can be said."""
    from eigengrain.data import Transforms, build_transform

    how = preparation(model)
    _, height, width = how["input_size"]
    if height != width or how["crop_mode"] not in ("center", "squash"):
        return plain_transform(model)
    common: dict[str, Any] = {"img_size": width, "interpolation": how["interpolation"]}
    if how["crop_mode"] == "squash":
        transforms = Transforms("paper", resize=math.floor(width / how["crop_pct"]), **common)
    else:
        transforms = Transforms("timm", crop_pct=how["crop_pct"], **common)
    return build_transform(transforms, False, how["mean"], how["std"])
