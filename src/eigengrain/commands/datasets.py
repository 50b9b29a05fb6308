"""Which data sets there are, how their folders look, and whether a folder's images are whole."""

import csv
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eigengrain.data.catalogue import ENTRIES, Entry, find_entry
from eigengrain.errors import unknown_name

if TYPE_CHECKING:
    from eigengrain.data.check import Problem

ACTIONS = ("list", "check")
#: problems that are printed; the CSV file has them all
SHOWN = 20


@dataclass(frozen=True)
class Datasets:
    """What to do with data sets.

    Args:
        action: list (which there are, and their layouts) or check (decode every image of a folder).
        name: of a data set; all are listed by default.
        root: the folder to check.
        split: which images to check.
        workers: processes that decode, at most one for each core.
        out: CSV file for the problems that a check finds.
        json: print JSON instead of text.
    """

    action: str = "list"
    name: str | None = None
    root: str | None = None
    split: Literal["all", "train", "test"] = "all"
    workers: int = 4
    out: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            names = [entry.name for entry in ENTRIES]
            hint = f"; for its layout: eigengrain datasets list {self.action}" if self.action in names else ""
            raise ValueError(f"{unknown_name('datasets command', self.action, ACTIONS)}{hint}")
        if self.action == "check" and (self.name is None or self.root is None):
            raise ValueError("name the data set and its folder: eigengrain datasets check cub /data/CUB_200_2011")
        if self.action == "list" and (self.root is not None or self.out is not None):
            raise ValueError("a folder and --out are for 'eigengrain datasets check'; the list needs none")
        if self.workers < 0:
            raise ValueError(f"--workers must be at least 0, got {self.workers}")


def run(config: Datasets) -> int:
    """``eigengrain datasets``: 0, or 2 if a check finds an image that cannot be read."""
    if config.action == "check":
        return check(config)
    entries = ENTRIES if config.name is None else (find_entry(config.name),)
    if config.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(map(describe, entries)))
    return 0


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
    """``eigengrain datasets check NAME ROOT``."""
    from eigengrain.data import open_dataset
    from eigengrain.data.check import find_problems
    from eigengrain.runtime.records import writable

    entry = find_entry(str(config.name))
    if entry.drawn:
        raise ValueError(f"{entry.name} is drawn, not read: there are no files to check")
    out = writable(config.out) if config.out is not None else None
    splits = ("train", "test") if config.split == "all" else (config.split,)
    opened = [open_dataset(entry.name, config.root, split) for split in splits]
    problems = find_problems(opened, min(config.workers, os.cpu_count() or 1))
    if out is not None:
        _write(out, problems)
    unreadable = [problem for problem in problems if problem.kind != "duplicate"]
    if config.json:
        counted = {found.split: len(found) for found in opened}
        print(json.dumps({"images": counted, "problems": [asdict(p) for p in problems]}, indent=2, ensure_ascii=False))
        return 2 if unreadable else 0
    for found in opened:
        published = entry.published[1 if found.split == "train" else 2] if entry.published else None
        said = f" (published: {published:,})" if published not in (None, len(found)) else ""
        print(f"{found.split}: {len(found):,} images{said} of {len(found.classes):,} classes")
    kinds = Counter(problem.kind for problem in problems)
    print(", ".join(f"{kinds[kind]} {kind}" for kind in ("unreadable", "truncated", "duplicate")))
    for problem in sorted(problems, key=lambda problem: problem.kind == "duplicate")[:SHOWN]:
        print(f"  {problem.kind}: {problem.path}: {problem.reason}")
    if len(problems) > SHOWN:
        print(f"  … and {len(problems) - SHOWN} more{'' if out else '; all of them with --out FILE.csv'}")
    if out is not None:
        print(f"written to {out}")
    return 2 if unreadable else 0


def _write(path: Path, problems: Sequence["Problem"]) -> None:
    """One row a problem; a header alone says that there are none."""
    from eigengrain.data.check import Problem

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Problem)])
        writer.writeheader()
        writer.writerows(asdict(problem) for problem in problems)
