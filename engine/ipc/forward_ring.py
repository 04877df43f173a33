"""The ring of step plans in shared memory: where a plan lies, how it is written, how it is read and checked.

Owns the layout. Knows neither processes nor waiting (`engine.ipc.forward_broadcast`).

    words    0 .. 7 magic, version, capacities | 16 sent | 24, 32, ... read, one cache line per receiver
    slots    [num_slots] of: 8 words (seq, kind, step, counts), then the plan's arrays as int32, end to end
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core.step import ForwardInput
from engine.errors import ConfigError, ShardDown

RING_VERSION = 1
_MAGIC = int.from_bytes(b"paceplan", "little")
_SENT, _READ, _LINE = 16, 24, 8
_KIND_PLAN, _KIND_END = 1, 2
_SLOT_WORDS = 8


@dataclass(frozen=True, slots=True)
class ForwardRingSpec:
    """Capacity of the ring.

    Raises:
        ConfigError: a size below 1.
    """

    max_rows: int
    """Rows of one forward."""
    max_spans: int
    max_blocks_per_span: int
    num_slots: int = 4
    """Steps that shard 0 may be ahead of the slowest shard."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ConfigError(f"plan ring {item.name}: {getattr(self, item.name)} given, allowed is 1 or more")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a whole number of cache lines."""
        num_values = 4 * self.max_rows + self.max_spans * (2 + self.max_blocks_per_span)
        return 8 * _SLOT_WORDS + -(-4 * num_values // 64) * 64


class ForwardRing:
    """The mapped memory: the words of both sides, and the slots."""

    def __init__(self, buffer: mmap.mmap, spec: ForwardRingSpec, num_receivers: int) -> None:
        self._spec = spec
        start = _header_bytes(num_receivers)
        self._words = memoryview(buffer)[:start].cast("q")
        self._fixed = [_MAGIC, RING_VERSION, spec.max_rows, spec.max_spans, spec.max_blocks_per_span, spec.num_slots]
        slots = [start + index * spec.slot_bytes for index in range(spec.num_slots)]
        self._slot_words = [memoryview(buffer)[at : at + 8 * _SLOT_WORDS].cast("q") for at in slots]
        self._values: list[npt.NDArray[np.int32]] = [
            np.frombuffer(buffer, np.int32, spec.slot_bytes // 4 - 2 * _SLOT_WORDS, at + 8 * _SLOT_WORDS)
            for at in slots
        ]

    def initialize(self) -> None:
        """Write the fixed words; done once by the sender, before anybody maps the ring."""
        for index, word in enumerate(self._fixed):
            self._words[index] = word

    def is_ours(self) -> bool:
        """Whether magic, version and capacities are those this side expects."""
        return self._words[: len(self._fixed)].tolist() == self._fixed

    @property
    def sent(self) -> int:
        """Number of the last slot announced."""
        return self._words[_SENT]

    def num_read(self, receiver: int) -> int:
        """Number of the last slot that a receiver, from 0, has copied out."""
        return self._words[_READ + receiver * _LINE]

    def mark_read(self, receiver: int, seq: int) -> None:
        """A receiver, from 0, has copied this slot out."""
        self._words[_READ + receiver * _LINE] = seq

    def check(self, forward_input: ForwardInput) -> None:
        """Raises ValueError if the plan exceeds the ring's capacities or does not hang together."""
        spec = self._spec
        num_spans, width = forward_input.block_tables.shape
        for name, given, allowed in (
            ("rows", len(forward_input.token_ids), spec.max_rows),
            ("logit rows", len(forward_input.logit_rows), spec.max_rows),
            ("spans", num_spans, spec.max_spans),
            ("blocks per span", width, spec.max_blocks_per_span),
        ):
            if given > allowed:
                raise ValueError(f"step plan {name}: {given} given, allowed are {allowed}")
        lengths = [part.size for part in _arrays(forward_input)]
        if lengths[:5] != [len(forward_input.token_ids)] * 3 + [num_spans] * 2:
            raise ValueError(f"step plan: arrays of lengths {lengths} do not belong together")
        if any(part.dtype != np.int32 for part in _arrays(forward_input)):
            raise ValueError("step plan: every array must be of dtype int32")

    def write(self, seq: int, step_id: int, forward_input: ForwardInput | None) -> None:
        """Fill the slot of `seq` and announce it; None says that no more will come."""
        index = seq % self._spec.num_slots
        words = self._slot_words[index]
        counts = (0, 0, 0, 0)
        if forward_input is not None:
            counts = (*forward_input.block_tables.shape, len(forward_input.token_ids), len(forward_input.logit_rows))
            values, end = self._values[index], 0
            for part in _arrays(forward_input):
                start, end = end, end + part.size
                values[start:end] = part.reshape(-1)
        words[1], words[2] = _KIND_END if forward_input is None else _KIND_PLAN, step_id
        for place, count in enumerate(counts, start=3):
            words[place] = count
        words[0] = seq
        # Last, and one aligned 8-byte store: whoever sees the new number sees the slot (see
        # `draft_buffer.control_block`).
        self._words[_SENT] = seq

    def read(self, seq: int) -> tuple[int, ForwardInput | None]:
        """Copy the slot of `seq` out. Raises ShardDown if it cannot be what a healthy sender wrote."""
        index = seq % self._spec.num_slots
        found, kind, step_id, num_spans, width, num_rows, num_logits, _ = self._slot_words[index].tolist()
        if not self.is_ours() or found != seq or kind not in (_KIND_PLAN, _KIND_END):
            raise ShardDown(f"step plan {seq} is corrupt: slot holds number {found}, kind {kind}")
        if kind == _KIND_END:
            return step_id, None
        spec = self._spec
        bounds = (spec.max_spans, spec.max_blocks_per_span, spec.max_rows, spec.max_rows)
        counts = (num_spans, width, num_rows, num_logits)
        if not all(0 <= count <= bound for count, bound in zip(counts, bounds, strict=True)):
            raise ShardDown(f"step plan {seq} is corrupt: counts {counts}, allowed are up to {bounds}")
        sizes = [num_rows, num_rows, num_rows, num_spans, num_spans, num_spans * width, num_logits]
        values = self._values[index][: sum(sizes)].copy()
        parts = np.split(values, np.cumsum(sizes)[:-1])
        parts[5] = parts[5].reshape(num_spans, width)
        return step_id, ForwardInput(*parts)


def _header_bytes(num_receivers: int) -> int:
    return 8 * (_READ + _LINE * num_receivers)


def ring_bytes(spec: ForwardRingSpec, num_receivers: int) -> int:
    """Bytes of the memory that all shards map."""
    return _header_bytes(num_receivers) + spec.num_slots * spec.slot_bytes


def _arrays(forward_input: ForwardInput) -> tuple[npt.NDArray[Any], ...]:
    """In the order of ForwardPlan's fields."""
    return (
        forward_input.token_ids,
        forward_input.positions,
        forward_input.slots,
        forward_input.q_lens,
        forward_input.kv_lens,
        forward_input.block_tables,
        forward_input.logit_rows,
    )
