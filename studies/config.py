"""The options of the studies. No torch here: the command line's help is made from this."""

from dataclasses import dataclass, field

from eigengrain.errors import UnknownName

HEADS = ("gap", "isqrt", "mpncov", "mpncov+seb")


@dataclass(frozen=True)
class Demo:
    """Which heads are trained on drawn birds, and for how long.

    Args:
        heads: trained one after the other, such as [gap,mpncov]; 'eigengrain heads' lists them.
        seeds: each head is trained once with each of them, such as [0,1,2].
        epochs: passes over the training images; as many as the recipe plumage-demo says by default.
        per_class: images of each class, for a quick try; by default 200 for training and 100 for tests.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        out: folder for report.html, demo.csv and a folder with the model of each run.
        fresh: start anew instead of going on with the runs in the folder, which are deleted.
    """

    heads: list[str] = field(default_factory=lambda: list(HEADS))
    seeds: list[int] = field(default_factory=lambda: [0])
    epochs: int | None = None
    per_class: int | None = None
    device: str = "auto"
    out: str = "runs/demo"
    fresh: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"--{name} must be a list of one or more, each once, got {values}")
        if min(self.seeds) < 0:
            raise ValueError(f"--seeds must be at least 0, got {self.seeds}")
        for name in ("epochs", "per_class"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class GradientTour:
    """Sizes of the tour of gradient rules, and where its files go.

    Args:
        channels: channels d of the features.
        positions: positions N of the features, more than 2 d.
        samples: features drawn for each case, each with two loss gradients.
        seed: of the random numbers.
        out: folder for gradients.csv, gradients.png and report.html.
    """

    channels: int = 64
    positions: int = 196
    samples: int = 16
    seed: int = 0
    out: str = "runs/gradients"

    def __post_init__(self) -> None:
        if self.channels < 8:
            raise ValueError(f"--channels must be at least 8, got {self.channels}")
        if self.positions <= 2 * self.channels:
            raise ValueError(
                f"--positions must be more than twice --channels, so that a covariance with equal eigenvalues can be "
                f"built; got {self.positions} and {self.channels}"
            )
        if self.samples < 1:
            raise ValueError(f"--samples must be at least 1, got {self.samples}")


STUDY_ACTIONS = ("list", "all", "report")
SCALES = ("smoke", "small", "paper")
PROTOCOLS = ("fair", "paper", "both")


@dataclass(frozen=True)
class StudyRun:
    """Which of the paper's tables and figures, on which images, and how thoroughly.

    Args:
        name: of a study; or list (all of them, with their cost), all (one after the other), report (a page of what is
            known).
        data: folder with the data sets, each in its own folder, or that of one data set; 'eigengrain datasets' shows how
            they look. A smoke run draws its images.
        scale: smoke (a small network on drawn birds, seconds), small (15 epochs) or paper (the paper's recipes).
        protocol: fair (each method at its own best classifier rate, chosen on validation images, last epoch), paper (one
            rate for all, best test epoch) or both.
        datasets: such as [cub,cars]; all that the study has by default, of which those are trained that the folder holds.
        backbones: such as [resnet50,vgg16]; all of the study by default, at scale small a few.
        heads: such as [mpncov,mpncov+seb]; all of the study by default, at scale small a few.
        seeds: of the runs that are tested; [0,1,2] by default, [0] for a smoke run, and at scale small but for gcp-methods
            and paths.
        rates: from which the fair protocol chooses: the classifier's rate as a multiple of the backbone's, over c² for a
            head whose vector is many times (c) longer or shorter than that of MPN-COV. If the lowest or the highest is
            best, a third or three times of it is tried too, and so on.
        weights: file with the weights of ResNet-50, or folder with a file for each backbone, such as resnet101.safetensors,
            vgg16_bn.safetensors or, without batch normalisation, vgg16.safetensors; those of timm by default, which are
            downloaded.
        stride_on: where ResNet weights stride: 1x1 or 3x3; 1x1 with --weights and 3x3 with timm's by default.
        seconds: no run is begun that would, as long as the longest before it, end after so many seconds; the same command
            goes on later.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        workers: processes that read images, at most one for each core.
        out: folder for NAME.csv, NAME.md, NAME.png, and the records and models of the runs.
        records: folder with more records, made elsewhere.
        only_report: train nothing, show what the records have.
        drop_models: delete a run's model when it is recorded, unless other runs of the study start from it; another study
            may then have to train it again.
        measure: for the list: time a training step of each backbone on this machine, instead of taking stated speeds.
    """

    name: str = "list"
    data: str | None = None
    scale: str = "small"
    protocol: str = "fair"
    datasets: list[str] | None = None
    backbones: list[str] | None = None
    heads: list[str] | None = None
    seeds: list[int] | None = None
    rates: list[float] = field(default_factory=lambda: [3.0, 10.0, 20.0])
    weights: str | None = None
    stride_on: str | None = None
    seconds: float | None = None
    device: str = "auto"
    workers: int = 4
    out: str = "runs/study"
    records: str | None = None
    only_report: bool = False
    drop_models: bool = False
    measure: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("scale", SCALES), ("protocol", PROTOCOLS)):
            if getattr(self, name) not in choices:
                raise UnknownName(f"--{name}", getattr(self, name), choices)
        if self.stride_on not in (None, "1x1", "3x3"):
            raise UnknownName("--stride_on", self.stride_on, ("1x1", "3x3"))
        for name in ("datasets", "backbones", "heads", "seeds", "rates"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) != len(values)):
                raise ValueError(f"--{name} must be a list of one or more, each once, got {values}")
        if min(self.seeds or [0]) < 0:
            raise ValueError(f"--seeds must be at least 0, got {self.seeds}")
        if min(self.rates) <= 0:
            raise ValueError(f"--rates must be above 0, got {self.rates}")
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"--seconds must be above 0, got {self.seconds}")
        if self.workers < 0:
            raise ValueError(f"--workers must be at least 0, got {self.workers}")
