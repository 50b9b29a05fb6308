r"""Calibration of a trained model: the temperature of its probabilities, and the images that it should not answer.

The familiarity of an image compares the mean x of its feature map over the positions with those of training images, which
have the mean :math:`\mu` and the principal directions B, the leading eigenvectors of their covariance:

.. math:: f(x) = 1 - \frac{\|(I - B B^T)(x - \mu)\|}{\|x\|}

The residual outside the principal directions is that of ViM (Wang et al., CVPR 2022), without its classifier.
"""

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eigengrain.errors import ArgumentError
from eigengrain.options import setting

if TYPE_CHECKING:
    from eigengrain.models.model import CovarianceNet


@dataclass(frozen=True)
class Calibration:
    """``calibration`` in ``config.json``; ``CovarianceNet.calibration`` is a dict with these keys.

    Args:
        temperature: T in the probabilities softmax(scores/T).
        familiarity_threshold: images with a smaller :func:`familiarity` are none of the classes.
        accepted: share of the validation images that reach the threshold.
        familiarities: thresholds that 100 %, 99 %, … 1 % of the validation images reach.
        subspace: μ and B of training images, (1 + k, num_features) in float32, as base64.
    """

    temperature: float = setting(1.0, least=1e-6, below=1e6)
    familiarity_threshold: float | None = setting(None, least=-1e9, below=1e9)
    accepted: float = setting(0.95, above=0, most=1)
    familiarities: list[float] | None = setting(None, least=-1e9, below=1e9)
    subspace: str | None = None


def encode_subspace(subspace: Tensor) -> str:
    """A subspace as text for ``config.json``."""
    return base64.b64encode(subspace.detach().cpu().numpy().astype("<f4").tobytes()).decode()


def decode_subspace(text: str, channels: int) -> Tensor:
    """The tensor (1 + k, channels) of a text of :func:`encode_subspace`.

    Raises:
        ArgumentError: if the text is damaged, or its numbers do not fit the number of channels.

    Example:
        >>> decode_subspace(encode_subspace(torch.eye(2, 3)), channels=3).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
    except ValueError as error:
        raise ArgumentError("subspace", f"is damaged ({error})") from None
    if not len(values) or len(values) % channels or not np.isfinite(values).all():
        raise ArgumentError("subspace", f"must be finite numbers for {channels} channels", len(values))
    return torch.from_numpy(values).view(-1, channels)


def familiarity(features: Tensor, subspace: Tensor) -> Tensor:
    """Familiarity (B,) of images by their feature maps (B, C, h, w), at most 1; ``subspace`` is (1 + k, C)."""
    means = features.flatten(2).mean(-1)
    centred, directions = means - subspace[0], subspace[1:]
    rest = centred - (centred @ directions.T) @ directions
    return 1 - rest.norm(dim=-1) / means.norm(dim=-1).clamp_min(1e-6)


class Judged(torch.nn.Module):
    """A model that returns scores, their probabilities at its temperature, and the familiarity if it is calibrated."""

    def __init__(self, model: "CovarianceNet"):
        super().__init__()
        text = (model.calibration or {}).get("subspace")
        self.model = model
        self.subspace: Tensor | None
        subspace = None if text is None else decode_subspace(text, model.num_features)
        self.register_buffer("subspace", subspace if subspace is None else subspace.to(next(model.parameters()).device))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features = self.model.forward_features(x)
        scores = self.model.forward_head(features)
        judged = (scores, (scores / self.model.temperature).softmax(-1))
        return judged if self.subspace is None else (*judged, familiarity(features.float(), self.subspace))
