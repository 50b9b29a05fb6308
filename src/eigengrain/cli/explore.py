"""``eigengrain explore``: a local web page. Nothing heavy is imported before it runs."""

import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eigengrain import output
from eigengrain.errors import UnknownName

SPLITS = ("train", "val", "test")

#: where the password is looked for if no option says it, so that it need not stand in a list of processes
PASSWORD = "EIGENGRAIN_PASSWORD"


@dataclass(frozen=True)
class Explore:
    """Which models, which images, and where the page is.

    Args:
        checkpoint: folders of 'eigengrain train' or of save_pretrained; without one, the models of 'eigengrain demo', and
            without these a small one that is trained at once on drawn birds.
        data: name of a data set to take examples from; a training folder says it by itself.
        root: folder of the data set; a training folder says it by itself.
        data_options: more keyword arguments of the data set, for --data.
        split: train, val (of a training folder with validation images) or test.
        host: address of the page; one that others can reach needs --password.
        port: of the page; a free one from 7860 on by default.
        password: asked of visitors, with the name eigengrain; or say it in the environment as EIGENGRAIN_PASSWORD.
        device: auto (CUDA if there is one, else the CPU), cpu, cuda, cuda:1, mps.
        browser: open the page in a browser.
    """

    checkpoint: list[str] = field(default_factory=list)
    data: str | None = None
    root: str | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    host: str = "127.0.0.1"
    port: int | None = None
    password: str | None = None
    device: str = "auto"
    browser: bool = False

    def __post_init__(self) -> None:
        for place in self.checkpoint:
            if not Path(place).is_dir():
                raise ValueError(
                    f"there is no folder {place!r}: name one of 'eigengrain train' or of save_pretrained, or leave "
                    "--checkpoint out"
                )
        if self.split not in SPLITS:
            raise UnknownName("--split", self.split, SPLITS)
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"--port must be from 1 to 65535, got {self.port}")


def expand(words: Sequence[str]) -> list[str]:
    """Words of a command line with every ``--checkpoint`` adding to those before it instead of replacing them.

    Example:
        >>> expand(["--checkpoint", "runs/a", "--checkpoint=runs/b", "--port", "8000"])
        ['--checkpoint+', 'runs/a', '--checkpoint+=runs/b', '--port', '8000']
    """
    renamed = ["--checkpoint+" if word == "--checkpoint" else word for word in words]
    return [f"--checkpoint+={w.removeprefix('--checkpoint=')}" if w.startswith("--checkpoint=") else w for w in renamed]


def run(config: Explore) -> int:
    """Serve the page until Ctrl-C."""
    missing = [name for name in ("gradio", "captum", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ValueError(f"the page needs {' and '.join(missing)}: pip install 'eigengrain[explorer]'")
    from eigengrain.explorer.opening import open_lenses
    from eigengrain.explorer.server import USER, Server, check_reach

    password = config.password or os.environ.get(PASSWORD)
    check_reach(config.host, password)  # before a model is trained for nothing
    lenses = open_lenses(config)
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Server(lenses, config.host, config.port, password) as server:
            who = f" (name {USER}, and the password)" if password else ""
            said = f"{server.url}{who}   models: {', '.join(lenses)}   Ctrl-C ends it"
            output.reading().print(said, soft_wrap=True, markup=False, highlight=False)
            sys.stdout.flush()
            output.result({"url": server.url, "models": list(lenses)}, [server.url])
            if config.browser:
                webbrowser.open(server.url)
            while not ended.wait(0.5):
                pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    output.progress().print("closed")
    return 0
