"""Many visitors at once: ``python -m benchmarks.explorer_load`` serves the page and moves the split of each of them.

Every visitor does what a browser does at a moved split: it asks for the predictions and for the maps at the same time, and
waits for both. Only this machine is asked.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from eigengrain.cli.explore import Explore
from eigengrain.explorer.opening import open_lenses
from eigengrain.explorer.server import Server, is_loopback

#: seconds after which an answer counts as a failure
PATIENCE = 30.0
#: the events of a moved split, by the names that the page gives them
EVENTS = ("split_glance", "split_maps")


@dataclass(frozen=True)
class Load:
    """What was measured.

    Args:
        quick: seconds until predictions, numbers and chart were there, one a move.
        whole: seconds until the maps were there as well.
        failures: what went wrong.
    """

    quick: list[float]
    whole: list[float]
    failures: list[str]

    def __str__(self) -> str:
        lines = [f"{len(self.whole)} moves, {len(self.failures)} failures"]
        for name, times in (("predictions", self.quick), ("with maps", self.whole)):
            if times:
                lines.append(
                    f"{name}: median {statistics.median(times):.3f} s, p95 {percentile(times, 95):.3f} s, "
                    f"longest {max(times):.3f} s"
                )
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
    """One browser, as far as the server can tell."""

    def __init__(self, client: httpx.AsyncClient, url: str, events: dict[str, int], name: str):
        self.client, self.url, self.events, self.name = client, url.rstrip("/"), events, name

    @staticmethod
    async def events_of(client: httpx.AsyncClient, url: str) -> dict[str, int]:
        """Numbers of the page's events by name."""
        page = (await client.get(f"{url.rstrip('/')}/config")).json()
        return {str(event["api_name"]): int(event["id"]) for event in page["dependencies"]}

    async def ask(self, wanted: Sequence[tuple[str, list[Any]]]) -> list[tuple[float, Any]]:
        """Start several events together and wait for all: seconds and answer of each; an error raises RuntimeError."""
        # a session of its own a round: the server closes the stream when its session has nothing left to say
        session, began = f"{self.name}-{random.getrandbits(48):x}", time.perf_counter()
        waiting: dict[str, int] = {}
        for place, (event, data) in enumerate(wanted):
            body = {"data": data, "fn_index": self.events[event], "session_hash": session, "trigger_id": None}
            joined = await self.client.post(f"{self.url}/gradio_api/queue/join", json=body)
            if joined.status_code != 200:
                raise RuntimeError(f"{event}: refused with {joined.status_code}, {joined.text[:200]}")
            waiting[joined.json()["event_id"]] = place
        found: dict[int, tuple[float, Any]] = {}
        stream = self.client.stream("GET", f"{self.url}/gradio_api/queue/data", params={"session_hash": session})
        async with stream as lines:
            async for line in lines.aiter_lines():
                message = json.loads(line[5:]) if line.startswith("data:") else {}
                if message.get("msg") == "unexpected_error":
                    raise RuntimeError(f"unexpected error: {message.get('message')}")
                if message.get("msg") == "process_completed" and message.get("event_id") in waiting:
                    place = waiting[message["event_id"]]
                    if not message["success"]:
                        raise RuntimeError(f"{wanted[place][0]}: {(message.get('output') or {}).get('error')}")
                    found[place] = time.perf_counter() - began, message["output"]["data"]
                    if len(found) == len(waiting):
                        return [found[k] for k in range(len(wanted))]
        raise RuntimeError("the stream ended before the answer came")


async def _visit(visitor: Visitor, model: str, channels: int, images: int, every: float, until: float, load: Load) -> None:
    chance = random.Random(visitor.name)
    image = f"example-{chance.randrange(images)}"
    await asyncio.sleep(chance.uniform(0, every))  # people do not move in step
    while time.perf_counter() < until:
        began = time.perf_counter()
        chosen = [model, image, chance.randrange(1, channels), ["vanilla", "deconv"], "", "predicted", "exact", "row"]
        try:
            answers = await asyncio.wait_for(visitor.ask([(event, chosen) for event in EVENTS]), PATIENCE)
        except (TimeoutError, RuntimeError, httpx.HTTPError) as error:
            load.failures.append(f"{type(error).__name__}: {error}")
        else:
            load.quick.append(answers[0][0])
            load.whole.append(max(seconds for seconds, _ in answers))
        await asyncio.sleep(max(0.0, every - (time.perf_counter() - began)))


async def visit(url: str, model: str, channels: int, images: int, visitors: int, seconds: float, every: float) -> Load:
    """So many visitors, each moving the split every so many seconds.

    Raises:
        ValueError: for an address that is not on this machine.
    """
    if not is_loopback(urlsplit(url).hostname or ""):
        raise ValueError(f"only this machine is put under load, got {url}")
    load = Load([], [], [])
    limits = httpx.Limits(max_connections=2 * visitors + 8)
    async with httpx.AsyncClient(timeout=PATIENCE, limits=limits, trust_env=False) as client:
        events = await Visitor.events_of(client, url)
        until = time.perf_counter() + seconds
        people = [Visitor(client, url, events, f"visitor{number}") for number in range(visitors)]
        await asyncio.gather(*(_visit(person, model, channels, images, every, until, load) for person in people))
    return load


def main() -> int:
    """Measure and print; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", action="append", default=[], help="folder of a model; the demo's by default")
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two moves of a visitor")
    options = parser.parse_args()
    lenses = open_lenses(Explore(options.checkpoint))
    lens = next(iter(lenses.values()))
    images = min(20, len(lens.images))
    with Server(lenses) as server:
        measured = asyncio.run(
            visit(server.url, lens.name, lens.channels, images, options.visitors, options.seconds, options.every)
        )
    print(f"{options.visitors} visitors, a move every {options.every:g} s each, for {options.seconds:g} s")
    print(measured)
    return 1 if measured.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
