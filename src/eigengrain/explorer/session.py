r"""A model and the images that it was shown: everything that the page says, without the page.

An image goes through the backbone once. Its reduced features, its eigenvalues and the scores of every split are kept, so
that a moved split is answered from memory; maps take a pass of their own, :func:`eigengrain.explain.attribute_rules`.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from eigengrain.cli.explain_plan import own_part
from eigengrain.data import ImageSet
from eigengrain.data.decode import ImageError
from eigengrain.explain.animation import rgb_pixels
from eigengrain.explain.measures import collapse
from eigengrain.explain.plots import Explained
from eigengrain.explain.saliency import attribute_rules
from eigengrain.explorer.limits import KEPT_BYTES, MAX_TEXT, MAX_WAIT, BusyError
from eigengrain.explorer.memory import Memory
from eigengrain.explorer.uploads import UPLOAD, Uploads
from eigengrain.functional import EigenSubset
from eigengrain.functional.scaling_eigen_branch import qs_and_slope
from eigengrain.heads import CovarianceHead
from eigengrain.models import CovarianceNet

_log = logging.getLogger(__name__)

#: splits whose scores are found when an image is first seen: all of them up to 65 eigenvalues, else evenly spaced ones
PROFILE = 64
#: subsets that are pooled together, which bounds the memory of their matrices
TOGETHER = 32
#: before an example's number
EXAMPLE = "example-"


@dataclass(frozen=True, eq=False)
class Look:
    """An image as the model saw it.

    Args:
        key: by which it is asked for.
        title: for a reader.
        label: its class, where that is known.
        inputs: (1, 3, H, W), normalised.
        pixels: the same as RGB, uint8 (3, H, W).
        reduced: feature map after the head's reduction, (1, d, h, w).
        eigenvalues: of its covariance, descending, float64 (d,), on the CPU; those that are rounding are 0.
        scores: subset as text → scores of the classes, float64 (classes,), on the CPU; more are added when asked for.
    """

    key: str
    title: str
    label: int | None
    inputs: Tensor
    pixels: Tensor
    reduced: Tensor
    eigenvalues: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        return self.reduced.shape[-2] * self.reduced.shape[-1]


class Answer(NamedTuple):
    """What a subset of the eigenvalues says.

    Args:
        role: ``all``, ``large``, ``small`` or ``custom``.
        subset: as text.
        kept: how many eigenvalues it keeps.
        probabilities: float64 (classes,).
    """

    role: str
    subset: str
    kept: int
    probabilities: Tensor

    @property
    def predicted(self) -> int:
        return int(self.probabilities.argmax())


class Facts(NamedTuple):
    r"""Numbers of a spectrum that is split after its largest t eigenvalues.

    Args:
        s: factor of the Scaling Eigen Branch, :math:`\sqrt{\sum\lambda e^{-2\lambda}}`.
        condition: :math:`\kappa = \lambda_1/\lambda_d`, infinite for a singular covariance.
        rank: eigenvalues above 0.
        effective_rank: :math:`e^{H}` with H the entropy of :math:`\lambda/\sum\lambda`.
        energy: share of the small part in the sum of the eigenvalues.
        gap: :math:`(\lambda_t - \lambda_{t+1})/\lambda_t`; nan between zeros.
    """

    s: float
    condition: float
    rank: int
    effective_rank: float
    energy: float
    gap: float


class Profile(NamedTuple):
    """Probability of the predicted class with the large part alone and with the small part alone, for many splits."""

    splits: list[int]
    large: list[float]
    small: list[float]


def facts(eigenvalues: Tensor, split: int) -> Facts:
    """Numbers of a spectrum (d,), descending, without rounding.

    Example:
        >>> facts(torch.tensor([4.0, 4.0, 0.0]).double(), 1)._replace(s=0.0)
        Facts(s=0.0, condition=inf, rank=2, effective_rank=2.0, energy=0.5, gap=0.0)
    """
    total = eigenvalues.sum()
    shares = eigenvalues / total if total > 0 else eigenvalues
    entropy = -torch.special.xlogy(shares, shares).sum()
    largest, last = float(eigenvalues[0]), float(eigenvalues[-1])
    return Facts(
        s=float(qs_and_slope(eigenvalues)[0]),
        condition=largest / last if last > 0 else math.inf,
        rank=int((eigenvalues > 0).sum()),
        effective_rank=round(float(entropy.exp()), 10),
        energy=float(shares[split:].sum()),
        gap=float(EigenSubset.largest(split).relative_gap(eigenvalues)),
    )


def check_eigenvalues(model: CovarianceNet, name: str) -> CovarianceHead:
    """The head of a model, if its eigenvalues can be told apart.

    Raises:
        ValueError: for any other head.
    """
    head = model.head
    able = isinstance(head, CovarianceHead) and head.normalise in ("sqrt", "log", "power") and head.solver != "products"
    if not able or model.num_classes < 2 or head.channels < 2:
        raise ValueError(
            f"{name}: the head {model.config['head']!r} has no eigenvalues to choose from, or no classes: explore a model "
            "with the head mpncov, mpncov+seb or logcov"
        )
    assert isinstance(head, CovarianceHead)
    return head


class Lens:
    """One model, the images at hand, and what it says about them; for several threads at once.

    Args:
        name: under which it is chosen.
        model: of :func:`create_model` with a head that has eigenvalues; it is put in evaluation mode.
        images: examples, with the transform of the model.
        labelled: whether their classes are those of the model.
        uploads: images of visitors, which several models may share.

    Raises:
        ValueError: if the head has no eigenvalues to choose from, or no example can be read.

    Example:
        >>> from eigengrain.cli.checkpoint import plain_transform
        >>> from eigengrain.data.plumage import open_plumage
        >>> from eigengrain.models import create_model
        >>> birds = open_plumage("test", classes=2, per_class=1, size=64, cache=False)
        >>> model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4)
        >>> birds.transform = plain_transform(model)
        >>> lens = Lens("tiny", model, birds)
        >>> [answer.subset for answer in lens.answers(lens.look("example-1"), split=3)]
        ['all', 'top:3', 'last:1']
    """

    def __init__(
        self, name: str, model: CovarianceNet, images: ImageSet, labelled: bool = True, uploads: Uploads | None = None
    ):
        self.name, self.model, self.images, self.labelled = name, model.eval().requires_grad_(False), images, labelled
        self.uploads = Uploads() if uploads is None else uploads
        self.head = check_eigenvalues(model, name)
        self.channels = self.head.channels
        #: the subset that the model itself keeps, nothing if that is all of its eigenvalues
        self.own = own_part(model)
        self.classes = list(model.class_names or (str(number) for number in range(model.num_classes)))
        self._lock = Lock()
        self._looks = Memory[Look](KEPT_BYTES // 2, _bytes_of_look)
        self._maps = Memory[Explained](KEPT_BYTES // 2, _bytes_of_maps)
        self._thumbnails = Memory[Image.Image](KEPT_BYTES // 8, lambda image: 3 * image.width * image.height)
        self._by_class: dict[int, list[int]] = {}
        for number, label in enumerate(images.labels):
            self._by_class.setdefault(label, []).append(number)
        self._unreadable: set[int] = set()
        first = next(filter(self._readable, range(len(images))), None)
        if first is None:
            raise ValueError(f"none of the {len(images)} images of {images.name} ({images.split}) can be read")
        #: key of the example that is shown first
        self.first = f"{EXAMPLE}{first}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The model for one thread: what keeps a subset of its eigenvalues is set in its head for a while.

        Raises:
            BusyError: if others have it for too long.
        """
        if not self._lock.acquire(timeout=MAX_WAIT):
            raise BusyError("the model is busy with other visitors: try again in a moment")
        try:
            yield
        finally:
            self._lock.release()

    def of_class(self, label: int, count: int) -> list[int]:
        """Numbers of the first examples of a class; those that cannot be read are passed over."""
        return list(islice(filter(self._readable, self._by_class.get(label, ())), count))

    def _readable(self, number: int) -> bool:
        if number not in self._unreadable:
            try:
                self.thumbnail(number)
            except ImageError as error:
                self._unreadable.add(number)
                _log.warning("left out of the examples: %s", error)
        return number not in self._unreadable

    def thumbnail(self, number: int, side: int = 128) -> Image.Image:
        """An example, small; ``side`` bounds its sides."""
        kept = self._thumbnails.get((number, side))
        if kept is None:
            kept = self.images.image(number)
            kept.thumbnail((side, side))
            self._thumbnails.put((number, side), kept)
        return kept

    def look(self, key: str) -> Look:
        """The image of that key, ``example-12`` or what :meth:`upload` gave.

        Raises:
            ValueError: if there is no such example, or the upload is no longer kept.
        """
        kept = self._looks.get(key)
        if kept is not None:
            return kept
        if key.startswith(UPLOAD):
            return self._uploaded(key)
        number = key.removeprefix(EXAMPLE)
        if not key.startswith(EXAMPLE) or not number.isdecimal() or len(number) > 9 or int(number) >= len(self.images):
            raise ValueError(f"there is no image {key[:MAX_TEXT]!r}: examples go from 0 to {len(self.images) - 1}")
        image, label = self.images[int(number)]
        return self._seen(key, f"{self.images.name} {self.images.split} {number}", image, label if self.labelled else None)

    def upload(self, image: Image.Image, title: str) -> Look:
        """An image of a visitor's own, which other models that share the uploads can then look at by its key."""
        return self.look(self.uploads.add(image, title))

    def _uploaded(self, key: str) -> Look:
        upload = self.uploads.get(key)
        if upload is None:
            raise ValueError("the uploaded image is no longer kept: upload it again")
        transform: Callable[[Image.Image], Tensor] | None = self.images.transform
        if transform is None:
            raise ValueError("the examples have no transform, so an image cannot be prepared like them")
        return self._seen(key, upload.title, transform(upload.image), None)

    def _seen(self, key: str, title: str, image: Tensor, label: int | None) -> Look:
        device = next(self.model.parameters()).device
        inputs = image[None].to(device)
        with self.alone(), torch.no_grad():
            reduced = self.head.reduce(self.model.forward_features(inputs))
            values = self.head.pool_subsets(reduced, ["all"])[1][0].double().cpu()
        values = torch.where(values > len(values) * torch.finfo(torch.float64).eps * values[0], values, 0.0)
        pixels = rgb_pixels(image, self.model.pretrained_cfg["mean"], self.model.pretrained_cfg["std"])
        look = Look(key, title, label, inputs, pixels, reduced, values)
        splits = self.splits()
        self._score(look, ["all", *(text for t in splits for text in self._parts(t))])
        self._looks.put(key, look)
        return look

    def splits(self) -> list[int]:
        """Split points of a profile.

        Example:
            >>> _evenly(64)[:2], _evenly(256)[:3], len(_evenly(256))
            ([1, 2], [1, 5, 9], 64)
        """
        return _evenly(self.channels)

    def _parts(self, split: int) -> tuple[str, str]:
        return f"top:{split}", f"last:{self.channels - split}"

    def _score(self, look: Look, subsets: Sequence[str]) -> None:
        """Scores of subsets that were not asked for before, from the kept features."""
        new = [subset for subset in dict.fromkeys(subsets) if subset not in look.scores]
        for start in range(0, len(new), TOGETHER):
            some = new[start : start + TOGETHER]
            with self.alone(), torch.no_grad():
                vectors, _ = self.head.pool_subsets(look.reduced, some)
                scores = self.model.forward_vector(torch.cat(vectors)).double().cpu()
            look.scores.update(zip(some, scores, strict=True))

    def subsets(self, split: int, custom: str = "") -> dict[str, str]:
        """Role → subset.

        Raises:
            ValueError: for a split that leaves nothing on one side, or a custom subset that cannot be read or does not fit.
        """
        if not 1 <= split < self.channels:
            raise ValueError(f"the split must be from 1 to {self.channels - 1}, got {split}")
        large, small = self._parts(split)
        found = {"all": "all", "large": large, "small": small}
        if custom.strip():
            if len(custom) > MAX_TEXT:
                raise ValueError(f"a subset of more than {MAX_TEXT} letters is not read")
            subset = EigenSubset.parse(custom.strip())
            subset.mask(self.channels)  # refuses what does not fit
            found["custom"] = str(subset)
        return found

    def answers(self, look: Look, split: int, custom: str = "") -> list[Answer]:
        """What all eigenvalues, the large, the small and the custom ones say. Raises as :meth:`subsets`."""
        roles = self.subsets(split, custom)
        self._score(look, list(roles.values()))
        return [
            Answer(role, subset, int(EigenSubset.parse(subset).mask(self.channels).sum()), look.scores[subset].softmax(0))
            for role, subset in roles.items()
        ]

    def profile(self, look: Look) -> Profile:
        """How sure each part alone is of the class that all eigenvalues predict, at every split of :meth:`splits`."""
        predicted = int(look.scores["all"].argmax())
        rows = [[float(look.scores[part].softmax(0)[predicted]) for part in self._parts(t)] for t in self.splits()]
        return Profile(self.splits(), [row[0] for row in rows], [row[1] for row in rows])

    def explain(
        self, look: Look, split: int, rules: Sequence[str], custom: str = "", target: int | None = None, cut: str = "exact"
    ) -> Explained:
        """Maps of the subsets under the rules, all of one class: ``target``, or the one that all eigenvalues predict.

        Raises:
            ValueError: as :meth:`subsets` and :func:`eigengrain.explain.attribute_rules`.
        """
        subsets = list(dict.fromkeys(self.subsets(split, custom).values()))
        predicted = int(look.scores["all"].argmax())
        wanted = predicted if target is None else target
        key = (look.key, *subsets, "|", *rules, wanted, cut)
        kept = self._maps.get(key)
        if kept is not None:
            return kept
        with self.alone():
            found = attribute_rules(self.model, look.inputs, subsets, rules, wanted, cut)
        first = found[next(iter(found))]
        explained = Explained(
            pixels=look.pixels,
            name=look.title,
            maps={
                rule: {subset: collapse(signed)[0].float().cpu() for subset, signed in each.maps.items()}
                for rule, each in found.items()
            },
            gaps={subset: float(gap[0]) for subset, gap in first.gaps.items()},
            cut=cut,
            channels=self.channels,
            positions=look.positions,
            target=self.classes[wanted],
            predicted=self.classes[predicted],
            probability=float(look.scores["all"].softmax(0)[predicted]),
            truth=None if look.label is None else self.classes[look.label],
        )
        self._maps.put(key, explained)
        return explained


def _evenly(channels: int) -> list[int]:
    last, count = channels - 1, min(PROFILE, channels - 1)
    return sorted({1 + round(k * (last - 1) / max(count - 1, 1)) for k in range(count)})


def _bytes_of_look(look: Look) -> int:
    tensors = (look.inputs, look.pixels, look.reduced, *look.scores.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _bytes_of_maps(explained: Explained) -> int:
    return sum(4 * map.numel() for maps in explained.maps.values() for map in maps.values())
