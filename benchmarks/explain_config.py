"""The options of ``bench explain``. No torch here: the command line's help is made from this."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ExplainBench:
    """Which maps are timed, on which network, and where the numbers go.

    Args:
        backbone: with random weights.
        head: with eigenvalues.
        subsets: of the eigenvalues, such as [all,top:206,last:50].
        rules: at the rectifiers.
        batch: images that are explained together; several as [16,32].
        img_size: side of the images.
        last_stride: 1 for a feature map twice as large in each direction, 2 for the backbone as it is.
        perturbation_steps: steps of a perturbation of the same images; 0 for none.
        repeats: measured runs; the median is reported.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1.
        seed: of the random images and weights.
        out: the CSV file; benchmarks/explain-DEVICE.csv by default.
    """

    backbone: str = "resnet50"
    head: str = "mpncov"
    subsets: list[str] = field(default_factory=lambda: ["all", "top:206", "last:50"])
    rules: list[str] = field(default_factory=lambda: ["vanilla", "deconv"])
    batch: list[int] | int = 16
    img_size: int = 448
    last_stride: int = 1
    perturbation_steps: int = 0
    repeats: int = 5
    device: str = "auto"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"--batch must be at least 1, got {self.batch}")
        for name, least in (("img_size", 32), ("repeats", 1), ("perturbation_steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def batches(self) -> list[int]:
        """One or several."""
        return [self.batch] if isinstance(self.batch, int) else self.batch
