"""Lookup where the request repeats itself, a model elsewhere: who drafts what, and that both are told of endings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import FixedPacer, ToyEngine, ToyModel

from engine.core.drafter import empty_rows
from engine.core.step import Batch, Draft, DraftRow, Verdict
from engine.draft.first_of import LookupFirst
from engine.draft.ngram import NgramDrafter
from engine.messages import SamplingParams, Submit

pytestmark = pytest.mark.usefixtures("one_thread")


class Guessing:
    """Drafts token 0 wherever it is asked, and remembers for whom."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.forgotten: list[int] = []

    def draft(self, batch: Batch) -> Draft:
        rows = empty_rows(batch)
        for index, span in enumerate(batch.spans):
            if span.k > 0:
                self.asked.append(tuple(span.request.tokens))
                rows[index] = DraftRow(token_ids=(0,) * span.k)
        return Draft(tuple(rows), draft_s=1.0)

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        return None

    def forget(self, keys: Sequence[int]) -> None:
        self.forgotten += keys


def test_the_model_drafts_only_where_nothing_is_found() -> None:
    target, model = ToyModel(vocab_size=5), Guessing()
    drafter = LookupFirst(NgramDrafter(min_size=2, max_size=3), model)
    engine = ToyEngine(target, drafter, FixedPacer(2))
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    engine.run([Submit(request_id="r", prompt=(3, 1, 4), sampling=greedy)])
    assert model.asked
    for tokens in model.asked:
        earlier = [tokens[end - 2 : end] for end in range(2, len(tokens))]
        assert tokens[-2:] not in earlier
    # Some forty greedy tokens out of five must repeat a pair, so that lookup had its turn as well.
    assert len(model.asked) < 20
    assert len(model.forgotten) == 1
