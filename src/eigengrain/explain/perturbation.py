"""EigenPerturbation: change an image, with frozen weights, toward the large or the small eigenvalues of its covariance."""

import math
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from torchvision.transforms import functional as F

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional import covariance, eigh
from eigengrain.functional.eigen import zero_rounding
from eigengrain.functional.inputs import check_floating, check_square, output_dtype
from eigengrain.functional.subsets import small_part
from eigengrain.heads import SpectralHead
from eigengrain.models import CovarianceNet
from eigengrain.models.model import check_unwrapped
from eigengrain.names import DIRECTIONS
from eigengrain.progress import progress_bar

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}

#: steps per window: the mean losses of two windows are compared, so that an oscillating loss counts as converged
WINDOW = 20

#: values this far outside 0 to 1 (in RGB) are rounding of half precision; larger ones mean that x is not normalised
_SLACK = 0.01

#: called with the number of updates and the losses (B,)
OnStep = Callable[[int, Tensor], bool | None]


class SplitCovariance(NamedTuple):
    """The parts of a covariance with its largest and its smallest eigenvalues, (*, d, d)."""

    large: Tensor
    small: Tensor


def split_covariance(P: Tensor, split: int) -> SplitCovariance:
    r"""Split a covariance by its eigenvalues (Eq. 10).

    .. math:: P_L &= U \Lambda_L U^T, & P_S &= U \Lambda_S U^T

       \Lambda_L &= (\lambda_1, …, \lambda_t, 0, …, 0), & \Lambda_S &= (0, …, 0, \lambda_{t+1}, …, \lambda_d)

    P is (*, d, d), symmetric positive semi-definite, and ``split`` is t. Eigenvalues up to
    :math:`d\,\varepsilon\,\lambda_1` are rounding and count as 0. No gradient is recorded.

    Example:
        >>> split_covariance(torch.diag(torch.tensor([1.0, 4.0, 2.0])), 1).small.diagonal()
        tensor([1., 0., 2.])
    """
    check_square(P)
    d = P.shape[-1]
    if type(split) is not int or not 1 <= split < d:
        remedy = f"{d - small_part(d)} is about the paper's share, 206 of 256" if d > 1 else "use more channels"
        raise ArgumentError("split", f"must be an integer from 1 to {d - 1} for {d} eigenvalues", split, remedy)
    values, vectors = eigh(P.detach())
    values = zero_rounding(values)
    parts = (vectors * values.unsqueeze(-2)).split([split, d - split], -1)
    rows = vectors.mT.split([split, d - split], -2)
    return SplitCovariance(*(part @ row for part, row in zip(parts, rows, strict=True)))


def perturbation_loss(M: Tensor, P_L: Tensor, P_S: Tensor, toward: str) -> Tensor:
    r"""The loss that an image is changed by: :math:`l_1` (Eq. 11) for ``large``, :math:`l_2` (Eq. 12) for ``small``.

    .. math:: l_1 &= \|M - P_L\|_F^2

       l_2 &= -\|M - P_L\|_F^2 + \|M - P_S\|_F^2
           = 2\langle M, P_L - P_S\rangle - \|P_L\|_F^2 + \|P_S\|_F^2

    The last form (Eq. 13) is evaluated: it does not cancel, and it shows that :math:`l_2` is linear in M. The matrices are
    (*, d, d), and the result is (*).

    Example:
        >>> large, small = torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 1.0]))
        >>> perturbation_loss(large + small, large, small, "large"), perturbation_loss(small, large, small, "small")
        (tensor(1.), tensor(-10.))
    """
    _check_direction(toward)
    if toward == "large":
        return (M - P_L).square().sum((-2, -1))
    constant = P_S.square().sum((-2, -1)) - P_L.square().sum((-2, -1))
    return 2 * (M * (P_L - P_S)).sum((-2, -1)) + constant


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Blur images (B, C, H, W) with a Gaussian of ``sigma`` pixels, cut at 3σ, with reflected borders; 0 has no effect."""
    if sigma == 0:
        return images
    radius, shorter = math.ceil(3 * sigma), min(images.shape[-2:])
    if radius >= shorter:
        raise ArgumentError("blur", f"must be at most {(shorter - 1) / 3:.3g} for images of {shorter} pixels", sigma)
    # one axis after the other: torchvision's own kernel is a square, with many more products
    return F.gaussian_blur(F.gaussian_blur(images, [2 * radius + 1, 1], [sigma]), [1, 2 * radius + 1], [sigma])


@dataclass(frozen=True, eq=False)
class Perturbed:
    """Result of :meth:`EigenPerturbation.perturb`. All images are in normalised pixels, see :class:`EigenPerturbation`.

    ``images * std + mean`` is RGB from 0 to 1. Tensors other than ``images`` are on the CPU.
    """

    images: Tensor  #: (B, 3, H, W)
    losses: Tensor  #: (steps_taken, B), float64; row k is the loss before update k + 1, so row 0 is that of the start
    snapshots: Tensor | None  #: (k, B, 3, H, W)
    snapshot_steps: tuple[int, ...]  #: number of updates before each snapshot; the last is steps_taken
    toward: str
    split: int
    steps_taken: int
    stopped: bool  #: whether on_step stopped before the last step
    converged: Tensor  #: (B,): images that were held because their loss no longer changed; all False without tolerance
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(eq=False, repr=False)
class EigenPerturbation:
    r"""Change an image, with frozen weights, until its covariance shows only the large or the small eigenvalues.

    With :math:`P = P_L + P_S` the covariance of the features of the original image, split after its largest t eigenvalues,
    and M the covariance of the changed image, every step descends the gradient with respect to the pixels of

    .. math:: l_1 = \|M - P_L\|_F^2 \ \text{(toward large)}, \qquad
       l_2 = -\|M - P_L\|_F^2 + \|M - P_S\|_F^2 \ \text{(toward small)}

    (Eqs. 10–12). P and M are computed from the reduced map of the head, before any normalisation. The images of a batch are
    independent: each has its own loss, and a batch gives the same result as its images one by one.

    :math:`l_2` is linear in M and has no minimum over all covariances (see the page *Mathematics* of the documentation). In
    practice the range of the pixels bounds it, so that ``bounds`` is on by default.

    **What the paper leaves open.** The *optimiser* is not named: Adam is the default, because its steps, unlike those of
    SGD, do not depend on the scale of the features. The *pixels* in which a learning rate of 0.1 is measured are the
    normalised ones, (RGB − mean)/std with mean and std of ``model.pretrained_cfg``: 0.1 is about 6 of 256 grey levels. The
    *start* is the image itself, where :math:`l_1 = \|P_S\|_F^2` is near its minimum 0: the first steps of 0.1 increase it
    before later ones decrease it. To see :math:`P_L` by itself, pass another ``start``; to stay near the image, use a
    smaller ``lr``.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4).eval()
        >>> photo = torch.rand(1, 3, 96, 96)
        >>> result = EigenPerturbation(model).perturb(photo, toward="small", split=3, steps=3, snapshots=2)
        >>> result.losses.shape, result.snapshots.shape, result.snapshot_steps
        (torch.Size([3, 1]), torch.Size([2, 1, 3, 96, 96]), (0, 3))
    """

    model: CovarianceNet  #: in eval mode, with a SpectralHead; no mode, hook, ``requires_grad`` or ``grad`` is changed
    _: KW_ONLY
    optimiser: str = "adam"  #: ``adam`` or ``sgd``, with torch's other defaults
    lr: float = 0.1  #: learning rate in normalised pixels, as in the paper
    bounds: bool = True  #: clip the pixels to valid RGB after every step
    #: largest cyclic shift of the image in pixels, drawn for each step; it suppresses patterns of single pixels
    jitter: int = 0
    #: standard deviation in pixels of a Gaussian that smooths the gradient; the image is not blurred and keeps its detail
    blur: float = 0.0
    seed: int = 0  #: seed of the shifts
    #: ``torch.bfloat16`` runs the network in autocast; covariance and loss stay in float64. P is rounded like M, but small
    #: eigenvalues are affected: on one ResNet-50, P changed by 2 % and :math:`P_S` by a third
    amp: torch.dtype | None = None
    channels_last: bool = False  #: memory format of the images

    def __post_init__(self) -> None:
        check_unwrapped(self.model)
        if not isinstance(self.model.head, SpectralHead):
            problem = f"must have a head with a covariance, not {type(self.model.head).__name__}"
            remedy = "create it with head='mpncov', 'isqrt' or 'logcov', with or without '+seb'"
            raise ArgumentError("model", problem, remedy=remedy)
        if self.optimiser not in OPTIMISERS:
            raise UnknownName("optimiser", self.optimiser, OPTIMISERS)
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ArgumentError("lr", "must be a positive number", self.lr)
        if type(self.jitter) is not int or self.jitter < 0:
            raise ArgumentError("jitter", "must be a non-negative integer", self.jitter)
        if not (self.blur >= 0 and math.isfinite(self.blur)):
            raise ArgumentError("blur", "must be a non-negative number", self.blur)
        if self.amp not in (None, torch.bfloat16):
            raise ArgumentError("amp", "must be None or torch.bfloat16; gradients of pixels underflow in float16", self.amp)
        cfg = self.model.pretrained_cfg
        for name in ("mean", "std"):
            if name not in cfg:
                raise ArgumentError("model", f"has no {name} of the pixels", remedy=f"set model.pretrained_cfg[{name!r}]")
        self.mean: tuple[float, ...] = tuple(cfg["mean"])
        self.std: tuple[float, ...] = tuple(cfg["std"])

    def covariance(self, images: Tensor) -> Tensor:
        """Covariance (B, d, d) of the reduced features, float64, differentiable: M, or P for an original image."""
        weight = next(self.model.parameters())
        if images.device != weight.device:
            raise ArgumentError("x", f"must be on the device of the model, {weight.device}, not on {images.device}")
        with torch.autocast(images.device.type, dtype=self.amp, enabled=self.amp is not None):
            pooled, _ = self.model.split_features(self.model.forward_features(images.to(weight.dtype)))
            features = self.model.head.reduce(pooled)
        return covariance(features, dtype=torch.float64)

    def perturb(
        self,
        x: Tensor,
        toward: str = "large",
        split: int = 206,
        steps: int = 1000,
        tolerance: float | None = None,
        snapshots: int = 0,
        progress: bool = True,
        on_step: OnStep | None = None,
        start: Tensor | None = None,
    ) -> Perturbed:
        """Change images so that their covariance approaches its large or its small eigenvalues.

        Args:
            x: images (B, 3, H, W), normalised for the model; they are not changed in place.
            toward: ``large`` for :math:`P_L`; ``small`` for :math:`P_S` and away from :math:`P_L`.
            split: number of eigenvalues that count as large; 206 of 256 in the paper.
            steps: largest number of updates.
            tolerance: stop changing an image if the mean loss of 20 steps differs from that of the 20 steps before by at
                most this fraction; return when no image changes any more. None makes all steps.
            snapshots: number of copies to keep at evenly spaced steps from start to end; 1 keeps the end only.
            progress: show a progress bar, on the first process and on a terminal only.
            on_step: called after every update with the number of updates and the losses (B,) before it, on the device.
                Returning False or raising StopIteration ends the loop.
            start: images to start from instead of x, with the shape of x. The target is still the covariance of x.
        """
        self._check_eval_mode()
        x = self._check_images(x, "x")
        begin = x if start is None else self._check_images(start, "start")
        if begin.shape != x.shape:
            raise ArgumentError("start", f"must have the shape of x, {tuple(x.shape)}", tuple(begin.shape))
        _check_direction(toward)
        if type(steps) is not int or steps < 1:
            raise ArgumentError("steps", "must be an integer of at least 1", steps)
        if tolerance is not None and not tolerance >= 0:
            raise ArgumentError("tolerance", "must be None or a non-negative number", tolerance)
        if type(snapshots) is not int or not 0 <= snapshots <= steps + 1:
            raise ArgumentError("snapshots", f"must be an integer from 0 to {{steps}} + 1 = {steps + 1}", snapshots)
        planned = {round(k * steps / (snapshots - 1)) for k in range(snapshots)} if snapshots > 1 else set()
        frames: dict[int, Tensor] = {}  # on the CPU, so that they do not fill the device
        trace: list[Tensor] = []  # on the device: reading a loss at every step would make it wait
        stopped = False
        # gradients are needed, whatever the mode of the caller
        with torch.inference_mode(False), torch.enable_grad(), progress_bar(progress and rank_and_size()[0] == 0) as bar:
            task = bar.add_task(f"toward {toward}", total=steps)
            with torch.no_grad():
                aim = split_covariance(self.covariance(self._copy(x)), split)
            _warn_about_empty_part(aim, split)
            image = self._copy(begin).requires_grad_()
            optimiser = OPTIMISERS[self.optimiser]([image], lr=self.lr)
            low, high = self._limits(image)
            moving = torch.ones(len(image), dtype=torch.bool, device=image.device)
            generator = torch.Generator().manual_seed(self.seed)
            shifts = torch.randint(-self.jitter, self.jitter + 1, (steps, 2), generator=generator).tolist()
            for step, shift in enumerate(shifts, start=1):
                if step - 1 in planned:
                    frames[step - 1] = _to_cpu(image)
                seen = torch.roll(image, shift, (2, 3)) if self.jitter else image
                losses = perturbation_loss(self.covariance(seen), *aim, toward)
                (gradient,) = torch.autograd.grad(losses.sum(), image)  # of the pixels only: weights get no gradient
                trace.append(losses.detach())
                before = image.detach().clone() if tolerance is not None else image
                image.grad = gaussian_blur(gradient, self.blur)
                optimiser.step()
                with torch.no_grad():
                    if self.bounds:
                        image.clamp_(low, high)
                    if tolerance is not None:
                        image.copy_(torch.where(moving[:, None, None, None], image, before))
                bar.advance(task)
                if on_step is not None and _stops(on_step, step, trace[-1]):
                    stopped = step < steps
                    break
                if tolerance is not None and step % WINDOW == 0 and step >= 2 * WINDOW:
                    moving &= _changes(torch.stack(trace[-2 * WINDOW :]), tolerance).to(moving.device)
                    if not bool(moving.any()):
                        break
        table = torch.stack(trace).cpu().double()
        _warn_about_divergence(table)
        if snapshots:  # the end, also if the loop ended early
            frames[len(trace)] = _to_cpu(image)
        kept = torch.stack(list(frames.values())) if frames else None
        images, converged, taken = image.detach().contiguous(), ~moving.cpu(), len(trace)
        return Perturbed(images, table, kept, tuple(frames), toward, split, taken, stopped, converged, self.mean, self.std)

    def _copy(self, images: Tensor) -> Tensor:
        """A copy that is precise enough for many small steps."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.detach().to(output_dtype(images), memory_format=layout, copy=True)

    def _limits(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Black and white in normalised pixels, (3, 1, 1)."""
        mean, std = (torch.tensor(v, dtype=like.dtype).view(-1, 1, 1) for v in (self.mean, self.std))
        return ((0 - mean) / std).to(like.device), ((1 - mean) / std).to(like.device)

    def _check_eval_mode(self) -> None:
        for part, parent in (("backbone", self.model.backbone), ("head", self.model.head)):
            for name, module in parent.named_modules(prefix=part):
                if module.training:
                    problem = f"must not be in training mode ('{name}'): batch statistics would couple the images"
                    raise ArgumentError("model", problem, remedy="call model.eval() first")

    def _check_images(self, images: Tensor, name: str) -> Tensor:
        check_floating(images, name)
        if images.ndim != 4 or len(images) == 0:
            raise ArgumentError(name, "must be images (B, 3, H, W)", tuple(images.shape), "use x.unsqueeze(0)")
        finite = images.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            raise ArgumentError(name, f"has NaN or infinity in images {(~finite).nonzero().flatten().tolist()}")
        if not self.bounds:
            return images
        channels = images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels:
            problem = f"needs mean and std for {channels} channels, got {self.mean} and {self.std}"
            raise ArgumentError("bounds", problem, remedy="set them in model.pretrained_cfg, or use bounds=False")
        low, high = self._limits(images.new_empty(0, dtype=output_dtype(images)))
        slack = _SLACK * (high - low)
        if bool(((images < low - slack) | (images > high + slack)).any()):
            problem = f"has values outside of valid RGB, from {images.amin().item():.3g} to {images.amax().item():.3g}"
            remedy = f"pass (RGB − mean)/std, mean {self.mean}, std {self.std}, RGB from 0 to 1, or set {{bounds}}=False"
            raise ArgumentError(name, problem, remedy=remedy)
        return images


def _to_cpu(images: Tensor) -> Tensor:
    return images.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)


def rank_and_size() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) without ``torch.distributed``."""
    joined = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)


def _check_direction(toward: str) -> None:
    if toward not in DIRECTIONS:
        raise UnknownName("direction", toward, DIRECTIONS)


def _stops(on_step: OnStep, step: int, losses: Tensor) -> bool:
    try:
        return on_step(step, losses) is False
    except StopIteration:
        return True


def _changes(recent: Tensor, tolerance: float) -> Tensor:
    """(2 · WINDOW, B) → (B,): whether the means of both windows differ; NaN always does."""
    first, second = recent.unflatten(0, (2, WINDOW)).mean(1)
    return ~((second - first).abs() <= tolerance * torch.maximum(first.abs(), second.abs()))


def _warn_about_empty_part(aim: SplitCovariance, split: int) -> None:
    empty, d = int((aim.small.abs().amax((-2, -1)) == 0).sum()), aim.small.shape[-1]
    if empty:
        reason = f"their {d} channels have at most {split} eigenvalues above 0"
        remedy = "use a smaller split, larger images, or a model with last_stride=1"
        warnings.warn(f"P_S is 0 in {empty} of {len(aim.small)} images, because {reason}: {remedy}", stacklevel=3)


def _warn_about_divergence(losses: Tensor) -> None:
    bad = ~losses.isfinite()
    if bool(bad.any()):
        images, first = bad.any(0).nonzero().flatten().tolist(), int(bad.any(1).nonzero()[0])
        message = f"the loss of images {images} is not finite from step {first + 1} on: use a smaller lr, or bounds=True"
        warnings.warn(message, stacklevel=3)
