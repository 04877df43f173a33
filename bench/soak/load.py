"""The load of the soak test: what its clients send, and how each request ends.

Owns the mix: streamed and unstreamed responses, several choices, clients that disconnect, deadlines, invalid requests.
Every request has a unique id and exactly one outcome. Does not know about faults.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

End = Literal["finished", "left", "deadline", "invalid", "refused", "failed", "wrong", "lost"]
"""`finished`: a complete response. `left`: the client disconnected. `invalid`, `refused`, `deadline`, `failed`: one
error of that kind. `wrong`: a text that differs from the first response to the same request. `lost`: neither an end nor
an error."""
TIMEOUT_S = 300.0
TOPICS = ("rivers", "birds", "bridges", "bread", "clouds", "trains", "islands", "paper")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    request_id: str
    """Id of the request."""
    kind: str
    """Kind of the request in the mix."""
    end: End
    """How it ended."""
    detail: str = ""
    """Message of the error, if any."""


async def drive(url: str, model: str, *, streams: int, seed: int, stop: asyncio.Event) -> list[Outcome]:
    """Send requests on `streams` connections until `stop`, and wait for the last ones.

    Args:
        url: base URL of the API, which ends with /v1.
        model: name of the model.
        streams: number of concurrent requests.
        seed: of the mix.
        stop: ends the load when set.
    """
    client = _Client(url, model)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a replaced server must not inherit connections
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(client.loop(session, random.Random(f"{seed}-{i}"), stop) for i in range(streams)))
    return client.outcomes


class _Client:
    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._num_sent = 0
        self._texts: dict[str, str] = {}
        self.outcomes: list[Outcome] = []

    async def loop(self, session: aiohttp.ClientSession, rng: random.Random, stop: asyncio.Event) -> None:
        kinds = ["stream"] * 5 + ["whole"] * 2 + ["seeded", "choices", "leaves", "deadline", "invalid"]
        while not stop.is_set():
            self._num_sent += 1
            request_id, kind = f"soak-{self._num_sent}", rng.choice(kinds)
            end, detail = await self._one(session, request_id, kind, rng)
            self.outcomes.append(Outcome(request_id, kind, end, detail[:300]))
            if end in ("refused", "failed", "lost"):
                await asyncio.sleep(rng.uniform(0.2, 1.0))

    async def _one(
        self, session: aiohttp.ClientSession, request_id: str, kind: str, rng: random.Random
    ) -> tuple[End, str]:
        body = self._body(kind, rng)
        try:
            async with session.post(
                f"{self._url}/chat/completions", json=body, headers={"x-request-id": request_id}
            ) as response:
                if response.status != 200:
                    return _refusal(response.status, await response.text())
                if kind == "leaves":
                    await response.content.readline()
                    response.close()
                    return "left", ""
                if body.get("stream"):
                    end, text = await _read_stream(response)
                    if end != "finished":
                        return end, text
                else:
                    body_json = await response.json()
                    text = "|".join(choice["message"]["content"] for choice in body_json["choices"])
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
            return "refused", f"{type(error).__name__}: {error}"  # no part of a response had arrived
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            return "lost", f"{type(error).__name__}: {error}"
        expected = self._texts.setdefault(json.dumps(body, sort_keys=True), text)
        return ("finished", "") if text == expected else ("wrong", f"{text!r} instead of {expected!r}")

    def _body(self, kind: str, rng: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"Write a short story about {rng.choice(TOPICS)}."}],
            "temperature": 0,
            "max_tokens": rng.choice((8, 32, 64)),
            "stream": kind not in ("whole", "choices"),
        }
        extras: dict[str, dict[str, Any]] = {
            "seeded": {"temperature": 1.0, "seed": rng.randrange(3)},
            "choices": {"n": 2, "temperature": 0.8, "seed": rng.randrange(3), "max_tokens": 16},
            "deadline": {"timeout": 0.3, "max_tokens": 400},
            "leaves": {"max_tokens": 1000},
            "invalid": {"temperature": 9},
        }
        return body | extras.get(kind, {})


async def _read_stream(response: aiohttp.ClientResponse) -> tuple[End, str]:
    """How a stream ended, and its text or the reason."""
    parts: list[str] = []
    async for raw in response.content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return "finished", "".join(parts)
        if not line.startswith("data:"):
            continue
        event = json.loads(line[5:])
        if "error" in event:
            return ("deadline" if event["error"]["code"] == "deadline_exceeded" else "failed"), str(event["error"])
        parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "lost", f"the stream ended without [DONE] after {len(parts)} deltas"


def _refusal(status: int, text: str) -> tuple[End, str]:
    kinds: dict[int, End] = {400: "invalid", 408: "deadline", 429: "refused", 503: "refused"}
    return kinds.get(status, "failed"), f"{status}: {text}"
