"""Perturbed images as RGB, and their way there as an animated GIF."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from eigengrain import _torchvision  # noqa: F401  isort: skip
from torchvision.utils import make_grid

from eigengrain.explain.perturbation import Perturbed
from eigengrain.files import writable


def rgb_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised images (*, 3, H, W) as RGB from 0 to 255, uint8, on the CPU; what is outside is clipped.

    Example:
        >>> rgb_pixels(torch.tensor([-1.0, 0.0, 9.0]).view(3, 1, 1), mean=(0.5,) * 3, std=(0.5,) * 3).flatten()
        tensor([  0, 128, 255], dtype=torch.uint8)
    """
    if images.ndim < 3 or not images.shape[-3] == len(mean) == len(std) == 3:
        raise ValueError(
            f"rgb_pixels expects images (*, 3, H, W) with three means and stds, got {tuple(images.shape)}, {tuple(mean)}, "
            f"{tuple(std)}"
        )
    images = images.detach().cpu().float()
    colours = images * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    return (colours * 255).round().clamp(0, 255).to(torch.uint8)


def film_frames(result: Perturbed, columns: int | None = None) -> list[Image.Image]:
    """One picture a snapshot, with the images of the batch side by side.

    Args:
        result: of :meth:`EigenPerturbation.perturb` with ``snapshots``.
        columns: images a row; None puts them all in one.

    Raises:
        ValueError: if there are no snapshots or ``columns`` is below 1.
    """
    if result.snapshots is None:
        raise ValueError("there are no snapshots to animate: call perturb with snapshots=20, say")
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns!r}")
    shown = rgb_pixels(result.snapshots, result.mean, result.std)
    grids = (make_grid(batch, nrow=columns or len(batch), padding=2, pad_value=255) for batch in shown)
    return [Image.fromarray(grid.permute(1, 2, 0).numpy()) for grid in grids]


def write_gif(
    result: Perturbed,
    path: str | os.PathLike[str],
    seconds_per_frame: float = 0.1,
    hold: float = 1.0,
    columns: int | None = None,
) -> Path:
    """The snapshots as an animated GIF that runs for ever.

    A GIF has 256 colours a frame: for exact pixels use :func:`rgb_pixels`. Equal frames in a row are joined into one that
    is shown longer.

    Args:
        result: of :meth:`EigenPerturbation.perturb` with ``snapshots``.
        path: of the file, ending in ``.gif``; its folder is made.
        seconds_per_frame: 0.02 at least, as viewers slow down what is faster.
        hold: seconds that the last frame stays.
        columns: images of the batch a row; None puts them all in one.

    Returns:
        the path.

    Raises:
        ValueError: if there are no snapshots, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"an animation is written as .gif, got {path.name!r}: choose such a name")
    if seconds_per_frame < 0.02 or hold < 0.02:
        raise ValueError(f"seconds_per_frame and hold must be at least 0.02, got {seconds_per_frame!r} and {hold!r}")
    first, *others = film_frames(result, columns)
    times = [*[round(1000 * seconds_per_frame)] * len(others), round(1000 * hold)]
    first.save(writable(path), save_all=True, append_images=others, duration=times, loop=0)
    return path
