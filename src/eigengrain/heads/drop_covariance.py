"""DropCov: the covariance of gated channels, some of which are dropped in training instead of a normalisation."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigengrain.functional import covariance, triu_vector
from eigengrain.functional.inputs import full_precision, output_dtype
from eigengrain.functional.matrix_products import nonzero
from eigengrain.heads.base import Head
from eigengrain.heads.layers import unit
from eigengrain.heads.registry import register_head


def drop_probability(gate: Tensor, matrix: Tensor) -> Tensor:
    r"""Probability of dropping a channel, from the gates of a batch and the covariances.

    .. math:: p = \mathrm{clamp}\Big(1 - \frac{10}{\log_2 d}\, r,\ 0,\ 1\Big), \qquad
       r = \frac1B \sum_b \cos(y_b, c_b), \qquad c = P \mathbf 1

    The less the gate agrees with the sums of the rows, the more is dropped. Where P is zero the cosine is 0. One channel
    counts as d = 2.

    Args:
        gate: y (B, d).
        matrix: P (B, d, d).

    Returns:
        p, a scalar without gradient.

    Example:
        >>> drop_probability(torch.ones(1, 1024), torch.eye(1024).unsqueeze(0)).round(decimals=4)
        tensor(0.)
        >>> drop_probability(torch.ones(1, 4), torch.zeros(1, 4, 4))
        tensor(1.)
    """
    with torch.no_grad():
        cosine = (unit(gate) * unit(matrix.sum(-1))).sum(-1)
        return (1 - 10 / math.log2(max(gate.shape[-1], 2)) * cosine.mean()).clamp(0, 1)


@register_head("dropcov")
class DropCovariance(Head):
    r"""DropCov: covariance of gated channels, with channel dropout in training; d(d+1)/2 numbers.

    .. math:: y = \mathrm{softmax}(w * \bar x), \qquad \tilde X = X \circ y + X, \qquad
       P = \frac1N (\tilde X - \bar{\tilde X})(\tilde X - \bar{\tilde X})^T

    w is a convolution of width 3 along the channels, :math:`\bar x` the average of the map. In training, channels of
    :math:`\tilde X` are dropped before the covariance, each in each image with the probability p of
    :func:`drop_probability`, and the others are divided by 1 − p, as in ``torch.nn.Dropout2d``. So rows and columns of P
    are dropped:

    .. math:: P_{ij} \to \frac{m_i m_j}{(1-p)^2}\, P_{ij}, \qquad m_i \in \{0, 1\}

    The expected value of an entry off the diagonal is that of evaluation, and an entry on the diagonal is 1/(1 − p) times
    as large on average. With p = 1 everything is zero, also the gradient. p is computed from the batch of each process and
    counts as a constant in the gradient; the mask is drawn by torch's default generator of the device, as in
    ``torch.nn.Dropout2d``. In eval mode nothing is dropped. The covariance is not normalised, so it needs no decomposition
    and is computed in float32 (float64 for float64 features).

    The convolution has no bias, which the softmax would cancel.

    Args:
        in_channels, reduce: as in :class:`Head`.

    Example:
        >>> DropCovariance(64, reduce=16)(torch.rand(2, 64, 7, 7)).shape
        torch.Size([2, 136])

    References:
        Wang et al., DropCov: A Simple yet Effective Method for Improving Deep Architectures, NeurIPS 2022.
    """

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels * (self.channels + 1) // 2
        self.gate = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def gates(self, x: Tensor) -> Tensor:
        """y (B, channels) of a map (B, channels, H, W), in float32 or float64."""
        means = x.mean((2, 3)).unsqueeze(1)
        with full_precision(means):
            return F.conv1d(means, self.gate.weight.to(means.dtype), padding=1).squeeze(1).softmax(-1)

    def matrix(self, x: Tensor) -> Tensor:
        """The covariance (B, channels, channels) of a map (B, channels, H, W), in training with dropped channels."""
        x = x.to(output_dtype(x))
        y = self.gates(x)
        p = covariance(x * y[..., None, None] + x, dtype=x.dtype)
        return self._dropped(p, y) if self.training else p

    def _dropped(self, matrix: Tensor, gate: Tensor) -> Tensor:
        probability = drop_probability(gate, matrix)
        kept = torch.rand_like(gate) >= probability  # rand is in [0, 1): 0 drops nothing and 1 everything
        factor = kept / nonzero(1 - probability)
        return matrix * factor.unsqueeze(-1) * factor.unsqueeze(-2)

    def pool(self, x: Tensor) -> Tensor:
        return triu_vector(self.matrix(x))
