"""The options of the benchmark commands. No torch here: the command line's help is made from this."""

from dataclasses import dataclass, field, replace
from itertools import product
from math import isfinite, isqrt
from typing import Literal, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class FunctionalBench:
    """Which layers are measured, on which sizes, and where the numbers go.

    Args:
        batch: samples in a batch; several as [1,10].
        channels: channels d, the size of the covariance; several as [64,256].
        positions: positions N of the feature map; several as [196,784].
        methods: which to measure, such as [eigh,svd]; all by default. The reference of the ratios is always measured.
        repeats: measured runs of each layer on each size; the median is reported.
        warmup: runs before them that are not counted; 1 by default, and 4 on CUDA, where the third one records graphs.
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
    warmup: int | None = None
    device: str = "auto"
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        _check_names(self, "methods")
        _check_sizes(self, "batch", "channels", "positions")
        _check_runs(self.repeats, self.warmup)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Every (batch, channels, positions) that is measured.

        Example:
            >>> FunctionalBench(batch=2, channels=[8, 16], positions=49).shapes
            [(2, 8, 49), (2, 16, 49)]
        """
        return list(product(_several(self.batch), _several(self.channels), _several(self.positions)))


@dataclass(frozen=True)
class HeadsBench:
    """Which heads are measured, on which feature map, and where the numbers go.

    Args:
        heads: which to measure, such as [gap,mpncov+seb]; all by default. The reference is always measured.
        batch: feature maps in a batch; 4 on the CPU and 32 elsewhere by default.
        channels: of the feature map.
        side: of the feature map, which is square: 28 is what a ResNet with last_stride=1 makes of 448 pixels.
        reference: the head that times are divided by in the column of ratios.
        repeats: measured runs of each head; the median is reported.
        warmup: runs before them that are not counted; 1 by default, and 4 on CUDA, where the third one records graphs.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1.
        dtype: of the feature map.
        seed: of the random features and of the heads that are random or have parameters.
        out: the CSV file; benchmarks/heads-DEVICE.csv by default. The chart is beside it, with the ending .png.
    """

    heads: list[str] | None = None
    batch: int | None = None
    channels: int = 256
    side: int = 28
    reference: str = "isqrt"
    repeats: int = 5
    warmup: int | None = None
    device: str = "auto"
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        _check_names(self, "heads")
        _check_sizes(self, "batch", "channels", "side")
        _check_runs(self.repeats, self.warmup)
        _check_out(self.out)

    def shape(self, device: str) -> tuple[int, int, int, int]:
        """(batch, channels, side, side) on a type of device.

        Example:
            >>> HeadsBench(side=7).shape("cpu")
            (4, 256, 7, 7)
        """
        return self.batch or (4 if device == "cpu" else 32), self.channels, self.side, self.side


@dataclass(frozen=True)
class StepBench:
    """Which models take training steps, on which images, and where the numbers go.

    By default the setting of Table 8 of the paper on a GPU, and a smaller one on the CPU.

    Args:
        backbones: such as [resnet50,vgg16]; resnet18 on the CPU and resnet50 elsewhere by default.
        heads: on each backbone.
        reference: the head that times are divided by in the column of ratios, if it is among the heads.
        batch: images in a mini-batch; 4 on the CPU and 10 elsewhere by default.
        img_size: side of the images; 224 on the CPU and 448 elsewhere by default.
        last_stride: 1 for a feature map twice as large in each direction, 2 for the backbone as it is.
        reduce: channels that a 1 × 1 convolution leaves for the heads whose vector grows with their square; auto is 256
            for maps of more than 512. 128 on the CPU and auto elsewhere by default.
        num_classes: of the classifier.
        amp: bf16 or fp16 for automatic mixed precision, in which the spectral part of a head takes no part.
        channels_last: memory format of images and convolutions.
        repeats: measured steps of each model; the median is reported.
        warmup: steps before them that are not counted; 1 by default, and 4 on CUDA, where the third one records graphs.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1.
        seed: of the random images and weights.
        out: the CSV file; benchmarks/step-DEVICE.csv by default.
    """

    backbones: list[str] | None = None
    heads: list[str] = field(default_factory=lambda: ["gap", "isqrt", "mpncov", "mpncov+seb"])
    reference: str = "isqrt"
    batch: int | None = None
    img_size: int | None = None
    last_stride: Literal[1, 2] = 1
    reduce: int | Literal["auto"] | None = None
    num_classes: int = 200
    amp: Literal["none", "bf16", "fp16"] = "none"
    channels_last: bool = False
    repeats: int = 5
    warmup: int | None = None
    device: str = "auto"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        _check_names(self, "backbones")
        _check_names(self, "heads")
        _check_sizes(self, "batch", "img_size", "num_classes")
        if self.reduce != "auto":
            _check_sizes(self, "reduce")
        _check_runs(self.repeats, self.warmup)

    def filled(self, device: str) -> "StepBench":
        """With the defaults of a type of device in place of what was left open.

        Example:
            >>> StepBench(batch=2).filled("cpu").backbones, StepBench(batch=2).filled("cuda").img_size
            (['resnet18'], 448)
        """
        small = device == "cpu"
        defaults = {
            "backbones": ["resnet18" if small else "resnet50"],
            "batch": 4 if small else 10,
            "img_size": 224 if small else 448,
            "reduce": 128 if small else "auto",
            "warmup": warmup_runs(None, device),
        }
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})  # type: ignore[arg-type]


@dataclass(frozen=True)
class GrowthBench:
    """Over which sizes the time of the SEB layer is followed, how long a run may take, and where the numbers go.

    Args:
        batch: samples in a batch, one size after the other, with the channels of --at_channels.
        channels: channels d, one size after the other, with the batch of --at_batch.
        at_batch: the batch while the channels grow.
        at_channels: the channels while the batch grows.
        positions: positions N of the feature map; where channels reach it, the smallest square map that is larger.
        methods: solvers and other ways to the root, as in bench functional.
        limit: seconds that a run may take. A method that takes longer is not asked for larger sizes.
        repeats: measured runs of each method on each size, as many of them as fit into the limit; the median is reported.
        warmup: runs before them that are not counted; 1 by default, and 4 on CUDA, where the third one records graphs.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1.
        seed: of the random features.
        out: the CSV file; benchmarks/growth-DEVICE.csv by default. The chart is beside it, with the ending .png.
        redraw: measure nothing, draw the chart anew from the CSV file that --out names; this needs no such device.
    """

    batch: list[int] | int = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    channels: list[int] | int = field(default_factory=lambda: [64, 128, 256, 512, 1024])
    at_batch: int = 32
    at_channels: int = 256
    positions: int = 784
    methods: list[str] = field(default_factory=lambda: ["auto", "eigh", "products"])
    limit: float = 2.0
    repeats: int = 5
    warmup: int | None = None
    device: str = "auto"
    seed: int = 0
    out: str | None = None
    redraw: bool = False

    def __post_init__(self) -> None:
        _check_names(self, "methods")
        _check_sizes(self, "batch", "channels", "at_batch", "at_channels", "positions")
        _check_runs(self.repeats, self.warmup)
        if not self.limit > 0:
            raise ValueError(f"--limit must be a number of seconds above 0, got {self.limit}")
        _check_out(self.out)

    @property
    def sweeps(self) -> dict[str, list[tuple[int, int, int]]]:
        """What grows → (batch, channels, positions), in ascending order; the rank of every covariance is full.

        Example:
            >>> GrowthBench(batch=[2, 1], channels=[8, 16], at_channels=8, at_batch=4, positions=16).sweeps
            {'batch': [(1, 8, 16), (2, 8, 16)], 'channels': [(4, 8, 16), (4, 16, 25)]}
        """
        return {
            "batch": [(b, *self._map(self.at_channels)) for b in sorted(set(_several(self.batch)))],
            "channels": [(self.at_batch, *self._map(d)) for d in sorted(set(_several(self.channels)))],
        }

    def _map(self, channels: int) -> tuple[int, int]:
        return channels, full_rank_positions(channels, self.positions)


@dataclass(frozen=True)
class SolversBench:
    """On which matrices eigensolvers are timed, on which features errors are measured, and where the numbers go.

    Args:
        batch: covariances in a batch of the eigensolvers; several as [32,128]. 4 on the CPU and 32 elsewhere by default.
        channels: their size d; several as [256,512]. 128 on the CPU, 256 and 512 elsewhere by default.
        dtypes: their precision, in which they are decomposed.
        condition: condition numbers κ(P) of the features whose root is known; several as [1e6,1e10].
        at_channels: channels of these features; 64 on the CPU and 256 elsewhere by default.
        positions: their positions; several as [784,196], where those that are no more than the channels make P
            singular, and κ is that of its eigenvalues above 0. 196 and 49 on the CPU, 784 and 196 elsewhere by default.
        samples: of them in a batch; the largest error is reported.
        svd_batch: the same for ways by the singular value decomposition, which takes seconds on CUDA.
        repeats: measured runs of each eigensolver; the median is reported.
        warmup: runs before them that are not counted; 1 by default, and 4 on CUDA.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1.
        seed: of the random features.
        out: the folder of the CSV files, eigensolvers-LABEL.csv and accuracy-LABEL.csv.
        label: the end of their names, such as h200; the type of the device by default.
    """

    batch: list[int] | int | None = None
    channels: list[int] | int | None = None
    dtypes: list[Literal["float32", "float64"]] = field(default_factory=lambda: ["float32", "float64"])
    condition: list[float] | float = 1e10
    at_channels: int | None = None
    positions: list[int] | int | None = None
    samples: int = 8
    svd_batch: int = 2
    repeats: int = 5
    warmup: int | None = None
    device: str = "auto"
    seed: int = 0
    out: str = "benchmarks"
    label: str | None = None

    def __post_init__(self) -> None:
        _check_names(self, "dtypes")
        _check_sizes(self, "batch", "channels", "at_channels", "positions", "samples", "svd_batch")
        _check_runs(self.repeats, self.warmup)
        conditions = _several(self.condition)
        if not conditions or not all(isfinite(kappa) and kappa >= 1 for kappa in conditions):
            raise ValueError(f"--condition needs numbers of at least 1, got {self.condition}")
        if self.at_channels == 1 or min(_several(self.positions or 3)) < 3:
            raise ValueError(
                "a condition number needs two eigenvalues above 0, so --at_channels of at least 2 and --positions of at "
                f"least 3, got {self.at_channels} and {self.positions}"
            )
        if self.label is not None and (not self.label or set(self.label) & set("/\\")):
            raise ValueError(f"--label is a part of file names, got {self.label!r}: choose the folder with --out")

    def filled(self, device: str) -> "SolversBench":
        """With the defaults of a type of device in place of what was left open.

        Example:
            >>> SolversBench().filled("cpu").channels, SolversBench().filled("cuda").channels
            (128, [256, 512])
        """
        small = device == "cpu"
        defaults = {
            "batch": 4 if small else 32,
            "channels": 128 if small else [256, 512],
            "at_channels": 64 if small else 256,
            "positions": [196, 49] if small else [784, 196],
            "warmup": warmup_runs(None, device),
            "label": device,
        }
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})  # type: ignore[arg-type]

    @property
    def matrices(self) -> list[tuple[int, int, str]]:
        """Every (batch, size, dtype) on which eigensolvers are timed, once defaults are filled in.

        Example:
            >>> SolversBench(batch=2, channels=[8, 16], dtypes=["float64"]).matrices
            [(2, 8, 'float64'), (2, 16, 'float64')]
        """
        return list(product(_several(self.batch or []), _several(self.channels or []), self.dtypes))

    @property
    def cases(self) -> list[tuple[float, int]]:
        """Every (κ, positions) on which errors are measured, once defaults are filled in.

        Example:
            >>> SolversBench(condition=1e6, positions=[49, 9]).cases
            [(1000000.0, 49), (1000000.0, 9)]
        """
        return list(product(_several(self.condition), _several(self.positions or [])))


@dataclass(frozen=True)
class Doctor:
    """Where data sets are looked for.

    Args:
        data: folder with the data sets, each in its own folder, or that of one data set; that of the environment variable
            EIGENGRAIN_DATA by default.
    """

    data: str | None = None


def warmup_runs(asked: int | None, device: str) -> int:
    """Runs before those that count: as asked for, or until nothing is loaded, tuned or recorded any more.

    Example:
        >>> warmup_runs(None, "cuda"), warmup_runs(0, "cuda")
        (4, 0)
    """
    if asked is not None:
        return asked
    return 4 if device == "cuda" else 1


def full_rank_positions(channels: int, positions: int) -> int:
    """Positions as asked for, or the smallest square above the channels: one is lost to the mean.

    Example:
        >>> full_rank_positions(512, 784), full_rank_positions(1024, 784)
        (784, 1089)
    """
    return positions if positions > channels else (isqrt(channels) + 1) ** 2


def _several(value: list[Number] | Number) -> list[Number]:
    return [value] if isinstance(value, (int, float)) else list(value)


def _check_sizes(config: object, *names: str) -> None:
    """None stands for a default and is left alone."""
    for name in names:
        value = getattr(config, name)
        if value is not None and (not _several(value) or min(_several(value)) < 1):
            raise ValueError(f"--{name} needs whole numbers of at least 1, got {value}")


def _check_names(config: object, name: str) -> None:
    value = getattr(config, name)
    if value is not None and not value:
        raise ValueError(f"--{name} needs a name at least, got an empty list; leave it out for the default")


def _check_runs(repeats: int, warmup: int | None) -> None:
    if repeats < 1 or (warmup is not None and warmup < 0):
        raise ValueError(f"--repeats must be at least 1 and --warmup at least 0, got {repeats} and {warmup}")


def _check_out(out: str | None) -> None:
    if out is not None and out.lower().endswith(".png"):
        raise ValueError(f"--out names the CSV file, got {out}: the chart gets its name, with the ending .png")
