"""The control block of a draft buffer: draft requests and responses in memory that both processes map.

Owns writing and checked reading; `engine.draft_buffer.layout` has the memory layout. The block is in host memory for
both transports. A reader copies first and checks the copy, so a corrupt block raises an error and never causes an
access out of range. A writer stores the sequence word last, as one aligned 8-byte store. x86 keeps stores in order;
other CPUs rely on the barrier in the system call that rings the doorbell.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
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
    all_within,
    check_capacity,
    check_count,
    expect,
    fixed_words,
    map_arrays,
    split,
)
from engine.sampling.row_sampling import RowSampling


class DraftBlock:
    """Reads and writes the control block. Both processes use this class.

    Args:
        buffer: writable mapping of at least `block_bytes(spec)` bytes.
        spec: capacities of the buffer.
        epoch: epoch of this process.
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
        """Write the fixed words. The target does this once, before the draft maps the block."""
        for index, word in enumerate(self._fixed):
            self._words[index] = word

    def check_fixed(self) -> None:
        """Check that both processes agree on version, epoch and capacities.

        Raises:
            CorruptBlock: a fixed word has another value.
        """
        for name, found, expected in zip(self._names, self._words[: len(self._fixed)], self._fixed, strict=True):
            expect(name, found, expected)

    @property
    def opened(self) -> bool:
        """Whether the draft of this epoch has mapped the buffer."""
        return self._words[Word.OPENED] == self.epoch

    def mark_opened(self) -> None:
        """Note that the draft of this epoch has mapped the buffer."""
        self._words[Word.OPENED] = self.epoch

    def beat(self) -> None:
        """Record a heartbeat of the draft, at the current monotonic time."""
        self._words[Word.HEARTBEAT] = time.monotonic_ns()

    @property
    def silence_s(self) -> float:
        """Seconds since the draft's last heartbeat."""
        return (time.monotonic_ns() - self._words[Word.HEARTBEAT]) / 1e9

    def mark_step(self, *, runs: bool) -> None:
        """Note that the target begins a step (`runs`), or has ended one."""
        self._words[Word.IDLE_SINCE] = 0 if runs else time.monotonic_ns()

    @property
    def idle_s(self) -> float:
        """Seconds since the target's latest step; 0 during a step."""
        since = self._words[Word.IDLE_SINCE]
        return (time.monotonic_ns() - since) / 1e9 if since > 0 else 0.0

    @property
    def request_seq(self) -> int:
        """Sequence number of the latest draft request."""
        return self._words[Word.REQUEST_SEQ]

    @property
    def response_seq(self) -> int:
        """Sequence number of the latest draft request with a response."""
        return self._words[Word.RESPONSE_SEQ]

    def write_request(
        self,
        seq: int,
        rows: Sequence[DraftRequestRow],
        released: Sequence[int],
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a draft request, then its sequence number.

        Args:
            seq: number of the request.
            rows: its rows.
            released: keys of requests that have ended.
            publish: called before the sequence number is written; publishes what belongs to the request in the payload.

        Raises:
            ValueError: the request exceeds the capacities. The sequence number is not written then.
        """
        spec = self.spec
        new_tokens = np.array([token for row in rows for token in row.new_tokens], dtype=np.int64)
        encoded_options = [encode_options(row.options) for row in rows]
        options = np.frombuffer(b"".join(encoded_options), dtype=np.uint8)
        check_capacity("rows", len(rows), spec.max_rows)
        check_capacity("new tokens", len(new_tokens), spec.max_request_tokens)
        check_capacity("released keys", len(released), spec.max_released)
        check_capacity("options bytes", len(options), spec.max_options)
        check_capacity("k", max((row.k for row in rows), default=0), spec.max_k)
        if not all_within(new_tokens, spec.vocab):
            raise ValueError(f"draft request: a new token id is outside 0..{spec.vocab - 1}")
        if spec.feature_rows:
            self._write_feature_rows(rows, len(new_tokens))
        self._arrays.request_rows[: len(rows)] = [
            _request_record(row, len(encoded)) for row, encoded in zip(rows, encoded_options, strict=True)
        ]
        self._arrays.new_tokens[: len(new_tokens)] = new_tokens
        self._arrays.released[: len(released)] = released
        self._arrays.options[: len(options)] = options
        words = self._words
        words[Word.REQUEST_EPOCH] = self.epoch
        words[Word.REQUEST_ROWS] = len(rows)
        words[Word.REQUEST_TOKENS] = len(new_tokens)
        words[Word.REQUEST_RELEASED] = len(released)
        words[Word.REQUEST_OPTIONS] = len(options)
        publish()
        words[Word.REQUEST_SEQ] = seq

    def read_request(self, seq: int) -> DraftRequest:
        """Copy and check the draft request with this sequence number.

        Raises:
            CorruptBlock: a value is out of range, or the request is of another epoch or sequence number.
        """
        self.check_fixed()
        spec, words = self.spec, self._words
        expect("request seq", words[Word.REQUEST_SEQ], seq)
        expect("request epoch", words[Word.REQUEST_EPOCH], self.epoch)
        num_rows = check_count("request rows", words[Word.REQUEST_ROWS], spec.max_rows)
        num_new_tokens = check_count("new tokens", words[Word.REQUEST_TOKENS], spec.max_request_tokens)
        num_released = check_count("released keys", words[Word.REQUEST_RELEASED], spec.max_released)
        num_options = check_count("options bytes", words[Word.REQUEST_OPTIONS], spec.max_options)
        new_tokens = self._arrays.new_tokens[:num_new_tokens].copy()
        if not all_within(new_tokens, spec.vocab):
            raise CorruptBlock(f"a new token id is outside 0..{spec.vocab - 1}")
        options = self._arrays.options[:num_options].tobytes()
        records = self._arrays.request_rows[:num_rows].tolist()
        lengths = [record[2] for record in records]
        row_tokens = split(new_tokens.tolist(), lengths)
        row_features: list[tuple[int, ...]] = [()] * num_rows
        if spec.feature_rows:
            row_features = split(self._read_feature_rows(num_new_tokens), lengths)
        row_options = split(list(options), [record[-1] for record in records])
        try:
            rows = tuple(
                _request_row(record, tokens, bytes(encoded), spec.max_k, features)
                for record, tokens, encoded, features in zip(
                    records, row_tokens, row_options, row_features, strict=True
                )
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return DraftRequest(self.epoch, seq, rows, tuple(self._arrays.released[:num_released].tolist()))

    def write_response(self, request: DraftRequest, rows: Sequence[DraftResponseRow], draft_s: float) -> None:
        """Write the response to a draft request, then its sequence number.

        Raises:
            ValueError: the response does not fit the request. The sequence number is not written then.
        """
        if len(rows) != len(request.rows):
            raise ValueError(f"draft response: {len(rows)} rows given, the request has {len(request.rows)}")
        for row, request_row in zip(rows, request.rows, strict=True):
            most = max(len(row.token_ids), row.num_on_device)
            check_capacity(f"tokens for request {request_row.key}", most, request_row.k)
        token_ids = np.array([token for row in rows for token in row.token_ids], dtype=np.int64)
        if not all_within(token_ids, self.spec.vocab):
            raise ValueError(f"draft response: a token id is outside 0..{self.spec.vocab - 1}")
        confidences = [confidence for row in rows for confidence in row.confidences]
        self._arrays.response_rows[: len(rows)] = [_response_record(row) for row in rows]
        if any(row.parents for row in rows):
            parents = [parent for row in rows for parent in row.parents or (-1,) * len(row.token_ids)]
            self._arrays.parents[: len(parents)] = parents
        self._arrays.token_ids[: len(token_ids)] = token_ids
        self._arrays.confidences[: len(confidences)] = confidences
        words = self._words
        words[Word.RESPONSE_EPOCH], words[Word.RESPONSE_ROWS] = self.epoch, len(rows)
        words[Word.RESPONSE_TOKENS], words[Word.RESPONSE_CONFIDENCES] = len(token_ids), len(confidences)
        self._seconds[Word.RESPONSE_S] = draft_s
        words[Word.RESPONSE_SEQ] = request.seq

    def read_response(self, seq: int, ks: Sequence[int]) -> DraftResponse:
        """Copy and check the response to a draft request.

        Args:
            seq: sequence number of the request.
            ks: k of each of its rows.

        Raises:
            CorruptBlock: a value is out of range, or the response is of another epoch or sequence number.
        """
        self.check_fixed()
        spec, words = self.spec, self._words
        expect("response seq", words[Word.RESPONSE_SEQ], seq)
        expect("response epoch", words[Word.RESPONSE_EPOCH], self.epoch)
        expect("response rows", words[Word.RESPONSE_ROWS], len(ks))
        num_tokens = check_count("response tokens", words[Word.RESPONSE_TOKENS], sum(ks))
        num_confidences = check_count("confidences", words[Word.RESPONSE_CONFIDENCES], num_tokens)
        draft_s = self._seconds[Word.RESPONSE_S]
        if not (math.isfinite(draft_s) and draft_s >= 0):
            raise CorruptBlock(f"draft seconds are {draft_s}")
        token_ids = self._arrays.token_ids[:num_tokens].copy()
        if not all_within(token_ids, spec.vocab):
            raise CorruptBlock(f"a token id is outside 0..{spec.vocab - 1}")
        records = self._arrays.response_rows[: len(ks)].tolist()
        for record, k in zip(records, ks, strict=True):
            check_count("tokens of a row", record[0], k)
            check_count("reason", record[3], len(REASONS) - 1)
            check_count("tokens of a row on the device", record[4], k)
            check_count("parents of a row", record[5], 1)
        row_tokens = split(token_ids.tolist(), [record[0] for record in records])
        confidences = self._arrays.confidences[:num_confidences].tolist()
        row_confidences = split(confidences, [record[1] for record in records])
        row_parents: list[tuple[int, ...]] = [()] * len(records)
        if any(record[5] for record in records):
            row_parents = split(self._arrays.parents[:num_tokens].tolist(), [record[0] for record in records])
        try:
            rows = tuple(
                DraftResponseRow(
                    *(tokens, certainties, bool(record[2]), REASONS[record[3]], record[4]),
                    parents=parents if record[5] else (),
                )
                for record, tokens, certainties, parents in zip(
                    records, row_tokens, row_confidences, row_parents, strict=True
                )
            )
        except ValueError as error:
            raise CorruptBlock(str(error)) from None
        return DraftResponse(self.epoch, seq, rows, draft_s)

    def _write_feature_rows(self, rows: Sequence[DraftRequestRow], num_new_tokens: int) -> None:
        feature_rows = np.array([index for row in rows for index in row.feature_rows], dtype=np.int64)
        if len(feature_rows) != num_new_tokens or not all_within(feature_rows + 1, self.spec.feature_rows + 1):
            given = f"{len(feature_rows)} feature rows for {num_new_tokens} new tokens"
            raise ValueError(f"draft request: {given}, or not all within -1..{self.spec.feature_rows - 1}")
        self._arrays.feature_rows[:num_new_tokens] = feature_rows

    def _read_feature_rows(self, num_new_tokens: int) -> list[int]:
        feature_rows = self._arrays.feature_rows[:num_new_tokens].astype(np.int64)
        if not all_within(feature_rows + 1, self.spec.feature_rows + 1):
            raise CorruptBlock(f"a feature row is outside -1..{self.spec.feature_rows - 1}")
        return list(map(int, feature_rows))


def _request_record(row: DraftRequestRow, num_options: int) -> tuple[Any, ...]:
    """The values of one request row, in the order of its record's fields."""
    sampling = row.sampling
    sampled_as = (sampling.temperature, sampling.top_p, sampling.stream_key, sampling.attempt, sampling.coupled)
    limits = (sampling.top_k, sampling.min_p, row.exit_threshold, row.width, row.learn_from, num_options)
    return (row.key, row.start, len(row.new_tokens), row.k, *sampled_as, *limits)


def _request_row(
    record: tuple[Any, ...], new_tokens: tuple[int, ...], options: bytes, max_k: int, feature_rows: tuple[int, ...]
) -> DraftRequestRow:
    """The request row of a record.

    Raises:
        CorruptBlock: k is above the capacity.
        ValueError: another value is out of range.
    """
    key, start, _, k, temperature, top_p, stream_key, attempt, coupled, *limits = record
    top_k, min_p, exit_threshold, width, learn_from, _ = limits
    return DraftRequestRow(
        *(key, start, new_tokens, check_count("k", k, max_k)),
        RowSampling(temperature, top_p, stream_key, attempt, bool(coupled), top_k, min_p),
        exit_threshold=exit_threshold,
        width=width,
        learn_from=learn_from,
        options=decode_options(options),
        feature_rows=feature_rows,
    )


def _response_record(row: DraftResponseRow) -> tuple[int, ...]:
    """The values of one response row, in the order of its record's fields."""
    counts = (len(row.token_ids), len(row.confidences), int(row.has_probs))
    return (*counts, REASONS.index(row.reason), row.num_on_device, int(bool(row.parents)))
