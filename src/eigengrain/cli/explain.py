"""``eigengrain explain``: what large and small eigenvalues see in images, as pictures, measures and a page."""

import math
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eigengrain import names, output
from eigengrain.cli.evaluate import check_data_options
from eigengrain.cli.predict import find_images
from eigengrain.data.datasets.registry import list_datasets
from eigengrain.errors import ArgumentError, FileError, MissingPackageError
from eigengrain.options import as_words, check, setting
from eigengrain.text import counted, few

if TYPE_CHECKING:
    from eigengrain.data import ImageSet
    from eigengrain.explain.survey import SurveyResult
    from eigengrain.training.run_folder import TrainedModel

#: options that :class:`eigengrain.explain.report.Report` has too
SAME = "count subsets split_at rules target scale perturb perturb_lr batch_size workers".split()
#: measures in the table on the terminal, if they are measured
SHOWN = ("corr", "mae", "norm_ratio", "object_over_area", "parts_over_area", "gap")


@dataclass(frozen=True)
class Explain:
    """Which model, which images, and what is made of them.

    Args:
        checkpoint: folder of 'eigengrain train' or of save_pretrained; 'eigengrain demo' writes runs/demo/mpncov.
        images: files, folders and quoted patterns of images, instead of a data set.
        data: name of a data set; that of the training by default.
        root: folder of the data set; that of the training by default.
        data_options: more keyword arguments of the data set, for --data.
        split: train, val (if the training has validation images) or test.
        count: number of images in the panels.
        measure_count: number of images that are measured, or all; 0 for none.
        seed: seed for the choice of images from a data set.
        rules: backward rules at the ReLUs: vanilla, deconv, guided.
        subsets: subsets of the eigenvalues; by default all, those the model keeps, top:k and last:d-k for --split_at k.
        split_at: number of eigenvalues that count as large; 206 of 256 by default, and the same share of any other number.
        cut: how a cut spectrum is differentiated: exact, projector, or both.
        target: what is explained: the predicted class, the label, a class (its name or number), or the norm of the vector.
        measures: names of measures; by default all except the slow deletion and insertion.
        scale: colour scale: row for one per rule and image, each for one per map.
        perturb: number of steps that change the images of the panels toward large and small eigenvalues; 0 for none.
        toward: large, small, or both.
        perturb_lr: learning rate of these steps, in normalised pixels.
        batch_size: number of images per batch, over all processes.
        workers: processes that read images, at most one per core.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: folder for panels (PNG), measures (CSV) and the page (HTML).
    """

    checkpoint: str = ""
    images: list[str] = setting([], several=True)
    data: str | None = setting(None, offers=list_datasets)
    root: str | None = None
    data_options: dict[str, Any] = setting({})
    split: str = setting("test", choices=names.SPLITS)
    count: int = setting(12, least=1)
    measure_count: int | Literal["all"] = setting(100, least=0)
    seed: int = 0
    rules: list[str] = setting(list(names.RULES), choices=names.RULES, several=True)
    subsets: list[str] = setting([], several=True)
    split_at: int | None = None
    cut: str = setting("exact", choices=(*names.CUTS, "both"))
    target: str = setting("predicted", offers=names.TARGETS)
    measures: list[str] = setting([], choices=names.MEASURES, several=True)
    scale: str = setting("row", choices=names.SCALES)
    perturb: int = setting(0, least=0)
    toward: str = setting("both", choices=(*names.DIRECTIONS, "both"))
    perturb_lr: float = 0.1
    batch_size: int = setting(32, least=1)
    workers: int = setting(0, least=0)
    device: str = setting("auto", offers=names.DEVICES)
    out: str = "runs/explain"

    def __post_init__(self) -> None:
        demo = "'eigengrain demo' trains some models on drawn birds, such as runs/demo/mpncov"
        if not self.checkpoint:
            raise ArgumentError("checkpoint", "is missing", remedy=demo)
        if not Path(self.checkpoint).exists():
            raise FileError(self.checkpoint, f"there is no such folder; {demo}")
        check(self)
        if self.images and (self.data is not None or self.root is not None):
            raise ArgumentError("images", "cannot be combined with {data} and {root}")
        check_data_options(self.data, self.data_options)
        if self.images and self.target == "label":
            raise ArgumentError("target", "cannot be label: the classes of {images} are not known")
        if not self.rules:
            raise ArgumentError("rules", "must not be empty", remedy=f"choose from {', '.join(names.RULES)}")


def run(config: Explain) -> None:
    """Write panels, measures and a page about them."""
    missing = [name for name in ("captum", "matplotlib") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"maps and pictures need {' and '.join(missing)}: pip install 'eigengrain[explain]'")
    import torch

    from eigengrain.environment import describe
    from eigengrain.explain.report import Report
    from eigengrain.explain.survey import DEFAULT_MEASURES
    from eigengrain.files import writable
    from eigengrain.training.distributed import join
    from eigengrain.training.run_folder import open_run

    trained = open_run(config.checkpoint)
    writable(Path(config.out) / "gallery.html")
    dataset, problems = _open_images(config, trained)
    with warnings.catch_warnings(record=True) as caught, join(config.device) as process:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", message="Glyph")  # matplotlib, for a class name in a script that the font lacks
        report = Report(
            trained.model.to(process.device),
            dataset,
            Path(config.out),
            labelled=not config.images,
            seed=None if config.images else config.seed,
            measure_count=None if config.measure_count == "all" else config.measure_count,
            cuts=names.CUTS if config.cut == "both" else (config.cut,),
            measures=config.measures or DEFAULT_MEASURES,
            toward=names.DIRECTIONS if config.toward == "both" else (config.toward,),
            **{name: getattr(config, name) for name in SAME},
        )
        try:
            surveys = report.measure()
            if not process.is_main:
                return
            pictures = report.draw()
        except torch.OutOfMemoryError as error:
            raise ArgumentError("batch_size", "is too large for the memory", config.batch_size, "reduce it") from error
        environment, command = describe(process.device), command_line(config)
        files = report.write(surveys, pictures, command=command, environment=environment, checkpoint=config.checkpoint)
    pictures.sort(key=lambda picture: picture.kind == "film")  # animations last
    written = [*(picture.path for picture in pictures), *files]
    if surveys:
        _print_measures(surveys)
    output.say(*written)
    notes = [*problems, *dict.fromkeys(str(warning.message) for warning in caught), *_leftovers(Path(config.out), written)]
    for note in notes:
        output.note(f"note: {' '.join(note.split())}")
    measures = [row for each in surveys for row in each.table]
    output.result({"measures": measures, "files": written, "notes": notes}, files[-1:])


def _open_images(config: Explain, trained: "TrainedModel") -> "tuple[ImageSet, list[str]]":
    """The images as a data set, and a note for each image that cannot be read."""
    if not config.images:
        data = trained.dataset(config.split, name=config.data, root=config.root, options=config.data_options)
        return data, []
    from eigengrain.data.decode import decode

    paths, missing = find_images(config.images)
    problems, readable = [f"{each.path}: {each.problem}" for each in missing], list[str]()
    most = len(paths) if config.measure_count == "all" else max(config.count, config.measure_count)
    for path in paths:
        try:
            if len(readable) < most:
                decode(path)
                readable.append(path)
        except ValueError as error:
            problems.append(str(error))
    if not readable:
        raise ArgumentError("images", f"contains no image that can be read ({'; '.join(problems)})")
    return trained.images(readable), problems


def _print_measures(surveys: "Sequence[SurveyResult]") -> None:
    """Print the means of the main measures."""
    rows = [row for each in surveys for row in each.table]
    measures = [name for name in SHOWN if any(row.measure == name for row in rows)]
    measures = measures or list(dict.fromkeys(row.measure for row in rows))
    keys = 3 if len(surveys) > 1 else 2
    cells = {(row.rule, row.subset, row.cut, row.measure): row.mean for row in rows}
    lines = []
    for key in dict.fromkeys((row.rule, row.subset, row.cut) for row in rows):
        values = [cells.get((*key, name)) for name in measures]
        lines.append([*key[:keys], *("" if v is None else "–" if math.isnan(v) else f"{v:.3f}" for v in values)])
    headings = (*("rule", "subset", "cut")[:keys], *(name.replace("_", " ") for name in measures))
    title = f"means over {counted(surveys[0].samples, 'image')}"
    output.console().print(output.table(title, headings, lines, left=keys))


def _leftovers(folder: Path, written: Sequence[Path]) -> list[str]:
    """A note on files of an earlier call in the folder."""
    patterns = ("*.png", "*.gif", "measures*.csv")
    files = [path.name for pattern in patterns for path in sorted(folder.glob(pattern)) if path not in written]
    return [f"files of an earlier call, not on the page: {few(files, 3)}"] if files else []


def command_line(config: Explain) -> str:
    """The command for a config, without options that have their default.

    Example:
        >>> command_line(Explain(".", rules=["vanilla"], count=3, out="a b"))
        "eigengrain explain . --count 3 --rules vanilla --out 'a b'"
    """
    return shlex.join(["eigengrain", "explain", config.checkpoint, *as_words(config, skip=["checkpoint"])])
