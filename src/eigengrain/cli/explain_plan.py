"""What ``eigengrain explain`` is to do: its options, seen to fit a model. Nothing heavy is imported before that."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eigengrain.cli.explain_images import Source, open_source
from eigengrain.cli.explain_options import TARGETS, Explain
from eigengrain.errors import UnknownName

if TYPE_CHECKING:
    from torch import device

    from eigengrain.explain import EigenPerturbation
    from eigengrain.models import CovarianceNet


@dataclass(frozen=True)
class Plan:
    """What is done for one command, after everything that can be wrong with its options was looked at.

    Args:
        config: the options.
        source: the model, on the device, and the images.
        subsets: of the eigenvalues, as they are written.
        fixed: the class that is explained in every image, None where each has its own, or none.
        device: of the model.
        perturbation: what changes images, None where that is not wanted.
    """

    config: Explain
    source: Source
    subsets: list[str]
    fixed: int | None
    device: "device"
    perturbation: "EigenPerturbation | None"

    @property
    def out(self) -> Path:
        """The folder of everything that is written."""
        return Path(self.config.out)

    @property
    def shown(self) -> list[int]:
        """Numbers of the images in the panels."""
        return self.source.numbers[: self.config.count]

    @property
    def split(self) -> int:
        """Eigenvalues that count as large."""
        return split_point(self.source.model.head.channels, self.config.split_at)


def make_plan(config: Explain, device: "device") -> Plan:
    """The plan of a config.

    Raises:
        ValueError: as :func:`open_source`, :func:`chosen_subsets`, :func:`chosen_class` and :func:`chosen_perturbation`.
    """
    source = open_source(config)
    model = source.model.to(device).eval()
    subsets, fixed = chosen_subsets(config, model), chosen_class(config, model)
    return Plan(config, source, subsets, fixed, device, chosen_perturbation(config, model))


def split_point(channels: int, asked: int | None) -> int:
    """How many of the eigenvalues count as large: what was asked for, or the paper's share.

    Raises:
        ValueError: if nothing would be left on one side.

    Example:
        >>> split_point(256, None), split_point(64, None), split_point(2, None)
        (206, 52, 1)
    """
    if asked is None:
        from eigengrain.functional.subsets import small_part

        return max(1, channels - small_part(channels))
    if not 1 <= asked < channels:
        raise ValueError(f"--split_at must be from 1 to {channels - 1}, as there are {channels} eigenvalues; got {asked}")
    return asked


def chosen_subsets(config: Explain, model: "CovarianceNet") -> list[str]:
    """The subsets to explain, as they are written; what a model itself keeps is one of them unless others are named.

    Raises:
        ValueError: if the head has no eigenvalues to choose from, or not as many.
    """
    from eigengrain.functional import EigenSubset

    d = model.head.channels
    split = split_point(d, config.split_at)
    texts = config.subsets or ["all", own_part(model) or "all", f"top:{split}", f"last:{d - split}"]
    subsets = [EigenSubset.parse(text) for text in texts]
    partial = next((subset for subset in subsets if not subset.covers(d)), None)
    normalise = getattr(model.head, "normalise", None)
    if partial is not None and normalise not in ("sqrt", "log", "power"):
        raise ValueError(
            f"the head {model.config['head']!r} has no eigenvalues to choose '{partial}' from: use a model with the head "
            "mpncov or mpncov+seb, or --subsets [all] for the plain gradient"
        )
    return list(dict.fromkeys(map(str, subsets)))


def own_part(model: "CovarianceNet") -> str:
    """The subset that a model itself keeps; empty if that is all of its eigenvalues."""
    subset = getattr(model.head, "subset", None)
    return "" if subset is None or subset.covers(model.head.channels) else str(subset)


def chosen_class(config: Explain, model: "CovarianceNet") -> int | None:
    """The class that ``--target`` names, None where it names none.

    Raises:
        ValueError: for a class that there is not.
    """
    if config.target in TARGETS:
        return None
    names = model.class_names or []
    if config.target in names:
        return names.index(config.target)
    if config.target.isdecimal():
        if int(config.target) >= model.num_classes:
            raise ValueError(f"the model has {model.num_classes} classes, counted from 0; --target says {config.target}")
        return int(config.target)
    raise UnknownName("--target", config.target, [*TARGETS, *names])


def chosen_perturbation(config: Explain, model: "CovarianceNet") -> "EigenPerturbation | None":
    """What changes images, None where that is not wanted.

    Raises:
        ValueError: if the head has no covariance, or the rate is out of its range.
    """
    if not config.perturb:
        return None
    from eigengrain.explain import EigenPerturbation

    return EigenPerturbation(model, lr=config.perturb_lr)
