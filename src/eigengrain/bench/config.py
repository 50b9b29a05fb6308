"""The options of the benchmark commands. No torch here: the command line's help is made from this."""

from dataclasses import dataclass, field
from itertools import product
from typing import Literal


@dataclass(frozen=True)
class FunctionalBench:
    """Which layers are measured, on which sizes, and where the numbers go.

    Args:
        batch: samples in a batch; several as [1,10].
        channels: channels d, the size of the covariance; several as [64,256].
        positions: positions N of the feature map; several as [196,784].
        methods: which to measure, such as [eigh,svd]; all by default. The reference of the ratios is always measured.
        repeats: measured runs of each layer on each size; the median is reported.
        warmup: runs before them that are not counted.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1.
        dtype: of the features.
        seed: of the random features.
        out: the CSV file; benchmarks/functional-DEVICE.csv by default.
    """

    batch: list[int] | int = 10
    channels: list[int] | int = field(default_factory=lambda: [64, 256])
    positions: list[int] | int = field(default_factory=lambda: [196, 784])
    methods: list[str] | None = None
    repeats: int = 5
    warmup: int = 1
    device: str = "auto"
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "channels", "positions"):
            if not _several(getattr(self, name)) or min(_several(getattr(self, name))) < 1:
                raise ValueError(f"--{name} needs whole numbers of at least 1, got {getattr(self, name)}")
        if self.repeats < 1 or self.warmup < 0:
            raise ValueError(f"--repeats must be at least 1 and --warmup at least 0, got {self.repeats} and {self.warmup}")

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Every (batch, channels, positions) that is measured.

        Example:
            >>> FunctionalBench(batch=2, channels=[8, 16], positions=49).shapes
            [(2, 8, 49), (2, 16, 49)]
        """
        return list(product(_several(self.batch), _several(self.channels), _several(self.positions)))


def _several(value: list[int] | int) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


@dataclass(frozen=True)
class Doctor:
    """No options."""
