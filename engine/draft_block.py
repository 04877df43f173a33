"""The control block of a draft buffer: where orders and answers lie in memory that both processes map.

Owns the layout, the writing and the checked reading. The same for both transports and always in host memory:

    word     0 .. 15   magic, version, epoch, capacities          written once by the target
            16 .. 23   opened epoch, heartbeat (ns)               written by the draft
            24 .. 31   order: epoch, counts        32  order seq  written by the target, seq last
            40 .. 47   answer: epoch, counts, s    48  answer seq written by the draft, seq last
    arrays             order rows, feed, released, options, feature rows | answer rows, token ids, confidences

Reading copies first and checks the copy, so a peer that scribbles is an error, never a read out of range.
Each side writes the sequence word after everything it announces, as one aligned 8-byte store. x86 keeps stores in
order; other machines rely on the barrier in the system call that rings the bell.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.block_checks import CorruptBlock, check_capacity, count, expect, split, within
from engine.draft_protocol import (
    REASONS,
    Answer,
    AnswerRow,
    BufferSpec,
    Order,
    OrderRow,
    decode_options,
    encode_options,
)

PROTOCOL_VERSION = 4
_MAGIC = int.from_bytes(b"pacedraf", "little")
_OPENED, _HEARTBEAT = 16, 17
_ORDER_EPOCH, _ORDER_ROWS, _ORDER_FEED, _ORDER_RELEASED, _ORDER_OPTIONS, _ORDER_SEQ = 24, 25, 26, 27, 28, 32
_ANSWER_EPOCH, _ANSWER_ROWS, _ANSWER_TOKENS, _ANSWER_CONFIDENCES, _ANSWER_S, _ANSWER_SEQ = 40, 41, 42, 43, 44, 48
_NUM_WORDS = 64
_ALIGN = 64

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


def block_bytes(spec: BufferSpec) -> int:
    """Bytes of the control block."""
    return _place(spec)[-1][2]


class DraftBlock:
    """Reads and writes the control block; both sides use the same class.

    Args:
        buffer: writable mapping of at least `block_bytes(spec)` bytes.
        spec: capacities.
        epoch: the epoch this side belongs to.
    """

    def __init__(self, buffer: mmap.mmap, spec: BufferSpec, epoch: int) -> None:
        self.spec = spec
        self.epoch = epoch
        self._words = memoryview(buffer)[: 8 * _NUM_WORDS].cast("q")
        self._seconds = memoryview(buffer)[: 8 * _NUM_WORDS].cast("d")
        arrays: list[npt.NDArray[Any]] = [
            np.frombuffer(buffer, dtype, count=(end - start) // dtype.itemsize, offset=start)
            for dtype, start, end in _place(spec)
        ]
        self._order_rows, self._feed, self._released, self._options, self._feature_rows = arrays[:5]
        self._answer_rows, self._token_ids, self._confidences = arrays[5:]
        sizes = (spec.max_rows, spec.max_k, spec.max_feed, spec.max_released, spec.max_options)
        features = (spec.feature_rows, spec.feature_width, spec.feature_itemsize)
        capacities = (*sizes, spec.draft_vocab, spec.vocab, *features)
        self._fixed = [_MAGIC, PROTOCOL_VERSION, epoch, *capacities]

    def initialize(self) -> None:
        """Write the fixed words; done once by the target, before anybody maps the block."""
        for index, word in enumerate(self._fixed):
            self._words[index] = word

    def check_fixed(self) -> None:
        """
        Raises:
            CorruptBlock: magic, version, epoch or capacities are not ours.
        """
        found = self._words[: len(self._fixed)].tolist()
        if found != self._fixed:
            names = (
                "magic",
                "version",
                "epoch",
                "max_rows",
                "max_k",
                "max_feed",
                "max_released",
                "max_options",
                "draft_vocab",
                "vocab",
                "feature_rows",
                "feature_width",
                "feature_itemsize",
            )
            wrong = next(index for index, word in enumerate(found) if word != self._fixed[index])
            raise CorruptBlock(f"{names[wrong]} is {found[wrong]}, expected {self._fixed[wrong]}")

    @property
    def opened(self) -> bool:
        """Whether the draft of this epoch has mapped everything."""
        return self._words[_OPENED] == self.epoch

    def mark_opened(self) -> None:
        self._words[_OPENED] = self.epoch

    def beat(self) -> None:
        """The draft is at work now."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    @property
    def silence_s(self) -> float:
        """Seconds since the draft's last heartbeat."""
        return (time.monotonic_ns() - self._words[_HEARTBEAT]) / 1e9

    @property
    def order_seq(self) -> int:
        return self._words[_ORDER_SEQ]

    @property
    def answer_seq(self) -> int:
        return self._words[_ANSWER_SEQ]

    def write_order(self, seq: int, rows: Sequence[OrderRow], released: Sequence[int]) -> None:
        """Raises ValueError, before anything is announced, if the order exceeds the capacities."""
        spec = self.spec
        feed = np.array([token for row in rows for token in row.feed], dtype=np.int64)
        blobs = [encode_options(row.options) for row in rows]
        options = np.frombuffer(b"".join(blobs), dtype=np.uint8)
        check_capacity("rows", len(rows), spec.max_rows)
        check_capacity("feed tokens", len(feed), spec.max_feed)
        check_capacity("released keys", len(released), spec.max_released)
        check_capacity("options bytes", len(options), spec.max_options)
        check_capacity("k", max((row.k for row in rows), default=0), spec.max_k)
        if not within(feed, spec.vocab):
            raise ValueError(f"order: a fed token id is outside 0..{spec.vocab - 1}")
        if spec.feature_rows:
            self._write_feature_rows(rows, len(feed))
        self._order_rows[: len(rows)] = [
            (
                *(r.key, r.start, len(r.feed), r.k, r.temperature, r.top_p, r.stream_key, r.attempt, r.coupled),
                *(r.top_k, r.min_p, r.floor, len(blob)),
            )
            for r, blob in zip(rows, blobs, strict=True)
        ]
        self._feed[: len(feed)] = feed
        self._released[: len(released)] = released
        self._options[: len(options)] = options
        words = self._words
        words[_ORDER_EPOCH], words[_ORDER_OPTIONS] = self.epoch, len(options)
        words[_ORDER_ROWS], words[_ORDER_FEED], words[_ORDER_RELEASED] = len(rows), len(feed), len(released)
        words[_ORDER_SEQ] = seq

    def _write_feature_rows(self, rows: Sequence[OrderRow], num_feed: int) -> None:
        feature_rows = np.array([place for row in rows for place in row.feature_rows], dtype=np.int64)
        if len(feature_rows) != num_feed or not within(feature_rows + 1, self.spec.feature_rows + 1):
            raise ValueError(
                f"order: {len(feature_rows)} feature rows for {num_feed} fed tokens, or not within "
                f"-1..{self.spec.feature_rows - 1}"
            )
        self._feature_rows[:num_feed] = feature_rows

    def _read_feature_rows(self, num_feed: int) -> list[int]:
        feature_rows = self._feature_rows[:num_feed].astype(np.int64)
        if not within(feature_rows + 1, self.spec.feature_rows + 1):
            raise CorruptBlock(f"a feature row is outside -1..{self.spec.feature_rows - 1}")
        places: list[int] = feature_rows.tolist()
        return places

    def read_order(self, seq: int) -> Order:
        """The order announced as `seq`.

        Raises:
            CorruptBlock: see there.
        """
        self.check_fixed()
        spec, words = self.spec, self._words
        expect("order seq", words[_ORDER_SEQ], seq)
        expect("order epoch", words[_ORDER_EPOCH], self.epoch)
        num_rows = count("order rows", words[_ORDER_ROWS], spec.max_rows)
        num_feed = count("feed tokens", words[_ORDER_FEED], spec.max_feed)
        num_released = count("released keys", words[_ORDER_RELEASED], spec.max_released)
        feed = self._feed[:num_feed].copy()
        if not within(feed, spec.vocab):
            raise CorruptBlock(f"a fed token id is outside 0..{spec.vocab - 1}")
        options = self._options[: count("options bytes", words[_ORDER_OPTIONS], spec.max_options)].tobytes()
        raw_rows = self._order_rows[:num_rows].tolist()
        feeds = split(feed.tolist(), [row[2] for row in raw_rows])
        places = split(self._read_feature_rows(num_feed), [row[2] for row in raw_rows]) if spec.feature_rows else ()
        blobs = split(list(options), [row[-1] for row in raw_rows])
        try:
            rows = tuple(
                _order_row(raw, part, bytes(blob), spec.max_k, place)
                for raw, part, blob, place in zip(raw_rows, feeds, blobs, places or [()] * num_rows, strict=True)
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return Order(self.epoch, seq, rows, tuple(self._released[:num_released].tolist()))

    def write_answer(self, order: Order, rows: Sequence[AnswerRow], draft_s: float) -> None:
        """Raises ValueError, before anything is announced, if the answer does not fit the order."""
        if len(rows) != len(order.rows):
            raise ValueError(f"answer: {len(rows)} rows given, the order has {len(order.rows)}")
        for row, asked in zip(rows, order.rows, strict=True):
            check_capacity(f"tokens for request {asked.key}", len(row.token_ids), asked.k)
        token_ids = np.array([token for row in rows for token in row.token_ids], dtype=np.int64)
        if not within(token_ids, self.spec.vocab):
            raise ValueError(f"answer: a token id is outside 0..{self.spec.vocab - 1}")
        confidences = [confidence for row in rows for confidence in row.confidences]
        self._answer_rows[: len(rows)] = [
            (len(r.token_ids), len(r.confidences), r.has_probs, REASONS.index(r.reason)) for r in rows
        ]
        self._token_ids[: len(token_ids)] = token_ids
        self._confidences[: len(confidences)] = confidences
        words = self._words
        words[_ANSWER_EPOCH], words[_ANSWER_ROWS] = self.epoch, len(rows)
        words[_ANSWER_TOKENS], words[_ANSWER_CONFIDENCES] = len(token_ids), len(confidences)
        self._seconds[_ANSWER_S] = draft_s
        words[_ANSWER_SEQ] = order.seq

    def read_answer(self, seq: int, ks: Sequence[int]) -> Answer:
        """The answer to order `seq`, whose rows asked for `ks` tokens.

        Raises:
            CorruptBlock: see there.
        """
        self.check_fixed()
        spec, words = self.spec, self._words
        expect("answer seq", words[_ANSWER_SEQ], seq)
        expect("answer epoch", words[_ANSWER_EPOCH], self.epoch)
        expect("answer rows", words[_ANSWER_ROWS], len(ks))
        num_tokens = count("answer tokens", words[_ANSWER_TOKENS], sum(ks))
        num_confidences = count("confidences", words[_ANSWER_CONFIDENCES], num_tokens)
        draft_s = self._seconds[_ANSWER_S]
        if not (math.isfinite(draft_s) and draft_s >= 0):
            raise CorruptBlock(f"draft seconds are {draft_s}")
        token_ids = self._token_ids[:num_tokens].copy()
        if not within(token_ids, spec.vocab):
            raise CorruptBlock(f"a token id is outside 0..{spec.vocab - 1}")
        raw_rows = self._answer_rows[: len(ks)].tolist()
        for row, k in zip(raw_rows, ks, strict=True):
            count("tokens of a row", row[0], k)
            count("reason", row[3], len(REASONS) - 1)
        parts = split(token_ids.tolist(), [row[0] for row in raw_rows])
        certainties = split(self._confidences[:num_confidences].tolist(), [row[1] for row in raw_rows])
        try:
            rows = tuple(
                AnswerRow(part, certainty, bool(row[2]), REASONS[row[3]])
                for row, part, certainty in zip(raw_rows, parts, certainties, strict=True)
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return Answer(self.epoch, seq, rows, draft_s)


def _order_row(
    raw: tuple[Any, ...], feed: tuple[int, ...], blob: bytes, max_k: int, feature_rows: tuple[int, ...]
) -> OrderRow:
    """Raises ValueError or CorruptBlock."""
    key, start, _, k, temperature, top_p, stream, attempt, coupled, top_k, min_p, floor, _ = raw
    return OrderRow(
        *(key, start, feed, count("k", k, max_k), temperature, top_p, stream, attempt, bool(coupled)),
        top_k=top_k,
        min_p=min_p,
        floor=floor,
        options=decode_options(blob),
        feature_rows=feature_rows,
    )


def _place(spec: BufferSpec) -> list[tuple[np.dtype[np.generic], int, int]]:
    """dtype, first and last byte of each array, one after the other on cache lines; the last end is rounded up too."""
    shapes: list[tuple[np.dtype[np.generic], int]] = [
        (_ORDER_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_feed),
        (np.dtype(np.int64), spec.max_released),
        (np.dtype(np.uint8), spec.max_options),
        (np.dtype(np.int32), spec.max_feed if spec.feature_rows else 0),
        (_ANSWER_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_rows * spec.max_k),
        (np.dtype(np.float64), spec.max_rows * spec.max_k),
    ]
    placed = []
    start = 8 * _NUM_WORDS
    for dtype, length in shapes:
        end = start + dtype.itemsize * length
        placed.append((dtype, start, end))
        start = -(-end // _ALIGN) * _ALIGN
    return placed
