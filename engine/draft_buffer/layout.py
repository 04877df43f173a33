"""Where everything lies in the control block of a draft buffer, the same for both transports and both sides.

Owns the words, the records and the places of the arrays behind them. Knows nothing of reading, writing or checking
(`engine.draft_buffer.control_block`).

    word     0 .. 15   magic, version, epoch, capacities          written once by the target
            16 .. 23   opened epoch, heartbeat (ns)               written by the draft
            24 .. 31   order: epoch, counts        32  order seq  written by the target, seq last
            40 .. 47   answer: epoch, counts, s    48  answer seq written by the draft, seq last
    arrays             order rows, feed, released, options, feature rows | answer rows, token ids, confidences
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.draft.messages import MAX_OPTIONS
from engine.errors import ConfigError

PROTOCOL_VERSION = 4

NUM_WORDS = 64

_MAGIC = int.from_bytes(b"pacedraf", "little")

_ALIGN = 64


class Word:
    """Indices of the words that change."""

    OPENED = 16
    HEARTBEAT = 17
    ORDER_EPOCH = 24
    ORDER_ROWS = 25
    ORDER_FEED = 26
    ORDER_RELEASED = 27
    ORDER_OPTIONS = 28
    ORDER_SEQ = 32
    ANSWER_EPOCH = 40
    ANSWER_ROWS = 41
    ANSWER_TOKENS = 42
    ANSWER_CONFIDENCES = 43
    ANSWER_S = 44
    """The one float64."""
    ANSWER_SEQ = 48


_ORDER_ROW = np.dtype(
    [
        ("key", "<i8"),
        ("start", "<i8"),
        ("num_new_tokens", "<i8"),
        ("k", "<i8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("stream_key", "<u8"),
        ("attempt", "<i8"),
        ("coupled", "<i8"),
        ("top_k", "<i8"),
        ("min_p", "<f8"),
        ("exit_threshold", "<f8"),
        ("num_options", "<i8"),
    ]
)

_ANSWER_ROW = np.dtype([("num_tokens", "<i4"), ("num_confidences", "<i4"), ("has_probs", "<i4"), ("reason", "<i4")])


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """The arrays of a mapped block, in the order in which they lie there."""

    order_rows: npt.NDArray[Any]
    """[max_rows] records."""
    new_tokens: npt.NDArray[np.int32]
    """[max_feed] committed tokens, row after row."""
    released: npt.NDArray[np.int64]
    """[max_released] request keys."""
    options: npt.NDArray[np.uint8]
    """[max_options] bytes, row after row."""
    feature_rows: npt.NDArray[np.int32]
    """[max_feed], one for each fed token; [0] where the draft reads no features."""
    answer_rows: npt.NDArray[Any]
    """[max_rows] records."""
    token_ids: npt.NDArray[np.int32]
    """[max_rows * max_k] drafted tokens, row after row."""
    confidences: npt.NDArray[np.float64]
    """[max_rows * max_k], likewise."""


def map_arrays(buffer: mmap.mmap, spec: BufferSpec) -> BlockArrays:
    """The arrays in a mapping of at least `block_bytes(spec)` bytes."""
    return BlockArrays(
        *(np.frombuffer(buffer, dtype, count=length, offset=start) for dtype, length, start in _places(spec))
    )


def block_bytes(spec: BufferSpec) -> int:
    """Bytes of the control block."""
    dtype, length, start = _places(spec)[-1]
    return start + dtype.itemsize * length


def fixed_words(spec: BufferSpec, epoch: int) -> dict[str, int]:
    """The words from 0 on that both sides must agree on, by name."""
    return {
        "magic": _MAGIC,
        "version": PROTOCOL_VERSION,
        "epoch": epoch,
        "max_rows": spec.max_rows,
        "max_k": spec.max_k,
        "max_request_tokens": spec.max_request_tokens,
        "max_released": spec.max_released,
        "max_options": spec.max_options,
        "draft_vocab": spec.draft_vocab,
        "vocab": spec.vocab,
        "feature_rows": spec.feature_rows,
        "feature_width": spec.feature_width,
        "feature_itemsize": spec.feature_itemsize,
    }


def _places(spec: BufferSpec) -> list[tuple[np.dtype[Any], int, int]]:
    """dtype, length and first byte of each array, one after the other on cache lines."""
    arrays: list[tuple[np.dtype[Any], int]] = [
        (_ORDER_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_request_tokens),
        (np.dtype(np.int64), spec.max_released),
        (np.dtype(np.uint8), spec.max_options),
        (np.dtype(np.int32), spec.max_request_tokens if spec.feature_rows else 0),
        (_ANSWER_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_rows * spec.max_k),
        (np.dtype(np.float64), spec.max_rows * spec.max_k),
    ]
    places = []
    start = 8 * NUM_WORDS
    for dtype, length in arrays:
        places.append((dtype, length, start))
        start = -(-(start + dtype.itemsize * length) // _ALIGN) * _ALIGN
    return places


_T = TypeVar("_T")


class CorruptBlock(Exception):
    """The block holds what no healthy peer writes, or belongs to another epoch."""


def check_capacity(what: str, given: int, allowed: int) -> None:
    """Raises ValueError: more than the block can hold."""
    if given > allowed:
        raise ValueError(f"{what}: {given} given, allowed are {allowed}")


def count(what: str, found: int, most: int) -> int:
    """A count that was read. Raises CorruptBlock: out of range."""
    if not 0 <= found <= most:
        raise CorruptBlock(f"{what}: {found} found, allowed are 0..{most}")
    return found


def expect(what: str, found: int, expected: int) -> None:
    """Raises CorruptBlock: another value was read."""
    if found != expected:
        raise CorruptBlock(f"{what} is {found}, expected {expected}")


def within(token_ids: npt.NDArray[np.integer], vocab: int) -> bool:
    """Whether all are ids of the vocabulary."""
    return token_ids.size == 0 or (int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab)


def split(flat: list[_T], lengths: list[int]) -> list[tuple[_T, ...]]:
    """Cut `flat` into consecutive parts; the lengths must be sane and use it up."""
    if any(length < 0 for length in lengths) or sum(lengths) != len(flat):
        raise CorruptBlock(f"rows claim {sum(lengths)} values of {len(flat)}")
    ends = list(accumulate(lengths))
    return [tuple(flat[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Capacity of a draft buffer; both sides must agree on it.

    Raises:
        ConfigError: a size below 1.
    """

    max_rows: int
    """Requests in one order."""
    max_k: int
    """Draft tokens per request and order."""
    max_request_tokens: int
    """Committed tokens that one order can carry, all rows together."""
    max_released: int
    """Requests that one order can release."""
    draft_vocab: int
    """Columns of the probabilities."""
    target_vocab: int | None = None
    """Token ids are below this; None: below draft_vocab."""
    max_options: int = MAX_OPTIONS
    """Bytes of request options that one order can carry, all rows together."""
    feature_rows: int = 0
    """Positions whose features the buffer holds; 0: the draft reads none."""
    feature_width: int = 0
    """Numbers per position, see `engine.draft.feature_log`."""
    feature_itemsize: int = 2
    """Bytes of each: 2 is bfloat16, 4 float32."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in ("feature_rows", "feature_width") else 1
            if value is not None and value < least:
                raise ConfigError(f"buffer {item.name}: {value} given, allowed is {least} or more")
        if (self.feature_rows == 0) != (self.feature_width == 0) or self.feature_itemsize not in (2, 4):
            raise ConfigError(
                f"buffer features: {self.feature_rows} rows of {self.feature_width} numbers of "
                f"{self.feature_itemsize} bytes given, allowed are both or neither, of 2 or 4 bytes"
            )

    @property
    def vocab(self) -> int:
        """Bound of every token id."""
        return self.draft_vocab if self.target_vocab is None else self.target_vocab

    @property
    def probs_bytes(self) -> int:
        """Bytes of the probabilities, float32 [max_rows, max_k, draft_vocab]."""
        return 4 * self.max_rows * self.max_k * self.draft_vocab

    @property
    def features_offset(self) -> int:
        """First byte of the features in the payload."""
        return -(-self.probs_bytes // _ALIGN) * _ALIGN

    @property
    def payload_bytes(self) -> int:
        """Bytes of probabilities and features [feature_rows, feature_width]."""
        if self.feature_rows == 0:
            return self.probs_bytes
        return self.features_offset + self.feature_rows * self.feature_width * self.feature_itemsize
