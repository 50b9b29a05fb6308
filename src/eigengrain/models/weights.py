"""Loading weights into a model, with a report of what fitted."""

import logging
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from eigengrain.models.model import CovarianceNet
from eigengrain.models.weight_files import read_tensors
from eigengrain.models.weight_formats import BACKBONE, Renaming, fitted_by_timm, in_backbone, renamings

logger = logging.getLogger("eigengrain")

#: name in the model -> name in the file, tensor
Reading = dict[str, tuple[str, Tensor]]


@dataclass(frozen=True)
class LoadReport:
    """What loading a file did, in three lines when printed.

    Args:
        path: of the file.
        matched: names in the model that were loaded.
        new: names in the model that the file does not have; they keep their values.
        ignored: names in the file that the model does not have.
        mismatched: names in the model that the file has in another shape, with both shapes; they keep their values.
    """

    path: str
    matched: tuple[str, ...]
    new: tuple[str, ...]
    ignored: tuple[str, ...]
    mismatched: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: {len(self.matched)} tensors loaded\n"
            f"not in the file, or in another shape: {_summary(self.new + self.mismatched)}\n"
            f"left over in the file: {_summary(self.ignored)}"
        )


def _summary(names: tuple[str, ...], shown: int = 4) -> str:
    if not names:
        return "none"
    return f"{len(names)} ({', '.join(names[:shown])}{', …' if len(names) > shown else ''})"


def load_weights(model: CovarianceNet, path: str | os.PathLike[str], strict: bool = False) -> LoadReport:
    """Load a local file into a model, whichever of the known programs wrote it.

    Understood are checkpoints of these models; state dicts of the backbone alone, from timm or torchvision; and the
    MPN-COV networks of fast-MPN-COV and DifferentiableSVD. The names that fit most tensors win. A classifier of another
    size, or a head that the file does not have, stays as it is. The report is logged to ``eigengrain`` at INFO.

    Args:
        model: from :func:`create_model`; loaded in place.
        path: ``.safetensors``, or a PyTorch file, which is read without running code.
        strict: raise unless file and model have the same tensors.

    Returns:
        What was loaded and what was not.

    Raises:
        ValueError: if the file cannot be read, nothing in it fits the model, or ``strict`` is not met.
    """
    tensors = read_tensors(path)
    wanted = model.state_dict()
    readings = [_renamed(tensors, rename) for rename in renamings(model, tensors)]
    best = max((_Fit(reading, wanted) for reading in readings), key=lambda fit: fit.score)
    if not best.complete:
        originals = (best.reading, _renamed(tensors, in_backbone))
        adapted = [_adapted(reading, model, as_timm) for reading in originals for as_timm in (True, False)]
        best = max((best, *(_Fit(reading, wanted) for reading in adapted)), key=lambda fit: fit.score)
    if not best.loads_backbone:
        raise ValueError(
            f"nothing in {str(path)!r} fits the backbone {model.config['backbone']!r}: its tensors are named "
            f"{', '.join(list(tensors)[:3])}, …; is it of another network?"
        )
    report = best.report(Path(path))
    if strict and (report.new or report.ignored or report.mismatched):
        raise ValueError(f"strict loading: {'; '.join(str(report).splitlines())}")
    model.load_state_dict(best.matched, strict=False)
    if not best.complete:
        missing = _summary(tuple(best.backbone_missing), shown=2)
        logger.warning(
            "%s leaves tensors of the backbone %s unfilled, %s: is it of this network?",
            path,
            model.config["backbone"],
            missing,
        )
    elif left := best.blocks_left:
        more = _summary(tuple(left), shown=2)
        logger.warning("%s has more blocks than %s, %s: is it of a deeper network?", path, model.config["backbone"], more)
    for line in str(report).splitlines():
        logger.info(line)
    return report


def _renamed(tensors: dict[str, Tensor], rename: Renaming) -> Reading:
    return {rename(name): (name, tensor) for name, tensor in tensors.items()}


def _adapted(reading: Reading, model: CovarianceNet, as_timm: bool) -> Reading:
    """The same with the tensors of the backbone as timm's own filter for this network makes them."""
    inside = {name.removeprefix(BACKBONE): entry for name, entry in reading.items() if name.startswith(BACKBONE)}
    outside = {name: entry for name, entry in reading.items() if not name.startswith(BACKBONE)}
    marker = model.backbone_classifier if as_timm else ""
    adapted = fitted_by_timm({name: tensor for name, (_, tensor) in inside.items()}, model.backbone, marker)
    return outside | {BACKBONE + name: (inside.get(name, (name,))[0], tensor) for name, tensor in adapted.items()}


class _Fit:
    """One reading of a file against the tensors that the model has."""

    def __init__(self, reading: Reading, wanted: dict[str, Tensor]):
        self.reading = reading
        self.matched: dict[str, Tensor] = {}
        self.mismatched: list[str] = []
        for name, (_, tensor) in reading.items():
            if name not in wanted:
                continue
            if tensor.shape == wanted[name].shape:
                self.matched[name] = tensor
            else:
                self.mismatched.append(f"{name} {tuple(tensor.shape)} instead of {tuple(wanted[name].shape)}")
        # old files do not count batches, and nothing depends on it
        needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
        self.new = [name for name in needed if name not in reading]
        self.backbone_missing = [name for name in needed if name.startswith(BACKBONE) and name not in self.matched]
        self.loads_backbone = any(name.startswith(BACKBONE) for name in self.matched)
        self.ignored = sorted(old for name, (old, _) in reading.items() if name not in wanted)

    @property
    def blocks_left(self) -> list[str]:
        """Blocks of the file, as the model would name them, that have a number beyond those of the model's own."""
        has = {part for name in self.matched for part in accumulate(name.split("."), "{}.{}".format)}
        found: dict[str, None] = {}
        for name in self.reading:
            parts = list(accumulate(name.split("."), "{}.{}".format))
            first = next((part for part in parts if part not in has), "")
            parent, _, number = first.rpartition(".")
            if name.startswith(BACKBONE) and number.isdigit() and parent in has and first != name:
                found[first.removeprefix(BACKBONE)] = None
        return list(found)

    @property
    def complete(self) -> bool:
        return not self.backbone_missing

    @property
    def score(self) -> tuple[int, int]:
        """More that fits is better; of two readings with as much, the one with less that is of another shape."""
        return len(self.matched), -len(self.mismatched)

    def report(self, path: Path) -> LoadReport:
        return LoadReport(path.name, tuple(self.matched), tuple(self.new), tuple(self.ignored), tuple(self.mismatched))
