"""Requests whose engines fail: same tokens, no gap, no repeat, and a bounded number of engines.

Promise: whatever the sequence of lives, the tokens that reach the client are those of one engine that never failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.cluster.backoff import STEADY_S, Backoff
from deployments.cluster.failover import MAX_ENGINES, ContinuedEngine
from deployments.engine_client import Health
from engine.errors import EngineError, EngineUnavailable
from engine.messages import Delta, SamplingParams, Submit, TokenLogprobs

SUBMIT = Submit(
    request_id="r", prompt=(5, 6, 7), sampling=SamplingParams(max_tokens=20, num_logprobs=0, num_prompt_logprobs=0)
)


class MortalEngine:
    """Token i of a response is i * i % 97. It fails after `life` tokens, with `step` tokens per step."""

    def __init__(self, *, life: int | None, step: int = 3) -> None:
        self._life = life
        self._step = step
        self.submits: list[Submit] = []
        self.num_closed = 0

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        self.submits.append(submit)
        first = len(submit.generated)
        tokens = [i * i % 97 for i in range(first, submit.sampling.max_tokens)]
        try:
            for done in range(0, len(tokens), self._step):
                if self._life is not None and done + self._step > self._life:
                    raise EngineUnavailable("it died")
                now = tokens[done : done + self._step]
                yield Delta(
                    request_id=submit.request_id,
                    token_ids=tuple(now),
                    finish_reason="length" if done + self._step >= len(tokens) else None,
                    logprobs=tuple(TokenLogprobs(logprob=-float(token)) for token in now),
                    prompt_logprobs=()
                    if done or submit.sampling.num_prompt_logprobs is None
                    else (TokenLogprobs(logprob=-1.0),) * 2,
                    num_drafted=2 * (done // self._step + 1),
                    num_accepted=done // self._step + 1,
                    queue_s=0.5 if not first else 9.0,
                )
        finally:
            self.num_closed += 1


class Succession:
    """Provides the engines one after the other."""

    def __init__(self, engines: Sequence[MortalEngine]) -> None:
        self.engines = list(engines)
        self.next = 0

    async def client(self, timeout_s: float) -> MortalEngine:
        if self.next == len(self.engines):
            raise EngineUnavailable(f"none within {timeout_s} s")
        self.next += 1
        return self.engines[self.next - 1]

    async def health(self) -> Health:
        return Health(status="ok")


async def collect(source: Succession, submit: Submit = SUBMIT) -> list[Delta]:
    return [delta async for delta in ContinuedEngine(source, patience_s=1.0).generate(submit)]


@settings(max_examples=100, deadline=None)
@given(
    lives=st.lists(st.integers(0, 19), max_size=MAX_ENGINES - 1),
    steps=st.lists(st.integers(1, 7), min_size=MAX_ENGINES, max_size=MAX_ENGINES),
)
def test_the_client_sees_one_engine(lives: list[int], steps: list[int]) -> None:
    engines = [
        MortalEngine(life=life, step=step) for life, step in zip([*lives, None], steps[: len(lives) + 1], strict=True)
    ]
    deltas = asyncio.run(collect(Succession(engines)))
    assert [token for delta in deltas for token in delta.token_ids] == [i * i % 97 for i in range(20)]
    assert [entry.logprob for delta in deltas for entry in delta.logprobs] == [-float(i * i % 97) for i in range(20)]
    assert sum(len(delta.prompt_logprobs) for delta in deltas) == 2, "the prompt is scored once"
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    drafted = [delta.num_drafted for delta in deltas]
    assert drafted == sorted(drafted), "totals only grow"
    assert deltas[-1].num_drafted == 2 * len(deltas)
    assert deltas[-1].num_accepted == len(deltas)
    assert len({delta.queue_s for delta in deltas}) == 1
    assert all(engine.num_closed == len(engine.submits) for engine in engines), "nothing is left running"


def test_a_request_that_may_be_the_cause_is_not_tried_for_ever() -> None:
    source = Succession([MortalEngine(life=4, step=2) for _ in range(10)])
    with pytest.raises(EngineUnavailable, match="it died"):
        asyncio.run(collect(source))
    assert source.next == MAX_ENGINES


def test_without_another_engine_the_error_says_so() -> None:
    with pytest.raises(EngineUnavailable, match=r"none within 1\.0 s"):
        asyncio.run(collect(Succession([MortalEngine(life=4)])))


def test_other_errors_are_not_retried() -> None:
    class Broken(MortalEngine):
        async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
            self.submits.append(submit)
            raise EngineError("a bug")
            yield  # makes this a generator

    source = Succession([Broken(life=None), MortalEngine(life=None)])
    with pytest.raises(EngineError, match="a bug"):
        asyncio.run(collect(source))
    assert source.next == 1


def test_a_reader_who_leaves_closes_the_engine_at_once() -> None:
    engine = MortalEngine(life=None)

    async def leave() -> None:
        deltas = ContinuedEngine(Succession([engine]), patience_s=1.0).generate(SUBMIT)
        await anext(deltas)
        await deltas.aclose()

    asyncio.run(leave())
    assert engine.num_closed == 1


def test_a_request_that_was_begun_elsewhere_keeps_its_beginning() -> None:
    engine = MortalEngine(life=None)
    submit = replace(SUBMIT, generated=(0, 1))
    deltas = asyncio.run(collect(Succession([MortalEngine(life=3), engine]), submit))
    assert [token for delta in deltas for token in delta.token_ids] == [i * i % 97 for i in range(2, 20)]
    assert engine.submits[0].generated == tuple(i * i % 97 for i in range(5))


def test_pauses_grow_and_start_again_after_a_steady_life() -> None:
    backoff = Backoff(first_s=1.0, longest_s=6.0)
    assert [backoff.next_pause_s() for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 6.0, 6.0]
    backoff.lived(STEADY_S - 1)
    assert backoff.next_pause_s() == 6.0
    backoff.lived(STEADY_S)
    assert backoff.num_failures == 0
    assert backoff.next_pause_s() == 0.0
