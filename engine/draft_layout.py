"""Where everything lies in the control block of a draft buffer, the same for both transports and both sides.

Owns the words, the records and the places of the arrays behind them. Knows nothing of reading, writing or checking
(`engine.draft_block`).

    word     0 .. 15   magic, version, epoch, capacities          written once by the target
            16 .. 23   opened epoch, heartbeat (ns)               written by the draft
            24 .. 31   order: epoch, counts        32  order seq  written by the target, seq last
            40 .. 47   answer: epoch, counts, s    48  answer seq written by the draft, seq last
    arrays             order rows, feed, released, options, feature rows | answer rows, token ids, confidences
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.draft_protocol import BufferSpec

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
        ("num_feed", "<i8"),
        ("k", "<i8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("stream_key", "<u8"),
        ("attempt", "<i8"),
        ("coupled", "<i8"),
        ("top_k", "<i8"),
        ("min_p", "<f8"),
        ("floor", "<f8"),
        ("num_options", "<i8"),
    ]
)
_ANSWER_ROW = np.dtype([("num_tokens", "<i4"), ("num_confidences", "<i4"), ("has_probs", "<i4"), ("reason", "<i4")])


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """The arrays of a mapped block, in the order in which they lie there."""

    order_rows: npt.NDArray[Any]
    """[max_rows] records."""
    feed: npt.NDArray[np.int32]
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
        "max_feed": spec.max_feed,
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
        (np.dtype(np.int32), spec.max_feed),
        (np.dtype(np.int64), spec.max_released),
        (np.dtype(np.uint8), spec.max_options),
        (np.dtype(np.int32), spec.max_feed if spec.feature_rows else 0),
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
