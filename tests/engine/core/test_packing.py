"""Examples of the integers of a forward."""

from __future__ import annotations

import pytest

from engine.core.packing import SpanRows, pack_spans, pack_step, prompt_rows
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, Span
from engine.messages import SamplingParams, Submit, TokenLogprobs


def make_request(num_prompt: int, *, scored: bool = False, num_scored: int = 0) -> Request:
    sampling = SamplingParams(num_prompt_logprobs=0 if scored else None)
    prompt = tuple(range(20, 20 + num_prompt))
    request = Request(submit=Submit(request_id="r", prompt=prompt, sampling=sampling), key=1, stream_key=0, tokens=[])
    request.tokens += prompt
    request.prompt_logprobs += [TokenLogprobs(logprob=-1.0)] * num_scored
    return request


def test_spans_stand_one_after_the_other() -> None:
    """Blocks of four tokens. The first span is a prefill of 5 tokens, the second a decode with two draft tokens."""
    spans = [SpanRows([1, 2, 3, 4, 5], 0, [7, 3], 1), SpanRows([6, 8, 9], 6, [5, 1, 2], 3)]
    forward = pack_spans(spans, 4)
    assert forward.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 8, 9]
    assert forward.positions.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert forward.slots.tolist() == [28, 29, 30, 31, 12, 6, 7, 8]
    assert (forward.q_lens.tolist(), forward.kv_lens.tolist()) == ([5, 3], [5, 9])
    assert forward.block_tables.tolist() == [[7, 3, 0], [5, 1, 2]]
    assert forward.logit_rows.tolist() == [4, 5, 6, 7]


def test_positions_may_differ_from_slots() -> None:
    assert pack_spans([SpanRows([1], 1, [3], 1)], 4).adapters is None
    adapted = pack_spans([SpanRows([1], 1, [3], 1), SpanRows([1, 2], 1, [3], 1, adapter=7)], 4).adapters
    assert adapted is not None
    assert adapted.tolist() == [0, 7]
    forward = pack_spans([SpanRows([1, 2], 1, [3], 0), SpanRows([4, 5], 0, [6], 1, [9, 8])], 4)
    assert forward.positions.tolist() == [1, 2, 9, 8]
    assert forward.slots.tolist() == [13, 14, 24, 25]
    assert forward.logit_rows.tolist() == [3]


def test_a_step_has_its_committed_rows_then_its_drafts() -> None:
    decode, chunk = make_request(3), make_request(6)
    decode.block_ids, chunk.block_ids = [1, 2], [3, 4]
    batch = Batch(1, (Span(decode, 2, 1, 2, True, "plan"), Span(chunk, 0, 4, 0, False, "plan")), 0)
    forward = pack_step(batch, Draft((DraftRow((8, 9)), DraftRow())), 4)
    assert forward.token_ids.tolist() == [22, 8, 9, 20, 21, 22, 23]
    assert forward.logit_rows.tolist() == [0, 1, 2], "a chunk that does not sample needs no logits"


@pytest.mark.parametrize(
    ("start", "num_tokens", "num_scored", "expected"),
    [(0, 6, 0, range(5)), (0, 4, 0, range(4)), (4, 2, 4, range(4, 5)), (5, 1, 5, range(5, 5)), (0, 6, 5, range(5, 5))],
)  # fmt: skip
def test_prompt_tokens_are_scored_once_and_the_first_never(
    start: int, num_tokens: int, num_scored: int, expected: range
) -> None:
    """A prompt of six tokens: the logits of positions 0 to 4 score it. After a preemption they are not scored again."""
    request = make_request(6, scored=True, num_scored=num_scored)
    span = Span(request, start, num_tokens, 0, start + num_tokens == 6, "plan")
    assert prompt_rows(span) == expected
    request.block_ids = [1, 2]
    forward = pack_step(Batch(1, (span,), 0), Draft((DraftRow(),)), 4)
    assert len(forward.logit_rows) == len(expected) + span.samples
    assert prompt_rows(Span(make_request(6), start, num_tokens, 0, True, "plan")) == range(0)
