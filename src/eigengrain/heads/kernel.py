"""Kernel pooling: features whose inner products approximate a Taylor series kernel, averaged over an image."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigengrain.errors import ArgumentError
from eigengrain.functional.inputs import check_features, check_integer, output_dtype, to_compute
from eigengrain.heads.base import Head
from eigengrain.heads.compact import TensorSketch
from eigengrain.heads.layers import check_positive, smooth_signed_sqrt, unit
from eigengrain.heads.registry import register_head


def gaussian_coefficients(gamma: float, order: int) -> Tensor:
    r"""Coefficients α of the Gaussian kernel of unit vectors as a Taylor series, (order + 1,) in float64.

    .. math:: e^{-\gamma\|x-y\|^2} = e^{2\gamma(\langle x,y\rangle - 1)} = \sum_i \alpha_i^2 \langle x,y\rangle^i, \qquad
       \alpha_i^2 = e^{-2\gamma}\,\frac{(2\gamma)^i}{i!}

    Example:
        >>> gaussian_coefficients(0.5, 2).square() * math.e
        tensor([1.0000, 1.0000, 0.5000], dtype=torch.float64)
    """
    degree = torch.arange(order + 1, dtype=torch.float64)
    return torch.exp((degree * math.log(2 * gamma) - torch.lgamma(degree + 1) - 2 * gamma) / 2)


def suggest_gamma(x: Tensor) -> float:
    r"""The paper's γ of :class:`KernelPooling` for the features of some images, (B, C, H, W) or (B, C, N).

    It is one over their mean inner product within an image, after ℓ2 normalisation; at least 1, because the mean inner
    product of unit vectors is at most 1.

    Example:
        >>> suggest_gamma(torch.ones(1, 3, 2, 2))
        1.0
    """
    check_features(x)
    # the mean of all inner products is the squared length of the mean vector
    mean = float(unit(to_compute(x.detach()).flatten(2).mT).mean(-2).square().sum(-1).mean())
    if not mean > 0:
        raise ArgumentError("x", "must not have a mean of zero in every image", remedy="pass more images")
    return max(1.0, 1 / mean)


@register_head("kp")
class KernelPooling(Head):
    r"""Kernel pooling: the mean over positions of a compact feature map of a Taylor series kernel, then power and ℓ2 norm.

    .. math:: y = \frac1N \sum_n \big[\alpha_0,\; \alpha_1 x_n,\; \alpha_2 \phi_2(x_n),\; …,\; \alpha_p \phi_p(x_n)\big],
       \qquad \langle y, y'\rangle \approx
       \frac{1}{N N'} \sum_{n, n'} \sum_{i=0}^{p} \alpha_i^2 \langle x_n, x'_{n'}\rangle^i

    :math:`x_n` are the features with ℓ2 norm 1 (zero stays zero) and :math:`\phi_i` tensor sketches of order i, so the
    error of the inner product falls as one over the root of their size. α is initialised to that of the Gaussian kernel
    :math:`e^{-\gamma\|x-y\|^2}`, see :func:`gaussian_coefficients`. Signed square root and ℓ2 norm of y follow.

    Orders above 2 need memory for B·N·size numbers per factor.

    Args:
        in_channels, reduce: as in :class:`Head`.
        order: p, the order of the series.
        sizes: lengths of the sketches of order 2 … p: one number for all of them (4096 gives 12,801 features at order 4
            and 512 channels), or p − 1 numbers.
        gamma: γ of the Gaussian. The paper uses one over the mean inner product of the features, at least 1, which
            :func:`suggest_gamma` computes.
        learnable: train α together with the network, as in the paper; otherwise it stays fixed.
        seed: seed of the sketches, which are saved with the state of the head.
        eps: ε of the square root, see :func:`smooth_signed_sqrt`.

    Example:
        >>> KernelPooling(64, sizes=512)(torch.rand(2, 64, 3, 3)).shape
        torch.Size([2, 1601])

    References:
        Cui, Zhou, Wang, Liu, Lin and Belongie, Kernel Pooling for Convolutional Neural Networks, CVPR 2017.
    """

    quadratic = False

    alpha: Tensor

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        order: int = 4,
        sizes: int | list[int] | tuple[int, ...] = 4096,
        gamma: float = 1.0,
        learnable: bool = True,
        seed: int = 0,
        eps: float = 1e-6,
    ):
        super().__init__(in_channels, reduce)
        check_integer(order, "order")
        if not 0 < gamma <= 50:
            remedy = "a series of order p approximates the Gaussian only if 2·gamma is not much larger than p"
            raise ArgumentError("gamma", "must be above 0 and at most 50", gamma, remedy)
        check_positive(eps)
        lengths = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes] * (order - 1)
        if len(lengths) != order - 1:
            problem = f"must be one number, or {order - 1} numbers for order {order}, one per order from 2 on"
            raise ArgumentError("sizes", problem, sizes)
        for length in lengths:
            check_integer(length, "sizes")
        self.order, self.gamma, self.eps = order, gamma, eps
        self.out_features = 1 + self.channels + sum(lengths)
        # one seed per order: with a shared seed their first factors would collide in the same channels
        self.sketches = nn.ModuleList(
            TensorSketch(self.channels, length, order=i, seed=seed + i) for i, length in enumerate(lengths, 2)
        )
        alpha = gaussian_coefficients(gamma, order).to(torch.get_default_dtype())
        if learnable:
            self.alpha = nn.Parameter(alpha)
        else:
            self.register_buffer("alpha", alpha)

    def feature_map(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, out_features): the mean of the feature map, whose inner products are the kernel."""
        x = unit(x.to(output_dtype(x)).flatten(2).mT)  # (B, N, C)
        terms = [x.new_ones(x.shape[0], 1), x.mean(-2)]
        terms += [sketch.pool(x) / x.shape[-2] for sketch in self.sketches]  # type: ignore[operator]
        return torch.cat([a * term for a, term in zip(self.alpha.to(x.dtype), terms, strict=True)], -1)

    def pool(self, x: Tensor) -> Tensor:
        return F.normalize(smooth_signed_sqrt(self.feature_map(x), self.eps), dim=-1)

    def extra_repr(self) -> str:
        return f"order={self.order}, gamma={self.gamma}"
