"""Jump-forward drafting: tokens that a grammar forces, such as field names, brackets and the rest of a word.

Owns no state: the grammar matcher belongs to the request's logits processor. The drafts are certain (q is one-hot).
Where one text has several tokenizations the draft is a guess, and verification keeps the output exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.drafter import empty_rows
from engine.core.step import Batch, Draft, DraftRow, Span, Verdict


class GrammarDrafter:
    """Drafts the tokens that a request's grammar leaves no choice about, up to the span's `max_lookup_k`."""

    def draft(self, batch: Batch) -> Draft:
        rows = empty_rows(batch)
        for index, span in enumerate(batch.spans):
            if tokens := _forced_tokens(span):
                rows[index] = DraftRow(token_ids=tokens, reason=span.reason)
        return Draft(tuple(rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        """Keeps nothing per step."""
        del batch, verdict

    def forget(self, keys: Sequence[int]) -> None:
        """Keeps nothing per request."""
        del keys


def _forced_tokens(span: Span) -> tuple[int, ...]:
    logits_processor = span.request.logits_processor
    if span.max_lookup_k == 0 or logits_processor is None or logits_processor.matcher is None:
        return ()
    logits_processor.follow(span.request.tokens)
    return logits_processor.matcher.foreseen(span.max_lookup_k)
