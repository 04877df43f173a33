"""Examples of the acceptance rules: greedy, coupled and rejection. The exact odds are in tests/test_exactness.py."""

from __future__ import annotations

import pytest
import torch

from engine.core.acceptance import AcceptanceKind
from engine.core.request import Request
from engine.core.step import Draft, DraftRow, RowVerdict, Span
from engine.core.verifier import accept_or_reject
from engine.messages import SamplingParams, Submit
from engine.sampling.distribution import Purpose, gumbel, stream_seed, uniform

LOGITS = torch.tensor([[0.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 2.0, 0.0]])
"""Rows of a draft of two tokens and of the token after them; the most likely tokens are 2, 3 and 1."""
KEY = 77
POSITION = 2
"""Of the first new token, after a prompt of two."""


def make_span(k: int, sampling: SamplingParams, *, stream_key: int = KEY, num_steps: int = 0) -> Span:
    submit = Submit(request_id="r", prompt=(0, 1), sampling=sampling)
    request = Request(submit=submit, key=1, stream_key=stream_key, tokens=[0, 1], num_computed=1, num_steps=num_steps)
    return Span(request, 1, 1, k, True, "plan")


def verify(
    row: DraftRow, sampling: SamplingParams, *, vocab: torch.Tensor | None = None, stream_key: int = KEY
) -> RowVerdict:
    span = make_span(len(row.token_ids), sampling, stream_key=stream_key)
    (verdict,) = accept_or_reject(LOGITS[: len(row.token_ids) + 1].clone(), [span], Draft((row,), vocab))
    return verdict


def drawn(row: int, position: int, purpose: Purpose, attempt: int, *, stream_key: int = KEY) -> int:
    """The token of a row by the definition of a draw."""
    probs = torch.softmax(LOGITS[row], dim=-1)
    noise = gumbel([stream_seed(stream_key, position, purpose, attempt)], torch.arange(4))[0]
    return int((probs.log() + noise).argmax())


@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        ((), RowVerdict((2,), 0, "plain")),
        ((2,), RowVerdict((2, 3), 1, "bonus")),
        ((2, 3), RowVerdict((2, 3, 1), 2, "bonus")),
        ((2, 0), RowVerdict((2, 3), 1, "recovered")),
        ((0, 3), RowVerdict((2,), 0, "recovered")),
    ],
)
def test_greedy_accepts_the_most_likely_tokens(drafted: tuple[int, ...], expected: RowVerdict) -> None:
    assert verify(DraftRow(drafted), SamplingParams(temperature=0.0)) == expected


def test_coupled_tokens_are_drawn_by_position_whatever_was_drafted() -> None:
    sampling = SamplingParams(seed=5)
    chosen = [drawn(row, POSITION + row, Purpose.TOKEN, 0) for row in range(3)]
    assert verify(DraftRow(tuple(chosen[:2])), sampling) == RowVerdict(tuple(chosen), 2, "bonus")
    wrong = (chosen[0] + 1) % 4
    assert verify(DraftRow((wrong, 0)), sampling) == RowVerdict((chosen[0],), 0, "recovered")
    assert verify(DraftRow(), sampling) == RowVerdict((chosen[0],), 0, "plain")


def test_rejection_accepts_a_token_that_the_target_finds_as_likely_as_the_draft_did() -> None:
    probs = torch.softmax(LOGITS[:2], dim=-1)
    for key in range(20):
        verdict = verify(DraftRow((0, 1), probs), SamplingParams(), stream_key=key)
        bonus = drawn(2, POSITION + 2, Purpose.TOKEN, 1, stream_key=key)
        assert verdict == RowVerdict((0, 1, bonus), 2, "bonus")


def test_rejection_replaces_a_token_that_the_target_excludes() -> None:
    """With top_k = 1 the target always chooses 2. The draft's probability of 0 was 1."""
    assert verify(DraftRow((0,)), SamplingParams(top_k=1)) == RowVerdict((2,), 0, "recovered")


def test_rejection_draws_the_replacement_where_the_target_exceeds_the_draft() -> None:
    """p is about (0.03, 0.09, 0.64, 0.24). q(2) is 0.98, so p exceeds q at 0, 1 and 3."""
    q = torch.tensor([[0.0, 0.0, 0.98, 0.02]])
    excess = (torch.softmax(LOGITS[0], dim=-1) - q[0]).clamp(min=0)
    seen = set()
    for key in range(300):
        span = make_span(1, SamplingParams(), stream_key=key)
        (verdict,) = accept_or_reject(LOGITS[:2].clone(), [span], Draft((DraftRow((2,), q),)))
        if verdict.last == "recovered":
            noise = gumbel([stream_seed(key, POSITION, Purpose.RECOVER, 1)], torch.arange(4))[0]
            assert verdict == RowVerdict((int((excess.log() + noise).argmax()),), 0, "recovered")
            seen.add(verdict.token_ids)
    assert seen == {(0,), (1,), (3,)}


def test_rejection_accepts_as_often_as_p_over_q() -> None:
    """The uniform number of each draw decides: it is compared with p / q, here about 0.64."""
    ratio = float(torch.softmax(LOGITS[0], dim=-1)[2])
    for key in range(100):
        for num_steps in (0, 3):
            span = make_span(1, SamplingParams(), stream_key=key, num_steps=num_steps)
            (verdict,) = accept_or_reject(LOGITS[:2].clone(), [span], Draft((DraftRow((2,)),)))
            number = uniform(stream_seed(key, POSITION, Purpose.ACCEPT, 1 + num_steps))
            assert verdict.num_accepted == (number < ratio), (key, num_steps)


@pytest.mark.parametrize("acceptance", ["each", "together"])
def test_a_second_sibling_is_accepted_as_often_as_what_is_left_of_p_over_what_is_left_of_q(
    acceptance: AcceptanceKind,
) -> None:
    """The first one is always rejected. Then p is (0, 0.45, 0.35, 0) / 0.8 and q is (0, 0.15, 0.05, 0) / 0.2."""
    logits = torch.tensor([[0.0, 0.6, 0.4, 0.0], *[[0.25] * 4] * 2]).log()
    row = DraftRow((0, 1), torch.tensor([[0.8, 0.15, 0.05, 0.0]] * 2), parents=(-1, -1))
    spans = [make_span(2, SamplingParams(), stream_key=key) for key in range(60)]
    verdicts = accept_or_reject(logits.repeat(60, 1), spans, Draft((row,) * 60), acceptance=acceptance)
    numbers = [uniform(stream_seed(key, POSITION + (1 << 32), Purpose.ACCEPT, 1)) for key in range(60)]
    assert [verdict.path for verdict in verdicts] == [(1,) if number < 0.5625 / 0.75 else () for number in numbers]
    assert 30 < sum(verdict.num_accepted for verdict in verdicts) < 60, "the draws of these streams are fixed"


def test_the_draft_s_columns_stand_for_the_tokens_of_its_vocabulary() -> None:
    """The draft's vocabulary is (3, 0). The target excludes 0, whose q is 1 in column 1. It accepts 3, where q = p."""
    vocab = torch.tensor([3, 0])
    row = DraftRow((0,), torch.tensor([[0.0, 1.0]]))
    assert verify(row, SamplingParams(top_k=1), vocab=vocab) == RowVerdict((2,), 0, "recovered")
    p = torch.softmax(LOGITS[0], dim=-1)
    row = DraftRow((3,), torch.stack([p[3], 1 - p[3]]).unsqueeze(0))
    assert verify(row, SamplingParams(), vocab=vocab).num_accepted == 1


def test_rules_meet_in_one_batch_and_verdicts_keep_the_order_of_the_spans() -> None:
    spans = [
        make_span(1, SamplingParams()),
        make_span(0, SamplingParams(temperature=0.0)),
        make_span(1, SamplingParams(seed=1)),
    ]
    chosen = drawn(0, POSITION, Purpose.TOKEN, 0)
    rows = (DraftRow((0,), torch.softmax(LOGITS[:1], dim=-1)), DraftRow(), DraftRow((chosen,)))
    verdicts = accept_or_reject(LOGITS[[0, 1, 1, 0, 1]].clone(), spans, Draft(rows))
    assert [(verdict.num_accepted, verdict.last) for verdict in verdicts] == [(1, "bonus"), (0, "plain"), (1, "bonus")]
    assert verdicts[0].token_ids[0] == 0
    assert verdicts[1].token_ids == (3,)
    assert verdicts[2].token_ids == (chosen, drawn(1, POSITION + 1, Purpose.TOKEN, 0))
