"""The target's side of a remote draft: what each draft request carries, and what becomes of each response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from engine.core.request import Request
from engine.core.step import Batch, DeviceDrafts, Draft, Features, RowVerdict, Span, Verdict
from engine.draft.messages import DraftRequestRow, DraftResponse, DraftResponseRow, encode_options
from engine.draft.remote import RemoteDrafter
from engine.errors import DraftDown
from engine.messages import SamplingParams, Submit
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions

MAX_ROWS, MAX_K, VOCAB = 4, 3, 5


class ScriptedLink:
    """An endpoint whose responses are given beforehand; a full chain of zeros where none is."""

    def __init__(self, *, feature_rows: int = 0) -> None:
        self.probs = torch.arange(MAX_ROWS * MAX_K * VOCAB, dtype=torch.float32).view(MAX_ROWS, MAX_K, VOCAB)
        self.features = torch.zeros(feature_rows, 1) if feature_rows else None
        self.asked: list[tuple[tuple[DraftRequestRow, ...], tuple[int, ...], float]] = []
        self.responses: list[tuple[DraftResponseRow, ...] | DraftDown] = []
        self.is_closed = False
        self.steps: list[bool] = []

    def drafted(self, num_rows: int) -> DeviceDrafts:
        return DeviceDrafts(torch.zeros(num_rows, MAX_K, dtype=torch.int64), torch.zeros(num_rows, MAX_K), self.probs)

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        self.asked.append((tuple(rows), tuple(released), deadline_s))
        response = self.responses.pop(0) if self.responses else tuple(DraftResponseRow((0,) * row.k) for row in rows)
        if isinstance(response, DraftDown):
            raise response
        return DraftResponse(1, len(self.asked), response, draft_s=0.25, handoff_s=0.125)

    def mark_step(self, *, runs: bool) -> None:
        self.steps.append(runs)

    def close(self) -> None:
        self.is_closed = True


class Setup:
    """A drafter with a scripted link, and why it went down."""

    def __init__(self, *, max_request_tokens: int = 100, max_released: int = 2, max_options: int = 1000, width: int = 1,
                 feature_rows: int = 0, learns: Callable[[Submit], bool] | None = None) -> None:  # fmt: skip
        self.reasons: list[str] = []
        self.drafter = RemoteDrafter(
            max_request_tokens=max_request_tokens,
            max_released=max_released,
            max_options=max_options,
            deadline_s=1.5,
            on_down=self.reasons.append,
            width=width,
            learns=learns,
        )
        self.link = ScriptedLink(feature_rows=feature_rows)
        self.drafter.attach(self.link)

    def draft(self, *spans: Span) -> Draft:
        return self.drafter.draft(Batch(1, spans, 0))

    @property
    def last(self) -> tuple[DraftRequestRow, ...]:
        """Rows of the latest draft request."""
        return self.link.asked[-1][0]


def request(key: int, num_tokens: int, *, options: TokenOptions | None = None) -> Request:
    tokens = list(range(10, 10 + num_tokens))
    submit = Submit(request_id=str(key), prompt=tuple(tokens), sampling=SamplingParams())
    made = Request(submit=submit, key=key, stream_key=key, tokens=tokens, num_computed=num_tokens - 1)
    made.logits_processor = LogitsProcessor(options) if options is not None else None
    return made


def decode(of: Request, k: int, *, exit_threshold: float = 0.0) -> Span:
    return Span(of, len(of.tokens) - 1, 1, k, True, "plan", exit_threshold=exit_threshold)


def reasons(draft: Draft) -> list[str]:
    return [row.reason for row in draft.rows]


def test_a_request_carries_the_tokens_that_the_draft_lacks() -> None:
    setup, one, two = Setup(width=2), request(1, 3), request(2, 5)
    draft = setup.draft(decode(one, 2, exit_threshold=0.5), decode(two, 0))
    assert setup.last == (DraftRequestRow(1, 0, (10, 11, 12), 2, one.row_sampling, exit_threshold=0.5, width=2),)
    assert setup.link.asked[0][1:] == ((), 1.5)
    assert (draft.num_caught_up, draft.draft_s, draft.handoff_s) == (3, 0.25, 0.125)
    assert [row.token_ids for row in draft.rows] == [(0, 0), ()]
    one.tokens += [7, 8]
    draft = setup.draft(decode(one, 1), decode(two, 3))
    assert [(row.key, row.start, row.new_tokens, row.k) for row in setup.last] == [
        (1, 3, (7, 8), 1),
        (2, 0, (10, 11, 12, 13, 14), 3),
    ]
    assert draft.num_caught_up == 7


def test_a_request_says_from_where_on_the_draft_may_learn() -> None:
    """From its first generated token, if it consents; a drafter without a rule lets it learn from none."""
    consenting, other = request(1, 3), request(2, 3)
    consenting.tokens += [7]
    setup = Setup(learns=lambda submit: submit.request_id == "1")
    setup.draft(decode(consenting, 2), decode(other, 2))
    assert [row.learn_from for row in setup.last] == [3, -1]
    setup = Setup()
    setup.draft(decode(consenting, 2))
    assert [row.learn_from for row in setup.last] == [-1]


def test_the_draft_is_told_when_a_step_begins_and_ends() -> None:
    """Also of steps without a draft request."""
    setup, one = Setup(), request(1, 3)
    setup.draft(decode(one, 0))
    assert setup.link.steps == [True]
    setup.drafter.committed(Batch(1, (), 0), Verdict(()))
    assert setup.link.steps == [True, False]
    setup.drafter.detach()
    setup.draft(decode(one, 0))
    assert setup.link.steps == [True, False]


def test_tokens_that_do_not_fit_follow_in_later_steps_and_nothing_is_drafted_before() -> None:
    setup, one, two = Setup(max_request_tokens=4), request(1, 4), request(2, 6)
    assert reasons(setup.draft(decode(one, 1), decode(two, 1))) == ["plan", "catch_up"]
    assert [(row.new_tokens, row.k) for row in setup.last] == [((10, 11, 12, 13), 1), ((), 0)]
    assert reasons(setup.draft(decode(two, 2))) == ["catch_up"]
    assert [(row.start, row.new_tokens, row.k) for row in setup.last] == [(0, (10, 11, 12, 13), 0)]
    assert reasons(setup.draft(decode(two, 2))) == ["plan"]
    assert [(row.start, row.new_tokens, row.k) for row in setup.last] == [(4, (14, 15), 2)]


def test_a_row_of_the_response_becomes_a_draft() -> None:
    setup, one, two, three = Setup(), request(1, 1), request(2, 1), request(3, 1)
    setup.link.responses = [
        (
            DraftResponseRow((4, 3), (0.5, 0.25), has_probs=True, parents=(-1, -1)),
            DraftResponseRow((2,), reason="length"),
            DraftResponseRow(has_probs=True, num_on_device=3),
        )
    ]
    setup.drafter.set_vocab(torch.tensor([9, 8]))
    spans = (decode(one, 3), Span(two, 0, 1, 2, True, "probe"), Span(three, 0, 1, 3, True, "probe"))
    draft = setup.draft(*spans)
    first, second, third = draft.rows
    assert (first.token_ids, first.confidences, first.parents) == ((4, 3), (0.5, 0.25), (-1, -1))
    assert first.probs is not None
    assert torch.equal(first.probs, setup.link.probs[0, :2])
    assert (second.token_ids, second.probs, second.reason) == ((2,), None, "length")
    assert (third.num_on_device, third.device_row, third.reason) == (3, 2, "probe")
    assert third.probs is not None
    assert torch.equal(third.probs, setup.link.probs[2])
    assert draft.on_device is not None
    assert draft.on_device.token_ids.shape == (3, MAX_K)
    assert draft.vocab is not None
    assert draft.vocab.tolist() == [9, 8]
    assert setup.draft(decode(one, 1)).on_device is None


def test_ended_requests_that_the_draft_knows_are_released_a_few_at_a_time() -> None:
    setup = Setup(max_released=2)
    setup.draft(*(decode(request(key, 1), 1) for key in (1, 2, 3)))
    setup.drafter.forget([1, 2, 3, 99])
    released = []
    for key in (4, 5, 6):
        setup.draft(decode(request(key, 1), 1))
        released.append(setup.link.asked[-1][1])
    assert released == [(1, 2), (3,), ()]


def test_a_request_without_memory_in_the_draft_is_left_out_until_one_ends() -> None:
    setup, one, two = Setup(), request(1, 2), request(2, 1)
    setup.link.responses = [(DraftResponseRow(reason="memory"), DraftResponseRow((0,)))]
    assert reasons(setup.draft(decode(one, 1), decode(two, 1))) == ["memory", "plan"]
    assert reasons(setup.draft(decode(one, 1), decode(two, 1))) == ["memory", "plan"]
    assert [row.key for row in setup.last] == [2]
    num_asked = len(setup.link.asked)
    assert reasons(setup.draft(decode(one, 1))) == ["memory"]
    assert len(setup.link.asked) == num_asked, "there was nothing to ask"
    setup.drafter.forget([2])
    assert reasons(setup.draft(decode(one, 1))) == ["plan"]
    assert [(row.key, row.start, row.new_tokens) for row in setup.last] == [(1, 0, (10, 11))]
    assert setup.link.asked[-1][1] == (2,)


def test_options_that_the_draft_refuses_are_not_sent_again() -> None:
    setup, one = Setup(), request(1, 1)
    setup.link.responses = [(DraftResponseRow(reason="options"),)]
    assert reasons(setup.draft(decode(one, 1))) == ["options"]
    assert reasons(setup.draft(decode(one, 1))) == ["options"]
    assert len(setup.link.asked) == 1
    setup.drafter.forget([1])
    assert setup.drafter.draft(Batch(1, (decode(one, 1),), 0)).rows[0].reason == "plan"


def test_options_go_with_the_first_tokens_as_many_as_fit() -> None:
    options = TokenOptions(num_prompt=1, presence_penalty=0.5)
    size = len(encode_options(options))
    setup = Setup(max_options=2 * size)
    batch = [decode(request(key, 1, options=options), 1) for key in (1, 2, 3)]
    assert reasons(setup.draft(*batch)) == ["plan", "plan", "catch_up"]
    assert [row.options for row in setup.last] == [options, options]
    batch[0].request.tokens.append(9)
    assert reasons(setup.draft(*batch)) == ["plan", "plan", "plan"]
    assert [(row.key, row.options) for row in setup.last] == [(1, None), (2, None), (3, options)]


@pytest.mark.parametrize(("spare", "reason"), [(0, "plan"), (-1, "options")])
def test_options_larger_than_a_draft_request_are_never_sent(spare: int, reason: str) -> None:
    options = TokenOptions(num_prompt=1, stop_token_ids=(2, 3), min_tokens=1)
    setup = Setup(max_options=len(encode_options(options)) + spare)
    assert reasons(setup.draft(decode(request(1, 1, options=options), 1))) == [reason]
    assert len(setup.link.asked) == (reason == "plan")


def test_when_the_draft_fails_all_run_without_it_and_the_next_one_receives_everything_again() -> None:
    setup, one, two = Setup(), request(1, 2), request(2, 1)
    setup.draft(decode(one, 1))
    setup.drafter.forget([two.key])
    setup.link.responses = [DraftDown("hung")]
    draft = setup.draft(decode(one, 1), Span(two, 0, 1, 0, True, "length"))
    assert reasons(draft) == ["draft_down", "length"]
    assert (setup.reasons, setup.link.is_closed, setup.drafter.is_up) == (["hung"], True, False)
    assert reasons(setup.draft(decode(one, 1))) == ["draft_down"]
    assert setup.reasons == ["hung"]
    assert reasons(setup.draft(decode(one, 0))) == ["plan"], "nothing was asked"
    link = ScriptedLink()
    setup.drafter.attach(link)
    assert setup.drafter.is_up
    setup.draft(decode(one, 1))
    assert [(row.start, row.new_tokens) for row in link.asked[0][0]] == [(0, (10, 11))]
    setup.drafter.attach(ScriptedLink())
    assert link.is_closed


def test_a_new_draft_is_asked_whatever_the_one_before_refused_or_had_not_heard() -> None:
    setup, one, two = Setup(max_released=2), request(1, 2), request(2, 1)
    ended = [request(key, 1) for key in (3, 4, 5)]
    setup.draft(*(decode(each, 1) for each in ended))
    setup.drafter.forget([each.key for each in ended])
    setup.link.responses = [(DraftResponseRow(reason="memory"), DraftResponseRow(reason="options"))]
    assert reasons(setup.draft(decode(one, 1), decode(two, 1))) == ["memory", "options"]
    link = ScriptedLink()
    setup.drafter.attach(link)
    assert reasons(setup.draft(decode(one, 1), decode(two, 1))) == ["plan", "plan"]
    assert link.asked[0][1] == ()


def chunk(of: Request, start: int, num_tokens: int) -> Span:
    return Span(of, start, num_tokens, 0, start + num_tokens == len(of.tokens), "plan")


def computed(setup: Setup, *spans: Span) -> None:
    """Commit a step with one feature row per token."""
    q_lens = np.array([span.num_tokens for span in spans], np.int32)
    features = Features(torch.zeros(int(q_lens.sum()), 1), q_lens)
    setup.drafter.committed(Batch(1, spans, 0), Verdict(tuple(RowVerdict() for _ in spans), features=features))


def test_features_of_a_long_prompt_are_read_before_they_are_overwritten() -> None:
    """A ring of 8 rows and a prompt in chunks of 4. Its rows are pressing once half of the ring is gone."""
    setup, one = Setup(feature_rows=8), request(1, 12)
    computed(setup, chunk(one, 0, 4))
    setup.draft(chunk(one, 4, 4))
    assert setup.link.asked == [], "half of the ring is left"
    computed(setup, chunk(one, 4, 4))
    draft = setup.draft(chunk(one, 8, 4))
    assert setup.link.asked == [], "its last chunk samples, so that it is drafted for next"
    assert reasons(draft) == ["plan"]


def test_a_pressing_prompt_is_sent_up_to_its_last_features() -> None:
    setup, one = Setup(feature_rows=8), request(1, 20)
    computed(setup, chunk(one, 0, 4))
    computed(setup, chunk(one, 4, 4))
    draft = setup.draft(chunk(one, 8, 4))
    (row,) = setup.last
    assert (row.start, row.new_tokens, row.k) == (0, tuple(range(10, 19)), 0)
    assert row.feature_rows == (-1, 0, 1, 2, 3, 4, 5, 6, 7)
    assert reasons(draft) == ["plan"], "the reason of a span that asked for nothing stays"
    setup.draft(chunk(one, 8, 4))
    assert len(setup.link.asked) == 1, "they have been read"
    computed(setup, chunk(one, 8, 4))
    setup.draft(chunk(one, 12, 4))
    assert len(setup.link.asked) == 1, "of the rows that have not been read, the ring holds all for two more steps"


def test_a_pressing_prompt_that_does_not_fit_is_sent_over_several_steps() -> None:
    setup, one = Setup(feature_rows=8, max_request_tokens=8), request(1, 20)
    computed(setup, chunk(one, 0, 4))
    computed(setup, chunk(one, 4, 4))
    sent = []
    for _ in range(3):
        setup.draft(chunk(one, 8, 4))
        sent.append([(row.start, len(row.new_tokens)) for row in setup.last])
    assert sent == [[(0, 8)], [(8, 1)], [(8, 1)]]
    assert len(setup.link.asked) == 2


def test_prompts_are_not_read_ahead_while_no_decode_is_drafted_for() -> None:
    setup, one, two = Setup(feature_rows=8), request(1, 20), request(2, 1)
    computed(setup, chunk(one, 0, 4))
    computed(setup, chunk(one, 4, 4))
    setup.draft(decode(two, 0), chunk(one, 8, 4))
    assert setup.link.asked == []
    setup.draft(chunk(one, 8, 4))
    assert setup.link.asked == [], "the last step with a decode asked for no draft"
    setup.draft(decode(two, 1), chunk(one, 8, 4))
    assert [row.key for row in setup.last] == [2, 1]


def test_the_features_of_an_ended_request_are_forgotten() -> None:
    setup, one = Setup(feature_rows=8), request(1, 4)
    computed(setup, chunk(one, 0, 4))
    setup.drafter.forget([1])
    setup.draft(decode(one, 1))
    assert setup.last[0].feature_rows == (-1, -1, -1, -1)
