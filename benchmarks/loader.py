"""Images per second of the loader, beside torchvision's ImageFolder with a plain DataLoader in the same run."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Advance, Row, ignore
from eigengrain.files import writable

OURS, REFERENCE = "eigengrain", "torchvision"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLASSES = 4


@dataclass(frozen=True)
class LoaderBench:
    """Measure the loader on generated photographs.

    Args:
        images: number of generated JPEG files.
        size: their short side in pixels, and the side of the square that a network sees.
        batch_size: images in a batch.
        workers: processes that read; 0 reads in the main process.
        repeats: measured epochs of each loader; the median is reported.
        out: CSV file; benchmarks/loader-cpu.csv by default.
    """

    images: int = 128
    size: int = 448
    batch_size: int = 16
    workers: int = 0
    repeats: int = 5
    out: str | None = None

    def __post_init__(self) -> None:
        measure.check_least(self, images=_CLASSES, size=8, batch_size=1, workers=0, repeats=1)


def write_jpegs(root: Path, images: int, size: int) -> None:
    """Write JPEG files with the proportions 4 : 3 and with areas and edges as in a photograph, in class folders."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(images + _CLASSES):
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((size * 4 // 3, size), Image.Resampling.BICUBIC))
        pixels = (smooth + generator.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
        folder = root / ("train" if number < images else "test") / f"class{number % _CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number:05d}.jpg", quality=90)


def make_ours(root: Path, config: LoaderBench) -> Iterable[Any]:
    """The loader of the package with the transforms of the paper."""
    from eigengrain.data import Transforms, build_transform, make_loader, open_dataset

    dataset = open_dataset("folder", root)
    dataset.transform = build_transform(Transforms("paper", config.size), True, _MEAN, _STD)
    return make_loader(dataset, config.batch_size, train=True, workers=config.workers, drop_last=False)


def make_plain(root: Path, config: LoaderBench) -> Iterable[Any]:
    """torchvision alone, with the same transforms."""
    from eigengrain import _torchvision  # noqa: F401  isort: skip
    from torch.utils.data import DataLoader
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    before = round(config.size * 8 / 7)
    steps = [T.Resize((before, before)), T.CenterCrop(config.size), T.RandomHorizontalFlip()]
    return DataLoader(
        ImageFolder(str(root / "train"), T.Compose([*steps, T.ToTensor(), T.Normalize(_MEAN, _STD)])),
        batch_size=config.batch_size,
        shuffle=True,
        num_workers=config.workers,
        persistent_workers=config.workers > 0,
    )


def measure_loaders(config: LoaderBench, advance: Advance = ignore) -> list[Row]:
    """Run both loaders in turn over the same files; one row per loader."""
    with TemporaryDirectory() as folder:
        write_jpegs(Path(folder), config.images, config.size)
        loaders = {OURS: make_ours(Path(folder), config), REFERENCE: make_plain(Path(folder), config)}
        times: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(config.repeats + 1):
            # the loaders swap places, since the first one leaves the processor in another state
            for name in list(loaders)[:: 1 if turn % 2 else -1]:
                start = perf_counter()
                count = sum(len(labels) for _, labels in loaders[name])
                if count != config.images:
                    raise RuntimeError(f"{name} delivered {count} of {config.images} images")
                if turn:  # the first epoch starts the workers and reads the files into memory
                    times[name].append(perf_counter() - start)
                advance(name)
        del loaders
    speed = {name: config.images / median(each) for name, each in times.items()}
    return [
        {
            "loader": name,
            "images_per_second": round(speed[name], 2),
            f"ratio_to_{REFERENCE}": round(speed[name] / speed[REFERENCE], 4),
            **measure.pick(config, "size", "images", "batch_size", "workers", "repeats"),
        }
        for name in speed
    ]


def run(config: LoaderBench) -> None:
    """``python -m benchmarks loader``."""
    device = torch.device("cpu")
    path = writable(config.out or "benchmarks/loader-cpu.csv")
    with measure.progress(2 * (config.repeats + 1)) as advance:
        rows = measure_loaders(config, advance)
    measure.save(path, rows, device)
    table = measure.format_table(rows, ("loader", "images_per_second", f"ratio_to_{REFERENCE}"))
    measure.finish({"rows": rows}, [path], device, table)
