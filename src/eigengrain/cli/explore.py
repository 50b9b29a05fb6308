"""``eigengrain explore``: a local web page about the eigenvalues of images."""

import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eigengrain import names, output
from eigengrain.cli.evaluate import check_data_options
from eigengrain.data.datasets.registry import list_datasets
from eigengrain.errors import ArgumentError, FileError, MissingPackageError
from eigengrain.options import check, setting

#: environment variable with the password, so that it does not appear in a list of processes
PASSWORD = "EIGENGRAIN_PASSWORD"


@dataclass(frozen=True)
class Explore:
    """Which models, which images, and the address of the page.

    Args:
        checkpoint: folders of 'eigengrain train' or of save_pretrained; by default the models of 'eigengrain demo', or, if
            there are none, a small model that is trained on drawn birds first.
        data: name of a data set with example images; that of the training by default.
        root: folder of the data set; that of the training by default.
        data_options: more keyword arguments of the data set, for --data.
        split: train, val (if the training has validation images) or test.
        min_probability: answer 'unsure' if no class has this probability, such as 0.8.
        host: address of the page; --password is required for one that others can reach.
        port: port of the page; the first free one from 7860 by default.
        password: password of visitors, who log in as eigengrain; or set it in the environment as EIGENGRAIN_PASSWORD.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        browser: open the page in a browser.
    """

    checkpoint: list[str] = setting([])
    data: str | None = setting(None, offers=list_datasets)
    root: str | None = None
    data_options: dict[str, Any] = setting({})
    split: str = setting("test", choices=names.SPLITS)
    min_probability: float = setting(0.0, least=0, below=1)
    host: str = "127.0.0.1"
    port: int | None = setting(None, least=1, below=65536)
    password: str | None = None
    device: str = setting("auto", offers=names.DEVICES)
    browser: bool = False

    def __post_init__(self) -> None:
        check(self)
        for folder in self.checkpoint:
            if not Path(folder).exists():
                raise FileError(folder, "there is no such folder")
        check_data_options(self.data, self.data_options)


def run(config: Explore) -> int:
    """Serve the page until Ctrl-C."""
    missing = [name for name in ("gradio", "captum", "matplotlib") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"the page needs {' and '.join(missing)}: pip install 'eigengrain[explorer]'")
    from eigengrain.explorer.access import USER, check_password
    from eigengrain.explorer.opening import open_sessions
    from eigengrain.explorer.server import Server

    password = config.password or os.environ.get(PASSWORD)
    check_password(config.host, password)  # before a model is trained in vain
    check_host(config.host)
    data: dict[str, Any] = {"name": config.data, "root": config.root, "options": config.data_options}
    data |= {"device": config.device, "min_probability": config.min_probability}
    sessions = open_sessions(config.checkpoint, config.split, **data)
    with until_stopped() as stopped, Server(sessions, config.host, config.port, password) as server:
        login = f" (name {USER}, and the password)" if password else ""
        output.say(f"{server.url}{login}   models: {', '.join(sessions)}   stop with Ctrl-C")
        sys.stdout.flush()
        output.result({"url": server.url, "models": list(sessions)}, [server.url])
        if config.browser:
            webbrowser.open(server.url)
        stopped.wait()
    output.stderr_console().print("closed")
    return 0


def check_host(host: str) -> None:
    """Raise an ArgumentError if this machine cannot listen at an address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is not a host name, such as a..b
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError("host", f"cannot be used ({reason})", host, "leave it out for this machine only") from error


@contextmanager
def until_stopped() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, for a server that then closes and ends the command with exit code 0."""
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
