"""A second classifier on the map of the stage before the last, beside the head."""

import torch
from torch import Tensor, nn

from eigengrain.functional.inputs import check_integer
from eigengrain.heads.base import Reduce


class MidLevel(nn.Module):
    r"""Mid-level branch: class scores from the largest responses of filters on the map of the stage before the last.

    .. math:: z = W \max_p\, \mathrm{ReLU}\big(\mathrm{BN}(F x_p)\big) + b

    x is the map, p its positions, and F a 1 × 1 convolution. The model adds z to the scores of the head; in training, both
    have a cross-entropy of their own, and the branch sends no gradient into the backbone. It is the mid-level branch of
    SnapMix (Huang, Wang and Tao, AAAI 2021).

    Args:
        in_channels: channels of the map.
        channels: number of filters.

    Attributes:
        vector_scale: factor of the vector of largest responses, as in :class:`~eigengrain.models.CovarianceNet`.

    Example:
        >>> branch = MidLevel(in_channels=6, channels=4)
        >>> branch.reset_classifier(3)
        >>> branch(torch.rand(2, 6, 5, 5)).shape
        torch.Size([2, 3])
    """

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        check_integer(channels, "mid_level")
        self.channels = channels
        self.reduce = Reduce(in_channels, channels)
        self.vector_scale: Tensor
        self.register_buffer("vector_scale", torch.ones(()))
        self.classifier: nn.Module = nn.Identity()

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier; an identity for 0 classes."""
        self.classifier = nn.Linear(self.channels, num_classes) if num_classes else nn.Identity()

    def vector(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) → largest responses (B, channels), before ``vector_scale``."""
        largest: Tensor = self.reduce(x).amax((2, 3))
        return largest

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) → scores (B, num_classes)."""
        scores: Tensor = self.classifier(self.vector(x) * self.vector_scale)
        return scores
