"""The server over HTTP, without a browser: requests that it answers, and attacks that it refuses."""

import asyncio
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from benchmarks.explorer_load import Visitor, percentile, post, visit

from eigengrain.errors import ArgumentError
from eigengrain.explorer.limits import MAX_BYTES
from eigengrain.explorer.server import Server
from explorer.hostile import UPLOADS

CHOSEN = ["seb", "example-1", 40, ["smooth"], "", "predicted", "exact", "row", ""]


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client


def send(server, *events):
    """Send (event, values) to the page as a browser does, and return the answers."""

    async def once():
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            visitor = Visitor(client, server.url, await Visitor.events_of(client, server.url), "tester")
            return await visitor.ask(events)

    return [answer for _, answer in asyncio.run(once())]


def put(http, name, content):
    """Upload a file and return its path on the server, or the response if it was refused."""
    answer = http.post("/gradio_api/upload", files={"files": (name, content)})
    return answer.json()[0] if answer.status_code == 200 else answer


def as_file(path):
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}, "orig_name": Path(path).name}


def alive(server):
    (answer,) = send(server, ("split_glance", CHOSEN))
    return "top:40" in answer[2]


def test_a_new_split_is_answered(server):
    glance, maps = send(server, ("split_glance", CHOSEN), ("split_maps", CHOSEN))
    assert "large: 40" in glance[1]
    assert glance[3].startswith("model=seb&image=example-1&split=40")
    assert maps[0].count("<img") == 3


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "pyproject.toml", "/proc/self/environ", "..%2F..%2Fetc%2Fpasswd", __file__]
)
def test_files_of_the_machine_are_not_served(http, path):
    for prefix in ("/gradio_api/file=", "/gradio_api/file/", "/file=", "/static/", "/assets/"):
        answer = http.get(prefix + path)
        assert answer.status_code in (403, 404), (prefix, answer.text[:200])


@pytest.mark.parametrize("path", ["/etc/passwd", __file__])
def test_a_path_from_the_browser_is_not_opened(server, path):
    with pytest.raises(RuntimeError):
        send(server, ("upload", ["seb", as_file(path), ""]))
    assert Path(path).exists()
    assert alive(server)


def test_an_address_from_the_browser_is_not_fetched(server):
    requests = []

    class Trap(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    trap = HTTPServer(("127.0.0.1", 0), Trap)
    threading.Thread(target=trap.serve_forever, daemon=True).start()
    try:
        with pytest.raises(RuntimeError):
            send(server, ("upload", ["seb", as_file(f"http://127.0.0.1:{trap.server_port}/a.png"), ""]))
    finally:
        trap.shutdown()
        trap.server_close()
    assert requests == []


@pytest.mark.parametrize("name", UPLOADS)
def test_hostile_uploads_are_refused_and_deleted(server, http, hostile_files, name):
    stored = put(http, name, hostile_files[name].read_bytes())
    with pytest.raises(RuntimeError):
        send(server, ("upload", ["seb", as_file(stored), ""]))
    assert not Path(stored).exists()
    assert alive(server)


def test_a_valid_upload_is_analysed_and_its_file_deleted(server, http, session, tmp_path):
    session.images.image(2).save(tmp_path / "bird.png")
    stored = put(http, "bird.png", (tmp_path / "bird.png").read_bytes())
    assert Path(stored).is_file()
    (answer,) = send(server, ("upload", ["seb", as_file(stored), ""]))
    assert answer[0].startswith("upload-")
    assert not Path(stored).exists()
    (answer,) = send(server, ("split_glance", ["seb", answer[0], *CHOSEN[2:]]))
    assert "large: 40" in answer[1]


def test_two_visitors_can_upload_the_same_file_at_once(server, http, session, tmp_path):
    session.images.image(1).save(tmp_path / "bird.png")
    first, second = (put(http, "bird.png", (tmp_path / "bird.png").read_bytes()) for _ in range(2))
    assert first == second  # one file on the disk
    (one,), (other,) = (send(server, ("upload", ["seb", as_file(path), ""])) for path in (first, second))
    assert one[0] != other[0]
    assert session.analyse(one[0]).pixels.equal(session.analyse(other[0]).pixels)
    assert not Path(first).exists()


def test_files_that_are_too_large_are_refused(http):
    answer = put(http, "large.png", bytes(MAX_BYTES + 1000))
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "chosen",
    [
        ["no such model", *CHOSEN[1:]],
        ["seb", "/etc/passwd", *CHOSEN[2:]],
        ["seb", None, *CHOSEN[2:]],
        [*CHOSEN[:4], "top:1000", *CHOSEN[5:]],
        [{"a": 1}, *CHOSEN[1:]],
    ],
)
def test_invalid_values_are_refused(server, chosen):
    with pytest.raises(RuntimeError):
        send(server, ("split_glance", chosen))
    assert alive(server)


def test_the_browser_can_only_load_from_the_server(http):
    answer = http.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    config = http.get("/config").json()
    assert config["analytics_enabled"] is False
    assert config["stylesheets"] == []


def test_another_host_name_is_refused(http):
    assert http.get("/", headers={"host": "attacker.example"}).status_code == 400


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_password_is_required_if_other_machines_can_reach_the_page(session, host):
    with pytest.raises(ArgumentError) as caught:
        Server({"seb": session}, host=host)
    assert (caught.value.argument, caught.value.value) == ("host", host)
    assert "{password}" in caught.value.remedy


def test_the_password_is_checked(session):
    with Server({"seb": session}, password="correct horse") as server:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.get("/config").status_code == 401
            assert client.get("/gradio_api/file=/etc/passwd").status_code in (401, 403)
            assert client.post("/gradio_api/queue/join", json={"data": CHOSEN, "fn_index": 0}).status_code == 401
            wrong = {"username": "eigengrain", "password": "battery staple"}
            assert client.post("/login", data=wrong).status_code == 400
            assert client.post("/login", data={**wrong, "password": "correct horse"}).status_code == 200
            assert client.get("/config").status_code == 200


def test_a_port_that_is_in_use(server, session):
    port = int(server.url.rstrip("/").rsplit(":", 1)[1])
    with pytest.raises(ArgumentError) as caught:
        Server({"seb": session}, port=port).__enter__()
    assert (caught.value.argument, caught.value.value) == ("port", port)


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(session, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    with Server({"seb": session}) as server:
        assert httpx.get(server.url, trust_env=False).status_code == 200
        assert (os.environ.get("no_proxy"), os.environ["NO_PROXY"]) == (None, "example.org")


def test_the_loopback_address_of_ipv6(session):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with Server({"seb": session}, host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(server.url, trust_env=False).status_code == 200
        assert httpx.get(server.url, headers={"host": "attacker.example"}, trust_env=False).status_code == 400


def test_a_server_that_fails_to_start_leaves_nothing(session, monkeypatch):
    before = os.environ.get("GRADIO_TEMP_DIR")
    server = Server({"seb": session})
    monkeypatch.setattr(server.blocks, "launch", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server.__enter__()
    assert not server.page.uploads.exists()
    assert os.environ.get("GRADIO_TEMP_DIR") == before


def test_uploads_are_private_and_deleted_at_the_end(session):
    before = os.environ.get("GRADIO_TEMP_DIR")
    with Server({"seb": session}) as server:
        folder = server.page.uploads
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert os.environ.get("GRADIO_TEMP_DIR") == before


def test_a_few_visitors_while_hostile_requests_arrive(server, session):
    load = asyncio.run(visit(server.url, "seb", session.channels, 3, visitors=3, seconds=1.0, every=0.4, hostile=28))
    assert load.failures == []
    assert load.refused.total() == 28
    assert len(load.whole) == len(load.quick) > 0
    assert percentile(load.quick, 50) <= percentile(load.whole, 95)


def test_only_this_machine_can_be_put_under_load():
    for visits in (visit("http://192.0.2.1:80", "seb", 64, 1, 1, 1, 1), post("http://192.0.2.1:80", [b""], 1, 1, 1)):
        with pytest.raises(ArgumentError):
            asyncio.run(visits)


@pytest.mark.slow
def test_fifty_visitors(server, session):
    load = asyncio.run(visit(server.url, "seb", session.channels, 9, visitors=50, seconds=60, every=3, hostile=100))
    assert load.failures == []
    assert len(load.whole) > 100  # everyone, several times
