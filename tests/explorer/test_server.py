"""The page over HTTP, as someone without a browser and with bad intentions sees it."""

import asyncio
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from benchmarks.explorer_load import Visitor, percentile, visit

from eigengrain.explorer.limits import MAX_BYTES
from eigengrain.explorer.server import Server
from explorer.hostile import UPLOADS

CHOSEN = ["seb", "example-1", 40, ["vanilla"], "", "predicted", "exact", "row"]


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client


def ask(server, *wanted):
    async def once():
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            visitor = Visitor(client, server.url, await Visitor.events_of(client, server.url), "tester")
            return await visitor.ask(wanted)

    return [answer for _, answer in asyncio.run(once())]


def put(http, name, content):
    """Where the server keeps an upload."""
    answer = http.post("/gradio_api/upload", files={"files": (name, content)})
    return answer.json()[0] if answer.status_code == 200 else answer


def as_file(path):
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}, "orig_name": Path(path).name}


def alive(server):
    (answer,) = ask(server, ("split_glance", CHOSEN))
    return "top:40" in answer[2]


def test_a_moved_split_is_answered(server):
    glance, maps = ask(server, ("split_glance", CHOSEN), ("split_maps", CHOSEN))
    assert "large: 40" in glance[1]
    assert glance[3].startswith("model=seb&image=example-1&split=40")
    assert maps[0].count("<img") == 3


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "pyproject.toml", "/proc/self/environ", "..%2F..%2Fetc%2Fpasswd", __file__]
)
def test_no_file_is_read_through_the_server(http, path):
    for prefix in ("/gradio_api/file=", "/gradio_api/file/", "/file=", "/static/", "/assets/"):
        answer = http.get(prefix + path)
        assert answer.status_code in (403, 404), (prefix, answer.text[:200])


@pytest.mark.parametrize("path", ["/etc/passwd", __file__])
def test_a_path_from_the_browser_is_no_upload(server, path):
    with pytest.raises(RuntimeError):
        ask(server, ("upload", ["seb", as_file(path)]))
    assert Path(path).exists()
    assert alive(server)


def test_an_address_from_the_browser_is_not_fetched(server):
    asked = []

    class Trap(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    trap = HTTPServer(("127.0.0.1", 0), Trap)
    threading.Thread(target=trap.serve_forever, daemon=True).start()
    try:
        with pytest.raises(RuntimeError):
            ask(server, ("upload", ["seb", as_file(f"http://127.0.0.1:{trap.server_port}/a.png")]))
    finally:
        trap.shutdown()
        trap.server_close()
    assert asked == []


@pytest.mark.parametrize("name", UPLOADS)
def test_hostile_uploads_are_answered_and_forgotten(server, http, tmp_path, name):
    make, said = UPLOADS[name]
    kept = put(http, name, make(tmp_path / name).read_bytes())
    with pytest.raises(RuntimeError, match=said):
        ask(server, ("upload", ["seb", as_file(kept)]))
    assert not Path(kept).exists()
    assert alive(server)


def test_a_good_upload_is_seen_and_its_file_deleted(server, http, lens, tmp_path):
    lens.images.image(2).save(tmp_path / "bird.png")
    kept = put(http, "bird.png", (tmp_path / "bird.png").read_bytes())
    assert Path(kept).is_file()
    (answer,) = ask(server, ("upload", ["seb", as_file(kept)]))
    assert answer[0].startswith("upload-")
    assert not Path(kept).exists()
    (answer,) = ask(server, ("split_glance", ["seb", answer[0], *CHOSEN[2:]]))
    assert "large: 40" in answer[1]


def test_the_same_file_of_two_visitors_at_once_is_seen_by_both(server, http, lens, tmp_path):
    lens.images.image(1).save(tmp_path / "bird.png")
    first, second = (put(http, "bird.png", (tmp_path / "bird.png").read_bytes()) for _ in range(2))
    assert first == second  # one file on the disk
    (one,), (other,) = (ask(server, ("upload", ["seb", as_file(kept)])) for kept in (first, second))
    assert one[0] != other[0]
    assert lens.look(one[0]).pixels.equal(lens.look(other[0]).pixels)
    assert not Path(first).exists()


def test_files_that_are_too_large_do_not_come_in(http):
    answer = put(http, "large.png", bytes(MAX_BYTES + 1000))
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "chosen",
    [
        ["no such model", *CHOSEN[1:]],
        ["seb", "/etc/passwd", *CHOSEN[2:]],
        ["seb", None, *CHOSEN[2:]],
        ["seb", "example-1", 40, ["vanilla"], "top:1000", "predicted", "exact", "row"],
        [{"a": 1}, *CHOSEN[1:]],
    ],
)
def test_senseless_values_are_answered(server, chosen):
    with pytest.raises(RuntimeError):
        ask(server, ("split_maps", chosen))
    assert alive(server)


def test_what_a_browser_may_load(http):
    answer = http.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    config = http.get("/config").json()
    assert config["analytics_enabled"] is False
    assert config["stylesheets"] == []


def test_another_name_for_this_machine_is_refused(http):
    assert http.get("/", headers={"host": "attacker.example"}).status_code == 400


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_others_need_a_password(lens, host):
    with pytest.raises(ValueError, match="--password"):
        Server({"seb": lens}, host=host)


def test_the_password_is_asked_for(lens):
    with Server({"seb": lens}, password="correct horse") as server:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.get("/config").status_code == 401
            assert client.get("/gradio_api/file=/etc/passwd").status_code in (401, 403)
            assert client.post("/gradio_api/queue/join", json={"data": CHOSEN, "fn_index": 0}).status_code == 401
            wrong = {"username": "eigengrain", "password": "battery staple"}
            assert client.post("/login", data=wrong).status_code == 400
            assert client.post("/login", data={**wrong, "password": "correct horse"}).status_code == 200
            assert client.get("/config").status_code == 200


def test_a_port_that_is_taken_is_said(server, lens):
    with pytest.raises(ValueError, match="cannot listen"):
        Server({"seb": lens}, port=int(server.url.rstrip("/").rsplit(":", 1)[1])).__enter__()


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(lens, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    with Server({"seb": lens}) as server:
        assert httpx.get(server.url, trust_env=False).status_code == 200
        assert (os.environ.get("no_proxy"), os.environ["NO_PROXY"]) == (None, "example.org")


def test_the_loopback_address_of_ipv6(lens):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with Server({"seb": lens}, host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(server.url, trust_env=False).status_code == 200
        assert httpx.get(server.url, headers={"host": "attacker.example"}, trust_env=False).status_code == 400


def test_a_page_that_does_not_open_leaves_nothing(lens, monkeypatch):
    before = os.environ.get("GRADIO_TEMP_DIR")
    server = Server({"seb": lens})
    monkeypatch.setattr(server.blocks, "launch", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server.__enter__()
    assert not server.page.uploads.exists()
    assert os.environ.get("GRADIO_TEMP_DIR") == before


def test_uploads_are_deleted_at_the_end(lens):
    before = os.environ.get("GRADIO_TEMP_DIR")
    with Server({"seb": lens}) as server:
        folder = server.page.uploads
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert os.environ.get("GRADIO_TEMP_DIR") == before


def test_a_few_visitors(server, lens):
    load = asyncio.run(visit(server.url, "seb", lens.channels, 3, visitors=3, seconds=1.0, every=0.4))
    assert load.failures == []
    assert len(load.whole) == len(load.quick) >= 3
    assert percentile(load.quick, 50) <= percentile(load.whole, 95)


def test_no_load_on_others():
    with pytest.raises(ValueError, match="only this machine"):
        asyncio.run(visit("http://192.0.2.1:80", "seb", 64, 1, 1, 1, 1))


@pytest.mark.slow
def test_fifty_visitors(server, lens):
    load = asyncio.run(visit(server.url, "seb", lens.channels, 9, visitors=50, seconds=60, every=3))
    print(load)
    assert load.failures == []
    assert len(load.whole) > 500
