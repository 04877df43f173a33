"""A closed-loop load on any OpenAI-compatible chat endpoint, and what it felt like to the clients.

Owns sending, timing and counting. Tokens are those of the server's own usage, never chunks. Does not know who serves.
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
class Answer:
    """One finished request."""

    ttft_s: float
    total_s: float
    num_tokens: int
    num_drafted: int
    num_accepted: int
    prompt_index: int

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One load at one number of streams."""

    streams: int
    wall_s: float
    answers: tuple[Answer, ...]
    errors: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated, of all streams together."""
        return sum(answer.num_tokens for answer in self.answers) / self.wall_s

    @property
    def ttft_p50_s(self) -> float:
        """Median over requests of the time to the first token; nan where none was answered."""
        return statistics.median(answer.ttft_s for answer in self.answers) if self.answers else float("nan")

    @property
    def tpot_p50_s(self) -> float:
        """Median over requests of the time per token after the first; nan where none was answered."""
        return statistics.median(answer.tpot_s for answer in self.answers) if self.answers else float("nan")

    @property
    def acceptance(self) -> float | None:
        """Accepted share of drafted tokens; None where nothing was drafted or the server does not tell."""
        drafted = sum(answer.num_drafted for answer in self.answers)
        return sum(answer.num_accepted for answer in self.answers) / drafted if drafted else None


class Rounds:
    """What counts of several runs of the same load, for whoever holds them as `runs`: medians over runs."""

    __slots__ = ()
    runs: tuple[Run, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of one run."""
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def ttft_p50_s(self) -> float:
        """Of one run."""
        return statistics.median(run.ttft_p50_s for run in self.runs)

    @property
    def tpot_p50_s(self) -> float:
        """Of one run."""
        return statistics.median(run.tpot_p50_s for run in self.runs)

    @property
    def num_errors(self) -> int:
        """Of all runs together."""
        return sum(len(run.errors) for run in self.runs)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of drafted tokens over all rounds; None where the server does not tell."""
        rates = [run.acceptance for run in self.runs if run.acceptance is not None]
        return statistics.mean(rates) if rates else None


def run_load(
    url: str, model: str, prompts: Sequence[str], *, streams: int, body: dict[str, Any], timeout_s: float = 600.0
) -> Run:
    """`load` in an event loop of its own, one that takes little of the machine from the server."""
    return uvloop.run(load(url, model, prompts, streams=streams, body=body, timeout_s=timeout_s))


async def load(
    url: str, model: str, prompts: Sequence[str], *, streams: int, body: dict[str, Any], timeout_s: float = 600.0
) -> Run:
    """Send every prompt once, `streams` at a time.

    Args:
        url: ends with /v1.
        body: merged into every request.

    Returns:
        The run; errors are in it, not raised.
    """
    answers: list[Answer] = []
    errors: list[str] = []
    waiting = iter(enumerate(prompts))
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream() -> None:
            for index, prompt in waiting:
                try:
                    answers.append(await _ask(session, url, model, prompt, index, body))
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    errors.append(f"{type(error).__name__}: {error}"[:300])

        begin = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        wall_s = time.perf_counter() - begin
    return Run(streams, wall_s, tuple(answers), tuple(errors))


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, index: int, body: dict[str, Any]
) -> Answer:
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
    return Answer(
        ttft_s=(first or end) - begin,
        total_s=end - begin,
        num_tokens=usage["completion_tokens"],
        num_drafted=speculative.get("drafted", 0),
        num_accepted=speculative.get("accepted", 0),
        prompt_index=index,
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines, without their ends. The load shares the machine with the server, so it is frugal."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _is_text(line: bytes) -> bool:
    """Whether an event can only be one more chunk of text: no error, no usage. Others need parsing."""
    return (b'"usage"' not in line or b'"usage":null' in line) and b'"error"' not in line
