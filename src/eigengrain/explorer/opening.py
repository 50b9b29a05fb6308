"""Which models and images the page begins with: those that were named, those of the demo, or a small one trained now."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eigengrain.cli.checkpoint import plain_transform
from eigengrain.cli.explain import Explain, open_source
from eigengrain.cli.explore import Explore
from eigengrain.data.plumage import open_plumage
from eigengrain.environment import pick_device
from eigengrain.explorer.session import Lens
from eigengrain.explorer.uploads import Uploads
from eigengrain.models import from_pretrained
from eigengrain.models.pretrained import CONFIG_FILE, WEIGHTS_FILE

DEMO, OWN = Path("runs/demo"), Path("runs/explore")
#: the model of the demo that is shown first
BEST = "mpncov+seb"
#: heads that have eigenvalues to choose from, by the beginning of their names
_ABLE = ("mpncov", "logcov")
#: of the small model that is trained where there is none: half a minute on two cores
EPOCHS, PER_CLASS = 6, 100
#: parameters below which a network's work is too small to be shared among threads
SMALL = 1_000_000


def find_demo(folder: Path = DEMO) -> list[Path]:
    """Folders of finished runs whose heads have eigenvalues, the best known first."""
    found = []
    for weights in sorted(folder.glob(f"*/model/{WEIGHTS_FILE}")):
        try:
            described = json.loads((weights.parent / CONFIG_FILE).read_text(encoding="utf-8"))
            head = str(described["model"]["head"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written, or not ours
        if head.startswith(_ABLE):
            found.append(weights.parent.parent)
    return sorted(found, key=lambda run: (run.name != BEST, run.name))


def train_small(folder: Path, device: str) -> Path:
    """A small network with the head ``mpncov+seb``, trained on drawn birds for a short while; its folder.

    It goes on where it was interrupted, and is trained once only.
    """
    from eigengrain.recipes import load_recipe
    from eigengrain.training.loop import train
    from eigengrain.training.signals import Interrupted
    from eigengrain.training.sources import open_sources

    if (folder / "model" / WEIGHTS_FILE).is_file():
        return folder
    options = {"out": str(folder), "epochs": EPOCHS, "device": device, "resume": True}
    config = load_recipe("plumage-demo", {**options, "data.options": {"per_class": PER_CLASS}})
    print("no trained model here: training a small one on drawn birds, about half a minute", file=sys.stderr)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its work is too small to be shared: on busy cores two threads wait for each other
    try:
        train(config, open_sources(config.data, config.seed))
    except Interrupted as stop:
        raise KeyboardInterrupt from stop
    finally:
        torch.set_num_threads(threads)
    return folder


def open_lens(name: str, folder: Path, config: Explore, device: torch.device, uploads: Uploads) -> Lens:
    """A model with images to show it.

    Raises:
        ValueError: if the folder holds no model, its head has no eigenvalues, or the images do not fit.
    """
    says_images = any((place / "args.yaml").is_file() for place in (folder, folder.parent))
    if config.data is not None or says_images:
        asked: dict[str, Any] = {"data": config.data, "root": config.root, "data_options": config.data_options}
        source = open_source(Explain(str(folder), split=config.split, count=1, measure_count=0, **asked))
        return Lens(name, source.model.to(device), source.dataset, uploads=uploads)
    model = from_pretrained(folder)
    side = int(model.pretrained_cfg["input_size"][-1])
    birds = open_plumage("test", per_class=10, size=max(side, 32), transform=plain_transform(model))
    return Lens(name, model.to(device), birds, labelled=model.class_names == birds.classes, uploads=uploads)


def open_lenses(config: Explore) -> dict[str, Lens]:
    """The models of a config by name, at least one.

    Raises:
        ValueError: as :func:`open_lens`.
    """
    device = pick_device(config.device)
    folders = [Path(place) for place in config.checkpoint] or find_demo() or [train_small(OWN, config.device)]
    uploads = Uploads()
    named = zip(_names(folders), folders, strict=True)
    lenses = {name: open_lens(name, folder, config, device, uploads) for name, folder in named}
    if device.type == "cpu" and all(_parameters(lens) < SMALL for lens in lenses.values()):
        torch.set_num_threads(1)
    return lenses


def _parameters(lens: Lens) -> int:
    return sum(parameter.numel() for parameter in lens.model.parameters())


def _names(folders: Sequence[Path]) -> list[str]:
    """Short names: the last word of a path that says something, and as much more as tells them apart.

    Example:
        >>> _names([Path("runs/demo/mpncov/model"), Path("runs/birds"), Path("old/birds")])
        ['mpncov', 'runs/birds', 'old/birds']
    """
    plain = [folder.parent if folder.name == "model" and folder.parent.name else folder for folder in folders]
    short = [folder.name or str(folder) for folder in plain]
    return [name if short.count(name) == 1 else str(folder) for name, folder in zip(short, plain, strict=True)]
