"""Open the models of the page: the given ones, those of the demo, or a small one that is trained now."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eigengrain.data import ImageSet
from eigengrain.data.plumage import open_plumage
from eigengrain.environment import pick_device
from eigengrain.errors import Interrupted
from eigengrain.explorer.limits import Uploads
from eigengrain.explorer.session import Session, spectral_head
from eigengrain.models.pretrained import WEIGHTS_FILE
from eigengrain.recipes import load_recipe
from eigengrain.training.loop import train
from eigengrain.training.run_folder import TrainedModel, open_run

#: folders of the demo, and of the model that is trained if there is none
DEMO, OWN = Path("runs/demo"), Path("runs/explore")
#: head of the demo model that is shown first
BEST_HEAD = "mpncov+seb"
#: sizes of the training of a small model: half a minute on two cores
EPOCHS, PER_CLASS = 6, 100
#: networks with fewer parameters run faster on a single thread
SMALL = 1_000_000


def find_demo(folder: Path = DEMO) -> list[TrainedModel]:
    """Open the finished runs of the demo whose head has eigenvalues to choose from, the best head first."""
    models = []
    for weights in sorted(folder.glob(f"*/model/{WEIGHTS_FILE}")):
        try:
            trained = open_run(weights.parent)
            spectral_head(trained.model)
        except ValueError:
            continue  # incomplete, not one of ours, or without eigenvalues
        models.append(trained)
    return sorted(models, key=lambda trained: trained.model.config["head"] != BEST_HEAD)


def train_small(folder: Path, device: str) -> Path:
    """Train a small network on drawn birds, or resume its training, and return its folder."""
    if (folder / "model" / WEIGHTS_FILE).is_file():
        return folder
    options = {"out": str(folder), "epochs": EPOCHS, "device": device, "resume": True}
    config = load_recipe("plumage-demo", {**options, "data.options": {"per_class": PER_CLASS}})
    print("no trained model here: training a small one on drawn birds, about half a minute", file=sys.stderr)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is small: on busy cores two threads would wait for each other
    try:
        train(config)
    except Interrupted as stop:
        raise KeyboardInterrupt from stop
    finally:
        torch.set_num_threads(threads)
    return folder


def open_sessions(
    paths: Sequence[str | Path] = (),
    split: str = "test",
    *,
    name: str | None = None,
    root: str | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "auto",
    min_probability: float = 0.0,
) -> dict[str, Session]:
    """Open sessions on one or more models, by their names on the page.

    Args:
        paths: folders that :func:`eigengrain.open_run` opens; without any, the models of the demo, and without these a
            small model that is trained now.
        split, name, root, options: data set of the examples, as in :meth:`TrainedModel.dataset`. A model folder without
            its training options is shown drawn birds if no data set is given.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` or ``mps``.
        min_probability: a model is unsure if no class has this probability.

    Raises:
        FileError: if a folder does not contain a model.
        ArgumentError: if a head has no eigenvalues to choose from, or the data set does not fit the model.
    """
    chosen = pick_device(device)
    models = [open_run(path) for path in paths] or find_demo() or [open_run(train_small(OWN, device))]
    titles = _titles([Path(trained.path or "model") for trained in models])
    uploads = Uploads()
    sessions = {}
    for title, trained in zip(titles, models, strict=True):
        if trained.config is None and name is None and root is None and not options:
            size = max(trained.image_size, 32)
            images: ImageSet = open_plumage("test", per_class=10, size=size, transform=trained.transform)
            labelled = trained.model.class_names == images.classes
        else:
            images, labelled = trained.dataset(split, name=name, root=root, options=options), True
        sessions[title] = Session(title, trained.model.to(chosen), images, labelled, uploads, min_probability)
    if chosen.type == "cpu" and all(sum(w.numel() for w in trained.model.parameters()) < SMALL for trained in models):
        torch.set_num_threads(1)
    return sessions


def _titles(folders: Sequence[Path]) -> list[str]:
    """Short names: the last part of each path, or the whole path if two would be equal.

    Example:
        >>> _titles([Path("runs/demo/mpncov/model"), Path("runs/birds"), Path("old/birds")])
        ['mpncov', 'runs/birds', 'old/birds']
    """
    runs = [folder.parent if folder.name == "model" and folder.parent.name else folder for folder in folders]
    short = [run.name or str(run) for run in runs]
    return [title if short.count(title) == 1 else str(run) for title, run in zip(short, runs, strict=True)]
