"""What a grammar leaves no choice about is drafted without asking anybody: field names, brackets, the rest of a word.

Owns nothing but the order of precedence: where the grammar foresees tokens they are the draft, certain (q is one-hot);
elsewhere the method behind it drafts. Where one text has several spellings in tokens the draft is a good guess, and
verification keeps it exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.core.drafter import Drafter
from engine.core.step import Batch, Draft, DraftRow, Span, Verdict


class ForcedDrafter:
    """Drafts from grammars first.

    Args:
        inner: the method for everything else.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def draft(self, batch: Batch) -> Draft:
        foreseen = {index: tokens for index, span in enumerate(batch.spans) if (tokens := _foreseen(span))}
        if not foreseen:
            return self.inner.draft(batch)
        left = [replace(span, k=0) if index in foreseen else span for index, span in enumerate(batch.spans)]
        draft = self.inner.draft(replace(batch, spans=tuple(left)))
        rows = list(draft.rows)
        for index, tokens in foreseen.items():
            rows[index] = DraftRow(token_ids=tokens, reason="plan", source="grammar")
        return replace(draft, rows=tuple(rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self.inner.committed(batch, verdict)

    def forget(self, keys: Sequence[int]) -> None:
        self.inner.forget(keys)


def _foreseen(span: Span) -> tuple[int, ...]:
    logits_processor = span.request.logits_processor
    if span.max_lookup_k == 0 or logits_processor is None or logits_processor.matcher is None:
        return ()
    logits_processor.follow(span.request.tokens)
    return logits_processor.matcher.foreseen(span.max_lookup_k)


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

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self._lookup.committed(batch, verdict)
        self._model.committed(batch, verdict)

    def forget(self, keys: Sequence[int]) -> None:
        self._lookup.forget(keys)
        self._model.forget(keys)
