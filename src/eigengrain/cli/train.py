"""``eigengrain train``; its options are in :mod:`eigengrain.training.config`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eigengrain import output
from eigengrain.data.datasets.layout import images_below
from eigengrain.errors import Interrupted
from eigengrain.options import build
from eigengrain.text import counted
from eigengrain.training.config import Train, load_recipe
from eigengrain.yaml_files import read_mapping

#: from this number of images on, a GPU trains the large network
MANY_IMAGES = 500
#: seconds to wait for the server of the pretrained weights
TIMEOUT = 5


def run(config: Train) -> int:
    """Train; the exit code is 130 or 143 after Ctrl-C or SIGTERM, when the checkpoint is written."""
    from eigengrain.training.distributed import is_first
    from eigengrain.training.loop import train

    try:
        result = train(config)
    except Interrupted as stop:
        if is_first():
            _report(config, finished=False)
            print(f"eigengrain: {stop}; continue with --resume", file=sys.stderr)
        return stop.exit_code
    if result is not None and is_first():
        scores = ", ".join(f"{name} {value:.2f}" for name, value in result.scores.items() if not name.endswith("loss"))
        output.say(f"epoch {result.epoch} (select: {result.select}): {scores}; model: {result.model}")
        _report(config, finished=True)
        output.result(result, [result.model])
    return 0


def choose_recipe(values: Mapping[str, Any]) -> tuple[str, str]:
    """The recipe for a folder of photographs, and why: by device, number of images and pretrained weights.

    A resumed run keeps its recipe. Most values of the command line fit only together with the recipe, so few are read here.
    """
    from eigengrain.environment import pick_device
    from eigengrain.training.run_folder import ARGUMENTS

    own = {part: {name: values.get(part, {}).get(name)} for part, name in (("data", "root"), ("model", "weights"))}
    config = build(Train, own | {name: values[name] for name in ("out", "device", "resume") if name in values})
    arguments = Path(config.out) / ARGUMENTS
    if config.resume and arguments.is_file() and (used := read_mapping(arguments).get("recipe")):
        return str(used), f"recipe {used}, as before"
    root, device = Path(config.data.root or "."), pick_device(config.device).type
    table = root.suffix.lower() in (".csv", ".tsv") and root.is_file()
    if not table and not root.is_dir():
        return "photos-small", ""  # the data set will name what is missing
    images = sum(1 for _ in root.open("rb")) - 1 if table else len(images_below(str(root)))
    name = "photos" if device == "cuda" and images >= MANY_IMAGES else "photos-small"
    reason = f"{counted(images, 'image')}, {'a GPU' if device == 'cuda' else 'no GPU'}"
    backbone = load_recipe(name).model.backbone
    if config.model.weights is None and not _weights_available(backbone):
        note = f"the pretrained weights of {backbone} cannot be downloaded, so a small network starts from random weights"
        remedy = f"for a much better model, use --recipe {name} with a network connection or --model.weights FILE"
        return "photos-scratch", f"recipe photos-scratch: {reason}; {note}; {remedy}"
    return name, f"recipe {name}: {reason}"


def _weights_available(backbone: str) -> bool:
    """Whether the pretrained weights of a timm network are in the cache, or their server answers."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    from eigengrain import _torchvision  # noqa: F401  isort: skip
    import timm
    from huggingface_hub import constants, try_to_load_from_cache

    entry = timm.get_pretrained_cfg(backbone)
    hub_id = f"{entry.hf_hub_id}{backbone}" if entry.hf_hub_id.endswith("/") else entry.hf_hub_id
    files = ("model.safetensors", "pytorch_model.bin")
    if any(isinstance(try_to_load_from_cache(hub_id, file), str) for file in files):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(constants.ENDPOINT, timeout=TIMEOUT).close()
    except HTTPError:
        return True  # the server is there, and a download tells more
    except OSError:
        return False
    return True


def _report(config: Train, finished: bool) -> None:
    """Write the report, if the options say so; the model is not lost if that fails."""
    if not config.report:
        return
    from eigengrain.cli.report import report_training

    try:
        output.say(f"report: {report_training(config, finished)}")
    except (ValueError, OSError, RuntimeError) as error:
        remedy = f"try 'eigengrain report {config.out}'"
        print(f"eigengrain: note: the report could not be written ({error}): {remedy}", file=sys.stderr)
