"""All measures of saliency maps over a whole data set, in one pass of the backbone, alone or shared among processes."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from eigengrain.data.boxes import object_mask, part_mask
from eigengrain.data.image_set import ImageSet, stack
from eigengrain.data.loader import Order
from eigengrain.data.workers import Workers
from eigengrain.errors import UnknownName
from eigengrain.explain import measures as m
from eigengrain.explain.deletion import deletion_curve, insertion_curve
from eigengrain.files import writable, write_csv
from eigengrain.functional import EigenSubset
from eigengrain.models import CovarianceNet
from eigengrain.models.eval_mode import evaluating

#: of a subset's map beside that of all eigenvalues
COMPARISONS = ("corr", "mae", "norm_ratio")
#: of a map and a region, each for the object and for the parts that tell the class
PLACES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "energy": m.energy_inside,
    "pointing": m.pointing_hit,
    "over_area": m.share_over_area,
}
REGIONS = ("object", "parts")
#: many passes of the model for each map
CURVES = {"deletion": deletion_curve, "insertion": insertion_curve}
DEFAULT_MEASURES = (*COMPARISONS, *(f"{region}_{place}" for region in REGIONS for place in PLACES), "gap")
MEASURES = (*DEFAULT_MEASURES, *CURVES)
TARGETS = ("label", "predicted", "norm")

#: what tells one row of the table from another, beside the measure
_KEYS = ("rule", "cut", "subset", "collapse")


class Batch(NamedTuple):
    """Images with what is known about them.

    Args:
        images: (B, 3, H, W).
        labels: (B,).
        numbers: of the images in the whole data set, so that none is counted twice.
        objects: boolean (B, H, W), or None where the data set does not say where the object is.
        parts: the same for the parts that tell the class.
    """

    images: Tensor
    labels: Tensor
    numbers: Sequence[int]
    objects: Tensor | None = None
    parts: Tensor | None = None


@dataclass(frozen=True)
class Summary:
    """One measure over all images.

    Args:
        rule: at the rectifiers.
        cut: how a cut spectrum was differentiated.
        subset: of the eigenvalues.
        collapse: how colours were put together.
        measure: its name.
        mean: over the images for which it is defined; NaN if there is none.
        standard_error: of the mean; NaN for fewer than two images.
        n: images for which it is defined.
        n_undefined: images for which it is not.
    """

    rule: str
    cut: str
    subset: str
    collapse: str
    measure: str
    mean: float
    standard_error: float
    n: int
    n_undefined: int


@dataclass(frozen=True)
class SurveyResult:
    """What a survey found.

    Args:
        rows: one for each image, rule, subset and collapse, in the order of the images' numbers; None where a measure does
            not apply (a map beside itself, a data set without regions), NaN or infinity where it is undefined.
        table: means over the images.
        samples: number of images.
        nonfinite: maps with a NaN or an infinity in them; their measures count as undefined.
    """

    rows: list[dict[str, Any]]
    table: list[Summary]
    samples: int
    nonfinite: int

    def find(self, measure: str, rule: str, subset: str, collapse: str | None = None) -> Summary:
        """The row of the table for a measure; ``collapse`` may be left out where there is one only.

        Raises:
            ValueError: if it was not measured, or several rows fit.
        """
        fits = [
            row
            for row in self.table
            if (row.measure, row.rule, row.subset) == (measure, rule, subset) and collapse in (None, row.collapse)
        ]
        if len(fits) != 1:
            there = sorted({row.measure for row in self.table})
            raise ValueError(
                f"{len(fits)} rows fit measure {measure!r}, rule {rule!r}, subset {subset!r}, collapse {collapse!r}: "
                f"one is expected; measured were {', '.join(there)}"
            )
        return fits[0]

    def write_table(self, path: str | Path) -> None:
        """The table as CSV."""
        write_csv(writable(path), [asdict(row) for row in self.table])


def survey(
    model: CovarianceNet,
    batches: Iterable[Batch | tuple[Tensor, Tensor]],
    subsets: Sequence[str] = ("all", "top:206", "last:50"),
    rules: Sequence[str] = ("vanilla", "deconv"),
    *,
    cut: str = "exact",
    target: str = "label",
    measures: Sequence[str] = DEFAULT_MEASURES,
    collapse: str | Sequence[str] = "abs-max",
    normalise: str = "max",
    steps: int = 20,
    baseline: str | Tensor = "blur",
    csv: str | Path | None = None,
    attribute: Callable[..., Mapping[str, Any]] | None = None,
    each: Callable[[], object] = lambda: None,
) -> SurveyResult:
    """Measure the maps of eigenvalue subsets over a data set; nothing but numbers is kept of an image.

    ====================== ======================================================================================
    ``corr``               correlation with the map of all eigenvalues (Eq. 8), in [−1, 1]
    ``mae``                mean absolute error to it (Eq. 9)
    ``norm_ratio``         norm of the map over that of the map of all eigenvalues
    ``object_energy``      share of the absolute map on the object (its mask, or its box)
    ``object_pointing``    whether the largest absolute value is on the object
    ``object_over_area``   share of the absolute map on the object over the object's share of the image
    ``parts_…``            the same three for the parts that tell the class, where the data set knows them
    ``gap``                relative gap of the eigenvalues at the cut; undefined where nothing is cut
    ``deletion``           area under the deletion curve; costs many passes of the model, so it must be asked for
    ``insertion``          area under the insertion curve; likewise
    ====================== ======================================================================================

    Under ``torch.distributed`` each process brings its own share of the batches (:func:`image_batches` makes them), and all
    get the same result.

    Args:
        model: in evaluation mode while this runs; the mode of each of its modules is put back.
        batches: :class:`Batch` es, or pairs (images, labels) in a single process.
        subsets: of the eigenvalues; ``all`` is added where it is missing, because the others are compared with it.
        rules: at the rectifiers.
        cut: ``exact`` or ``projector``.
        target: explain the class of the ``label``, the ``predicted`` one, or the ``norm`` of the representation.
        measures: names of the table above.
        collapse: one or several of :func:`eigengrain.explain.measures.collapse`.
        normalise: of ``mae``.
        steps: of the curves.
        baseline: of the curves.
        csv: file for the measures of every image; the first process writes it.
        attribute: makes the maps; by default :func:`eigengrain.explain.saliency.attribute_rules`.
        each: called after every batch.

    Raises:
        ValueError: for an unknown name, a measure that the target does not allow, no images, or one that was seen twice.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3)
        >>> pairs = [(torch.randn(2, 3, 64, 64), torch.tensor([0, 3]))]
        >>> result = survey(model, pairs, subsets=["top:1"], rules=["vanilla"], measures=["corr", "mae"])
        >>> [(row.subset, row.measure, row.n + row.n_undefined) for row in result.table]
        [('top:1', 'corr', 2), ('top:1', 'mae', 2)]
    """
    _check_names("measure", measures, MEASURES)
    _check_names("target", [target], TARGETS)
    _check_names("normalisation of maps", [normalise], m.NORMALISATIONS)
    collapses = [collapse] if isinstance(collapse, str) else list(dict.fromkeys(collapse))
    _check_names("way to collapse a map", collapses, m.COLLAPSES)
    for what, listed in (("subsets", subsets), ("rules", rules)):
        if isinstance(listed, str) or not listed:
            raise ValueError(f"{what} must be a list with at least one name in it, got {listed!r}")
    if target == "norm" and set(measures) & CURVES.keys():
        raise ValueError("deletion and insertion follow the probability of a class: use target='label' or 'predicted'")
    names = [str(EigenSubset.parse(subset)) for subset in subsets]
    names = list(dict.fromkeys(names if "all" in names else ["all", *names]))
    rules = list(dict.fromkeys(rules))
    path = None if csv is None else writable(csv)
    if attribute is None:
        from eigengrain.explain.saliency import attribute_rules

        attribute = attribute_rules

    ask = _Ask(tuple(measures), tuple(collapses), normalise, steps, baseline)
    device = next(model.parameters()).device
    rows: list[dict[str, Any]] = []
    nonfinite, seen = 0, 0
    with evaluating(model):
        for given in batches:
            batch = _numbered(given, seen)
            seen += len(batch.numbers)
            images, labels = batch.images.to(device), batch.labels.to(device)
            chosen: Tensor | str | None = {"label": labels, "predicted": None, "norm": "norm"}[target]
            found = attribute(model, images, names, rules, target=chosen, cut=cut)
            for rule in rules:
                nonfinite += sum(_nonfinite_maps(found[rule].maps[name]) for name in names)
                rows += _measure(model, images, batch, names, found[rule], {"rule": rule, "cut": cut}, ask)
            each()
    rows, nonfinite = _gather(rows, nonfinite)
    if not rows:
        raise ValueError("there is no image to survey: is the split empty?")
    samples = _check_once(rows, len(rules) * len(names) * len(collapses))
    if nonfinite:
        warnings.warn(f"{nonfinite} maps have NaN or infinity in them: their measures count as undefined", stacklevel=2)
    result = SurveyResult(rows, summarise(rows), samples, nonfinite)
    if path is not None and _rank_and_size()[0] == 0:
        write_csv(path, rows)
    return result


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """Means of the measures over images, for each rule, cut, subset and collapse.

    Args:
        rows: of one or several :class:`SurveyResult` s; None means that a measure does not apply, a value that is not
            finite that it is undefined for an image. Such values are counted and left out of the mean, never filled in.

    Example:
        >>> about = {"rule": "vanilla", "cut": "exact", "subset": "last:50", "collapse": "abs-max"}
        >>> [row] = summarise([about | {"corr": r} for r in (0.2, 0.4, math.nan)])
        >>> row.measure, round(row.mean, 3), round(row.standard_error, 3), row.n, row.n_undefined
        ('corr', 0.3, 0.1, 2, 1)
    """
    values: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows:
        group = values.setdefault(tuple(str(row[key]) for key in _KEYS), {})
        for measure in MEASURES:
            if row.get(measure) is not None:
                group.setdefault(measure, []).append(float(row[measure]))
    table = []
    for key, group in values.items():
        for measure, all_values in group.items():
            defined = [value for value in all_values if math.isfinite(value)]
            n = len(defined)
            mean = math.fsum(defined) / n if n else math.nan
            spread = math.fsum((value - mean) ** 2 for value in defined)
            error = math.sqrt(spread / (n - 1) / n) if n > 1 else math.nan
            rule, cut, subset, collapse = key
            table.append(Summary(rule, cut, subset, collapse, measure, mean, error, n, len(all_values) - n))
    return table


def image_batches(
    dataset: ImageSet,
    batch_size: int = 32,
    *,
    regions: bool = True,
    workers: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterable[Batch]:
    """Batches for a survey: images, labels, numbers, and where the object and its telling parts are.

    Args:
        dataset: with an evaluation transform, ``build_transform(..., train=False)``.
        batch_size: images of a batch, over all processes together.
        regions: whether to bring masks and boxes; False allows a transform that is a function of one's own.
        workers: processes that read images.
        rank: of this process; what ``torch.distributed`` says, or 0.
        world_size: how many processes share the data set; what ``torch.distributed`` says, or 1.

    Raises:
        ValueError: for a data set without a transform, or numbers out of range.

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
        raise ValueError(f"{dataset.name} has no transform: set dataset.transform to build_transform(..., train=False)")
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got {rank} and {world_size}")
    if rank is None or world_size is None:
        rank, world_size = _rank_and_size()
    order = Order(len(dataset), batch_size, train=False, rank=rank, world_size=world_size)
    # its own generator, so that starting draws nothing from that of the caller
    generator = torch.Generator().manual_seed(0)
    return Workers(_Located(dataset, regions), _collate, workers=workers, batch_sampler=order, generator=generator)


class _Sample(NamedTuple):
    image: Any
    label: int
    number: int
    object: Tensor | None
    parts: Tensor | None


class _Located(Dataset[_Sample]):
    """Samples with their regions; each image is opened once."""

    def __init__(self, dataset: ImageSet, regions: bool):
        self.dataset, self.regions = dataset, regions

    def __getitem__(self, number: int) -> _Sample:
        dataset = self.dataset
        image = dataset.image(number)
        transform: Any = dataset.transform
        whole = object_mask(dataset, number, image.size) if self.regions else None
        parts = part_mask(dataset, number) if self.regions else None
        return _Sample(transform(image), dataset.labels[number], number, whole, parts)


def _collate(samples: Sequence[_Sample]) -> Batch:
    images, labels = stack([(sample.image, sample.label) for sample in samples])
    numbers = [sample.number for sample in samples]
    return Batch(images, labels, numbers, _stacked(s.object for s in samples), _stacked(s.parts for s in samples))


def _stacked(masks: Iterable[Tensor | None]) -> Tensor | None:
    known = [mask for mask in masks if mask is not None]
    return torch.stack(known) if known else None


class _Ask(NamedTuple):
    """What a survey measures."""

    measures: tuple[str, ...]
    collapses: tuple[str, ...]
    normalise: str
    steps: int
    baseline: str | Tensor


def _measure(
    model: CovarianceNet,
    images: Tensor,
    batch: Batch,
    subsets: Sequence[str],
    found: Any,
    about: dict[str, str],
    ask: _Ask,
) -> Iterator[dict[str, Any]]:
    """The rows of one batch and rule."""
    targets = found.targets.tolist()
    labels = batch.labels.tolist()
    for how in ask.collapses:
        whole = m.collapse(found.maps["all"], how)
        for subset in subsets:
            maps = m.collapse(found.maps[subset], how)
            columns: dict[str, list[float] | None] = dict.fromkeys(ask.measures)
            for name in ask.measures:
                values = _one(name, maps, None if subset == "all" else whole, batch, ask)
                if name == "gap" and subset != "all":
                    values = found.gaps[subset]
                elif name in CURVES:
                    # signed maps rank pixels by their absolute value, whatever is made of the colours
                    order = maps.abs() if maps.ndim == 3 else maps
                    curve = CURVES[name](
                        model, images, order, found.targets, steps=ask.steps, baseline=ask.baseline, batch_size=len(images)
                    )
                    values = curve.area
                columns[name] = None if values is None else values.tolist()
            for i, number in enumerate(batch.numbers):
                row: dict[str, Any] = {"number": int(number), "label": labels[i], "target": targets[i]}
                row |= {**about, "subset": subset, "collapse": how}
                yield row | {name: None if values is None else values[i] for name, values in columns.items()}


def _one(name: str, maps: Tensor, whole: Tensor | None, batch: Batch, ask: _Ask) -> Tensor | None:
    """A comparison with the map of all eigenvalues, or a measure of place; None where it does not apply."""
    if name in COMPARISONS:
        if whole is None:
            return None
        if name == "mae":
            return m.mae(maps, whole, ask.normalise)
        return m.correlation(maps, whole) if name == "corr" else m.norm_ratio(maps, whole)
    region, _, place = name.partition("_")
    mask = {"object": batch.objects, "parts": batch.parts}.get(region)
    return None if mask is None else PLACES[place](maps, mask)


def _check_names(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    if not given:
        raise ValueError(f"a survey needs at least one {kind}: choose from {', '.join(known)}")
    for name in given:
        if name not in known:
            raise UnknownName(kind, name, known)


def _numbered(given: Batch | tuple[Tensor, Tensor], seen: int) -> Batch:
    if isinstance(given, Batch):
        return given
    images, labels = given
    if _rank_and_size()[1] > 1:
        raise ValueError(
            "pairs (images, labels) do not say which images they are, so several processes could count one twice: use "
            "image_batches(dataset), or Batch with its numbers"
        )
    return Batch(images, labels, range(seen, seen + len(images)))


def _nonfinite_maps(maps: Tensor) -> int:
    return int((~maps.isfinite()).flatten(1).any(1).sum())


def _rank_and_size() -> tuple[int, int]:
    """This process among its peers, (0, 1) alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _gather(rows: list[dict[str, Any]], nonfinite: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of all processes in the order of the images, whoever measured them."""
    size = _rank_and_size()[1]
    shares: list[Any] = [(rows, nonfinite)]
    if size > 1:
        shares = [None] * size
        dist.all_gather_object(shares, (rows, nonfinite))
    together = [row for part, _ in shares for row in part]
    together.sort(key=lambda row: row["number"])  # stable: an image's own rows keep their order
    return together, sum(count for _, count in shares)


def _check_once(rows: Sequence[Mapping[str, Any]], expected: int) -> int:
    """The number of images, after a look that each was seen once."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["number"]] = counts.get(row["number"], 0) + 1
    twice = next((number for number, count in counts.items() if count != expected), None)
    if twice is not None:
        raise ValueError(
            f"image {twice} was seen {counts[twice] // expected} times: give each process its own share of the images, "
            "such as image_batches(dataset) makes"
        )
    return len(counts)
