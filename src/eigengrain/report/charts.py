"""The charts of a report, as PNG."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from eigengrain.report.measured import Measured
from eigengrain.training.calibration import reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: colours of Okabe and Ito, which remain distinct with any colour vision, by the first and the last part of a column
COLOURS = {"train": "#0072B2", "val": "#D55E00", "test": "#009E73"}
COLOURS |= {"backbone": "#0072B2", "head": "#D55E00", "classifier": "#009E73"}


def _chart(draw: Callable[["Axes"], object], size: tuple[float, float] = (4.4, 3.0)) -> bytes:
    """A chart as PNG."""
    from matplotlib.figure import Figure

    from eigengrain.plotting import style

    with style():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(stream := io.BytesIO(), dpi=160)
    return stream.getvalue()


def draw_curves(epochs: Sequence[Mapping[str, float]]) -> list[tuple[bytes, str]]:
    """Charts of loss, accuracy and learning rate against the epoch, each with its description."""
    charts = (
        ("Loss", {"train_loss": "training", "val_loss": "validation", "test_loss": "test"}, "linear"),
        ("Accuracy, %", {"train_top1": "training", "val_top1": "validation", "test_top1": "test"}, "linear"),
        ("Learning rate", {"lr_backbone": "backbone", "lr_head": "head", "lr_classifier": "classifier"}, "log"),
    )
    pictures = []
    for title, columns, scale in charts:
        lines: dict[tuple[tuple[float, float], ...], list[str]] = {}  # columns with the same values are one line
        for column in columns:
            points = tuple((row["epoch"], row[column]) for row in epochs if column in row)
            if scale == "log":
                points = tuple(point for point in points if point[1] > 0)
            if points:
                lines.setdefault(points, []).append(column)

        def draw(axes: "Axes") -> None:
            from matplotlib.ticker import MaxNLocator

            for points, equal in lines.items():  # noqa: B023  (drawn at once)
                colour = COLOURS[next(part for part in equal[0].split("_") if part in COLOURS)]
                label = ", ".join(columns[column] for column in equal)  # noqa: B023
                axes.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=2.5, linewidth=1.3)
            axes.set(title=title, xlabel="epoch", yscale=scale)  # noqa: B023
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.legend(frameon=False)

        if lines:
            pictures.append((_chart(draw), f"{title} after each epoch"))
    return pictures


def draw_confusion(confusion: Tensor) -> bytes:
    """The confusion matrix as a picture: the share of each true class (row) that gets each answer (column)."""
    shares = (confusion.double() / confusion.sum(1, keepdim=True).clamp_min(1)).numpy()
    classes = len(confusion)

    def draw(axes: "Axes") -> None:
        from matplotlib.colors import PowerNorm

        extent = (0.5, classes + 0.5, classes + 0.5, 0.5)
        picture = axes.imshow(
            shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest", extent=extent, aspect="equal"
        )
        axes.set(xlabel="number of the answer", ylabel="number of the true class")
        axes.grid(False)
        bar = axes.figure.colorbar(picture, ax=axes, shrink=0.7, ticks=[0, 0.05, 0.25, 0.5, 1])
        bar.ax.set_yticklabels(["0 %", "5 %", "25 %", "50 %", "100 %"])

    return _chart(draw, (7.5, 6.4))


def draw_reliability(measured: Measured) -> bytes:
    """Reliability diagram: the share of right answers against their probability, before and after the temperature."""

    def draw(axes: "Axes") -> None:
        series = {"plain scores": measured.logits.softmax(-1)}
        series |= {"with temperature": measured.probabilities} if measured.fitted_on else {}
        axes.plot([0, 100], [0, 100], color="#999999", linewidth=1, linestyle="--", label="as it should be")
        for (label, probabilities), colour in zip(series.items(), (COLOURS["val"], COLOURS["train"]), strict=False):
            bins = reliability(probabilities, measured.labels)
            x, y = [100 * row[0] for row in bins], [100 * row[1] for row in bins]
            axes.plot(x, y, color=colour, linewidth=1.3, label=label)
            axes.scatter(x, y, s=[6 + 90 * row[2] / len(measured.labels) for row in bins], color=colour)
        axes.set(xlim=(0, 102), ylim=(0, 102), xlabel="probability of the answer, %", ylabel="right answers, %")
        axes.set_title("Larger dots stand for more images")
        axes.legend(frameon=False)

    return _chart(draw, (4.4, 3.6))
