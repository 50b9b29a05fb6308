r"""Compact bilinear pooling, and the random projections of the second moment that it and other heads use.

The projections estimate powers of inner products, :math:`E\langle\phi(x),\phi(y)\rangle = \langle x, y\rangle^p`. The
p-fold tensor product of a vector with itself has exactly these inner products, and :math:`C^p` entries. A projection of it
that keeps them on average needs far fewer: the variance falls as one over the length of the projection.
"""

import math

import torch
from torch import Tensor, nn

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional.inputs import check_floating, check_integer, full_precision
from eigengrain.heads.base import Head, ProductForm
from eigengrain.heads.layers import check_positive, power_normalise
from eigengrain.heads.registry import register_head


class _Projection(nn.Module):
    """Base class of both projections: sizes, random numbers from an own generator, and checks of the inputs."""

    def __init__(self, in_channels: int, out_features: int, order: int = 2, seed: int = 0):
        super().__init__()
        for name, value in (("in_channels", in_channels), ("out_features", out_features), ("order", order)):
            check_integer(value, name)
        self.in_channels, self.out_features, self.order, self.seed = in_channels, out_features, order, seed
        # drawn on the CPU, so that a seed gives the same numbers on every device
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, numbers in self._draw(generator).items():
            self.register_buffer(name, numbers.to(torch.get_default_device()))

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The random numbers by name. They become buffers, so that a checkpoint contains them."""
        raise NotImplementedError

    def _random_signs(self, generator: torch.Generator, *shape: int) -> Tensor:
        # one byte each: these matrices can be large, and ±1 is exact in every dtype they are cast to
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device="cpu") * 2 - 1

    def _working(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The inputs in float32, or float64 if one of them is: 16 bits do not suffice for FFTs or products of features."""
        if len(xs) not in (1, self.order):
            raise ArgumentError("xs", f"must be 1 or {self.order} tensors for order {self.order}", len(xs))
        for x in xs:
            check_floating(x)
            if x.ndim == 0 or x.shape[-1] != self.in_channels:
                remedy = "channels come last; use x.flatten(2).mT of a map (B, C, H, W)"
                raise ArgumentError("x", f"must have shape (..., {self.in_channels})", tuple(x.shape), remedy)
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32
        return tuple(x.to(dtype) for x in xs)

    def _positions(self, x: Tensor) -> Tensor:
        (x,) = self._working(x)
        if x.ndim < 2:
            raise ArgumentError("x", f"must have shape (..., N, {self.in_channels})", tuple(x.shape))
        return x

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_features}, order={self.order}, seed={self.seed}"


class TensorSketch(_Projection, ProductForm):
    r"""Tensor sketch: the count sketch of a tensor product, without forming the product.

    .. math:: \phi(x_1, …, x_p) = F^{-1}\big(F(\psi_1(x_1)) \circ … \circ F(\psi_p(x_p))\big), \qquad
       \psi_k(x)_j = \sum_{c:\,h_k(c) = j} s_k(c)\,x_c

    with F the Fourier transform, h random indices and s random signs. The entry :math:`x_{1,c_1} … x_{p,c_p}` of the
    product falls into bin :math:`\sum_k h_k(c_k)` modulo ``out_features`` with sign :math:`\prod_k s_k(c_k)`.

    Args:
        in_channels: length of the vectors.
        out_features: length of the sketch.
        order: number of factors p.
        seed: seed of h and s, which have their own generator. Both are buffers, saved with the state.

    Shape:
        ``forward(*xs)`` takes p tensors (..., in_channels), or one that is used p times with different h and s, and returns
        (..., out_features): float64 if one of them is float64 and float32 otherwise, also under autocast.

    Example:
        >>> sketch = TensorSketch(in_channels=16, out_features=4096)
        >>> x = torch.ones(16)
        >>> bool((sketch(x).square().sum() - 16.0**2).abs() < 30)
        True

    References:
        Pham and Pagh, Fast and Scalable Polynomial Kernels via Explicit Feature Maps, KDD 2013.
        Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002.
    """

    index: Tensor  # (order, in_channels)
    sign: Tensor  # (order, in_channels)

    #: use only operations that are accurate in runtimes outside PyTorch
    portable = False

    def use_products(self) -> None:
        """Avoid Fourier transforms: those of ONNX Runtime have errors of 1e-3 unless the length is a power of 2."""
        if self.order > 2 and self.out_features & (self.out_features - 1):
            problem = f"must be a power of 2 for an accurate export at order {self.order}"
            near = 2 ** round(math.log2(self.out_features))
            raise ArgumentError("out_features", problem, self.out_features, f"create the head with a length of {near}")
        self.portable = True

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (self.order, self.in_channels)
        index = torch.randint(0, self.out_features, shape, generator=generator, device="cpu")
        return {"index": index, "sign": self._random_signs(generator, *shape)}

    def _into_bins(self, entries: Tensor, index: Tensor) -> Tensor:
        """(..., n) → (..., out_features): entries with the same bin are added. The gradient is a lookup."""
        bins = entries.new_zeros((*entries.shape[:-1], self.out_features))
        if self.portable:  # index_add exports as ScatterND, in which threads of ONNX Runtime lose additions to the same bin
            return bins.scatter_add(-1, index.expand(entries.shape), entries)
        return bins.index_add(-1, index, entries)

    def count_sketch(self, x: Tensor, factor: int) -> Tensor:
        r""":math:`\psi_k(x)` for ``factor`` k, counted from 0: (..., in_channels) → (..., out_features)."""
        return self._into_bins(x * self.sign[factor].to(x.dtype), self.index[factor])

    def _spectrum(self, *xs: Tensor) -> Tensor:
        """The sketch in the frequency domain, (..., out_features // 2 + 1)."""
        spectrum = torch.fft.rfft(self.count_sketch(xs[0], 0))
        for factor in range(1, self.order):
            x = xs[factor] if len(xs) > 1 else xs[0]
            spectrum = spectrum * torch.fft.rfft(self.count_sketch(x, factor))
        return spectrum

    def forward(self, *xs: Tensor) -> Tensor:
        xs = self._working(*xs)
        with full_precision(xs[0]):
            if self.order == 1 or xs[0].numel() == 0:  # Fourier transforms refuse an empty batch
                return self.count_sketch(xs[0], 0)
            return torch.fft.irfft(self._spectrum(*xs), n=self.out_features)

    def pool(self, x: Tensor) -> Tensor:
        r"""The sum of ``self(x)`` over positions, (..., N, in_channels) → (..., out_features), in less memory.

        The sketch is linear in the tensor product, so for order 2 it is the count sketch of :math:`\sum_n x_n x_n^T`,
        one matrix instead of N spectra. If that matrix is larger, and for other orders, spectra are summed over positions
        and transformed back once.
        """
        x = self._positions(x)
        positions, channels = x.shape[-2:]
        with full_precision(x):
            if self.order == 1 or x.numel() == 0:
                return self.count_sketch(x.sum(-2), 0)
            if self.order == 2 and (channels * channels <= positions * self.out_features or self.portable):
                return self._pool_matrix(x)
            return self._pool_spectra(x)

    def of_moment(self, moment: Tensor) -> Tensor:
        r"""The sketch of order 2 of a sum :math:`\sum_n x_n x_n^T`, (..., C, C) → (..., out_features)."""
        index = (self.index[0].unsqueeze(-1) + self.index[1]) % self.out_features  # (C, C)
        sign = (self.sign[0].unsqueeze(-1) * self.sign[1]).to(moment.dtype)
        return self._into_bins((moment * sign).flatten(-2), index.flatten())

    def _pool_matrix(self, x: Tensor) -> Tensor:
        return self.of_moment(x.mT @ x)

    def _pool_spectra(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(self._spectrum(x).sum(-2), n=self.out_features)


class RandomMaclaurin(_Projection):
    r"""Random Maclaurin features: products of random projections to the signs ±1.

    .. math:: \phi(x_1, …, x_p) = \frac{1}{\sqrt D}\, (W_1 x_1) \circ … \circ (W_p x_p), \qquad W_k \in \{±1\}^{D \times C}

    with D = ``out_features``. It needs no Fourier transform, and p·D·C signs, one byte each, where :class:`TensorSketch`
    needs p·C numbers.

    Args:
        in_channels, out_features, order, seed: as in :class:`TensorSketch`.

    References:
        Kar and Karnick, Random Feature Maps for Dot Product Kernels, AISTATS 2012.
    """

    sign: Tensor  # (order, out_features, in_channels)

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"sign": self._random_signs(generator, self.order, self.out_features, self.in_channels)}

    def _project(self, x: Tensor, factor: int) -> Tensor:
        return x @ self.sign[factor].to(x.dtype).mT

    def forward(self, *xs: Tensor) -> Tensor:
        xs = self._working(*xs)
        with full_precision(xs[0]):
            product = self._project(xs[0], 0)
            for factor in range(1, self.order):
                product = product * self._project(xs[factor] if len(xs) > 1 else xs[0], factor)
            return product / self.out_features**0.5

    def pool(self, x: Tensor) -> Tensor:
        r"""As in :meth:`TensorSketch.pool`.

        For order 2 each entry is the quadratic form :math:`w_1^T \big(\sum_n x_n x_n^T\big) w_2`, which is used if it needs
        fewer multiplications than two projections of every position.
        """
        x = self._positions(x)
        positions, channels = x.shape[-2:]
        if self.order == 2 and channels * (positions + self.out_features) <= 2 * positions * self.out_features:
            with full_precision(x):
                return self._pool_matrix(x)
        return self(x).sum(-2)

    def _pool_matrix(self, x: Tensor) -> Tensor:
        projected = self._project(x.mT @ x, 0)  # (..., C, D); the matrix is symmetric
        return (projected * self.sign[1].to(x.dtype).mT).sum(-2) / self.out_features**0.5


PROJECTIONS: dict[str, type[TensorSketch] | type[RandomMaclaurin]] = {
    "tensor-sketch": TensorSketch,
    "random-maclaurin": RandomMaclaurin,
}


@register_head("cbp")
class CompactBilinearPooling(Head):
    r"""Compact bilinear pooling: mean of a random projection over positions, signed square root, ℓ2 norm.

    .. math:: y = \frac1N \sum_n \phi(x_n), \qquad
       \langle y, y' \rangle \approx \frac{1}{N N'} \sum_{n, n'} \langle x_n, x'_{n'} \rangle^2

    so that inner products are, on average, those of the full second moments, at a length that does not depend on the
    channels. The paper sums over positions; the mean differs by a factor that the ℓ2 norm removes, and gives ``eps`` the
    same meaning for maps of every size. The projection is pooled without computing it at each position.

    Args:
        in_channels, reduce: as in :class:`Head`.
        out_features: length of the vector.
        projection: ``tensor-sketch`` (:class:`TensorSketch`) or ``random-maclaurin`` (:class:`RandomMaclaurin`).
        seed: seed of the projection, which is saved with the state of the head.
        eps: ε of the square root, see :func:`signed_sqrt`.

    Example:
        >>> CompactBilinearPooling(64, out_features=512)(torch.rand(2, 64, 7, 7)).shape
        torch.Size([2, 512])

    References:
        Gao, Beijbom, Zhang and Darrell, Compact Bilinear Pooling, CVPR 2016.
    """

    quadratic = False

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        out_features: int = 8192,
        projection: str = "tensor-sketch",
        seed: int = 0,
        eps: float = 1e-5,
    ):
        super().__init__(in_channels, reduce)
        check_integer(out_features, "out_features")
        check_positive(eps)
        if projection not in PROJECTIONS:
            raise UnknownName("projection", projection, PROJECTIONS)
        self.out_features, self.eps = out_features, eps
        self.projection = PROJECTIONS[projection](self.channels, out_features, order=2, seed=seed)

    def pool(self, x: Tensor) -> Tensor:
        positions = x.flatten(2).mT  # (B, N, C)
        return power_normalise(self.projection.pool(positions) / positions.shape[-2], self.eps)
