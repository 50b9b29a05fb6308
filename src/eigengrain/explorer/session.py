r"""One model, its example images and the results for each image: everything that the page shows, without the page.

An image passes through the backbone once. Its reduced features, eigenvalues and the scores of every split are cached, so a
new split is answered from memory. Maps need passes of their own.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from eigengrain.data import ImageSet
from eigengrain.errors import ArgumentError, ImageError
from eigengrain.explain.measures import collapse
from eigengrain.explain.plots import Explained, rgb_pixels
from eigengrain.explain.saliency import attribute_rules
from eigengrain.explain.smooth import smooth_maps
from eigengrain.explorer import limits
from eigengrain.explorer.limits import BoundedCache, BusyError, Uploads
from eigengrain.functional import EigenSubset
from eigengrain.functional.scaling_eigen_branch import qs_and_slope
from eigengrain.functional.subsets import small_part
from eigengrain.heads import SpectralHead
from eigengrain.models import CovarianceNet
from eigengrain.models.calibration import decode_subspace, familiarity
from eigengrain.names import RULES
from eigengrain.text import printable
from eigengrain.training.calibration import UNSURE, find_doubts, rejection_threshold

_log = logging.getLogger(__name__)

#: splits that are scored when an image is first analysed: all of them up to 65 eigenvalues, else evenly spaced ones
PROFILE_POINTS = 64
#: subsets that are pooled together, which bounds the memory of their matrices
SUBSET_BATCH = 32
#: prefix of the key of an example; its number follows
EXAMPLE = "example-"

#: kinds of maps: the smooth one, and gradients of the pixels by their rule at the ReLUs
SMOOTH = "smooth"
KINDS = (SMOOTH, *RULES)
#: a highest probability that is less than twice that of a guess, and less than this above it, is no opinion
NO_OPINION = 0.15


@dataclass(frozen=True, eq=False)
class Analysis:
    """An image and what the model computed from it."""

    key: str  # in requests
    title: str  # for readers
    label: int | None
    inputs: Tensor  # normalised image (1, 3, H, W)
    pixels: Tensor  # the same image as RGB, uint8 (3, H, W)
    reduced: Tensor  # feature map after the head's reduction, (1, d, h, w)
    beside: Tensor | None  # what goes beside the head, see CovarianceNet.split_features
    eigenvalues: Tensor  # of the head's matrix, descending, float64 (d,), on the CPU; 0 where they are rounding
    familiarity: float  # see models/calibration.py; 0 for a model without calibration
    #: subset as text → class scores, float64 (classes,), on the CPU; subsets are added when they are requested
    scores: dict[str, Tensor] = field(default_factory=dict)

    @property
    def predicted(self) -> int:
        """Class that the model predicts with all eigenvalues."""
        return int(self.scores["all"].argmax())

    @property
    def rank(self) -> int:
        """Number of eigenvalues above 0."""
        return int((self.eigenvalues > 0).sum())

    @property
    def bytes(self) -> int:
        tensors = (self.inputs, self.pixels, self.reduced, self.beside, *self.scores.values())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Prediction(NamedTuple):
    """What the model predicts with a subset of the eigenvalues."""

    role: str  # all, large, small or custom
    subset: str
    kept: int  # number of eigenvalues in the subset
    above_zero: int  # number of those that are above 0
    probabilities: Tensor  # float64 (classes,), at the temperature of the model

    @property
    def predicted(self) -> int:
        return int(self.probabilities.argmax())

    @property
    def has_opinion(self) -> bool:
        """Whether the prediction differs from a guess, which has the probability 1/classes.

        Example:
            >>> [Prediction("all", "all", 4, 4, torch.tensor(p)).has_opinion for p in ([0.6, 0.4], [0.7, 0.3])]
            [False, True]
        """
        guess = 1 / len(self.probabilities)
        return self.above_zero > 0 and float(self.probabilities.max()) >= min(2 * guess, guess + NO_OPINION)


class Mistake(NamedTuple):
    """An example whose class is not the predicted one."""

    number: int  # of the example
    label: int
    predicted: int


class SpectrumFacts(NamedTuple):
    """Numbers that describe a spectrum split after its largest t eigenvalues."""

    s: float  # factor of the Scaling Eigen Branch, √(Σ λ e^(-2λ))
    condition: float  # λ₁/λ_d, infinite for a singular matrix
    rank: int  # number of eigenvalues above 0
    effective_rank: float  # e^H, where H is the entropy of λ/Σλ
    energy: float  # share of the small part in the sum of the eigenvalues
    gap: float  # (λ_t - λ_t+1)/λ_t; nan between zeros


def spectrum_facts(eigenvalues: Tensor, split: int) -> SpectrumFacts:
    """Describe a spectrum (d,), descending, with rounding set to 0.

    Example:
        >>> spectrum_facts(torch.tensor([4.0, 4.0, 0.0]).double(), 1)._replace(s=0.0)
        SpectrumFacts(s=0.0, condition=inf, rank=2, effective_rank=2.0, energy=0.5, gap=0.0)
    """
    total = eigenvalues.sum()
    shares = eigenvalues / total if total > 0 else eigenvalues
    entropy = -torch.special.xlogy(shares, shares).sum()
    largest, last = float(eigenvalues[0]), float(eigenvalues[-1])
    return SpectrumFacts(
        s=float(qs_and_slope(eigenvalues)[0]),
        condition=largest / last if last > 0 else math.inf,
        rank=int((eigenvalues > 0).sum()),
        effective_rank=round(float(entropy.exp()), 10),
        energy=float(shares[split:].sum()),
        gap=float(EigenSubset.largest(split).relative_gap(eigenvalues)),
    )


def spectral_head(model: CovarianceNet) -> SpectralHead:
    """The head of a model, or an ArgumentError if there are no eigenvalues or classes to choose from."""
    head = model.head
    if not isinstance(head, SpectralHead) or not head.selectable or model.num_classes < 2 or head.channels < 2:
        problem = "must have at least 2 classes and a head with at least 2 eigenvalues to choose from"
        remedy = "heads such as mpncov, mpncov+seb and logcov have them"
        raise ArgumentError("model", problem, model.config["head"], remedy)
    return head


class Session:
    """One model with example images, and its cached results. Thread-safe.

    Args:
        name, model: the model and its name on the page; it is put in eval mode.
        images: examples, with the model's transform.
        labelled: whether the classes of the examples are those of the model.
        uploads: images of visitors, which several sessions can share.
        min_probability: the answer is "unsure" if no class has this probability.

    Raises:
        ArgumentError: if the head has no eigenvalues to choose from, or no example can be read and transformed.

    Example:
        >>> from eigengrain.data.plumage import open_plumage
        >>> from eigengrain.models import create_model
        >>> from eigengrain.training.run_folder import TrainedModel
        >>> birds = open_plumage("test", classes=2, per_class=1, size=64, cache=False)
        >>> model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4)
        >>> birds.transform = TrainedModel(model).transform
        >>> session = Session("tiny", model, birds)
        >>> [prediction.subset for prediction in session.predict(session.analyse("example-1"), split=3)]
        ['all', 'top:3', 'last:1']
    """

    def __init__(
        self,
        name: str,
        model: CovarianceNet,
        images: ImageSet,
        labelled: bool = True,
        uploads: Uploads | None = None,
        min_probability: float = 0.0,
    ):
        self.name, self.model, self.images, self.labelled = name, model.eval().requires_grad_(False), images, labelled
        if images.transform is None:
            raise ArgumentError("images", "must have a transform, which uploads need too")
        self.transform: Callable[[Image.Image], Tensor] = images.transform
        self.uploads = Uploads() if uploads is None else uploads
        self.head = spectral_head(model)
        self.channels = self.head.channels
        #: splits that are scored in advance
        self.splits = _evenly_spaced(self.channels)
        #: subset that the model was saved with, empty if it keeps all eigenvalues
        self.own_subset = self.head.own_subset or ""
        self.classes = list(model.class_names or (str(number) for number in range(model.num_classes)))
        self._min_probability, self._least_familiar = min_probability, rejection_threshold(model)
        subspace, device = (model.calibration or {}).get("subspace"), next(model.parameters()).device
        self._subspace = None if subspace is None else decode_subspace(subspace, model.num_features).to(device)
        self._lock = Lock()
        #: mistakes among the examples, and how many examples were searched for them
        self.mistakes: list[Mistake] = []
        self.searched = 0
        self._search, self._order = Lock(), random.Random(0).sample(range(len(images)), len(images))
        self._analyses = BoundedCache[Analysis](limits.CACHE_BYTES // 2, lambda analysis: analysis.bytes)
        self._maps = BoundedCache[Explained](limits.CACHE_BYTES // 2, _map_bytes)
        self._thumbnails = BoundedCache[Image.Image](limits.CACHE_BYTES // 8, limits.image_bytes)
        self._unreadable: set[int] = set()
        first = next(filter(self._is_readable, range(len(images))), None)
        if first is None:
            raise ArgumentError("images", f"cannot be read: none of the {len(images)} of {images.name} ({images.split})")
        #: key of the example that is shown first
        self.first = f"{EXAMPLE}{first}"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Reserve the model for one thread, because subsets are selected by setting them in the head.

        Raises:
            BusyError: if other threads use the model for too long.
        """
        if not self._lock.acquire(timeout=limits.MAX_WAIT):
            raise BusyError("the model is busy with other visitors: try again in a moment")
        try:
            yield
        finally:
            self._lock.release()

    def examples(self, label: int, count: int) -> list[int]:
        """Numbers of the first examples of a class, without those that cannot be read."""
        numbers = (number for number, other in enumerate(self.images.labels) if other == label)
        return list(islice(filter(self._is_readable, numbers), count))

    def _is_readable(self, number: int) -> bool:
        if number not in self._unreadable:
            try:
                self.thumbnail(number)
            except ImageError as error:
                self._unreadable.add(number)
                _log.warning("left out of the examples: %s", error)
        return number not in self._unreadable

    def thumbnail(self, number: int) -> Image.Image:
        """A small version of an example."""
        if (image := self._thumbnails.get(number)) is None:
            image = self.images.image(number)
            image.thumbnail((128, 128))
            self._thumbnails.put(number, image)
        return image

    def example_number(self, key: str) -> int | None:
        """Number of the example with a key; None if there is no such example."""
        number = key.removeprefix(EXAMPLE)
        if not key.startswith(EXAMPLE) or not number.isdecimal() or len(number) > 9 or int(number) >= len(self.images):
            return None
        return int(number)

    def analyse(self, key: str) -> Analysis:
        """Analyse the image with a key: ``example-12``, or that of an upload.

        Raises:
            ArgumentError: if there is no such example, or the upload is no longer in memory.
        """
        if (analysis := self._analyses.get(key)) is not None:
            return analysis
        upload, number = self.uploads.get(key), self.example_number(key)
        if upload is not None:
            return self._analyse(key, upload.title, self.transform(upload.image), None)
        if number is None:
            problem = f"must be {EXAMPLE}0 to {EXAMPLE}{len(self.images) - 1}, or an upload that is still in memory"
            raise ArgumentError("image", problem, key[: limits.MAX_TEXT])
        image, label = self.images[number]
        file = self.images.path(number)
        title = f"{self.images.name} {self.images.split} {number}" if file is None else printable(file.name)
        return self._analyse(key, title, image, label if self.labelled else None)

    def upload(self, image: Image.Image, title: str) -> Analysis:
        """Store and analyse a visitor's image. Sessions that share the uploads can analyse it by its key too."""
        return self.analyse(self.uploads.add(image, title))

    def analyse_of(self, other: "Session", key: str) -> Analysis:
        """Analyse an image of another session; an example of it keeps its class if this model has a class of that name."""
        number = other.example_number(key)
        if number is None or other is self:
            return self.analyse(key)
        own_key = f"{other.name}/{key}"
        if (analysis := self._analyses.get(own_key)) is not None:
            return analysis
        former = other.analyse(key)
        name = None if former.label is None else other.classes[former.label]
        label = self.classes.index(name) if name in self.classes else None
        return self._analyse(own_key, former.title, self.transform(other.images.image(number)), label)

    def _analyse(self, key: str, title: str, image: Tensor, label: int | None) -> Analysis:
        inputs = image[None].to(next(self.model.parameters()).device)
        with self.exclusive(), torch.no_grad():
            features = self.model.forward_features(inputs)
            pooled, beside = self.model.split_features(features)
            reduced = self.head.reduce(pooled)
            eigenvalues = self.head.eigenvalues(reduced)[0].double().cpu()
            familiar = 0.0 if self._subspace is None else float(familiarity(features.float(), self._subspace))
        pixels = rgb_pixels(image, self.model.pretrained_cfg["mean"], self.model.pretrained_cfg["std"])
        analysis = Analysis(key, title, label, inputs, pixels, reduced, beside, eigenvalues, familiar)
        self._score(analysis, ["all", *(part for split in self.splits for part in self._parts(split))])
        return analysis

    def _parts(self, split: int) -> tuple[str, str]:
        return f"top:{split}", f"last:{self.channels - split}"

    def _score(self, analysis: Analysis, subsets: Sequence[str]) -> None:
        """Compute the scores of new subsets from the features, and keep the analysis."""
        new = [subset for subset in dict.fromkeys(subsets) if subset not in analysis.scores]
        for start in range(0, len(new), SUBSET_BATCH):
            batch = new[start : start + SUBSET_BATCH]
            with self.exclusive(), torch.no_grad():
                vectors, _ = self.head.pool_subsets(analysis.reduced, batch)
                scores = self.model.forward_vector(torch.cat(vectors), beside=analysis.beside).double().cpu()
            analysis.scores.update(zip(batch, scores, strict=True))
        if new:
            self._analyses.put(analysis.key, analysis)  # with its new size

    def subsets(self, split: int, custom: str = "") -> dict[str, str]:
        """Role → subset as text: ``all``, ``large``, ``small``, and ``custom`` if it is given.

        Raises:
            ValueError: if ``split`` leaves one side empty, or ``custom`` cannot be read or does not fit.
        """
        if not 1 <= split < self.channels:
            raise ArgumentError("split", f"must be from 1 to {self.channels - 1}", split)
        large, small = self._parts(split)
        roles = {"all": "all", "large": large, "small": small}
        if custom.strip():
            if len(custom) > limits.MAX_TEXT:
                raise ArgumentError("custom", f"must have at most {limits.MAX_TEXT} characters")
            subset = EigenSubset.parse(custom.strip())
            subset.mask(self.channels)  # raises if it does not fit
            roles["custom"] = str(subset)
        return roles

    def predict(self, analysis: Analysis, split: int, custom: str = "") -> list[Prediction]:
        """Predictions with all, the large, the small and the custom eigenvalues. Raises as :meth:`subsets`."""
        roles = self.subsets(split, custom)
        self._score(analysis, list(roles.values()))
        return [self._prediction(analysis, role, subset) for role, subset in roles.items()]

    def _prediction(self, analysis: Analysis, role: str, subset: str) -> Prediction:
        mask = self.mask(subset)
        above = int((mask & (analysis.eigenvalues > 0)).sum())
        probabilities = (analysis.scores[subset] / self.model.temperature).softmax(0)
        return Prediction(role, subset, int(mask.sum()), above, probabilities)

    def answer(self, analysis: Analysis) -> tuple[Prediction, str]:
        """The prediction with the subset that the model was saved with, and its doubt: "none of these", "unsure" or ""."""
        subset = self.own_subset or "all"
        self._score(analysis, [subset])
        prediction = self._prediction(analysis, "all", subset)
        best, familiar = prediction.probabilities.max()[None], torch.tensor([analysis.familiarity])
        [doubt] = find_doubts(best, familiar, self._least_familiar, self._min_probability)
        return prediction, doubt or ("" if prediction.has_opinion else UNSURE)

    def default_split(self, analysis: Analysis) -> int:
        """Where the spectrum is cut at first: the paper's share, 206 of 256, of the eigenvalues above 0."""
        return max(1, min(analysis.rank - small_part(analysis.rank), self.channels - 1))

    def mask(self, subset: str) -> Tensor:
        """Which eigenvalues a subset keeps, boolean (d,)."""
        return EigenSubset.parse(subset).mask(self.channels)

    def profile(self, analysis: Analysis) -> dict[str, list[float]]:
        """Probability of the predicted class with the large and with the small part alone, at each of the ``splits``."""
        large, small = zip(*map(self._parts, self.splits), strict=True)
        scores = torch.stack([analysis.scores[part] for part in (*large, *small)]) / self.model.temperature
        shares = scores.softmax(1)[:, analysis.predicted].tolist()
        return {"large": shares[: len(large)], "small": shares[len(large) :]}

    def explain(
        self,
        analysis: Analysis,
        subsets: Sequence[str],
        kinds: Sequence[str] = (SMOOTH,),
        target: int | None = None,
        cut: str = "exact",
    ) -> Explained:
        """Maps of subsets: the smooth one, and gradients of the pixels under the backward rules at the ReLUs.

        All maps explain one class: ``target``, or the one that all eigenvalues predict. Raises as
        :func:`eigengrain.explain.attribute_rules`.
        """
        subsets = list(dict.fromkeys(subsets))
        target = analysis.predicted if target is None else target
        key = (analysis.key, *subsets, "|", *kinds, target, cut)
        if (cached := self._maps.get(key)) is not None:
            return cached
        maps: dict[str, dict[str, Tensor]] = {}
        rules = [kind for kind in kinds if kind != SMOOTH]
        with self.exclusive(), self.head.keeping("all"):
            if SMOOTH in kinds:
                maps[SMOOTH] = {subset: self._smooth(analysis, subset, target, cut) for subset in subsets}
            if rules:
                results = attribute_rules(self.model, analysis.inputs, subsets, rules, target, cut)
                for rule, result in results.items():
                    maps[rule] = {subset: collapse(signed)[0].float().cpu() for subset, signed in result.maps.items()}
        answer, _ = self.answer(analysis)
        explained = Explained(
            pixels=analysis.pixels,
            name=analysis.title,
            maps=maps,
            gaps={each: float(EigenSubset.parse(each).relative_gap(analysis.eigenvalues)) for each in subsets},
            cut=cut,
            channels=self.channels,
            positions=analysis.reduced.shape[-2] * analysis.reduced.shape[-1],
            target=self.classes[target],
            predicted=self.classes[answer.predicted],
            probability=float(answer.probabilities.max()),
            truth=None if analysis.label is None else self.classes[analysis.label],
        )
        self._maps.put(key, explained)
        return explained

    def _smooth(self, analysis: Analysis, subset: str, target: int, cut: str) -> Tensor:
        with self.head.keeping(subset, cut):
            return smooth_maps(self.model, analysis.inputs, target)[0].float().cpu()

    def find_mistakes(self, count: int, seconds: float) -> Iterator[list[Mistake]]:
        """Search the examples, in a random order, until there are ``count`` mistakes or the time is up.

        Yields all mistakes so far after every example. A later call continues; a call while another thread searches, or for
        examples without classes of the model, ends at once.
        """
        if not self.labelled or not self._search.acquire(blocking=False):
            return
        try:
            end = time.monotonic() + seconds
            while self.searched < len(self._order) and len(self.mistakes) < count and time.monotonic() < end:
                number = self._order[self.searched]
                if self._is_readable(number):
                    image, label = self.images[number]
                    with self.exclusive(), torch.no_grad():  # one image at a time, because visitors wait for it
                        scores = self.model(image[None].to(next(self.model.parameters()).device))
                    if (predicted := int(scores.argmax())) != label:
                        self.mistakes.append(Mistake(number, label, predicted))
                self.searched += 1
                yield self.mistakes
        finally:
            self._search.release()


def _evenly_spaced(channels: int) -> list[int]:
    """
    Example:
        >>> _evenly_spaced(64)[:2], _evenly_spaced(256)[:3], len(_evenly_spaced(256))
        ([1, 2], [1, 5, 9], 64)
    """
    last, count = channels - 1, min(PROFILE_POINTS, channels - 1)
    return sorted({1 + round(k * (last - 1) / max(count - 1, 1)) for k in range(count)})


def _map_bytes(explained: Explained) -> int:
    return explained.pixels.nbytes + sum(map.nbytes for maps in explained.maps.values() for map in maps.values())
