"""Drafting from the target's hidden states: the output is exact, and the draft reads the right feature everywhere.

Promises: greedy and seeded requests get the reference's tokens in every situation. A draft that equals the target when
it reads the right features is accepted at every position, across chunks, preemption, shared prefixes and pauses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fakes import FixedPacer, LoopbackEndpoint, RandomPacer, ToyEngine, ToyModel
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import generate
from toy_eagle import FeaturedToy, toy_eagle

from engine.core.pacing import KChoice, SpeculationPlan
from engine.core.request import Request
from engine.core.step import Features, RowVerdict, Span
from engine.draft.feature_log import FeatureLog
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.errors import DraftDown
from engine.messages import SamplingParams, Submit

VOCAB = 7
ORDER = 3


def submits(seed: int, *, temperature: float, count: int, max_prompt: int) -> list[Submit]:
    """Requests with a common prefix, so that blocks are shared."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(max_prompt)]
    made = []
    for i in range(count):
        kept = rng.randrange(max_prompt)
        prompt = common[:kept] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        sampling = SamplingParams(temperature=temperature, max_tokens=rng.randint(1, 16), seed=rng.randrange(2**62))
        made.append(Submit(request_id=f"{seed}-{i}", prompt=tuple(prompt), sampling=sampling))
    return made


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 4]),
    spare_tokens=st.sampled_from([0, 12, 200]),
    prefix_cache=st.booleans(),
    max_step_tokens=st.sampled_from([4, 7, 32]),
    draft_blocks=st.sampled_from([14, 200]),
    max_request_tokens=st.sampled_from([5, 64]),
    ring=st.sampled_from([40, 1000]),
    temperature=st.sampled_from([0.0, 0.8]),
    reduced=st.booleans(),
)
def test_every_request_gets_the_reference_tokens(
    seed: int,
    block_size: int,
    spare_tokens: int,
    prefix_cache: bool,
    max_step_tokens: int,
    draft_blocks: int,
    max_request_tokens: int,
    ring: int,
    temperature: float,
    reduced: bool,
) -> None:
    max_model_len = 44
    num_blocks = 1 + -(-(max_model_len + spare_tokens) // block_size)
    target = FeaturedToy(vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size, order=ORDER)
    draft_model = ToyModel(vocab_size=VOCAB, columns=5 if reduced else None, order=ORDER, seed=3, blend=0.3)
    drafter, _ = toy_eagle(
        target,
        draft_model,
        num_blocks=draft_blocks,
        vocab=torch.tensor([6, 1, 4, 0, 2]) if reduced else None,
        max_request_tokens=max_request_tokens,
        ring=ring,
    )
    engine = ToyEngine(
        target,
        drafter,
        RandomPacer(seed, max_k=6),
        num_blocks=num_blocks,
        prefix_cache=prefix_cache,
        max_num_requests=4,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
    )
    for batch in range(2):  # the second batch finds a warm prefix cache
        asked = submits(seed, temperature=temperature, count=5, max_prompt=20)
        asked = [Submit(request_id=f"{batch}/{s.request_id}", prompt=s.prompt, sampling=s.sampling) for s in asked]
        result = engine.run(asked)
        for submit in asked:
            expected = generate(target.logits_after, submit.prompt, submit.sampling, max_model_len).tokens
            assert result[submit.request_id] == expected


class Scripted(FixedPacer):
    """K = 3, but 0 in some ranges of steps."""

    def __init__(self, *pauses: range) -> None:
        super().__init__(3)
        self._pauses = pauses

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
        paused = any(len(self.stats) in pause for pause in self._pauses)
        self._k = 0 if paused else 3
        return super().choose(plan, decodes, num_prefill_rows)


def run_perfect(pacer: FixedPacer, *, ring: int = 512, **settings: int | bool) -> tuple[FixedPacer, LoopbackEndpoint]:
    """Two rounds of two requests, with a draft that has the target's distribution."""
    num_blocks = int(settings.get("num_blocks", 400))
    target = FeaturedToy(vocab_size=VOCAB, num_blocks=num_blocks, order=ORDER)
    draft_model = ToyModel(vocab_size=VOCAB, order=ORDER)
    drafter, endpoint = toy_eagle(target, draft_model, num_blocks=400, ring=ring, max_request_tokens=32)
    engine = ToyEngine(target, drafter, pacer, **{"num_blocks": num_blocks, "max_model_len": 200, **settings})  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB) for _ in range(50)]
    for i in range(2):
        asked = [Submit(request_id=f"{i}.{j}", prompt=tuple(prompt[: 50 - 7 * j]), sampling=greedy) for j in range(2)]
        result = engine.run(asked)
        for submit in asked:
            assert result[submit.request_id] == generate(target.logits_after, submit.prompt, greedy, 200).tokens
    return pacer, endpoint


def is_always_accepted(pacer: FixedPacer, *, first: int = 0) -> bool:
    """Whether every drafted position was accepted, and there was at least one."""
    stats = [s for s in pacer.stats[first:] if s.num_drafted]
    return bool(stats) and all(s.accepted_by_position == s.drafted_by_position for s in stats)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False},
        {"max_step_tokens": 16},
        {"num_blocks": 34, "max_model_len": 120, "prefix_cache": False},
        {"ring": 70},
    ],
    ids=["plain", "no prefix cache", "chunked prefill", "preempting", "small ring"],
)
def test_a_perfect_head_is_always_accepted_everywhere(settings: dict[str, int | bool]) -> None:
    pacer, _ = run_perfect(FixedPacer(3), **settings)  # type: ignore[arg-type]
    assert is_always_accepted(pacer)
    drafted = sum(s.num_drafted for s in pacer.stats)
    assert drafted > 0.5 * sum(s.num_emitted for s in pacer.stats)


@pytest.mark.parametrize("ring", [512, 40], ids=["all features kept", "most features overwritten"])
def test_after_a_pause_every_draft_is_accepted_again(ring: int) -> None:
    pacer, _ = run_perfect(Scripted(range(8, 40)), ring=ring)
    assert is_always_accepted(pacer, first=40)
    assert any("catch_up" in s.k_by_reason or s.num_drafted for s in pacer.stats[40:42])


def test_while_drafting_is_off_the_draft_is_not_asked() -> None:
    never, endpoint = run_perfect(FixedPacer(0))
    assert endpoint.num_requests == 0
    assert sum(s.num_drafted for s in never.stats) == 0
    always, asked = run_perfect(FixedPacer(3))
    paused, some = run_perfect(Scripted(range(5, 30)))
    assert some.num_requests > 0
    assert sum(s.draft_s > 0 or s.num_drafted > 0 for s in paused.stats[5:30]) == 0
    assert asked.num_requests <= len(always.stats)


class MortalEndpoint:
    """An endpoint whose draft dies after some requests."""

    def __init__(self, endpoint: LoopbackEndpoint, *, num_requests: int) -> None:
        self._endpoint = endpoint
        self._num_left = num_requests
        self.probs = endpoint.probs
        self.features = endpoint.features
        self.drafted = endpoint.drafted

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        self._num_left -= 1
        if self._num_left < 0:
            raise DraftDown("it died")
        return self._endpoint.ask(rows, released, deadline_s=deadline_s)

    def mark_step(self, *, runs: bool) -> None:
        return None

    def close(self) -> None:
        return None


def test_a_dead_draft_costs_no_token_and_the_next_one_is_always_accepted() -> None:
    target = FeaturedToy(vocab_size=VOCAB, num_blocks=200, order=ORDER)
    draft_model = ToyModel(vocab_size=VOCAB, order=ORDER)
    drafter, endpoint = toy_eagle(target, draft_model, num_blocks=200)
    drafter.attach(MortalEndpoint(endpoint, num_requests=4))
    pacer = FixedPacer(3)
    engine = ToyEngine(target, drafter, pacer, num_blocks=200, max_model_len=200)
    sampling = SamplingParams(temperature=0.0, max_tokens=120)
    asked = Submit(request_id="r", prompt=(1, 2, 3, 4), sampling=sampling)
    engine.engine.submit(asked)
    engine.engine.drain()
    while drafter.is_up:
        engine.step()
    for _ in range(5):
        engine.step()
    _, fresh = toy_eagle(target, draft_model, num_blocks=200)
    drafter.attach(fresh)
    revived = len(pacer.stats)
    while engine.engine.has_work:
        engine.step()
    assert engine.tokens_of("r") == generate(target.logits_after, asked.prompt, sampling, 200).tokens
    assert is_always_accepted(pacer, first=revived)
    assert "draft_down" in set().union(*(s.k_by_reason for s in pacer.stats))


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), capacity=st.integers(12, 60))
def test_the_log_finds_every_feature_that_is_still_there_and_no_other(seed: int, capacity: int) -> None:
    """Random steps of three requests with rejections and preemptions. A feature holds its request and position."""
    rng = random.Random(seed)
    ring = torch.full((capacity, 2), -1.0)
    log = FeatureLog(ring)
    sampling = SamplingParams()
    requests = [
        Request(
            submit=Submit(request_id="", prompt=(0,), sampling=sampling),
            key=key,
            stream_key=0,
            tokens=[0] * rng.randint(1, 9),
        )
        for key in range(3)
    ]
    written: dict[tuple[int, int], int] = {}
    now = 0
    for _ in range(30):
        spans, rows = [], []
        for request in rng.sample(requests, rng.randint(1, 3)):
            if rng.random() < 0.1:
                request.num_computed = 0  # preempted
            num_tokens = min(request.extend_len, rng.randint(1, 3))
            samples = num_tokens == request.extend_len
            drafted = rng.randint(0, 1) if samples else 0
            spans.append((Span(request, request.num_computed, num_tokens, drafted, samples, "plan"), drafted))
            rows += [(request.key, request.num_computed + i) for i in range(num_tokens + drafted)]
        features = torch.tensor(rows, dtype=torch.float32)
        for i, (key, position) in enumerate(rows):
            written[key, position] = now + i
        now += len(rows)
        for span, drafted in spans:
            accepted = rng.randint(0, drafted)
            if span.samples:
                span.request.tokens += [0] * (accepted + 1)
                for position in range(span.start + span.num_tokens + accepted, span.start + span.num_tokens + drafted):
                    written.pop((span.request.key, position), None)
            span.request.num_computed = span.start + span.num_tokens + accepted
        q_lens = np.array([span.num_tokens + drafted for span, drafted in spans], np.int32)
        log.add(Features(features, q_lens), [span for span, _ in spans], [RowVerdict()] * len(spans))
        for request in requests:
            start = rng.randint(0, len(request.tokens))
            num_tokens = rng.randint(0, len(request.tokens) - start)
            found = log.rows(request.key, start, num_tokens)
            assert len(found) == num_tokens
            for token, row_index in enumerate(found, start):
                row = written.get((request.key, token - 1))
                if row is None or row < now - capacity:
                    assert row_index == -1
                else:
                    assert ring[row_index].tolist() == [request.key, token - 1]


def test_the_log_follows_the_accepted_path_of_a_tree() -> None:
    """Two committed rows, then nodes 0 to 4; the path is 0, 2, 4. Each accepted position has its node's features."""
    ring = torch.zeros(20, 1)
    log = FeatureLog(ring)
    request = Request(
        submit=Submit(request_id="r", prompt=(0,), sampling=SamplingParams()), key=1, stream_key=0, tokens=[0] * 5
    )
    span = Span(request, 3, 2, 5, True, "plan")
    request.tokens += [0] * 4  # three accepted nodes and the target's own token
    features = Features(torch.arange(7.0).unsqueeze(1), np.array([7], np.int32))
    log.add(features, [span], [RowVerdict((0, 0, 0, 0), 3, "recovered", path=(0, 2, 4))])
    rows = log.rows(1, 4, 5)  # Token p reads the features of position p - 1.
    assert [ring[row].item() for row in rows] == [0.0, 1.0, 2.0, 4.0, 6.0]
    assert log.rows(1, 9, 1) == (-1,), "the last token has not been computed"
