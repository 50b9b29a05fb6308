"""Measurements of every epoch: accuracy, learning rates, gradients, speed, and the spectrum of the covariance."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigengrain.errors import CheckpointError
from eigengrain.files import read_text
from eigengrain.functional import rounding_floor, solver_repairs
from eigengrain.functional.subsets import small_part
from eigengrain.training.checkpoint import write_atomically
from eigengrain.training.distributed import Process

COLUMNS = (
    *("epoch", "train_loss", "train_top1", "val_top1", "val_top5", "val_loss", "test_top1", "test_top5", "test_loss"),
    *("lr_backbone", "lr_head", "lr_classifier", "gradient_norm", "images_per_second"),
    *("lambda_1", "log10_condition", "energy_last", "s", "q_norm", "repaired_solves"),
)


@dataclass
class Meter:
    """Sums over the current epoch and over all processes; they are part of a checkpoint within an epoch."""

    loss: float = 0.0
    batches: int = 0
    gradient_norm: float = 0.0
    updates: int = 0  # with finite gradients
    images: int = 0
    hits: float = 0.0  # images whose class has the highest score, see :func:`eigengrain.training.loss.hits`
    seconds: float = 0.0
    repaired: int = 0  # eigendecompositions that needed a fallback
    rates: dict[str, float] = field(default_factory=dict)  # learning rates of the last update, by column
    spectrum: dict[str, float] = field(default_factory=dict)  # of the last batch, by column

    def add(self, losses: list[Tensor], hits: list[Tensor], norms: list[Tensor], process: Process) -> list[float]:
        """Add losses, hits and gradient norms of this process; return the losses as means over the processes."""
        repaired = losses[0].new_tensor(sum(solver_repairs(reset=True).values()))
        counts = (torch.stack(hits).sum().to(repaired), repaired)
        *sums, hit, repairs = process.sum(torch.stack([*losses, *counts])).tolist()  # one exchange for all
        means = [each / process.world_size for each in sums]
        for loss in means:  # one by one: the sum must not depend on the batches between two calls
            self.loss += loss
        for norm in torch.stack(norms).tolist():
            if math.isfinite(norm):  # fp16 overflows occasionally, and its scaler skips such steps
                self.gradient_norm += norm
                self.updates += 1
        self.batches += len(means)
        self.hits += hit
        self.repaired += int(repairs)
        return means

    def facts(self) -> list[str]:
        """Loss and training accuracy so far, in words."""
        if not self.batches:
            return []
        row = self.row()
        return [f"loss {row['train_loss']:.4f}", f"train {row['train_top1']:.2f} %"]

    def row(self) -> dict[str, float]:
        """Means and sums by column."""
        return {
            "train_loss": self.loss / max(self.batches, 1),
            "train_top1": 100 * self.hits / max(self.images, 1),
            "gradient_norm": self.gradient_norm / max(self.updates, 1),
            "images_per_second": self.images / self.seconds if self.seconds else 0.0,
            "repaired_solves": self.repaired,
            **self.rates,
            **self.spectrum,
        }


def spectrum_row(eigenvalues: Tensor, factor: Tensor | None) -> dict[str, float]:
    r"""Statistics of the spectra of a batch, each as the lower median over the images for which it is defined.

    With the eigenvalues :math:`\lambda_1 \ge \dots \ge \lambda_d` of the covariance: :math:`\lambda_1`;
    :math:`\log_{10} \lambda_1/\lambda_d`, with :math:`\lambda_d` at least :math:`d\,\epsilon\,\lambda_1`, the size of
    rounding errors; the share of the smallest eigenvalues, 50 of 256, in :math:`\sum \lambda`; s; and
    :math:`\|Q\|_F = \sqrt{\sum \lambda}`. The second and the third are undefined for a covariance of zeros.

    ``eigenvalues`` is (B, d), descending; ``factor`` is s, (B,), or None if the head has none.

    Example:
        >>> row = spectrum_row(torch.tensor([[100.0, 10.0, 9.0, 5.0, 1.0]]), None)
        >>> {name: round(value, 3) for name, value in row.items()}
        {'lambda_1': 100.0, 'log10_condition': 2.0, 'energy_last': 0.008, 'q_norm': 11.18}
    """
    values = eigenvalues.detach().cpu().double()  # first to the CPU, because MPS has no float64
    energy = values.sum(-1)
    row = {
        "lambda_1": values[:, 0],
        "log10_condition": (values[:, 0] / torch.maximum(values[:, -1], rounding_floor(values)[:, 0])).log10(),
        "energy_last": values[:, -small_part(values.shape[-1]) :].sum(-1) / energy,
        "q_norm": energy.clamp_min(0).sqrt(),
    }
    if factor is not None:
        row["s"] = factor.detach().cpu().double()
    return {name: float(value.nanmedian()) for name, value in row.items()}


class Summary:
    """``summary.csv``: one row per epoch, written at its end. An existing file keeps the rows of the first ``epochs``."""

    def __init__(self, path: Path, epochs: int = 0):
        self.path = path
        old: list[dict[str, str]] = []
        if path.is_file() and epochs:
            # nothing in an incomplete last row can be trusted, not even its epoch
            whole = read_text(path).rpartition("\n")[0]
            old = [row for row in csv.DictReader(io.StringIO(whole)) if (row.get("epoch") or "").isdigit()]
        kept = [row for row in old if int(row["epoch"]) <= epochs]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            CheckpointError: if it cannot be written; a resumed run writes it again.
        """
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writerow({name: _number(row.get(name)) for name in COLUMNS})
        except OSError as error:
            raise CheckpointError(self.path, f"{error.strerror}: free some space and resume the run", "write") from error


def read_summary(path: Path) -> list[dict[str, float]]:
    """Rows of a ``summary.csv``, without empty columns."""
    rows = csv.DictReader(io.StringIO(read_text(path)))
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.8g}" if isinstance(value, float) else str(value)
