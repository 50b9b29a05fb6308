"""``eigengrain explore`` on the command line."""

import os
import signal
import threading

import httpx
import pytest

from eigengrain.cli import main as cli
from eigengrain.explorer import opening, server
from eigengrain.explorer.server import Server
from eigengrain.models import save_pretrained
from explorer.small_model import bird_model


@pytest.mark.parametrize(
    "words", [["--checkpoint", "no such folder"], ["--port", "0"], ["--split", "tset"], ["--host", "0.0.0.0"]]
)
def test_wrong_options_are_refused_in_one_line_before_a_model_is_opened(words, capsys, monkeypatch):
    monkeypatch.delenv("EIGENGRAIN_PASSWORD", raising=False)
    monkeypatch.setattr(opening, "open_sessions", lambda *_, **__: pytest.fail("opened"))
    assert cli.main(["explore", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words[0] in error or words[1] in error


def test_the_page_is_served_until_ctrl_c(tmp_path, birds, monkeypatch, capsys):
    save_pretrained(bird_model(), tmp_path / "model", birds.classes)
    pages = []

    class Served(Server):
        def __enter__(self):
            super().__enter__()
            threading.Thread(target=self.visit).start()
            return self

        def visit(self):
            try:
                pages.append((self.url, httpx.get(self.url, trust_env=False).status_code))
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(server, "Server", Served)
    before = signal.getsignal(signal.SIGINT)
    images = ["--data", "plumage", "--data_options", "{classes: 3, per_class: 1, cache: false}"]
    assert cli.main(["explore", "--checkpoint", str(tmp_path / "model"), *images, "--device", "cpu"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    [(url, status)] = pages
    assert status == 200
    assert capsys.readouterr().out.split()[0] == url
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
