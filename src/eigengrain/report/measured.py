"""The scores of a model for the images of a data set, and the numbers that follow from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eigengrain.data import ImageSet, make_loader
from eigengrain.errors import ArgumentError
from eigengrain.progress import progress_bar
from eigengrain.text import wilson_interval
from eigengrain.training.calibration import collect, expected_calibration_error, fit_temperature
from eigengrain.training.run_folder import TrainedModel


@dataclass(frozen=True, eq=False)
class Measured:
    """The scores of a model for the images of a data set, and the temperature of its probabilities."""

    dataset: ImageSet
    logits: Tensor  # (n, classes), float64
    labels: Tensor  # (n,)
    temperature: float
    fitted_on: int  # validation images from which the temperature is; 0 for a temperature of 1

    @property
    def probabilities(self) -> Tensor:
        return (self.logits / self.temperature).softmax(-1)

    @property
    def answers(self) -> Tensor:
        return self.logits.argmax(-1)

    @property
    def right(self) -> int:
        return int((self.answers == self.labels).sum())

    @property
    def confusion(self) -> Tensor:
        """Number of images by true class (row) and answer (column)."""
        classes = self.logits.shape[1]
        return torch.bincount(self.labels * classes + self.answers, minlength=classes**2).view(classes, classes)

    def calibration_errors(self) -> tuple[float, float]:
        """Expected calibration error of the plain scores and with the temperature."""
        return (
            expected_calibration_error(self.logits.softmax(-1), self.labels),
            expected_calibration_error(self.probabilities, self.labels),
        )

    def summary(self) -> dict[str, Any]:
        """The numbers of the page for ``--json``."""
        before, after = self.calibration_errors()
        samples = len(self.labels)
        return {
            "samples": samples,
            "top1": 100 * self.right / samples,
            "interval": [100 * bound for bound in wilson_interval(self.right, samples)],
            "temperature": self.temperature,
            "calibration_error": before,
            "calibration_error_with_temperature": after,
            "classes": [row._asdict() for row in class_rows(self.confusion, self.dataset.classes)],
        }


def measure(
    trained: TrainedModel,
    split: str = "test",
    *,
    data: str | None = None,
    root: str | None = None,
    data_options: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    workers: int = 4,
) -> Measured:
    """Classify the images of a split; a model that was not calibrated yet is calibrated on its validation images.

    ``data``, ``root`` and ``data_options`` are the data set, by default that of the training.
    """
    dataset = trained.dataset(split, name=data, root=root, options=dict(data_options or {}))
    logits, labels = _classify(trained, dataset, batch_size, workers)
    calibration = trained.model.calibration
    validation = None if data is not None else validation_images(trained, root)
    if calibration is not None:
        temperature, fitted_on = trained.model.temperature, len(validation or ()) or 1
    elif validation is not None:
        temperature, fitted_on = fit_temperature(*_classify(trained, validation, batch_size, workers)), len(validation)
    else:
        temperature, fitted_on = 1.0, 0
    return Measured(dataset, logits, labels, temperature, fitted_on)


def validation_images(trained: TrainedModel, root: str | None) -> ImageSet | None:
    """The validation images of a training, None if it had none."""
    try:
        return trained.dataset("val", root=root)
    except ArgumentError as error:
        if error.argument != "split":
            raise
        return None


def _classify(trained: TrainedModel, dataset: ImageSet, batch_size: int, workers: int) -> tuple[Tensor, Tensor]:
    loader = make_loader(dataset, batch_size, train=False, workers=workers)
    with progress_bar() as bar:
        task = bar.add_task(f"report: {dataset.split} images", total=len(loader))
        return collect(trained.model, loader, each=lambda: bar.advance(task), **trained.precision)[:2]


class ClassRow(NamedTuple):
    """Precision and recall of one class; NaN where they are not defined."""

    number: int  # from 1
    name: str
    images: int
    recall: float  # share of its images that are found
    precision: float  # share of the answers with this class that are right
    f1: float  # harmonic mean of the two
    taken_for: str  # the most frequent wrong answer
    times: int


def class_rows(confusion: Tensor, classes: Sequence[str]) -> list[ClassRow]:
    """One row per class, the worst (smallest F1) first; classes without images are last."""
    right, images, answers = confusion.diag().double(), confusion.sum(1).double(), confusion.sum(0).double()
    recall, precision, f1 = right / images, right / answers, 2 * right / (images + answers)
    wrong = confusion - torch.diag(confusion.diag())
    times, other = wrong.max(1)
    rows = [
        ClassRow(
            number=k + 1,
            name=name,
            images=int(images[k]),
            recall=float(recall[k]),
            precision=float(precision[k]),
            f1=float(f1[k]) if images[k] else math.nan,
            taken_for=classes[int(other[k])] if times[k] else "",
            times=int(times[k]),
        )
        for k, name in enumerate(classes)
    ]
    return sorted(rows, key=lambda row: (math.isnan(row.f1), row.f1, row.recall))


def confused_pairs(confusion: Tensor, count: int) -> list[tuple[int, int]]:
    """The most frequent (true class, answer) that are wrong, by the number of images."""
    wrong = confusion.clone().fill_diagonal_(0)
    order = wrong.flatten().argsort(descending=True, stable=True)[:count].tolist()
    classes = len(confusion)
    return [(place // classes, place % classes) for place in order if wrong.flatten()[place] > 0]
