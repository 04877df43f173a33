"""Examples of what one step computes; the properties are in test_engine.py and tests/test_state_machine.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.block_pool import BlockPool
from engine.core.pacing import KChoice, SpeculationPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.stats import StepStats
from engine.core.step import Batch
from engine.messages import SamplingParams, SpeculativeOptions, Submit


class Steps:
    """A scheduler, and a commit of one token per sampling span. Also the pacer: always `choice`."""

    def __init__(
        self, choice: KChoice, *, num_blocks: int = 40, block_size: int = 2, prefix_cache: bool = False, **limits: int
    ) -> None:
        self.choice = choice
        self.num_prefill_rows: list[int] = []
        self.pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        settings = {"max_num_requests": 4, "max_step_tokens": 16, "max_model_len": 20} | limits
        self.scheduler = Scheduler(self.pool, pacer=self, plan=SpeculationPlan, **settings)
        self.num_added = 0

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
        self.num_prefill_rows.append(num_prefill_rows)
        return [self.choice] * len(decodes)

    def observe(self, stats: StepStats) -> None:
        return None

    def add(self, num_prompt: int, *, max_k: int | None = None, enabled: bool = True, **sampling: Any) -> Request:
        """Queue a request whose prompt no other request shares."""
        self.num_added += 1
        submit = Submit(
            request_id=f"r{self.num_added}",
            prompt=tuple(range(100 * self.num_added, 100 * self.num_added + num_prompt)),
            sampling=SamplingParams(**sampling),
            speculative=SpeculativeOptions(enabled=enabled, max_k=max_k),
        )
        request = Request(submit=submit, key=self.num_added, stream_key=0, tokens=list(submit.prompt), arrival_s=1e-9)
        self.scheduler.add(request)
        return request

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        for span in batch.spans:
            span.request.num_computed += span.num_tokens
            self.pool.register(span.request)
            if span.samples:
                span.request.tokens.append(7)
        self.pool.check()
        return batch

    def shape(self) -> list[tuple[str, int, int, int, bool]]:
        """Of each span of the next step: request, first row, committed rows, K, whether it samples."""
        return [
            (span.request.submit.request_id, span.start, span.num_tokens, span.k, span.samples)
            for span in self.step().spans
        ]

    def k_and_reason(self) -> tuple[int, str]:
        """Of the only decode of the next step."""
        (span,) = self.step().spans
        return span.k, span.reason


def test_a_prompt_is_one_span_then_each_step_decodes_one_token() -> None:
    steps = Steps(KChoice(3, "plan"))
    steps.add(5)
    assert steps.shape() == [("r1", 0, 5, 0, True)]
    assert steps.shape() == [("r1", 5, 1, 3, True)]
    assert steps.shape() == [("r1", 6, 1, 3, True)]


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_one_samples() -> None:
    steps = Steps(KChoice(0, "off"), max_step_tokens=4)
    steps.add(10)
    assert [steps.shape() for _ in range(3)] == [
        [("r1", 0, 4, 0, False)],
        [("r1", 4, 4, 0, False)],
        [("r1", 8, 2, 0, True)],
    ]


def test_decodes_and_their_drafts_take_their_rows_before_prompts() -> None:
    steps = Steps(KChoice(2, "plan"), max_step_tokens=8)
    steps.add(3)
    steps.step()
    steps.add(9)
    assert steps.shape() == [("r1", 3, 1, 2, True), ("r2", 0, 5, 0, False)], "8 rows: 1 + 2 drafts, 5 left"
    assert steps.shape() == [("r1", 4, 1, 2, True), ("r2", 5, 4, 0, True)]
    assert steps.num_prefill_rows == [3, 7, 4], "the pacer knows the prompts' rows, but not more than there are"


def test_no_more_requests_run_than_are_allowed() -> None:
    steps = Steps(KChoice(0, "off"), max_num_requests=2)
    for _ in range(3):
        steps.add(2)
    batch = steps.step()
    assert [span.request.submit.request_id for span in batch.spans] == ["r1", "r2"]
    assert (batch.step_id, batch.num_waiting) == (1, 1)
    assert (steps.scheduler.num_running, steps.scheduler.num_waiting) == (2, 1)
    assert steps.num_prefill_rows == [2], "what waits counts as one prompt"
    assert steps.step().step_id == 2


@pytest.mark.parametrize(
    ("request_options", "expected"),
    [
        ({}, (4, "plan")),
        ({"max_k": 5}, (4, "plan")),
        ({"max_k": 4}, (4, "plan")),
        ({"max_k": 3}, (3, "per_request")),
        ({"max_k": 0}, (0, "per_request")),
        ({"enabled": False}, (0, "per_request")),
        ({"max_tokens": 6}, (4, "plan")),
        ({"max_tokens": 5}, (3, "length")),
        ({"max_tokens": 2}, (0, "length")),
        ({"max_tokens": 5, "max_k": 3}, (3, "per_request")),
    ],
)
def test_k_and_its_reason_by_the_request_s_limits(request_options: dict[str, Any], expected: tuple[int, str]) -> None:
    steps = Steps(KChoice(4, "plan"))
    steps.add(3, **request_options)
    steps.step()
    assert steps.k_and_reason() == expected


def test_the_model_s_length_limits_k() -> None:
    """After the prefill 4 of 8 positions are in use. The target adds one token, so up to 3 may be drafted."""
    steps = Steps(KChoice(4, "plan"), max_model_len=8)
    steps.add(3)
    steps.step()
    assert steps.k_and_reason() == (3, "length")


def test_the_step_s_rows_limit_k_in_the_order_of_arrival() -> None:
    steps = Steps(KChoice(4, "plan"), max_step_tokens=9, max_num_requests=3)
    for _ in range(3):
        steps.add(2)
    steps.step()
    spans = steps.step().spans
    assert [(span.k, span.reason) for span in spans] == [(4, "plan"), (2, "batch"), (0, "batch")]


def test_k_of_lookup_drafts_is_limited_as_well() -> None:
    steps = Steps(KChoice(1, "acceptance", (0, 2, 6, 9), 0.25), max_step_tokens=8)
    steps.add(3, max_k=4)
    steps.step()
    steps.add(8)
    decode, prompt = steps.step().spans
    assert (decode.k, decode.reason, decode.k_by_match, decode.exit_threshold) == (1, "acceptance", (0, 2, 4, 4), 0.25)
    assert decode.max_lookup_k == 4
    assert prompt.num_tokens == 8 - 1 - 4, "rows are kept for the longest draft"


def test_drafts_are_given_up_before_a_request_is_preempted() -> None:
    """Six blocks of two tokens: both requests have room for their tokens, but only the first one's drafts fit."""
    steps = Steps(KChoice(4, "plan"), num_blocks=7, max_model_len=12)
    steps.add(3)
    steps.add(3)
    steps.step()
    spans = steps.step().spans
    assert [(span.k, span.reason) for span in spans] == [(4, "plan"), (0, "memory")]
    assert steps.scheduler.num_preempted == 0
    assert steps.pool.num_free == 0


def test_the_request_that_came_last_is_preempted_and_computed_again() -> None:
    """Four blocks of two tokens: at the fifth token of each there is room for one request only."""
    steps = Steps(KChoice(0, "off"), num_blocks=5, max_model_len=8)
    first, last = steps.add(3), steps.add(3)
    steps.step()
    steps.step()
    batch = steps.step()
    assert [span.request for span in batch.spans] == [first]
    assert (steps.scheduler.num_preempted, batch.num_waiting) == (1, 1)
    assert (last.block_ids, last.num_computed, len(last.tokens)) == ([], 0, 5)
    steps.scheduler.remove(first)
    assert steps.shape() == [("r2", 0, 5, 0, True)]


def test_a_preempted_request_computes_nothing_in_that_step() -> None:
    """Two requests need a block each and one is free: the first takes it, the second is preempted by itself."""
    steps = Steps(KChoice(0, "off"), num_blocks=6, max_model_len=10)
    first, second = steps.add(4), steps.add(4)
    steps.step()
    assert [span.request for span in steps.step().spans] == [first]
    assert second.block_ids == []
    assert list(steps.scheduler.requests()) == [first, second]


def test_a_prefill_takes_the_memory_that_is_left_and_gives_way_when_there_is_none() -> None:
    """Six blocks of two tokens, four rows a step; the first request's drafts take blocks that the prompt would need."""
    steps = Steps(KChoice(0, "off"), num_blocks=7, max_model_len=12, max_step_tokens=4)
    steps.add(3)
    steps.step()
    second = steps.add(7)
    assert steps.shape() == [("r1", 3, 1, 0, True), ("r2", 0, 3, 0, False)]
    steps.choice = KChoice(3, "plan")
    assert steps.shape() == [("r1", 4, 1, 3, True)], "no rows are left"
    assert steps.pool.num_free == 0
    steps.choice = KChoice(0, "off")
    assert steps.shape() == [("r1", 5, 1, 0, True), ("r2", 3, 1, 0, False)], "its two blocks hold one token more"
    assert steps.shape() == [("r1", 6, 1, 0, True)]
    assert (steps.scheduler.num_preempted, second.block_ids, second.num_computed) == (1, [], 0)


def test_a_prompt_waits_until_there_is_room_for_all_of_it_and_one_token() -> None:
    steps = Steps(KChoice(0, "off"), num_blocks=6, max_model_len=10)
    first = steps.add(5)
    steps.step()
    steps.add(4)
    assert steps.shape() == [("r1", 5, 1, 0, True)], "two blocks are free, but 4 + 1 tokens need three"
    steps.scheduler.remove(first)
    assert steps.shape() == [("r2", 0, 4, 0, True)]
    assert not steps.scheduler.num_waiting


def test_a_cached_prefix_is_not_computed_again_unless_its_prompt_is_scored() -> None:
    steps = Steps(KChoice(0, "off"), prefix_cache=True)
    steps.add(5)
    steps.step()
    for scored, start in ((None, 4), (0, 0)):
        request = steps.add(0, num_prompt_logprobs=scored)
        request.submit = Submit(request_id="again", prompt=tuple(range(100, 105)), sampling=request.submit.sampling)
        request.tokens[:] = request.submit.prompt
        span = steps.step().spans[-1]
        assert (span.request, span.start, span.num_tokens) == (request, start, 5 - start)
        assert request.num_cached == start


def test_the_time_in_the_queue_is_taken_once() -> None:
    steps = Steps(KChoice(0, "off"))
    request = steps.add(3)
    assert request.queue_s == 0.0
    steps.step()
    queue_s = request.queue_s
    assert queue_s > 0
    steps.step()
    assert request.queue_s == queue_s


def test_what_leaves_frees_its_blocks_wherever_it_is() -> None:
    steps = Steps(KChoice(0, "off"), max_num_requests=1)
    running, waiting = steps.add(3), steps.add(3)
    steps.step()
    assert steps.scheduler.has_work
    steps.scheduler.remove(waiting)
    assert (steps.scheduler.num_running, steps.scheduler.num_waiting) == (1, 0)
    steps.scheduler.remove(running)
    assert not steps.scheduler.has_work
    assert steps.pool.num_free == 39
