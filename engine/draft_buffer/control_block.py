"""The control block of a draft buffer: where orders and answers lie in memory that both processes map.

Owns the writing and the checked reading; `engine.draft_buffer.layout` says what lies where. The same for both
transports and always in host memory. Reading copies first and checks the copy, so a peer that scribbles is an error,
never a read out of range. Each side writes the sequence word after everything it announces, as one aligned 8-byte
store. x86 keeps stores in order; other machines rely on the barrier in the system call that rings the bell.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.draft.messages import (
    REASONS,
    DraftRequest,
    DraftRequestRow,
    DraftResponse,
    DraftResponseRow,
    decode_options,
    encode_options,
)
from engine.draft_buffer.layout import (
    NUM_WORDS,
    BufferSpec,
    CorruptBlock,
    Word,
    check_capacity,
    count,
    expect,
    fixed_words,
    map_arrays,
    split,
    within,
)
from engine.sampling.row_sampling import RowSampling


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
        words = memoryview(buffer)[: 8 * NUM_WORDS]
        self._words = words.cast("q")
        self._seconds = words.cast("d")
        self._arrays = map_arrays(buffer, spec)
        self._names, self._fixed = zip(*fixed_words(spec, epoch).items(), strict=True)

    def initialize(self) -> None:
        """Write the fixed words; done once by the target, before anybody maps the block."""
        for index, word in enumerate(self._fixed):
            self._words[index] = word

    def check_fixed(self) -> None:
        """Whether both sides mean the same block.

        Raises:
            CorruptBlock: magic, version, epoch or capacities are not ours.
        """
        for name, found, expected in zip(self._names, self._words[: len(self._fixed)], self._fixed, strict=True):
            expect(name, found, expected)

    @property
    def opened(self) -> bool:
        """Whether the draft of this epoch has mapped everything."""
        return self._words[Word.OPENED] == self.epoch

    def mark_opened(self) -> None:
        """The draft of this epoch has mapped everything."""
        self._words[Word.OPENED] = self.epoch

    def beat(self) -> None:
        """The draft is at work now."""
        self._words[Word.HEARTBEAT] = time.monotonic_ns()

    @property
    def silence_s(self) -> float:
        """Seconds since the draft's last heartbeat."""
        return (time.monotonic_ns() - self._words[Word.HEARTBEAT]) / 1e9

    @property
    def order_seq(self) -> int:
        """Number of the last order announced."""
        return self._words[Word.ORDER_SEQ]

    @property
    def answer_seq(self) -> int:
        """Number of the last order answered."""
        return self._words[Word.ANSWER_SEQ]

    def write_order(self, seq: int, rows: Sequence[DraftRequestRow], released: Sequence[int]) -> None:
        """Raises ValueError, before anything is announced, if the order exceeds the capacities."""
        spec = self.spec
        new_tokens = np.array([token for row in rows for token in row.new_tokens], dtype=np.int64)
        blobs = [encode_options(row.options) for row in rows]
        options = np.frombuffer(b"".join(blobs), dtype=np.uint8)
        check_capacity("rows", len(rows), spec.max_rows)
        check_capacity("feed tokens", len(new_tokens), spec.max_request_tokens)
        check_capacity("released keys", len(released), spec.max_released)
        check_capacity("options bytes", len(options), spec.max_options)
        check_capacity("k", max((row.k for row in rows), default=0), spec.max_k)
        if not within(new_tokens, spec.vocab):
            raise ValueError(f"order: a fed token id is outside 0..{spec.vocab - 1}")
        if spec.feature_rows:
            self._write_feature_rows(rows, len(new_tokens))
        self._arrays.order_rows[: len(rows)] = [
            (
                *(
                    r.key,
                    r.start,
                    len(r.new_tokens),
                    r.k,
                    r.sampling.temperature,
                    r.sampling.top_p,
                    r.sampling.stream_key,
                ),
                *(
                    r.sampling.attempt,
                    r.sampling.coupled,
                    r.sampling.top_k,
                    r.sampling.min_p,
                    r.exit_threshold,
                    len(blob),
                ),
            )
            for r, blob in zip(rows, blobs, strict=True)
        ]
        self._arrays.new_tokens[: len(new_tokens)] = new_tokens
        self._arrays.released[: len(released)] = released
        self._arrays.options[: len(options)] = options
        words = self._words
        words[Word.ORDER_EPOCH], words[Word.ORDER_OPTIONS] = self.epoch, len(options)
        words[Word.ORDER_ROWS], words[Word.ORDER_FEED], words[Word.ORDER_RELEASED] = (
            len(rows),
            len(new_tokens),
            len(released),
        )
        words[Word.ORDER_SEQ] = seq

    def _write_feature_rows(self, rows: Sequence[DraftRequestRow], num_new_tokens: int) -> None:
        feature_rows = np.array([place for row in rows for place in row.feature_rows], dtype=np.int64)
        if len(feature_rows) != num_new_tokens or not within(feature_rows + 1, self.spec.feature_rows + 1):
            raise ValueError(
                f"order: {len(feature_rows)} feature rows for {num_new_tokens} fed tokens, or not within "
                f"-1..{self.spec.feature_rows - 1}"
            )
        self._arrays.feature_rows[:num_new_tokens] = feature_rows

    def _read_feature_rows(self, num_new_tokens: int) -> list[int]:
        feature_rows = self._arrays.feature_rows[:num_new_tokens].astype(np.int64)
        if not within(feature_rows + 1, self.spec.feature_rows + 1):
            raise CorruptBlock(f"a feature row is outside -1..{self.spec.feature_rows - 1}")
        places: list[int] = feature_rows.tolist()
        return places

    def read_order(self, seq: int) -> DraftRequest:
        """The order announced as `seq`.

        Raises:
            CorruptBlock: see there.
        """
        self.check_fixed()
        spec, words = self.spec, self._words
        expect("order seq", words[Word.ORDER_SEQ], seq)
        expect("order epoch", words[Word.ORDER_EPOCH], self.epoch)
        num_rows = count("order rows", words[Word.ORDER_ROWS], spec.max_rows)
        num_new_tokens = count("feed tokens", words[Word.ORDER_FEED], spec.max_request_tokens)
        num_released = count("released keys", words[Word.ORDER_RELEASED], spec.max_released)
        new_tokens = self._arrays.new_tokens[:num_new_tokens].copy()
        if not within(new_tokens, spec.vocab):
            raise CorruptBlock(f"a fed token id is outside 0..{spec.vocab - 1}")
        options = self._arrays.options[: count("options bytes", words[Word.ORDER_OPTIONS], spec.max_options)].tobytes()
        raw_rows = self._arrays.order_rows[:num_rows].tolist()
        feeds = split(new_tokens.tolist(), [row[2] for row in raw_rows])
        places = (
            split(self._read_feature_rows(num_new_tokens), [row[2] for row in raw_rows]) if spec.feature_rows else ()
        )
        blobs = split(list(options), [row[-1] for row in raw_rows])
        try:
            rows = tuple(
                _order_row(raw, part, bytes(blob), spec.max_k, place)
                for raw, part, blob, place in zip(raw_rows, feeds, blobs, places or [()] * num_rows, strict=True)
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return DraftRequest(self.epoch, seq, rows, tuple(self._arrays.released[:num_released].tolist()))

    def write_answer(self, order: DraftRequest, rows: Sequence[DraftResponseRow], draft_s: float) -> None:
        """Raises ValueError, before anything is announced, if the answer does not fit the order."""
        if len(rows) != len(order.rows):
            raise ValueError(f"answer: {len(rows)} rows given, the order has {len(order.rows)}")
        for row, asked in zip(rows, order.rows, strict=True):
            check_capacity(f"tokens for request {asked.key}", len(row.token_ids), asked.k)
        token_ids = np.array([token for row in rows for token in row.token_ids], dtype=np.int64)
        if not within(token_ids, self.spec.vocab):
            raise ValueError(f"answer: a token id is outside 0..{self.spec.vocab - 1}")
        confidences = [confidence for row in rows for confidence in row.confidences]
        self._arrays.answer_rows[: len(rows)] = [
            (len(r.token_ids), len(r.confidences), r.has_probs, REASONS.index(r.reason)) for r in rows
        ]
        self._arrays.token_ids[: len(token_ids)] = token_ids
        self._arrays.confidences[: len(confidences)] = confidences
        words = self._words
        words[Word.ANSWER_EPOCH], words[Word.ANSWER_ROWS] = self.epoch, len(rows)
        words[Word.ANSWER_TOKENS], words[Word.ANSWER_CONFIDENCES] = len(token_ids), len(confidences)
        self._seconds[Word.ANSWER_S] = draft_s
        words[Word.ANSWER_SEQ] = order.seq

    def read_answer(self, seq: int, ks: Sequence[int]) -> DraftResponse:
        """The answer to order `seq`, whose rows asked for `ks` tokens.

        Raises:
            CorruptBlock: see there.
        """
        self.check_fixed()
        spec, words = self.spec, self._words
        expect("answer seq", words[Word.ANSWER_SEQ], seq)
        expect("answer epoch", words[Word.ANSWER_EPOCH], self.epoch)
        expect("answer rows", words[Word.ANSWER_ROWS], len(ks))
        num_tokens = count("answer tokens", words[Word.ANSWER_TOKENS], sum(ks))
        num_confidences = count("confidences", words[Word.ANSWER_CONFIDENCES], num_tokens)
        draft_s = self._seconds[Word.ANSWER_S]
        if not (math.isfinite(draft_s) and draft_s >= 0):
            raise CorruptBlock(f"draft seconds are {draft_s}")
        token_ids = self._arrays.token_ids[:num_tokens].copy()
        if not within(token_ids, spec.vocab):
            raise CorruptBlock(f"a token id is outside 0..{spec.vocab - 1}")
        raw_rows = self._arrays.answer_rows[: len(ks)].tolist()
        for row, k in zip(raw_rows, ks, strict=True):
            count("tokens of a row", row[0], k)
            count("reason", row[3], len(REASONS) - 1)
        parts = split(token_ids.tolist(), [row[0] for row in raw_rows])
        certainties = split(self._arrays.confidences[:num_confidences].tolist(), [row[1] for row in raw_rows])
        try:
            rows = tuple(
                DraftResponseRow(part, certainty, bool(row[2]), REASONS[row[3]])
                for row, part, certainty in zip(raw_rows, parts, certainties, strict=True)
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return DraftResponse(self.epoch, seq, rows, draft_s)


def _order_row(
    raw: tuple[Any, ...], new_tokens: tuple[int, ...], blob: bytes, max_k: int, feature_rows: tuple[int, ...]
) -> DraftRequestRow:
    """Raises ValueError or CorruptBlock."""
    key, start, _, k, temperature, top_p, stream, attempt, coupled, top_k, min_p, exit_threshold, _ = raw
    return DraftRequestRow(
        *(key, start, new_tokens, count("k", k, max_k)),
        RowSampling(temperature, top_p, stream, attempt, bool(coupled), top_k, min_p),
        exit_threshold=exit_threshold,
        options=decode_options(blob),
        feature_rows=feature_rows,
    )
