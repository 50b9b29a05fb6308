r"""Random projections whose inner products estimate powers, :math:`E\langle\phi(x),\phi(y)\rangle = \langle x, y\rangle^p`.

The p-fold tensor product of a vector with itself has exactly these inner products, and :math:`C^p` entries. A projection
of it that keeps them on average needs far fewer: the variance falls as one over the length of the projection.
"""

import torch
from torch import Tensor, nn

from eigengrain.functional.inputs import check_floating, full_precision
from eigengrain.heads.layers import check_whole_number


class _Projection(nn.Module):
    """What both projections share: their sizes, a generator of their own, and the reading of their inputs."""

    def __init__(self, in_channels: int, out_features: int, order: int = 2, seed: int = 0):
        super().__init__()
        for name, value in (("in_channels", in_channels), ("out_features", out_features), ("order", order)):
            check_whole_number(type(self).__name__, name, value)
        self.in_channels = in_channels
        self.out_features = out_features
        self.order = order
        self.seed = seed
        # drawn on the CPU, so that a seed means the same numbers on every device; kept where new modules are kept
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, numbers in self._draw(generator).items():
            self.register_buffer(name, numbers.to(torch.get_default_device()))

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The random numbers by name. They become buffers, so that a checkpoint carries them."""
        raise NotImplementedError

    def _random_signs(self, generator: torch.Generator, *shape: int) -> Tensor:
        # one byte each: these matrices can be large, and ±1 is exact in every type they are cast to
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device="cpu") * 2 - 1

    def _working(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The inputs in float32, or float64 if one of them is: neither FFT nor products of features are for 16 bits."""
        who = type(self).__name__
        if len(xs) not in (1, self.order):
            raise ValueError(f"{who} of order {self.order} expects 1 or {self.order} tensors, got {len(xs)}")
        for x in xs:
            check_floating(x, who)
            if x.ndim == 0 or x.shape[-1] != self.in_channels:
                raise ValueError(
                    f"{who} expects tensors of shape (..., {self.in_channels}), got {tuple(x.shape)}: "
                    "channels come last here, a map (B, C, H, W) enters as x.flatten(2).mT"
                )
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32
        return tuple(x.to(dtype) for x in xs)

    def _positions(self, x: Tensor) -> Tensor:
        (x,) = self._working(x)
        if x.ndim < 2:
            raise ValueError(
                f"{type(self).__name__}.pool expects tensors of shape (..., N, {self.in_channels}), got {tuple(x.shape)}"
            )
        return x

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_features}, order={self.order}, seed={self.seed}"

    def forward(self, *xs: Tensor) -> Tensor:
        """(..., in_channels), once or ``order`` times → (..., out_features)."""
        raise NotImplementedError

    def pool(self, x: Tensor) -> Tensor:
        """The sum of ``self(x)`` over positions, (..., N, in_channels) → (..., out_features), in less memory."""
        raise NotImplementedError


def _second_moment(x: Tensor) -> Tensor:
    """Sum of outer products over positions, (..., N, C) → (..., C, C)."""
    return x.mT @ x


class TensorSketch(_Projection):
    r"""Tensor sketch: the count sketch of a tensor product, without forming the product.

    .. math:: \phi(x_1, …, x_p) = F^{-1}\big(F(\psi_1(x_1)) \circ … \circ F(\psi_p(x_p))\big), \qquad
       \psi_k(x)_j = \sum_{c:\,h_k(c) = j} s_k(c)\,x_c

    with F the Fourier transform, h random indices and s random signs. The entry :math:`x_{1,c_1} … x_{p,c_p}` of the
    product falls into bin :math:`\sum_k h_k(c_k)` modulo ``out_features`` with sign :math:`\prod_k s_k(c_k)`.

    Args:
        in_channels: length of the vectors.
        out_features: length of the sketch.
        order: number of factors p.
        seed: of the generator for h and s, which belongs to this module alone. Both are buffers, saved with its state.

    Shape:
        ``forward(*xs)`` takes p tensors (..., in_channels), or one that is used p times with different h and s, and gives
        (..., out_features): float64 if one of them is float64 and float32 otherwise, also under autocast.

    Raises:
        ValueError: for sizes below 1, or inputs that do not fit.

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

    #: whether only operations are used that runtimes outside PyTorch do right
    portable = False

    def use_products(self) -> None:
        """Avoid Fourier transforms: ONNX Runtime errs by 1e-3 in them unless the length is a power of 2.

        Raises:
            ValueError: for an order above 2, which has no other way, and any other length.
        """
        if self.order > 2 and self.out_features & (self.out_features - 1):
            raise ValueError(
                f"a tensor sketch of order {self.order} and length {self.out_features} needs a Fourier transform that is "
                "inaccurate outside PyTorch: use a length that is a power of 2"
            )
        self.portable = True

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (self.order, self.in_channels)
        index = torch.randint(0, self.out_features, shape, generator=generator, device="cpu")
        return {"index": index, "sign": self._random_signs(generator, *shape)}

    def _into_bins(self, entries: Tensor, index: Tensor) -> Tensor:
        """(..., n) → (..., out_features): entries that share a bin add up. The gradient only looks entries up."""
        bins = entries.new_zeros((*entries.shape[:-1], self.out_features))
        if self.portable:  # index_add becomes ScatterND, where ONNX Runtime's threads lose additions to the same bin
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
            if self.order == 1 or xs[0].numel() == 0:  # an empty batch, which Fourier transforms refuse
                return self.count_sketch(xs[0], 0)
            return torch.fft.irfft(self._spectrum(*xs), n=self.out_features)

    def pool(self, x: Tensor) -> Tensor:
        r"""The sum of ``self(x)`` over positions, (..., N, in_channels) → (..., out_features), in less memory.

        The sketch is linear in the tensor product, so for order 2 it is the count sketch of :math:`\sum_n x_n x_n^T`,
        one matrix instead of N spectra. Where that matrix is the larger of the two, and for other orders, spectra are
        summed over positions and transformed back once.
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
        r"""The sketch of order 2 of a sum :math:`\sum_n x_n x_n^T` itself, (..., C, C) → (..., out_features)."""
        index = (self.index[0].unsqueeze(-1) + self.index[1]) % self.out_features  # (C, C)
        sign = (self.sign[0].unsqueeze(-1) * self.sign[1]).to(moment.dtype)
        return self._into_bins((moment * sign).flatten(-2), index.flatten())

    def _pool_matrix(self, x: Tensor) -> Tensor:
        return self.of_moment(_second_moment(x))

    def _pool_spectra(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(self._spectrum(x).sum(-2), n=self.out_features)


class RandomMaclaurin(_Projection):
    r"""Random Maclaurin features: products of random projections to the signs ±1.

    .. math:: \phi(x_1, …, x_p) = \frac{1}{\sqrt D}\, (W_1 x_1) \circ … \circ (W_p x_p), \qquad W_k \in \{±1\}^{D \times C}

    with D = ``out_features``. It needs no Fourier transform, and p·D·C signs, one byte each, where :class:`TensorSketch`
    needs p·C numbers.

    Args:
        in_channels, out_features, order, seed: as in :class:`TensorSketch`.

    Raises:
        ValueError: for sizes below 1, or inputs that do not fit.

    Example:
        >>> projection = RandomMaclaurin(in_channels=16, out_features=4096)
        >>> x = torch.ones(16)
        >>> bool((projection(x).square().sum() - 16.0**2).abs() < 30)
        True

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
        r"""The sum of ``self(x)`` over positions, (..., N, in_channels) → (..., out_features), in less memory.

        For order 2 each entry is the quadratic form :math:`w_1^T \big(\sum_n x_n x_n^T\big) w_2`; that way is taken where
        it has fewer multiplications than two projections of every position.
        """
        x = self._positions(x)
        positions, channels = x.shape[-2:]
        features = self.out_features
        if self.order == 2 and channels * (positions + features) <= 2 * positions * features:
            with full_precision(x):
                return self._pool_matrix(x)
        return self(x).sum(-2)

    def _pool_matrix(self, x: Tensor) -> Tensor:
        projected = self._project(_second_moment(x), 0)  # (..., C, D); the matrix is symmetric
        return (projected * self.sign[1].to(x.dtype).mT).sum(-2) / self.out_features**0.5
