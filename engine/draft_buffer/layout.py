"""Memory layout of a draft buffer's control block, the same for both transports and both processes.

Owns the words, the records, the arrays behind them, and their bounds checks. Reading and writing is in
`engine.draft_buffer.control_block`.

    word     0 .. 15   magic, version, epoch, capacities                    written once by the target
            16 .. 23   opened epoch, heartbeat (ns)                         written by the draft
            24 .. 31   request: epoch, counts, idle since 32  request seq   written by the target, seq last
            40 .. 47   response: epoch, counts, seconds   48  response seq  written by the draft, seq last
    arrays             request rows, new tokens, released, options, feature rows
                       response rows, token ids, confidences, parents

    payload            probs, drafted token ids, confidences, new tokens, features; in GPU memory with CUDA IPC
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from engine.draft.messages import MAX_OPTIONS
from engine.errors import ConfigError

PROTOCOL_VERSION = 7

NUM_WORDS = 64

_MAGIC = int.from_bytes(b"pacedraf", "little")

_ALIGN = 64

_T = TypeVar("_T")

Section = Literal["probs", "token_ids", "confidences", "new_tokens", "features"]
"""Parts of the payload, in memory order."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Capacities of a draft buffer. Both processes must use the same ones.

    Raises:
        ConfigError: a size is out of range.
    """

    max_rows: int
    """Most rows of one draft request."""
    max_k: int
    """Most draft tokens per row."""
    max_request_tokens: int
    """Most committed tokens of one draft request, all rows together."""
    max_released: int
    """Most keys that one draft request can release."""
    draft_vocab: int
    """Number of columns of the probabilities."""
    target_vocab: int | None = None
    """Vocabulary size of the target, the bound of every token id; None means `draft_vocab`."""
    max_options: int = MAX_OPTIONS
    """Most bytes of request options in one draft request, all rows together."""
    feature_rows: int = 0
    """Rows of the feature ring; 0 for a draft that reads no features."""
    feature_width: int = 0
    """Numbers per feature row, see `engine.draft.feature_log`."""
    feature_itemsize: int = 2
    """Bytes per number: 2 is bfloat16, 4 is float32."""

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
        """Vocabulary size of the target: every token id is below it."""
        return self.draft_vocab if self.target_vocab is None else self.target_vocab

    @property
    def probs_bytes(self) -> int:
        """Bytes of the probabilities, float32 [max_rows, max_k, draft_vocab]."""
        return 4 * self.max_rows * self.max_k * self.draft_vocab

    def section(self, name: Section) -> tuple[int, int]:
        """Byte offset and size of a section of the payload. Sections start on cache lines."""
        sizes: dict[Section, int] = {
            "probs": self.probs_bytes,
            "token_ids": 4 * self.max_rows * self.max_k,
            "confidences": 4 * self.max_rows * self.max_k,
            "new_tokens": 4 * self.max_request_tokens,
            "features": self.feature_rows * self.feature_width * self.feature_itemsize,
        }
        start = 0
        for each, size in sizes.items():
            if each == name:
                break
            start = -(-(start + size) // _ALIGN) * _ALIGN
        return start, sizes[name]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all sections of the payload."""
        return sum(self.section("features"))


class Word:
    """Indices of the words that change during the life of a buffer."""

    OPENED = 16
    HEARTBEAT = 17
    REQUEST_EPOCH = 24
    REQUEST_ROWS = 25
    REQUEST_TOKENS = 26
    REQUEST_RELEASED = 27
    REQUEST_OPTIONS = 28
    IDLE_SINCE = 29
    """Monotonic nanoseconds at which the target ended its latest step; 0 during a step."""
    REQUEST_SEQ = 32
    RESPONSE_EPOCH = 40
    RESPONSE_ROWS = 41
    RESPONSE_TOKENS = 42
    RESPONSE_CONFIDENCES = 43
    RESPONSE_S = 44
    """The only float64 among the words."""
    RESPONSE_SEQ = 48


_REQUEST_ROW = np.dtype(
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
        ("width", "<i8"),
        ("learn_from", "<i8"),
        ("num_options", "<i8"),
    ]
)

_RESPONSE_ROW = np.dtype(
    [
        ("num_tokens", "<i4"),
        ("num_confidences", "<i4"),
        ("has_probs", "<i4"),
        ("reason", "<i4"),
        ("num_on_device", "<i4"),
        ("has_parents", "<i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """The arrays of a mapped block, in memory order."""

    request_rows: npt.NDArray[Any]
    """[max_rows] records."""
    new_tokens: npt.NDArray[np.int32]
    """[max_request_tokens] committed tokens, row after row."""
    released: npt.NDArray[np.int64]
    """[max_released] keys of requests that have ended."""
    options: npt.NDArray[np.uint8]
    """[max_options] encoded request options, row after row."""
    feature_rows: npt.NDArray[np.int32]
    """[max_request_tokens] feature row of each new token; [0] where the draft reads no features."""
    response_rows: npt.NDArray[Any]
    """[max_rows] records."""
    token_ids: npt.NDArray[np.int32]
    """[max_rows * max_k] drafted tokens, row after row."""
    confidences: npt.NDArray[np.float64]
    """[max_rows * max_k] confidences of the drafted tokens, row after row."""
    parents: npt.NDArray[np.int32]
    """[max_rows * max_k] parents of the drafted tokens, at the places of `token_ids`; read for rows with branches."""


def map_arrays(buffer: mmap.mmap, spec: BufferSpec) -> BlockArrays:
    """The arrays in a mapping of at least `block_bytes(spec)` bytes."""
    return BlockArrays(
        *(np.frombuffer(buffer, dtype, count=length, offset=start) for dtype, length, start in _array_layout(spec))
    )


def block_bytes(spec: BufferSpec) -> int:
    """Size of the control block in bytes."""
    dtype, length, start = _array_layout(spec)[-1]
    return start + dtype.itemsize * length


def fixed_words(spec: BufferSpec, epoch: int) -> dict[str, int]:
    """The words from index 0 on that both processes must agree on, by name."""
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


class CorruptBlock(Exception):
    """The block holds values that a healthy peer never writes, or belongs to another epoch."""


def check_capacity(what: str, given: int, allowed: int) -> None:
    """Check a value before it is written.

    Raises:
        ValueError: it is above the capacity.
    """
    if given > allowed:
        raise ValueError(f"{what}: {given} given, allowed are {allowed}")


def check_count(what: str, found: int, limit: int) -> int:
    """Check a count that was read, and return it.

    Raises:
        CorruptBlock: it is outside 0..limit.
    """
    if not 0 <= found <= limit:
        raise CorruptBlock(f"{what}: {found} found, allowed are 0..{limit}")
    return found


def expect(what: str, found: int, expected: int) -> None:
    """Check a value that was read.

    Raises:
        CorruptBlock: it is not the expected one.
    """
    if found != expected:
        raise CorruptBlock(f"{what} is {found}, expected {expected}")


def all_within(values: npt.NDArray[np.integer], limit: int) -> bool:
    """Whether all values are within 0..limit - 1."""
    return values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < limit)


def split(flat: list[_T], lengths: list[int]) -> list[tuple[_T, ...]]:
    """Cut `flat` into consecutive parts of these lengths.

    Raises:
        CorruptBlock: a length is negative, or the lengths do not add up to that of `flat`.
    """
    if any(length < 0 for length in lengths) or sum(lengths) != len(flat):
        raise CorruptBlock(f"rows claim {sum(lengths)} values of {len(flat)}")
    ends = list(accumulate(lengths))
    return [tuple(flat[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _array_layout(spec: BufferSpec) -> list[tuple[np.dtype[Any], int, int]]:
    """dtype, length and byte offset of each array; each array starts on a cache line."""
    arrays: list[tuple[np.dtype[Any], int]] = [
        (_REQUEST_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_request_tokens),
        (np.dtype(np.int64), spec.max_released),
        (np.dtype(np.uint8), spec.max_options),
        (np.dtype(np.int32), spec.max_request_tokens if spec.feature_rows else 0),
        (_RESPONSE_ROW, spec.max_rows),
        (np.dtype(np.int32), spec.max_rows * spec.max_k),
        (np.dtype(np.float64), spec.max_rows * spec.max_k),
        (np.dtype(np.int32), spec.max_rows * spec.max_k),
    ]
    layout = []
    start = 8 * NUM_WORDS
    for dtype, length in arrays:
        layout.append((dtype, length, start))
        start = -(-(start + dtype.itemsize * length) // _ALIGN) * _ALIGN
    return layout
