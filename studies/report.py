"""The results of studies on the terminal, as files and as one page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.table
from rich.console import Console
from rich.markup import escape

from eigengrain import pages
from eigengrain.files import writable, write_csv
from eigengrain.pages import Cell, TableData
from studies.settings import StudyOptions
from studies.study import NOT_RUN, Report, Setup, Study, Table

#: options with names of a study
NAMES = ("datasets", "backbones", "heads")


class Result(NamedTuple):
    """A study, its report, and its figure if there is one."""

    study: Study
    report: Report
    picture: Path | None

    @property
    def tables(self) -> list[Table]:
        """The tables with a number of ours; all if there is none."""
        return [table for table in self.report.tables if not table.is_empty] or self.report.tables

    @property
    def notes(self) -> list[str]:
        """The notes, and the names of the tables that are left out."""
        empty = [table.name for table in self.report.tables if table.is_empty]
        if len(empty) in (0, len(self.report.tables)):
            return self.report.notes
        where = f"the paper's numbers for them are in {self.study.name}.md"
        return [*self.report.notes, f"{NOT_RUN}: {'; '.join(empty)} ({where})."]


def make_result(study: Study, setup: Setup) -> Result:
    """Read the records and draw the figure."""
    report, path = study.report(setup), setup.out / f"{study.name}.png"
    if report.draw is not None:
        report.draw(writable(path))
    return Result(study, report, path if report.draw else None)


def write_files(result: Result, setup: Setup) -> list[Path]:
    """Write NAME.csv and NAME.md beside NAME.png."""
    csv, text = writable(setup.out / f"{result.study.name}.csv"), setup.out / f"{result.study.name}.md"
    write_csv(csv, result.report.rows)
    text.write_text(markdown(result, setup), encoding="utf-8")
    return [csv, text, *([result.picture] if result.picture else [])]


def terminal_table(data: Table) -> rich.table.Table:
    """A table for the terminal; a narrow one breaks lines instead of cutting numbers."""
    table = rich.table.Table(title=escape(data.caption), box=None, padding=(0, 1, 0, 0), title_justify="left")
    for place, heading in enumerate(data.frame.columns):
        table.add_column(escape(heading), justify="right" if place else "left")
    for row in data.frame.itertuples(index=False):
        table.add_row(*map(escape, row))
    return table


def show(result: Result, setup: Setup, console: Console) -> list[Path]:
    """Write the files of a study and print its tables."""
    files = write_files(result, setup)
    console.rule(f"{result.study.where}: {result.study.title}")
    for table in result.tables:
        console.print(terminal_table(table), "")
    names = f"written to {setup.out}: {', '.join(file.name for file in files)}"
    for text in (*result.notes, names):
        console.print(text, soft_wrap=text is names, highlight=False, markup=False)
    return files


def markdown(result: Result, setup: Setup) -> str:
    """All tables and notes of a study as Markdown."""
    study, report, picture = result
    parts = [f"# {study.where}: {study.title}", f"Scale {setup.options.scale}. `{command(study, setup.options)}`"]
    for table in report.tables:
        rows = [list(table.frame.columns), ["---"] * len(table.frame.columns), *table.frame.to_numpy().tolist()]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        parts.append(f"**{table.caption}**\n\n" + "\n".join(lines))
    parts += report.notes
    if picture is not None:
        parts.append(f"![{study.title}]({picture.name})")
    return "\n\n".join(parts) + "\n"


def command(study: Study, options: StudyOptions) -> str:
    """The command of a study for another machine: without the folders of this one, and with the names of the study alone.

    Example:
        >>> from studies.all_studies import find_study
        >>> command(find_study("paths"), StudyOptions(scale="smoke", heads=["gap", "mpncov"], rates=[0.5, 1]))
        'python -m studies paths --scale smoke --protocol fair --heads mpncov --rates 0.5,1'
    """
    words = ["python -m studies", study.name, *([] if options.scale == "smoke" else ["--data FOLDER"])]
    words += [f"--scale {options.scale}", f"--protocol {options.protocol}"]
    own = [{row.data, row.backbone, row.head} for row in study.all_rows(Setup(options))]
    named = {key: [name for name in getattr(options, key) or () if any(name in names for names in own)] for key in NAMES}
    named["seeds"] = [str(seed) for seed in options.seeds or ()]
    named["rates"] = [f"{rate:g}" for rate in options.rates or ()]
    named |= {
        key: [str(value)] for key in ("epochs", "img_size", "search_epochs") if (value := getattr(options, key)) is not None
    }
    named["settings"] = ["FILE"] if options.settings is not None and study.name == "recipe" else []
    return " ".join([*words, *(f"--{option} {','.join(values)}" for option, values in named.items() if values)])


def write_page(results: Sequence[Result], setup: Setup) -> Path:
    """Write one self-contained page about all studies with a record, and a list of the others."""

    def html_table(table: Table) -> TableData:
        rows = [[Cell(text) for text in row] for row in table.frame.itertuples(index=False)]
        return TableData(table.caption, list(table.frame.columns), rows)

    sections = [
        {
            "heading": f"{result.study.where}: {result.study.title}",
            "tables": [html_table(table) for table in result.tables],
            "notes": result.notes,
            "picture": result.picture,
            "command": command(result.study, setup.options),
        }
        for result in results
        if not result.report.is_empty
    ]
    empty = [result.study for result in results if result.report.is_empty]
    rows = [[Cell(study.where), Cell(study.title), Cell(command(study, setup.options))] for study in empty]
    title = "The tables and figures of the paper, and ours"
    values: dict[str, Any] = {"title": title, "scale": setup.options.scale, "sections": sections}
    values["not_run"] = TableData("studies without a record", ["", "study", "command"], rows) if rows else None
    values["environment"] = {"runs on": "; ".join(setup.machines) or "nothing yet"}
    path = writable(setup.out / "report.html")
    path.write_text(pages.render(Path(__file__).with_name("report.html"), **values), encoding="utf-8")
    return path
