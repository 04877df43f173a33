"""A draft that is never right, at the price of one that tries: the worst case a pace has to survive, for benchmarks.

Owns nothing but the swap of tokens; another method drafts, so that time and memory are real.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.core.drafter import Drafter
from engine.core.step import Batch, Draft, DraftRow, Verdict


class WrongDrafter:
    """Replaces each drafted token by a far neighbour, as if it were certain.

    Args:
        inner: the method that drafts.
        vocab_size: of the target; its ids are below.
    """

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.inner = inner
        self._vocab_size = vocab_size

    def draft(self, batch: Batch) -> Draft:
        draft = self.inner.draft(batch)
        return replace(draft, rows=tuple(self._swapped(row) for row in draft.rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self.inner.committed(batch, verdict)

    def forget(self, keys: Sequence[int]) -> None:
        self.inner.forget(keys)

    def _swapped(self, row: DraftRow) -> DraftRow:
        if not row.token_ids:
            return row
        half = self._vocab_size // 2
        return replace(row, token_ids=tuple((token + half) % self._vocab_size for token in row.token_ids), probs=None)
