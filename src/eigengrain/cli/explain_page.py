"""The page of ``eigengrain explain``: the pictures and the means, and what they are of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eigengrain.cli.explain_measures import summaries
from eigengrain.cli.explain_options import command_line
from eigengrain.cli.explain_plan import Plan, own_part
from eigengrain.explain.report import Picture, write_gallery
from eigengrain.explain.survey import SurveyResult

#: bytes of an animation that the page still carries
LIGHT = 4_000_000


def write_page(
    path: Path, plan: Plan, pictures: Sequence[Picture], surveys: Sequence[SurveyResult], environment: dict[str, Any]
) -> None:
    """Write the page, without the animations that are too heavy for it."""
    write_gallery(
        path,
        "What large and small eigenvalues see",
        [picture for picture in pictures if picture.path.suffix != ".gif" or picture.path.stat().st_size <= LIGHT],
        summaries(surveys),
        facts=_facts(plan, surveys),
        command=command_line(plan.config),
        environment=environment,
    )


def _facts(plan: Plan, surveys: Sequence[SurveyResult]) -> dict[str, str]:
    config, source = plan.config, plan.source
    model, dataset = source.model, source.dataset
    kept = f"; the model itself keeps {own}" if (own := own_part(model)) else ""
    measured = f", {surveys[0].samples} measured" if surveys else ""
    chosen = f"{len(plan.shown)} shown{measured}, "
    chosen += f"drawn by seed {config.seed} from {len(dataset)}" if source.labelled else "in the order they were given"
    facts = {
        "Model": f"{model.config['backbone']} with the head {model.config['head']}",
        "Checkpoint": config.checkpoint,
        "Images": f"{dataset.name}, {dataset.split}: {chosen}" if source.labelled else chosen,
        "Eigenvalues": f"{model.head.channels}; subsets {', '.join(plan.subsets)}{kept}",
        "Explained": _explained(plan),
    }
    if config.perturb:
        steps = f"{config.perturb} steps of Adam at a rate of {config.perturb_lr:g}"
        facts["Perturbed"] = f"{steps}, split after {plan.split}"
    return facts


def _explained(plan: Plan) -> str:
    if plan.fixed is not None:
        names = plan.source.model.class_names
        return f"the score of the class {names[plan.fixed] if names else plan.fixed}"
    return {
        "predicted": "the score of the predicted class",
        "label": "the score of the true class",
        "norm": "the norm of the vector before the classifier",
    }[plan.config.target]
