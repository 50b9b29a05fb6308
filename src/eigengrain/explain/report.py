"""One self-contained page about the eigenvalues of images: panels, measures, how to read them, and how they were made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eigengrain.explain.survey import MEASURES, Summary
from eigengrain.pages import Cell, Commands, Facts, Figure, Heading, Part, TableData, page

#: what each measure says, for a reader who has not read the code
MEANINGS = {
    "corr": "correlation with the map of all eigenvalues (Eq. 8 of the paper), from −1 to 1",
    "mae": "mean absolute error to it (Eq. 9), each map divided by its largest value",
    "norm_ratio": "norm of the map over that of all eigenvalues: how much of the gradient it carries",
    "object_energy": "share of the map on the object",
    "object_pointing": "share of images whose largest value is on the object",
    "object_over_area": "share of the map on the object over the object's share of the image; 1 is chance",
    "parts_energy": "share of the map on the parts that tell the class",
    "parts_pointing": "share of images whose largest value is on these parts",
    "parts_over_area": "share of the map on these parts over their share of the image; 1 is chance",
    "gap": "relative gap of the eigenvalues at the cut; an exact map grows as its inverse",
    "deletion": "area under the deletion curve; smaller is better",
    "insertion": "area under the insertion curve; larger is better",
}

#: how to read the panels
READING = (
    "Each map is the gradient of the network's answer to the image, computed with only some of the eigenvalues of the "
    "covariance of its features kept: all of them, the largest, or the smallest. Bright pixels are those whose change "
    "would change the answer most. The rules differ in what they let pass at a ReLU: vanilla is the true gradient; deconv "
    "passes positive gradients, whatever the unit did; guided passes positive gradients of active units.",
    "A cut spectrum can be differentiated in two ways. With the exact cut, the subspace of the kept eigenvalues turns as "
    "the image changes. Under vanilla the signed maps of large and small then add up to that of all; but where the "
    "eigenvalues on both sides of the cut are close (a small gap) the turning outweighs everything else, and both maps "
    "become large and cancel. With the projector cut the subspace is held fixed: no gap can blow the maps up, and they no "
    "longer add up.",
    "The paper (Y. Song, N. Sebe and W. Wang, On the Eigenvalues of Global Covariance Pooling for Fine-grained Visual "
    "Recognition, T-PAMI) finds on fine-grained sets that the map of the last 50 of 256 eigenvalues lies on the object and "
    "resembles that of all, while the top 206 show the background; on ImageNet it finds the opposite. The measures say "
    "whether this holds for the network and the images at hand.",
    "Limits. A gradient says what a small change of the image would do, not why the network decided as it did. Deconv and "
    "guided maps are in part a reconstruction of the image that is the same for every answer (Nie et al., ICML 2018; "
    "Adebayo et al., NeurIPS 2018), so that maps of different subsets may resemble each other for no reason of the "
    "eigenvalues. The shape of a map that is weak matters little to the answer: look at the number under it. And a feature "
    "map of N positions has at most N − 1 eigenvalues above 0: where that is less than the channels, the smallest "
    "eigenvalues are 0 by construction, their map is zero, and the largest are all there are.",
)

#: how to read perturbed images, where there are any
READING_PERTURBED = (
    "Perturbed images are the image after many small changes, with the weights frozen: toward large, the covariance of its "
    "features is drawn to what the largest eigenvalues hold (l₁); toward small, it is driven away from that to what the "
    "others hold (l₂). Patterns that come up are what the network answers with these eigenvalues. As the image itself is "
    "the start, l₁ is next to its minimum before anything is done, and may rise before it falls; l₂ has no minimum but "
    "that of the bounds of the pixels. Nothing measures such pictures: they are for the eye alone."
)


@dataclass(frozen=True)
class Picture:
    """A PNG or GIF file and what stands under it; ``perturbed`` if it shows images that were changed."""

    path: Path
    caption: str
    perturbed: bool = False


def write_gallery(
    path: Path,
    title: str,
    pictures: Sequence[Picture],
    table: Sequence[Summary],
    *,
    facts: Mapping[str, str],
    command: str,
    environment: Mapping[str, object],
) -> Path:
    """Write the page: one file to keep or to send, with its pictures in it, that loads nothing and runs nothing.

    Args:
        path: of the HTML file.
        title: of the page.
        pictures: in their order.
        table: measures of a survey, or of several; empty for a page without.
        facts: what was explained, such as the model and the images.
        command: that makes the page again.
        environment: of :func:`eigengrain.environment.describe`.
    """
    reading = [*READING, READING_PERTURBED] if any(picture.perturbed for picture in pictures) else READING
    parts: list[Part] = [Facts(facts), Heading("Pictures"), *map(_figure, pictures), Heading("How to read them"), *reading]
    if table:
        meanings = {_spoken(measure): MEANINGS[measure] for measure in _measured(table)}
        parts += [Heading("Measures"), *_tables(table), Facts(meanings)]
    parts += [Heading("Command"), Commands([command])]
    path.write_text(page(title, parts, environment), encoding="utf-8", errors="replace")
    return path


def _figure(picture: Picture) -> Figure:
    shows = "A row an image: the image, then its maps by rule and by the eigenvalues that were kept"
    if picture.perturbed:
        shows = "A row an image: the image, then what it became after more and more steps"
    if picture.path.suffix == ".gif":
        shows = "Images as they change, step by step"
    return Figure(picture.path, shows, picture.caption)


def _tables(table: Sequence[Summary]) -> list[TableData]:
    """One table for each cut: a row a measure, a column a rule and subset."""
    return [_table(cut, [row for row in table if row.cut == cut]) for cut in dict.fromkeys(row.cut for row in table)]


def _table(cut: str, table: Sequence[Summary]) -> TableData:
    cells = {(row.rule, row.subset, row.measure): row for row in table}
    subsets: dict[str, dict[str, None]] = {}  # by rule, in their order
    for row in table:
        subsets.setdefault(row.rule, {})[row.subset] = None
    columns = [(rule, subset) for rule, names in subsets.items() for subset in names]
    rows = [
        [Cell(_spoken(measure)), *(_cell(cells.get((*column, measure))) for column in columns)]
        for measure in _measured(table)
    ]
    images = max(row.n + row.n_undefined for row in table)
    caption = f"cut: {cut}; mean ± standard error over n = {images} images, where no other n is given"
    groups = [(rule, len(names)) for rule, names in subsets.items()]
    return TableData(caption, ["", *(subset for _, subset in columns)], rows, groups)


def _measured(table: Sequence[Summary]) -> list[str]:
    return [name for name in MEASURES if any(row.measure == name for row in table)]


def _spoken(measure: str) -> str:
    return measure.replace("_", " ")


def _cell(row: Summary | None) -> Cell:
    """Mean and standard error, and how many images there are where some have none."""
    if row is None:
        return Cell("")
    mean, *error = _with_error(row.mean, row.standard_error) if row.n else ("–",)
    missing = [f"n = {row.n},\n{row.n_undefined} undefined"] if row.n_undefined else []
    return Cell(mean, notes=[*error, *missing])


def _with_error(mean: float, error: float) -> tuple[str, ...]:
    """A mean to the first digit of its standard error, and that where there is one.

    Example:
        >>> _with_error(0.99912, 0.00013), _with_error(3.382, 0.052), _with_error(0.5, math.nan)
        (('0.9991', '± 0.0001'), ('3.38', '± 0.05'), ('0.5',))
    """
    if not error > 0:
        return (f"{mean:.3g}",)
    digits = min(max(-math.floor(math.log10(error)), 0), 6)
    return f"{mean:.{digits}f}", f"± {error:.{digits}f}"
