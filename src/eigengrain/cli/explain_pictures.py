"""The pictures of ``eigengrain explain``: panels of maps, and images changed toward large and small eigenvalues."""

from collections.abc import Sequence
from typing import Any

from rich.progress import Progress
from torch import Tensor

from eigengrain.cli.explain_plan import Plan
from eigengrain.data.image_set import stack
from eigengrain.explain.animation import rgb_pixels, write_gif
from eigengrain.explain.perturbation import EigenPerturbation
from eigengrain.explain.plots import Explained, draw_panel, draw_perturbed, explain_images
from eigengrain.explain.report import Picture

#: images of one panel
ROWS = 6

#: frames of an animation
FRAMES = 21


def draw(plan: Plan, bar: Progress) -> list[Picture]:
    """Panels of maps, and of perturbed images with their animations where they are wanted."""
    config, shown = plan.config, plan.shown
    pages = [shown[start : start + ROWS] for start in range(0, len(shown), ROWS)]
    task = bar.add_task("drawing", total=len(pages) * len(config.cuts))
    pictures = []
    for cut in config.cuts:
        for place, numbers in enumerate(pages, start=1):
            path = draw_panel(_explained(plan, numbers, cut), plan.out / f"panel-{cut}-{place}.png", config.scale)
            pictures.append(Picture(path, f"Maps, cut {cut}, {place} of {len(pages)}"))
            bar.advance(task)
    if plan.perturbation is not None:
        for place, numbers in enumerate(pages, start=1):
            pictures += _perturbed(plan, plan.perturbation, numbers, place, len(pages))
    return pictures


def _explained(plan: Plan, numbers: Sequence[int], cut: str) -> list[Explained]:
    source, config = plan.source, plan.config
    found: list[Explained] = []
    for start in range(0, len(numbers), config.batch_size):
        some = numbers[start : start + config.batch_size]
        labels = [source.dataset.labels[number] for number in some]
        target: Any = {"predicted": None, "label": labels, "norm": "norm"}.get(config.target, plan.fixed)
        found += explain_images(
            source.model,
            _batch(plan, some),
            plan.subsets,
            config.rules,
            target=target,
            cut=cut,
            names=[source.name(number) for number in some],
            labels=labels if source.labelled else None,
        )
    return found


def _batch(plan: Plan, numbers: Sequence[int]) -> Tensor:
    return stack([plan.source.dataset[number] for number in numbers])[0].to(plan.device)


def _perturbed(plan: Plan, method: EigenPerturbation, numbers: Sequence[int], place: int, pages: int) -> list[Picture]:
    """The images of one panel, changed: a panel, and an animation for each direction."""
    config, images = plan.config, _batch(plan, numbers)
    frames = min(FRAMES, config.perturb + 1)
    results = [
        method.perturb(images, direction, plan.split, config.perturb, snapshots=frames) for direction in config.directions
    ]
    pixels = rgb_pixels(images, method.mean, method.std)
    names = [plan.source.name(number) for number in numbers]
    panel = draw_perturbed(pixels, results, plan.out / f"perturbed-{place}.png", names)
    pictures = [Picture(panel, f"Perturbed images, {place} of {pages}", perturbed=True)]
    for result in results:
        film = write_gif(result, plan.out / f"perturbed-{place}-{result.toward}.gif", columns=min(len(numbers), 3))
        said = f"Toward {result.toward} eigenvalues, {result.steps_taken} steps, {place} of {pages}"
        pictures.append(Picture(film, said, perturbed=True))
    return pictures
