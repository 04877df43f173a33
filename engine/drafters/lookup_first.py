"""Prompt lookup where a request repeats itself, a model for the rest.

What has been said before is often said again, names and numbers out of a passage above all, which a small model's
vocabulary may not even hold; lookup costs nothing there. Which of the two drafts depends on the committed tokens alone.
Owns that choice; each of the two keeps its own state, and the model catches up when it is asked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.drafter import Drafter
from engine.step import Batch, Draft


class LookupFirst:
    """Methods `draft_model` and `eagle` with `lookup`.

    Args:
        lookup: asked first.
        model: asked for the spans in which nothing was found.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup = lookup
        self._model = model

    def draft(self, batch: Batch) -> Draft:
        found = self._lookup.draft(batch).rows
        if not any(row.token_ids for row in found):
            return self._model.draft(batch)
        places = zip(batch.spans, found, strict=True)
        rest = tuple(replace(span, k=0) if row.token_ids else span for span, row in places)
        draft = self._model.draft(replace(batch, spans=rest))
        rows = tuple(
            replace(own, reason="plan", source="lookup") if own.token_ids else other
            for own, other in zip(found, draft.rows, strict=True)
        )
        return replace(draft, rows=rows)

    def forget(self, keys: Sequence[int]) -> None:
        self._lookup.forget(keys)
        self._model.forget(keys)
