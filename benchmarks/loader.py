"""Images a second that the loader delivers, beside torchvision's ImageFolder with a plain DataLoader in the same run.

No torch at the top: the command line's help is made from the options here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eigengrain.data import Loader

Row = dict[str, str | int | float]

OURS, REFERENCE = "eigengrain", "torchvision"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLASSES = 4


@dataclass(frozen=True)
class LoaderBench:
    """What the loader is measured on.

    Args:
        images: generated JPEG files.
        size: their short side in pixels, and the side of the square that a network would see.
        batch_size: images in a batch.
        workers: processes that read; 0 reads in this one.
        repeats: measured epochs of each loader; the median is reported.
        out: the CSV file; benchmarks/loader-cpu.csv by default.
    """

    images: int = 128
    size: int = 448
    batch_size: int = 16
    workers: int = 0
    repeats: int = 5
    out: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("images", _CLASSES), ("size", 8), ("batch_size", 1), ("workers", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")


def write_jpegs(root: Path, images: int, size: int) -> None:
    """JPEG files with the proportions 4 : 3 and a photograph's mixture of areas and edges, in class folders."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for part in ("train", "test"):
        for k in range(_CLASSES):
            (root / part / f"class{k}").mkdir(parents=True)
    for number in range(images + _CLASSES):
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        photograph = np.asarray(Image.fromarray(coarse).resize((size * 4 // 3, size), Image.Resampling.BICUBIC))
        grain = generator.normal(0, 8, photograph.shape)
        pixels = (photograph + grain).clip(0, 255).astype(np.uint8)
        part = "train" if number < images else "test"
        Image.fromarray(pixels).save(root / part / f"class{number % _CLASSES}" / f"{number:05d}.jpg", quality=90)


def our_loader(root: Path, config: LoaderBench) -> "Loader":
    """The package's loader with the paper's transforms."""
    from eigengrain.data import Transforms, build_transform, make_loader, open_dataset

    dataset = open_dataset("folder", root)
    dataset.transform = build_transform(Transforms("paper", config.size), True, _MEAN, _STD)
    return make_loader(dataset, config.batch_size, train=True, workers=config.workers, drop_last=False)


def plain_loader(root: Path, config: LoaderBench) -> Iterable[Any]:
    """What one would write with torchvision alone, with the same transforms."""
    from eigengrain import _torchvision  # noqa: F401  isort: skip
    from torch.utils.data import DataLoader
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    before = round(config.size * 8 / 7)
    steps = [T.Resize((before, before)), T.CenterCrop(config.size), T.RandomHorizontalFlip()]
    transform = T.Compose([*steps, T.ToTensor(), T.Normalize(_MEAN, _STD)])
    return DataLoader(
        ImageFolder(str(root / "train"), transform),
        batch_size=config.batch_size,
        shuffle=True,
        num_workers=config.workers,
        persistent_workers=config.workers > 0,
    )


def measure(config: LoaderBench, advance: Callable[[str], None] = lambda name: None) -> list[Row]:
    """Both loaders in turns over the same files.

    Args:
        config: sizes.
        advance: called with the loader's name after each epoch.

    Returns:
        a row a loader: images a second, and the ratio to torchvision's.
    """
    with TemporaryDirectory() as folder:
        write_jpegs(Path(folder), config.images, config.size)
        loaders = {OURS: our_loader(Path(folder), config), REFERENCE: plain_loader(Path(folder), config)}
        seconds: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(config.repeats + 1):
            # who goes second finds the processor in another state than who goes first, so they change places
            for name in list(loaders)[:: 1 if turn % 2 else -1]:
                start = perf_counter()
                seen = sum(len(labels) for _, labels in loaders[name])
                if seen != config.images:
                    raise RuntimeError(f"{name} delivered {seen} of {config.images} images")
                if turn:  # the first epoch starts the workers and reads the files into memory
                    seconds[name].append(perf_counter() - start)
                advance(name)
        del loaders
    speed = {name: config.images / median(times) for name, times in seconds.items()}
    return [
        {
            "loader": name,
            "images_per_second": round(speed[name], 2),
            f"ratio_to_{REFERENCE}": round(speed[name] / speed[REFERENCE], 4),
            "size": config.size,
            "images": config.images,
            "batch_size": config.batch_size,
            "workers": config.workers,
            "repeats": config.repeats,
        }
        for name in seconds
    ]


def run(config: LoaderBench) -> None:
    """``eigengrain bench loader``."""
    import torch

    from eigengrain import output
    from eigengrain.environment import describe
    from eigengrain.files import writable, write_csv
    from eigengrain.progress import progress_bar

    path = writable(config.out or "benchmarks/loader-cpu.csv")
    console = output.reading()
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=2 * (config.repeats + 1))
        rows = measure(config, lambda name: progress.update(task, advance=1, description=name))
    environment = describe(torch.device("cpu"))
    write_csv(path, [{**row, **environment} for row in rows])
    for row in rows:
        ratio = row[f"ratio_to_{REFERENCE}"]
        beside = "" if row["loader"] == REFERENCE else f", {ratio:.2f} times {REFERENCE}'s"
        console.print(f"{row['loader']:12} {row['images_per_second']:8.1f} images/s{beside}")
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), style="dim")
    console.print(f"written to {path}", soft_wrap=True, markup=False)
    output.result({"rows": rows, "environment": environment, "files": [path]}, [path])
