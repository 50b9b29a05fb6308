"""Measures of saliency maps over a data set, with one pass of the backbone per batch, in one process or several."""

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from eigengrain.data.boxes import object_mask, part_mask
from eigengrain.data.image_set import ImageSet, stack
from eigengrain.data.sampler import BatchSampler
from eigengrain.data.workers import Workers
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain import measures as m
from eigengrain.explain.perturbation import rank_and_size
from eigengrain.explain.sanity import deletion_curve, insertion_curve
from eigengrain.files import writable, write_csv
from eigengrain.functional import EigenSubset
from eigengrain.functional.subsets import small_part
from eigengrain.heads import Head, SpectralHead
from eigengrain.models import CovarianceNet
from eigengrain.models.model import eval_mode
from eigengrain.names import MEASURES, TARGETS

#: measures of a map inside a region (a field of Batch): the object, or the parts that distinguish the classes
INSIDE = {
    f"{region}_{place}": (field, measure)
    for region, field in (("object", "objects"), ("parts", "parts"))
    for place, measure in (("energy", m.energy_inside), ("pointing", m.pointing_hit), ("over_area", m.share_over_area))
}
#: measures that compare a map with the map of all eigenvalues; mae has an option
COMPARISONS = {"corr": m.correlation, "norm_ratio": m.norm_ratio}
#: measures that need many passes of the model per map
CURVES = {"deletion": deletion_curve, "insertion": insertion_curve}
DEFAULT_MEASURES = tuple(name for name in MEASURES if name not in CURVES)


class Batch(NamedTuple):
    """Images with their annotations; the regions are boolean (B, H, W), or None if the data set has none."""

    images: Tensor  #: (B, 3, H, W)
    labels: Tensor  #: (B,)
    numbers: Sequence[int]  #: indices in the data set, so that no image is counted twice
    objects: Tensor | None = None
    parts: Tensor | None = None  #: the parts that distinguish the classes


@dataclass(frozen=True)
class Summary:
    """One measure over all images, for one rule, cut, subset and way to collapse the colours."""

    rule: str
    cut: str
    subset: str
    collapse: str
    measure: str
    mean: float  #: over the images for which the measure is defined; NaN if there are none
    standard_error: float  #: of the mean; NaN for fewer than two images
    n: int  #: images for which the measure is defined
    n_undefined: int


@dataclass(frozen=True)
class SurveyResult:
    """Result of :func:`survey`."""

    #: one row per image, rule, subset and collapse, ordered by image. A value is None if the measure does not apply (a map
    #: compared with itself, a data set without regions), and NaN or infinity if it is undefined
    rows: list[dict[str, Any]]
    table: list[Summary]  #: means over the images
    samples: int  #: number of images
    nonfinite: int  #: number of maps that contain NaN or infinity; their measures count as undefined

    def find(self, measure: str, rule: str, subset: str, collapse: str | None = None) -> Summary:
        """The row of the table for a measure; ``collapse`` can be omitted if there is only one."""
        rows = [row for row in self.table if (row.measure, row.rule, row.subset) == (measure, rule, subset)]
        rows = [row for row in rows if collapse in (None, row.collapse)]
        if len(rows) != 1:
            problem = f"must match one row of the table, not {len(rows)} (rule {rule!r}, subset {subset!r}, {collapse=})"
            raise ArgumentError("measure", problem, measure)
        return rows[0]

    def write_table(self, path: str | Path) -> None:
        """Write the table as CSV."""
        write_csv(writable(path), [asdict(row) for row in self.table])


def survey(
    model: CovarianceNet,
    batches: Iterable[Batch | tuple[Tensor, Tensor]],
    subsets: Sequence[str] = ("all", "top:206", "last:50"),
    rules: Sequence[str] = ("vanilla", "deconv"),
    *,
    cut: str = "exact",
    target: str | int = "label",
    measures: Sequence[str] = DEFAULT_MEASURES,
    collapse: str | Sequence[str] = "abs-max",
    normalise: str = "max",
    steps: int = 20,
    baseline: str | Tensor = "blur",
    csv: str | Path | None = None,
    attribute: Callable[..., Mapping[str, Any]] | None = None,
    each: Callable[[], object] = lambda: None,
) -> SurveyResult:
    """Measure the maps of eigenvalue subsets over a data set. Only numbers are kept, no maps.

    ====================== ======================================================================================
    ``corr``               correlation with the map of all eigenvalues (Eq. 8), in [−1, 1]
    ``mae``                mean absolute error to that map (Eq. 9)
    ``norm_ratio``         norm of the map divided by the norm of the map of all eigenvalues
    ``object_energy``      share of the absolute map on the object (its mask, or its box)
    ``object_pointing``    whether the largest absolute value is on the object
    ``object_over_area``   share of the absolute map on the object, divided by the object's share of the image
    ``parts_…``            the same three for the parts that distinguish the classes, if the data set has them
    ``gap``                relative gap of the eigenvalues at the cut; undefined if nothing is cut
    ``deletion``           area under the deletion curve; many passes of the model, so not measured by default
    ``insertion``          area under the insertion curve; likewise
    ====================== ======================================================================================

    Under ``torch.distributed`` each process passes its own share of the batches (see :func:`image_batches`), and all
    processes get the same result.

    Args:
        model: network; it is in eval mode during the call.
        batches: :class:`Batch` objects, or pairs (images, labels) in a single process.
        subsets: subsets of the eigenvalues; ``all`` is added if it is missing, because the others are compared with it.
        rules, cut: as for :func:`eigengrain.explain.attribute_rules`.
        target: explain the class of the ``label``, the ``predicted`` class, one class for all images (an integer), or the
            ``norm`` of the representation.
        measures: names from the table above.
        collapse: one or several ways of :func:`eigengrain.explain.measures.collapse`.
        normalise: normalisation for ``mae``.
        steps, baseline: settings of the curves, see :func:`eigengrain.explain.sanity.deletion_curve`.
        csv: file for the measures of every image; the first process writes it.
        attribute: function that computes the maps; by default :func:`eigengrain.explain.attribute_rules`.
        each: called after every batch.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3)
        >>> pairs = [(torch.randn(2, 3, 64, 64), torch.tensor([0, 3]))]
        >>> result = survey(model, pairs, subsets=["top:1"], rules=["vanilla"], measures=["corr", "mae"])
        >>> [(row.subset, row.measure, row.n + row.n_undefined) for row in result.table]
        [('top:1', 'corr', 2), ('top:1', 'mae', 2)]
    """
    collapses = [collapse] if isinstance(collapse, str) else list(dict.fromkeys(collapse))
    _check_names("measures", "measure", measures, MEASURES)
    _check_names("collapse", "way to collapse a map", collapses, m.COLLAPSES)
    _check_names("normalise", "normalisation of maps", [normalise], m.NORMALISATIONS)
    if isinstance(target, str):
        _check_names("target", "target", [target], TARGETS)
    for argument, values in (("subsets", subsets), ("rules", rules)):
        if isinstance(values, str) or not values:
            raise ArgumentError(argument, "must be a list with at least one name", values)
    if target == "norm" and set(measures) & CURVES.keys():
        raise ArgumentError("target", "must be a class for deletion and insertion", target, "use 'label' or 'predicted'")
    names = [str(EigenSubset.parse(subset)) for subset in subsets]
    names = list(dict.fromkeys(names if "all" in names else ["all", *names]))
    rules = list(dict.fromkeys(rules))
    path = None if csv is None else writable(csv)
    if attribute is None:
        from eigengrain.explain.saliency import attribute_rules

        attribute = attribute_rules
    rank, world_size = rank_and_size()
    device = next(model.parameters()).device
    rows: list[dict[str, Any]] = []
    nonfinite, seen = 0, 0
    with eval_mode(model):
        for item in batches:
            if not isinstance(item, Batch) and world_size > 1:
                problem = "must contain the indices of the images if several processes share them"
                raise ArgumentError("batches", problem, remedy="use image_batches(dataset), or Batch with its numbers")
            batch = item if isinstance(item, Batch) else Batch(*item, range(seen, seen + len(item[0])))
            seen += len(batch.numbers)
            batch = batch._replace(images=batch.images.to(device), labels=batch.labels.to(device))
            explained = batch.labels if target == "label" else None if target == "predicted" else target
            results = attribute(model, batch.images, names, rules, target=explained, cut=cut)
            for rule, how, name in product(rules, collapses, names):
                about = {"rule": rule, "cut": cut, "subset": name, "collapse": how}
                rows += _measure(model, batch, results[rule], about, measures, normalise, steps=steps, baseline=baseline)
            every_map = [results[rule].maps[name] for rule, name in product(rules, names)]
            nonfinite += sum(int((~maps.isfinite()).flatten(1).any(1).sum()) for maps in every_map)
            each()
    shares: list[Any] = [(rows, nonfinite)]
    if world_size > 1:
        shares = [None] * world_size
        dist.all_gather_object(shares, (rows, nonfinite))
    # the sort is stable: the rows of an image keep their order
    rows = sorted((row for part, _ in shares for row in part), key=lambda row: row["number"])
    nonfinite = sum(count for _, count in shares)
    if not rows:
        raise ArgumentError("batches", "contain no images")
    images, expected = Counter(row["number"] for row in rows), len(rules) * len(names) * len(collapses)
    for number, count in images.items():
        if count != expected:
            problem = f"contain image {number} {count // expected} times"
            raise ArgumentError("batches", problem, remedy="use image_batches(dataset), which gives each process its share")
    if nonfinite:
        warnings.warn(f"{nonfinite} maps contain NaN or infinity: their measures count as undefined", stacklevel=2)
    if path is not None and rank == 0:
        write_csv(path, rows)
    return SurveyResult(rows, summarise(rows), len(images), nonfinite)


def split_point(channels: int, split_at: int | None = None) -> int:
    """Number of eigenvalues that count as large: ``split_at``, or by default the paper's share, 206 of 256.

    Example:
        >>> split_point(256), split_point(64), split_point(2)
        (206, 52, 1)
    """
    if split_at is None:
        return max(1, channels - small_part(channels))
    if not 1 <= split_at < channels:
        problem = f"must be from 1 to {channels - 1}, because there are {channels} eigenvalues"
        raise ArgumentError("split_at", problem, split_at)
    return split_at


def choose_subsets(head: Head, subsets: Sequence[str] = (), split_at: int | None = None) -> list[str]:
    """Subsets to explain: the given ones, or all eigenvalues, the head's own subset, the largest and the smallest.

    Example:
        >>> from eigengrain.heads import create_head
        >>> choose_subsets(create_head("mpncov", 256))
        ['all', 'top:206', 'last:50']
    """
    large = split_point(head.channels, split_at)
    spectral = head if isinstance(head, SpectralHead) else None
    own = spectral.own_subset if spectral is not None else None
    default = ["all", own or "all", f"top:{large}", f"last:{head.channels - large}"]
    chosen = [EigenSubset.parse(text) for text in subsets or default]
    selected = next((subset for subset in chosen if not subset.covers(head.channels)), None)
    if selected is not None and (spectral is None or not spectral.selectable):
        problem = f"cannot contain '{selected}': {type(head).__name__} has no eigenvalues to choose from"
        remedy = "use a model with the head mpncov or mpncov+seb, or only 'all' for the plain gradient"
        raise ArgumentError("subsets", problem, remedy=remedy)
    return list(dict.fromkeys(map(str, chosen)))


def read_target(target: str | int, num_classes: int, classes: Sequence[str] = ()) -> str | int:
    """``predicted``, ``label`` or ``norm`` as it is; a class, by name or number, as its number. Names come first.

    Example:
        >>> read_target("wren", 2, ["lark", "wren"]), read_target("0", 2, ["lark", "wren"]), read_target("norm", 2)
        (1, 0, 'norm')
    """
    if target in TARGETS:
        return target
    if target in classes:
        return list(classes).index(str(target))
    if isinstance(target, str) and not target.isdecimal():
        raise UnknownName("target", target, [*TARGETS, *classes])
    if not 0 <= int(target) < num_classes:
        raise ArgumentError("target", f"must be below the number of classes, {num_classes}", target)
    return int(target)


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """Means over images of the rows of one or several surveys. Undefined values are counted and excluded from the mean.

    Example:
        >>> about = {"rule": "vanilla", "cut": "exact", "subset": "last:50", "collapse": "abs-max"}
        >>> [row] = summarise([about | {"corr": r} for r in (0.2, 0.4, math.nan)])
        >>> row.measure, round(row.mean, 3), round(row.standard_error, 3), row.n, row.n_undefined
        ('corr', 0.3, 0.1, 2, 1)
    """
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["rule"], row["cut"], row["subset"], row["collapse"]), []).append(row)
    table = []
    for (rule, cut, subset, collapse), measure in product(groups, MEASURES):
        group = groups[rule, cut, subset, collapse]
        values = [float(row[measure]) for row in group if row.get(measure) is not None]
        defined = [value for value in values if math.isfinite(value)]
        n = len(defined)
        mean = statistics.fmean(defined) if n else math.nan
        error = statistics.stdev(defined) / math.sqrt(n) if n > 1 else math.nan
        if values:
            table.append(Summary(rule, cut, subset, collapse, measure, mean, error, n, len(values) - n))
    return table


def image_batches(
    dataset: ImageSet,
    batch_size: int = 32,
    *,
    regions: bool = True,
    workers: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
) -> Workers:
    """Iterate over a data set in :class:`Batch` objects, with the regions of the object and its parts.

    Args:
        dataset: data set with an evaluation transform, ``build_transform(..., train=False)``.
        batch_size: images per batch, over all processes.
        regions: add masks and boxes; False allows any function as a transform.
        workers: number of processes that read images.
        rank, world_size: this process, and the number of processes; from ``torch.distributed`` by default, else 0 and 1.

    Example:
        >>> from eigengrain.data import Transforms, build_transform
        >>> from eigengrain.data.plumage import open_plumage
        >>> transform = build_transform(Transforms("none"), False, (0.5,) * 3, (0.5,) * 3)
        >>> birds = open_plumage("test", classes=2, per_class=3, size=32, cache=False, transform=transform)
        >>> [(list(batch.numbers), tuple(batch.parts.shape)) for batch in image_batches(birds, 4)]
        [([0, 1, 2, 3], (4, 32, 32)), ([4, 5], (2, 32, 32))]
        >>> [list(batch.numbers) for batch in image_batches(birds, 4, rank=1, world_size=2)]
        [[2, 3], [5]]
    """
    if dataset.transform is None:
        raise ArgumentError("dataset", "must have a transform", dataset.name, "set it to build_transform(..., train=False)")
    if (rank is None) != (world_size is None):
        raise ArgumentError("rank", f"must be given together with {{world_size}}, which is {world_size}", rank)
    if rank is None or world_size is None:
        rank, world_size = rank_and_size()
    order = BatchSampler(len(dataset), batch_size, train=False, rank=rank, world_size=world_size)
    # its own generator, so that starting workers does not change the caller's random numbers
    generator = torch.Generator().manual_seed(0)
    return Workers(_Samples(dataset, regions), _collate, workers=workers, batch_sampler=order, generator=generator)


class _Samples(Dataset[tuple[Any, ...]]):
    """Samples (image, label, number, object, parts); each image is opened once."""

    def __init__(self, dataset: ImageSet, regions: bool):
        self.dataset, self.regions = dataset, regions

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        dataset = self.dataset
        image = dataset.image(number)
        transform: Any = dataset.transform
        whole = object_mask(dataset, number, image.size) if self.regions else None
        parts = part_mask(dataset, number) if self.regions else None
        return transform(image), dataset.labels[number], number, whole, parts


def _collate(samples: Sequence[tuple[Any, ...]]) -> Batch:
    images, labels = stack([(image, label) for image, label, *_ in samples])
    _, _, numbers, objects, parts = zip(*samples, strict=True)
    masks = [None if each[0] is None else torch.stack(each) for each in (objects, parts)]
    return Batch(images, labels, numbers, *masks)


def _measure(
    model: CovarianceNet,
    batch: Batch,
    result: Any,
    about: Mapping[str, str],
    measures: Sequence[str],
    normalise: str,
    **curve: Any,
) -> list[dict[str, Any]]:
    """The rows of one batch, rule, subset and collapse."""
    subset = about["subset"]
    maps, whole = (m.collapse(result.maps[name], about["collapse"]) for name in (subset, "all"))
    columns: dict[str, list[Any]] = {"number": list(map(int, batch.numbers)), "label": batch.labels.tolist()}
    columns["target"] = result.targets.tolist()
    columns |= {key: [text] * len(maps) for key, text in about.items()}
    for name in measures:
        values: Tensor | None = None
        if name in CURVES:
            # signed maps rank pixels by their absolute value, however the colours are combined
            order = maps.abs() if maps.ndim == 3 else maps
            values = CURVES[name](model, batch.images, order, result.targets, batch_size=len(maps), **curve).area
        elif name in INSIDE:
            field, measure = INSIDE[name]
            mask = getattr(batch, field)
            values = None if mask is None else measure(maps, mask)
        elif subset != "all" and name == "mae":
            values = m.mae(maps, whole, normalise)
        elif subset != "all":
            values = result.gaps[subset] if name == "gap" else COMPARISONS[name](maps, whole)
        columns[name] = [None] * len(maps) if values is None else values.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _check_names(argument: str, kind: str, names: Sequence[str], choices: Sequence[str]) -> None:
    if not names:
        raise ArgumentError(argument, "must not be empty")
    for name in names:
        if name not in choices:
            raise UnknownName(kind, name, choices)
