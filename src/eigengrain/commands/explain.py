"""``eigengrain explain``: what large and small eigenvalues see in images. Nothing heavy is imported before it runs."""

import json
import math
import os
import random
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eigengrain.commands.checkpoint import plain_transform, preparation
from eigengrain.errors import unknown_name
from eigengrain.runtime import output

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, device

    from eigengrain.data import ImageSet
    from eigengrain.explain.gallery import Picture
    from eigengrain.explain.pictures import Explained
    from eigengrain.explain.survey import SurveyResult
    from eigengrain.models import CovarianceNet

SPLITS = ("train", "val", "test")
RULES = ("vanilla", "deconv", "guided")
CUTS = ("exact", "projector")
SCALES = ("row", "each")
DIRECTIONS = ("large", "small")
#: targets that are no classes
TARGETS = ("predicted", "label", "norm")

#: options that take several words
_LISTS = ("images", "rules", "subsets", "measures")

#: images of one panel
ROWS = 6

#: frames of an animation, and bytes of one that the page still carries
FRAMES, LIGHT = 21, 4_000_000

#: measures that the terminal has room for
SHOWN = ("corr", "mae", "norm_ratio", "object_over_area", "parts_over_area", "gap")

HOW_TO_GET_ONE = "'make demo' or 'eigengrain demo' trains some on drawn birds and leaves one in runs/demo/mpncov/model"


@dataclass(frozen=True)
class Explain:
    """Which model, which images, and what is made of them.

    Args:
        checkpoint: a folder of 'eigengrain train' or of save_pretrained; 'eigengrain demo' leaves runs/demo/mpncov/model.
        images: files, folders and quoted patterns of images to explain, in place of a data set.
        data: name of a data set; a training folder says it by itself.
        root: folder of the data set; a training folder says it by itself.
        data_options: more keyword arguments of the data set, for --data.
        split: train, val (of a training folder with validation images) or test.
        count: images in the panels.
        measure_count: images that are measured, or all; 0 for none.
        seed: of the choice of images from a data set.
        rules: at the rectifiers, of vanilla, deconv and guided.
        subsets: of the eigenvalues; by default all, top:k and last:d-k, with k of --split_at.
        split_at: eigenvalues that count as large; 206 of 256 by default, and the same share of any other number.
        cut: how a cut spectrum is differentiated, exact or projector, or both.
        target: what is explained, the predicted class, the label, a class (its name or number), or the norm of the vector.
        measures: names of measures; by default all but the costly deletion and insertion.
        scale: colours, row for one scale for the maps of a rule in a row, each for one a map.
        perturb: steps by which the images of the panels are changed toward large and small eigenvalues; 0 for none.
        toward: large, small, or both.
        perturb_lr: rate of these steps, in normalised pixels.
        batch_size: images that go through the model together, over all processes.
        workers: processes that read images, at most one for each core.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        out: folder for panels (PNG), measures (CSV) and the page (HTML).
    """

    checkpoint: str = ""
    images: list[str] = field(default_factory=list)
    data: str | None = None
    root: str | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    count: int = 12
    measure_count: int | Literal["all"] = 100
    seed: int = 0
    rules: list[str] = field(default_factory=lambda: list(RULES))
    subsets: list[str] = field(default_factory=list)
    split_at: int | None = None
    cut: str = "exact"
    target: str = "predicted"
    measures: list[str] = field(default_factory=list)
    scale: str = "row"
    perturb: int = 0
    toward: str = "both"
    perturb_lr: float = 0.1
    batch_size: int = 32
    workers: int = 0
    device: str = "auto"
    out: str = "runs/explain"

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError(f"name a trained model: eigengrain explain CHECKPOINT; {HOW_TO_GET_ONE}")
        if not Path(self.checkpoint).exists():
            raise ValueError(f"there is no checkpoint {self.checkpoint!r}: {HOW_TO_GET_ONE}")
        for option, choices in (
            ("split", SPLITS),
            ("cut", (*CUTS, "both")),
            ("scale", SCALES),
            ("toward", (*DIRECTIONS, "both")),
        ):
            if getattr(self, option) not in choices:
                raise unknown_name(f"--{option}", getattr(self, option), choices)
        for option, least in (("count", 1), ("measure_count", 0), ("perturb", 0), ("batch_size", 1), ("workers", 0)):
            value = getattr(self, option)
            if value != "all" and value < least:
                raise ValueError(f"--{option} must be at least {least}, got {value}")
        if self.images and (self.data is not None or self.root is not None):
            raise ValueError("--images and --data are two sources of images: give one of them")
        if self.images and self.target == "label":
            raise ValueError("the classes of --images are not known: use --target predicted, a class, or norm")
        if not self.rules:
            raise ValueError("--rules is empty: name some of vanilla, deconv, guided")
        for rule in self.rules:
            if rule not in RULES:
                raise unknown_name("rule", rule, RULES)

    @property
    def cuts(self) -> tuple[str, ...]:
        return CUTS if self.cut == "both" else (self.cut,)

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.toward == "both" else (self.toward,)


def expand(words: Sequence[str]) -> list[str]:
    """Words of a command line with the values of an option that takes several made into one list.

    Example:
        >>> expand(["runs/demo/mpncov", "--images", "a.jpg", "b c.jpg", "--rules", "[vanilla]", "--count", "3"])
        ['runs/demo/mpncov', '--images=["a.jpg", "b c.jpg"]', '--rules', '[vanilla]', '--count', '3']
    """
    rest = list(words)
    found: list[str] = []
    while rest:
        word = rest.pop(0)
        name, given, value = word.partition("=")
        if name not in {f"--{option}" for option in _LISTS}:
            found.append(word)
            continue
        values = [value] if given else []
        while not given and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        # a list in brackets is read as it is, unless it is the name of a file
        listed = len(values) == 1 and values[0].startswith("[") and not os.path.exists(values[0])
        if listed or not values:
            found += [word, *([] if given else values)]
        else:
            found.append(f"{name}={json.dumps(values, ensure_ascii=False)}")
    return found


def split_point(channels: int, asked: int | None) -> int:
    """How many of the eigenvalues count as large: what was asked for, or the paper's share.

    Raises:
        ValueError: if nothing would be left on one side.

    Example:
        >>> split_point(256, None), split_point(64, None), split_point(2, None)
        (206, 52, 1)
    """
    if asked is None:
        from eigengrain.functional.subset import small_part

        return max(1, channels - small_part(channels))
    if not 1 <= asked < channels:
        raise ValueError(f"--split_at must be from 1 to {channels - 1}, as there are {channels} eigenvalues; got {asked}")
    return asked


@dataclass(frozen=True)
class Source:
    """A model and the images that it is asked about.

    Args:
        model: in evaluation mode.
        dataset: the images, with the transform of the model.
        numbers: of those that are measured, the first of them drawn; the choice and its order are those of the seed.
        labelled: whether their classes are known.
        located: whether it is known where the object is.
        problems: images that cannot be read, each with its reason.
    """

    model: "CovarianceNet"
    dataset: "ImageSet"
    numbers: list[int]
    labelled: bool
    located: bool
    problems: tuple[str, ...] = ()

    def place(self, number: int) -> str:
        """The path of an image, or its number in a data set without files; in letters that every file can hold."""
        path = self.dataset.path(number)
        text = f"{self.dataset.split} {number}" if path is None else str(path)
        return "".join(letter if letter.isprintable() else "?" for letter in text)

    def name(self, number: int) -> str:
        return os.path.basename(self.place(number))


def open_source(config: Explain) -> Source:
    """The model and the images of a config.

    Raises:
        ValueError: if one of them is not there, or they do not fit.
    """
    from eigengrain.commands.evaluate import Evaluate, find_run, open_for_evaluation
    from eigengrain.data.transforms import Pipeline
    from eigengrain.models import from_pretrained

    folder, training = find_run(config.checkpoint)  # a training says which images, and how they were prepared
    if config.images:
        model = from_pretrained(folder)
        dataset, problems = _given_images(config, model)
        return Source(model, dataset, list(range(len(dataset))), labelled=False, located=False, problems=problems)
    if config.data is None and training is None:
        raise ValueError(f"{config.checkpoint!r} does not say its images: give --images, or --data and --root")
    asked = Evaluate(config.checkpoint, config.data, config.root, config.data_options, config.split)
    model, dataset = open_for_evaluation(asked, folder, training)
    if not isinstance(dataset.transform, Pipeline):
        dataset.transform = _transform(model)
    if model.class_names is None:
        model.class_names = list(dataset.classes)
    numbers = list(range(len(dataset)))
    random.Random(config.seed).shuffle(numbers)
    most = len(numbers) if config.measure_count == "all" else max(config.count, config.measure_count)
    return Source(model, dataset, numbers[:most], labelled=True, located=isinstance(dataset.transform, Pipeline))


def _given_images(config: Explain, model: "CovarianceNet") -> tuple["ImageSet", tuple[str, ...]]:
    """The images at the places that were named, as a data set, and why others are not in it."""
    from eigengrain.commands.predict import find_images
    from eigengrain.data import ImageSet
    from eigengrain.data.decode import decode

    paths, missing = find_images(config.images)
    problems = [f"{each.path}: {each.problem}" for each in missing]
    most = len(paths) if config.measure_count == "all" else max(config.count, config.measure_count)
    readable: list[str] = []
    for path in paths:
        if len(readable) == most:
            break
        try:
            decode(path)
        except ValueError as error:
            problems.append(str(error))
        else:
            readable.append(path)
    if not readable:
        raise ValueError("no image can be read: " + "; ".join(problems))
    classes = model.class_names or [str(number) for number in range(max(model.num_classes, 1))]
    dataset = ImageSet("images", "given", classes, [0] * len(readable), readable, _transform(model))
    return dataset, tuple(problems)


def _transform(model: "CovarianceNet") -> Any:
    """What the checkpoint says is done to images: through which regions can be carried, where that can be said."""
    from eigengrain.data import Transforms, build_transform

    how = preparation(model)
    _, height, width = how["input_size"]
    if height != width or how["crop_mode"] not in ("center", "squash"):
        return plain_transform(model)
    common: dict[str, Any] = {"img_size": width, "interpolation": how["interpolation"]}
    if how["crop_mode"] == "squash":
        transforms = Transforms("paper", resize=math.floor(width / how["crop_pct"]), **common)
    else:
        transforms = Transforms("timm", crop_pct=how["crop_pct"], **common)
    return build_transform(transforms, False, how["mean"], how["std"])


def chosen_subsets(config: Explain, model: "CovarianceNet") -> list[str]:
    """The subsets to explain, as they are written.

    Raises:
        ValueError: if the head has no eigenvalues to choose from, or not as many.
    """
    from eigengrain.functional import EigenSubset

    d = model.head.channels
    split = split_point(d, config.split_at)
    texts = config.subsets or ["all", f"top:{split}", f"last:{d - split}"]
    subsets = [EigenSubset.parse(text) for text in texts]
    partial = next((subset for subset in subsets if not subset.covers(d)), None)
    normalise = getattr(model.head, "normalise", None)
    if partial is not None and normalise not in ("sqrt", "log", "power"):
        raise ValueError(
            f"the head {model.config['head']!r} has no eigenvalues to choose '{partial}' from: use a model with the head "
            "mpncov or mpncov+seb, or --subsets [all] for the plain gradient"
        )
    return list(dict.fromkeys(map(str, subsets)))


def chosen_class(config: Explain, model: "CovarianceNet") -> int | None:
    """The class that ``--target`` names, None where it names none.

    Raises:
        ValueError: for a class that there is not.
    """
    if config.target in TARGETS:
        return None
    names = model.class_names or []
    if config.target in names:
        return names.index(config.target)
    if config.target.isdecimal():
        if int(config.target) >= model.num_classes:
            raise ValueError(f"the model has {model.num_classes} classes, counted from 0; --target says {config.target}")
        return int(config.target)
    raise unknown_name("--target", config.target, [*TARGETS, *names])


def run(config: Explain) -> None:
    """``eigengrain explain``: panels, measures and a page about them."""
    _check_installed()
    import torch

    from eigengrain.runtime.display import progress_bar
    from eigengrain.runtime.environment import describe
    from eigengrain.runtime.records import writable
    from eigengrain.training.distributed import join

    page = writable(Path(config.out) / "gallery.html")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks
        bar = progress_bar()
        try:
            with join(config.device) as process:
                source = open_source(config)
                model = source.model.to(process.device).eval()
                work = _Work(config, source, chosen_subsets(config, model), chosen_class(config, model), process.device)
                bar.disable = bar.disable or not process.is_main
                with bar:
                    surveys = work.measure(bar)
                if not process.is_main:
                    return
                environment = describe(process.device)
            with bar:
                pictures = work.draw(bar)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"out of memory with --batch_size {config.batch_size}: try a smaller one") from error
    files = work.write_measures(surveys, environment)
    work.write_page(page, pictures, surveys, environment)
    console = output.reading()
    if surveys:
        console.print(terminal_table(surveys))
    kept = [picture.path for picture in pictures if picture.path.suffix == ".png"]
    written = [*kept, *work.films, *files, page]
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False, markup=False)
    notes = [*source.problems, *dict.fromkeys(str(warning.message) for warning in told)]
    for note in notes:
        said = f"note: {' '.join(note.split())}"
        output.progress().print(said, soft_wrap=True, highlight=False, markup=False)
    measures = [row for each in surveys for row in each.table]
    output.result({"measures": measures, "files": written, "notes": notes}, [page])


def _check_installed() -> None:
    missing = [name for name in ("captum", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ValueError(f"maps and pictures need {' and '.join(missing)}: pip install 'eigengrain[explain]'")


class _Work:
    """What is done for one command, after everything that can be wrong with its options was looked at."""

    def __init__(self, config: Explain, source: Source, subsets: list[str], fixed: int | None, device: "device"):
        self.config, self.source, self.subsets, self.fixed, self.device = config, source, subsets, fixed, device
        self.out = Path(config.out)
        self.shown = source.numbers[: config.count]
        #: animations
        self.films: list[Path] = []

    def measure(self, bar: Any) -> "list[SurveyResult]":
        """One survey for each cut, shared among the processes."""
        from eigengrain.explain.survey import DEFAULT_MEASURES, image_batches, survey

        config, source = self.config, self.source
        numbers = source.numbers if config.measure_count == "all" else source.numbers[: config.measure_count]
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
                self.subsets,
                config.rules,
                cut=cut,
                target="predicted" if self.fixed is not None else config.target,
                measures=config.measures or DEFAULT_MEASURES,
                attribute=self._attribute_fixed if self.fixed is not None else None,
                each=lambda task=task: bar.advance(task),  # type: ignore[misc]
            )
            for row in result.rows:
                row["number"] = numbers[row["number"]]
                row["label"] = row["label"] if source.labelled else None
            results.append(result)
        return results

    def _attribute_fixed(self, model: Any, images: Any, subsets: Any, rules: Any, target: None, cut: str) -> Any:
        from eigengrain.explain.saliency import attribute_rules

        return attribute_rules(model, images, subsets, rules, self.fixed, cut)

    def draw(self, bar: Any) -> "list[Picture]":
        """Panels of maps, and of perturbed images where they are wanted."""
        from eigengrain.explain.gallery import Picture
        from eigengrain.explain.pictures import draw_panel

        config = self.config
        pages = [self.shown[start : start + ROWS] for start in range(0, len(self.shown), ROWS)]
        task = bar.add_task("drawing", total=len(pages) * len(config.cuts))
        pictures = []
        for cut in config.cuts:
            for place, numbers in enumerate(pages, start=1):
                path = draw_panel(self._explained(numbers, cut), self.out / f"panel-{cut}-{place}.png", config.scale)
                pictures.append(Picture(path, f"Maps, cut {cut}, {place} of {len(pages)}"))
                bar.advance(task)
        for place, numbers in enumerate(pages if config.perturb else [], start=1):
            pictures += self._perturbed(numbers, place, len(pages))
        return pictures

    def _explained(self, numbers: Sequence[int], cut: str) -> "list[Explained]":
        from eigengrain.explain.pictures import explain_images

        source, config = self.source, self.config
        found: list[Explained] = []
        for start in range(0, len(numbers), config.batch_size):
            some = numbers[start : start + config.batch_size]
            labels = [source.dataset.labels[number] for number in some]
            target: Any = {"predicted": None, "label": labels, "norm": "norm"}.get(config.target, self.fixed)
            found += explain_images(
                source.model,
                self._batch(some),
                self.subsets,
                config.rules,
                target=target,
                cut=cut,
                names=[source.name(number) for number in some],
                labels=labels if source.labelled else None,
            )
        return found

    def _batch(self, numbers: Sequence[int]) -> "Tensor":
        from eigengrain.data.imageset import stack

        return stack([self.source.dataset[number] for number in numbers])[0].to(self.device)

    def _perturbed(self, numbers: Sequence[int], place: int, pages: int) -> "list[Picture]":
        """The images of one panel, changed: a panel, and an animation for each direction."""
        from eigengrain.explain.animation import rgb_pixels, write_gif
        from eigengrain.explain.gallery import Picture
        from eigengrain.explain.perturbation import EigenPerturbation
        from eigengrain.explain.pictures import draw_perturbed

        config, model, images = self.config, self.source.model, self._batch(numbers)
        method = EigenPerturbation(model, lr=config.perturb_lr)
        split, frames = split_point(model.head.channels, config.split_at), min(FRAMES, config.perturb + 1)
        results = [
            method.perturb(images, direction, split, config.perturb, snapshots=frames) for direction in config.directions
        ]
        pixels = rgb_pixels(images, method.mean, method.std)
        names = [self.source.name(number) for number in numbers]
        panel = draw_perturbed(pixels, results, self.out / f"perturbed-{place}.png", names)
        pictures = [Picture(panel, f"Perturbed images, {place} of {pages}", perturbed=True)]
        for result in results:
            film = write_gif(result, self.out / f"perturbed-{place}-{result.toward}.gif", columns=min(len(numbers), 3))
            self.films.append(film)
            if film.stat().st_size <= LIGHT:
                said = f"Toward {result.toward} eigenvalues, {result.steps_taken} steps, {place} of {pages}"
                pictures.append(Picture(film, said, perturbed=True))
        return pictures

    def write_measures(self, surveys: "list[SurveyResult]", environment: dict[str, Any]) -> list[Path]:
        """Means and, in another file, every image's measures."""
        from eigengrain.runtime.records import write_csv

        if not surveys:
            return []
        means, images = self.out / "measures.csv", self.out / "measures-images.csv"
        about = {"checkpoint": self.config.checkpoint, "data": self.source.dataset.name, "split": self.source.dataset.split}
        about["target"] = self.config.target
        write_csv(means, [{**about, **asdict(row), **environment} for each in surveys for row in each.table])
        rows = [row for each in surveys for row in each.rows]
        write_csv(images, [{"image": self.source.place(row["number"]), **row} for row in rows])
        return [means, images]

    def write_page(
        self, path: Path, pictures: "list[Picture]", surveys: "list[SurveyResult]", environment: dict[str, Any]
    ) -> None:
        from eigengrain.explain.gallery import write_gallery

        config, source = self.config, self.source
        model, dataset, d = source.model, source.dataset, source.model.head.channels
        split = split_point(d, config.split_at)
        measured = f", {surveys[0].samples} measured" if surveys else ""
        chosen = f"{len(self.shown)} shown{measured}, "
        chosen += f"drawn by seed {config.seed} from {len(dataset)}" if source.labelled else "in the order they were given"
        explained = {"predicted": "of the predicted class", "label": "of the true class"}.get(config.target)
        if self.fixed is not None:
            explained = f"of the class {model.class_names[self.fixed] if model.class_names else self.fixed}"
        facts = {
            "Model": f"{model.config['backbone']} with the head {model.config['head']}",
            "Checkpoint": config.checkpoint,
            "Images": f"{dataset.name}, {dataset.split}: {chosen}" if source.labelled else chosen,
            "Eigenvalues": f"{d}; subsets {', '.join(self.subsets)}",
            "Explained": "the norm of the vector before the classifier" if explained is None else f"the score {explained}",
        }
        if config.perturb:
            facts["Perturbed"] = f"{config.perturb} steps of Adam at a rate of {config.perturb_lr:g}, split after {split}"
        write_gallery(
            path,
            "What large and small eigenvalues see",
            pictures,
            [row for each in surveys for row in each.table],
            facts=facts,
            command=command_line(config),
            environment=environment,
        )


def command_line(config: Explain) -> str:
    """The command that a config came from, without what is the default anyway.

    Example:
        >>> command_line(Explain(".", rules=["vanilla"], count=3, out="a b"))
        "eigengrain explain . --count 3 --rules vanilla --out 'a b'"
    """
    words = ["eigengrain", "explain", config.checkpoint]
    default = Explain(config.checkpoint)
    for option in fields(config)[1:]:
        value = getattr(config, option.name)
        if value != getattr(default, option.name):
            many = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
            words += [f"--{option.name}", *map(str, many)]
    return shlex.join(words)


def terminal_table(surveys: "list[SurveyResult]") -> "Table":
    """The measures that there is room for."""
    from rich import box
    from rich.table import Table

    rows = [row for each in surveys for row in each.table]
    measures = [name for name in SHOWN if any(row.measure == name for row in rows)]
    measures += [name for name in dict.fromkeys(row.measure for row in rows) if not measures]
    table = Table(
        title=f"means over {surveys[0].samples} images", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
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
