"""The control block of a draft buffer: where orders and answers lie in memory that both processes map.

Owns the layout, the writing and the checked reading. The same for both transports and always in host memory:

    word     0 .. 15   magic, version, epoch, capacities          written once by the target
            16 .. 23   opened epoch, heartbeat (ns)               written by the draft
            24 .. 31   order: epoch, counts        32  order seq  written by the target, seq last
            40 .. 47   answer: epoch, counts, s    48  answer seq written by the draft, seq last
    arrays             order rows, feed, released | answer rows, token ids, confidences

Reading copies first and checks the copy, so a peer that scribbles is an error, never a read out of range.
Each side writes the sequence word after everything it announces, as one aligned 8-byte store. x86 keeps stores in
order; other machines rely on the barrier in the system call that rings the bell.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.draft_protocol import REASONS, Answer, AnswerRow, BufferSpec, Order, OrderRow

PROTOCOL_VERSION = 1
_MAGIC = int.from_bytes(b"pacedraf", "little")
_OPENED, _HEARTBEAT = 16, 17
_ORDER_EPOCH, _ORDER_ROWS, _ORDER_FEED, _ORDER_RELEASED, _ORDER_SEQ = 24, 25, 26, 27, 32
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
    ]
)
_ANSWER_ROW = np.dtype([("num_tokens", "<i4"), ("num_confidences", "<i4"), ("has_probs", "<i4"), ("reason", "<i4")])


_T = TypeVar("_T")


class CorruptBlock(Exception):
    """The block holds what no healthy peer writes, or belongs to another epoch."""


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
        self._order_rows, self._feed, self._released, self._answer_rows, self._token_ids, self._confidences = arrays
        capacities = (spec.max_rows, spec.max_k, spec.max_feed, spec.max_released, spec.draft_vocab, spec.vocab)
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
                "draft_vocab",
                "vocab",
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
        _check_capacity("rows", len(rows), spec.max_rows)
        _check_capacity("feed tokens", len(feed), spec.max_feed)
        _check_capacity("released keys", len(released), spec.max_released)
        _check_capacity("k", max((row.k for row in rows), default=0), spec.max_k)
        if not _within(feed, spec.vocab):
            raise ValueError(f"order: a fed token id is outside 0..{spec.vocab - 1}")
        self._order_rows[: len(rows)] = [
            (r.key, r.start, len(r.feed), r.k, r.temperature, r.top_p, r.stream_key, r.attempt, r.coupled) for r in rows
        ]
        self._feed[: len(feed)] = feed
        self._released[: len(released)] = released
        words = self._words
        words[_ORDER_EPOCH] = self.epoch
        words[_ORDER_ROWS], words[_ORDER_FEED], words[_ORDER_RELEASED] = len(rows), len(feed), len(released)
        words[_ORDER_SEQ] = seq

    def read_order(self, seq: int) -> Order:
        """The order announced as `seq`.

        Raises:
            CorruptBlock: see there.
        """
        self.check_fixed()
        spec, words = self.spec, self._words
        _expect("order seq", words[_ORDER_SEQ], seq)
        _expect("order epoch", words[_ORDER_EPOCH], self.epoch)
        num_rows = _count("order rows", words[_ORDER_ROWS], spec.max_rows)
        num_feed = _count("feed tokens", words[_ORDER_FEED], spec.max_feed)
        num_released = _count("released keys", words[_ORDER_RELEASED], spec.max_released)
        feed = self._feed[:num_feed].copy()
        if not _within(feed, spec.vocab):
            raise CorruptBlock(f"a fed token id is outside 0..{spec.vocab - 1}")
        raw_rows = self._order_rows[:num_rows].tolist()
        feeds = _split(feed.tolist(), [row[2] for row in raw_rows])
        try:
            rows = tuple(
                OrderRow(
                    key, start, part, _count("k", k, spec.max_k), temperature, top_p, stream, attempt, bool(coupled)
                )
                for (key, start, _, k, temperature, top_p, stream, attempt, coupled), part in zip(
                    raw_rows, feeds, strict=True
                )
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return Order(self.epoch, seq, rows, tuple(self._released[:num_released].tolist()))

    def write_answer(self, order: Order, rows: Sequence[AnswerRow], draft_s: float) -> None:
        """Raises ValueError, before anything is announced, if the answer does not fit the order."""
        if len(rows) != len(order.rows):
            raise ValueError(f"answer: {len(rows)} rows given, the order has {len(order.rows)}")
        for row, asked in zip(rows, order.rows, strict=True):
            _check_capacity(f"tokens for request {asked.key}", len(row.token_ids), asked.k)
        token_ids = np.array([token for row in rows for token in row.token_ids], dtype=np.int64)
        if not _within(token_ids, self.spec.vocab):
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
        _expect("answer seq", words[_ANSWER_SEQ], seq)
        _expect("answer epoch", words[_ANSWER_EPOCH], self.epoch)
        _expect("answer rows", words[_ANSWER_ROWS], len(ks))
        num_tokens = _count("answer tokens", words[_ANSWER_TOKENS], sum(ks))
        num_confidences = _count("confidences", words[_ANSWER_CONFIDENCES], num_tokens)
        draft_s = self._seconds[_ANSWER_S]
        if not (math.isfinite(draft_s) and draft_s >= 0):
            raise CorruptBlock(f"draft seconds are {draft_s}")
        token_ids = self._token_ids[:num_tokens].copy()
        if not _within(token_ids, spec.vocab):
            raise CorruptBlock(f"a token id is outside 0..{spec.vocab - 1}")
        raw_rows = self._answer_rows[: len(ks)].tolist()
        for row, k in zip(raw_rows, ks, strict=True):
            _count("tokens of a row", row[0], k)
            _count("reason", row[3], len(REASONS) - 1)
        parts = _split(token_ids.tolist(), [row[0] for row in raw_rows])
        certainties = _split(self._confidences[:num_confidences].tolist(), [row[1] for row in raw_rows])
        try:
            rows = tuple(
                AnswerRow(part, certainty, bool(row[2]), REASONS[row[3]])
                for row, part, certainty in zip(raw_rows, parts, certainties, strict=True)
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return Answer(self.epoch, seq, rows, draft_s)


def _place(spec: BufferSpec) -> list[tuple[np.dtype[np.generic], int, int]]:
    """dtype, first and last byte of each array, one after the other on cache lines; the last end is rounded up too."""
    shapes: list[tuple[np.dtype[np.generic], int]] = [
        (_ORDER_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_feed),
        (np.dtype(np.int64), spec.max_released),
        (_ANSWER_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_rows * spec.max_k),
        (np.dtype(np.float64), spec.max_rows * spec.max_k),
    ]
    placed = []
    start = 8 * _NUM_WORDS
    for dtype, count in shapes:
        end = start + dtype.itemsize * count
        placed.append((dtype, start, end))
        start = -(-end // _ALIGN) * _ALIGN
    return placed


def _check_capacity(what: str, given: int, allowed: int) -> None:
    if given > allowed:
        raise ValueError(f"{what}: {given} given, allowed are {allowed}")


def _count(what: str, found: int, most: int) -> int:
    if not 0 <= found <= most:
        raise CorruptBlock(f"{what}: {found} found, allowed are 0..{most}")
    return found


def _expect(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise CorruptBlock(f"{what} is {found}, expected {expected}")


def _within(token_ids: npt.NDArray[np.integer], vocab: int) -> bool:
    return token_ids.size == 0 or (int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab)


def _split(flat: list[_T], lengths: list[int]) -> list[tuple[_T, ...]]:
    """Cut `flat` into consecutive parts; the lengths must be sane and use it up."""
    if any(length < 0 for length in lengths) or sum(lengths) != len(flat):
        raise CorruptBlock(f"rows claim {sum(lengths)} values of {len(flat)}")
    ends = list(accumulate(lengths))
    return [tuple(flat[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
