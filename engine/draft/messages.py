"""Messages between the target and its draft: what to draft in a step, and what was drafted.

Owns the values and their range checks. Knows neither their layout in memory (`engine.draft_buffer.layout`) nor the
waiting (`engine.draft_buffer.target_endpoint`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import msgspec

from engine.core.step import KReason
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling
from engine.tree import MAX_WIDTH, check_parents

MAX_OPTIONS = 1 << 18
"""Most bytes of request options in one draft request. A request whose own options need more is not drafted for."""


_options = msgspec.msgpack.Decoder(TokenOptions)

REASONS: tuple[KReason, ...] = get_args(KReason)


@dataclass(frozen=True, slots=True)
class DraftRequestRow:
    """New tokens of one request, and how many tokens to draft for it.

    Raises:
        ValueError: a value outside its range.
    """

    key: int
    """The target's number of the request, int64."""
    start: int
    """Number of committed tokens sent before. 0 starts the request, and discards any earlier state of it."""
    new_tokens: tuple[int, ...]
    """Committed tokens from position `start` on. May be a part of them where a prompt is long, and may be empty."""
    k: int
    """Number of tokens to draft after `new_tokens`."""
    sampling: RowSampling
    """Sampling of the target. Under the coupled rule the draft draws with the same random numbers, so that equal
    distributions give equal tokens."""
    options: TokenOptions | None = None
    """Penalties, stop tokens and grammar. Sent once, with `start` 0; None where all are neutral."""
    exit_threshold: float = 0.0
    """Early exit: drafting stops when the cumulative confidence falls below this. 0 never stops."""
    feature_rows: tuple[int, ...] = ()
    """Per new token, the row of the feature ring with the features of the position before it; -1 where the ring does
    not hold them. Empty for a draft that reads no features."""
    width: int = 1
    """Most children of a node, and most nodes of a level that get children; 1 drafts a chain."""
    learn_from: int = -1
    """Position of the first token that the target generated, where the draft may learn from the request, else -1."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        if self.start < 0 or self.k < 0 or not 0 <= sampling.stream_key < 2**64:
            raise ValueError(f"draft request row {self.key}: start {self.start}, k {self.k} or stream key out of range")
        if self.learn_from < -1:
            raise ValueError(f"draft request row {self.key}: learn_from {self.learn_from} is below -1")
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0 and 0 < sampling.top_p <= 1):
            raise ValueError(
                f"draft request row {self.key}: temperature {sampling.temperature} or top_p {sampling.top_p} "
                "out of range"
            )
        if sampling.top_k < 0 or not 0 <= sampling.min_p <= 1:
            raise ValueError(
                f"draft request row {self.key}: top_k {sampling.top_k} or min_p {sampling.min_p} out of range"
            )
        if not 1 <= self.width <= MAX_WIDTH:
            raise ValueError(f"draft request row {self.key}: width {self.width} is not within 1 and {MAX_WIDTH}")
        if not 0 <= self.exit_threshold <= 1:
            raise ValueError(
                f"draft request row {self.key}: exit threshold {self.exit_threshold} is not within 0 and 1"
            )
        if self.options is not None and self.start > 0:
            raise ValueError(f"draft request row {self.key}: options are sent with start 0, not {self.start}")
        if self.feature_rows and len(self.feature_rows) != len(self.new_tokens):
            raise ValueError(
                f"draft request row {self.key}: {len(self.feature_rows)} feature rows for {len(self.new_tokens)} tokens"
            )


def encode_options(options: TokenOptions | None) -> bytes:
    """Options as msgpack; empty for None."""
    return b"" if options is None else msgspec.msgpack.encode(options)


def decode_options(blob: bytes) -> TokenOptions | None:
    """Inverse of `encode_options`.

    Raises:
        ValueError: the bytes do not encode valid options.
    """
    try:
        return _options.decode(blob) if blob else None
    except msgspec.MsgspecError as error:
        raise ValueError(f"options: {error}") from None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The draft request of one step, as the draft receives it."""

    epoch: int
    seq: int
    rows: tuple[DraftRequestRow, ...]
    released: tuple[int, ...]
    """Keys of requests that have ended, so that the draft frees their state."""


@dataclass(frozen=True, slots=True)
class DraftResponseRow:
    """The draft for one row of the draft request.

    Raises:
        ValueError: a value outside its range.
    """

    token_ids: tuple[int, ...] = ()
    """At most k token ids of the target's vocabulary."""
    confidences: tuple[float, ...] = ()
    """Per token, the highest probability of the draft's distribution there; empty where the method has none."""
    has_probs: bool = False
    """Whether probs[row, :len(token_ids)] holds the distribution that each token was drawn from."""
    reason: KReason = "plan"
    """Why the draft is shorter than requested; `plan` where it is not."""
    num_on_device: int = 0
    """Number of tokens in this row of the buffer's `token_ids`, with their confidences beside them; 0 if the tokens are
    in this message. A row whose options need its tokens on the target's host has them in both places."""
    parents: tuple[int, ...] = ()
    """Parent of each token, as `DraftRow.parents`; empty for a chain, which a draft on the device always is."""

    def __post_init__(self) -> None:
        if self.confidences and len(self.confidences) != len(self.token_ids):
            raise ValueError(
                f"draft response row: {len(self.confidences)} confidences for {len(self.token_ids)} tokens"
            )
        if self.num_on_device and self.token_ids and len(self.token_ids) != self.num_on_device:
            raise ValueError(
                f"draft response row: {len(self.token_ids)} tokens in the message, {self.num_on_device} on the device"
            )
        if not all(0.0 <= confidence <= 1.001 for confidence in self.confidences):
            raise ValueError(f"draft response row: confidences {self.confidences} not all within 0 and 1")
        if self.parents and (len(self.parents) != len(self.token_ids) or self.num_on_device):
            raise ValueError(f"draft response row: {len(self.parents)} parents for {len(self.token_ids)} tokens")
        check_parents(self.parents)
        if self.reason not in REASONS:
            raise ValueError(f"draft response row: reason {self.reason!r} given, allowed are {', '.join(REASONS)}")


@dataclass(frozen=True, slots=True)
class DraftResponse:
    """The draft's response: one row per row of the request. Probabilities stay in the buffer until the next request."""

    epoch: int
    seq: int
    rows: tuple[DraftResponseRow, ...]
    draft_s: float
    """Seconds that the draft measured for its computation."""
    handoff_s: float = 0.0
    """Seconds of the round trip beyond `draft_s`. Filled by the target's endpoint."""


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What the target needs to know about a draft. Returned by `engine.workers.draft_worker.DraftWorker.load`."""

    draft_vocab: int
    """Columns of the draft's probabilities."""
    vocab: tuple[int, ...] | None
    """Target token id of each column; None when column i is token i."""
    feature_width: int = 0
    """Numbers per position that the draft reads of the target; 0 for a draft that reads tokens only."""
    positions_per_pass: int = 1
    """Tokens that one pass drafts: 1 for a chain. A parallel draft drafts at most this many."""
