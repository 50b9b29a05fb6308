"""Cross-covariance pooling of two projections, with singular value power normalisation (svPN)."""

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError
from eigengrain.functional._autograd import with_gradient
from eigengrain.functional.inputs import check_integer, full_precision, output_dtype
from eigengrain.heads.base import Head
from eigengrain.heads.layers import check_positive, unit
from eigengrain.heads.registry import register_head


def leading_singular_value(matrix: Tensor, start: Tensor, iterations: int) -> Tensor:
    r"""Largest singular value of matrices, which K power iterations approximate from below.

    .. math:: u_k = \frac{P v_{k-1}}{\|P v_{k-1}\|}, \qquad v_k = \frac{P^T u_k}{\|P^T u_k\|}, \qquad s = u_K^T P\, v_K

    The gradient does not go through the iterations: it is :math:`u_K v_K^T`, of norm 1. The largest singular value is a
    maximum over u and v, so its derivatives by them vanish there, and this is its exact gradient once they have converged.

    Args:
        matrix: P (..., p, q), float32 or float64.
        start: :math:`v_0`, (q,) or (..., q).
        iterations: K.

    Returns:
        s (...), 0 for a zero matrix, with a zero gradient.

    Raises:
        SecondOrderError: in a second backward pass.

    Example:
        >>> leading_singular_value(torch.diag(torch.tensor([3.0, 1.0])), torch.ones(2), iterations=20)
        tensor(3.)
    """
    with torch.no_grad(), full_precision(matrix):
        v = start.to(matrix).expand(*matrix.shape[:-2], -1)
        u = v
        for _ in range(iterations):
            u = unit((matrix @ v.unsqueeze(-1)).squeeze(-1))
            v = unit((u.unsqueeze(-2) @ matrix).squeeze(-2))
        slope = u.unsqueeze(-1) * v.unsqueeze(-2)
        value = (u.unsqueeze(-2) @ matrix @ v.unsqueeze(-1)).squeeze((-2, -1))
    return with_gradient(matrix, value, slope, "leading_singular_value")


def cross_covariance_svpn(
    left: Tensor, right: Tensor, start: Tensor, iterations: int = 10, power: float = 0.5, eps: float = 1e-6
) -> Tensor:
    r"""Cross-covariance of two sets of features, normalised by a power of its largest singular value.

    .. math:: P = \frac1N X Y^T, \qquad
       \hat P = s^\alpha u v^T + \frac{P - s\,u v^T}{s^{1-\alpha}} = \frac{P}{s^{1-\alpha}}, \qquad
       s = \sigma_1(P) \to s + \varepsilon

    The leading singular value becomes :math:`s^\alpha`, and the others are divided by :math:`s^{1-\alpha}`. With one
    singular triple the two terms add up to P divided by a number, so only s is computed, by
    :func:`leading_singular_value`. ε bounds the gradient:
    :math:`\|d\hat P\| \le \varepsilon^{\alpha-1}\big(1 + (1-\alpha)\sqrt{\min(p, q)}\big)\|dP\|`.

    Args:
        left: X (..., p, N), float32 or float64.
        right: Y (..., q, N).
        start: start of the power iterations, (q,) or (..., q).
        iterations: number of power iterations.
        power: α in (0, 1]; 1 leaves P as it is.
        eps: ε.

    Returns:
        (..., p, q); zero, with a zero gradient, for features that are zero.
    """
    with full_precision(left):
        # P has the square of the features' scale, and its powers can leave the range of float32; factors are constants,
        # because the function for features times c, with ε times c², is a power of c times the function
        scales = [x.detach().abs().amax((-2, -1), keepdim=True).clamp_min(eps**0.5) for x in (left, right)]
        p = (left / scales[0]) @ (right / scales[1]).mT / left.shape[-1]
        s = leading_singular_value(p, start, iterations)[..., None, None]
        damped = s + eps / scales[0] / scales[1]
        return p / damped ** (1 - power) * scales[0] ** power * scales[1] ** power


@register_head("svpn")
class CrossCovariancePooling(Head):
    r"""Cross-covariance pooling of two projections, with singular value power normalisation; h·p·q numbers.

    .. math:: P = \frac1N \sum_n \phi(x_n)\,\psi(x_n)^T, \qquad
       \hat P = s^\alpha u v^T + \frac{P - s\,u v^T}{s^{1-\alpha}}, \qquad \phi(x) = W x, \quad \psi(x) = \tilde W x

    It is made for the tokens of a transformer, and takes any map. The projections have no bias and the features are not
    centred. Several matrices, each with its own projections, are concatenated. See :func:`cross_covariance_svpn` for the
    computation and its gradient.

    The start of the power iterations is drawn once, from ``seed``, and saved in the state of the head, so that an image
    has one vector.

    Args:
        in_channels, reduce: as in :class:`Head`; the projections reduce the channels themselves.
        rows: p, channels of the first projection.
        columns: q, channels of the second projection; p when None.
        heads: h, number of matrices.
        power: α in (0, 1].
        iterations: number of power iterations.
        eps: ε that is added to s.
        seed: seed of the start of the power iterations.

    Example:
        >>> CrossCovariancePooling(64, rows=16, heads=4)(torch.rand(2, 64, 7, 7)).shape
        torch.Size([2, 1024])

    References:
        Xie, Zeng, Wang, Zhou and Li, SoT: Delving Deeper into Classification Head for Transformer, arXiv 2104.10935.
    """

    quadratic = False

    start: Tensor

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        rows: int = 32,
        columns: int | None = None,
        heads: int = 6,
        power: float = 0.5,
        iterations: int = 10,
        eps: float = 1e-6,
        seed: int = 0,
    ):
        super().__init__(in_channels, reduce)
        columns = rows if columns is None else columns
        for name, value in (("rows", rows), ("columns", columns), ("heads", heads), ("iterations", iterations)):
            check_integer(value, name)
        if not 0 < power <= 1:
            raise ArgumentError("power", "must be above 0 and at most 1, which leaves the matrix as it is", power)
        check_positive(eps)
        self.rows, self.columns, self.heads = rows, columns, heads
        self.power, self.iterations, self.eps = power, iterations, eps
        self.out_features = heads * rows * columns
        self.projection = nn.Linear(self.channels, heads * (rows + columns), bias=False)
        # drawn on the CPU, so that a seed gives the same numbers on every device
        start = torch.randn(heads, columns, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        self.register_buffer("start", start.to(torch.get_default_device()))

    def matrices(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, heads, rows, columns), normalised."""
        x = x.to(output_dtype(x)).flatten(2)  # (B, C, N)
        with full_precision(x):
            projected = self.projection.weight.to(x.dtype) @ x
        left, right = projected.unflatten(1, (self.heads, -1)).split((self.rows, self.columns), dim=2)
        return cross_covariance_svpn(left, right, self.start, self.iterations, self.power, self.eps)

    def pool(self, x: Tensor) -> Tensor:
        return self.matrices(x).flatten(1)

    def extra_repr(self) -> str:
        return f"rows={self.rows}, columns={self.columns}, heads={self.heads}, power={self.power}, eps={self.eps}"
