"""``eigengrain study``: plan, train what is missing, and show what the records come to beside the paper's numbers."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from eigengrain import output
from eigengrain.data import open_dataset
from eigengrain.data.datasets.catalogue import find_entry
from eigengrain.errors import LayoutError
from eigengrain.files import writable
from eigengrain.pages import Cell, TableData
from eigengrain.training.signals import Interrupted
from studies.catalogue import STUDIES, find_study
from studies.conclusions import Conclusion, conclude, show, write_files, write_page
from studies.config import STUDY_ACTIONS, StudyRun
from studies.cost import STATED_FOR, Speeds, cost
from studies.jobs import run_jobs
from studies.published import TITLES
from studies.report import on_terminal
from studies.study import Setup, Study, check_names


def run(options: StudyRun) -> int:
    """A study, all of them, their list or a page about them; 0, or 130 and 143 after Ctrl-C and SIGTERM."""
    console = output.reading()
    studies = list(STUDIES) if options.name in STUDY_ACTIONS else [find_study(options.name)]
    check_names(options, [row for study in studies for row in study.all_rows(Setup(options))])
    if options.records is not None and not Path(options.records).expanduser().is_dir():
        raise ValueError(f"there is no folder {options.records!r}: --records is one with records of runs")
    if options.name == "list":
        show_list(options, console)
        return 0
    # of many studies some have none of the data sets that were asked for
    studies = [study for study in studies if study.measure is not None or study.rows(Setup(options))]
    if options.name == "report" or options.only_report:
        setup = Setup(options)
    else:
        if options.weights is not None and not Path(options.weights).expanduser().exists():
            raise ValueError(f"there is no file or folder {options.weights!r}: --weights is one with weights of backbones")
        writable(Path(options.out) / "records" / "any")
        setup = Setup(options, available=available(options, studies), deadline=_deadline(options))
    conclusions: list[Conclusion] = []
    files: list[Path] = []
    try:
        for study in studies:
            here = replace(setup, seeds=study.seeds(options))
            if here.available is not None:
                carry_out(study, here)
            conclusions.append(conclude(study, here))
            if options.name != "report":
                files += show(conclusions[-1], here, console)
            elif not conclusions[-1].silent:
                files += write_files(conclusions[-1], here)
    except Interrupted as stop:
        said = str(stop).removesuffix("; go on with --resume")
        print(f"eigengrain: {said}; the same command goes on from there", file=sys.stderr)
        return stop.exit_code
    if options.name in ("all", "report"):
        files.append(write_page(conclusions, setup))
        console.print(f"report: {files[-1]}", soft_wrap=True, highlight=False, markup=False)
    output.result({"studies": [_as_json(each) for each in conclusions], "files": files}, files)
    return 0


def _as_json(conclusion: Conclusion) -> dict[str, object]:
    study, found, _ = conclusion
    return {"name": study.name, "where": study.where, "title": study.title, "rows": found.rows, "notes": found.notes}


def _deadline(options: StudyRun) -> float | None:
    return None if options.seconds is None else time.perf_counter() + options.seconds


def available(options: StudyRun, studies: Sequence[Study]) -> tuple[str, ...]:
    """The data sets that can be trained on: those that were asked for, or those of the studies that are in the folder.

    Raises:
        ValueError: if one that was asked for cannot be read, or there is none at all.
    """
    wanted = tuple(dict.fromkeys(name for study in studies for name in study.datasets(Setup(options))))
    if options.scale == "smoke" or not wanted:
        return wanted
    if options.data is None:
        raise ValueError("where are the images? --data FOLDER, or --scale smoke for drawn ones, or --only_report for none")
    if options.datasets is not None:
        for name in options.datasets:
            open_dataset(name, options.data, split="train")
        return tuple(options.datasets)
    found = [name for name in wanted if _opens(name, options.data)]
    if not found:
        names = ", ".join(f"{name} ({TITLES[name]})" for name in wanted)
        raise ValueError(
            f"{options.data} holds none of the data sets of this study: {names}; "
            f"'eigengrain datasets list {wanted[0]}' shows how one looks"
        )
    return tuple(found)


def _opens(name: str, root: str) -> bool:
    find_entry(name)
    try:
        open_dataset(name, root, split="train")
    except LayoutError:
        return False
    return True


def carry_out(study: Study, setup: Setup) -> None:
    """Measure, and train what has no record yet, until nothing is left or the time is over."""
    left = setup.seconds_left()
    if study.measure is not None and (left is None or left > 0):
        study.measure(setup)
    run_jobs(
        lambda: study.plan(setup),
        setup.out,
        seconds=setup.seconds_left(),
        places=setup.places[1:],
        decoded=setup.decoded,
        keep_models=not setup.options.drop_models,
    )


def show_list(options: StudyRun, console: Console) -> None:
    """Every study with its runs and what they cost."""
    rows: list[dict[str, object]] = []
    lines: list[list[Cell]] = []
    known = set()
    speeds = Speeds(Setup(options), options.measure)
    for study in STUDIES:
        setup = Setup(options, study.seeds(options))
        chosen = study.datasets(setup)
        if options.scale == "small" and options.datasets is None:
            chosen = chosen[:1]  # one of them is what fits an hour
        said = cost(study, replace(setup, available=chosen), speeds)
        if said.runs:
            known.add(said.known)
        names = ", ".join(TITLES[name] for name in chosen)
        what = {"name": study.name, "in_the_paper": study.where, "what": study.title, "on": names}
        rows.append({**what, "runs": said.runs, "training_seconds": round(said.seconds)})
        lines.append([*map(Cell, what.values()), Cell(str(said.runs or "–")), Cell(_duration(said.seconds))])
    heads = ["name", "in the paper", "what", "on", "runs", "training"]
    under = "both protocols" if options.protocol == "both" else f"{options.protocol} protocol"
    shown = on_terminal(TableData(f"studies, scale {options.scale}, {under}", heads, lines))
    for column in shown.columns[:4]:
        column.justify, column.no_wrap = "left", False
    console.print(shown)
    how = {
        "stated": f"images a second as stated for {STATED_FOR}; --measure times a step of each backbone here",
        "records": "images a second of the records",
        "measured": "images a second of a step that was timed here",
    }
    used = dict.fromkeys(word for each in sorted(known) for word in each.split(" and "))
    if options.scale == "smoke":
        console.print("training: a third of a second for each run")
    elif used:
        console.print("training: images × epochs / " + "; ".join(how[word] for word in used), highlight=False)
    console.print("Runs that studies share are counted in each of them and made once. Tests and analyses come on top.")
    if options.scale == "small" and options.backbones is None and options.heads is None:
        console.print(
            "Scale small trains few of the rows, on each data set that is found; --backbones and --heads name others."
        )
    output.result(rows, [row["name"] for row in rows])


def _duration(seconds: float) -> str:
    if seconds == 0:
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
