"""What the target and the draft say to each other in a step, as frozen values that check themselves.

Owns the order (which requests, which new committed tokens, how many to draft), the answer, and the capacity of the
buffer between them. Knows neither how they are laid out in memory (`engine.draft_buffer.layout`) nor who waits for
whom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import msgspec

from engine.core.step import KReason
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

MAX_OPTIONS = 1 << 18
"""Bytes of request options in one order; a request that alone needs more is not drafted for."""


_options = msgspec.msgpack.Decoder(TokenOptions)

REASONS: tuple[KReason, ...] = get_args(KReason)


@dataclass(frozen=True, slots=True)
class DraftRequestRow:
    """What the draft shall do for one request.

    Raises:
        ValueError: a value outside its range.
    """

    key: int
    """int64 number of the request."""
    start: int
    """Committed tokens sent before for this request; 0: new or restarted, forget what you had."""
    new_tokens: tuple[int, ...]
    """Committed tokens from `start` on: the last verdict's, or a chunk of a long prompt; may be empty."""
    k: int
    """Tokens to draft after the feed."""
    sampling: RowSampling
    """Of the target; a coupled one has the draft draw with the same random numbers, so that equal laws give equal
    tokens."""
    options: TokenOptions | None = None
    """Told once, with `start` 0; None where all are neutral."""
    exit_threshold: float = 0.0
    """Go on only while the product of the confidences so far is at least this."""
    feature_rows: tuple[int, ...] = ()
    """Per fed token, the row of the buffer's features that holds those of the position before it; -1 where there are
    none (any more). Empty where the draft reads no features."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        if self.start < 0 or self.k < 0 or not 0 <= sampling.stream_key < 2**64:
            raise ValueError(f"order row {self.key}: start {self.start}, k {self.k} or stream key out of range")
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0 and 0 < sampling.top_p <= 1):
            raise ValueError(
                f"order row {self.key}: temperature {sampling.temperature} or top_p {sampling.top_p} out of range"
            )
        if sampling.top_k < 0 or not 0 <= sampling.min_p <= 1:
            raise ValueError(f"order row {self.key}: top_k {sampling.top_k} or min_p {sampling.min_p} out of range")
        if not 0 <= self.exit_threshold <= 1:
            raise ValueError(f"order row {self.key}: floor {self.exit_threshold} is not within 0 and 1")
        if self.options is not None and self.start > 0:
            raise ValueError(f"order row {self.key}: options are told with start 0, not {self.start}")
        if self.feature_rows and len(self.feature_rows) != len(self.new_tokens):
            raise ValueError(
                f"order row {self.key}: {len(self.feature_rows)} feature rows for {len(self.new_tokens)} tokens"
            )


def encode_options(options: TokenOptions | None) -> bytes:
    """As they cross: msgpack, empty for none."""
    return b"" if options is None else msgspec.msgpack.encode(options)


def decode_options(blob: bytes) -> TokenOptions | None:
    """Raises ValueError when it is not what `encode_options` writes."""
    try:
        return _options.decode(blob) if blob else None
    except msgspec.MsgspecError as error:
        raise ValueError(f"options: {error}") from None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One step's demand, as the draft receives it."""

    epoch: int
    seq: int
    rows: tuple[DraftRequestRow, ...]
    released: tuple[int, ...]
    """Keys of requests that are over: free what they hold."""


@dataclass(frozen=True, slots=True)
class DraftResponseRow:
    """The draft for one order row.

    Raises:
        ValueError: a value outside its range.
    """

    token_ids: tuple[int, ...] = ()
    """At most k target token ids."""
    confidences: tuple[float, ...] = ()
    """Per token, the draft's probability of its most likely one; empty where a method has none."""
    has_probs: bool = False
    """Whether probs[row, :len(token_ids)] holds the law that each token was drawn from."""
    reason: KReason = "plan"

    def __post_init__(self) -> None:
        if self.confidences and len(self.confidences) != len(self.token_ids):
            raise ValueError(f"answer row: {len(self.confidences)} confidences for {len(self.token_ids)} tokens")
        if not all(0.0 <= confidence <= 1.001 for confidence in self.confidences):
            raise ValueError(f"answer row: confidences {self.confidences} not all within 0 and 1")
        if self.reason not in REASONS:
            raise ValueError(f"answer row: reason {self.reason!r} given, allowed are {', '.join(REASONS)}")


@dataclass(frozen=True, slots=True)
class DraftResponse:
    """Rows stand in the order of the demand. The probabilities stay in the buffer, until the next order."""

    epoch: int
    seq: int
    rows: tuple[DraftResponseRow, ...]
    draft_s: float
    """Seconds the draft says it computed."""
    handoff_s: float = 0.0
    """Seconds of the round trip beyond that. Filled by the target's end."""


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What the target must know of a draft, see `engine.workers.draft_worker`."""

    draft_vocab: int
    """Columns of its probabilities."""
    vocab: tuple[int, ...] | None
    """Target id of each column; None when column i is token i."""
    feature_width: int = 0
    """Numbers it reads of the target per position; 0 for a draft on tokens alone."""
