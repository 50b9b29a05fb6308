"""The measures of ``eigengrain explain``: taken, written to files, and shown on the terminal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.progress import Progress
from rich.table import Table

from eigengrain.cli.explain_plan import Plan
from eigengrain.explain.saliency import attribute_rules
from eigengrain.explain.survey import DEFAULT_MEASURES, Summary, SurveyResult, image_batches, survey
from eigengrain.files import write_csv
from eigengrain.text import counted

#: measures that the terminal has room for
SHOWN = ("corr", "mae", "norm_ratio", "object_over_area", "parts_over_area", "gap")


def measure(plan: Plan, bar: Progress) -> list[SurveyResult]:
    """One survey for each cut, shared among the processes."""
    config, source = plan.config, plan.source
    numbers = source.numbers[: config.measured]
    if not numbers:
        return []
    part = source.dataset.subset(numbers)
    results = []
    for cut in config.cuts:
        batches = image_batches(part, config.batch_size, regions=source.located, workers=config.workers)
        task = bar.add_task(f"measuring ({cut})", total=len(batches))  # type: ignore[arg-type]
        result = survey(
            source.model,
            batches,
            plan.subsets,
            config.rules,
            cut=cut,
            target="predicted" if plan.fixed is not None else config.target,
            measures=config.measures or DEFAULT_MEASURES,
            attribute=_of_class(plan.fixed) if plan.fixed is not None else None,
            each=lambda task=task: bar.advance(task),  # type: ignore[misc]
        )
        for row in result.rows:
            row["number"] = numbers[row["number"]]
            row["label"] = row["label"] if source.labelled else None
        # maps of all eigenvalues alone, on images without regions, have nothing beside them to be measured by
        if result.table:
            results.append(result)
    return results


def _of_class(fixed: int) -> Callable[..., Any]:
    """What makes the maps of one class, whatever class a survey asks for."""

    def attribute(model: Any, images: Any, subsets: Any, rules: Any, target: Any, cut: str) -> Any:
        return attribute_rules(model, images, subsets, rules, fixed, cut)

    return attribute


def write_measures(plan: Plan, surveys: Sequence[SurveyResult], environment: dict[str, Any]) -> list[Path]:
    """Means and, in another file, every image's measures."""
    if not surveys:
        return []
    means, images = plan.out / "measures.csv", plan.out / "measures-images.csv"
    config, dataset = plan.config, plan.source.dataset
    about = {"checkpoint": config.checkpoint, "data": dataset.name, "split": dataset.split, "target": config.target}
    write_csv(means, [{**about, **asdict(row), **environment} for row in summaries(surveys)])
    rows = [row for each in surveys for row in each.rows]
    write_csv(images, [{"image": plan.source.place(row["number"]), **row} for row in rows])
    return [means, images]


def summaries(surveys: Sequence[SurveyResult]) -> list[Summary]:
    """The means of all surveys."""
    return [row for each in surveys for row in each.table]


def terminal_table(surveys: Sequence[SurveyResult]) -> Table:
    """The measures that there is room for."""
    rows = summaries(surveys)
    measures = [name for name in SHOWN if any(row.measure == name for row in rows)]
    measures += [name for name in dict.fromkeys(row.measure for row in rows) if not measures]
    table = Table(
        title=f"means over {counted(surveys[0].samples, 'image')}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    several = len(surveys) > 1
    for name in ("rule", "subset", "cut")[: 3 if several else 2]:
        table.add_column(name, no_wrap=True)
    for name in measures:
        table.add_column(name.replace("_", " "), justify="right")
    cells = {(row.rule, row.subset, row.cut, row.measure): row.mean for row in rows}
    for key in dict.fromkeys((row.rule, row.subset, row.cut) for row in rows):
        values = [cells.get((*key, name)) for name in measures]
        texts = ["" if v is None else "–" if math.isnan(v) else f"{v:.3f}" for v in values]
        table.add_row(*key[: 3 if several else 2], *texts)
    return table
