"""``eigengrain serve``: a trained model as an HTTP endpoint."""

import os
import sys
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eigengrain import names, output
from eigengrain.cli.evaluate import check_checkpoint
from eigengrain.cli.explore import PASSWORD, check_host, until_stopped
from eigengrain.cli.predict import Predict, classify
from eigengrain.errors import ArgumentError, ImageError, MissingPackageError, ShortRankWarning
from eigengrain.options import check, setting


@dataclass(frozen=True)
class Serve:
    """Which model, and the address.

    Args:
        checkpoint: folder of 'eigengrain train' or of save_pretrained.
        host: address to listen at; --password is required for one that others can reach.
        port: port to listen at; 0 for any free one.
        password: password of visitors, whose name is eigengrain; or set it in the environment as EIGENGRAIN_PASSWORD.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
    """

    checkpoint: str = ""
    host: str = "127.0.0.1"
    port: int = setting(8000, least=0, below=65536)
    password: str | None = None
    device: str = setting("auto", offers=names.DEVICES)

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        check(self)


def run(config: Serve) -> int:
    """Serve until Ctrl-C."""
    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"the server needs {' and '.join(missing)}: pip install 'eigengrain[explorer]'")
    from PIL import Image

    from eigengrain.environment import pick_device
    from eigengrain.explorer.access import USER, check_password
    from eigengrain.explorer.endpoint import Endpoint
    from eigengrain.training.calibration import NONE
    from eigengrain.training.run_folder import open_run

    password = config.password or os.environ.get(PASSWORD)
    check_password(config.host, password)
    check_host(config.host)
    trained, device = open_run(config.checkpoint), pick_device(config.device)
    if trained.model.num_classes == 0:
        raise ArgumentError("checkpoint", "has no classifier (num_classes is 0)", config.checkpoint)
    trained.model.to(device)
    options, title = Predict(["image"], config.checkpoint, workers=0), Path(config.checkpoint).resolve().name

    def answer(path: Path) -> dict[str, Any]:
        [prediction] = next(classify(trained, [str(path)], options, device))
        if prediction.problem:
            raise ImageError(prediction.problem)
        classes: Any = prediction.as_dict()["classes"]
        return {**classes[0], "none_of_these": prediction.doubt == NONE, "classes": classes}

    with warnings.catch_warnings(), until_stopped() as stopped:
        warnings.simplefilter("ignore", ShortRankWarning)  # it is about the training, not about these images
        with TemporaryDirectory() as folder:  # a model that does not work is refused now
            Image.new("RGB", (64, 64)).save(blank := Path(folder) / "blank.png")
            answer(blank)
        with Endpoint(answer, trained.classes, config.host, config.port, password, title) as server:
            login = f" (name {USER}, and the password)" if password else ""
            output.say(f"{server.url}{login}   stop with Ctrl-C\ncurl --data-binary @photo.jpg {server.url}/predict")
            sys.stdout.flush()
            output.result({"url": server.url, "classes": trained.classes}, [server.url])
            stopped.wait()
    output.stderr_console().print("closed")
    return 0
