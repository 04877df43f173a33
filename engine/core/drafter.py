"""The one interface of all drafting methods, and the method that drafts nothing.

A drafter sees the batch and answers with at most span.k tokens per span. It never changes a request, and whether it
drafts a position may depend on the tokens before it and on its own distribution there, never on the token it drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.step import Batch, Draft, DraftRow


class Drafter(Protocol):
    """Phase two of the step."""

    def draft(self, batch: Batch) -> Draft:
        """Draft for each span with k > 0; the other spans get an empty row with the span's own reason."""
        ...

    def forget(self, keys: Sequence[int]) -> None:
        """These requests are gone; free what is kept for them."""
        ...


def empty_rows(batch: Batch) -> list[DraftRow]:
    """No drafts, each with the reason the scheduler gave."""
    return [DraftRow(reason=span.reason) for span in batch.spans]


class NoDrafter:
    """Method `none`."""

    def draft(self, batch: Batch) -> Draft:
        return Draft(tuple(empty_rows(batch)))

    def forget(self, keys: Sequence[int]) -> None:
        """Nothing is kept."""
        del keys
