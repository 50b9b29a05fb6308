"""EigenPerturbation: images changed, weights frozen, until their covariance holds large or small eigenvalues alone."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from eigengrain.errors import UnknownName
from eigengrain.functional import covariance, eigh
from eigengrain.functional.inputs import check_floating, check_square, output_dtype
from eigengrain.functional.subsets import small_part
from eigengrain.heads import CovarianceHead
from eigengrain.models import CovarianceNet
from eigengrain.progress import progress_bar

TOWARD = ("large", "small")
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}

#: steps whose losses are averaged before two averages are compared, so that an oscillating loss is seen to stand still
WINDOW = 20

#: values so far outside of 0 to 1 (in RGB) are the rounding of half precision; what is further was not normalised
_SLACK = 0.01

OnStep = Callable[[int, Tensor], bool | None]


class SplitCovariance(NamedTuple):
    """P as the sum of what its largest and its smallest eigenvalues hold (Eq. 10), each (*, d, d)."""

    large: Tensor
    small: Tensor


def split_covariance(P: Tensor, split: int) -> SplitCovariance:
    r"""A covariance parted by its eigenvalues (Eq. 10).

    .. math:: P_L = U \Lambda_L U^T, \quad P_S = U \Lambda_S U^T, \qquad
       \Lambda_L = (\lambda_1, …, \lambda_t, 0, …, 0), \quad \Lambda_S = (0, …, 0, \lambda_{t+1}, …, \lambda_d)

    Eigenvalues up to :math:`d\,\varepsilon\,\lambda_1` are rounding and count as 0. No gradient is recorded.

    Args:
        P: (*, d, d), symmetric positive semi-definite.
        split: t, the number of eigenvalues that count as large.

    Raises:
        ValueError: if the shape is not square, or ``split`` is not within 1 … d − 1.

    Example:
        >>> split_covariance(torch.diag(torch.tensor([1.0, 4.0, 2.0])), 1).small.diagonal()
        tensor([1., 0., 2.])
    """
    check_square(P, "split_covariance")
    d = P.shape[-1]
    if isinstance(split, bool) or not isinstance(split, int) or not 1 <= split < d:
        remedy = f"split={d - small_part(d)} keeps about the paper's share, 206 of 256" if d > 1 else "use more channels"
        raise ValueError(
            f"split must be a whole number from 1 to d − 1, where the covariance has d = {d} eigenvalues, got {split!r}: "
            f"{remedy}"
        )
    values, vectors = eigh(P.detach())
    values = torch.where(values > d * torch.finfo(values.dtype).eps * values[..., :1], values, 0.0)
    parts = (vectors * values.unsqueeze(-2)).split([split, d - split], -1)
    rows = vectors.mT.split([split, d - split], -2)
    return SplitCovariance(*(part @ row for part, row in zip(parts, rows, strict=True)))


def perturbation_loss(M: Tensor, P_L: Tensor, P_S: Tensor, toward: str) -> Tensor:
    r"""What an image is changed by: :math:`l_1` (Eq. 11) for ``large``, :math:`l_2` (Eq. 12) for ``small``.

    .. math:: l_1 = \|M - P_L\|_F^2, \qquad
       l_2 = -\|M - P_L\|_F^2 + \|M - P_S\|_F^2
           = 2\langle M, P_L - P_S\rangle - \|P_L\|_F^2 + \|P_S\|_F^2

    The last form (Eq. 13) is evaluated: nothing cancels in it, and it shows that :math:`l_2` is linear in M.

    Args:
        M: covariance of the image, (*, d, d).
        P_L: what to approach for ``large`` and to leave for ``small``, (*, d, d).
        P_S: what to approach for ``small``; not used for ``large``.
        toward: ``large`` or ``small``.

    Returns:
        one number a matrix, (*).

    Raises:
        ValueError: for another ``toward``, with the near match.

    Example:
        >>> large, small = torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 1.0]))
        >>> perturbation_loss(large + small, large, small, "large"), perturbation_loss(small, large, small, "small")
        (tensor(1.), tensor(-10.))
    """
    if toward not in TOWARD:
        raise UnknownName("direction toward", toward, TOWARD)
    if toward == "large":
        return (M - P_L).square().sum((-2, -1))
    constant = P_S.square().sum((-2, -1)) - P_L.square().sum((-2, -1))
    return 2 * (M * (P_L - P_S)).sum((-2, -1)) + constant


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Images (B, C, H, W) blurred by a Gaussian of ``sigma`` pixels, cut at 3σ and mirrored at the border; 0 does nothing.

    Raises:
        ValueError: if 3σ reaches across the image, so that the border has nothing to mirror.

    Example:
        >>> line = torch.zeros(1, 1, 5, 5).index_fill(3, torch.tensor(2), 1000.0)
        >>> gaussian_blur(line, 0.5)[0, 0, 0].round()
        tensor([  1., 106., 787., 106.,   1.])
    """
    if sigma == 0:
        return images
    radius, channels = math.ceil(3 * sigma), images.shape[1]
    if radius >= min(images.shape[-2:]):
        raise ValueError(
            f"a blur of {sigma:g} pixels reaches {radius} to each side, too far for images of {images.shape[-2]} × "
            f"{images.shape[-1]}: use blur={(min(images.shape[-2:]) - 1) / 3:.3g} or less"
        )
    offsets = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    weights = torch.softmax(-(offsets**2) / (2 * sigma**2), 0).expand(channels, 1, 1, -1)
    images = F.pad(images, (radius,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(images, weights, groups=channels), weights.mT, groups=channels)


@dataclass(frozen=True, eq=False)
class Perturbed:
    """What became of a batch of images. All images in it are in normalised pixels, see :class:`EigenPerturbation`.

    Attributes:
        images: (B, 3, H, W), on the device of the model.
        losses: (steps_taken, B), float64, on the CPU; row k is the loss before update k + 1, so row 0 is that of the start.
        snapshots: (k, B, 3, H, W) on the CPU, or None if none were asked for.
        snapshot_steps: the number of updates that each snapshot has had; the last is ``steps_taken``.
        toward: ``large`` or ``small``.
        split: eigenvalues that counted as large.
        steps_taken: updates made.
        stopped: whether ``on_step`` ended the work before its time.
        converged: (B,), on the CPU: which images were held still because their loss no longer changed; all False without
            ``tolerance``.
        mean: of red, green and blue, that brings the images back to RGB: ``images * std + mean``.
        std: the same for the standard deviation.
    """

    images: Tensor
    losses: Tensor
    snapshots: Tensor | None
    snapshot_steps: tuple[int, ...]
    toward: str
    split: int
    steps_taken: int
    stopped: bool
    converged: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]


class EigenPerturbation:
    r"""Changes an image, with the weights frozen, until its covariance shows the large or the small eigenvalues alone.

    With :math:`P = P_L + P_S` the covariance of the original image's features, parted after its largest t eigenvalues,
    and M that of the changed image, every step goes down the gradient in the pixels of

    .. math:: l_1 = \|M - P_L\|_F^2 \ \text{(toward large)}, \qquad
       l_2 = -\|M - P_L\|_F^2 + \|M - P_S\|_F^2 \ \text{(toward small)}

    (Eqs. 10–12). P and M are what the head itself pools: the covariance of its reduced map, before any normalisation. The
    images of a batch do not meet: each has a loss of its own, and a batch gives what its images give one by one.

    **What Proposition 1 can mean.** :math:`l_2 = 2\langle M, P_L - P_S\rangle + C` is linear in M. So (1) over all
    covariances it has no minimum: :math:`M = c P_S` lowers it without end as c grows. (2) Over positive semi-definite M of
    one norm :math:`\|M\|_F` the minimum is at :math:`M \propto P_S`, because :math:`P_S` is the projection of
    :math:`P_S - P_L` on that cone; this is the proposition's statement. (3) Over those of one trace it is at
    :math:`M \propto u_{t+1} u_{t+1}^T`, of rank one. No network makes every M; what holds :math:`l_2` in practice are
    the bounds of the pixels, which are therefore on by default.

    **What the paper leaves open**, and what is done here. The *optimiser* is not named: Adam by default, whose steps do not
    depend on the scale of the features, as those of SGD do. The *pixels* that a rate of 0.1 is measured in are the
    normalised ones that the network sees, (RGB − mean)/std with mean and std of ``model.pretrained_cfg``: about 6 of 256
    grey levels. The *start* is the image itself ("perturb the input images"). There M = P, so that
    :math:`l_1 = \|P_S\|_F^2` is next to its minimum 0 before anything is done, and the first steps of 0.1 lead far away
    before later ones come back: look at ``losses``. To see what :math:`P_L` holds by itself, give another ``start``;
    to stay near the image, a smaller ``lr``.

    Args:
        model: in evaluation mode, with a covariance head. Nothing of it is changed: no mode, hook, ``requires_grad`` or
            ``grad``.
        optimiser: ``adam`` or ``sgd``, with torch's other defaults.
        lr: learning rate in normalised pixels; the paper has 0.1.
        bounds: hold the pixels within valid RGB after every step.
        jitter: shift the image by up to so many pixels in each direction, cyclically, anew at every step; one shift serves
            the whole batch. Patterns of single pixels then do not pay.
        blur: standard deviation, in pixels, of a Gaussian that smooths the gradient. The image itself is never blurred, as
            every step would then take away some of its own detail.
        seed: of the shifts.
        amp: ``torch.bfloat16`` runs the network in autocast; the covariance and the loss are in float64 outside of it.
            P is rounded as M is, so they compare, but small eigenvalues feel it: on one ResNet-50, P changed by 2 %
            and :math:`P_S` by a third.
        channels_last: memory format of the images.

    Raises:
        ValueError: if the head has no covariance or an option is out of its range.

    Example:
        >>> from eigengrain.models import create_model
        >>> _ = torch.manual_seed(0)
        >>> model = create_model("resnet18", head="mpncov", num_classes=2, reduce=8).eval()
        >>> photo = torch.rand(1, 3, 128, 128)
        >>> result = EigenPerturbation(model).perturb(photo, toward="small", split=5, steps=3, snapshots=2)
        >>> result.losses.shape, result.snapshots.shape, result.snapshot_steps
        (torch.Size([3, 1]), torch.Size([2, 1, 3, 128, 128]), (0, 3))
    """

    def __init__(
        self,
        model: CovarianceNet,
        *,
        optimiser: str = "adam",
        lr: float = 0.1,
        bounds: bool = True,
        jitter: int = 0,
        blur: float = 0.0,
        seed: int = 0,
        amp: torch.dtype | None = None,
        channels_last: bool = False,
    ):
        head = getattr(model, "head", None)
        if head is None:
            raise ValueError(
                f"EigenPerturbation takes a model of create_model, got {type(model).__name__}: take it out of what was put "
                "around it (model.module of DistributedDataParallel)"
            )
        if not isinstance(head, CovarianceHead):
            raise ValueError(
                f"EigenPerturbation needs a model with a covariance head, got {type(head).__name__}, which has none: "
                "create the model with head='mpncov', 'isqrt' or 'logcov', with or without '+seb'"
            )
        if optimiser not in OPTIMISERS:
            raise UnknownName("optimiser", optimiser, OPTIMISERS)
        if not (lr > 0 and math.isfinite(lr)):
            raise ValueError(f"lr must be a number above 0, got {lr!r}")
        if isinstance(jitter, bool) or not isinstance(jitter, int) or jitter < 0:
            raise ValueError(f"jitter must be a whole number of pixels, 0 for none, got {jitter!r}")
        if not (blur >= 0 and math.isfinite(blur)):
            raise ValueError(f"blur must be a number of pixels, 0 for none, got {blur!r}")
        if amp not in (None, torch.bfloat16):
            raise ValueError(
                f"amp must be None or torch.bfloat16, got {amp!r}: the gradients of pixels are too small for float16"
            )
        for name in ("mean", "std"):
            if name not in model.pretrained_cfg:
                raise ValueError(f"the model does not say the {name} of its pixels: set model.pretrained_cfg[{name!r}]")
        self.model = model
        self.optimiser, self.lr, self.bounds, self.jitter, self.blur = optimiser, lr, bounds, jitter, blur
        self.seed, self.amp, self.channels_last = seed, amp, channels_last
        self.mean: tuple[float, ...] = tuple(model.pretrained_cfg["mean"])
        self.std: tuple[float, ...] = tuple(model.pretrained_cfg["std"])

    def covariance(self, images: Tensor) -> Tensor:
        """Covariance (B, d, d) of the head's reduced features, float64, differentiable: M, or P of an original image."""
        weight = next(self.model.parameters())
        if images.device != weight.device:
            raise ValueError(f"the images are on {images.device} and the model on {weight.device}: move one with .to(…)")
        with torch.autocast(images.device.type, dtype=self.amp, enabled=self.amp is not None):
            features = self.model.head.reduce(self.model.forward_features(images.to(weight.dtype)))
        # MPS has no float64
        return covariance(features, dtype=torch.float32 if images.device.type == "mps" else torch.float64)

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
        """Change images so that their covariance goes toward its large or its small eigenvalues.

        Args:
            x: images (B, 3, H, W), normalised as the model wants them; they are not changed.
            toward: ``large`` for :math:`P_L`, ``small`` for :math:`P_S` and away from :math:`P_L`.
            split: eigenvalues that count as large; the paper has 206 of 256.
            steps: updates at most.
            tolerance: hold an image still once its loss, averaged over 20 steps, differs from the average of the 20 before
                by no more than this part of the larger one; when all are held, the work ends. None makes all steps.
            snapshots: images kept on the way, at evenly spaced steps from the start to the end (1: the end alone).
            progress: show a bar, on the first process and on a terminal only.
            on_step: called after every update with the number of updates made and the losses (B,) before it, which are on
                the device: to read them there waits for it. It ends the work by returning False or raising StopIteration.
            start: images of x's shape to start from, in place of x, whose covariance stays the aim.

        Returns:
            the images, their losses and the snapshots, also after an early end.

        Raises:
            ValueError: if the model is in training mode, x is no batch of normalised images, ``toward`` is unknown,
                ``split`` is not within 1 … d − 1, or a number is out of its range.
        """
        self._check_evaluation_mode()
        x = self._check_images(x, "x")
        begin = x if start is None else self._check_images(start, "start")
        if begin.shape != x.shape:
            raise ValueError(f"start must have the shape of x, {tuple(x.shape)}, got {tuple(begin.shape)}")
        if toward not in TOWARD:
            raise UnknownName("direction toward", toward, TOWARD)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
        if tolerance is not None and not tolerance >= 0:
            raise ValueError(f"tolerance must be None or a number of at least 0, got {tolerance!r}")
        film = _Film(steps, snapshots)
        # whatever the caller switched off: a gradient is what this is about
        with torch.inference_mode(False), torch.enable_grad():
            return self._walk(x, begin, toward, split, steps, tolerance, film, progress, on_step)

    def _walk(
        self,
        x: Tensor,
        begin: Tensor,
        toward: str,
        split: int,
        steps: int,
        tolerance: float | None,
        film: "_Film",
        progress: bool,
        on_step: OnStep | None,
    ) -> Perturbed:
        with torch.no_grad():
            aim = split_covariance(self.covariance(self._own(x)), split)
        _warn_of_empty_part(aim, split)
        image = self._own(begin).requires_grad_()
        optimiser = OPTIMISERS[self.optimiser]([image], lr=self.lr)
        low, high = self._limits(image)
        moving = torch.ones(len(image), dtype=torch.bool, device=image.device)
        trace: list[Tensor] = []  # stays on the device: to look at a loss at every step would make the device wait
        stopped = False
        film.look(0, image)
        with _bar(f"toward {toward}", steps, progress) as advance:
            for step, shift in enumerate(self._shifts(steps), start=1):
                seen = torch.roll(image, shift, (2, 3)) if self.jitter else image
                losses = perturbation_loss(self.covariance(seen), *aim, toward)
                (gradient,) = torch.autograd.grad(losses.sum(), image)  # of the pixels alone: no weight gets a gradient
                trace.append(losses.detach())
                before = image.detach().clone() if tolerance is not None else image
                image.grad = gaussian_blur(gradient, self.blur)
                optimiser.step()
                with torch.no_grad():
                    if self.bounds:
                        image.clamp_(low, high)
                    if tolerance is not None:
                        image.copy_(torch.where(moving[:, None, None, None], image, before))
                film.look(step, image)
                advance()
                if on_step is not None and _asks_to_stop(on_step, step, trace[-1]):
                    stopped = step < steps
                    break
                if tolerance is not None and step % WINDOW == 0 and step >= 2 * WINDOW:
                    moving &= _changes(torch.stack(trace[-2 * WINDOW :]), tolerance)
                    if not bool(moving.any()):
                        break
        table = torch.stack(trace).cpu().double()
        _warn_of_divergence(table)
        film.close(len(trace), image)
        return Perturbed(
            images=image.detach().contiguous(),
            losses=table,
            snapshots=film.frames(),
            snapshot_steps=tuple(film.steps),
            toward=toward,
            split=split,
            steps_taken=len(trace),
            stopped=stopped,
            converged=~moving.cpu(),
            mean=self.mean,
            std=self.std,
        )

    def _own(self, images: Tensor) -> Tensor:
        """A copy of ours, precise enough for many small steps."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.detach().to(output_dtype(images), memory_format=layout, copy=True)

    def _limits(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Black and white in normalised pixels, (3, 1, 1)."""
        mean, std = (torch.tensor(v, dtype=like.dtype).view(-1, 1, 1) for v in (self.mean, self.std))
        return ((0 - mean) / std).to(like.device), ((1 - mean) / std).to(like.device)

    def _shifts(self, steps: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(-self.jitter, self.jitter + 1, (steps, 2), generator=generator).tolist()

    def _check_evaluation_mode(self) -> None:
        for part in ("backbone", "head"):
            for name, module in getattr(self.model, part).named_modules(prefix=part):
                if module.training:
                    raise ValueError(
                        f"the model is in training mode ('{name}'), where batch statistics couple the images and "
                        "change with every step: call model.eval() first"
                    )

    def _check_images(self, images: Tensor, name: str) -> Tensor:
        check_floating(images, f"perturb, {name}:")
        if images.ndim != 4 or len(images) == 0:
            raise ValueError(f"{name} must be images (B, 3, H, W), got shape {tuple(images.shape)}: add x.unsqueeze(0)")
        finite = images.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            raise ValueError(f"{name} holds NaN or infinity in images {(~finite).nonzero().flatten().tolist()}")
        if not self.bounds:
            return images
        channels = images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(
                f"bounds need a mean and std for each of {channels} channels, got {self.mean} and {self.std}: set them in "
                "model.pretrained_cfg, or use bounds=False"
            )
        low, high = self._limits(images.new_empty(0, dtype=output_dtype(images)))
        slack = _SLACK * (high - low)
        if bool(((images < low - slack) | (images > high + slack)).any()):
            raise ValueError(
                f"{name} has values from {images.amin().item():.3g} to {images.amax().item():.3g}, outside of valid RGB: "
                f"give (RGB − mean)/std with RGB from 0 to 1, mean {self.mean} and std {self.std}, or use bounds=False"
            )
        return images


class _Film:
    """Copies of the images at evenly spaced steps, on the CPU, so that a long film does not fill the device."""

    def __init__(self, steps: int, count: int):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= steps + 1:
            raise ValueError(f"snapshots must be a whole number from 0 to steps + 1 = {steps + 1}, got {count!r}")
        self.planned = {round(k * steps / (count - 1)) for k in range(count)} if count > 1 else {steps} if count else set()
        self.steps: list[int] = []
        self._frames: list[Tensor] = []

    def look(self, step: int, images: Tensor) -> None:
        if step in self.planned:
            self.steps.append(step)
            self._frames.append(images.detach().to("cpu", memory_format=torch.contiguous_format, copy=True))

    def close(self, step: int, images: Tensor) -> None:
        """After an early end the last images stand for those that were planned and never came."""
        if self.planned and self.steps[-1:] != [step]:
            self.planned.add(step)
            self.look(step, images)

    def frames(self) -> Tensor | None:
        return torch.stack(self._frames) if self._frames else None


def _asks_to_stop(on_step: OnStep, step: int, losses: Tensor) -> bool:
    try:
        return on_step(step, losses) is False
    except StopIteration:
        return True


def _changes(recent: Tensor, tolerance: float) -> Tensor:
    """(2 · WINDOW, B) → (B,): whether the mean of the second window differs from that of the first, as NaN always does."""
    first, second = recent.unflatten(0, (2, WINDOW)).mean(1)
    return ~((second - first).abs() <= tolerance * torch.maximum(first.abs(), second.abs()))


def _warn_of_empty_part(aim: SplitCovariance, split: int) -> None:
    empty = int((aim.small.abs().amax((-2, -1)) == 0).sum())
    if empty:
        _warn(
            f"P_S is 0 in {empty} of {len(aim.small)} images: their covariance of {aim.small.shape[-1]} channels has no "
            f"more than {split} eigenvalues above 0, so P_L is all of it and nothing is left to part: use a smaller split, "
            "larger images, or a model with last_stride=1"
        )


def _warn_of_divergence(losses: Tensor) -> None:
    bad = ~losses.isfinite()
    if bool(bad.any()):
        images = bad.any(0).nonzero().flatten().tolist()
        first = int(bad.any(1).nonzero()[0])
        _warn(f"the loss of images {images} is not finite from step {first + 1} on: use a smaller lr, or bounds=True")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)  # at the call of perturb


@contextmanager
def _bar(description: str, steps: int, show: bool) -> Iterator[Callable[[], None]]:
    """A function that moves the bar by one step."""
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    bar = progress_bar()
    bar.disable = bar.disable or not (show and first)
    with bar:
        task = bar.add_task(description, total=steps)
        yield lambda: bar.advance(task)
