"""A report on the eigenvalues of images: panels of maps, perturbed images, measures, and one self-contained page."""

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from eigengrain.data.image_set import ImageSet, stack
from eigengrain.data.transforms import Pipeline
from eigengrain.errors import ArgumentError
from eigengrain.explain.perturbation import EigenPerturbation, rank_and_size
from eigengrain.explain.plots import (
    Explained,
    draw_panel,
    draw_parts,
    draw_perturbed,
    explain_images,
    rgb_pixels,
    write_gif,
)
from eigengrain.explain.survey import (
    DEFAULT_MEASURES,
    Summary,
    SurveyResult,
    choose_subsets,
    image_batches,
    read_target,
    split_point,
    survey,
)
from eigengrain.files import writable, write_csv
from eigengrain.heads import SpectralHead, TransformerHead
from eigengrain.models import CovarianceNet
from eigengrain.names import DIRECTIONS, MEASURES, RULES
from eigengrain.pages import Cell, TableData, render
from eigengrain.progress import progress_bar

#: images per panel
ROWS = 6
#: frames per animation
FRAMES = 21
#: size in bytes up to which an animation is embedded in the page
LIGHT = 4_000_000


@dataclass(frozen=True)
class Picture:
    """A PNG or GIF file of a report: a panel of maps, of selected parts or of perturbed images, or an animation."""

    path: Path
    caption: str
    kind: Literal["maps", "parts", "perturbed", "film"] = "maps"


@dataclass
class Report:
    """Panels, measures and a page about a model and some images.

    The steps are separate, so that several processes can share the measuring: :meth:`measure`, then, in one process,
    :meth:`draw` and :meth:`write`.
    """

    model: CovarianceNet  #: in eval mode
    dataset: ImageSet  #: images, with an evaluation transform
    out: Path  #: folder of the files
    labelled: bool = True  #: whether the labels are the classes of the images
    seed: int | None = 0  #: seed for the choice of images; None takes them in order
    count: int = 12  #: number of images in the panels
    measure_count: int | None = 100  #: number of images that are measured; None for all
    subsets: Sequence[str] = ()  #: by default all eigenvalues, the model's own subset, the largest and the smallest
    split_at: int | None = None  #: number of eigenvalues that count as large; by default the paper's share, 206 of 256
    rules: Sequence[str] = RULES  #: backward rules at the ReLUs
    cuts: Sequence[str] = ("exact",)  #: exact, projector or both
    target: str | int = "predicted"  #: predicted, label, norm, or a class by name or number
    measures: Sequence[str] = DEFAULT_MEASURES
    scale: str = "row"  #: colour scale, see draw_panel
    perturb: int = 0  #: number of steps of EigenPerturbation; 0 for no perturbed images
    toward: Sequence[str] = DIRECTIONS  #: large, small or both
    perturb_lr: float = 0.1  #: learning rate of these steps
    batch_size: int = 32  #: images per pass of the model, over all processes
    workers: int = 0  #: number of processes that read images

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        head = self.model.head
        self.classes = list(self.model.class_names or self.dataset.classes)
        self.large = split_point(head.channels, self.split_at)
        self.subsets = choose_subsets(head, self.subsets, self.large)
        self.explained = read_target(self.target, self.model.num_classes, self.classes)
        self.own_subset = head.own_subset if isinstance(head, SpectralHead) else None
        self.perturbation = self._method() if self.perturb else None
        self.device = next(self.model.parameters()).device
        self.indices = list(range(len(self.dataset)))
        if self.seed is not None:
            random.Random(self.seed).shuffle(self.indices)
        self.shown = self.indices[: self.count]

    def _method(self) -> EigenPerturbation:
        try:
            return EigenPerturbation(self.model, lr=self.perturb_lr)
        except ArgumentError as error:  # the name that it has here
            if error.argument != "lr":
                raise
            raise ArgumentError("perturb_lr", error.problem, error.value, error.remedy) from None

    def measure(self) -> list[SurveyResult]:
        """Measure the maps, once per cut; under ``torch.distributed`` every process takes a share."""
        indices = self.indices[: self.measure_count]
        if not indices:
            return []
        part = self.dataset.subset(indices)
        regions = isinstance(part.transform, Pipeline)
        results = []
        for cut in self.cuts:
            batches = image_batches(part, self.batch_size, regions=regions, workers=self.workers)
            with progress_bar(show=rank_and_size()[0] == 0) as bar:
                step = partial(bar.advance, bar.add_task(f"measuring ({cut})", total=len(batches)))
                options: dict[str, Any] = {"target": self.explained, "measures": self.measures, "each": step}
                result = survey(self.model, batches, self.subsets, self.rules, cut=cut, **options)
            for row in result.rows:
                row["number"] = indices[row["number"]]
                row["label"] = row["label"] if self.labelled else None
            # a survey of all eigenvalues alone, without regions, has nothing to compare
            if result.table:
                results.append(result)
        return results

    def draw(self) -> list[Picture]:
        """Draw the panels, the parts that the head selects, and perturb images if ``perturb`` is above 0."""
        pages = [self.shown[start : start + ROWS] for start in range(0, len(self.shown), ROWS)]
        pictures = []
        with progress_bar() as bar:
            task = bar.add_task("drawing", total=len(pages) * len(self.cuts))
            for cut in self.cuts:
                for place, indices in enumerate(pages, start=1):
                    path = self.out / f"panel-{cut}-{place}.png"
                    draw_panel(self._explain(indices, cut), path, self.scale)
                    pictures.append(Picture(path, _numbered(f"Maps, {cut} cut", place, len(pages))))
                    bar.advance(task)
        if isinstance(self.model.head, TransformerHead) and self.model.head.selects_parts:
            for place, indices in enumerate(pages, start=1):
                pictures.append(self._parts(indices, place, len(pages)))
        if self.perturbation is not None:
            for place, indices in enumerate(pages, start=1):
                pictures += self._perturb(self.perturbation, indices, place, len(pages))
        return pictures

    def write(
        self,
        surveys: Sequence[SurveyResult],
        pictures: Sequence[Picture],
        *,
        command: str,
        environment: Mapping[str, object],
        checkpoint: str = "",
    ) -> list[Path]:
        """Write the measures (CSV) and the page (HTML), and return their paths; the page is the last.

        Args:
            surveys, pictures: results of :meth:`measure` and :meth:`draw`. The page leaves out animations above 4 MB.
            command: command that makes the report again.
            environment: result of :func:`eigengrain.environment.describe`.
            checkpoint: where the model comes from.
        """
        summaries = [row for each in surveys for row in each.table]
        files = []
        if surveys:
            files = [means, images] = [writable(self.out / name) for name in ("measures.csv", "measures-images.csv")]
            about = {"checkpoint": checkpoint, "data": self.dataset.name, "split": self.dataset.split}
            about["target"] = str(self.target)
            write_csv(means, [{**about, **asdict(row), **environment} for row in summaries])
            write_csv(images, [{"image": self._place(row["number"]), **row} for each in surveys for row in each.rows])
        page = writable(self.out / "gallery.html")
        small = [picture for picture in pictures if picture.kind != "film" or picture.path.stat().st_size <= LIGHT]
        html = render(
            "explain.html",
            title="What large and small eigenvalues see",
            report=self,
            checkpoint=checkpoint,
            samples=surveys[0].samples if surveys else 0,
            pictures=small,
            tables=measure_tables(summaries),
            measures=_measured(summaries),
            command=command,
            environment=environment,
        )
        page.write_text(html, encoding="utf-8", errors="replace")
        return [*files, page]

    def _place(self, index: int) -> str:
        """The path of an image, or its number in a data set without files, in printable characters."""
        path = self.dataset.path(index)
        text = f"{self.dataset.split} {index}" if path is None else str(path)
        return "".join(letter if letter.isprintable() else "?" for letter in text)

    def _read(self, indices: Sequence[int]) -> tuple[Tensor, list[str]]:
        """Images on the device, and their names."""
        images = stack([self.dataset[index] for index in indices])[0].to(self.device)
        return images, [os.path.basename(self._place(index)) for index in indices]

    def _explain(self, indices: Sequence[int], cut: str) -> list[Explained]:
        explained: list[Explained] = []
        for start in range(0, len(indices), self.batch_size):
            some = indices[start : start + self.batch_size]
            images, names = self._read(some)
            labels = [self.dataset.labels[index] for index in some]
            target: Any = labels if self.explained == "label" else None if self.explained == "predicted" else self.explained
            options: dict[str, Any] = {"labels": labels if self.labelled else None, "classes": self.classes}
            explained += explain_images(
                self.model, images, self.subsets, self.rules, target=target, cut=cut, names=names, **options
            )
        return explained

    def _parts(self, indices: Sequence[int], place: int, pages: int) -> Picture:
        images, names = self._read(indices)
        described, path = self.model.pretrained_cfg, self.out / f"parts-{place}.png"
        pixels = rgb_pixels(images, described["mean"], described["std"])
        draw_parts(pixels, self.model.selected_parts(images), path, names)
        return Picture(path, _numbered("Selected parts", place, pages), "parts")

    def _perturb(self, method: EigenPerturbation, indices: Sequence[int], place: int, pages: int) -> list[Picture]:
        """Perturb the images of one panel: the panel, and one animation per direction."""
        images, names = self._read(indices)
        frames = min(FRAMES, self.perturb + 1)
        results = [method.perturb(images, toward, self.large, self.perturb, snapshots=frames) for toward in self.toward]
        panel = self.out / f"perturbed-{place}.png"
        draw_perturbed(rgb_pixels(images, method.mean, method.std), results, panel, names)
        pictures = [Picture(panel, _numbered("Perturbed images", place, pages), "perturbed")]
        for result in results:
            film = self.out / f"perturbed-{place}-{result.toward}.gif"
            write_gif(result, film, columns=min(len(indices), 3))
            caption = f"Toward {result.toward} eigenvalues, {result.steps_taken} steps"
            pictures.append(Picture(film, _numbered(caption, place, pages), "film"))
        return pictures


def _numbered(caption: str, place: int, pages: int) -> str:
    return f"{caption}, {place} of {pages}" if pages > 1 else caption


def measure_tables(summaries: Sequence[Summary]) -> list[TableData]:
    """One table per cut, with one row per measure and one column per rule and subset."""
    cuts = dict.fromkeys(row.cut for row in summaries)
    return [_table(cut, [row for row in summaries if row.cut == cut]) for cut in cuts]


def _table(cut: str, summaries: Sequence[Summary]) -> TableData:
    cells = {(row.rule, row.subset, row.measure): row for row in summaries}
    subsets: dict[str, dict[str, None]] = {}  # by rule, in order
    for row in summaries:
        subsets.setdefault(row.rule, {})[row.subset] = None
    columns = [(rule, subset) for rule, names in subsets.items() for subset in names]
    rows = [
        [Cell(measure.replace("_", " ")), *(_cell(cells.get((*column, measure))) for column in columns)]
        for measure in _measured(summaries)
    ]
    images = max(row.n + row.n_undefined for row in summaries)
    caption = f"Cut {cut}: mean ± standard error over n = {images} images, unless another n is given"
    groups = [(rule, len(names)) for rule, names in subsets.items()]
    return TableData(caption, ["", *(subset for _, subset in columns)], rows, groups)


def _measured(summaries: Sequence[Summary]) -> list[str]:
    return [name for name in MEASURES if any(row.measure == name for row in summaries)]


def _cell(row: Summary | None) -> Cell:
    """Mean, standard error, and the number of images if the measure is undefined for some."""
    if row is None:
        return Cell("")
    mean, *error = _with_error(row.mean, row.standard_error) if row.n else ("–",)
    missing = [f"n = {row.n},\n{row.n_undefined} undefined"] if row.n_undefined else []
    return Cell(mean, notes=[*error, *missing])


def _with_error(mean: float, error: float) -> tuple[str, ...]:
    """A mean to the first digit of its standard error, and the standard error if it is above 0.

    Example:
        >>> _with_error(0.99912, 0.00013), _with_error(3.382, 0.052), _with_error(0.5, math.nan)
        (('0.9991', '± 0.0001'), ('3.38', '± 0.05'), ('0.5',))
    """
    if not error > 0:
        return (f"{mean:.3g}",)
    digits = min(max(-math.floor(math.log10(error)), 0), 6)
    return f"{mean:.{digits}f}", f"± {error:.{digits}f}"
