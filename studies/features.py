r"""Features with a spectrum of one's choice, and the exact gradient of the root of their covariance in closed form.

They are put together from their factors, :math:`X = \sqrt N\, U \Sigma V^T` with centred rows of :math:`V^T`, so nothing
has to be decomposed to know :math:`P = U \Sigma^2 U^T`, its root, or the gradient: the reference for every solver.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """Factors of centred features: U (B, d, d), σ (d) descending with 0 for null directions, Vᵀ (B, d, N), null rows 0."""

    u: Tensor
    sigma: Tensor
    vt: Tensor

    @property
    def positions(self) -> int:
        return self.vt.shape[-1]

    @property
    def features(self) -> Tensor:
        """X (B, d, N)."""
        return math.sqrt(self.positions) * (self.u * self.sigma) @ self.vt

    def root_gradient(self, grad: Tensor) -> Tensor:
        r"""The gradient with respect to X for a loss on Q = P^½, from the factors alone.

        .. math:: \frac{\partial l}{\partial X} = \frac{2}{\sqrt N} U[(U^T G U) \circ R]V^T, \qquad
           R_{ij} = \frac{\sigma_j}{\sigma_i + \sigma_j}

        Args:
            grad: symmetric G = ∂l/∂Q, (B, d, d).
        """
        total = self.sigma[:, None] + self.sigma
        ratios = torch.where(total > 0, self.sigma / torch.where(total > 0, total, 1.0), 0.0)
        inner = (self.u.mT @ grad @ self.u) * ratios
        return 2 / math.sqrt(self.positions) * (self.u @ inner @ self.vt)


def _orthonormal_columns(matrix: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(matrix)[0]
    return q


def with_spectrum(sigma: Tensor, positions: int, samples: int, generator: torch.Generator) -> Factors:
    """Random factors with the singular values ``sigma`` (d), descending; at most N − 1 of them may be above 0."""
    d, rank = len(sigma), int((sigma > 0).sum())
    if rank > positions - 1:
        raise ValueError(
            f"centred features of {positions} positions have rank {positions - 1} at most, got {rank} values > 0"
        )
    u = torch.randn(samples, d, d, generator=generator, dtype=torch.float64)
    v = torch.randn(samples, positions, rank, generator=generator, dtype=torch.float64)
    v = _orthonormal_columns(v - v.mean(1, keepdim=True))
    vt = torch.cat([v.mT, v.new_zeros(samples, d - rank, positions)], 1)
    return Factors(_orthonormal_columns(u), sigma.double(), vt)


def equal_eigenvalues(d: int, positions: int, samples: int, generator: torch.Generator) -> Factors:
    """Factors of P = I whose eigenvalues are equal to the last bit: channel i is 1 at one position and −1 at another.

    The first position stays 0 in all channels, so that centring changes nothing; the others are shuffled.
    """
    if positions < 2 * d + 1:
        raise ValueError(f"{d} equal eigenvalues need at least {2 * d + 1} positions, got {positions}")
    vt = torch.zeros(samples, d, positions, dtype=torch.float64)
    channels = torch.arange(d)
    for sample in vt:
        shuffled = 1 + torch.randperm(positions - 1, generator=generator)
        sample[channels, shuffled[:d]] = math.sqrt(0.5)
        sample[channels, shuffled[d : 2 * d]] = -math.sqrt(0.5)
    return Factors(torch.eye(d, dtype=torch.float64).expand(samples, d, d), torch.ones(d, dtype=torch.float64), vt)
