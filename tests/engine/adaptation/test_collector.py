"""Documents out of draft requests.

Promises: a document holds the committed tokens with the features that preceded them, each at its place; without consent
nothing is kept; a gap ends a document; the features of a shared beginning are found again; memory is bounded.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.adaptation.collector import MAX_TOKENS, Collector
from engine.adaptation.messages import Document
from engine.draft.messages import DraftRequestRow
from engine.sampling.row_sampling import RowSampling

WIDTH = 2


class Ring:
    """A feature ring whose row for position p of request `key` holds (key, p)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def put(self, key: int, position: int) -> int:
        self.rows.append((key, position))
        return len(self.rows) - 1

    @property
    def features(self) -> torch.Tensor:
        return torch.tensor(self.rows or [(0, 0)], dtype=torch.float32)


def row(
    ring: Ring, key: int, start: int, tokens: list[int], *, learn_from: int, missing: tuple[int, ...] = ()
) -> DraftRequestRow:
    """New tokens of a request; `missing` are positions of tokens without a feature. Position 0 never has one."""
    places = [
        -1 if position == 0 or position in missing else ring.put(key, position - 1)
        for position in range(start, start + len(tokens))
    ]
    sampling = RowSampling(0.0, 1.0, 0, 1, False)
    return DraftRequestRow(key, start, tuple(tokens), 0, sampling, feature_rows=tuple(places), learn_from=learn_from)


def read(document: Document) -> tuple[list[int], list[list[float]]]:
    tokens = np.frombuffer(document.tokens, np.int32).tolist()
    return tokens, np.frombuffer(document.features, np.float32).reshape(-1, WIDTH).tolist()


def test_a_document_has_the_committed_tokens_and_the_feature_after_each() -> None:
    """In random portions, as drafting and chunks of prompts make them, with other requests between."""
    rng = random.Random(0)
    collector, ring = Collector(1 << 20), Ring()
    texts = {key: [rng.randrange(100) for _ in range(rng.randint(12, 40))] for key in range(6)}
    sent = dict.fromkeys(texts, 0)
    while any(sent[key] < len(text) for key, text in texts.items()):
        rows = []
        for key, text in texts.items():
            count = min(rng.randint(0, 5), len(text) - sent[key])
            if count:
                rows.append(row(ring, key, sent[key], text[sent[key] : sent[key] + count], learn_from=5))
                sent[key] += count
        assert collector.observe(rows, ring.features) == []
    for key, text in texts.items():
        (document,) = collector.release([key])
        tokens, features = read(document)
        assert tokens == text
        assert features == [[key, position] for position in range(len(text) - 1)]
        assert document.first_generated == 5
        assert document.itemsize == 4
    assert collector.num_bytes == 0


def test_without_consent_nothing_is_kept() -> None:
    collector, ring = Collector(1 << 20), Ring()
    collector.observe([row(ring, 1, 0, list(range(30)), learn_from=-1)], ring.features)
    assert collector.num_bytes == 0
    assert collector.release([1]) == []


def test_a_gap_ends_a_document_and_begins_another() -> None:
    collector, ring = Collector(1 << 20), Ring()
    collector.observe([row(ring, 1, 0, list(range(12)), learn_from=4)], ring.features)
    found = collector.observe([row(ring, 1, 12, list(range(12, 24)), learn_from=4, missing=(12, 15))], ring.features)
    assert [read(document)[0] for document in found] == [list(range(12))]
    (rest,) = collector.release([1])
    tokens, features = read(rest)
    assert tokens == list(range(15, 24))
    assert features == [[1, position] for position in range(15, 23)]
    assert rest.first_generated == 1


def test_a_request_that_is_sent_again_begins_anew() -> None:
    collector, ring = Collector(1 << 20), Ring()
    collector.observe([row(ring, 1, 0, list(range(12)), learn_from=4)], ring.features)
    collector.observe([row(ring, 1, 0, list(range(14)), learn_from=4)], ring.features)
    (document,) = collector.release([1])
    assert read(document)[0] == list(range(14))


def test_the_features_of_a_prompt_in_the_prefix_cache_are_those_of_an_earlier_request() -> None:
    """The second prompt shares eight tokens with the first; the target computes features from position 8 on."""
    collector, ring = Collector(1 << 20), Ring()
    first, second = [*range(10), 50, 51, 52, 53, 54], [*range(8), 60, 61, 62, 63, 64, 65, 66]
    collector.observe([row(ring, 1, 0, first, learn_from=10)], ring.features)
    cached = tuple(range(9))
    collector.observe([row(ring, 2, 0, second, learn_from=10, missing=cached)], ring.features)
    (document,) = collector.release([2])
    tokens, features = read(document)
    # Token 8 is another one, so the features before it are not known to be the same.
    assert tokens == second[8:]
    assert features == [[2, position] for position in range(8, 14)]
    third = [*range(9), 70, 71, 72, 73, 74, 75]
    collector.observe([row(ring, 3, 0, third, learn_from=10, missing=tuple(range(9)))], ring.features)
    (document,) = collector.release([3])
    tokens, features = read(document)
    assert tokens == third
    assert features == [[1, position] for position in range(8)] + [[3, position] for position in range(8, 14)]


def test_a_request_beyond_the_bound_is_dropped_and_the_others_stay() -> None:
    size = WIDTH * 4
    collector, ring = Collector(30 * size), Ring()
    collector.observe([row(ring, 1, 0, list(range(20)), learn_from=4)], ring.features)
    collector.observe([row(ring, 2, 0, list(range(20)), learn_from=4)], ring.features)
    assert collector.num_bytes <= 30 * size
    collector.observe([row(ring, 2, 20, [1, 2, 3], learn_from=4)], ring.features)
    assert collector.release([2]) == []
    assert len(collector.release([1])) == 1
    assert collector.num_bytes == 0


def test_a_long_request_becomes_several_documents() -> None:
    collector, ring = Collector(1 << 20), Ring()
    text = list(range(MAX_TOKENS + 40))
    found = collector.observe([row(ring, 1, 0, text[:MAX_TOKENS], learn_from=4)], ring.features)
    found += collector.observe([row(ring, 1, MAX_TOKENS, text[MAX_TOKENS:], learn_from=4)], ring.features)
    found += collector.release([1])
    assert [document.num_tokens for document in found] == [MAX_TOKENS, 40]


@pytest.mark.parametrize("num_generated", [3, 4])
def test_too_little_to_learn_from_is_not_kept(num_generated: int) -> None:
    collector, ring = Collector(1 << 20), Ring()
    collector.observe([row(ring, 1, 0, list(range(6 + num_generated)), learn_from=6)], ring.features)
    assert len(collector.release([1])) == num_generated - 3
