"""The options of ``eigengrain explain``, and how a command line says them. No torch here: the help is made from this."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from eigengrain.cli.evaluate import SPLITS, check_data_options
from eigengrain.cli.options import check_choices, check_least
from eigengrain.errors import UnknownName

RULES = ("vanilla", "deconv", "guided")
CUTS = ("exact", "projector")
SCALES = ("row", "each")
DIRECTIONS = ("large", "small")
#: targets that are no classes
TARGETS = ("predicted", "label", "norm")

#: options that take several words
_LISTS = ("images", "rules", "subsets", "measures")

HOW_TO_GET_ONE = "'make demo' or 'eigengrain demo' trains some on drawn birds and leaves one in runs/demo/mpncov/model"


@dataclass(frozen=True)
class Explain:
    """Which model, which images, and what is made of them.

    Args:
        checkpoint: a folder of 'eigengrain train' or of save_pretrained; 'eigengrain demo' leaves runs/demo/mpncov/model.
        images: files, folders and quoted patterns of images to explain, in place of a data set.
        data: name of a data set; a training folder says it by itself.
        root: folder of the data set; a training folder says it by itself.
        data_options: more keyword arguments of the data set, for --data.
        split: train, val (of a training folder with validation images) or test.
        count: images in the panels.
        measure_count: images that are measured, or all; 0 for none.
        seed: of the choice of images from a data set.
        rules: at the rectifiers, of vanilla, deconv and guided.
        subsets: of the eigenvalues; by default all, what the model itself keeps, top:k and last:d-k for k of --split_at.
        split_at: eigenvalues that count as large; 206 of 256 by default, and the same share of any other number.
        cut: how a cut spectrum is differentiated, exact or projector, or both.
        target: what is explained, the predicted class, the label, a class (its name or number), or the norm of the vector.
        measures: names of measures; by default all but the costly deletion and insertion.
        scale: colours, row for one scale for the maps of a rule in a row, each for one a map.
        perturb: steps by which the images of the panels are changed toward large and small eigenvalues; 0 for none.
        toward: large, small, or both.
        perturb_lr: rate of these steps, in normalised pixels.
        batch_size: images that go through the model together, over all processes.
        workers: processes that read images, at most one for each core.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        out: folder for panels (PNG), measures (CSV) and the page (HTML).
    """

    checkpoint: str = ""
    images: list[str] = field(default_factory=list)
    data: str | None = None
    root: str | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    count: int = 12
    measure_count: int | Literal["all"] = 100
    seed: int = 0
    rules: list[str] = field(default_factory=lambda: list(RULES))
    subsets: list[str] = field(default_factory=list)
    split_at: int | None = None
    cut: str = "exact"
    target: str = "predicted"
    measures: list[str] = field(default_factory=list)
    scale: str = "row"
    perturb: int = 0
    toward: str = "both"
    perturb_lr: float = 0.1
    batch_size: int = 32
    workers: int = 0
    device: str = "auto"
    out: str = "runs/explain"

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError(f"name a trained model: eigengrain explain CHECKPOINT; {HOW_TO_GET_ONE}")
        if not Path(self.checkpoint).exists():
            raise ValueError(f"there is no checkpoint {self.checkpoint!r}: {HOW_TO_GET_ONE}")
        check_choices(self, split=SPLITS, cut=(*CUTS, "both"), scale=SCALES, toward=(*DIRECTIONS, "both"))
        check_least(self, count=1, measure_count=0, perturb=0, batch_size=1, workers=0)
        if self.images and (self.data is not None or self.root is not None):
            raise ValueError("--images and --data are two sources of images: give one of them")
        check_data_options(self.data, self.data_options)
        if self.images and self.target == "label":
            raise ValueError("the classes of --images are not known: use --target predicted, a class, or norm")
        if not self.rules:
            raise ValueError("--rules is empty: name some of vanilla, deconv, guided")
        for rule in self.rules:
            if rule not in RULES:
                raise UnknownName("rule", rule, RULES)

    @property
    def cuts(self) -> tuple[str, ...]:
        return CUTS if self.cut == "both" else (self.cut,)

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.toward == "both" else (self.toward,)

    @property
    def measured(self) -> int | None:
        """Images that are measured at most, None for all."""
        return None if self.measure_count == "all" else self.measure_count

    @property
    def needed(self) -> int | None:
        """Images that are drawn or measured at most, None for all."""
        return None if self.measured is None else max(self.count, self.measured)


def expand(words: Sequence[str]) -> list[str]:
    """Words of a command line with the values of an option that takes several made into one list.

    Example:
        >>> expand(["runs/demo/mpncov", "--images", "a.jpg", "b c.jpg", "--rules", "[vanilla]", "--count", "3"])
        ['runs/demo/mpncov', '--images=["a.jpg", "b c.jpg"]', '--rules', '[vanilla]', '--count', '3']
    """
    rest = list(words)
    found: list[str] = []
    while rest:
        word = rest.pop(0)
        name, given, value = word.partition("=")
        if name not in {f"--{option}" for option in _LISTS}:
            found.append(word)
            continue
        values = [value] if given else []
        while not given and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        # a list in brackets or with commas is read as it is, unless it is the name of a file
        listed = len(values) == 1 and ("," in values[0] or values[0].startswith("[")) and not os.path.exists(values[0])
        if listed or not values:
            found += [word, *([] if given else values)]
        else:
            found.append(f"{name}={json.dumps(values, ensure_ascii=False)}")
    return found


def command_line(config: Explain) -> str:
    """The command that a config came from, without what is the default anyway.

    Example:
        >>> command_line(Explain(".", rules=["vanilla"], count=3, out="a b"))
        "eigengrain explain . --count 3 --rules vanilla --out 'a b'"
    """
    words = ["eigengrain", "explain", config.checkpoint]
    default = Explain(config.checkpoint)
    for option in fields(config)[1:]:
        value = getattr(config, option.name)
        if value != getattr(default, option.name):
            many = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
            words += [f"--{option.name}", *map(str, many)]
    return shlex.join(words)
