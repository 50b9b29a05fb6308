"""What studies come to, as files, on the terminal and as one page."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from eigengrain.files import writable, write_csv
from eigengrain.pages import Cell, Commands, Heading, Part, TableData, page
from studies.accuracy import NOT_RUN
from studies.config import StudyRun
from studies.report import on_terminal
from studies.study import Findings, Setup, Study


class Conclusion(NamedTuple):
    """What a study comes to, and its figure if there is one."""

    study: Study
    found: Findings
    picture: Path | None

    @property
    def spoken(self) -> list[TableData]:
        """The tables with a number of ours; all of them if there is none."""
        return [table for table in self.found.tables if not _is_silent(table)] or self.found.tables

    @property
    def notes(self) -> list[str]:
        """What is to be said, also of the tables that are left out."""
        left = [table.caption.split(", test")[0].split(": medians")[0] for table in self.found.tables if _is_silent(table)]
        if len(left) in (0, len(self.found.tables)):
            return self.found.notes
        where = f"the paper's numbers for them are in {self.study.name}.md"
        return [*self.found.notes, f"{NOT_RUN}: {'; '.join(left)} ({where})."]

    @property
    def silent(self) -> bool:
        """Whether nothing of ours is in it."""
        return all(map(_is_silent, self.found.tables))


def _is_silent(table: TableData) -> bool:
    """Whether a table has nothing but the paper's numbers."""
    ours = [k for k, head in enumerate(table.heads) if k and not head.startswith("paper") and not head.endswith(": paper")]
    return all(row[k].text == NOT_RUN for row in table.rows for k in ours)


def conclude(study: Study, setup: Setup) -> Conclusion:
    """Read the records, and draw if there is something to draw and something to draw with."""
    found = study.findings(setup)
    if found.draw is None or find_spec("matplotlib") is None:
        return Conclusion(study, found, None)
    path = writable(setup.out / f"{study.name}.png")
    found.draw(path)
    return Conclusion(study, found, path)


def write_files(conclusion: Conclusion, setup: Setup) -> list[Path]:
    """NAME.csv and NAME.md, beside NAME.png."""
    study, found, picture = conclusion
    table, text = writable(setup.out / f"{study.name}.csv"), setup.out / f"{study.name}.md"
    write_csv(table, found.rows)
    text.write_text(markdown(conclusion, setup), encoding="utf-8")
    return [table, text, *([picture] if picture else [])]


def show(conclusion: Conclusion, setup: Setup, console: Console) -> list[Path]:
    """Write the files of a study and print its tables; the files."""
    files = write_files(conclusion, setup)
    console.rule(f"{conclusion.study.where}: {conclusion.study.title}")
    for data in conclusion.spoken:
        table = on_terminal(data)
        for column in table.columns:
            column.no_wrap = False  # a narrow terminal breaks lines rather than cut numbers off
        console.print(table, "")
    for note in conclusion.notes:
        console.print(note, highlight=False, markup=False)
    console.print(
        f"written to {setup.out}: {', '.join(file.name for file in files)}", soft_wrap=True, highlight=False, markup=False
    )
    return files


def markdown(conclusion: Conclusion, setup: Setup) -> str:
    """All tables and notes of a study as Markdown."""
    study, found, picture = conclusion
    parts = [f"# {study.where}: {study.title}", f"Scale {setup.options.scale}. `{command(study, setup.options)}`"]
    for data in found.tables:
        lines = [" | ".join(cells) for cells in (data.heads, ["---"] * len(data.heads))]
        lines += [" | ".join(cell.text.replace("|", "\\|") for cell in row) for row in data.rows]
        parts.append(f"**{data.caption}**\n\n" + "\n".join(f"| {line} |" for line in lines))
    parts += found.notes
    if picture is not None:
        parts.append(f"![{study.title}]({picture.name})")
    return "\n\n".join(parts) + "\n"


def command(study: Study, options: StudyRun) -> str:
    """The command of a study for another machine: without the folders of this one, and with the names that it knows.

    Example:
        >>> from studies.catalogue import find_study
        >>> command(find_study("paths"), StudyRun(scale="smoke", heads=["gap", "mpncov"], rates=[0.5, 1]))
        'eigengrain study paths --scale smoke --protocol fair --heads mpncov --rates 0.5,1'
    """
    words = ["eigengrain", "study", study.name, *([] if options.scale == "smoke" else ["--data", "FOLDER"])]
    words += ["--scale", options.scale, "--protocol", options.protocol]
    rows = study.all_rows(Setup(options))
    named = {
        "datasets": [name for name in options.datasets or () if any(row.data == name for row in rows)],
        "backbones": [name for name in options.backbones or () if any(row.backbone == name for row in rows)],
        "heads": [name for name in options.heads or () if any(row.head == name for row in rows)],
        "seeds": [str(seed) for seed in options.seeds or ()],
        "rates": [f"{rate:g}" for rate in options.rates] if options.rates != StudyRun().rates else [],
    }
    for what, values in named.items():
        words += [f"--{what}", ",".join(values)] if values else []
    return " ".join(words)


def write_page(conclusions: Sequence[Conclusion], setup: Setup) -> Path:
    """One self-contained page about all studies of which there is a record, and a list of the others."""
    path = writable(setup.out / "report.html")
    parts: list[Part] = [
        f"Scale {setup.options.scale}. Every number of ours comes from a record of a run; what has none says 'not run'. "
        "The paper's numbers are those it prints."
    ]
    for conclusion in conclusions:
        if not conclusion.silent:
            study = conclusion.study
            parts += [Heading(f"{study.where}: {study.title}"), *conclusion.spoken, *conclusion.notes]
            parts += [conclusion.picture] if conclusion.picture else []
            parts.append(Commands([command(study, setup.options)]))
    silent = [conclusion.study for conclusion in conclusions if conclusion.silent]
    if silent:
        rows = [[Cell(study.where), Cell(study.title), Cell(command(study, setup.options))] for study in silent]
        parts += [Heading("Not run"), TableData("of these there is no record", ["", "study", "command"], rows)]
    title = "The tables and figures of the paper, and ours"
    path.write_text(page(title, parts, {"runs on": "; ".join(setup.machines) or "nothing yet"}), encoding="utf-8")
    return path
