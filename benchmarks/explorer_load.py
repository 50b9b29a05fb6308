"""Response times of the explorer with many visitors at once, on this machine.

Each visitor does what a browser does when the split is moved: it requests predictions and maps at the same time, and waits
for both.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eigengrain import output
from eigengrain.errors import ArgumentError

if TYPE_CHECKING:
    import httpx

#: seconds after which an answer counts as a failure
TIMEOUT = 30.0
#: events of the page when the split is moved
EVENTS = ("split_glance", "split_maps")


@dataclass(frozen=True)
class ExplorerLoad:
    """Measure the explorer with many visitors.

    Args:
        checkpoint: folders of models; that of the demo by default.
        visitors: number of visitors.
        seconds: duration.
        every: seconds between two moves of a visitor.
    """

    checkpoint: list[str] = field(default_factory=list)
    visitors: int = 50
    seconds: float = 60.0
    every: float = 3.0

    def __post_init__(self) -> None:
        for name in ("visitors", "seconds", "every"):
            if not getattr(self, name) > 0:
                raise ArgumentError(name, "must be above 0", getattr(self, name))


@dataclass(frozen=True)
class Load:
    """The measured times, one per move, and errors."""

    quick: list[float]  # seconds until predictions, numbers and chart arrived
    whole: list[float]  # seconds until the maps arrived too
    failures: list[str]

    def __str__(self) -> str:
        lines = [f"{len(self.whole)} moves, {len(self.failures)} failures"]
        for name, times in (("predictions", self.quick), ("with maps", self.whole)):
            if times:
                summary = f"median {median(times):.3f} s, p95 {percentile(times, 95):.3f} s, maximum {max(times):.3f} s"
                lines.append(f"{name}: {summary}")
        return "\n".join([*lines, *dict.fromkeys(self.failures)])


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


async def visit(url: str, model: str, channels: int, images: int, visitors: int, seconds: float, every: float) -> Load:
    """Let visitors move the split at a regular interval, on this machine alone."""
    import httpx

    from eigengrain.explorer.access import is_loopback

    if not is_loopback(urlsplit(url).hostname or ""):
        raise ArgumentError("url", "must be on this machine", url)
    load = Load([], [], [])

    async def move(visitor: Visitor) -> None:
        chance = random.Random(visitor.name)
        image = f"example-{chance.randrange(images)}"
        await asyncio.sleep(chance.uniform(0, every))  # visitors do not move at the same time
        while time.perf_counter() < until:
            start = time.perf_counter()
            choice = [model, image, chance.randrange(1, channels), ["smooth"], "", "predicted", "exact", "row", ""]
            try:
                answers = await asyncio.wait_for(visitor.ask([(event, choice) for event in EVENTS]), TIMEOUT)
            except (TimeoutError, RuntimeError, httpx.HTTPError) as error:
                load.failures.append(f"{type(error).__name__}: {error}")
            else:
                load.quick.append(answers[0][0])
                load.whole.append(max(seconds for seconds, _ in answers))
            await asyncio.sleep(max(0.0, every - (time.perf_counter() - start)))

    limits = httpx.Limits(max_connections=2 * visitors + 8)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        events = await Visitor.events_of(client, url)
        until = time.perf_counter() + seconds
        await asyncio.gather(*(move(Visitor(client, url, events, f"visitor{number}")) for number in range(visitors)))
    return load


def run(config: ExplorerLoad) -> int:
    """``python -m benchmarks explorer_load``; 1 if anything failed."""
    from eigengrain.explorer.opening import open_sessions
    from eigengrain.explorer.server import Server

    sessions = open_sessions(config.checkpoint)
    session = next(iter(sessions.values()))
    images = min(20, len(session.images))
    with Server(sessions) as server:
        visits = visit(server.url, session.name, session.channels, images, config.visitors, config.seconds, config.every)
        load = asyncio.run(visits)
    console = output.console()
    console.print(f"{config.visitors} visitors, a move every {config.every:g} s each, for {config.seconds:g} s")
    console.print(str(load), markup=False)
    output.result(load, [load])
    return 1 if load.failures else 0
