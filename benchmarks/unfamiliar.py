"""Share of images of other kinds that a trained model rejects, by several scores, at a share of its own images accepted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import measure
from eigengrain.cli.evaluate import check_checkpoint
from eigengrain.data.datasets.layout import images_below
from eigengrain.data.decode import open_image
from eigengrain.environment import pick_device
from eigengrain.models import CovarianceNet
from eigengrain.models.calibration import familiarity
from eigengrain.options import check, setting
from eigengrain.training.calibration import ACCEPTED, TRAINING_IMAGES, acceptance_threshold, fit_subspace
from eigengrain.training.run_folder import TrainedModel, open_run

Prepare = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class UnfamiliarBench:
    """Measure how many images that are none of the classes a trained model rejects.

    Args:
        checkpoint: folders of trainings with validation images.
        images: folders of other photographs; noise, flat colours and textures are made in any case.
        count: images of each kind.
        accepted: share of the validation images that each score accepts.
        seed: seed of the images that are made.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: CSV file.
    """

    checkpoint: list[str] = setting([])
    images: list[str] = setting([])
    count: int = setting(200, least=1)
    accepted: float = setting(ACCEPTED, above=0, below=1)
    seed: int = setting(0, least=0)
    device: str = "auto"
    out: str = "benchmarks/unfamiliar.csv"

    def __post_init__(self) -> None:
        check(self)


def textures(side: int, count: int, seed: int) -> Iterator[tuple[str, list[Image.Image]]]:
    """Kinds of images without an object: noise, blurred noise, flat colours, gratings and checks."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side

    def noise() -> Any:
        return generator.integers(0, 256, (side, side, 3))

    def blurred() -> Any:
        cells = generator.integers(0, 256, (generator.integers(3, 16),) * 2 + (3,))
        return np.asarray(Image.fromarray(cells.astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC))

    def two_colours(pattern: Any) -> Any:
        first, second = generator.uniform(0, 255, (2, 3))
        return pattern[..., None] * first + (1 - pattern[..., None]) * second

    def flat() -> Any:
        return two_colours(np.zeros((side, side)))

    def grating() -> Any:
        angle, frequency = generator.uniform(0, np.pi), generator.uniform(3, 25)
        return two_colours(0.5 + 0.5 * np.sin(2 * np.pi * frequency * (x * np.cos(angle) + y * np.sin(angle))))

    def checks() -> Any:
        cells = generator.integers(3, 20)
        return two_colours((np.floor(x * cells) + np.floor(y * cells)) % 2)

    for make in (noise, blurred, flat, grating, checks):
        yield make.__name__, [Image.fromarray(make().astype(np.uint8)) for _ in range(count)]


@torch.inference_mode()
def score(model: CovarianceNet, images: Sequence[Tensor], batch: int = 50) -> dict[str, Tensor]:
    """Scores of images, higher for familiar ones, and the means of their feature maps.

    ``rankfeat`` is the energy after the largest singular value of the feature map is removed (Song et al., NeurIPS 2022).
    """
    device, rows = next(model.parameters()).device, []
    for start in range(0, len(images), batch):
        features = model.forward_features(torch.stack(list(images[start : start + batch])).to(device))
        U, s, Vh = torch.linalg.svd(features.flatten(2), full_matrices=False)
        rest = features - (s[:, :1, None] * U[:, :, :1] @ Vh[:, :1]).view_as(features)
        logits, reduced = (model.forward_head(each).cpu().double() for each in (features, rest))
        energies = logits.logsumexp(-1), reduced.logsumexp(-1), logits.softmax(-1).max(-1).values
        rows.append((*energies, features.flatten(2).mean(-1).cpu()))
    return dict(
        zip(("energy", "rankfeat", "max probability", "means"), map(torch.cat, zip(*rows, strict=True)), strict=True)
    )


def measure_run(run: TrainedModel, config: UnfamiliarBench) -> list[measure.Row]:
    """One row per score: the share of test images accepted, and the share of each other kind rejected."""
    model, sets = run.model, {}
    for split in ("train", "val", "test"):
        dataset = run.dataset(split)
        some = range(0, len(dataset), -(-len(dataset) // TRAINING_IMAGES) if split == "train" else 1)
        sets[split] = score(model, [dataset[index][0] for index in some])
    for kind, images in textures(run.image_size, config.count, config.seed):
        sets[kind] = score(model, [run.transform(image) for image in images])
    for folder in config.images:
        files = images_below(folder)
        chosen = files[:: max(1, len(files) // config.count)][: config.count]
        prepare = run.images(chosen).transform or run.transform
        sets[Path(folder).name] = score(model, [prepare(open_image(file)) for file in chosen])
    subspace = fit_subspace(sets["train"]["means"].double()).float()
    rows = []
    for values in sets.values():
        values["familiarity"] = familiarity(values.pop("means")[..., None, None], subspace)
    for name in sets["val"]:
        threshold = acceptance_threshold(sets["val"][name], config.accepted)
        shares = {kind: float((values[name] >= threshold).double().mean()) for kind, values in sets.items()}
        rejected = {kind: round(1 - shares[kind], 4) for kind in list(sets)[3:]}
        row = {"run": str(run.path), "head": model.config["head"], "score": name, "accepted": config.accepted}
        row |= {"test_accepted": round(shares["test"], 4), **rejected}
        rows.append(row | {"mean_rejected": round(sum(rejected.values()) / len(rejected), 4)})
    return rows


def run(config: UnfamiliarBench) -> None:
    """``python -m benchmarks unfamiliar``."""
    check_checkpoint(config.checkpoint)
    device, rows = pick_device(config.device), []
    for checkpoint in config.checkpoint:
        trained = open_run(checkpoint)
        trained.model.to(device)
        rows += measure_run(trained, config)
    path = Path(config.out)
    measure.save(path, rows, device)
    columns = [name for name in rows[0] if name not in ("run", "accepted")]
    measure.finish({"rows": rows}, [path], device, measure.format_table(rows, columns))
