"""``python -m studies NAME``: train what is missing, and show our results beside the numbers of the paper."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pandas as pd

from eigengrain import output
from eigengrain.cli.main import Command, run_commands
from eigengrain.data import open_dataset
from eigengrain.errors import ArgumentError, FileError, Interrupted, LayoutError
from eigengrain.files import writable
from studies.all_studies import STUDIES, find_study
from studies.cost import STATED_FOR, estimate_cost, recorded_speeds
from studies.report import Result, make_result, show, terminal_table, write_files, write_page
from studies.runs import run_jobs
from studies.settings import ACTIONS, SHORT, TITLES, StudyOptions, find_images
from studies.study import Setup, Study, Table, check_names

PROGRAM = "python -m studies"
COMMANDS = [
    Command(
        "",
        "reproduce a table or figure of the paper",
        StudyOptions,
        "studies.__main__:run",
        positional={"name": "?"},
        examples=(
            f"{PROGRAM} list",
            f"{PROGRAM} gcp-methods --scale smoke",
            f"{PROGRAM} spectrum --data /data --datasets cub --seconds 3600",
        ),
    )
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study and return the exit code."""
    return run_commands(PROGRAM, COMMANDS, argv, "Train what is missing, and show our results beside those of the paper.")


def run(options: StudyOptions) -> int:
    """Run a study, all of them, list them or write a page; returns 0, or 130 and 143 after Ctrl-C and SIGTERM."""
    console = output.console()
    studies = list(STUDIES) if options.name in ACTIONS else [find_study(options.name)]
    check_names(options, [row for study in studies for row in study.all_rows(Setup(options))])
    if options.settings is not None and not any(study.name == "recipe" for study in studies):
        raise ArgumentError("settings", "is only used by the study recipe", options.settings, "leave it out")
    for name in ("records", "weights"):
        path = getattr(options, name)
        if path is not None and not Path(path).expanduser().exists():
            raise FileError(path, f"there is no such file or folder (option {name})")
    if options.name == "list":
        show_list(options)
        return 0
    # some of many studies have none of the names of the options
    studies = [study for study in studies if study.measure is not None or study.rows(Setup(options))]
    setup = Setup(options)
    if options.name != "report" and not options.only_report:
        writable(Path(options.out) / "records" / "any")
        deadline = None if options.seconds is None else time.perf_counter() + options.seconds
        setup = Setup(options, available=available_datasets(options, studies), deadline=deadline)
    results: list[Result] = []
    files: list[Path] = []
    try:
        for study in studies:
            own = replace(setup, seeds=study.choose_seeds(options))
            if own.available is not None:
                run_study(study, own)
            results.append(make_result(study, own))
            if options.name != "report":
                files += show(results[-1], own, console)
            elif not results[-1].report.is_empty:
                files += write_files(results[-1], own)
    except Interrupted as stop:
        print(f"studies: stopped {stop.position}; rerun the command to continue", file=sys.stderr)
        return stop.exit_code
    if options.name in ("all", "report"):
        files.append(write_page(results, setup))
        console.print(f"report: {files[-1]}", soft_wrap=True, highlight=False, markup=False)
    documents = [
        {"name": s.name, "where": s.where, "title": s.title, "rows": report.rows, "notes": report.notes}
        for s, report, _ in results
    ]
    output.result({"studies": documents, "files": files}, files)
    return 0


def available_datasets(options: StudyOptions, studies: Sequence[Study]) -> tuple[str, ...]:
    """The data sets to train on: those of the options, or those of the studies that are in the folder."""
    names = tuple(dict.fromkeys(name for study in studies for name in study.datasets(Setup(options))))
    if options.scale == "smoke" or not names:
        return names
    if options.data is None and set(options.datasets or names) - {"plumage"}:
        raise ArgumentError("data", "must be the folder of the images", remedy="or use {scale} smoke, or {only_report}")
    if options.datasets is not None:
        for name in options.datasets:
            open_dataset(*find_images(options.data, name), split="train")
        return tuple(options.datasets)
    available = []
    for name in names:
        with suppress(LayoutError):
            open_dataset(*find_images(options.data, name), split="train")
            available.append(name)
    if not available:
        titles = ", ".join(f"{name} ({TITLES[name]})" for name in names)
        remedy = f"see 'eigengrain datasets list {names[0]}'"
        raise ArgumentError("data", f"contains none of the data sets {titles}", options.data, remedy)
    return tuple(available)


def run_study(study: Study, setup: Setup) -> None:
    """Measure and train what has no record, until nothing is left or the time budget is used up."""
    if study.measure is not None and (setup.deadline is None or setup.deadline > time.perf_counter()):
        study.measure(setup)
    run_jobs(
        lambda: study.plan(setup),
        setup.out,
        seconds=None if setup.deadline is None else setup.deadline - time.perf_counter(),
        more_records=setup.folders[1:],
        decoded=setup.decoded,
        keep_models=not setup.options.drop_models,
    )


def show_list(options: StudyOptions) -> None:
    """Print all studies with their number of runs and training time."""
    rows, sources, speeds = [], set(), recorded_speeds(Setup(options))
    for study in STUDIES:
        setup = Setup(options, study.choose_seeds(options))
        chosen = study.datasets(setup)
        if options.scale in SHORT and options.datasets is None:
            chosen = chosen[:1]  # one of them fits an hour
        count, seconds, used = estimate_cost(study, replace(setup, available=chosen), speeds)
        sources |= used
        names = ", ".join(TITLES[name] for name in chosen)
        row = {"name": study.name, "in_the_paper": study.where, "what": study.title, "on": names}
        rows.append(row | {"runs": count, "training_seconds": round(seconds)})
    frame = pd.DataFrame(rows).rename(columns={"in_the_paper": "in the paper", "training_seconds": "training"})
    frame["runs"] = [str(count or "–") for count in frame["runs"]]
    frame["training"] = [_duration(seconds) for seconds in frame["training"]]
    protocol = "both protocols" if options.protocol == "both" else f"{options.protocol} protocol"
    view = terminal_table(Table("", f"studies, scale {options.scale}, {protocol}", frame, ()))
    for column in view.columns[:4]:
        column.justify = "left"
    console = output.console()
    console.print(view)
    explanations = {"stated": f"as stated for {STATED_FOR}", "records": "of the records"}
    if options.scale == "smoke":
        console.print("training: a third of a second per run")
    elif sources:
        text = ", or ".join(explanations[source] for source in sorted(sources))
        console.print(f"training: images × epochs / images per second {text}", highlight=False)
    console.print("Runs that studies share are counted in each of them and made once. Tests and analyses come on top.")
    if options.scale in SHORT and options.backbones is None and options.heads is None:
        console.print(
            f"Scale {options.scale} trains few of the rows, on each available data set; --backbones and --heads add others."
        )
    output.result(rows, [row["name"] for row in rows])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds else "–"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    sys.exit(main())
