"""Two drafters in order of precedence: each span gets the draft of the first one that finds something for it.

Owns the merge only. The engine uses it twice: grammar-forced tokens come before everything else, and prompt lookup
comes before a draft model.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.core.drafter import Drafter
from engine.core.step import Batch, Draft, DraftSource, Verdict


class FirstOf:
    """Asks `first` for every span, then `rest` for the spans that `first` left empty.

    Args:
        first: a drafter without a forward pass. Its tokens are certain: it returns no probabilities.
        rest: the method for all other spans. It sees k = 0, also for lookups, where `first` has drafted.
        source: the source that the rows of `first` are counted under.
    """

    def __init__(self, first: Drafter, rest: Drafter, *, source: DraftSource) -> None:
        self._first = first
        self._rest = rest
        self._source: DraftSource = source

    def draft(self, batch: Batch) -> Draft:
        found = self._first.draft(batch).rows
        if not any(row.token_ids for row in found):
            return self._rest.draft(batch)
        spans = tuple(
            replace(span, k=0, k_by_match=None) if row.token_ids else span
            for span, row in zip(batch.spans, found, strict=True)
        )
        draft = self._rest.draft(replace(batch, spans=spans))
        rows = tuple(
            replace(row, reason="plan", source=self._source) if row.token_ids else other
            for row, other in zip(found, draft.rows, strict=True)
        )
        return replace(draft, rows=rows)

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self._first.committed(batch, verdict)
        self._rest.committed(batch, verdict)

    def forget(self, keys: Sequence[int]) -> None:
        self._first.forget(keys)
        self._rest.forget(keys)
