"""One tree per request from lookup and model: who drafts, under which source and budget, and what is learnt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FixedPacer, RandomPacer, ToyEngine, ToyModel, toy_drafter
from msgspec import structs
from reference import generate

from engine.core.drafter import Drafter, empty_rows
from engine.core.pacing import NUM_MATCH_CLASSES
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, RowVerdict, Span, Verdict
from engine.lookup.ngram import Lookup
from engine.messages import AdapterRef, SamplingParams, Submit
from engine.proposals.drafter import EXPLORE_DRAFTS, MergedDrafter

REPEATING, NEW = [1, 2, 3, 8, 1, 2], [4, 0, 1]
"""The first text has a match, which goes on with 3, 8, 1, 2. The second has none."""
GREEDY = SamplingParams(temperature=0.0)


class Model:
    """Drafts the chain 7, 8, 9, ... as far as it is asked to."""

    def __init__(self, confidence: float | None = 0.5) -> None:
        self.asked: list[int] = []
        self.committed_steps = 0
        self.forgotten: list[int] = []
        self._confidence = confidence

    def draft(self, batch: Batch) -> Draft:
        self.asked = [span.k for span in batch.spans]
        rows = empty_rows(batch)
        for index, span in enumerate(batch.spans):
            if span.k > 0:
                tokens = tuple(range(7, 7 + span.k))
                confidences = () if self._confidence is None else (self._confidence,) * span.k
                rows[index] = DraftRow(tokens, confidences=confidences, reason=span.reason)
        return Draft(tuple(rows), draft_s=1.0)

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self.committed_steps += 1

    def forget(self, keys: list[int]) -> None:
        self.forgotten += keys


def batch_of(*texts: list[int], k: int, k_by_match: tuple[int, ...] | None = None) -> Batch:
    spans = []
    for key, tokens in enumerate(texts):
        submit = Submit(request_id=str(key), prompt=tuple(tokens), sampling=GREEDY)
        request = Request(submit=submit, key=key, stream_key=0, tokens=list(tokens))
        spans.append(Span(request, len(tokens) - 1, 1, k, samples=True, reason="probe", k_by_match=k_by_match))
    return Batch(1, tuple(spans), 0)


def merged(model: Model | None) -> MergedDrafter:
    return MergedDrafter(Lookup(min_size=2, max_size=3), model)


def test_a_text_with_a_match_gets_both_and_one_without_the_model_s_own() -> None:
    model = Model()
    draft = merged(model).draft(batch_of(REPEATING, NEW, k=4))
    both, own = draft.rows
    assert set(both.token_ids) > {3, 7}
    assert len(both.token_ids) == 4
    assert both.parents[both.token_ids.index(3)] == both.parents[both.token_ids.index(7)] == -1
    assert (both.source, both.reason, both.confidences) == ("merged", "probe", ())
    assert own == DraftRow((7, 8, 9, 10), confidences=(0.5,) * 4, reason="probe")
    assert 0 < model.asked[0] < model.asked[1] == 4, "less is asked where lookup has something"
    assert draft.draft_s == 1.0


def test_nodes_that_are_not_worth_their_rows_are_left_out_but_now_and_then() -> None:
    drafter = merged(Model(confidence=0.8))
    (span,) = batch_of(NEW, k=4).spans
    batch = Batch(1, (structs.replace(span, least_acceptance=0.6),), 0)
    rows = [drafter.draft(batch).rows[0] for _ in range(2 * EXPLORE_DRAFTS)]
    assert [index for index, row in enumerate(rows) if len(row.token_ids) == 4] == [0, 32]
    cut = rows[1]
    assert cut == DraftRow((7, 8), confidences=(0.8, 0.8), reason="probe"), "0.8 and 0.64 are worth it"
    assert drafter.draft(batch).rows[0] == rows[0], "the next draft explores"
    (none,) = drafter.draft(Batch(1, (structs.replace(span, least_acceptance=0.9),), 0)).rows
    assert none == DraftRow(reason="acceptance")


def test_a_model_without_confidences_is_expected_to_be_right() -> None:
    """As far as anything is: 0.98 per node, so 0.9604 of the second and 0.941 of the third."""
    drafter = merged(Model(confidence=None))
    (span,) = batch_of(NEW, k=4).spans
    batch = Batch(1, (structs.replace(span, least_acceptance=0.95),), 0)
    explored, cut = (drafter.draft(batch).rows[0] for _ in range(2))
    assert explored.token_ids == (7, 8, 9, 10)
    assert cut == DraftRow((7, 8), reason="probe")


def test_a_match_that_fills_the_budget_saves_the_draft_forward() -> None:
    model, drafter = Model(), None
    drafter = merged(model)
    for _ in range(400):
        for depth in range(4):
            drafter.rates.saw_lookup("greedy", 2, "alone", depth, is_shared=False, accepted=True)
    (row,) = drafter.draft(batch_of(REPEATING, k=3)).rows
    assert model.asked == [0]
    assert (row.token_ids, row.parents, row.source, row.match_len) == ((3, 8, 1), (), "lookup", 2)


def test_a_pace_of_lookups_alone_is_followed() -> None:
    model = Model()
    ks = (2, *(0,) * (NUM_MATCH_CLASSES - 1))
    with_match, without = merged(model).draft(batch_of(REPEATING, NEW, k=0, k_by_match=ks)).rows
    assert model.asked == [0, 0]
    assert (with_match.token_ids, with_match.source, with_match.reason) == ((3, 8), "lookup", "plan")
    assert without == DraftRow(reason="probe")
    (none,) = merged(model).draft(batch_of(REPEATING, k=0, k_by_match=(0,) * NUM_MATCH_CLASSES)).rows
    assert none == DraftRow(reason="probe")


def test_a_long_match_may_have_a_larger_budget_than_the_model() -> None:
    (row,) = merged(Model()).draft(batch_of(REPEATING, k=1, k_by_match=(4,) * NUM_MATCH_CLASSES)).rows
    assert len(row.token_ids) == 4


def test_without_a_model_lookup_is_the_method() -> None:
    with_match, without = merged(None).draft(batch_of(REPEATING, NEW, k=2)).rows
    assert with_match == DraftRow((3, 8), reason="probe", match_len=2)
    assert without == DraftRow(reason="no_match")


def test_tokens_that_only_the_device_has_are_left_alone() -> None:
    model = toy_drafter(ToyModel(vocab_size=9), on_device=True)
    draft = MergedDrafter(Lookup(min_size=2, max_size=3), model).draft(batch_of(REPEATING, k=3))
    (row,) = draft.rows
    assert draft.on_device is not None
    assert row.num_on_device > 0
    assert row.token_ids == ()


def test_what_was_accepted_is_learnt_by_source() -> None:
    model = Model()
    drafter = merged(model)
    lookup = drafter.rates.of_lookup("greedy", 2, is_shared=False)
    before, prior = lookup("alone", 0), drafter.rates.of_places("greedy", 1)[0]
    for _ in range(30):
        batch = batch_of(REPEATING, k=4)
        (row,) = drafter.draft(batch).rows
        place = row.token_ids.index(3)
        drafter.committed(batch, Verdict((RowVerdict((3, 9), 1, "recovered", path=(place,)),)))
    assert lookup("alone", 0) > before
    assert drafter.rates.of_places("greedy", 1)[0] < prior
    assert model.committed_steps == 30
    drafter.forget([0])
    assert model.forgotten == [0]


def test_a_confidence_that_was_wrong_is_worth_less() -> None:
    """One rejected node of confidence 0.5, against a prior of four observations that were as good as promised."""
    drafter, batch = merged(Model()), batch_of(NEW, k=1)
    drafter.draft(batch)
    drafter.committed(batch, Verdict((RowVerdict((9,), 0, "recovered"),)))
    kept = 0.998 * 4
    assert drafter.rates.of_model("greedy", 0.5, 0, 0, drawn=False) == pytest.approx(0.5 * kept / (kept + 0.5))


def test_a_forgotten_request_leaves_no_text_behind() -> None:
    drafter = merged(None)
    drafter.draft(batch_of(REPEATING, k=2))
    drafter.forget([0])
    assert drafter.draft(batch_of([9, 1, 2], k=2)).rows == (DraftRow(reason="no_match"),)


def test_an_adapter_is_learnt_apart() -> None:
    drafter, lookup_nodes = merged(None), 0
    adapter = AdapterRef(number=1, name="a")
    for _ in range(30):
        batch = batch_of(REPEATING, k=3)
        (span,) = batch.spans
        span.request.submit = replace(span.request.submit, adapter=adapter)
        lookup_nodes += len(drafter.draft(batch).rows[0].token_ids)
        drafter.committed(batch, Verdict((RowVerdict((9,), 0, "recovered"),)))
    assert lookup_nodes == 90
    base = drafter.rates.of_lookup("greedy", 2, is_shared=False)("alone", 0)
    assert base == MergedDrafter(None, None).rates.of_lookup("greedy", 2, is_shared=False)("alone", 0)
    for _ in range(30):
        batch = batch_of(REPEATING, k=3)
        drafter.draft(batch)
        drafter.committed(batch, Verdict((RowVerdict((9,), 0, "recovered"),)))
    assert drafter.rates.of_lookup("greedy", 2, is_shared=False)("alone", 0) < base / 2


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=3)], ids=["greedy", "coupled"])
def test_the_text_is_that_without_drafts(sampling: SamplingParams) -> None:
    target = ToyModel(vocab_size=6, sharpness=2.5)
    sampling = SamplingParams(temperature=sampling.temperature, seed=sampling.seed, max_tokens=60)
    expected = generate(target.logits_after, (0, 1), sampling, 128).tokens
    for seed in range(4):
        model: Drafter = toy_drafter(ToyModel(vocab_size=6, seed=9, blend=0.5, sharpness=2.5), width=1 + seed % 3)
        drafter = MergedDrafter(Lookup(min_size=1, max_size=3), model)
        pacer = FixedPacer(8) if seed % 2 else RandomPacer(seed, max_k=9)
        engine = ToyEngine(target, drafter, pacer, max_step_tokens=64)
        assert engine.run([Submit(request_id="r", prompt=(0, 1), sampling=sampling)])["r"] == expected
