"""Kernel pooling: features whose inner products are a Taylor series kernel, up to a given order, summed over an image."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigengrain.functional.inputs import check_features, output_dtype
from eigengrain.heads.base import Head
from eigengrain.heads.layers import check_positive, check_whole_number, smooth_signed_sqrt, unit
from eigengrain.heads.registry import register_head
from eigengrain.heads.sketch import TensorSketch


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
    r"""The paper's γ for given features: one over their mean inner product within an image, after ℓ2 normalisation.

    Args:
        x: features of some images, (B, C, H, W) or (B, C, N).

    Returns:
        γ, for :class:`KernelPooling`; at least 1, because no mean inner product of unit vectors is larger.

    Raises:
        ValueError: if the mean inner product is zero, which features that are all zero have.

    Example:
        >>> suggest_gamma(torch.ones(1, 3, 2, 2))
        1.0
    """
    check_features(x, "suggest_gamma")
    # the mean of all inner products is the squared length of the mean vector
    mean = float(unit(x.detach().double().flatten(2).mT).mean(-2).square().sum(-1).mean())
    if not mean > 0:
        raise ValueError("suggest_gamma needs features whose mean is not zero in every image: give it more images")
    return max(1.0, 1 / mean)


@register_head("kp")
class KernelPooling(Head):
    r"""Kernel pooling: the mean over positions of a compact feature map of a Taylor series kernel, then power and ℓ2 norm.

    .. math:: y = \frac1N \sum_n \big[\alpha_0,\; \alpha_1 x_n,\; \alpha_2 \phi_2(x_n),\; …,\; \alpha_p \phi_p(x_n)\big],
       \qquad \langle y, y'\rangle \approx
       \frac{1}{N N'} \sum_{n, n'} \sum_{i=0}^{p} \alpha_i^2 \langle x_n, x'_{n'}\rangle^i

    :math:`x_n` are the features at ℓ2 norm 1 (zero stays zero) and :math:`\phi_i` tensor sketches of order i, so the
    error of the inner product falls as one over the root of the sketches' size. At first α is that of the Gaussian
    kernel :math:`e^{-\gamma\|x-y\|^2}`, see :func:`gaussian_coefficients`. Signed square root and ℓ2 norm of y follow.

    Orders above 2 need memory for B·N·size numbers, once a factor.

    Args:
        in_channels, reduce: as in :class:`Head`.
        order: p, of the series.
        sizes: lengths of the sketches of order 2 … p: one number for all of them (4096 makes 12,801 at order 4
            and 512 channels), or p − 1 numbers.
        gamma: γ of the Gaussian. The paper takes one over the mean inner product of the features, which
            :func:`suggest_gamma` measures; that is at least 1.
        learnable: train α together with the network, as the paper proposes; else it stays the Gaussian's.
        seed: of the sketches, which are saved with the state of the head.
        eps: under the square root, see :func:`smooth_signed_sqrt`.

    Raises:
        ValueError: for an order or sizes below 1, a number of sizes other than p − 1, a gamma outside (0, 50], or an eps
            that is not positive.

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
        check_whole_number("kp", "order", order)
        if not 0 < gamma <= 50:
            raise ValueError(
                f"kp: gamma must be above 0 and at most 50, got {gamma!r}: the series of order p stands for the Gaussian "
                "only while 2·gamma is not much larger than p"
            )
        check_positive("kp", "eps", eps, "the square root has an infinite slope at 0 without it")
        lengths = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes] * (order - 1)
        if len(lengths) != order - 1:
            raise ValueError(
                f"kp of order {order} needs {order - 1} sizes, one for each order from 2 on, got {len(lengths)}: "
                "give one number for all of them, or as many as there are"
            )
        for length in lengths:
            check_whole_number("kp", "sizes", length)
        self.order = order
        self.gamma = gamma
        self.eps = eps
        self.out_features = 1 + self.channels + sum(lengths)
        # a seed of its own for each order: with a shared one their first factors would collide in the same channels
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
