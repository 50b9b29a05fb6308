"""What is written down of every epoch: accuracy, rates, gradients, speed, and the spectrum of the covariance."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigengrain.functional.subsets import small_part
from eigengrain.training.checkpoint import CheckpointError, write_atomically

COLUMNS = (
    *("epoch", "train_loss", "val_top1", "val_top5", "val_loss", "test_top1", "test_top5", "test_loss"),
    *("lr_backbone", "lr_head", "lr_classifier", "gradient_norm", "images_per_second"),
    *("lambda_1", "log10_condition", "energy_last", "s", "q_norm", "repaired_solves"),
)


@dataclass
class Meter:
    """Sums over the epoch so far; a checkpoint in the middle of an epoch carries them.

    Args:
        loss: sum over batches.
        batches: how many.
        gradient_norm: sum over updates with finite gradients.
        updates: how many.
        images: over all processes.
        seconds: of training.
        repaired: solves of the eigensolver that needed help, over all processes.
        rates: learning rates of the last update.
        spectrum: of the last batch.
    """

    loss: float = 0.0
    batches: int = 0
    gradient_norm: float = 0.0
    updates: int = 0
    images: int = 0
    seconds: float = 0.0
    repaired: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    spectrum: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        return {
            "train_loss": self.loss / max(self.batches, 1),
            "gradient_norm": self.gradient_norm / max(self.updates, 1),
            "images_per_second": self.images / self.seconds if self.seconds else 0.0,
            "repaired_solves": self.repaired,
            **self.rates,
            **self.spectrum,
        }


def spectrum_row(eigenvalues: Tensor, factor: Tensor | None) -> dict[str, float]:
    r"""Medians over a batch of what its spectra say.

    With :math:`\lambda_1 \ge \dots \ge \lambda_d` of the covariance: :math:`\lambda_1`;
    :math:`\log_{10} \lambda_1/\lambda_d`, where eigenvalues below :math:`d\,\epsilon\,\lambda_1` are rounding and read as
    that; the share of the small ones, 50 of 256, in the energy :math:`\sum \lambda`; s; and
    :math:`\|Q\|_F = \sqrt{\sum \lambda}`.

    Args:
        eigenvalues: (B, d), descending.
        factor: s, (B,), or None where the head has none.

    Example:
        >>> row = spectrum_row(torch.tensor([[100.0, 10.0, 9.0, 5.0, 1.0]]), None)
        >>> {name: round(value, 3) for name, value in row.items()}
        {'lambda_1': 100.0, 'log10_condition': 2.0, 'energy_last': 0.008, 'q_norm': 11.18}
    """
    values = eigenvalues.detach().cpu().double()  # in this order: MPS has no float64
    d = values.shape[-1]
    last = small_part(d)
    energy = values.sum(-1)
    floor = d * torch.finfo(torch.float64).eps * values[:, 0]
    row = {
        "lambda_1": values[:, 0],
        "log10_condition": (values[:, 0] / torch.maximum(values[:, -1], floor)).log10(),
        "energy_last": values[:, -last:].sum(-1) / energy,
        "q_norm": energy.clamp_min(0).sqrt(),
    }
    if factor is not None:
        row["s"] = factor.detach().cpu().double()
    return {name: float(value.median()) for name, value in row.items()}


class Summary:
    """``summary.csv``: one row an epoch, on the disk as soon as it is known.

    Args:
        path: of the file.
        epochs: rows that are kept of a file that is there; those of later epochs are about to be written again.
    """

    def __init__(self, path: Path, epochs: int = 0):
        self.path = path
        old: list[dict[str, str]] = []
        if path.is_file() and epochs:
            # of a row that was cut short nothing can be trusted, not even its epoch
            whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
            old = [row for row in csv.DictReader(io.StringIO(whole)) if (row.get("epoch") or "").isdigit()]
        kept = [row for row in old if int(row["epoch"]) <= epochs]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))

    def append(self, row: Mapping[str, Any]) -> None:
        """One more row.

        Raises:
            CheckpointError: if it could not be written; a continued run writes it again.
        """
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writerow({name: _number(row.get(name)) for name in COLUMNS})
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path} ({error.strerror}): free some space and go on with --resume"
            ) from error


def read_summary(path: Path) -> list[dict[str, float]]:
    """The epochs of a ``summary.csv``, with the columns that have a number in them."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.8g}" if isinstance(value, float) else str(value)
