"""Response times of the explorer and of the HTTP endpoint with many visitors at once, on this machine.

A visitor of the explorer does what a browser does when the split is moved: it requests predictions and maps at the same
time, and waits for both. A visitor of the endpoint posts an image. Hostile requests arrive meanwhile.
"""

import asyncio
import gzip
import io
import json
import random
import subprocess
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from benchmarks.measure import Row, check_least
from eigengrain import output
from eigengrain.errors import ArgumentError, FailedError
from eigengrain.files import writable, write_csv

if TYPE_CHECKING:
    import httpx

#: seconds after which an answer counts as a failure
TIMEOUT = 30.0
#: events of the page when the split is moved
EVENTS = ("split_glance", "split_maps")


@dataclass(frozen=True)
class ExplorerLoad:
    """Measure the explorer or the HTTP endpoint with many visitors.

    Args:
        server: explorer (the page of 'eigengrain explore') or serve (the endpoint of 'eigengrain serve').
        checkpoint: folders of models; those of the demo by default. serve takes one.
        visitors: number of visitors.
        seconds: duration.
        every: seconds between two requests of a visitor.
        hostile: number of hostile requests during that time.
        out: CSV file, to which the result is appended; benchmarks/explorer-load-cpu.csv by default.
    """

    server: Literal["explorer", "serve"] = "explorer"
    checkpoint: list[str] = field(default_factory=list)
    visitors: int = 50
    seconds: float = 60.0
    every: float = 3.0
    hostile: int = 100
    out: str = "benchmarks/explorer-load-cpu.csv"

    def __post_init__(self) -> None:
        check_least(self, hostile=0)
        for name in ("visitors", "seconds", "every"):
            if not getattr(self, name) > 0:
                raise ArgumentError(name, "must be above 0", getattr(self, name))
        if self.server == "serve" and len(self.checkpoint) != 1:
            raise ArgumentError("checkpoint", "must be one model for serve", self.checkpoint)


@dataclass(frozen=True)
class Load:
    """The measured times, one per request of a visitor, and errors."""

    quick: list[float] = field(default_factory=list)  # seconds until the answer, or predictions and chart, arrived
    whole: list[float] = field(default_factory=list)  # seconds until the maps arrived too
    failures: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # answers to hostile requests by status; "closed" without one

    def rows(self, names: Sequence[str]) -> list[Row]:
        """One row for the first answers and one for the complete ones, if there are two kinds."""
        times = dict(zip(names, (self.quick, self.whole), strict=False))
        return [
            {
                "what": name,
                "answers": len(seconds),
                "failures": len(self.failures),
                "median_s": round(median(seconds), 4),
                "p95_s": round(percentile(seconds, 95), 4),
                "maximum_s": round(max(seconds), 4),
            }
            for name, seconds in times.items()
            if seconds
        ]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` percent of the values do not exceed.

    Example:
        >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([1.0], 95)
        (2.0, 1.0)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share) // 100) - 1)]


class Visitor:
    """The requests of one browser."""

    def __init__(self, client: "httpx.AsyncClient", url: str, events: dict[str, int], name: str):
        self.client, self.url, self.events, self.name = client, url.rstrip("/"), events, name

    @staticmethod
    async def events_of(client: "httpx.AsyncClient", url: str) -> dict[str, int]:
        """Numbers of the events of the page by name."""
        page = (await client.get(f"{url.rstrip('/')}/config")).json()
        return {str(event["api_name"]): int(event["id"]) for event in page["dependencies"]}

    async def ask(self, requests: Sequence[tuple[str, list[Any]]]) -> list[tuple[float, Any]]:
        """Send several events with their data together and wait for all: seconds and answer of each."""
        # each round has its own session: the server closes the stream when all answers of a session are sent
        session, start = f"{self.name}-{random.getrandbits(48):x}", time.perf_counter()
        waiting: dict[str, int] = {}
        for place, (event, data) in enumerate(requests):
            body = {"data": data, "fn_index": self.events[event], "session_hash": session, "trigger_id": None}
            joined = await self.client.post(f"{self.url}/gradio_api/queue/join", json=body)
            if joined.status_code != 200:
                raise RuntimeError(f"{event}: refused with {joined.status_code}, {joined.text[:200]}")
            waiting[joined.json()["event_id"]] = place
        answers: dict[int, tuple[float, Any]] = {}
        stream = self.client.stream("GET", f"{self.url}/gradio_api/queue/data", params={"session_hash": session})
        async with stream as lines:
            async for line in lines.aiter_lines():
                message = json.loads(line[5:]) if line.startswith("data:") else {}
                if message.get("msg") == "unexpected_error":
                    raise RuntimeError(f"unexpected error: {message.get('message')}")
                if message.get("msg") == "process_completed" and message.get("event_id") in waiting:
                    place = waiting[message["event_id"]]
                    if not message["success"]:
                        raise RuntimeError(f"{requests[place][0]}: {(message.get('output') or {}).get('error')}")
                    answers[place] = time.perf_counter() - start, message["output"]["data"]
                    if len(answers) == len(waiting):
                        return [answers[k] for k in range(len(requests))]
        raise RuntimeError("the stream ended before the answer arrived")


def check_loopback(url: str) -> None:
    """Raise an ArgumentError for a server on another machine."""
    from eigengrain.explorer.access import is_loopback

    if not is_loopback(urlsplit(url).hostname or ""):
        raise ArgumentError("url", "must be on this machine", url)


async def repeat(request: Callable[[], Any], load: Load, chance: random.Random, until: float, every: float) -> None:
    """Send a request at a regular interval until a time, and record its seconds or its failure."""
    import httpx

    await asyncio.sleep(chance.uniform(0, every))  # visitors do not act at the same time
    while (start := time.perf_counter()) < until:
        try:
            times = await asyncio.wait_for(request(), TIMEOUT)
        except (TimeoutError, RuntimeError, httpx.HTTPError) as error:
            load.failures.append(f"{type(error).__name__}: {error}")
        else:
            load.quick.append(times[0])
            load.whole.append(max(times))
        await asyncio.sleep(max(0.0, every - (time.perf_counter() - start)))


async def visit(
    url: str, model: str, channels: int, images: int, visitors: int, seconds: float, every: float, hostile: int = 0
) -> Load:
    """Let visitors of the explorer move the split, on this machine alone."""
    import httpx

    check_loopback(url)
    load, limits = Load(), httpx.Limits(max_connections=2 * visitors + 8)

    def mover(visitor: Visitor, chance: random.Random) -> Callable[[], Any]:
        image = f"example-{chance.randrange(images)}"

        async def move() -> list[float]:
            choice = [model, image, chance.randrange(1, channels), ["smooth"], "", "predicted", "exact", "row", ""]
            return [seconds for seconds, _ in await visitor.ask([(event, choice) for event in EVENTS])]

        return move

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        events = await Visitor.events_of(client, url)
        until, work = time.perf_counter() + seconds, [attack(url, "/gradio_api/upload", hostile, seconds, load)]
        for number in range(visitors):
            visitor = Visitor(client, url, events, f"visitor{number}")
            chance = random.Random(visitor.name)
            work.append(repeat(mover(visitor, chance), load, chance, until, every))
        await asyncio.gather(*work)
        await mover(Visitor(client, url, events, "last"), random.Random(0))()  # the server still answers
    return load


async def post(url: str, photos: Sequence[bytes], visitors: int, seconds: float, every: float, hostile: int = 0) -> Load:
    """Let visitors post images to the endpoint, on this machine alone. An image must always get the same answer."""
    import httpx

    check_loopback(url)
    load, limits = Load(), httpx.Limits(max_connections=2 * visitors + 8)
    answers: dict[int, Any] = {}

    def poster(client: httpx.AsyncClient, chance: random.Random) -> Callable[[], Any]:
        async def send() -> list[float]:
            number, as_form, start = chance.randrange(len(photos)), chance.random() < 0.5, time.perf_counter()
            body: Any = {"files": {"file": photos[number]}} if as_form else {"content": photos[number]}
            response = await client.post(f"{url}/predict", **body)
            if response.status_code != 200 or answers.setdefault(number, response.json()) != response.json():
                raise RuntimeError(f"image {number}: {response.status_code}, {response.text[:200]}")
            return [time.perf_counter() - start]

        return send

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        until, work = time.perf_counter() + seconds, [attack(url, "/predict", hostile, seconds, load)]
        for chance in map(random.Random, range(visitors)):
            work.append(repeat(poster(client, chance), load, chance, until, every))
        await asyncio.gather(*work)
        await poster(client, random.Random(0))()  # the server still answers
    return load


# Hostile requests


def hostile_bodies(chance: random.Random) -> dict[str, bytes]:
    """Files that are not what they seem: damaged, or far larger than their size."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(chance.getrandbits(32)).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(jpeg := io.BytesIO(), "JPEG")
    Image.new("L", (1, 1)).save(small := io.BytesIO(), "PNG")
    header = b"IHDR" + (100_000).to_bytes(4, "big") * 2 + bytes((8, 0, 0, 0, 0))
    zeros, archive, photo = bytes(20 << 20), io.BytesIO(), jpeg.getvalue()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("photo.png", zeros)
    flipped = bytearray(photo)
    for _ in range(20):
        flipped[chance.randrange(2, len(flipped))] ^= 1 << chance.randrange(8)
    return {
        "cut photo": photo[: chance.randrange(2, len(photo) // 2)],
        "damaged photo": bytes(flipped),
        "ten thousand megapixels": small.getvalue()[:12] + header + zlib.crc32(header).to_bytes(4, "big") + bytes(50),
        "zip bomb": archive.getvalue(),
        "gzip bomb": gzip.compress(zeros),
        "broken JSON": b'{"image": ' + b"[" * 10_000,
        "noise": chance.randbytes(chance.randrange(1, 5000)),
    }


def hostile_requests(count: int, host: str, path: str) -> Iterator[tuple[str, list[bytes]]]:
    """Requests as pieces that are sent one after another with pauses; a name for each.

    Example:
        >>> requests = list(hostile_requests(40, "localhost", "/predict"))
        >>> len(requests), len({name for name, _ in requests}) > 15
        (40, True)
    """
    chance = random.Random(0)

    def request(body: bytes, line: str = f"POST {path}", length: int | None = None, head: str = "") -> bytes:
        size = len(body) if length is None else length
        return f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n{head}\r\n".encode() + body

    form = "Content-Type: multipart/form-data; boundary=x\r\n"
    part = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="../../a"\r\n\r\n%s\r\n--x--\r\n'
    while count > 0:
        bodies = hostile_bodies(chance)
        requests = {name: [request(body)] for name, body in bodies.items()}
        requests |= {f"{name} in a form": [request(part % (b"file", body), head=form)] for name, body in bodies.items()}
        photo = bodies["cut photo"]
        requests |= {
            "form without end": [request((part % (b"file", photo))[:-30], head=form)],
            "form without a file": [request(part % (b"other", photo), head=form)],
            "form of headers": [request(b"--x\r\n" + b"a: b\r\n" * 3000, head=form)],
            "huge length": [request(photo, length=10**12)],
            "negative length": [request(photo, length=-1)],
            "body that does not come": [request(photo, length=len(photo) + 1000)],
            "slow body": [request(b"", length=3), b"a", b"b", b"c"],
            "slow headers": [f"POST {path}".encode(), b" HTTP/1.1\r\nHost:", b" a\r\n"],
            "wrong method": [request(photo, f"{chance.choice(('PUT', 'DELETE', 'PATCH', 'TRACE', 'BREW'))} {path}")],
            "long path": [request(b"", "GET /" + "a" * 20_000)],
            "other folder": [request(b"", "GET /%2e%2e/..%2f../etc/passwd")],
            "other host": [request(photo, head="Host: example.org\r\n")],
            "large headers": [request(b"", head="X: " + "a" * 200_000 + "\r\n")],
            "no HTTP": [chance.randbytes(300)],
        }
        yield from list(requests.items())[:count]
        count -= len(requests)


async def attack(url: str, path: str, count: int, seconds: float, load: Load) -> None:
    """Send hostile requests, spread over the duration, and count the answers; a status of 500 or 502 is a failure."""
    address = urlsplit(url)

    async def send(pieces: Sequence[bytes]) -> str:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.3 if len(pieces) > 1 else 0)
            return (await asyncio.wait_for(reader.readline(), 5)).decode("latin-1")[9:12] or "closed"
        except TimeoutError:
            return "no answer"  # to an unfinished request
        except OSError:
            return "closed"
        finally:
            writer.close()

    async def later(name: str, pieces: Sequence[bytes], delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            status = await send(pieces)
        except OSError as error:
            load.failures.append(f"{name}: {error}")
            return
        load.refused[status] += 1
        if status in ("500", "502"):
            load.failures.append(f"{name}: answered with {status}")

    requests = hostile_requests(count, address.netloc, path)
    await asyncio.gather(*(later(*each, seconds * k / count) for k, each in enumerate(requests)))


# Servers


@contextmanager
def served(checkpoint: str) -> Iterator[str]:
    """Start 'eigengrain serve' in a process of its own; its address."""
    command = [sys.executable, "-m", "eigengrain", "serve", checkpoint, "--port", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not (url := process.stdout.readline().strip()):
                raise FailedError("'eigengrain serve' did not start")
            yield url
            if process.poll() is not None:
                raise FailedError(f"'eigengrain serve' ended with {process.returncode}")
        finally:
            process.terminate()


def drawn_photos() -> list[bytes]:
    """JPEG files of 20 drawn birds."""
    from eigengrain.data.plumage import open_plumage

    birds, files = open_plumage("test", per_class=2, size=480, cache=False), []
    for number in range(20):
        birds.image(number).save(stream := io.BytesIO(), "JPEG", quality=90)
        files.append(stream.getvalue())
    return files


def measure_serve(config: ExplorerLoad) -> list[Row]:
    """Rows of the endpoint."""
    photos = drawn_photos()
    with served(*config.checkpoint) as url:
        load = asyncio.run(post(url, photos, config.visitors, config.seconds, config.every, config.hostile))
    return _report(load, ["answer"])


def measure_explorer(config: ExplorerLoad) -> list[Row]:
    """Rows of the explorer."""
    from eigengrain.explorer.opening import open_sessions
    from eigengrain.explorer.server import Server

    sessions = open_sessions(config.checkpoint)
    session = next(iter(sessions.values()))
    sizes = session.channels, min(20, len(session.images)), config.visitors
    with Server(sessions) as server:
        visits = visit(server.url, session.name, *sizes, config.seconds, config.every, config.hostile)
        load = asyncio.run(visits)
    return _report(load, ["predictions", "predictions and maps"])


def _report(load: Load, names: Sequence[str]) -> list[Row]:
    hostile = ", ".join(f"{status} × {times}" for status, times in sorted(load.refused.items()))
    output.say(*dict.fromkeys(load.failures), *([f"hostile requests: {hostile}"] if hostile else []))
    return load.rows(names)


def run(config: ExplorerLoad) -> int:
    """``python -m benchmarks explorer_load``; 1 if anything failed."""
    import torch

    from eigengrain.environment import describe

    out = writable(config.out)
    measured = measure_serve(config) if config.server == "serve" else measure_explorer(config)
    facts = {name: getattr(config, name) for name in ("server", "visitors", "seconds", "every", "hostile")}
    rows = [facts | row | describe(torch.device("cpu")) for row in measured]
    for row in rows:
        times = "median {median_s} s, 95 % within {p95_s} s, slowest {maximum_s} s".format(**row)
        output.say(f"{row['what']}: {row['answers']} answers, {row['failures']} failures; {times}")
    write_csv(out, [*_other_rows(out, config.server), *rows])
    output.result({"rows": rows, "files": [out]}, [out])
    return 1 if not rows or rows[0]["failures"] else 0


def _other_rows(out: Any, server: str) -> list[Row]:
    """Rows of the other server that the file already has."""
    import csv

    if not out.is_file():
        return []
    with out.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["server"] != server]
