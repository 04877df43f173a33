"""The interface of all drafting methods, and the method that drafts nothing.

A drafter reads the batch and drafts at most span.k tokens per span. It never changes a request. Whether it drafts a
position may depend on the tokens before that position and on the draft's distribution there, never on the token drawn
there: otherwise the output is biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.step import Batch, Draft, DraftRow, Verdict


class Drafter(Protocol):
    """Phase two of the step."""

    def draft(self, batch: Batch) -> Draft:
        """Draft for each span with k > 0.

        Returns:
            One row per span, in order. A span with k = 0 gets an empty row that repeats the span's reason.
        """
        ...

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        """Learn the outcome of a step. Called once per step, after its tokens have been appended to the requests.

        Args:
            batch: the batch of the step; `finish_reason` tells which of its requests have ended.
            verdict: what was accepted, and the target's features of the step.
        """
        ...

    def forget(self, keys: Sequence[int]) -> None:
        """Free what is kept for requests that have ended.

        Args:
            keys: `Request.key` of each.
        """
        ...


def empty_rows(batch: Batch) -> list[DraftRow]:
    """One row without tokens per span, with the reason that the scheduler gave."""
    return [DraftRow(reason=span.reason) for span in batch.spans]


class NoDrafter:
    """Method `none`."""

    def draft(self, batch: Batch) -> Draft:
        return Draft(tuple(empty_rows(batch)))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        """Do nothing: no state is kept."""
        del batch, verdict

    def forget(self, keys: Sequence[int]) -> None:
        """Do nothing: no state is kept."""
        del keys
