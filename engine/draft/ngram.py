"""Prompt lookup: what followed the same few tokens earlier in this request is drafted again (Saxena 2023).

Owns an index from n-grams to where they were last followed by something, per request, extended by committed tokens
only. Knows no model; each draft is certain (q is one-hot).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.drafter import empty_rows
from engine.core.pacing import MAX_MATCH_LEN, match_class
from engine.core.step import Batch, Draft, DraftRow, Verdict


class _Index:
    """Where each n-gram of one token sequence last ended, other than at the very end."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # tokens[:_indexed] are in the index as continuations

    def lookup(self, tokens: list[int], k: int) -> tuple[tuple[int, ...], int]:
        """Up to k tokens that followed the longest matching suffix, latest occurrence first, and how many matched."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)
        for size in reversed(self._sizes):
            if size <= len(tokens) and (found := self._ends.get(tuple(tokens[-size:]))) is not None:
                return tuple(tokens[found : found + k]), _match_len(tokens, found, size)
        return (), 0


def _match_len(tokens: list[int], found: int, known: int) -> int:
    """How many tokens before `found` are those at the end, from `known` that are up to MAX_MATCH_LEN."""
    while known < min(MAX_MATCH_LEN, found) and tokens[found - known - 1] == tokens[-known - 1]:
        known += 1
    return known


class NgramDrafter:
    """Method `ngram`.

    Args:
        min_size: shortest suffix that is matched, tokens.
        max_size: longest suffix that is matched, tokens.
    """

    def __init__(self, *, min_size: int, max_size: int) -> None:
        self._sizes = range(min_size, max_size + 1)
        self._index: dict[int, _Index] = {}

    def draft(self, batch: Batch) -> Draft:
        rows = empty_rows(batch)
        for row, span in enumerate(batch.spans):
            if (most := span.max_lookup_k) > 0:
                index = self._index.setdefault(span.request.key, _Index(self._sizes))
                found, match_len = index.lookup(span.request.tokens, most)
                if span.k_by_match is not None:
                    found = found[: span.k_by_match[match_class(match_len)]]
                reason = span.reason if found else "no_match"
                rows[row] = DraftRow(token_ids=found, reason=reason, match_len=match_len)
        return Draft(tuple(rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        """The index of a request reads its tokens itself when it is asked again."""
        del batch, verdict

    def forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._index.pop(key, None)
