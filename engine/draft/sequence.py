"""What a draft knows of one request, and one order for it on its way to an answer.

Owns which committed or drafted token has which cell of the cache, and the roll-back to what was committed. Cells follow
each other without a gap, but a token may have none: where the target's features are not to be had, the draft does
without it.

    tokens        c c c c c c | d d d d          c committed (told), d drafted by us
    next order    start ^------ c c r            two d's were accepted, r is the target's own token
    positions     kept up to where both agree (of an eagle draft: to start), then extended
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.step import KReason
from engine.draft.messages import DraftRequestRow
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling


@dataclass(slots=True, eq=False)
class DraftSequence:
    """What the draft knows of one request."""

    key: int
    first: int
    """Position of the first token that may have a cell."""
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of the token in each cell that is computed, ascending."""
    block_ids: list[int] = field(default_factory=list)
    options: TokenOptions | None = None
    logits_processor: LogitsProcessor | None = None
    """Of `options`, once its grammar is compiled."""

    @property
    def num_computed(self) -> int:
        """Tokens that have a cell."""
        return len(self.positions)

    @property
    def has_no_gap(self) -> bool:
        """Whether every token up to the last one with a cell has one, so that others may share its blocks."""
        return not self.positions or self.positions[-1] == self.first + len(self.positions) - 1

    def follow(self, start: int, new_tokens: Sequence[int], *, keeps_agreed: bool) -> None:
        """Take over committed tokens in place of what was drafted.

        Args:
            start: tokens that were committed before.
            feed: committed tokens from there on.
            keeps_agreed: whether cells of drafted tokens stay where the same tokens were committed.
        """
        stays = start
        if keeps_agreed:
            for guessed, committed in zip(self.tokens[start:], new_tokens, strict=False):
                if guessed != committed:
                    break
                stays += 1
            stays = min(stays, start + len(new_tokens) - 1)  # the last token is computed again: its outputs are needed
        if self.logits_processor is not None:
            self.logits_processor.rewind(start)
        self.tokens[start:] = new_tokens
        del self.positions[bisect_left(self.positions, stays) :]

    def unread(self) -> range:
        """Positions after the last one with a cell."""
        return range(self.positions[-1] + 1 if self.positions else self.first, len(self.tokens))


@dataclass(slots=True, eq=False)
class Drafting:
    """One order row on its way to an answer."""

    place: int
    order: DraftRequestRow
    sequence: DraftSequence
    sampling: RowSampling
    k: int
    """Tokens to draft; less than the order's when the text ends before."""
    unread: Sequence[int]
    """Positions of committed tokens that are to get a cell now."""
    places: Sequence[int]
    """Where the features before each of those are in the ring, for an architecture that reads them."""
    reason: KReason = "plan"
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    cumulative_confidence: float = 1.0
    """Product of the confidences so far."""

    @property
    def goes_on(self) -> bool:
        """Whether the next position is computed; a matter of what stands before it alone."""
        return len(self.token_ids) < self.k and self.cumulative_confidence >= self.order.exit_threshold

    @property
    def samples_from_q(self) -> bool:
        """Whether the target needs q: only under the rejection rule."""
        return not (self.sampling.greedy or self.sampling.coupled)
