"""Which data sets there are, how their folders look, and whether a folder's images are whole."""

import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from eigengrain import output
from eigengrain.data.datasets.catalogue import ENTRIES, Entry, check_names, find_entry
from eigengrain.data.files import printable
from eigengrain.errors import UnknownName
from eigengrain.text import counted

if TYPE_CHECKING:
    from eigengrain.data import ImageSet
    from eigengrain.data.check import Problem

ACTIONS = ("list", "check")
#: problems that are printed; the CSV file has them all
SHOWN = 20
_EXAMPLE = "eigengrain datasets check cub /data/CUB_200_2011"


@dataclass(frozen=True)
class Datasets:
    """What to do with data sets.

    Args:
        action: list (which there are, and their layouts) or check (decode every image of a folder).
        name: of a data set; all are listed by default. A check takes a folder here as well, of whatever layout.
        root: the folder of a data set that is checked by name.
        options: of the data set's reader, such as '{level: family}'; 'eigengrain datasets' names them.
        split: which images to check.
        workers: processes that decode, at most one for each core.
        out: CSV file for the problems that a check finds.
    """

    action: str = "list"
    name: str | None = None
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    split: Literal["all", "train", "test"] = "all"
    workers: int = 4
    out: str | None = None

    def __post_init__(self) -> None:
        names = [entry.name for entry in ENTRIES]
        if self.action not in ACTIONS:
            hint = f"; for its layout: eigengrain datasets list {self.action}" if self.action in names else ""
            raise ValueError(f"{UnknownName('datasets command', self.action, ACTIONS)}{hint}")
        if self.action == "check":
            if self.name is None:
                raise ValueError(f"name the folder: eigengrain datasets check photos, or as a data set: {_EXAMPLE}")
            if self.name in (entry.name for entry in ENTRIES if entry.drawn):
                raise ValueError(f"{self.name} is drawn, not read: there are no files to check")
            if self.root is None and self.name in names:
                raise ValueError(
                    f"name the folder of {self.name} too: eigengrain datasets check {self.name} FOLDER; or, if this is the "
                    f"folder: eigengrain datasets check {os.path.join(os.curdir, self.name)}"
                )
            if self.root is None and self.options:
                raise ValueError(f"--options are those of a data set: name it before its folder, as in {_EXAMPLE}")
        elif self.root is not None or self.out is not None or self.options:
            raise ValueError("a folder, --options and --out are for 'eigengrain datasets check'; the list needs none")
        check_names(self.options)
        if self.workers < 0:
            raise ValueError(f"--workers must be at least 0, got {self.workers}")


def run(config: Datasets) -> int:
    """``eigengrain datasets``: 0, or 1 if a check finds images that cannot be read or a folder that has none."""
    if config.action == "check":
        return check(config)
    entries = ENTRIES if config.name is None else (find_entry(config.name),)
    _say("\n\n".join(map(describe, entries)))
    output.result(entries, [entry.name for entry in entries])
    return 0


def _say(*lines: str) -> None:
    output.reading().print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def describe(entry: Entry) -> str:
    """A data set for reading: its name, its numbers and its layout.

    Example:
        >>> print(describe(find_entry("dogs")))
        dogs  Dogs: Stanford Dogs
          120 classes, 12,000 images for training, 8,580 for test; pip install 'eigengrain[data]'
          Images/CLASS/*.jpg             photographs
          train_list.mat, test_list.mat  file and class of each image, here or in lists/
    """
    said = []
    if entry.published:
        classes, train, test = entry.published
        said.append(f"{classes:,} classes, {train:,} images for training, {test:,} for test")
    if entry.extra:
        said.append(f"pip install 'eigengrain[{entry.extra}]'")
    lines = [f"{entry.name}  {entry.title}"]
    lines += [f"  {'; '.join(said)}"] if said else []
    width = max((len(what) for what, _ in entry.layout), default=0)
    lines += [f"  {what:{width}}  {meaning}" for what, meaning in entry.layout]
    lines += [f"  option {name}: {meaning}" for name, meaning in entry.options.items()]
    return "\n".join(lines)


def check(config: Datasets) -> int:
    """``eigengrain datasets check ROOT``, or ``NAME ROOT`` with the options of the data set's reader."""
    from eigengrain.data.check import find_problems
    from eigengrain.files import writable

    out = writable(config.out) if config.out is not None else None
    found = _open_folder(config) if config.root is None else _open_by_name(config)
    problems = [*found.empty, *find_problems(found.splits, config.workers)]
    if out is not None:
        _write(out, problems)
    spoilt = not all(map(_is_harmless, problems))
    shown = [printable(f"{p.kind}: {p.path}: {p.reason}") for p in sorted(problems, key=_is_harmless)]
    _say(*found.said)
    kinds = Counter(problem.kind for problem in problems)
    counts = [f"{kinds[kind]} {kind}" for kind in ("unreadable", "truncated", "duplicate")]
    counts += [f"{counted(kinds['empty'], 'folder')} without images to read"] if kinds["empty"] else []
    _say(", ".join(counts), *(f"  {line}" for line in shown[:SHOWN]))
    if len(problems) > SHOWN:
        _say(f"  … and {len(problems) - SHOWN} more{'' if out else '; all of them with --out FILE.csv'}")
    if out is not None:
        _say(f"written to {out}")
    output.result({"images": {split.split: len(split) for split in found.splits}, "problems": problems}, shown)
    return 1 if spoilt else 0


def _is_harmless(problem: "Problem") -> bool:
    return problem.kind == "duplicate"


class _Found(NamedTuple):
    """Splits to look at, folders without images, and lines that say what there is."""

    splits: "list[ImageSet]"
    empty: "list[Problem]"
    said: list[str]


def _open_by_name(config: Datasets) -> _Found:
    from eigengrain.data import open_dataset

    try:
        entry = find_entry(str(config.name))
    except ValueError:
        if config.root not in [entry.name for entry in ENTRIES]:
            raise
        raise ValueError(
            f"the data set is named before its folder: eigengrain datasets check {config.root} {config.name}"
        ) from None
    wanted = ("train", "test") if config.split == "all" else (config.split,)
    splits = [open_dataset(entry.name, config.root, split, **config.options) for split in wanted]
    said = []
    for split in splits:
        published = entry.published[1 if split.split == "train" else 2] if entry.published else None
        other = f" (published: {published:,})" if published not in (None, len(split)) else ""
        said.append(f"{split.split}: {len(split):,} images{other} of {len(split.classes):,} classes")
    return _Found(splits, [], said)


def _open_folder(config: Datasets) -> _Found:
    from eigengrain.data.check import Problem
    from eigengrain.data.datasets.tree import open_tree

    place = str(config.name)
    if not os.path.exists(os.path.expanduser(place)) and os.path.basename(place) == place:
        # one word: a folder, or a data set whose folder was forgotten
        raise UnknownName("folder or data set", place, [entry.name for entry in ENTRIES])
    tree = open_tree(place)
    splits = [split for split in tree.splits if config.split in ("all", split.split)]
    if not splits:
        there = ", ".join(split.split for split in tree.splits)
        raise ValueError(f"{place} has no folder for --split {config.split}: leave it out (there is {there})")
    said = [f"{split.split}: {counted(len(split), 'image')} in {counted(len(split.classes), 'folder')}" for split in splits]
    if tree.others:
        most = ", ".join(list(tree.others)[:5]) + (", …" if len(tree.others) > 5 else "")
        said.append(f"left out, as not named as images: {sum(tree.others.values()):,} ({most})")
    empty = [Problem("", None, folder, "empty", reason) for folder, reason in tree.empty]
    return _Found(splits, empty, said)


def _write(path: Path, problems: Sequence["Problem"]) -> None:
    """One row a problem; a header alone says that there are none."""
    from eigengrain.data.check import Problem

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Problem)])
        writer.writeheader()
        writer.writerows(asdict(replace(p, path=printable(p.path), reason=printable(p.reason))) for p in problems)
