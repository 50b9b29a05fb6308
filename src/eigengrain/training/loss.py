"""The loss of a training: cross-entropy with label smoothing, class weights, mixup and cutmix of timm, and SnapMix."""

from collections.abc import Callable, Sequence

from eigengrain import _torchvision  # noqa: F401  isort: skip

import numpy as np
import torch
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor
from torch.nn.functional import cross_entropy

from eigengrain.data.sampler import seeded
from eigengrain.heads import LossTerms
from eigengrain.training.snapmix import draw_box, snapmix

#: images and labels -> how much each pixel contributes to the score of its label (B, H, W)
Maps = Callable[[Tensor, Tensor], Tensor]


class Loss:
    """Mean cross-entropy of a batch, and what the head adds to it.

    Args:
        counts: number of training images of each class.
        label_smoothing: fraction of the target that is spread over all classes.
        balance: weight the images so that all classes have the same total weight and the mean weight is 1.
        mixup, cutmix: parameters of the beta distributions of timm; 0 for none. With both, each batch uses one of them.
        snapmix: parameter of the beta distribution of :mod:`eigengrain.training.snapmix`; 0 for none.
        mix_probability: fraction of the batches that are mixed.
        seed: seed of the mixing.
        maps: for snapmix: function from images and labels to maps (B, H, W), at least 0.

    Example:
        >>> loss, scores = Loss([3, 1], balance=True), torch.zeros(4, 2)
        >>> loss.weights.tolist(), round(float(loss(scores, torch.tensor([0, 0, 0, 1]))), 4)
        ([0.6666666865348816, 2.0], 0.6931)
        >>> images, shares = Loss([1, 1], mixup=1.0).mix(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.tensor([0, 1]))
        >>> torch.allclose(images.flatten(), shares[:, 1])
        True
    """

    def __init__(
        self,
        counts: Sequence[int],
        *,
        label_smoothing: float = 0.0,
        balance: bool = False,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        snapmix: float = 0.0,
        mix_probability: float = 1.0,
        seed: int = 0,
        maps: Maps | None = None,
    ):
        self.classes, self.label_smoothing, self.seed = len(counts), label_smoothing, seed
        number = torch.tensor(counts, dtype=torch.float32)
        weights = number.sum() / (number.count_nonzero() * number)
        self.weights = weights.where(number > 0, 0) if balance else None
        options = {"prob": mix_probability, "label_smoothing": label_smoothing, "num_classes": len(counts)}
        self._mixup = Mixup(mixup, cutmix, **options) if mixup or cutmix else None
        self.snapmix, self.mix_probability, self._maps = snapmix, mix_probability, maps

    def mix(self, images: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        """Mix each image of a batch with another one, in place, as the key determines.

        Returns:
            the images, and the labels (B,); with mixing, the smoothed shares of the classes, (B, classes). With mixup and
            cutmix, the last of an odd number of images is not mixed.
        """
        if self.snapmix:
            return self._snapmix(images, labels, *key)
        if self._mixup is None:
            return images, labels
        even = len(images) // 2 * 2
        with seeded(self.seed, *key, 11):  # 11 separates it from other uses of the same seed
            mixed, shares = self._mixup(images[:even], labels[:even])
        if even == len(images):
            return mixed, shares
        return torch.cat((mixed, images[even:])), torch.cat((shares, self._smoothed(labels[even:])))

    def _snapmix(self, images: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        assert self._maps is not None
        height, width = images.shape[2:]
        with seeded(self.seed, *key, 11):
            if np.random.rand() >= self.mix_probability:
                return images, labels
            box, source = draw_box(height, width, self.snapmix), draw_box(height, width, self.snapmix)
        images, own, partner = snapmix(images, self._maps(images, labels), box, source)
        shares = self._smoothed(labels)
        return images, own[:, None] * shares + partner[:, None] * shares.flip(0)

    def _smoothed(self, labels: Tensor) -> Tensor:
        """The shares of the classes (B, classes) in images that are not mixed."""
        shares: Tensor = mixup_target(labels, self.classes, smoothing=self.label_smoothing)
        return shares

    def __call__(self, scores: Tensor, targets: Tensor, added: LossTerms | None = None) -> Tensor:
        """The loss of scores (B, classes) and targets of :meth:`mix`, and of what the head adds."""
        loss = self.cross_entropy(scores, targets)
        for more in () if added is None else added.scores.values():
            loss = loss + self.cross_entropy(more, targets)
        for term in () if added is None else added.terms.values():
            loss = loss + term
        return loss

    def cross_entropy(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of scores (B, classes) and targets of :meth:`mix`."""
        mixed = targets.ndim == 2
        smoothing = 0.0 if mixed else self.label_smoothing  # the shares of mixed images are smoothed already
        targets = targets.to(scores.dtype) if mixed else targets
        if self.weights is None:
            return cross_entropy(scores, targets, label_smoothing=smoothing)
        self.weights = self.weights.to(scores)
        # the weight of an image multiplies its whole smoothed target: weights given to cross_entropy multiply each class of
        # the target, so that an image of a frequent class could pull more towards a rare class than towards its own
        if mixed:
            return cross_entropy(scores, self._weighted(targets))
        # a mean over images, not over weights: the sum over batches and processes must not depend on how images are shared
        return (self.weights[targets] * cross_entropy(scores, targets, label_smoothing=smoothing, reduction="none")).mean()

    def _weighted(self, shares: Tensor) -> Tensor:
        """Smoothed shares (B, classes), with the weight of the class that each part of them is from."""
        assert self.weights is not None
        spread = self.label_smoothing / self.classes
        own = self.weights * (shares - spread * shares.sum(1, keepdim=True))
        return own + spread / (1 - self.label_smoothing) * own.sum(1, keepdim=True)


def hits(scores: Tensor, targets: Tensor) -> Tensor:
    """Number of images whose class, or the class with the largest share in a mixed image, has the highest score."""
    return (scores.detach().argmax(1) == (targets.argmax(1) if targets.ndim == 2 else targets)).sum()
