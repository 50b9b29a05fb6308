"""Bilinear pooling with a rank-one update that damps the leading direction: matrix–vector products instead of a root."""

import torch
from torch import Tensor
from torch.nn import functional as F

from eigengrain.errors import ArgumentError
from eigengrain.functional.covariance import triu_vector
from eigengrain.functional.inputs import check_integer, full_precision, output_dtype
from eigengrain.heads.base import Head
from eigengrain.heads.compact import TensorSketch
from eigengrain.heads.layers import check_positive, second_moment, smooth_signed_sqrt, unit
from eigengrain.heads.registry import register_head


def damp_leading_direction(x: Tensor, start: Tensor, iterations: int, epsilon: float) -> Tensor:
    r"""Damp the leading left singular direction of features, which K power iterations approximate.

    .. math:: v_k = X X^T v_{k-1}, \qquad X' = \Big(I - \epsilon\,\frac{v_K v_K^T}{\|v_K\|^2}\Big) X

    Args:
        x: features (B, C, N), float32 or float64.
        start: :math:`v_0`, (C,) or (B, C).
        iterations: K.
        epsilon: ε; 0 leaves the features unchanged, 1 removes the direction.

    Returns:
        (B, C, N); zero where only rounding is left, as with ε = 1 and features of rank one.
    """
    with full_precision(x):
        v = start.to(x).expand(x.shape[:2])
        for _ in range(iterations):
            # the lengths cancel in the end; unnormalised they are λ₁ᴷ, which can leave the range of float32
            v = unit((x @ (v.unsqueeze(-2) @ x).mT).squeeze(-1))
        out = x - epsilon * v.unsqueeze(-1) * (v.unsqueeze(-2) @ x)
    before, after = (torch.linalg.vector_norm(t.detach(), dim=(-2, -1), keepdim=True) for t in (x, out))
    return torch.where(after <= 16 * torch.finfo(x.dtype).eps * before, 0.0, out)  # this way round NaN stays NaN


@register_head("run")
class RankOneUpdatePooling(Head):
    r"""Rank-one update normalisation (RUN) of bilinear pooling, full or compact.

    .. math:: v_k &= X X^T v_{k-1}, \qquad X' = \Big(I - \epsilon\,\frac{v_K v_K^T}{\|v_K\|^2}\Big) X

       B &= \frac1N X' X'^T = \Big(I - \epsilon\,\frac{v v^T}{\|v\|^2}\Big) \frac{X X^T}{N}
       \Big(I - \epsilon\,\frac{v v^T}{\|v\|^2}\Big)

    The features are not centred, so their largest eigenvalue, mostly that of the mean, is far above the others; a few power
    iterations find its direction, which is damped by 1 − ε. The update changes the features, so it also works with compact
    pooling, which has no matrix to normalise. Signed square root and ℓ2 norm follow, as in bilinear pooling. The gradient
    goes through the iterations.

    **Start.** The paper draws :math:`v_0` from a normal distribution in each pass. Here it is drawn once, from ``seed``,
    and saved in the state of the head: the same image has the same vector in training, evaluation and after a checkpoint.
    ``resample=True`` draws a new one for each image in training, from torch's generator as dropout does; evaluation always
    uses the saved one.

    Args:
        in_channels, reduce: as in :class:`Head`.
        iterations: K, number of power iterations.
        epsilon: ε in (0, 1]. With values near 1 training can be unstable: the direction, and with it the vector, changes
            abruptly where the two largest eigenvalues are close.
        compact: sketch the second moment (:class:`TensorSketch`) instead of its upper triangle, C(C+1)/2 numbers, with
            off-diagonal entries times :math:`\sqrt2`, so that inner products are those of the whole matrix.
        out_features: length of the sketch, 8192 when None; only with ``compact``.
        seed: seed of :math:`v_0` and of the sketch.
        resample: see above.
        eps: ε of the square root, see :func:`smooth_signed_sqrt`.

    Example:
        >>> RankOneUpdatePooling(64)(torch.rand(2, 64, 7, 7)).shape
        torch.Size([2, 2080])

    References:
        Yu, Cai and Li, Toward Faster and Simpler Matrix Normalization via Rank-1 Update, ECCV 2020.
    """

    start: Tensor

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        iterations: int = 2,
        epsilon: float = 0.5,
        compact: bool = False,
        out_features: int | None = None,
        seed: int = 0,
        resample: bool = False,
        eps: float = 1e-6,
    ):
        super().__init__(in_channels, reduce)
        check_integer(iterations, "iterations")
        if not 0 < epsilon <= 1:
            raise ArgumentError("epsilon", "must be above 0 and at most 1, which removes the direction", epsilon)
        check_positive(eps)
        if out_features is not None and not compact:
            raise ArgumentError("out_features", "is the length of the sketch and needs {compact}=True", out_features)
        self.iterations, self.epsilon, self.resample, self.eps = iterations, epsilon, resample, eps
        # drawn on the CPU, so that a seed gives the same numbers on every device
        start = torch.randn(self.channels, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        self.register_buffer("start", start.to(torch.get_default_device()))
        self.sketch: TensorSketch | None = None
        self.out_features = self.channels * (self.channels + 1) // 2
        if compact:
            self.out_features = 8192 if out_features is None else out_features
            self.sketch = TensorSketch(self.channels, self.out_features, seed=seed)

    def damped(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, channels, N), the features after the update."""
        x = x.to(output_dtype(x)).flatten(2)
        fresh = self.resample and self.training
        start = torch.randn(x.shape[:2], dtype=x.dtype, device=x.device) if fresh else self.start
        return damp_leading_direction(x, start, self.iterations, self.epsilon)

    def pool(self, x: Tensor) -> Tensor:
        x = self.damped(x)
        if self.sketch is not None:
            vector = smooth_signed_sqrt(self.sketch.pool(x.mT) / x.shape[-1], self.eps)
        else:
            vector = triu_vector(smooth_signed_sqrt(second_moment(x), self.eps), isometric=True)
        return F.normalize(vector, dim=-1)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, epsilon={self.epsilon}, resample={self.resample}"
