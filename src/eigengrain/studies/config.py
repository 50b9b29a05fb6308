"""The options of the studies. No torch here: the command line's help is made from this."""

from dataclasses import dataclass


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
    out: str = "runs/demo"

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
