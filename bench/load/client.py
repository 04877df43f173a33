"""A closed-loop load on any OpenAI-compatible chat endpoint, and the latencies that its clients see.

Owns sending, timing and counting. Tokens are counted by the usage that the server reports, not by chunks. Does not know
which server it is.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop


@dataclass(frozen=True, slots=True)
class Response:
    """One finished request."""

    ttft_s: float
    """Seconds from sending to the first token."""
    total_s: float
    """Seconds from sending to the end."""
    num_tokens: int
    """Generated tokens."""
    num_drafted: int
    """Draft tokens that were verified; 0 where the server does not report them."""
    num_accepted: int
    """Draft tokens that were accepted."""
    prompt_index: int
    """Index of the prompt in the load."""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One load at one number of streams."""

    streams: int
    """Number of concurrent requests."""
    wall_s: float
    """Duration of the run in seconds."""
    responses: tuple[Response, ...]
    """Finished requests."""
    errors: tuple[str, ...]
    """Messages of failed requests."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over all streams."""
        return sum(response.num_tokens for response in self.responses) / self.wall_s

    @property
    def ttft_p50_s(self) -> float:
        """Median over requests of the time to the first token; nan where none finished."""
        return statistics.median(response.ttft_s for response in self.responses) if self.responses else float("nan")

    @property
    def tpot_p50_s(self) -> float:
        """Median over requests of the time per token after the first; nan where none finished."""
        return statistics.median(response.tpot_s for response in self.responses) if self.responses else float("nan")

    @property
    def acceptance(self) -> float | None:
        """Accepted share of drafted tokens; None where none was drafted or reported."""
        drafted = sum(response.num_drafted for response in self.responses)
        return sum(response.num_accepted for response in self.responses) / drafted if drafted else None


class Rounds:
    """Mixin with the figures of several runs of the same load: medians over `runs`."""

    __slots__ = ()
    runs: tuple[Run, ...]

    @property
    def tokens_per_s(self) -> float:
        """Median over runs of the tokens per second."""
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def ttft_p50_s(self) -> float:
        """Median over runs of the median time to first token, seconds."""
        return statistics.median(run.ttft_p50_s for run in self.runs)

    @property
    def tpot_p50_s(self) -> float:
        """Median over runs of the median time per output token, seconds."""
        return statistics.median(run.tpot_p50_s for run in self.runs)

    @property
    def num_errors(self) -> int:
        """Failed requests in all runs."""
        return sum(len(run.errors) for run in self.runs)

    @property
    def acceptance(self) -> float | None:
        """Mean over runs of the accepted share of drafted tokens; None where no run has one."""
        rates = [run.acceptance for run in self.runs if run.acceptance is not None]
        return statistics.mean(rates) if rates else None


def run_load(
    url: str,
    model: str,
    prompts: Sequence[str],
    *,
    streams: int,
    body: dict[str, Any],
    timeout_s: float = 600.0,
    pause_s: float = 0.0,
) -> Run:
    """Run `load` in a separate event loop. It uses uvloop, which takes less CPU time from the server."""
    return uvloop.run(load(url, model, prompts, streams=streams, body=body, timeout_s=timeout_s, pause_s=pause_s))


async def load(
    url: str,
    model: str,
    prompts: Sequence[str],
    *,
    streams: int,
    body: dict[str, Any],
    timeout_s: float = 600.0,
    pause_s: float = 0.0,
) -> Run:
    """Send every prompt once, `streams` at a time.

    Args:
        url: base URL of the API, which ends with /v1.
        model: name of the model.
        prompts: one user message each.
        streams: number of concurrent requests.
        body: fields that are added to every request.
        timeout_s: upper bound of the duration of a request.
        pause_s: seconds that a stream waits after each response.

    Returns:
        The run. Failed requests are in its `errors`; they raise nothing.
    """
    responses: list[Response] = []
    errors: list[str] = []
    waiting = iter(enumerate(prompts))
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    # A connection for each request: some servers close kept ones at any time, and the request on it is lost.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def stream() -> None:
            for index, prompt in waiting:
                try:
                    responses.append(await _send(session, url, model, prompt, index, body))
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    errors.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(pause_s)

        begin = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        wall_s = time.perf_counter() - begin
    return Run(streams, wall_s, tuple(responses), tuple(errors))


async def _send(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, index: int, body: dict[str, Any]
) -> Response:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/chat/completions", json=request | body) as response:
        if response.status != 200:
            raise ValueError(f"{response.status}: {(await response.text())[:200]}")
        async for line in _lines(response.content):
            if not line.startswith(b"data: {") or (first is not None and _is_text(line)):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            usage = event.get("usage") or usage
            if first is None and any((choice.get("delta") or {}).get("content") for choice in event["choices"]):
                first = time.perf_counter()
    end = time.perf_counter()
    speculative = usage.get("speculative") or {}
    return Response(
        ttft_s=(first or end) - begin,
        total_s=end - begin,
        num_tokens=usage["completion_tokens"],
        num_drafted=speculative.get("drafted", 0),
        num_accepted=speculative.get("accepted", 0),
        prompt_index=index,
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Complete lines without line ends. The load shares the machine with the server, so this is kept cheap."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _is_text(line: bytes) -> bool:
    """Whether an event holds only text, no error and no usage, and need not be parsed."""
    return (b'"usage"' not in line or b'"usage":null' in line) and b'"error"' not in line
