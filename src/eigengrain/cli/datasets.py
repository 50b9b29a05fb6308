"""``eigengrain datasets``: list data sets with their layouts, or check the images of a folder."""

import os
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from eigengrain import output
from eigengrain.data.datasets.registry import Entry, check_names, find_entry, list_datasets, list_entries
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.names import SPLITS
from eigengrain.options import check, setting
from eigengrain.text import counted, printable

if TYPE_CHECKING:
    from eigengrain.data import ImageSet
    from eigengrain.data.check import Problem

    #: splits to check, folders without images, and lines about them
    _Opened = tuple[list[ImageSet], list[Problem], list[str]]

ACTIONS = ("list", "check")
#: problems that are printed; the CSV file has them all
SHOWN = 20
_EXAMPLE = "eigengrain datasets check cub /data/CUB_200_2011"


@dataclass(frozen=True)
class Datasets:
    """What to do with data sets.

    Args:
        action: list (names and layouts) or check (decode every image of a folder).
        name: name of a data set, all by default; for a check, the name of a data set, a folder of any layout or a table.
        root: folder of the data set to check.
        options: options of the data set's reader, such as '{level: family}'; 'eigengrain datasets' lists them.
        split: images to check.
        workers: processes that decode images, at most one per core.
        out: CSV file for the problems that a check finds.
    """

    action: str = setting("list", choices=ACTIONS)
    name: str | None = setting(None, offers=list_datasets)
    root: str | None = None
    options: dict[str, Any] = setting({})
    split: Literal["all", "train", "val", "test"] = "all"
    workers: int = setting(4, least=0)
    out: str | None = None

    def __post_init__(self) -> None:
        if self.action in list_datasets():
            remedy = f"run 'eigengrain datasets list {self.action}'"
            raise ArgumentError("action", "must be list or check", self.action, remedy)
        check(self)
        check_names(self.options)
        if self.action == "list":
            for name in ("root", "out", "options"):
                if getattr(self, name):
                    raise ArgumentError(name, "is only for 'eigengrain datasets check'", getattr(self, name))
        elif self.name is None:
            remedy = f"run 'eigengrain datasets check photos', or with a data set '{_EXAMPLE}'"
            raise ArgumentError("name", "is missing", remedy=remedy)
        elif self.name in list_datasets() and find_entry(self.name).drawn:
            raise ArgumentError("name", "has no files to check, its images are drawn", self.name)
        elif self.root is None and self.name in list_datasets():
            remedy = f"run 'eigengrain datasets check {self.name} FOLDER'; for a folder of that name, give ./{self.name}"
            raise ArgumentError("root", f"is missing: the folder of {self.name}", remedy=remedy)
        elif self.root is None and self.options:
            raise ArgumentError("options", "are for a data set", self.options, f"give its name too, as in '{_EXAMPLE}'")


def run(config: Datasets) -> int:
    """List or check; the exit code is 1 if a check finds images that cannot be read, or folders without images."""
    if config.action == "check":
        return run_check(config)
    entries = list_entries() if config.name is None else [find_entry(config.name)]
    output.say("\n\n".join(map(describe, entries)))
    output.result([entry.as_dict() for entry in entries], [entry.name for entry in entries])
    return 0


def describe(entry: Entry) -> str:
    """The name, the numbers and the layout of a data set as text.

    Example:
        >>> print(describe(find_entry("dogs")))
        dogs  Dogs: Stanford Dogs
          120 classes, 12,000 images for training, 8,580 for test; pip install 'eigengrain[data]'
          Images/CLASS/*.jpg             photographs
          train_list.mat, test_list.mat  file and class of each image, here or in lists/
    """
    facts = []
    if entry.published:
        classes, train, test = entry.published
        facts.append(f"{classes:,} classes, {train:,} images for training, {test:,} for test")
    if entry.extra:
        facts.append(f"pip install 'eigengrain[{entry.extra}]'")
    width = max((len(path) for path, _ in entry.layout), default=0)
    lines = ["; ".join(facts)] if facts else []
    lines += [f"{path:{width}}  {content}" for path, content in entry.layout]
    lines += [f"option {name}: {meaning}" for name, meaning in entry.options.items()]
    return "\n  ".join([f"{entry.name}  {entry.title}", *lines])


def run_check(config: Datasets) -> int:
    """``eigengrain datasets check FOLDER``, or ``NAME FOLDER`` with the options of the data set's reader."""
    from eigengrain.data.check import Problem, describe_imbalance, find_problems
    from eigengrain.files import writable, write_csv

    if config.root is None and str(config.name).lower().endswith((".csv", ".tsv")):  # a table of images
        config = replace(config, name="folder", root=config.name)
    out = writable(config.out) if config.out is not None else None
    splits, empty, about = _open_folder(config) if config.root is None else _open_by_name(config)
    about += filter(None, [describe_imbalance(splits[0])])
    problems = [*empty, *find_problems(splits, config.workers)]
    problems.sort(key=_is_harmless)
    if out is not None:
        rows = [asdict(replace(p, path=printable(p.path), reason=printable(p.reason))) for p in problems]
        write_csv(out, rows, [field.name for field in fields(Problem)])  # only the header if there are none
    lines = [printable(f"{p.kind}: {p.path}: {p.reason}") for p in problems]
    kinds = Counter(problem.kind for problem in problems)
    counts = [f"{kinds[kind]} {kind}" for kind in ("unreadable", "truncated", "duplicate")]
    counts += [f"{counted(kinds['empty'], 'folder')} without readable images"] if kinds["empty"] else []
    output.say(*about, ", ".join(counts), *(f"  {line}" for line in lines[:SHOWN]))
    if len(problems) > SHOWN:
        output.say(f"  … and {len(problems) - SHOWN} more{'' if out else '; list all with --out FILE.csv'}")
    if out is not None:
        output.say(f"written to {out}")
    output.result({"images": {split.split: len(split) for split in splits}, "problems": problems}, lines)
    return 0 if all(map(_is_harmless, problems)) else 1


def _is_harmless(problem: "Problem") -> bool:
    return problem.kind == "duplicate"


def _open_by_name(config: Datasets) -> "_Opened":
    from eigengrain.data import open_splits

    if config.name not in list_datasets() and config.root in list_datasets():
        words = f"eigengrain datasets check {config.root} {config.name}"
        raise ArgumentError("name", "must come before the folder", config.name, f"run '{words}'")
    entry = find_entry(str(config.name))
    chosen = SPLITS if config.split == "all" else (config.split,)
    splits = list(open_splits(entry.name, config.root, chosen, **config.options).values())
    if not splits:
        raise ArgumentError("split", f"must be train or test: {entry.name} has no validation images", config.split)
    lines = list(dict.fromkeys(note for split in splits for note in split.notes))
    for split in splits:
        published = entry.published[1 if split.split == "train" else 2] if entry.published else None
        other = f" (published: {published:,})" if published not in (None, len(split)) else ""
        lines.append(f"{split.split}: {len(split):,} images{other} of {len(split.classes):,} classes")
    return splits, [], lines


def _open_folder(config: Datasets) -> "_Opened":
    from eigengrain.data.check import Problem
    from eigengrain.data.datasets.folder import open_tree
    from eigengrain.data.datasets.layout import describe_skipped

    place = str(config.name)
    if not os.path.exists(os.path.expanduser(place)) and os.path.basename(place) == place:
        # one word: a folder, or a misspelt data set
        raise UnknownName("folder or data set", place, list_datasets())
    opened, tree = open_tree(place)
    splits = [split for split in opened if config.split in ("all", split.split)]
    if not splits:
        existing = ", ".join(split.split for split in opened)
        raise ArgumentError("split", f"must be one of {place}: {existing}", config.split)
    lines = [f"{each.split}: {counted(len(each), 'image')} in {counted(len({*each.labels}), 'folder')}" for each in splits]
    empty = [Problem("", None, each.path, "empty", each.reason) for each in tree.empty]
    return splits, empty, [*lines, *describe_skipped(tree.others)]
