"""Examples of how a verdict becomes tokens, counters and a delta."""

from __future__ import annotations

from typing import Any

from fakes import FixedPacer

from engine.core.block_pool import BlockPool
from engine.core.committer import Committer
from engine.core.pacing import SpeculationPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import Batch, Draft, DraftRow, RowVerdict, Span, Verdict
from engine.messages import Delta, SamplingParams, Submit, TokenLogprobs, VerifiedTree

DRAFTED = (10, 11, 12)


class Commits:
    """One request with three prompt tokens in blocks of two, and room for its draft."""

    def __init__(self, **sampling: Any) -> None:
        self.pool = BlockPool(20, 2, prefix_cache=True)
        self.scheduler = Scheduler(
            self.pool, pacer=FixedPacer(3), plan=SpeculationPlan, max_num_requests=1, max_step_tokens=9, max_model_len=9
        )
        self.committer = Committer(self.pool, self.scheduler, max_model_len=9)
        submit = Submit(request_id="r", prompt=(1, 2, 3), sampling=SamplingParams(**sampling))
        self.request = Request(submit=submit, key=1, stream_key=0, tokens=[1, 2, 3])
        self.scheduler.add(self.request)
        self.scheduler.schedule()
        self.pool.reserve(self.request, 6)

    def commit(
        self,
        verdict: RowVerdict,
        drafted: tuple[int, ...] = DRAFTED,
        num_tokens: int = 3,
        parents: tuple[int, ...] = (),
    ) -> Delta | None:
        """Commit a step over the first `num_tokens` uncomputed tokens."""
        request = self.request
        samples = bool(verdict.token_ids)
        span = Span(request, request.num_computed, num_tokens, len(drafted), samples, "plan")
        draft = Draft((DraftRow(token_ids=drafted, parents=parents),))
        deltas = self.committer.commit(Batch(1, (span,), 0), draft, Verdict((verdict,)))
        self.pool.check()
        return deltas[0] if deltas else None


def test_accepted_tokens_and_the_target_s_own_are_appended() -> None:
    commits = Commits()
    delta = commits.commit(RowVerdict((10, 11, 5), 2, "recovered"))
    assert delta == Delta(
        request_id="r",
        token_ids=(10, 11, 5),
        num_drafted=3,
        num_accepted=2,
        num_accepted_now=2,
        last="recovered",
        queue_s=commits.request.queue_s,
    )
    assert commits.request.tokens == [1, 2, 3, 10, 11, 5]
    assert commits.request.num_computed == 5, "the last token has no K and V yet"
    assert len(commits.request.block_ids) == 3


def test_blocks_of_a_prompt_are_cached_while_the_rest_of_it_is_computed() -> None:
    commits = Commits()
    assert commits.commit(RowVerdict(), drafted=(), num_tokens=2) is None
    assert commits.request.num_computed == 2
    submit = Submit(request_id="s", prompt=(1, 2, 9), sampling=SamplingParams())
    assert commits.pool.attach_prefix(Request(submit=submit, key=2, stream_key=0, tokens=[1, 2, 9])) == 2


def test_a_rejected_draft_gives_its_blocks_back() -> None:
    commits = Commits()
    delta = commits.commit(RowVerdict((5,), 0, "recovered"))
    assert delta is not None
    assert (delta.token_ids, delta.num_drafted, delta.num_accepted, delta.num_accepted_now) == ((5,), 3, 0, 0)
    assert commits.request.num_computed == 3
    assert len(commits.request.block_ids) == 2


def test_counters_add_up_over_steps() -> None:
    commits = Commits()
    commits.commit(RowVerdict((10, 5), 1, "recovered"))
    delta = commits.commit(RowVerdict((6,), 0, "plain"), drafted=(), num_tokens=1)
    assert delta is not None
    assert (delta.num_drafted, delta.num_accepted, delta.num_accepted_now, delta.last) == (3, 1, 0, "plain")
    assert (commits.request.num_steps, commits.request.num_draft_steps) == (2, 1)
    delta = commits.commit(RowVerdict((10, 7), 1, "bonus"), drafted=(10,), num_tokens=1)
    assert delta is not None
    assert (delta.num_drafted, delta.num_accepted, delta.num_accepted_now, delta.last) == (4, 2, 1, "bonus")
    assert (commits.request.num_steps, commits.request.num_draft_steps) == (3, 2)


def test_nothing_after_a_stop_token_is_seen() -> None:
    logprobs = tuple(TokenLogprobs(logprob=-float(i)) for i in range(4))
    commits = Commits(stop_token_ids=(11,), num_logprobs=0)
    delta = commits.commit(RowVerdict((10, 11, 12, 5), 3, "bonus", logprobs))
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason, delta.logprobs) == ((10, 11), "stop", logprobs[:2])
    assert (delta.num_accepted, delta.num_accepted_now, delta.last) == (2, 2, None), "the bonus token was never emitted"
    assert delta.num_drafted == 3
    assert not commits.scheduler.has_work
    assert commits.pool.num_free == 19


def test_max_tokens_ends_a_request() -> None:
    commits = Commits(max_tokens=2)
    delta = commits.commit(RowVerdict((10, 11, 5), 2, "recovered"))
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason, delta.error) == ((10, 11), "length", None)


def test_the_model_s_length_ends_a_request() -> None:
    commits = Commits()
    commits.pool.reserve(commits.request, 9)
    delta = commits.commit(RowVerdict((10, 11, 12, 13, 14, 15, 16), 6, "bonus"), drafted=(10, 11, 12, 13, 14, 15))
    assert delta is not None
    assert (len(commits.request.tokens), delta.finish_reason) == (9, "length")


def test_a_chunk_of_a_prompt_is_computed_and_emits_nothing() -> None:
    entry = TokenLogprobs(logprob=-1.0)
    commits = Commits()
    assert commits.commit(RowVerdict(prompt_logprobs=(entry,)), drafted=(), num_tokens=2) is None
    assert (commits.request.num_computed, commits.request.tokens) == (2, [1, 2, 3])
    assert commits.request.num_steps == 0
    delta = commits.commit(RowVerdict((5,), 0, "plain", (), (entry,)), drafted=(), num_tokens=1)
    assert delta is not None
    assert delta.prompt_logprobs == (entry, entry), "the first delta has those of all chunks"
    delta = commits.commit(RowVerdict((6,), 0, "plain"), drafted=(), num_tokens=1)
    assert delta is not None
    assert delta.prompt_logprobs == ()


def test_computed_blocks_can_be_found_by_other_requests() -> None:
    commits = Commits()
    commits.commit(RowVerdict((10, 5), 1, "recovered"))
    other = Request(submit=commits.request.submit, key=2, stream_key=0, tokens=[1, 2, 3, 10, 5])
    assert commits.pool.attach_prefix(other) == 4
    assert other.block_ids == commits.request.block_ids[:2]


def test_a_delta_tells_of_a_draft_that_branched() -> None:
    commits = Commits()
    delta = commits.commit(RowVerdict((10, 12, 5), 2, "bonus", path=(0, 2)), parents=(-1, 0, 0))
    assert delta is not None
    assert delta.tree == VerifiedTree(DRAFTED, (-1, 0, 0), (0, 2))
    delta = Commits(max_tokens=1).commit(RowVerdict((10, 12, 5), 2, "bonus", path=(0, 2)), parents=(-1, 0, 0))
    assert delta is not None
    assert delta.tree == VerifiedTree(DRAFTED, (-1, 0, 0), (0,)), "the path ends with the response"
    delta = Commits().commit(RowVerdict((10, 11, 5), 2, "recovered", path=(0, 1)), parents=(-1, 0, 1))
    assert delta is not None
    assert delta.tree is None, "a chain, though its parents are written out"
