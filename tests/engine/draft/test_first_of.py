"""FirstOf: which drafter drafts which span, under which source, and that both forget requests that have ended."""

from __future__ import annotations

from collections.abc import Sequence

from fakes import FixedPacer, ToyEngine, ToyModel

from engine.core.drafter import empty_rows
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, Span, Verdict
from engine.draft.first_of import FirstOf
from engine.lookup.ngram import NgramDrafter
from engine.messages import SamplingParams, Submit


class RecordingDrafter:
    """Drafts one token value wherever k > 0, for requests whose key it is given; records what it was asked."""

    def __init__(self, token: int = 0, *, only: Sequence[int] | None = None) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.asked_ks: list[tuple[int, ...]] = []
        self.forgotten: list[int] = []
        self.committed_steps: list[tuple[Batch, Verdict]] = []
        self._token = token
        self._only = only

    def draft(self, batch: Batch) -> Draft:
        self.asked_ks.append(tuple(span.k for span in batch.spans))
        rows = empty_rows(batch)
        for index, span in enumerate(batch.spans):
            if span.k > 0 and (self._only is None or span.request.key in self._only):
                self.asked.append(tuple(span.request.tokens))
                rows[index] = DraftRow(token_ids=(self._token,) * span.k, reason=span.reason)
        return Draft(tuple(rows), draft_s=1.0)

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self.committed_steps.append((batch, verdict))

    def forget(self, keys: Sequence[int]) -> None:
        self.forgotten += keys


def batch_of(*ks: int) -> Batch:
    requests = [
        Request(
            submit=Submit(request_id=str(key), prompt=(1,), sampling=SamplingParams()),
            key=key,
            stream_key=0,
            tokens=[1, 2],
        )
        for key in range(len(ks))
    ]
    spans = [Span(request, 1, 1, k, samples=True, reason="off") for request, k in zip(requests, ks, strict=True)]
    return Batch(1, tuple(spans), 0)


def test_each_span_is_drafted_by_the_first_that_finds_something() -> None:
    first, rest = RecordingDrafter(7, only=(1,)), RecordingDrafter(9)
    draft = FirstOf(first, rest, source="grammar").draft(batch_of(2, 3, 0))
    assert [row.token_ids for row in draft.rows] == [(9, 9), (7, 7, 7), ()]
    assert [row.source for row in draft.rows] == ["method", "grammar", "method"]
    assert [row.reason for row in draft.rows] == ["off", "plan", "off"]
    assert rest.asked_ks == [(2, 0, 0)]
    assert draft.draft_s == 1.0


def test_the_rest_sees_the_whole_batch_when_the_first_finds_nothing() -> None:
    first, rest = RecordingDrafter(only=()), RecordingDrafter(9)
    draft = FirstOf(first, rest, source="lookup").draft(batch_of(2, 1))
    assert rest.asked_ks == [(2, 1)]
    assert [row.source for row in draft.rows] == ["method", "method"]


def test_both_learn_of_a_step_and_forget_a_request() -> None:
    first, rest = RecordingDrafter(), RecordingDrafter()
    both, step = FirstOf(first, rest, source="lookup"), (batch_of(1), Verdict(()))
    both.committed(*step)
    assert first.committed_steps == rest.committed_steps == [step]
    both.forget((3, 4))
    assert first.forgotten == rest.forgotten == [3, 4]


def test_the_model_drafts_only_where_nothing_is_found() -> None:
    target, model = ToyModel(vocab_size=5), RecordingDrafter()
    drafter = FirstOf(NgramDrafter(min_size=2, max_size=3), model, source="lookup")
    engine = ToyEngine(target, drafter, FixedPacer(2))
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    engine.run([Submit(request_id="r", prompt=(3, 1, 4), sampling=greedy)])
    assert model.asked
    for tokens in model.asked:
        earlier = [tokens[end - 2 : end] for end in range(2, len(tokens))]
        assert tokens[-2:] not in earlier
    # Forty greedy tokens from a vocabulary of five repeat a pair, so prompt lookup has drafted as well.
    assert len(model.asked) < 20
    assert len(model.forgotten) == 1
