"""The draft's records: one per request it follows, and one per request it drafts for in a step.

Owns which tokens have a KV slot in the draft's cache, and the rollback to the committed tokens. KV slots of a request
are numbered without gaps, but a token may have no slot: an EAGLE draft skips a position whose target features are no
longer available.

    tokens          c c c c c c | d d d d          c committed (sent by the target), d drafted here
    next request    start ^------ c c r            two drafted tokens were accepted, r is the target's token
    positions       kept while drafted and committed tokens agree (EAGLE: up to start), then extended
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
    """The draft's state of one request."""

    key: int
    """The target's number of the request."""
    first: int
    """Position of the first token that can have a KV slot: 0, or 1 for an EAGLE draft."""
    tokens: list[int] = field(default_factory=list)
    """Committed tokens, then the tokens drafted after them."""
    positions: list[int] = field(default_factory=list)
    """Position of the token in each computed KV slot, ascending."""
    block_ids: list[int] = field(default_factory=list)
    """KV blocks of the request, in order. Written by the block pool only."""
    options: TokenOptions | None = None
    """The request's penalties, stop tokens and grammar; None where all are neutral."""
    logits_processor: LogitsProcessor | None = None
    """Applies `options`; None until their grammar is compiled."""

    @property
    def cache_salt(self) -> bytes:
        """Nothing: the draft has no adapters. An EAGLE head may share slots that were computed from the features of
        another adapter of the target, which can cost acceptance and never changes the output."""
        return b""

    @property
    def num_computed(self) -> int:
        """Number of tokens with a KV slot."""
        return len(self.positions)

    @property
    def has_no_gap(self) -> bool:
        """Whether each token up to the last slot has a slot, so that other requests can share the blocks."""
        return not self.positions or self.positions[-1] == self.first + len(self.positions) - 1

    def follow(self, start: int, new_tokens: Sequence[int], *, keeps_agreed: bool) -> None:
        """Replace drafted tokens by committed ones.

        Args:
            start: number of tokens that were committed before.
            new_tokens: committed tokens from position `start` on.
            keeps_agreed: whether drafted tokens that were accepted keep their KV slots.
        """
        keep_to = start
        if keeps_agreed:
            for drafted, committed in zip(self.tokens[start:], new_tokens, strict=False):
                if drafted != committed:
                    break
                keep_to += 1
            keep_to = min(keep_to, start + len(new_tokens) - 1)  # The last token is recomputed: its logits are needed.
        if self.logits_processor is not None:
            self.logits_processor.rewind(start)
        self.tokens[start:] = new_tokens
        del self.positions[bisect_left(self.positions, keep_to) :]

    def uncomputed(self) -> range:
        """Positions of the tokens after the last KV slot."""
        return range(self.positions[-1] + 1 if self.positions else self.first, len(self.tokens))


@dataclass(slots=True, eq=False)
class Drafting:
    """The state of one draft request row while its draft is computed."""

    row_index: int
    """Index of the row in the draft request and in the buffer's probabilities."""
    request_row: DraftRequestRow
    sequence: DraftSequence
    sampling: RowSampling
    k: int
    """Number of tokens to draft. Lowered when the grammar ends the text earlier."""
    uncomputed: Sequence[int]
    """Positions of committed tokens that get a KV slot in this step."""
    feature_rows: Sequence[int]
    """Per position in `uncomputed`, the row of the feature ring that it reads; empty without features."""
    first_new_token: int
    """Place of the request row's first new token among those of the whole draft request."""
    reason: KReason = "plan"
    token_ids: list[int] = field(default_factory=list)
    """Tokens drafted so far, as target ids."""
    parents: tuple[int, ...] = ()
    """Parent of each drafted token; empty for a chain."""
    confidences: list[float] = field(default_factory=list)
    """Per drafted token, the highest probability of the draft's distribution there; in a greedy tree its own one."""
    cumulative_confidence: float = 1.0
    """Product of `confidences`."""

    @property
    def continues(self) -> bool:
        """Whether another position is drafted. Depends on earlier positions only, which keeps the draft exact."""
        return len(self.token_ids) < self.k and self.cumulative_confidence >= self.request_row.exit_threshold

    def append(self, token: int, confidence: float) -> None:
        """Note a drafted token. The row ends after a token that its grammar does not allow, and after a stop token."""
        self.token_ids.append(token)
        self.confidences.append(confidence)
        self.cumulative_confidence *= confidence
        self.sequence.tokens.append(token)
        processor = self.sequence.logits_processor
        if processor is not None and (not processor.push(token) or processor.has_ended):
            self.k = len(self.token_ids)

    @property
    def samples_from_q(self) -> bool:
        """Whether the target needs the distribution q: only under the rejection rule."""
        return not (self.sampling.greedy or self.sampling.coupled)
