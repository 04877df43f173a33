"""The drafter that each setting gives, by what it drafts; and the adversarial drafter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import ToyModel, toy_drafter

from engine.config import Method, SpeculativeConfig
from engine.core.drafter import NoDrafter
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, Span, Verdict
from engine.draft.adversarial import WrongDrafter
from engine.draft.methods import _method, make_drafter
from engine.lookup.ngram import NgramDrafter
from engine.messages import SamplingParams, Submit

VOCAB = 5
REPEATING, NEW = [1, 2, 3, 1, 2], [4, 0, 1]
"""The first text has a match for prompt lookup, the second has none."""


def sources(config: SpeculativeConfig, *, branches: bool = False) -> list[str]:
    """For both texts: which source drafted, or the reason for no draft."""
    remote = toy_drafter(ToyModel(vocab_size=VOCAB)) if config.method in ("draft_model", "eagle") else None
    drafter = make_drafter(config, remote, vocab_size=VOCAB, branches=branches)
    spans = []
    for key, tokens in enumerate((REPEATING, NEW)):
        submit = Submit(request_id=str(key), prompt=tuple(tokens), sampling=SamplingParams(temperature=0.0))
        request = Request(submit=submit, key=key, stream_key=0, tokens=list(tokens))
        spans.append(Span(request, len(tokens) - 1, 1, 2, samples=True, reason="plan"))
    rows = drafter.draft(Batch(1, tuple(spans), 0)).rows
    return [row.source if row.token_ids else row.reason for row in rows]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SpeculativeConfig(method="none"), ["plan", "plan"]),
        (SpeculativeConfig(method="ngram", ngram_min=2, ngram_max=3), ["method", "no_match"]),
        (SpeculativeConfig(method="draft_model", draft="d", lookup=False), ["method", "method"]),
        (SpeculativeConfig(method="draft_model", draft="d", lookup=True, ngram_min=2), ["lookup", "method"]),
    ],
    ids=["none", "ngram", "draft_model", "draft_model with lookup"],
)
def test_each_method_drafts_from_its_sources(config: SpeculativeConfig, expected: list[str]) -> None:
    assert sources(config) == expected


@pytest.mark.parametrize(
    ("method", "first"), [("ngram", ["method", "no_match"]), ("draft_model", ["merged", "method"])]
)
def test_with_branches_lookup_and_model_are_merged(method: Method, first: list[str]) -> None:
    draft = "d" if method == "draft_model" else None
    config = SpeculativeConfig(method=method, draft=draft, ngram_min=2, tree="auto")
    assert sources(config, branches=True) == first
    alone = SpeculativeConfig(method="draft_model", draft="d", lookup=False)
    assert sources(alone, branches=True) == ["method", "method"]


def test_wrong_drafts_wrap_the_method() -> None:
    config = SpeculativeConfig(method="ngram", ngram_min=2, ngram_max=3)
    texts = {}
    for wrong in (False, True):
        drafter = make_drafter(config.model_copy(update={"wrong_drafts": wrong}), None, vocab_size=VOCAB)
        submit = Submit(request_id="0", prompt=tuple(REPEATING), sampling=SamplingParams(temperature=0.0))
        request = Request(submit=submit, key=0, stream_key=0, tokens=list(REPEATING))
        (row,) = drafter.draft(Batch(1, (Span(request, 4, 1, 2, samples=True, reason="plan"),), 0)).rows
        texts[wrong] = row.token_ids
    assert texts[False] == (3, 1)
    assert texts[True] == (0, 3)


class TwoRows(NoDrafter):
    """Drafts fixed tokens for the first span and none for the second; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def draft(self, batch: Batch) -> Draft:
        return Draft(
            (DraftRow(token_ids=(0, VOCAB - 1), confidences=(0.5, 0.5)), DraftRow(reason="memory")), draft_s=2.0
        )

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self.told.append((batch, verdict))

    def forget(self, keys: Sequence[int]) -> None:
        self.told.append(keys)


def test_an_adversarial_drafter_passes_on_what_it_is_told() -> None:
    inner, step = TwoRows(), (Batch(1, (), 0), Verdict(()))
    drafter = WrongDrafter(inner, VOCAB)
    drafter.committed(*step)
    drafter.forget((3,))
    assert inner.told == [step, (3,)]


@pytest.mark.parametrize("vocab_size", [VOCAB, 2])
def test_every_adversarial_token_differs_and_is_in_the_vocabulary(vocab_size: int) -> None:
    class Every(NoDrafter):
        def draft(self, batch: Batch) -> Draft:
            return Draft((DraftRow(token_ids=tuple(range(vocab_size))),))

    (row,) = WrongDrafter(Every(), vocab_size).draft(Batch(1, (), 0)).rows
    assert all(wrong != right for right, wrong in enumerate(row.token_ids))
    assert all(0 <= token < vocab_size for token in row.token_ids)


def test_an_adversarial_draft_keeps_costs_and_empty_rows() -> None:
    draft = WrongDrafter(TwoRows(), VOCAB).draft(Batch(1, (), 0))
    assert draft.rows == (
        DraftRow(token_ids=(2, 1), confidences=(0.5, 0.5)),
        DraftRow(reason="memory"),
    )
    assert draft.draft_s == 2.0


@pytest.mark.parametrize(("shared", "num_bytes"), [("off", None), ("client", 2 << 20), ("all", 2 << 20)])
def test_shared_texts_take_at_most_the_memory_of_the_setting(shared: str, num_bytes: int | None) -> None:
    """16 bytes per token, and a power of two of tokens: of 3 MiB, 2 MiB are used."""
    settings = SpeculativeConfig.model_validate({"shared_lookup": shared, "shared_lookup_mib": 3})
    drafter = _method(settings, None, branches=False)
    assert isinstance(drafter, NgramDrafter)
    lookup = drafter._lookup
    assert (None if lookup._shared is None else lookup._shared.num_bytes) == num_bytes
    assert lookup._per_client == (shared == "client")
