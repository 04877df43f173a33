"""A drafter that is always wrong and costs as much as a real one: the worst case for a pace, used by benchmarks.

Owns only the replacement of tokens. Another drafter produces the draft, so its time and memory are real.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.core.drafter import Drafter
from engine.core.step import Batch, Draft, DraftRow, Verdict


class WrongDrafter:
    """Replaces each drafted token id by another one, half a vocabulary away, as a certain (one-hot) draft.

    Args:
        drafter: produces the draft.
        vocab_size: vocabulary size of the target.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size

    def draft(self, batch: Batch) -> Draft:
        draft = self._drafter.draft(batch)
        on_device = draft.on_device
        if on_device is not None:
            token_ids = (on_device.token_ids + self._vocab_size // 2) % self._vocab_size
            on_device = replace(on_device, token_ids=token_ids)
        rows = tuple(self._replace_tokens(row) for row in draft.rows)
        return replace(draft, rows=rows, on_device=on_device)

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self._drafter.committed(batch, verdict)

    def forget(self, keys: Sequence[int]) -> None:
        self._drafter.forget(keys)

    def _replace_tokens(self, row: DraftRow) -> DraftRow:
        if row.num_tokens == 0:
            return row
        half = self._vocab_size // 2
        wrong = tuple((token + half) % self._vocab_size for token in row.token_ids)
        return replace(row, token_ids=wrong, probs=None, trials=())
