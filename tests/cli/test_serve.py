"""``eigengrain serve``: the answers of ``predict``, 50 users at once, and hostile requests."""

import asyncio
import base64
import errno
import gzip
import http.client
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi")

from benchmarks.explorer_load import post

import eigengrain as eg
from cli.hostile_files import chunk, png
from eigengrain.cli import explore, serve
from eigengrain.cli import main as cli
from eigengrain.cli.predict import Predict, Prediction, classify, open_classifier
from eigengrain.errors import ArgumentError
from eigengrain.explorer import endpoint as module
from eigengrain.explorer import limits
from eigengrain.explorer.endpoint import Endpoint
from eigengrain.models.calibration import encode_subspace, familiarity
from eigengrain.training.run_folder import TrainedModel

CLASSES = ["wren", "<b>robin</b>", "tit", "owl", "crow", "jay"]


def photograph(seed: int, form: str = "PNG", size: tuple[int, int] = (50, 40)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(stream := io.BytesIO(), form)
    return stream.getvalue()


def send(server: Endpoint, method: str, path: str, body=None, headers=None, **options) -> tuple[int, dict]:
    """The status and the document of a response, which must be JSON."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        connection.request(method, path, body, headers or {}, **options)
        response = connection.getresponse()
        assert response.headers["content-type"] == "application/json"
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def form(content: bytes, name: str = "file", boundary: str = "xyz", file: str = "a.png") -> tuple[bytes, dict[str, str]]:
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{file}"\r\n\r\n'
    kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
    return head.encode() + content + f"\r\n--{boundary}--\r\n".encode(), kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a temperature, for which about half of the photographs are familiar."""
    torch.manual_seed(0)
    model = eg.create_model("test_resnet", head="mpncov", reduce=4, num_classes=6, last_stride=1).eval()
    prepare = TrainedModel(model).images([]).transform
    photos = [Image.open(io.BytesIO(photograph(seed))) for seed in range(8)]
    with torch.inference_mode():
        means = model.forward_features(torch.stack([prepare(photo) for photo in photos])).mean((2, 3))
    subspace = means[[0, 1]]
    subspace[1] = torch.nn.functional.normalize(means[1] - means[0], dim=0)
    threshold = float(familiarity(means[..., None, None], subspace).median())
    model.calibration = {"temperature": 0.2, "familiarity_threshold": threshold, "subspace": encode_subspace(subspace)}
    path = tmp_path_factory.mktemp("model")
    eg.save_pretrained(model, path, CLASSES)
    return path


@pytest.fixture(scope="module")
def server(folder):
    """The server that the command starts, in a thread of this process."""
    started, servers = threading.Event(), []

    class Served(Endpoint):
        def __enter__(self):
            servers.append(super().__enter__())
            started.set()
            return self

    stopped = threading.Event()
    thread = threading.Thread(target=cli.main, args=(["serve", str(folder), "--port", "0", "--device", "cpu", "--quiet"],))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Endpoint", Served)
        patch.setattr("eigengrain.cli.serve.until_stopped", lambda: _Stopping(stopped))
        thread.start()
        assert started.wait(60)
    yield servers[0]
    stopped.set()
    thread.join(20)
    assert not thread.is_alive()


class _Stopping:
    """Signals are only for the main thread, which runs the tests."""

    def __init__(self, event):
        self.event = event

    def __enter__(self):
        return self.event

    def __exit__(self, *_):
        pass


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """A function from an image to the prediction of ``eigengrain predict``."""
    options = Predict(["x"], str(folder), workers=0)
    trained, place = open_classifier(options), tmp_path_factory.mktemp("photos") / "photo"

    def predict(content: bytes) -> Prediction:
        place.write_bytes(content)
        [[prediction]] = classify(trained, [str(place)], options, torch.device("cpu"))
        return prediction

    return predict


def check(answer: dict, prediction: Prediction) -> None:
    classes = [(each["class"], each["probability"]) for each in answer["classes"]]
    assert classes == [(name, pytest.approx(p, abs=1e-6)) for name, p in prediction.classes]
    assert len(classes) == 5
    assert (answer["class"], answer["probability"]) == classes[0]
    assert answer["none_of_these"] == (prediction.doubt == "none of these")


def alive(server: Endpoint) -> bool:
    return send(server, "POST", "/predict", photograph(0))[0] == 200 and server._received == {}


# --- answers ---------------------------------------------------------------------------------------------------------


def test_50_users_get_the_answers_of_predict(server, expected):
    photos = [photograph(seed, ("PNG", "JPEG", "WEBP")[seed % 3]) for seed in range(50)]

    def visit(number: int) -> list[tuple[int, dict]]:
        body, kind = form(photos[number])
        first = send(server, "POST", "/predict", photos[number], {"content-type": "image/png"})
        return [first, send(server, "POST", "/predict", body, kind), send(server, "GET", "/health")]

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(visit, range(50)))
    doubts = set()
    for photo, ((status, raw), (_, posted), health) in zip(photos, answers, strict=True):
        assert status == 200
        assert raw == posted
        assert health == (200, {"status": "ok"})
        prediction = expected(photo)
        check(raw, prediction)
        doubts.add(prediction.doubt)
    assert doubts == {"", "none of these"}
    assert server._received == {}


def test_the_page_has_a_form_and_loads_nothing(server):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    connection.request("GET", "/")
    response = connection.getresponse()
    text, headers = response.read().decode(), response.headers
    connection.close()
    assert response.status == 200
    assert 'action="/predict"' in text
    assert f"curl --data-binary @photo.jpg {server.url}/predict" in text
    assert "&lt;b&gt;robin&lt;/b&gt;" in text
    assert "<b>robin" not in text
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["access-control-allow-origin"] is None
    assert send(server, "GET", "/classes") == (200, {"classes": CLASSES})


# --- hostile requests ------------------------------------------------------------------------------------------------


def bombs() -> dict[str, bytes]:
    zeros, archive = bytes(30 << 20), io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.png", zeros)
    frames = [Image.new("P", (8, 8), k) for k in range(3)]
    frames[0].save(gif := io.BytesIO(), "GIF", save_all=True, append_images=frames[1:])
    jpeg, good = photograph(1, "JPEG", (300, 300)), photograph(1)
    return {
        "zip": archive.getvalue(),
        "gzip": gzip.compress(zeros),
        "pixels": png(100_000, 100_000, 1),
        "width": png(1_000_000, 1, 1),
        "comment": png(8, 8, 8, chunk(b"zTXt", b"a\0\0" + gzip.zlib.compress(zeros * 3))),
        "gif header": gif.getvalue()[:20],
        "gif size": gif.getvalue()[:6] + b"\xff\xff\xff\xff" + gif.getvalue()[10:],
        "half jpeg": jpeg[: len(jpeg) // 3],
        "half png": good[: len(good) // 2],
        "tail of a png": good[8:],
        "flipped png": good[:60] + bytes(40) + good[100:],
        "empty png": b"\x89PNG\r\n\x1a\n",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>",
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) (w) file\n",
        "pdf": b"%PDF-1.4\n1 0 obj\n<<>>\nendobj",
        "html": b"<html><img src='file:///etc/passwd'></html>",
        "json": b'{"url": "file:///etc/passwd"}',
        "bad json": b'{"image": [[[[',
        "deep json": b"[" * 100_000,
        "path": b"/etc/passwd",
        "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        "zeros": bytes(1000),
        "null": b"\0",
        "ones": b"\xff" * 1000,
        "riff": b"RIFF\xff\xff\xff\xffWEBPVP8 ",
        "tiff": b"II*\0\xff\xff\xff\xff",
        "tiff cycle": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
        "bmp": b"BM" + b"\xff" * 60,
        "ppm": b"P6 999999999 999999999 255\n",
        "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(50),
        "avif": b"\0\0\0\x1cftypavif" + bytes(50),
        "heic": b"\0\0\0\x1cftypheic" + bytes(50),
    }


BOMBS = bombs()
IMAGE = photograph(0)
FORM, KIND = form(IMAGE)
NO_FILE = {400}
#: (method, path, body, headers, allowed statuses)
REQUESTS = [
    *(("POST", "/predict", body, {}, {415}) for body in BOMBS.values()),
    *(("POST", "/predict", *form(body), {415}) for body in BOMBS.values()),
    *((method, "/predict", None, {}, {405}) for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")),
    *((method, "/", b"x", {}, {405}) for method in ("POST", "PUT")),
    *(
        ("GET", path, None, {}, {404})
        for path in (
            *(
                "/../../etc/passwd",
                "/%2e%2e/%2e%2e/etc/passwd",
                "/..%2f..%2fetc%2fpasswd",
                "//etc/passwd",
                "/file=/etc/passwd",
            ),
            *("/docs", "/openapi.json", "/redoc", "/static/x", "/predict/", "/%00", "/health%00", "/" + "a" * 5000),
        )
    ),
    ("POST", "/predict", b"", {}, NO_FILE),
    ("POST", "/predict", *form(IMAGE, name="image"), NO_FILE),
    ("POST", "/predict", *form(b""), NO_FILE),
    ("POST", "/predict", FORM, {"content-type": "multipart/form-data"}, {400}),
    ("POST", "/predict", FORM, {"content-type": "multipart/form-data; boundary="}, {400}),
    ("POST", "/predict", FORM, {"content-type": "multipart/form-data; boundary=other"}, {400}),
    ("POST", "/predict", FORM, {"content-type": "multipart/form-data; boundary=" + "b" * 5000}, {400}),
    ("POST", "/predict", FORM.replace(b'name="file"; ', b""), KIND, {400}),
    ("POST", "/predict", FORM[:-30], KIND, {400, 415, 200}),
    ("POST", "/predict", FORM[:-4] + FORM[len(b"--xyz") :], KIND, {400}),  # two files
    ("POST", "/predict", b"--xyz\r\n" * 1000, KIND, {400}),
    ("POST", "/predict", b"--xyz\r\n" + b"a: b\r\n" * 2000, KIND, {400}),
    ("POST", "/predict", FORM, {"content-type": KIND["content-type"] + "; charset=idna"}, {200, 400}),
    ("POST", "/predict", FORM.replace(b"a.png", b"../../\0etc"), KIND, {200, 400}),
    ("POST", "/predict", b"--xyz\r\nContent-Disposition: form-data; name=file\r\n\r\n" + IMAGE, KIND, {400}),
    ("POST", "/predict", b"a" * 5, {"content-length": str(10**12)}, {413}),
    ("POST", "/predict", b"a" * 5, {"content-length": "9" * 15}, {413}),
    ("POST", "/predict", IMAGE, {"origin": "http://example.org"}, {403}),
    ("POST", "/predict", IMAGE, {"origin": "null"}, {403}),
    ("POST", "/predict", IMAGE, {"host": "example.org"}, {400}),
    ("POST", "/predict", IMAGE, {"host": "[::1"}, {400}),
    ("GET", "/", None, {"host": "127.0.0.1.example.org"}, {400}),
    ("GET", "/classes", None, {"host": ""}, {400}),
]


def test_hostile_requests_are_refused_in_json(server):
    assert len(REQUESTS) >= 100
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: send(server, *each[:4]), REQUESTS))
    for request, (status, document) in zip(REQUESTS, answers, strict=True):
        assert status in request[4], (request[:2], request[3], status, document)
        if status != 200:
            assert set(document) == {"error"}
            assert len(document["error"]) < 300
            assert "Traceback" not in document["error"]
            assert "eigengrain-serve" not in document["error"]  # a path
    assert alive(server)


RAW = [
    b"",
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # without a host
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\nabc",
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\nabc",
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\nabc",
    b"CONNECT example.org:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


def exchange(server: Endpoint, data: bytes, shut: bool = True) -> bytes:
    """Everything that the server sends until it closes the connection."""
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        received = b""
        try:
            connection.sendall(data)
            if shut:
                connection.shutdown(socket.SHUT_WR)
            while block := connection.recv(65536):
                received += block
        except OSError as error:  # the server may close the connection before everything is sent
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
        return received


def test_users_are_answered_while_hostile_requests_arrive(server):
    photos = [photograph(seed, "JPEG") for seed in range(5)]
    load = asyncio.run(post(server.url, photos, visitors=10, seconds=3.0, every=0.5, hostile=100))
    assert load.failures == []
    assert load.refused.total() == 100
    assert load.quick
    assert not {"500", "502"} & set(load.refused)
    wait_until(lambda: server._received == {})
    assert alive(server)


@pytest.mark.slow
def test_fifty_users_for_a_minute(server):
    photos = [photograph(seed, "JPEG", (480, 480)) for seed in range(20)]
    load = asyncio.run(post(server.url, photos, visitors=50, seconds=60, every=3, hostile=100))
    assert load.failures == []
    assert len(load.quick) > 100  # everyone, several times


def test_what_is_not_http_is_refused_or_closed(server):
    for data in RAW:
        received = exchange(server, data)
        if received:
            head, _, body = received.partition(b"\r\n\r\n")
            assert head.split()[1][:1] == b"4", (data[:80], received[:200])
            assert set(json.loads(body)) == {"error"}
    assert alive(server)


def test_a_client_that_leaves_is_forgotten(server):
    start = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc"
    for _ in range(20):
        socket.create_connection((server.host, server.port)).close()
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(start)
    end = time.monotonic() + 20
    while server._received and time.monotonic() < end:
        time.sleep(0.02)
    assert alive(server)


def test_a_chunked_body_without_end_is_too_large(server, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BYTES", 100_000)
    body = (bytes(10_000) for _ in range(30))
    try:
        status, _ = send(server, "POST", "/predict", body, encode_chunked=True)
    except ConnectionError:  # closed while it was sent
        status = 413
    assert status == 413
    assert alive(server)


def test_slow_requests_are_ended(server, monkeypatch):
    monkeypatch.setattr(module, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(module, "HEADER_SECONDS", 0.3)
    slow_body = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc"
    assert b" 408 " in exchange(server, slow_body, shut=False).split(b"\r\n")[0]
    assert exchange(server, b"GET / HTTP/1.1\r\nHost:", shut=False) == b""
    monkeypatch.undo()
    assert alive(server)


def test_no_more_connections_than_the_limit(server, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 3)
    connections = [socket.create_connection((server.host, server.port), timeout=20) for _ in range(8)]
    time.sleep(0.2)
    for connection in connections[4:]:
        assert connection.recv(1) == b""
    for connection in connections:
        connection.close()
    monkeypatch.undo()
    time.sleep(0.1)
    assert alive(server)


# --- the endpoint without a model ------------------------------------------------------------------------------------


@pytest.fixture
def held():
    """An endpoint whose answers wait for an event."""
    event = threading.Event()

    def answer(path):
        assert event.wait(30)
        return {"bytes": path.stat().st_size}

    with Endpoint(answer, ["a"], port=0) as server:
        yield server, event
        event.set()


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_answers_503_and_works_again(held, monkeypatch):
    server, event = held
    monkeypatch.setattr(limits, "MAX_QUEUE", 3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(send, server, "POST", "/predict", bytes(k + 1)) for k in range(3)]
        wait_until(lambda: len(server._received) == 3)
        assert send(server, "POST", "/predict", b"x")[0] == 503
        assert send(server, "GET", "/health")[0] == 200
        event.set()
        assert [each.result() for each in waiting] == [(200, {"bytes": k + 1}) for k in range(3)]
    assert send(server, "POST", "/predict", b"x") == (200, {"bytes": 1})


def test_images_in_memory_are_limited(held, monkeypatch):
    server, event = held
    monkeypatch.setattr(limits, "CACHE_BYTES", 1000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(send, server, "POST", "/predict", bytes(900))
        wait_until(lambda: sum(server._received.values()) == 900)
        assert send(server, "POST", "/predict", bytes(200))[0] == 503
        event.set()
        assert waiting.result()[0] == 200


def test_a_model_that_is_busy_for_too_long_answers_503(held, monkeypatch):
    server, _ = held
    monkeypatch.setattr(limits, "MAX_WAIT", 0.2)
    assert send(server, "POST", "/predict", b"x")[0] == 503
    assert server._received == {}


def test_a_bug_is_answered_without_its_traceback(caplog):
    def answer(path):
        raise RuntimeError("secret")

    with Endpoint(answer, ["a"], port=0) as server:
        status, document = send(server, "POST", "/predict", b"x")
        assert send(server, "GET", "/health")[0] == 200
        folder = server._folder
        assert list(folder.iterdir()) == []
    assert status == 500
    assert "secret" not in document["error"]
    assert "secret" in caplog.text  # for the owner of the server
    assert not folder.exists()


def test_a_password_protects_everything_but_the_health():
    def basic(text: str) -> dict[str, str]:
        return {"authorization": "Basic " + base64.b64encode(text.encode()).decode()}

    with Endpoint(lambda path: {}, ["a"], "0.0.0.0", 0, "secret") as server:
        for headers in ({}, basic("eigengrain:wrong"), basic("other:secret"), {"authorization": "Basic ###"}):
            assert send(server, "POST", "/predict", b"x", headers)[0] == 401
            assert send(server, "GET", "/", None, headers)[0] == 401
        assert send(server, "POST", "/predict", b"x", basic("eigengrain:secret"))[0] == 200
        assert send(server, "GET", "/health")[0] == 200
    with pytest.raises(ArgumentError) as error:
        Endpoint(lambda path: {}, ["a"], "0.0.0.0")
    assert error.value.argument == "host"


@pytest.mark.parametrize("code", ["utf-8", "latin-1"])
def test_a_password_in_any_letters(code):
    login = base64.b64encode("eigengrain:pässwörd".encode(code)).decode()
    with Endpoint(lambda path: {}, ["a"], port=0, password="pässwörd") as server:
        assert send(server, "GET", "/classes", None, {"authorization": f"Basic {login}"})[0] == 200
        assert send(server, "GET", "/classes", None, {"authorization": f"Basic {login[:-4]}"})[0] == 401


def test_a_port_in_use(held, folder, capsys):
    server, _ = held
    with pytest.raises(ArgumentError) as error, Endpoint(lambda path: {}, ["a"], port=server.port):
        pass
    assert (error.value.argument, error.value.value) == ("port", server.port)
    assert cli.main(["serve", str(folder), "--port", str(server.port), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["no such folder"],
        ["FOLDER/model.safetensors.x"],
        ["FOLDER", "--host", "0.0.0.0"],
        ["FOLDER", "--port", "70000"],
    ],
)
def test_wrong_options_are_refused_in_one_line(words, folder, monkeypatch, one_line):
    monkeypatch.delenv("EIGENGRAIN_PASSWORD", raising=False)
    assert cli.main(["serve", *(word.replace("FOLDER", str(folder)) for word in words)]) == 2
    one_line()


@pytest.mark.parametrize("host", ["300.1.1.1", "203.0.113.1", "a..b", "name.invalid"])
def test_an_address_where_this_machine_cannot_listen(host, folder):
    with pytest.raises(ArgumentError) as error:
        explore.check_host(host)
    assert (error.value.argument, error.value.value) == ("host", host)
    with pytest.raises(ArgumentError) as error:
        explore.run(explore.Explore([str(folder)], host=host, password="secret"))
    assert error.value.argument == "host"
    with pytest.raises(ArgumentError) as error:
        serve.run(serve.Serve(str(folder), host=host, password="secret"))
    assert error.value.argument == "host"


def test_addresses_of_this_machine():
    for host in ("127.0.0.1", "localhost", "0.0.0.0", *(["::1"] if socket.has_dualstack_ipv6() else [])):
        explore.check_host(host)


def test_models_that_cannot_answer_are_refused(tmp_path, one_line):
    vector = eg.create_model("test_resnet", head="gap", num_classes=0)
    eg.save_pretrained(vector, tmp_path / "vector")
    broken = eg.create_model("test_resnet", head="gap", num_classes=2)
    torch.nn.init.constant_(broken.classifier.bias, float("nan"))
    eg.save_pretrained(broken, tmp_path / "broken")
    for name in ("vector", "broken"):
        assert cli.main(["serve", str(tmp_path / name), "--port", "0", "--device", "cpu"]) == 2
        one_line()


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_ends_the_server(folder, monkeypatch, capsys):
    answers = []

    class Served(Endpoint):
        def __enter__(self):
            super().__enter__()
            threading.Thread(target=self.visit).start()
            return self

        def visit(self):
            try:
                answers.append(send(self, "GET", "/health"))
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(module, "Endpoint", Served)
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["serve", str(folder), "--port", "0", "--device", "cpu", "--json"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert answers == [(200, {"status": "ok"})]
    document = json.loads(capsys.readouterr().out)
    assert document["classes"] == CLASSES
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(document["url"].rpartition(":")[2])))
